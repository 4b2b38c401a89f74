"""Signs of life of the processes that share a study, and which of them are dead."""

from __future__ import annotations

import threading
from typing import Any

from autotune.sharing.backend import StorageLost
from autotune.sharing.study import SharedStudy

BEAT_S = 5.0  # in a journal a day of beats of one process takes 3 MB
PATIENCE = 6  # own beats during which a living process must show a sign of life
PREFIX = "process "  # of the study attribute that holds a process's count
STOP_S = 1.0


class Pulse:
    """Increments this process's count in the study, in a thread, and watches the counts of the others.

    A process is dead if, during ``patience`` beats of this one, it began no trial and its count did not
    change. Own successful beats are the clock: hosts need not agree on the time, no process counts as dead
    because the storage stalls, and one that was suspended does not take all others for dead on resuming.

    Attributes:
        dead: Processes that have ended or are dead.
        answers: Whether the storage took the last beat; set to False by a caller whose operation failed.
    """

    def __init__(self, study: SharedStudy, process: str, every_s: float, patience: int) -> None:
        self.dead: frozenset[str] = frozenset()
        self.answers = True
        self._study = study
        self._key = PREFIX + process
        self._every_s = every_s
        self._patience = patience
        self._count = 0
        self._last: dict[str, tuple[Any, int]] = {}  # count of another process, own beats since it changed
        self._heard: set[str] = set()  # processes that began a trial since the last beat
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="pulse")

    def start(self) -> None:
        """Beat once, then start the thread.

        Raises:
            StorageLost: The first beat failed.
        """
        self.beat()
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(STOP_S)

    def heard(self, process: str) -> None:
        """Count a new trial of another process as a sign of life."""
        self._heard.add(process)

    def end(self) -> None:
        """Tell the others that this process has ended.

        Raises:
            StorageLost: The storage does not answer.
        """
        self._study.set_attribute(self._key, None)

    def beat(self) -> None:
        """Increment the own count, and read those of the others.

        Raises:
            StorageLost: The storage does not answer.
        """
        self._count += 1
        self._study.set_attribute(self._key, self._count)
        dead = set()
        heard, self._heard = self._heard, set()
        counts = {key: each for key, each in self._study.attributes().items() if key.startswith(PREFIX)}
        silent = dict.fromkeys((PREFIX + process for process in heard), 0) | dict.fromkeys(self._last, 0)
        for key, number in (silent | counts).items():  # one may begin a trial and never have counted
            if key == self._key:
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
