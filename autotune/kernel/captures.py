"""Streams that are captured into CUDA graphs: what a graph owns while it lives, and calls that it allows.

A graph owns through a user object of CUDA: when the graph and all that was instantiated from it are destroyed
and no longer run, CUDA posts a semaphore, from a thread of its own that needs no Python.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

from autotune.errors import DeviceError
from autotune.values.faults import known_fault

LEGACY_DEFAULT = 1  # this stream in the array interface, and as a handle beside 0; it is never captured
_ACTIVE = 1  # CUstreamCaptureStatus of cuda.h
_RELAXED = 2  # CUstreamCaptureMode
_NO_DESTRUCTOR_SYNC = 1  # CUuserObject_flags
_MOVE = 1  # CUuserObjectRetain_flags
_SEMAPHORE_BYTES = 64  # no less than sem_t on any Linux


class Capture(NamedTuple):
    """A capture that is going on.

    Attributes:
        number: Unique in the process.
        graph: Handle of the graph that it fills.
    """

    number: int
    graph: int


def is_capturing(runtime: Any, stream: int) -> bool:
    """Return whether a stream is being captured into a graph; the legacy default stream cannot be."""
    return stream > LEGACY_DEFAULT and bool(runtime.streamIsCapturing(stream))


def capture_of(stream: int) -> Capture:
    """Return the capture of a stream that is being captured.

    Raises:
        DeviceError: The capture has become invalid.
    """
    status, number, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
    words = (ctypes.byref(status), ctypes.byref(number), ctypes.byref(graph), None, None)
    _call("cuStreamGetCaptureInfo_v2", ctypes.c_void_p(stream), *words)
    if status.value != _ACTIVE or not graph.value:
        raise DeviceError(f"the capture of stream {stream:#x} has failed: end it, and capture anew")
    return Capture(number.value, graph.value)


@contextmanager
def relaxed() -> Iterator[None]:
    """Let this thread load and allocate, which no captured stream notices, while streams are captured."""
    mode = ctypes.c_int(_RELAXED)
    _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        yield
    finally:
        _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))


class Graphs:
    """What graphs need, and what happens when a graph is gone."""

    def __init__(self) -> None:
        self._held: list[tuple[Any, Callable[[], None]]] = []
        self._sweeping = threading.Lock()

    def hold(self, graph: int, gone: Callable[[], None]) -> None:
        """Let a graph own something.

        Args:
            graph: Its handle.
            gone: Called by a later `sweep` once the graph can run no more; what it refers to lives till then.
        """
        library = _c_library()
        semaphore = ctypes.create_string_buffer(_SEMAPHORE_BYTES)
        library.sem_init(semaphore, 0, 0)
        self._held.append((semaphore, gone))  # first: CUDA may post it at any time from now on
        owned, post = ctypes.c_void_p(), ctypes.cast(library.sem_post, ctypes.c_void_p)
        _call("cuUserObjectCreate", ctypes.byref(owned), semaphore, post, 1, _NO_DESTRUCTOR_SYNC)
        _call("cuGraphRetainUserObject", ctypes.c_void_p(graph), owned, 1, _MOVE)

    def sweep(self) -> None:
        """Let go of what belongs to graphs that are gone."""
        if not self._sweeping.acquire(blocking=False):  # one thread is enough
            return
        try:
            trywait = _c_library().sem_trywait
            gone = [each for each in tuple(self._held) if trywait(each[0]) == 0]
            for each in gone:
                self._held.remove(each)
        finally:
            self._sweeping.release()
        for _, let_go in gone:
            let_go()


graphs = Graphs()


@cache
def _c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None)


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *words: Any) -> None:
    status = getattr(_driver(), name)(*words)
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(status, ctypes.byref(text))
        said = (text.value or b"").decode() or f"CUDA error {status}"
        raise DeviceError(known_fault(said) or f"the driver refuses {name}: {said}")
