"""`Once`: things that are made once for each key, whichever thread asks first, and kept."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Once(Generic[K, V]):
    """A table that threads fill together: who asks while a value is being made waits for it.

    A process that is forked meanwhile has no thread that would ever finish, so it makes the value itself.

    Attributes:
        made: What there is already.
    """

    def __init__(self) -> None:
        self.made: dict[K, V] = {}
        self._lock = threading.RLock()
        _every.add(self)

    def __call__(self, key: K, make: Callable[[], V]) -> V:
        """Return the value of a key, made now if it is the first time; what fails is made again next time."""
        found = self.made.get(key)
        if found is None:
            with self._lock:
                found = self.made.get(key)
                if found is None:
                    found = self.made[key] = make()
        return found

    def reopen(self) -> None:
        """Forget who was making a value."""
        self._lock = threading.RLock()


_every: weakref.WeakSet[Once[Any, Any]] = weakref.WeakSet()


def _reopen_all() -> None:
    for each in list(_every):
        each.reopen()


os.register_at_fork(after_in_child=_reopen_all)
