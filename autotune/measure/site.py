"""The worker's GPU with what every problem needs: the kernels that check, clocks, and NVIDIA's libraries."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from cupy.cuda import runtime

from autotune.errors import MachineFault, Rejected
from autotune.measure.clocks import ClockMonitor, device_uuid
from autotune.measure.comparison import BenchFacts
from autotune.measure.cublas import TF32_MATH, Cublas
from autotune.measure.cublaslt import CublasLt
from autotune.measure.cuda import EventTimer, Gpu, LoadedModule, machine_failed, out_of_memory
from autotune.measure.timing import time_candidate
from autotune.measure.verify_kernels import VerifyKernels, compile_kernels
from autotune.values.device import Device
from autotune.values.lazy import cached_property
from autotune.values.measurement import GpuFacts

COPY_BYTES = 1 << 30  # far beyond any L2 cache
OWN_SHARE = 0.9  # of the memory that was free: where less is, others took it


class Site:
    """One GPU, opened for measuring; a library is loaded when it is first asked for.

    Args:
        device: The GPU.
        driver: Version of the driver.
        ordinal: CUDA ordinal.

    Attributes:
        device: The GPU.
        gpu: Memory, launches and the stream.
        kernels: verify.cu on it.
        clocks: Monitor of its clocks; None where NVML does not serve it.
    """

    def __init__(self, device: Device, driver: str, ordinal: int) -> None:
        steps = {"begin": time.perf_counter()}
        compiled = ThreadPoolExecutor(1).submit(compile_kernels, device.arch)  # while the context is made
        self.device = device
        self._driver = driver
        self._address: str = runtime.deviceGetPCIBusId(ordinal)
        self._uuid = device_uuid(ordinal)
        # The monitor first: it must not take what this process does for another's work.
        self.clocks = ClockMonitor.open(self._address, self._uuid)
        steps["clocks"] = time.perf_counter()
        self.gpu = Gpu(ordinal)
        steps["context"] = time.perf_counter()
        module = LoadedModule(self.gpu, compiled.result().cubin)
        self.kernels = VerifyKernels(module.kernel, self.gpu.sm_count)
        steps["verify_kernels"] = time.perf_counter()
        self._start_s = {name: end - begin for (_, begin), (name, end) in pairwise(steps.items())}

    @cached_property
    def cublas(self) -> Cublas | None:
        """CuBLAS in FP32 proper; None where there is none."""
        return Cublas.open(self.gpu)

    @cached_property
    def cublaslt(self) -> CublasLt | None:
        """cuBLASLt; None where there is none."""
        return CublasLt.open(self.gpu)

    @cached_property
    def cublas_tf32(self) -> Cublas | None:
        """CuBLAS in TF32; None where there is none, or where the environment forbids TF32."""
        return None if os.environ.get("NVIDIA_TF32_OVERRIDE") else Cublas.open(self.gpu, TF32_MATH)

    def facts(self, input_sets: int, **start_s: float) -> GpuFacts:
        """Return what the parent is told when this process is ready.

        Args:
            input_sets: Sets of inputs that candidates are checked on in turn.
            **start_s: Seconds of further parts of the start; those of the site are told once.
        """
        parts, self._start_s = {**self._start_s, **start_s}, {}
        return GpuFacts(
            device=self.device,
            driver=self._driver,
            memory_free=self.gpu.memory_free,
            input_sets=input_sets,
            pci_bus_id=self._address,
            uuid=self._uuid,
            start_s={name: round(seconds, 3) for name, seconds in parts.items()},
        )

    def fault(self, error: CudaFault, memory_free: int) -> Rejected | MachineFault:
        """Return whose fault an error of CUDA is: without memory the machine's, if it has less than before.

        Args:
            error: What CUDA says.
            memory_free: Bytes that were free when this process was ready.
        """
        why = error.why
        if error.machine:
            return MachineFault(why)
        if error.starved and (free := self.gpu.memory_free) < OWN_SHARE * memory_free:
            return MachineFault(f"{why}: {free} bytes of the GPU are free, {memory_free} were at the start")
        return Rejected("crash", why)

    def bench_facts(self) -> BenchFacts:
        """Load the libraries, measure the speed of a copy, and return what a bench reports of them."""
        return BenchFacts(
            device=self.device,
            driver=self._driver,
            cublas=(self.cublas.version or "unknown") if self.cublas else None,
            cublaslt=(self.cublaslt.version or "unknown") if self.cublaslt else None,
            copy_gbs=copy_gbs(self.gpu),
        )


class CudaFault(NamedTuple):
    """What is kept of an error of CUDA when it is handled: the error itself would keep memory allocated.

    Attributes:
        why: Its text.
        starved: Memory could not be allocated.
        machine: It is one of the machine, such as a memory error.
    """

    why: str
    starved: bool
    machine: bool

    @classmethod
    def of(cls, error: Exception) -> CudaFault:
        """Take what is kept of an error."""
        return cls(str(error), out_of_memory(error), machine_failed(error))


def copy_gbs(gpu: Gpu) -> float:
    """Measure the bytes per second, read and written, of copying device memory, in GB/s."""
    size = min(COPY_BYTES, gpu.memory_free // 4)
    source, target = gpu.allocate(size), gpu.allocate(size)
    gpu.fill(source.ptr, 0xA5, size)
    timer = EventTimer(gpu, [partial(gpu.copy, target.ptr, source.ptr, size)])
    timings = [time_candidate(timer, None, "cold") for _ in range(2)]
    return 2 * size / min(timing.median_ms for timing in timings) / 1e6
