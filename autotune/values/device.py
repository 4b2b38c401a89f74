"""`Device`: the facts of a GPU, read from the driver or from the table of known GPUs."""

from __future__ import annotations

import ctypes
import operator
import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from autotune.errors import DeviceError, UsageError
from autotune.paths import install_command
from autotune.values.faults import cuda_fault, known_fault
from autotune.values.problem import Math, Problem

REGISTERS_PER_SM = 65536  # every compute capability from 7.5 to 12.0
REGISTERS_PER_THREAD = 255
MAX_THREADS_PER_BLOCK = 1024
NOMINAL = 1.074  # a GPU has up to so many times its nominal memory: GiB are sold as GB
_CLOCK_RATE = 13  # cudaDevAttrClockRate, kHz; CUDA 13 dropped the property of that name, not the attribute
_MEMORY_CLOCK_RATE = 36  # cudaDevAttrMemoryClockRate, kHz
_MEMORY_BUS_WIDTH = 37  # cudaDevAttrGlobalMemoryBusWidth, bits
_MAX_BLOCKS_PER_SM = 106  # cudaDevAttrMaxBlocksPerMultiprocessor
_NO_DRIVER = "there is no NVIDIA driver: run on a machine with an NVIDIA GPU and its driver"
_NOBODY_THERE = (34, 100)  # CUresult: CUDA_ERROR_STUB_LIBRARY, CUDA_ERROR_NO_DEVICE


@dataclass(frozen=True)
class Device:
    """The facts about one GPU that decide what may run on it, and who it is.

    Attributes:
        name: As the driver reports it.
        compute_capability: "major.minor".
        sm_count: Streaming multiprocessors.
        shared_per_block: Shared memory of one block with opt-in, bytes.
        shared_per_sm: Shared memory of one SM, bytes.
        registers_per_sm: 32-bit registers of one SM (also the limit of one block).
        registers_per_thread: Largest number one thread can have.
        max_threads_per_block: Threads.
        max_threads_per_sm: Threads.
        max_blocks_per_sm: Resident blocks.
        l2_bytes: L2 cache.
        memory_bytes: Device memory.
        mig: Name of the MIG slice, None for a whole GPU.
        clock_mhz: Highest SM clock, MHz; 0 if unknown.
        bandwidth_gbs: Device memory, GB/s (10^9 bytes per second) in theory; 0 if unknown.
    """

    name: str
    compute_capability: str
    sm_count: int
    shared_per_block: int
    shared_per_sm: int
    max_threads_per_sm: int
    max_blocks_per_sm: int
    l2_bytes: int
    memory_bytes: int
    registers_per_sm: int = REGISTERS_PER_SM
    registers_per_thread: int = REGISTERS_PER_THREAD
    max_threads_per_block: int = MAX_THREADS_PER_BLOCK
    mig: str | None = None
    clock_mhz: int = 0
    bandwidth_gbs: int = 0

    @property
    def capability(self) -> int:
        """Compute capability as one number: 90 for 9.0."""
        major, minor = self.compute_capability.split(".")
        return int(major) * 10 + int(minor)

    @property
    def arch(self) -> str:
        """Architecture as NVRTC spells it: "sm_90" for 9.0."""
        return f"sm_{self.capability}"

    @property
    def fp32_lanes_per_sm(self) -> int:
        """FP32 fused multiply-adds one SM can start per clock.

        Source: CUDA C++ Programming Guide, table "Throughput of Native Arithmetic Instructions".
        """
        return 64 if self.capability <= 80 else 128

    @property
    def banks_limit_ffmas(self) -> bool:
        """Whether a scheduler starts an FFMA per clock and has two register banks of one read per clock each.

        With 16 FP32 lanes, as up to 8.0, an FFMA takes two clocks; banks from 10.0 on were not measured.
        """
        return 80 < self.capability <= 90

    @property
    def peak_gflops(self) -> float:
        """FP32 peak of the CUDA cores, GFLOP/s: two per lane and clock; 0 if the clock is unknown."""
        return 2e-3 * self.sm_count * self.fp32_lanes_per_sm * self.clock_mhz

    @property
    def tf32_multiplies_per_sm(self) -> int:
        """TF32 fused multiply-adds that the tensor cores of one SM can do per clock; 0 without TF32.

        Source: NVIDIA's architecture whitepapers (A100, GA102, AD102, H100, Blackwell), dense.
        """
        consumer = dict.fromkeys((86, 87, 89, 120, 121), 128)
        return {80: 512, 90: 1024, 100: 2048, 103: 2048, **consumer}.get(self.capability, 0)

    def peak(self, math: Math) -> float:
        """Peak of an arithmetic, GFLOP/s of 2mnk; 0 if the clock is unknown or there is no such unit."""
        if math != "ffma":  # three products for each; FP16 has twice the rate of TF32
            multiplies = self.tf32_multiplies_per_sm * (2 if math == "3xfp16" else 1)
            return 2e-3 * self.sm_count * multiplies * self.clock_mhz / 3
        return self.peak_gflops

    def shortage(self, problem: Problem) -> str:
        """Return why a problem's operands do not fit into the memory, in one line; "" where they may."""
        if problem.operand_bytes <= NOMINAL * self.memory_bytes:
            return ""
        return (
            f"A, B and C of {problem} take {problem.operand_bytes / 1e9:,.1f} GB, and {self.name} has "
            f"{self.memory_bytes / 1e9:,.1f} GB of memory: give smaller sizes, such as those of a part of C"
        )

    @property
    def slug(self) -> str:
        """The name as a folder name: letters, digits and underscores."""
        return slug_of(self.name, self.mig)


