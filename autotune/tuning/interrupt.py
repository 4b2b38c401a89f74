"""Ctrl-C, SIGTERM and SIGHUP held back until a loop asks where it can stop: nothing is cut in half."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

PATIENCE_S = 0.4  # after which a loop that does not ask is cut all the same
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Holds the signals back while it is entered; `check` lets one through.

    A signal that the process would not survive anyway (no handler) or ignores is left alone, and so is
    everything outside the main thread, where Python delivers no signals.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._alarm: Any = None
        self._armed = False
        self._caught: int | None = None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._hold)
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the handlers; a signal that came and was not let through is raised again."""
        if self._armed:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL if self._alarm is None else self._alarm)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self._caught is not None:
            caught, self._caught = self._caught, None
            signal.raise_signal(caught)

    def check(self) -> None:
        """Let a signal that came meanwhile act; usually it raises `KeyboardInterrupt`."""
        if self._caught is not None:
            caught, self._caught = self._caught, None
            self._handlers[caught](caught, None)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self._caught is not None:  # asked twice
            self.check()
        self._caught = number
        if not self._armed:
            self._alarm, self._armed = signal.signal(signal.SIGALRM, self._cut), True
        signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)

    def _cut(self, number: int, frame: FrameType | None) -> None:
        self.check()
