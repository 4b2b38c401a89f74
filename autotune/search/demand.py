"""How many candidates must be under way for the GPUs of an asynchronous search to stay busy."""

from __future__ import annotations

import math

SPARE = 2  # candidates under way beyond what the means of the times ask for
FADING = 30  # the newest value of a running mean weighs at least 1 in so many
LEAST_S = 1e-6  # between two outcomes


class Demand:
    """The time of a compile over the time between two outcomes, by Little's law; old values fade.

    Attributes:
        compile_s: Seconds of compiling.
        outcome_s: Seconds from one outcome to the next.
    """

    def __init__(self) -> None:
        self.compile_s = Mean()
        self.outcome_s = Mean()
        self._last: float | None = None

    def measured(self, now: float) -> None:
        """Learn that an outcome came, at a time in seconds of any clock."""
        if self._last is not None:
            self.outcome_s.add(now - self._last)
        self._last = now

    def enough(self, queue: int) -> float:
        """Return the number beyond which another candidate would only wait; infinite while nothing is known.

        Args:
            queue: Candidates that may wait for a judge.
        """
        if not (self.compile_s.count and self.outcome_s.count):
            return math.inf
        return math.ceil(self.compile_s.value / max(self.outcome_s.value, LEAST_S)) + SPARE + queue


class Mean:
    """A running mean that forgets old values."""

    def __init__(self) -> None:
        self.count = 0
        self.value = 0.0

    def add(self, value: float) -> None:
        """Take one more value into account."""
        self.count += 1
        self.value += (value - self.value) / min(self.count, FADING)
