"""Readings of NVML around a timing: clocks, power, what throttles the GPU, and who else uses it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from autotune.values.measurement import POWER_CAP, Clocks, PowerBy

# NVML_CLOCKS_EVENT_REASON_* of nvml.h; idle, application clocks and sync boost are normal and left out.
THROTTLE_REASONS = {
    0x04: POWER_CAP,
    0x08: "hardware slowdown",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}
WATCH_EVERY_S = 0.002
_THERMAL_POLICY = 1  # nvmlPerfPolicyType_t
_THERMAL = "software thermal"


def throttle_names(reasons: int) -> tuple[str, ...]:
    """Return names of the bits of an NVML clocks-event mask that slow a GPU down."""
    return tuple(name for bit, name in THROTTLE_REASONS.items() if reasons & bit)


def driver_version() -> str | None:
    """Return the version of the NVIDIA driver, such as "580.95.05"; None where NVML is missing."""
    try:
        import pynvml

        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
    except Exception:
        return None
    return version.decode() if isinstance(version, bytes) else str(version)


def device_uuid(ordinal: int) -> str | None:
    """Return the UUID of a GPU or MIG slice, such as "GPU-1b2c..."; None if the driver does not tell.

    Args:
        ordinal: CUDA ordinal, as ``CUDA_VISIBLE_DEVICES`` leaves it.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        device, digits = ctypes.c_int(), (ctypes.c_ubyte * 16)()
        if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), ordinal):
            return None
        if driver.cuDeviceGetUuid_v2(digits, device):
            return None
    except (OSError, AttributeError):
        return None
    return f"GPU-{uuid.UUID(bytes=bytes(digits))}"


@dataclass(frozen=True)
class Reading:
    """What NVML says at one moment.

    Attributes:
        at: When, `time.monotonic`.
        sm_mhz: SM clock.
        reasons: Mask of what throttles.
        watts: Power, averaged by the driver; None where it is not told.
        joules: Counter of the energy used since the driver was loaded; likewise.
    """

    at: float
    sm_mhz: int
    reasons: int
    watts: float | None
    joules: float | None


def power_of(
    readings: Sequence[Reading],
) -> tuple[float | None, PowerBy | None, float | None, tuple[str, ...]]:
    """Return mean watts, where they are from, mean SM MHz, and what throttled, over some readings.

    The energy counter tells, where there is one, between the first change of it that is seen and the last: it
    moves some ten times a second only. Else it is the mean of the power that was read.
    """
    if not readings:
        return None, None, None, ()
    reasons = 0
    for each in readings:
        reasons |= each.reasons
    sm_mhz = sum(each.sm_mhz for each in readings) / len(readings)
    changes = [
        (now.at, now.joules)
        for before, now in pairwise(readings)
        if before.joules is not None and now.joules is not None and now.joules > before.joules
    ]
    if len(changes) > 1:
        (began, first), (ended, last) = changes[0], changes[-1]
        return (last - first) / (ended - began), "energy counter", sm_mhz, throttle_names(reasons)
    watts = [each.watts for each in readings if each.watts]
    if not watts:
        return None, None, sm_mhz, throttle_names(reasons)
    return sum(watts) / len(watts), "power readings", sm_mhz, throttle_names(reasons)


