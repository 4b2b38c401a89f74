"""The static estimate: the time a kernel may take, from arithmetic alone, nothing run.

A model, to order candidates before any is timed; never a measurement. What it computes is each family's own
(`autotune.families`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.errors import ConfigError, DeviceError
from autotune.families import family_of
from autotune.space.space import Space
from autotune.values.device import Device
from autotune.values.problem import Problem


@dataclass(frozen=True)
class Estimate:
    """A model's figures of one kernel.

    Attributes:
        ms: Time, in units that resemble milliseconds: good for order, not for claims.
        registers: Per thread: as given, or predicted.
        spill_bytes: Spill code of a thread, bytes: as given, or predicted.
        parts: Time each resource alone would take, ms, under "issue_ms", "shared_ms", "fetch_ms", "stall_ms",
            "l2_ms" and "dram_ms"; and factors: "occupancy" (resident warps over possible ones),
            "latency_factor" (share of the issue slots that the resident warps fill), "wave_efficiency" (mean
            work of an SM over that of the busiest), "spill_share" (issue slots spent on spills).
    """

    ms: float
    registers: int
    spill_bytes: int
    parts: dict[str, float]

    @property
    def bottleneck(self) -> str:
        """Name of the resource that takes longest alone, such as "issue"."""
        times = {name: time for name, time in self.parts.items() if name.endswith("_ms")}
        return max(times, key=lambda name: times[name]).removesuffix("_ms")


def knows(space: Space) -> bool:
    """Return whether there is a model for a space."""
    return family_of(space) is not None


def estimate(
    space: Space,
    values: Mapping[str, Any],
    problem: Problem,
    device: Device,
    registers: int | None = None,
    spill_bytes: int = 0,
) -> Estimate:
    """Estimate the time of one config.

    Args:
        space: That of the config.
        values: What `Space.values` returns.
        problem: What is computed.
        device: Where.
        registers: Per thread, as compiled; None predicts them, and the spills, from the config.
        spill_bytes: As compiled: spill stores plus loads.

    Raises:
        ConfigError: There is no model for the space, or a block does not fit on an SM.
        DeviceError: The device's clock is unknown, or its bandwidth where that decides.
    """
    parts = estimate_parts(space, values, problem, device, registers, spill_bytes)
    if not parts.pop("blocks"):
        raise ConfigError(
            f"no estimate: a block of {values['num_threads']} threads with {parts['registers']} registers "
            f"each and {values['smem_bytes']} bytes of shared memory does not fit on an SM of {device.name}: "
            "give a smaller tile or fewer stages"
        )
    ms, used, spilled = (float(parts.pop(name)) for name in ("ms", "registers", "spill_bytes"))
    return Estimate(ms, int(used), int(spilled), {name: float(part) for name, part in parts.items()})


def estimate_columns(
    space: Space,
    values: Mapping[str, Any],
    problem: Problem,
    device: Device,
    registers: Any = None,
    spill_bytes: Any = 0,
) -> Any:
    """Estimate many configs at once.

    Args:
        space: That of the configs.
        values: Each name to a column `[configs]` (words as text), or to one value that all share.
        problem: What is computed.
        device: Where.
        registers: Column as compiled; None predicts registers and spills.
        spill_bytes: Column as compiled.

    Returns:
        `[configs]` float64, ms; infinite where a block does not fit on an SM.

    Raises:
        ConfigError: There is no model for the space.
        DeviceError: The device's clock is unknown, or its bandwidth where that decides.
    """
    parts = estimate_parts(space, values, problem, device, registers, spill_bytes)
    return np.where(parts["blocks"] > 0, parts["ms"], np.inf)


def reading_tile(space: Space, values: Mapping[str, Any]) -> tuple[int, int]:
    """Return what `autotune.families.Family.reading_tile` does; without a module it is a thread's outputs."""
    family = family_of(space)
    if family is not None:
        return family.reading_tile(values)
    return int(values.get("TM", 1)), int(values.get("TN", 1))


def relief(space: Space) -> Mapping[str, tuple[str, str]]:
    """Return `autotune.families.Family.RELIEF`; without a module there is none."""
    family = family_of(space)
    return {} if family is None else family.RELIEF


def estimate_parts(
    space: Space,
    values: Mapping[str, Any],
    problem: Problem,
    device: Device,
    registers: Any = None,
    spill_bytes: Any = 0,
) -> dict[str, Any]:
    """Return what `autotune.families.Family.parts` does, of one config or of columns of configs.

    Raises:
        ConfigError: There is no model for the space.
        DeviceError: The device's clock is unknown, or its bandwidth where that decides.
    """
    family = family_of(space)
    if family is None:
        raise ConfigError(f"no estimate: there is no model for {space.family}")
    if not device.clock_mhz:
        raise DeviceError(f"no estimate for {device.name}: its clock is unknown")
    return family.parts(values, problem, device, registers, spill_bytes)
