"""Turns a GPU's PCI address into readings of its SM clock and of what throttles it, through NVML."""

from __future__ import annotations

import contextlib
from typing import Any

from autotune.timing import Clocks

# NVML_CLOCKS_EVENT_REASON_* of nvml.h; idle, application clocks and sync boost are normal and left out.
THROTTLE_REASONS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}


def throttle_names(reasons: int) -> tuple[str, ...]:
    """Name the bits of an NVML clocks-event mask that slow a GPU down."""
    return tuple(name for bit, name in THROTTLE_REASONS.items() if reasons & bit)


def driver_version() -> str | None:
    """Version of the NVIDIA driver, such as "580.95.05"; None where NVML is missing."""
    try:
        import pynvml

        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
    except Exception:
        return None
    return version.decode() if isinstance(version, bytes) else str(version)


class ClockMonitor:
    """Watches one GPU between `start` and `stop`.

    The GPU is found by PCI address: NVML's numbering ignores ``CUDA_VISIBLE_DEVICES``.
    """

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._readings: list[tuple[int, int]] = []

    @classmethod
    def open(cls, pci_bus_id: str) -> ClockMonitor | None:
        """Return a monitor that has proved to work, or None where NVML is missing or does not serve this GPU.

        Args:
            pci_bus_id: Such as "0000:04:00.0".
        """
        try:
            import pynvml

            pynvml.nvmlInit()
            monitor = cls(pynvml, pynvml.nvmlDeviceGetHandleByPciBusId(pci_bus_id))
            monitor.start()
        except Exception:  # a missing library, a missing right, a virtual GPU: clocks are never essential
            return None
        return monitor

    def start(self) -> None:
        """Forget earlier readings and take the first."""
        self._readings = [self._read()]

    def stop(self) -> Clocks:
        """Take the last reading, if NVML still answers, and sum up."""
        with contextlib.suppress(self._nvml.NVMLError):
            self._readings.append(self._read())
        reasons = 0
        for _, bits in self._readings:
            reasons |= bits
        clocks = [mhz for mhz, _ in self._readings]
        return {"sm_mhz_min": min(clocks), "sm_mhz_max": max(clocks), "throttle": throttle_names(reasons)}

    def _read(self) -> tuple[int, int]:
        nvml = self._nvml
        mhz = nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_SM)
        return int(mhz), int(nvml.nvmlDeviceGetCurrentClocksEventReasons(self._handle))