class ClockMonitor:
    """Watches one GPU between `start` and `stop`.

    NVML's numbering ignores ``CUDA_VISIBLE_DEVICES``, so a GPU is found by UUID, else by PCI address.
    """

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._before = self._processes()
        self._readings: list[tuple[int, int]] = []
        self._thermal_ns = 0
        self._seen_us = 0

    @classmethod
    def open(cls, pci_bus_id: str, uuid: str | None = None) -> ClockMonitor | None:
        """Return a monitor that has proved to work, or None where NVML is missing or does not serve this GPU.

        Open it before this process uses the GPU: then it can tell this process from others in a container,
        where process ids are not what the driver says.

        Args:
            pci_bus_id: Such as "0000:04:00.0".
            uuid: As `device_uuid` gives it.
        """
        try:
            import pynvml

            pynvml.nvmlInit()
            monitor = cls(pynvml, _handle(pynvml, pci_bus_id, uuid))
            monitor.start()
        except Exception:  # a missing library, a missing right, a virtual GPU: clocks are never essential
            return None
        return monitor

    def start(self) -> None:
        """Forget earlier readings and take the first."""
        self._readings = [self._read()]
        self._thermal_ns = self._asked(self._thermal) or 0
        self._busy_others()

    def stop(self) -> Clocks:
        """Take the last reading, if NVML still answers, and summarise all of them.

        Returns:
            ``sm_mhz_min``, ``sm_mhz_max``, ``throttle`` (reasons); where known ``watts``, and
            ``other_processes``: how many kept the GPU busy meanwhile.
        """
        with contextlib.suppress(self._nvml.NVMLError):
            self._readings.append(self._read())
        reasons = 0
        for _, bits in self._readings:
            reasons |= bits
        throttle = throttle_names(reasons)
        if (self._asked(self._thermal) or 0) > self._thermal_ns and _THERMAL not in throttle:
            throttle += (_THERMAL,)
        mhz = [each for each, _ in self._readings]
        clocks: dict[str, int | tuple[str, ...]] = {
            "sm_mhz_min": min(mhz),
            "sm_mhz_max": max(mhz),
            "throttle": throttle,
        }
        watts, others = self._asked(self._power), self._busy_others()
        if watts is not None:
            clocks["watts"] = watts
        if others is not None:
            clocks["other_processes"] = others
        return clocks

    @contextlib.contextmanager
    def watch(self) -> Iterator[list[Reading]]:
        """Take readings, every `WATCH_EVERY_S`, by a thread: the GPU need not wait for them."""
        readings: list[Reading] = []
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(WATCH_EVERY_S):
                with contextlib.suppress(self._nvml.NVMLError):
                    mhz, reasons = self._read()
                    watts, millijoules = self._asked(self._milliwatts), self._asked(self._millijoules)
                    readings.append(
                        Reading(
                            time.monotonic(),
                            mhz,
                            reasons,
                            None if watts is None else watts / 1e3,
                            None if millijoules is None else millijoules / 1e3,
                        )
                    )

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield readings
        finally:
            ended.set()
            thread.join()

    def _read(self) -> tuple[int, int]:
        nvml = self._nvml
        mhz = nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_SM)
        return int(mhz), int(nvml.nvmlDeviceGetCurrentClocksEventReasons(self._handle))

    def _asked(self, question: Callable[[], int]) -> int | None:
        try:
            return question()
        except Exception:  # not every GPU answers every question
            return None

    def _thermal(self) -> int:
        return int(self._nvml.nvmlDeviceGetViolationStatus(self._handle, _THERMAL_POLICY).violationTime)

    def _power(self) -> int:
        return self._milliwatts() // 1000

    def _milliwatts(self) -> int:
        return int(self._nvml.nvmlDeviceGetPowerUsage(self._handle))

    def _millijoules(self) -> int:
        return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))

    def _processes(self) -> set[int]:
        try:
            running = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        except Exception:
            return set()
        return {int(process.pid) for process in running}

    def _busy_others(self) -> int | None:
        """Count other processes that kept the GPU busy since the last call; None if NVML does not tell."""
        listed = self._processes()
        mine = {os.getpid()} & listed or listed - self._before
        if len(mine) != 1:
            return None
        try:
            samples = self._nvml.nvmlDeviceGetProcessUtilization(self._handle, self._seen_us)
        except self._nvml.NVMLError_NotFound:
            return 0
        except Exception:
            return None
        seen, self._seen_us = self._seen_us, max((int(each.timeStamp) for each in samples), default=0)
        busy = {int(each.pid) for each in samples if each.smUtil and int(each.timeStamp) > seen}
        if busy and not mine <= busy:  # we were, so these are not the numbers by which we know us
            return None
        return len(busy - mine)


def _handle(nvml: Any, pci_bus_id: str, uuid: str | None) -> Any:
    if uuid is not None:
        with contextlib.suppress(nvml.NVMLError):
            return nvml.nvmlDeviceGetHandleByUUID(uuid)
        with contextlib.suppress(nvml.NVMLError):  # the clocks of a slice are those of its GPU
            mig = nvml.nvmlDeviceGetHandleByUUID(uuid.replace("GPU-", "MIG-"))
            return nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(mig)
    return nvml.nvmlDeviceGetHandleByPciBusId(pci_bus_id)
