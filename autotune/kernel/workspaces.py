"""Device memory that kernels work in: one `Workspaces` for each stream, and for each stream in each graph.

Launches on a stream follow each other, so its kernels share memory. One that needs more than is left takes
over what others had: zeroed on the stream, as what it is given first. What a graph had serves the next graph.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from autotune.kernel.captures import capture_of, graphs, is_capturing, relaxed

PER_THREAD_DEFAULT = 2  # this handle is another stream in every thread

CHUNK_BYTES = 4 << 20
LIMIT_BYTES = 32 << 20  # of one stream, unless one kernel alone needs more
_GRANULE = 512  # bytes: places are multiples of it


class Workspaces:
    """Places of kernels in the memory of one stream.

    Attributes:
        lock: Held from asking for a place until the kernel is launched: then another may have it.
        places: Addresses, by numbers of kernels.
    """

    def __init__(self, runtime: Any, ordinal: int, stream: int) -> None:
        self.lock = threading.Lock()
        self.places: dict[int, int] = {}
        self._runtime = runtime
        self._ordinal = ordinal
        self._stream = stream
        self._chunks: list[Any] = []
        self._used: list[int] = []
        self._kept: set[Any] = set()

    def place(self, kernel: int, size: int, zeroed: int) -> int:
        """Return the address of a kernel's workspace, whose beginning is zeroed when it is first asked for.

        Args:
            kernel: Its number, of no other kernel ever.
            size: Bytes.
            zeroed: Bytes that are zeroed.
        """
        found = self.places.get(kernel)
        if found is None:
            with current(self._runtime, self._ordinal):
                found = self._room(-(-size // _GRANULE) * _GRANULE)
                if zeroed:
                    self._runtime.memsetAsync(found, 0, zeroed, self._stream)
            self.places[kernel] = found
        return found

    def _room(self, size: int) -> int:
        found = self._left(size)
        if found is None and self.size + max(size, CHUNK_BYTES) > LIMIT_BYTES:
            self.places.clear()
            self._used = [0] * len(self._chunks)
            found = self._left(size)
            if found is None:
                self._chunks.clear()
                self._used.clear()
        if found is None:
            self._chunks.append(_spare_or_new(self._ordinal, max(size, CHUNK_BYTES)))
            self._used.append(0)
            found = self._left(size)
            assert found is not None, "a new chunk has room"
        return found

    def _left(self, size: int) -> int | None:
        for index, (chunk, used) in enumerate(zip(self._chunks, self._used, strict=True)):
            if used + size <= chunk.size:
                self._used[index] = used + size
                return int(chunk.ptr) + used
        return None

    @property
    def size(self) -> int:
        """Bytes of its memory."""
        return sum(int(each.size) for each in self._chunks)

    def keep(self, kernel: Any) -> None:
        """Let the graph that owns this own a kernel too."""
        self._kept.add(kernel)

    def leave(self, key: tuple[int, ...]) -> None:
        """Hand the memory of a graph that is gone to the next one."""
        _made.pop(key, None)
        spare = _spare.setdefault(self._ordinal, [])
        spare.extend(self._chunks)
        while sum(each.size for each in spare) > LIMIT_BYTES:
            spare.pop(0)
        self._kept.clear()


def workspaces_of(runtime: Any, ordinal: int, stream: int, kernel: Any) -> Workspaces:
    """Return those of a stream: while it is captured those of that graph, which then owns the kernel too.

    Args:
        runtime: CuPy's.
        ordinal: CUDA ordinal of the GPU.
        stream: Handle.
        kernel: What is going to be launched.

    Raises:
        DeviceError: The capture has become invalid.
    """
    thread = threading.get_ident() if stream == PER_THREAD_DEFAULT else 0
    if not is_capturing(runtime, stream):
        key: tuple[int, ...] = (ordinal, stream, thread)
        return _made.get(key) or _made.setdefault(key, Workspaces(runtime, ordinal, stream))
    capture = capture_of(stream)
    key = (ordinal, stream, thread, capture.number)
    found = _made.get(key)
    if found is None:
        with current(runtime, ordinal):
            graphs.sweep()
            found = Workspaces(runtime, ordinal, stream)
            graphs.hold(capture.graph, lambda: found.leave(key))
        _made[key] = found
    found.keep(kernel)
    return found


def held_bytes() -> int:
    """Return the bytes of all memory to work in, of all streams and graphs, and what is spare."""
    spare = [int(chunk.size) for chunks in tuple(_spare.values()) for chunk in tuple(chunks)]
    return sum(workspaces.size for workspaces in tuple(_made.values())) + sum(spare)


@contextmanager
def current(runtime: Any, ordinal: int) -> Iterator[None]:
    """Make a GPU current, with its context, for this thread, and let it load and allocate in captures."""
    before = runtime.getDevice()
    runtime.setDevice(ordinal)
    try:
        with relaxed():
            runtime.free(0)  # makes the context current; frees nothing
            yield
    finally:
        if before != ordinal:
            runtime.setDevice(before)


_made: dict[tuple[int, ...], Workspaces] = {}
_spare: dict[int, list[Any]] = {}  # chunks of graphs that are gone, by GPU
os.register_at_fork(after_in_child=_made.clear)  # a lock may have been held, and CUDA does not survive


def _spare_or_new(ordinal: int, size: int) -> Any:
    from cupy.cuda import Memory

    spare = _spare.get(ordinal, [])
    for chunk in tuple(spare):
        if chunk.size >= size:
            with suppress(ValueError):  # another thread has just taken it
                spare.remove(chunk)
                return chunk
    return Memory(size)
