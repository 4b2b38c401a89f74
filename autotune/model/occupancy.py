"""Occupancy: how many blocks of a kernel an SM holds at a time, and which resource allows no more.

Source: CUDA C++ Programming Guide, "Hardware Multithreading" and "Shared Memory"; allocation granularities as
in the vendor's occupancy calculator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.values.device import Device

WARP = 32
SCHEDULERS = 4  # sub-partitions of an SM: each has its own scheduler and a quarter of the registers
REGISTER_GRANULARITY = 256  # registers are given to a warp in this unit: 8 per thread
RESERVED_SHARED = 1024  # bytes of a block's shared memory that the system keeps, from compute capability 8.0


@dataclass(frozen=True)
class Occupancy:
    """How many blocks of one kernel are resident on an SM at a time.

    Attributes:
        limits: Blocks that each resource alone would allow: "registers", "shared", "warps", "blocks".
        blocks: Resident blocks, the least of the limits; 0 means that the kernel cannot start.
        warps: Resident warps.
        max_warps: Warps an SM can hold.
        sm_count: SMs of the device.
    """

    limits: dict[str, int]
    blocks: int
    warps: int
    max_warps: int
    sm_count: int

    @property
    def limited_by(self) -> tuple[str, ...]:
        """The resources that allow no further block."""
        return tuple(name for name, blocks in self.limits.items() if blocks == self.blocks)

    @property
    def fraction(self) -> float:
        """Resident warps over those an SM can hold, 0 to 1."""
        return self.warps / self.max_warps

    def waves(self, grid: int) -> float:
        """Return a grid's blocks over those that the whole GPU holds at a time.

        Raises:
            ValueError: No block fits on an SM.
        """
        if not self.blocks:
            raise ValueError(f"a block does not fit on an SM: {', '.join(self.limited_by)} allow none")
        return grid / (self.blocks * self.sm_count)


def occupancy(
    device: Device, registers: int, threads: int, shared_bytes: int, carve_out: int | None = None
) -> Occupancy:
    """Count the blocks of a kernel that an SM holds at a time.

    Args:
        device: Where it runs.
        registers: Per thread.
        threads: Per block.
        shared_bytes: Dynamic plus static shared memory of a block.
        carve_out: Bytes of an SM's L1 cache that serve as shared memory; None is the largest carve-out.
    """
    found = block_limits(device, registers, threads, shared_bytes, carve_out)
    limits = {name: int(blocks) for name, blocks in found.items()}
    blocks = min(limits.values())
    return Occupancy(
        limits, blocks, blocks * -(-threads // WARP), device.max_threads_per_sm // WARP, device.sm_count
    )


def block_limits(
    device: Device, registers: Any, threads: Any, shared_bytes: Any, carve_out: int | None = None
) -> dict[str, Any]:
    """Return the resident blocks that each resource alone allows; the numbers may be columns of integers."""
    warps = -(-threads // WARP)
    register_unit = -(-registers * WARP // REGISTER_GRANULARITY) * REGISTER_GRANULARITY  # of one warp
    register_warps = SCHEDULERS * (device.registers_per_sm // SCHEDULERS // np.maximum(register_unit, 1))
    reserved = RESERVED_SHARED if device.capability >= 80 else 0
    shared = device.shared_per_sm if carve_out is None else carve_out
    return {
        "registers": register_warps // warps,
        "shared": shared // np.maximum(shared_bytes + reserved, 1),
        "warps": device.max_threads_per_sm // WARP // warps,
        "blocks": np.full_like(warps, device.max_blocks_per_sm),
    }


def resident_blocks(device: Device, grid: Any, registers: Any, threads: Any, shared_bytes: Any) -> Any:
    """Return the blocks that an SM can hold, those that the busiest SM runs, and how many of these at a time.

    The numbers may be columns of integers. The last is 1 at least: it divides.
    """
    limits = block_limits(device, registers, threads, shared_bytes)
    blocks = np.minimum.reduce([np.asarray(limit) for limit in limits.values()])
    queue = -(-grid // device.sm_count)
    return blocks, queue, np.maximum(1, np.minimum(blocks, queue))
