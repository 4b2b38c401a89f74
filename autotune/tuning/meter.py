"""How far counted work is: its stage, how many steps of it are done, the best so far, the time left."""

from __future__ import annotations

import math
import time


class Meter:
    """Told of work as it goes; this one counts and shows nothing.

    Attributes:
        stage: What is going on, in a few words; "" before anything is.
        steps: Of the stage; 0 where nobody knows.
        done: Steps of it that are done.
        best: The best so far, in words; "" where there is none.
    """

    def __init__(self) -> None:
        self.stage = ""
        self.steps = 0
        self.done = 0
        self.best = ""
        self._best = -math.inf
        self._began = time.monotonic()

    def begin(self, stage: str, steps: int = 0) -> None:
        """Begin a stage."""
        self.stage, self.steps, self.done, self._began = stage, steps, 0, time.monotonic()

    def step(self) -> None:
        """Count a step of the stage."""
        self.done += 1

    def better(self, value: float, words: str) -> None:
        """Take something as the best if its value is the highest so far."""
        if value > self._best:
            self._best, self.best = value, words

    def text(self) -> str:
        """Return all of it in one line, such as "timing: 7 of 24 in 14 s, 0.5 per second, 34 s left"."""
        seconds = time.monotonic() - self._began
        steps = f" {self.done} of {self.steps} in" if self.steps else ""
        line = f"{self.stage}:{steps} {seconds:.0f} s"
        if self.done and seconds > 0:
            line += f", {pace(self.done, seconds)}"
            if self.steps:
                line += f", {span(seconds / self.done * (self.steps - self.done))} left"
        return f"{line}; best {self.best}" if self.best else line


def pace(steps: int, seconds: float) -> str:
    """Return a rate in words, of slow work by the minute."""
    rate = steps / seconds
    return f"{rate:.1f} per second" if rate >= 1 else f"{60 * rate:.1f} per minute"


def span(seconds: float) -> str:
    """Return a time in words: "48 s", "12 min", "3.5 h"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