def slug_of(name: str, mig: str | None) -> str:
    """Return the name of a GPU, or of a MIG slice of it, as a folder name."""
    return re.sub(r"[^0-9A-Za-z]+", "_", name if mig is None else f"{name} {mig}")


@cache
def known_devices() -> dict[str, Device]:
    """Return the built-in table: short name (such as "h200") to `Device`."""
    table = tomllib.loads(Path(__file__).with_name("devices.toml").read_text("utf-8"))
    return {
        key: Device(**facts, **table["limits"][facts["compute_capability"]])
        for key, facts in table["devices"].items()
    }


def named_device(name: str) -> Device:
    """Return a GPU of the built-in table by short or full name, ignoring case and punctuation.

    Raises:
        UsageError: The table has no such GPU.
    """
    if not isinstance(name, str):
        raise UsageError(
            f"target {name!r:.60} is not the name of a GPU: give one of {', '.join(known_devices())}"
        )

    def plain(text: str) -> str:
        return re.sub(r"[^0-9a-z]", "", text.lower()).removeprefix("nvidia").removeprefix("geforce")

    wanted = plain(name)
    for key, device in known_devices().items():
        if wanted in (key, plain(device.name)):
            return device
    raise UsageError(f"target {name!r:.60} is not in the table: give one of {', '.join(known_devices())}")


def has_gpu() -> bool:
    """Return whether there is an NVIDIA GPU at all, even one that cannot be used (a driver too old, say).

    Asks the driver itself: CuPy need not be installed, and no CUDA context is made.
    """
    try:
        return ctypes.CDLL("libcuda.so.1").cuInit(0) not in _NOBODY_THERE
    except OSError:
        return False


def gpu_count() -> int:
    """Return the number of GPUs that this process sees, as the driver says; 0 without one."""
    try:
        driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
        if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
            return 0
    except OSError:
        return 0
    return count.value


def chosen_gpus(text: str, count: int) -> list[int]:
    """Return the ordinals that "all", a number of GPUs, or a list such as "0,1" stands for.

    Args:
        text: As the user wrote it.
        count: GPUs that this process sees.

    Raises:
        DeviceError: There are none.
        UsageError: It is none of these, or asks for a GPU that is not there.
    """
    if not count:
        raise DeviceError(_NO_DRIVER)
    there = f"this process sees {count} ({'ordinal 0' if count == 1 else f'ordinals 0 to {count - 1}'})"
    words = [word.strip() for word in text.split(",")]
    if text == "all":
        return list(range(count))
    if not all(word.isascii() and word.isdigit() and len(word) < 6 for word in words):
        raise UsageError(f"GPUs {text!r} are not understood: give all, a number, or ordinals such as 0,1")
    numbers = [int(word) for word in words]
    if len(words) == 1 and numbers[0]:
        if numbers[0] > count:
            raise UsageError(f"{numbers[0]} GPUs were asked for, and {there}")
        return list(range(numbers[0]))
    missing = [number for number in numbers if number >= count]
    if missing:
        raise UsageError(f"GPU {missing[0]} does not exist: {there}")
    if len(set(numbers)) < len(numbers):
        raise UsageError(f"GPUs {text!r} name one twice: give each once")
    return numbers


