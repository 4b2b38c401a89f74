"""Turns a config of a family on tensor cores into the parts of its estimate, by arithmetic alone.

The same kind of model as `autotune.families.estimate`, which calls it: an order, never a measurement. One
step along k of the blocks that an SM holds takes the tensor cores' time, plus that of the instructions issued
beside them, plus what the buffers leave of the way to memory. That the three add up, and the constants
without a source, were fitted on an H200 (NVRTC 13.0): 186 kernels of warpgroups at ten shapes (8 %, one
sigma), 14 of warps at 4096 cubed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from autotune.model.account import traffic_bytes
from autotune.model.occupancy import SCHEDULERS, WARP, block_limits
from autotune.values.device import Device
from autotune.values.problem import FLOAT_BYTES, Problem

BESIDE_WARPS = 0.95  # clocks of an instruction beside the tensor cores, for one scheduler
BESIDE_WARPGROUPS = 1.86  # the same where warpgroups multiply: fewer warps hide it
SPLIT_SLOTS = 3.0  # instructions that split one float
COPY_SLOTS = 3.0  # one cp.async with its addresses
EXPOSED_CLOCKS = 1780.0  # of the way to memory, shared by the buffers but one and by the resident blocks
ONE_MEETING = 0.85  # of them, where the warpgroups of a block meet once in a step
ENOUGH_WARPS = 1.5  # of a scheduler, to hide how long a product takes
WARP_RATE = 0.5  # what mma.sync reaches of the rate of warpgroups where there are any
START_CLOCKS = 2500.0  # until a block's first step, and from its last to the end
MEETING_CLOCKS = 2500.0  # for blocks to keep their partial sums, count themselves in, and one to go on
L2_BYTES_PER_CLOCK = 48.0  # per SM, as in `autotune.families.estimate`
WARP_REGISTERS = 57.0  # beside sums and fragments
WARPGROUP_REGISTERS = 90.0  # beside sums: rows of two tiles, addresses
SPILL_BYTES_PER_REGISTER = 10.0

_COMMON = {"BM", "BN", "BK", "split_k", "stages", "num_threads", "smem_bytes", "a_pieces", "b_pieces"}
_COMMON |= {"tiles_m", "tiles_n", "tiles_k", "sum_group", "sum_groups", "min_blocks"}
NAMES = frozenset({*_COMMON, "WM", "WN", "promote"})  # of a family that multiplies by warps
WARPGROUP_NAMES = frozenset({*_COMMON, "columns", "warpgroups", "splits"})


def knows(values: Mapping[str, Any]) -> bool:
    """Tell whether a family is one of those on tensor cores."""
    return values.keys() >= NAMES or values.keys() >= WARPGROUP_NAMES


def parts(
    v: Mapping[str, Any], problem: Problem, device: Device, registers: Any, spill_bytes: Any
) -> dict[str, Any]:
    """Give what `autotune.families.estimate` needs of one config or of columns of them.

    Args:
        v: What `Space.values` or `Space.columns` returns.
        problem: What is computed.
        device: Where.
        registers: Per thread, as compiled; None predicts them and the spills.
        spill_bytes: As compiled.

    Returns:
        "ms", "blocks" (that an SM holds), "registers", "spill_bytes", and the parts of `Estimate`.
    """
    by_warpgroups = "warpgroups" in v
    if registers is None:
        registers, spill_bytes = _registers(v, device)
    threads, grid = v["num_threads"], v["tiles_m"] * v["tiles_n"] * v["split_k"]
    limits = block_limits(device, registers, threads, v["smem_bytes"])
    blocks = np.minimum.reduce([np.asarray(limit) for limit in limits.values()])
    queue = -(-grid // device.sm_count)  # blocks that the busiest SM works through, `resident` at a time
    resident = np.maximum(1, np.minimum(blocks, queue))
    scheduled = resident * threads / (WARP * SCHEDULERS)  # warps of one scheduler

    # Clocks of one step along k of all resident blocks.
    tensor_clocks, slots = _warpgroup_step(v, device) if by_warpgroups else _warp_step(v, device)
    spill_slots = spill_bytes / FLOAT_BYTES
    # A warp waits for its own products: too few of them leave the tensor cores idle. Warpgroups do not wait.
    idle = 1.0 if by_warpgroups else np.maximum(1.0, ENOUGH_WARPS / scheduled) ** 0.5
    tensor = resident * tensor_clocks * idle
    beside = BESIDE_WARPGROUPS if by_warpgroups else BESIDE_WARPS
    issue = beside * scheduled * (slots + spill_slots) * idle
    meeting = np.where(v["splits"] == 2, 1.0, ONE_MEETING) if by_warpgroups else 1.0
    stall = EXPOSED_CLOCKS * meeting / (np.maximum(1, v["stages"] - 1) * resident)
    stall = stall if by_warpgroups else 0 * stall  # warps hide each other's
    l2 = resident * FLOAT_BYTES * v["BK"] * (v["BM"] + v["BN"]) / L2_BYTES_PER_CLOCK
    step = np.maximum(tensor + issue + stall, l2)

    rounds = queue / resident
    ms_per_clock = 1e-3 / device.clock_mhz
    steps_ms = rounds * -(-v["tiles_k"] // v["split_k"]) * ms_per_clock
    rounds_of_sums = np.where(v["split_k"] == 1, 0, np.where(v["sum_groups"] > 1, 2, 1))
    added = np.where(v["sum_groups"] > 1, v["sum_group"] + v["sum_groups"], v["sum_group"])
    sums = rounds_of_sums * MEETING_CLOCKS
    sums = sums + np.where(sums > 0, added * FLOAT_BYTES * v["BM"] * v["BN"] / L2_BYTES_PER_CLOCK, 0)
    dram_ms = traffic_bytes(problem) / device.bandwidth_gbs * 1e-6 if device.bandwidth_gbs else 0.0
    clocks = {"tensor": tensor, "issue": issue, "stall": stall, "l2": l2}
    return {
        "ms": np.maximum(step * steps_ms + (rounds * START_CLOCKS + sums) * ms_per_clock, dram_ms),
        "blocks": blocks,
        "registers": registers,
        "spill_bytes": spill_bytes,
        **{f"{name}_ms": time * steps_ms for name, time in clocks.items()},
        "dram_ms": dram_ms,
        "occupancy": blocks * threads / device.max_threads_per_sm,
        "latency_factor": 1 - stall / (tensor + issue + stall),
        "wave_efficiency": grid / (queue * device.sm_count),
        "spill_share": spill_slots / (slots + spill_slots),
    }


def _warp_step(v: Mapping[str, Any], device: Device) -> tuple[Any, Any]:
    """Give, for one step, a block's clocks of the tensor cores, and a warp's other issue slots."""
    slices = v["BK"] / 8
    rate = device.tf32_multiplies_per_sm * (WARP_RATE if device.capability >= 90 else 1)
    tensor = 3 * v["BM"] * v["BN"] * v["BK"] / max(rate if device.capability < 120 else 2 * rate, 1)
    fragments = (v["WM"] + v["WN"]) / 4
    sums = v["WM"] * v["WN"] / WARP
    slots = slices * ((1 + SPLIT_SLOTS) * fragments + sums * 8 / v["promote"])
    return tensor, slots + COPY_SLOTS * (v["a_pieces"] + v["b_pieces"]) / v["num_threads"]


def _warpgroup_step(v: Mapping[str, Any], device: Device) -> tuple[Any, Any]:
    """Give the same where warpgroups multiply."""
    tensor = 3 * v["BM"] * v["BN"] * v["BK"] / max(device.tf32_multiplies_per_sm, 1)
    rows = (1 + SPLIT_SLOTS) * v["BK"] / 2
    columns = v["columns"] * v["BK"] / v["num_threads"] * (SPLIT_SLOTS + 0.5)  # read and written by fours
    copies = COPY_SLOTS * (v["a_pieces"] + v["b_pieces"]) / v["num_threads"]
    return tensor, rows + columns + v["columns"] / 2 + copies


def _registers(v: Mapping[str, Any], device: Device) -> tuple[Any, Any]:
    """Predict (registers per thread, spill bytes)."""
    if "warpgroups" in v:
        need = v["columns"] + WARPGROUP_REGISTERS
    else:
        need = 2 * v["WM"] * v["WN"] / WARP + (v["WM"] + v["WN"]) / 2 + WARP_REGISTERS
    share = device.registers_per_sm // (v["num_threads"] * v["min_blocks"]) // 8 * 8
    cap = np.minimum(device.registers_per_thread, share)
    spilled = SPILL_BYTES_PER_REGISTER * np.maximum(0, need - cap)
    return np.asarray(np.minimum(need, cap)).astype(np.int64), np.asarray(spilled).astype(np.int64)
