"""Device memory, loaded cubins, launches and timers through CuPy, in the worker process only.

Nothing here makes CuPy compile or load a library beyond the driver: a machine with a driver alone is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from cupy.cuda import Event, Memory, Module, Stream, driver, get_elapsed_time, runtime
from numpy.typing import NDArray

from autotune.measure.calls import Calls
from autotune.values.measurement import Launch, Method

CUDA_ERRORS: tuple[type[Exception], ...] = (runtime.CUDARuntimeError, driver.CUDADriverError)
# In cudaError_t and CUresult alike: devices unavailable, no device, uncorrectable ECC and NVLink errors,
# system not ready, driver mismatch, and MPS: connection, server, limits, another client's fault.
_MACHINE_STATUS = {46, 100, 214, 220, 802, 803, *range(805, 811)}
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CUfunction_attribute of cuda.h

Argument = int | float | np.generic


def out_of_memory(error: Exception) -> bool:
    """Return whether an error means that device memory could not be allocated."""
    return getattr(error, "status", None) == 2  # cudaErrorMemoryAllocation, CUDA_ERROR_OUT_OF_MEMORY


def machine_failed(error: Exception) -> bool:
    """Return whether an error is one of the machine, whatever kernel ran when it came."""
    return getattr(error, "status", None) in _MACHINE_STATUS


def context_lost() -> bool:
    """Return, after an error, whether this process can no longer use the GPU.

    An illegal address and its like stay with the context: every later call reports them again.
    """
    try:
        runtime.deviceSynchronize()
        runtime.memGetInfo()
    except CUDA_ERRORS:
        return True
    return False


class Gpu:
    """The GPU of this process, with the one stream on which everything runs.

    Attributes:
        stream: Does not synchronise with the default stream.
        sm_count: Streaming multiprocessors.

    Args:
        ordinal: CUDA ordinal.
    """

    def __init__(self, ordinal: int) -> None:
        runtime.setDevice(ordinal)
        self.stream: Any = Stream(non_blocking=True)
        self.sm_count: int = runtime.getDeviceProperties(ordinal)["multiProcessorCount"]

    @property
    def memory_free(self) -> int:
        """Free device memory, bytes."""
        free: int = runtime.memGetInfo()[0]
        return free

    def allocate(self, size: int) -> Any:
        """Allocate bytes, aligned to 256; the memory has ``ptr`` and is freed with the object."""
        return Memory(size)

    def upload(self, address: int, values: NDArray[Any]) -> None:
        """Copy a host array to device memory; return when it is there."""
        values = np.ascontiguousarray(values)
        runtime.memcpyAsync(
            address, values.ctypes.data, values.nbytes, runtime.memcpyHostToDevice, self.stream.ptr
        )
        self.stream.synchronize()

    def download(self, address: int, count: int, dtype: Any) -> NDArray[Any]:
        """Wait for the stream and copy device memory to a new host array, `[count]` of dtype."""
        values = np.empty(count, dtype)
        runtime.memcpyAsync(
            values.ctypes.data, address, values.nbytes, runtime.memcpyDeviceToHost, self.stream.ptr
        )
        self.stream.synchronize()
        return values

    def copy(self, target: int, source: int, size: int) -> None:
        """Enqueue a copy of bytes within device memory."""
        runtime.memcpyAsync(target, source, size, runtime.memcpyDeviceToDevice, self.stream.ptr)

    def fill(self, address: int, byte: int, size: int) -> None:
        """Enqueue setting bytes of device memory."""
        runtime.memsetAsync(address, byte, size, self.stream.ptr)

    def synchronize(self) -> None:
        """Wait for everything enqueued; errors of kernels surface here."""
        self.stream.synchronize()


class LoadedModule:
    """Machine code on the GPU, unloaded with the last reference to it or to its kernels."""

    def __init__(self, gpu: Gpu, cubin: bytes) -> None:
        self._gpu = gpu
        self._module = Module()
        self._module.load(cubin)

    def function(self, entry: str, shared_bytes: int = 0) -> Any:
        """Return one kernel, as CuPy has it.

        Args:
            entry: ``extern "C"`` name.
            shared_bytes: Dynamic shared memory; above 48 KiB a kernel must opt in, which this does.
        """
        function = self._module.get_function(entry)
        if shared_bytes > 0:
            driver.funcSetAttribute(function.ptr, _MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)
        return function

    def kernel(self, entry: str, shared_bytes: int = 0) -> Callable[..., None]:
        """Return ``launch(grid, block, *arguments)`` for one kernel, which enqueues it; see `function`."""
        function, stream = self.function(entry, shared_bytes), self._gpu.stream

        def launch(grid: tuple[int, ...], block: tuple[int, ...], *arguments: Argument) -> None:
            function(grid, block, arguments, shared_bytes, stream)

        return launch


class Multiplication:
    """A loaded candidate: ``C = alpha op(A) op(B) + beta C`` on addresses.

    Attributes:
        kernels: That one call starts.
    """

    def __init__(self, gpu: Gpu, cubin: bytes, launch: Launch) -> None:
        self._module = LoadedModule(gpu, cubin)
        functions = [self._module.function(each.entry, each.shared_bytes) for each in launch.kernels]
        self._calls = Calls(launch, [each.ptr for each in functions], driver)
        self._stream, self.kernels = gpu.stream.ptr, len(functions)
        if launch.workspace_bytes:
            self._memory = gpu.allocate(launch.workspace_bytes)
            gpu.fill(self._memory.ptr, 0, launch.zeroed_bytes)
            self._calls.addresses[3] = self._memory.ptr

    def __call__(self, alpha: float, a: int, b: int, beta: float, c: int) -> None:
        """Enqueue one call."""
        addresses, scalars = self._calls.addresses, self._calls.scalars
        addresses[0], addresses[1], addresses[2] = a, b, c
        scalars[0], scalars[1] = alpha, beta
        for start in self._calls.starts:
            start(self._stream)


class EventTimer:
    """Samples of back-to-back launches, or of a CUDA graph of them, between two events: a `timing.Runnable`.

    Args:
        gpu: Where to run.
        calls: Each enqueues one launch; the launches of a sample take turns through them, on and on.
        kernels: That one launch starts.
    """

    def __init__(self, gpu: Gpu, calls: Sequence[Callable[[], None]], kernels: int = 1) -> None:
        self.kernels = kernels
        self._gpu = gpu
        self._calls = calls
        self._next = 0
        self._launches = 1
        self._graph: Any = None

    def prepare(self, launches: int, method: Method) -> None:
        """Make a sample consist of this many launches, issued this way."""
        self._launches, self._graph = launches, None
        if method == "graph":
            self._gpu.stream.begin_capture()
            try:
                self._enqueue()
            finally:
                graph = self._gpu.stream.end_capture()
            graph.upload(self._gpu.stream)
            self._graph = graph

    def start(self) -> Callable[[], float]:
        """Enqueue one sample; return what waits for it and gives milliseconds per launch."""
        begin, end, launches = Event(), Event(), self._launches
        begin.record(self._gpu.stream)
        if self._graph is None:
            self._enqueue()
        else:
            self._graph.launch(self._gpu.stream)
        end.record(self._gpu.stream)

        def wait() -> float:
            end.synchronize()
            total: float = get_elapsed_time(begin, end)
            return total / launches

        return wait

    def sample(self) -> float:
        """Run one sample; return milliseconds per launch."""
        return self.start()()

    def _enqueue(self) -> None:
        for _ in range(self._launches):
            self._calls[self._next]()
            self._next = (self._next + 1) % len(self._calls)
