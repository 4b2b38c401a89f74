"""Turns NumPy's BLAS to a number of threads for a while.

A search proposes from matrices so small, on cores so busy compiling, that threads of BLAS wait for each other
far longer than they work: 188 ms per proposal on two busy cores, against 16 ms with one thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_NAMES = ("scipy_openblas_{}64_", "scipy_openblas_{}", "openblas_{}64_", "openblas_{}")


@contextmanager
def blas_threads(count: int) -> Iterator[None]:
    """Let OpenBLAS use this many threads within the context; another BLAS is left alone."""
    before = [(put, get()) for get, put in _libraries()]
    try:
        for put, _ in before:
            put(count)
        yield
    finally:
        for put, threads in before:
            put(threads)


def _libraries() -> list[tuple[Callable[[], int], Callable[[int], None]]]:
    """List (get, set) of the threads of each OpenBLAS that this process has loaded."""
    import numpy  # noqa: F401 -- loads it

    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if "openblas" in line.rpartition("/")[2]}
    found = []
    for path in sorted(paths):
        library = ctypes.CDLL(path)
        for name in _NAMES:
            get = getattr(library, name.format("get_num_threads"), None)
            put = getattr(library, name.format("set_num_threads"), None)
            if get is not None and put is not None:
                found.append((get, put))
                break
    return found
