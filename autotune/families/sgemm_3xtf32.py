"""The model of `sgemm_3xtf32`: the time of a kernel on tensor cores, whose instructions are those of warps.

One step along k of the blocks that an SM holds takes the tensor cores' time, plus that of the instructions
issued beside them, plus what the buffers leave of the way to memory. That the three add up, and the constants
without a source, were fitted on an H200 (NVRTC 13.0): 320 kernels of warpgroups at 150 shapes, 250 of warps
at 180. Four in five take 0.85 to 1.25 times what is estimated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from autotune.model.account import traffic_bytes
from autotune.model.occupancy import SCHEDULERS, WARP, resident_blocks
from autotune.values.device import Device
from autotune.values.problem import FLOAT_BYTES, Problem

BESIDE_CLOCKS = 0.95  # of an instruction beside the tensor cores, for one scheduler
SPLIT_SLOTS = 3.0  # instructions that split one float
COPY_SLOTS = 8.0  # one cp.async with its addresses
ENOUGH_WARPS = 1.9  # of a scheduler, to hide how long a product takes
WARP_RATE = 0.5  # what mma.sync reaches of the rate of warpgroups where there are any
EXPOSED_CLOCKS = 450.0  # of the way to memory, shared by the buffers but one
STORES = 1.4  # of the time that C's bytes take, on top: nothing multiplies meanwhile
START_CLOCKS = 2500.0  # until a block's first step, and from its last to the end
MEETING_CLOCKS = 2500.0  # for blocks to keep their partial sums, count themselves in, and one to go on
EXPOSED_MEMORY = 0.5  # of the time that device memory needs, on top: blocks are few where it counts
L2_BYTES_PER_CLOCK = 48.0  # per SM: 5120 bytes per clock for 108 SMs, NVIDIA A100 whitepaper
REGISTER_BASE = 57.0  # beside sums and fragments
SPILL_BYTES_PER_REGISTER = 10.0

# What the model reads of a config: that of all kernels on tensor cores, then its own.
COMMON_NAMES = frozenset(
    {"BM", "BN", "BK", "split_k", "stages", "num_threads", "smem_bytes", "a_pieces", "b_pieces"}
    | {"tiles_m", "tiles_n", "tiles_k", "sum_group", "sum_groups", "min_blocks"}
)
NAMES = COMMON_NAMES | {"WM", "WN", "promote"}
FOLLOWS: frozenset[str] | None = None  # the whole space is listed within milliseconds


RELIEF = {
    "issue": (
        "instruction issue: operands are split, copied and read, and sums promoted, beside the tensor cores",
        "a larger tile (BM, BN; WM, WN) splits and reads less for each product, a longer promote adds less",
    ),
    "shared": (
        "shared memory: fragments, tile copies and what is split fill its pipe",
        "a larger warp or block tile reads fewer floats for each product",
    ),
}


def reading_tile(v: Mapping[str, Any]) -> tuple[int, int]:
    """Return the outputs of a warp, which reads the fragments of its own."""
    return int(v["WM"]), int(v["WN"])


def parts(
    v: Mapping[str, Any], problem: Problem, device: Device, registers: Any, spill_bytes: Any
) -> dict[str, Any]:
    """Return what `autotune.families.Family.parts` says."""
    if registers is None:
        need = 2 * v["WM"] * v["WN"] / WARP + (v["WM"] + v["WN"]) / 2 + REGISTER_BASE
        registers, spill_bytes = capped_registers(need, v, device)
    rate = device.tf32_multiplies_per_sm * (WARP_RATE if device.capability >= 90 else 1)
    rate = max(rate if device.capability < 120 else 2 * rate, 1)
    fragments = (v["WM"] + v["WN"]) / 4
    sums = v["WM"] * v["WN"] / WARP
    slots = v["BK"] / 8 * ((1 + SPLIT_SLOTS) * fragments + sums * 8 / v["promote"])
    copies = COPY_SLOTS * (v["a_pieces"] + v["b_pieces"]) / v["num_threads"]
    parts = tensor_parts(
        *(v, problem, device, registers, spill_bytes),
        clocks=3 * v["BM"] * v["BN"] * v["BK"] / rate,
        slots=slots + copies,
        beside=BESIDE_CLOCKS,
        exposed=EXPOSED_CLOCKS,
        enough_warps=ENOUGH_WARPS,  # a warp waits for its own products: too few leave the tensor cores idle
    )
    c_bytes = FLOAT_BYTES * problem.batch * problem.m * problem.n * (1 + problem.beta)
    parts["ms"] = parts["ms"] + STORES * c_bytes / max(device.bandwidth_gbs, 1) * 1e-6
    return parts


def tensor_parts(
    v: Mapping[str, Any],
    problem: Problem,
    device: Device,
    registers: Any,
    spill_bytes: Any,
    *,
    clocks: Any,
    slots: Any,
    beside: float,
    exposed: Any,
    enough_warps: float,
) -> dict[str, Any]:
    """Return the parts of a kernel on tensor cores, given what one block does in one step along k.

    Args:
        v: Values or columns of `COMMON_NAMES`.
        problem: What is computed.
        device: Where.
        registers: Per thread.
        spill_bytes: Of a thread.
        clocks: Of the tensor cores.
        slots: Issue slots of a warp for other instructions.
        beside: Clocks of one of these, for one scheduler.
        exposed: Clocks of the way to memory, shared by the buffers but one and by the resident blocks.
        enough_warps: Of a scheduler, to keep the tensor cores busy.
    """
    threads, grid = v["num_threads"], problem.batch * v["tiles_m"] * v["tiles_n"] * v["split_k"]
    blocks, queue, resident = resident_blocks(device, grid, registers, threads, v["smem_bytes"])
    scheduled = resident * threads / (WARP * SCHEDULERS)  # warps of one scheduler

    # Clocks of one step along k of all resident blocks.
    spill_slots = spill_bytes / FLOAT_BYTES
    idle = np.maximum(1.0, enough_warps / scheduled) ** 0.5
    tensor = resident * clocks * idle
    issue = beside * scheduled * (slots + spill_slots) * idle
    stall = exposed / (np.maximum(1, v["stages"] - 1) * resident)
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
    times = {"tensor": tensor, "issue": issue, "stall": stall, "l2": l2}
    busy = np.maximum(step * steps_ms + (rounds * START_CLOCKS + sums) * ms_per_clock, dram_ms)
    return {
        "ms": busy + EXPOSED_MEMORY * dram_ms,
        "blocks": blocks,
        "registers": registers,
        "spill_bytes": spill_bytes,
        **{f"{name}_ms": time * steps_ms for name, time in times.items()},
        "dram_ms": dram_ms,
        "occupancy": blocks * threads / device.max_threads_per_sm,
        "latency_factor": 1 - stall / (tensor + issue + stall),
        "wave_efficiency": grid / (queue * device.sm_count),
        "spill_share": spill_slots / (slots + spill_slots),
    }


def capped_registers(need: Any, v: Mapping[str, Any], device: Device) -> tuple[Any, Any]:
    """Return (registers per thread, spill bytes) of a kernel that needs so many registers."""
    share = device.registers_per_sm // (v["num_threads"] * v["min_blocks"]) // 8 * 8
    cap = np.minimum(device.registers_per_thread, share)
    spilled = SPILL_BYTES_PER_REGISTER * np.maximum(0, need - cap)
    return np.asarray(np.minimum(need, cap)).astype(np.int64), np.asarray(spilled).astype(np.int64)
