"""Turns the numbers that processes count up in a study into the set of those that are dead."""

from __future__ import annotations

import threading
from typing import Any

from autotune.sharing.failure import StorageLost
from autotune.sharing.study import SharedStudy

BEAT_S = 5.0  # in a journal a day of beats of one process takes 3 MB
PATIENCE = 6  # own beats without a beat of another before that one counts as dead
PREFIX = "process "  # of the attribute in which a process counts
STOP_S = 1.0


class Pulse:
    """Counts up for one process, in a thread, and watches the others.

    A process is dead that began no trial and whose number stood still while the own one went up by
    ``patience``. Own successful beats are the clock: hosts need not agree on the time, a storage that stalls
    kills nobody, and a process that slept does not wake up to take everybody else for dead.

    Attributes:
        dead: Processes that have ended or are dead.
        answers: Whether the storage took the last beat; who lost it in another way sets this to False.
    """

    def __init__(self, study: SharedStudy, process: str, every_s: float, patience: int) -> None:
        self.dead: frozenset[str] = frozenset()
        self.answers = True
        self._study = study
        self._key = PREFIX + process
        self._every_s = every_s
        self._patience = patience
        self._count = 0
        self._last: dict[str, tuple[Any, int]] = {}  # number of another process, own beats it stood still
        self._heard: set[str] = set()  # processes that did something else since the own last beat
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="pulse")

    def start(self) -> None:
        """Beat once, then go on in a thread.

        Raises:
            StorageLost: The first beat failed.
        """
        self.beat()
        self._thread.start()

    def stop(self) -> None:
        """Beat no more."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(STOP_S)

    def heard(self, process: str) -> None:
        """Take a new trial of another process for a sign of life."""
        self._heard.add(process)

    def end(self) -> None:
        """Let the others know that this process has ended.

        Raises:
            StorageLost: They cannot be told.
        """
        self._study.set_attribute(self._key, None)

    def beat(self) -> None:
        """Count up, and look at the others' numbers.

        Raises:
            StorageLost: The storage does not answer.
        """
        self._count += 1
        self._study.set_attribute(self._key, self._count)
        dead = set()
        heard, self._heard = self._heard, set()
        for key, number in self._study.attributes().items():
            if not key.startswith(PREFIX) or key == self._key:
                continue
            before, still = self._last.get(key, (None, 0))
            process = key.removeprefix(PREFIX)
            still = still + 1 if number == before and process not in heard else 0
            self._last[key] = number, still
            if number is None or still >= self._patience:
                dead.add(process)
        self.dead = frozenset(dead)
        self.answers = True

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            try:
                self.beat()
            except StorageLost:
                self.answers = False
