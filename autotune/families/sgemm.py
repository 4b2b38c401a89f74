"""The model of `sgemm`: the time of a kernel whose tiles are staged through shared memory.

One step along k takes an SM the largest, smoothed, of these times:

    issue    warp instructions through four schedulers, slowed where few warps hide each other's latency
    shared   cycles of the shared-memory unit: fragment reads and tile copies
    fetch    instructions streamed past a cache that the main loop overflows
    stall    what the buffers leave of the way to memory: with one, load and compute take turns
    L2       tile bytes through the SM's port to L2

Times steps, times the blocks that the busiest SM works through, and what adding up parts of k takes; not
below what device memory needs. Constants without a source were fitted on an H200 (NVRTC 13.0), the same for
all sizes: 3,057 configs of a sweep at 4096 cubed, 662 that tuning runs chose and 340 drawn at random at 1024
and 4096 cubed; those of waiting, of operands kept along k and of parts of k on 1,400 of short searches on 15
shapes, from 256 cubed to 32 x 18944 x 3584.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from autotune.model.account import traffic_bytes
from autotune.model.occupancy import SCHEDULERS, WARP, resident_blocks
from autotune.values.device import Device
from autotune.values.problem import FLOAT_BYTES, Problem

# Instructions are counted in issue slots of one warp, times in SM clocks.
COPY_SLOTS = 8.0  # one copy of a tile's piece (cp.async, or load with its store): far more than its own slot
STAGE_SLOTS = 2.0  # per k of a step, where the buffer is not a compile-time constant: address arithmetic
SPILL_SLOTS = 2.0  # per byte of spill code: 8 for each 4-byte load or store
EXPOSED_READ = 8.0  # clocks per k that a scheduler waits for fragments that are not loaded one k ahead
LATENCY_WARPS = 0.25  # warps of a scheduler lost to latency: w warps fill w / (w + this) of its slots
READ_CLOCKS = 4.0  # shared-memory unit, 16-byte read by a warp: 512 bytes at 128 bytes per clock
PAIRED_READ_CLOCKS = 3.0  # the same where lanes n and n^1, or n and n^2, read the same 16 bytes
COPY_CLOCKS = 2.0  # shared-memory unit, one copy by a warp
LOOP_CACHE_BYTES = 32768  # instruction cache that a main loop must fit into
INSTRUCTION_BYTES = 16  # since Volta
FETCH_CLOCKS = 2.0  # per instruction of a loop that does not fit; one fetch serves two warps of a scheduler
GLOBAL_LATENCY = 850.0  # clocks from a global load to its data
WAIT_CLOCKS = 800.0  # at least, of a step, for what was asked for one buffer earlier
KEPT_SHARE = 0.17  # of the issue slots, lost to register banks for each operand that is kept along k
MEETING_CLOCKS = 5000.0  # for blocks to keep their partial sums, count themselves in, and one to go on
CLUSTER_CLOCKS = 2500.0  # the same for the blocks of a cluster: 1.2 to 2.3 us less than through the workspace
DRAM_ACCESS_BYTES = 64
TURN_MS = 0.002  # for a kernel to begin that turns an operand first
L2_BYTES_PER_CLOCK = 48.0  # per SM: 5120 bytes per clock for 108 SMs, NVIDIA A100 whitepaper
SHARPNESS = 10.0  # exponent of the smoothed maximum

# Registers that the compiler takes when nothing caps them; fitted on the same kernels (error 11, one sigma).
REGISTER_BASE = 44.0
REGISTERS_PER_OUTPUT = 1.16
REGISTERS_PER_OPERAND = 0.4
REGISTERS_PER_PIPELINED_OPERAND = 0.55
REGISTERS_PER_STAGED_FLOAT = 0.6
SQUEEZED_REGISTERS = 20.0  # that the compiler saves without spilling
SPILL_BYTES_PER_REGISTER = 10.0

# What the model reads of a config.
NAMES = frozenset(
    {"BM", "BN", "BK", "TM", "TN", "VM", "VN", "LN", "tiles_m", "tiles_n", "tiles_k", "num_threads"}
    | {"smem_bytes", "transpose_a", "a_transposes", "b_along_k", "vec_a", "vec_b", "a_pieces"}
    | {"b_pieces", "loader", "stages", "fragment_pipeline", "unroll_stages", "min_blocks"}
)
FOLLOWS: frozenset[str] | None = frozenset(
    {"VM", "VN", "split_k", "transpose_a", "transpose_b", "read_k", "vec_a", "vec_b", "vec_c", "spread_n"}
    | {"turn_a", "turn_b", "smem_pad", "edge", "group_m", "lane_order"}
)
# What the model reads too, with the value of a space that lacks the choice.
CHOICES: dict[str, Any] = dict.fromkeys(
    {"split_k", "blocks", "most_parts", "warps_k", "read_k", "transpose_b", "sum_group", "sum_groups"}
    | {"together_a", "together_b", "cluster_k"},
    1,
) | {"turn_a": 0, "turn_b": 0, "lane_order": "rows"}


RELIEF: Mapping[str, tuple[str, str]] = {}  # what is said of any kernel is said of this family


def reading_tile(v: Mapping[str, Any]) -> tuple[int, int]:
    """Return the outputs of a thread, which reads the fragments of its own."""
    return int(v["TM"]), int(v["TN"])


def _dram_bytes(v: Mapping[str, Any], problem: Problem, device: Device) -> Any:
    """Return the bytes that DRAM moves: of operands beyond L2 whole accesses of each row."""
    found: Any = traffic_bytes(problem)
    a_along, b_along = problem.layout[0] == "n", problem.layout[1] == "t"
    for along, turned, rows in ((a_along, v["turn_a"], problem.m), (b_along, v["turn_b"], problem.n)):
        size = FLOAT_BYTES * rows * problem.k
        if along and size > device.l2_bytes:
            extra = np.maximum(0, DRAM_ACCESS_BYTES / (FLOAT_BYTES * v["BK"]) - 1)
            found = found + size * np.where(turned, 0, extra)
    return found


def _turning_ms(v: Mapping[str, Any], problem: Problem, device: Device) -> Any:
    """Return the time of the kernels that turn an operand before the product, reading and writing it once."""
    if not device.bandwidth_gbs:
        return 0.0
    floats = problem.k * (v["turn_a"] * problem.m + v["turn_b"] * problem.n)
    return 2 * FLOAT_BYTES * floats / device.bandwidth_gbs * 1e-6 + TURN_MS * (v["turn_a"] + v["turn_b"])


def parts(
    v: Mapping[str, Any], problem: Problem, device: Device, registers: Any, spill_bytes: Any
) -> dict[str, Any]:
    """Return what `autotune.families.Family.parts` says."""
    if registers is None:
        registers, spill_bytes = predicted_registers(v, device)
    v = {**CHOICES, **v}
    shares, tiles = v["split_k"] == 0, v["tiles_m"] * v["tiles_n"]
    threads, grid = v["num_threads"], problem.batch * np.where(shares, v["blocks"], tiles * v["split_k"])
    steps = -(-np.where(shares, tiles, 1) * v["tiles_k"] // np.where(shares, v["blocks"], v["split_k"]))
    blocks, queue, resident = resident_blocks(device, grid, registers, threads, v["smem_bytes"])
    warps = threads // WARP
    scheduled = resident * warps / SCHEDULERS  # warps of one scheduler

    depth = v["BK"] / v["warps_k"]  # of a step, for one warp
    ffmas = v["TM"] * v["TN"] * depth
    slots, reads = _instructions(v, ffmas)
    unrolled = np.where(v["unroll_stages"] == 1, v["stages"], 1)  # steps in the main loop's code
    spill_slots = SPILL_SLOTS * spill_bytes / unrolled
    slots = slots + spill_slots

    # Clocks of one step along k of all resident blocks.
    pipe = ffmas * WARP * SCHEDULERS / device.fp32_lanes_per_sm  # 64 lanes take an FFMA every second clock
    latency = scheduled / (scheduled + LATENCY_WARPS)
    exposed = np.where(v["fragment_pipeline"] == 1, 0, EXPOSED_READ * depth) / scheduled
    kept = (1 - v["transpose_a"]) + (1 - v["transpose_b"])  # operands kept along k
    banks = np.where(v["read_k"] > 1, 1 + KEPT_SHARE * kept, 1)
    issue = scheduled * (np.maximum(slots, pipe) * banks + exposed) / latency
    copies = (v["a_pieces"] + v["b_pieces"]) / WARP
    shared = resident * (warps * reads + COPY_CLOCKS * copies)
    loop_bytes = INSTRUCTION_BYTES * slots * unrolled
    fetch = np.where(loop_bytes > LOOP_CACHE_BYTES, FETCH_CLOCKS * slots * np.maximum(1, scheduled / 2), 0)
    alone = GLOBAL_LATENCY + warps / SCHEDULERS * slots
    stall = np.where(v["stages"] == 1, alone, WAIT_CLOCKS / np.maximum(1, v["stages"] - 1))
    l2 = resident * FLOAT_BYTES * v["BK"] * (v["BM"] + v["BN"]) / L2_BYTES_PER_CLOCK
    clocks = {"issue": issue, "shared": shared, "fetch": fetch, "stall": stall, "l2": l2}
    step = sum(time**SHARPNESS for time in clocks.values()) ** (1 / SHARPNESS)

    rounds = queue / resident
    ms_per_clock = 1e-3 / device.clock_mhz
    steps_ms = rounds * steps * ms_per_clock
    added = np.where(v["sum_groups"] > 1, v["sum_group"] + v["sum_groups"], v["sum_group"])
    added = np.where(shares, v["most_parts"], added)
    meetings = np.where(v["split_k"] == v["cluster_k"], 0, np.where(v["sum_groups"] > 1, 2, 1))
    tile_bytes = FLOAT_BYTES * v["BM"] * v["BN"]
    kept_bytes = added * tile_bytes / v["cluster_k"]  # each block of a cluster adds up its rows
    sums = np.where(meetings > 0, meetings * MEETING_CLOCKS + kept_bytes / L2_BYTES_PER_CLOCK, 0)
    sums = sums + np.where(v["cluster_k"] > 1, CLUSTER_CLOCKS, 0)
    dram_ms = _dram_bytes(v, problem, device) / device.bandwidth_gbs * 1e-6 if device.bandwidth_gbs else 0.0
    product_ms = np.maximum(step * steps_ms + (rounds * GLOBAL_LATENCY + sums) * ms_per_clock, dram_ms)
    return {
        "ms": product_ms + _turning_ms(v, problem, device),
        "blocks": blocks,
        "registers": registers,
        "spill_bytes": spill_bytes,
        **{f"{name}_ms": time * steps_ms for name, time in clocks.items()},
        "dram_ms": dram_ms,
        "occupancy": blocks * warps / (device.max_threads_per_sm // WARP),
        "latency_factor": latency,
        "wave_efficiency": grid / (queue * device.sm_count),
        "spill_share": spill_slots / slots,
    }


def _instructions(v: Mapping[str, Any], ffmas: Any) -> tuple[Any, Any]:
    """Return, for a warp and a step, its issue slots without spills and the clocks of its shared reads."""
    width_m, width_n = np.minimum(v["VM"], 4), np.minimum(v["VN"], 4)
    width_m = np.where(v["transpose_a"] == 1, width_m, 1)
    width_n = np.where(v["transpose_b"] == 1, width_n, 1)
    width_m = np.where((v["transpose_a"] == 0) & (v["read_k"] > 1), v["read_k"], width_m)
    width_n = np.where((v["transpose_b"] == 0) & (v["read_k"] > 1), v["read_k"], width_n)
    depth = v["BK"] / v["warps_k"]
    reads_m, reads_n = depth * v["TM"] / width_m, depth * v["TN"] / width_n
    # Lanes i and i^1 share A unless the grid has one column, i and i^2 share B by order or if it has two.
    clocks_m = np.where(v["LN"] > 1, PAIRED_READ_CLOCKS, READ_CLOCKS) * width_m / 4
    paired_n = (v["LN"] <= 2) | ((np.asarray(v["lane_order"]) == "pairs") & (v["LN"] < WARP))
    clocks_n = np.where(paired_n, PAIRED_READ_CLOCKS, READ_CLOCKS) * width_n / 4

    copies_a, copies_b = v["a_pieces"] / v["num_threads"], v["b_pieces"] / v["num_threads"]
    # Where stores transpose, each is one float of one stored row, or of several that are loaded together.
    stores_a = copies_a * np.where(v["a_transposes"], v["vec_a"] / v["together_a"], 1)
    across_b = np.logical_and(v["b_along_k"], v["transpose_b"] == 1)
    stores_b = copies_b * np.where(across_b, v["vec_b"] / v["together_b"], 1)
    copies = copies_a + copies_b + np.where(v["loader"] == "reg", stores_a + stores_b, 0)
    addresses = np.where(v["unroll_stages"] == 1, 0, STAGE_SLOTS * depth)
    slots = ffmas + reads_m + reads_n + COPY_SLOTS * copies + addresses
    return slots, reads_m * clocks_m + reads_n * clocks_n


def predicted_registers(values: Mapping[str, Any], device: Device) -> tuple[Any, Any]:
    """Predict (registers per thread, spill bytes) before compiling; values may be columns.

    The compiler caps registers at what lets the promised blocks fit on an SM. It saves some without spilling.
    """
    outputs, operands = values["TM"] * values["TN"], values["TM"] + values["TN"]
    threads = values["num_threads"]
    tile = (values["BM"] + values["BN"]) * values["BK"]
    need = (
        REGISTER_BASE
        + REGISTERS_PER_OUTPUT * outputs
        + (REGISTERS_PER_OPERAND + REGISTERS_PER_PIPELINED_OPERAND * values["fragment_pipeline"]) * operands
        + REGISTERS_PER_STAGED_FLOAT * np.where(values["loader"] == "reg", tile / threads, 0)
    )
    fair_share = device.registers_per_sm // (threads * values["min_blocks"]) // 8 * 8
    cap = np.minimum(device.registers_per_thread, fair_share)
    spilled = SPILL_BYTES_PER_REGISTER * np.maximum(0, need - cap - SQUEEZED_REGISTERS)
    return np.minimum(need, cap).astype(np.int64), spilled.astype(np.int64)
