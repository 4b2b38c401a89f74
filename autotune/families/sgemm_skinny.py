"""The model of `sgemm_skinny`: the time of a kernel that streams the large operand past the small one.

A turn of a block takes the smoothed largest of these times, of all blocks that an SM holds:

    dram     bytes of the wide operand, at the SM's share of the bandwidth or that its loads in flight get
    issue    warp instructions through four schedulers, slowed where few warps hide each other's latency
    shared   cycles of the shared-memory unit that the narrow operand is read in
    L2       bytes of both operands through the SM's port to L2

Times turns, times the blocks that the busiest SM works through, and what starting and adding up take.
Constants without a source were fitted on an H200 (NVRTC 13.0): 1,508 kernels of 14 shapes, operands cold.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from autotune.errors import DeviceError
from autotune.model.account import traffic_bytes
from autotune.model.occupancy import SCHEDULERS, WARP, resident_blocks
from autotune.values.device import Device
from autotune.values.problem import FLOAT_BYTES, Problem

# Times in SM clocks, instructions in issue slots of one warp.
BANDWIDTH_SHARE = 0.95  # of the datasheet's bandwidth that loads alone reach
LATENCY = 860.0  # from a load to its data, under load
BOTH_SETS = 1.6  # loads in flight where the next set of quads is loaded early, over those where it is not
MEMORY_SHARPNESS = 4.0  # exponent of the smoothed minimum of bandwidth and loads in flight
TURN_SLOTS = 38.0  # addresses, barrier and copies of the narrow operand
SPILL_SLOTS = 2.0  # per byte of spill code: 8 for each 4-byte load or store
LATENCY_WARPS = 0.95  # warps of a scheduler lost to latency
L2_BYTES_PER_CLOCK = 30.0  # narrow operand, per SM
WIDE_BYTES_PER_CLOCK = 64.0  # wide operand, per SM
SHARPNESS = 2.2  # exponent of the smoothed maximum
START_CLOCKS = 800.0  # once
ROUND_CLOCKS = 2700.0  # for each round of resident blocks: first loads, last barriers
OUTPUT_CLOCKS = 46.0  # for each output of a thread: adding up lanes and warps
MEETING_CLOCKS = 1700.0  # for blocks to count themselves in and one to go on
SUM_BYTES_PER_CLOCK = 48.0  # partial sums, read back from L2

# Registers that the compiler takes when nothing caps them (error 29, one sigma).
REGISTER_BASE = 48.0
REGISTERS_PER_NARROW = 0.9
REGISTERS_PER_LOADED = 1.0
REGISTERS_PER_UNROLLED = 0.3

# What the model reads of a config.
NAMES = frozenset(
    {"TM", "TN", "narrow", "TW", "LW", "VK", "BW", "BK", "loaded", "turns", "stages", "unroll_k"}
    | {"vec_w", "tiles", "tiles_k", "split_k", "num_threads", "min_blocks", "smem_bytes"}
)
FOLLOWS: frozenset[str] | None = None  # the whole space is listed within milliseconds


RELIEF = {
    "issue": (
        "instruction issue: FFMAs and what is issued beside them fill the schedulers",
        "a larger TW reads the narrow operand less per FFMA, unroll_k = 2 halves addresses and barriers",
    ),
    "banks": (
        "register banks: FFMAs whose operands lie in one bank wait for {waited:.0%} of the issue time",
        "an operand's floats of one k lie in one bank, as it is read four k at a time; another stages or "
        "unroll_k changes which registers meet",
    ),
    "shared": (
        "shared memory: reads of the narrow operand fill its pipe",
        "a larger TW reads fewer of its floats per FFMA",
    ),
    "dram": (
        "memory bandwidth: the large operand moves once and that takes the time",
        "more of it in flight (stages = 2, unroll_k, blocks_per_sm), then nothing but fewer bytes",
    ),
    "l2": (
        "L2 bandwidth: every block reads the narrow operand",
        "a wider tile (warps_w, TW) reads it less often",
    ),
}


def reading_tile(v: Mapping[str, Any]) -> tuple[int, int]:
    """Return the outputs of a thread, which reads the fragments of its own."""
    return int(v["TM"]), int(v["TN"])


def parts(
    v: Mapping[str, Any], problem: Problem, device: Device, registers: Any, spill_bytes: Any
) -> dict[str, Any]:
    """Return what `autotune.families.Family.parts` says.

    Raises:
        DeviceError: The device's memory bandwidth is unknown.
    """
    if not device.bandwidth_gbs:
        raise DeviceError(f"no estimate for {device.name}: its memory bandwidth is unknown")
    if registers is None:
        registers, spill_bytes = predicted_registers(v, device), 0 * v["tiles"]
    threads, grid = v["num_threads"], problem.batch * v["tiles"] * v["split_k"]
    blocks, queue, resident = resident_blocks(device, grid, registers, threads, v["smem_bytes"])
    warps = threads / WARP
    scheduled = resident * warps / SCHEDULERS

    # Clocks of one turn of one block.
    moved = FLOAT_BYTES * v["loaded"] * threads
    called = FLOAT_BYTES * v.get("ahead", 0) * v["BW"] * v["BK"]  # into L2
    in_flight = resident * (moved * np.where(v["stages"] == 2, BOTH_SETS, 1) + called)
    share = BANDWIDTH_SHARE * device.bandwidth_gbs * 1e3 / device.clock_mhz / device.sm_count
    rate = (share**-MEMORY_SHARPNESS + (in_flight / LATENCY) ** -MEMORY_SHARPNESS) ** (-1 / MEMORY_SHARPNESS)
    reads = v["narrow"] * v["unroll_k"] * 4 / v["VK"]
    spill_slots = SPILL_SLOTS * spill_bytes / v["turns"]
    slots = v["narrow"] * v["loaded"] + reads + v["loaded"] / v["vec_w"] + TURN_SLOTS + spill_slots
    # Lanes that read the same are served together: half as many cycles as a read of their width would take.
    wavefronts = np.maximum(1, v["VK"] / np.where(v["LW"] >= 2, 2, 1))
    latency = scheduled / (scheduled + LATENCY_WARPS)
    narrow_bytes = FLOAT_BYTES * v["narrow"] * v["BK"] / v["turns"]
    clocks = {
        "dram": moved / rate,
        "issue": warps * slots / SCHEDULERS / latency,
        "shared": warps * reads * wavefronts,
        "l2": narrow_bytes / L2_BYTES_PER_CLOCK + moved / WIDE_BYTES_PER_CLOCK,
    }
    turn = sum(time**SHARPNESS for time in clocks.values()) ** (1 / SHARPNESS)

    turns = queue * -(-v["tiles_k"] // v["split_k"]) * v["turns"]
    added = MEETING_CLOCKS + FLOAT_BYTES * v["split_k"] * v["narrow"] * v["BW"] / SUM_BYTES_PER_CLOCK
    once = (
        START_CLOCKS
        + ROUND_CLOCKS * np.ceil(queue / resident)
        + OUTPUT_CLOCKS * v["narrow"] * v["TW"]
        + np.where(v["split_k"] > 1, added, 0)
    )
    ms_per_clock = 1e-3 / device.clock_mhz
    floor_ms = traffic_bytes(problem) / device.bandwidth_gbs * 1e-6
    return {
        "ms": np.maximum((turn * turns + once) * ms_per_clock, floor_ms),
        "blocks": blocks,
        "registers": registers,
        "spill_bytes": spill_bytes,
        **{f"{name}_ms": time * turns * ms_per_clock for name, time in clocks.items()},
        "occupancy": blocks * warps / (device.max_threads_per_sm // WARP),
        "latency_factor": latency,
        "wave_efficiency": grid / (queue * device.sm_count),
        "spill_share": spill_slots / slots,
    }


def predicted_registers(v: Mapping[str, Any], device: Device) -> Any:
    """Predict registers per thread before compiling; values may be columns."""
    need = (
        REGISTER_BASE
        + v["narrow"] * (v["TW"] + REGISTERS_PER_NARROW)
        + v["loaded"] * (REGISTERS_PER_LOADED + REGISTERS_PER_UNROLLED * v["turns"])
    )
    fair_share = device.registers_per_sm // (v["num_threads"] * v["min_blocks"]) // 8 * 8
    return np.minimum(need, np.minimum(device.registers_per_thread, fair_share)).astype(np.int64)