def whole_number(ordinal: Any) -> int:
    """Return a CUDA ordinal as an int: NumPy's integers are taken too, but no truth value.

    Raises:
        UsageError: It is not an integer.
    """
    if not isinstance(ordinal, bool):
        try:
            return operator.index(ordinal)
        except TypeError:
            pass
    raise UsageError(f"GPU {ordinal!r:.60} is not a CUDA ordinal: give 0 or another integer")


def current_device(ordinal: int = 0) -> Device:
    """Return the GPU with this CUDA ordinal, read through CuPy.

    Raises:
        UsageError: The ordinal is not an integer.
        DeviceError: CuPy is missing, there is no GPU or driver, the driver is too old, or no such ordinal.
    """
    try:
        from cupy.cuda import runtime
    except ImportError as error:
        if not has_gpu():
            raise DeviceError(_NO_DRIVER) from None
        raise DeviceError(
            f"CuPy cannot be imported ({error}): {install_command('cuda13')} (driver 580 or later), "
            f"or {install_command('cuda12')}"
        ) from None
    ordinal = whole_number(ordinal)
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        raise DeviceError(known_fault(str(error)) or _no_gpu(error, runtime)) from None
    if not 0 <= ordinal < count:
        raise DeviceError(
            f"GPU {ordinal} does not exist: this process sees {count} (ordinals 0 to {count - 1})"
        )
    try:
        return _from_properties(runtime.getDeviceProperties(ordinal), runtime, ordinal)
    except runtime.CUDARuntimeError as error:
        raise DeviceError(f"GPU {ordinal} cannot be used: {cuda_fault(error)}") from None


def _no_gpu(error: Exception, runtime: Any) -> str:
    have, need = (version // 1000 for version in (runtime.driverGetVersion(), runtime.runtimeGetVersion()))
    if not have:
        return _NO_DRIVER
    if have < need:
        return (
            f"the driver supports CUDA {have}, but this CuPy was built for CUDA {need}: "
            f"update the driver, or {install_command(f'cuda{have}')} in a new environment"
        )
    why = str(error).split(":")[0]
    return f"no GPU can be used ({why}): run on a machine with an NVIDIA GPU and its driver"


def _from_properties(properties: dict[str, Any], runtime: Any, ordinal: int) -> Device:
    capability = f"{properties['major']}.{properties['minor']}"
    if (properties["major"], properties["minor"]) < (7, 5):
        raise DeviceError(f"compute capability {capability} is too old: 7.5 (Turing) or later is needed")

    def attribute(number: int) -> int:
        return int(runtime.deviceGetAttribute(number, ordinal))

    name = properties["name"].decode() if isinstance(properties["name"], bytes) else properties["name"]
    return Device(
        name=name.split(" MIG ")[0],
        compute_capability=capability,
        sm_count=properties["multiProcessorCount"],
        shared_per_block=properties["sharedMemPerBlockOptin"],
        shared_per_sm=properties["sharedMemPerMultiprocessor"],
        registers_per_sm=properties["regsPerMultiprocessor"],
        max_threads_per_block=properties["maxThreadsPerBlock"],
        max_threads_per_sm=properties["maxThreadsPerMultiProcessor"],
        max_blocks_per_sm=attribute(_MAX_BLOCKS_PER_SM),
        l2_bytes=properties["l2CacheSize"],
        memory_bytes=properties["totalGlobalMem"],
        mig=name.split(" MIG ")[1] if " MIG " in name else None,
        clock_mhz=attribute(_CLOCK_RATE) // 1000,
        bandwidth_gbs=round(2 * attribute(_MEMORY_CLOCK_RATE) * attribute(_MEMORY_BUS_WIDTH) / 8e6),
    )
