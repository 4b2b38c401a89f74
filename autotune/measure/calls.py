"""A multiplication as the driver takes it: its arguments in memory, and one call for each of its kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from autotune.values.measurement import Argument, KernelLaunch, Launch

_PLACES: dict[Argument, int] = {
    "a": 0,
    "b": 8,
    "c": 16,
    "workspace": 24,
    "prepared": 32,
    "alpha": 40,
    "beta": 44,
}
_CAPTURES_EARLY_LAUNCHES = 12030  # version of the driver from which a graph has programmatic dependencies
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID of cuda.h
_CONFIG_WORDS, _ATTRIBUTE_WORDS = 7, 9  # of 8 bytes: CUlaunchConfig and CUlaunchAttribute

Start = Callable[[int], None]


class Calls:
    """The kernels of a multiplication with arguments of their own; one launch of them at a time.

    Attributes:
        addresses: Of A, B, C, the workspace and what B was prepared into; may be written.
        scalars: alpha and beta; may be written.
        starts: Each enqueues a kernel on a stream, given its handle; the driver's errors are CuPy's.

    Args:
        launch: What is launched, and how.
        functions: Handle of each kernel of the launch.
        driver: CuPy's driver interface.
    """

    __slots__ = ("_memory", "addresses", "scalars", "starts")

    def __init__(self, launch: Launch, functions: Sequence[int], driver: Any) -> None:
        names = [name for each in launch.kernels for name in each.arguments]
        self._memory = (ctypes.c_uint64 * (6 + len(names)))()  # 5 addresses, 2 floats, pointers
        start = ctypes.addressof(self._memory)
        whole = memoryview(self._memory).cast("B")
        self.addresses = whole[:40].cast("Q")
        self.scalars = whole[40:48].cast("f")
        self.starts: list[Start] = []
        for number, name in enumerate(names):
            self._memory[6 + number] = start + _PLACES[name]
        pointers = start + 48
        extended = _extended_launch() if launch.waits else None
        for each, function in zip(launch.kernels, functions, strict=True):
            if extended is None:
                self.starts.append(_plain(driver, function, each, pointers))
            else:
                self.starts.append(_early(extended, driver, function, each, pointers))
            pointers += 8 * len(each.arguments)


def _plain(driver: Any, function: int, kernel: KernelLaunch, pointers: int) -> Start:
    geometry = (function, *kernel.grid, *kernel.block, kernel.shared_bytes)
    launch_kernel = driver.launchKernel

    def start(stream: int) -> None:
        launch_kernel(*geometry, stream, pointers, 0)

    return start


def _early(extended: Any, driver: Any, function: int, kernel: KernelLaunch, pointers: int) -> Start:
    """Return what launches a kernel while those before it on the stream run: it waits for them itself."""
    memory = (ctypes.c_uint64 * (_CONFIG_WORDS + _ATTRIBUTE_WORDS))()
    config = ctypes.addressof(memory)
    extents = memoryview(memory).cast("B")[:28].cast("I")
    for place, extent in enumerate((*kernel.grid, *kernel.block, kernel.shared_bytes)):
        extents[place] = extent
    memory[5], memory[6] = config + 8 * _CONFIG_WORDS, 1  # one attribute
    memory[_CONFIG_WORDS], memory[_CONFIG_WORDS + 1] = _PROGRAMMATIC_STREAM_SERIALIZATION, 1

    def start(stream: int) -> None:
        memory[4] = stream
        status = extended(config, function, pointers, None)
        if status:
            raise driver.CUDADriverError(status)

    return start


@cache
def _extended_launch() -> Any:
    """Return the driver's cuLaunchKernelEx; None where a captured stream would refuse an early launch."""
    try:
        driver, version = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
        if driver.cuDriverGetVersion(ctypes.byref(version)) or version.value < _CAPTURES_EARLY_LAUNCHES:
            return None
        found = driver.cuLaunchKernelEx
    except (OSError, AttributeError):  # CuPy may have found the driver by another name
        return None
    found.argtypes = [ctypes.c_void_p] * 4
    return found
