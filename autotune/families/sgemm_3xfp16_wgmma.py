"""The model of `sgemm_3xfp16_wgmma`: the scan and the split of both operands, then the product.

The product takes the tensor cores' time at the rate that power leaves them, plus a start, and what one
warpgroup alone leaves idle while it promotes its sums. Constants were fitted on an H200 (NVRTC 13.0): kernels
at 1024 to 16384 cubed and seven other shapes, short runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from autotune.model.occupancy import resident_blocks
from autotune.values.device import Device
from autotune.values.problem import FLOAT_BYTES, Problem

RATE = 0.9  # of the tensor cores' peak, which power leaves
NARROW = 24.0  # columns by which a tile seems wider: rows are read from shared memory again for each
FLAT = 12.0  # rows, likewise: columns are fetched again for each
PROMOTION_CLOCKS = 2.0  # of an output of a thread that moves, where no other warpgroup multiplies meanwhile
OVERLAPPED = 0.05  # of a promotion that costs even where another one does: power
TWO_PROMOTIONS = 0.07  # of the tensor cores' time, lost to a second promotion in a step with two buffers
BUBBLE_CLOCKS = 100.0  # of each time, likewise: its products are waited for
EXPOSED_CLOCKS = 500.0  # of the way to memory, shared by the buffers but one
START_US = 6.0  # of the product: its start, first step and last outputs
SPLIT_START_US = 8.0  # of both kernels before it
NARROW_STORES = 2.2  # times that C's bytes take longer where they move one by one
SPLIT_RATE = 0.8  # of the memory's bandwidth that they reach
LEFT_US = 0.9  # of the blocks that an SM holds of the fallback, which return at once
LEFT_TILE = 128 * 128  # outputs of one of them

NAMES = frozenset(  # what the model reads of a config
    {"BM", "BN", "BK", "promote", "stages", "vec_c", "warpgroups", "num_threads", "smem_bytes"}
    | {"tiles_m", "tiles_n", "tiles_k"}
)
FOLLOWS: frozenset[str] | None = None  # the whole space is listed within milliseconds

RELIEF: Mapping[str, tuple[str, str]] = {
    "split": (
        "the scan and the split of the operands, which move them three times",
        "a B that is used again can be prepared once: Kernel.prepare",
    ),
    "stall": (
        "latency: too few buffers, or one warpgroup that promotes its sums while no other one multiplies",
        "more buffers (stages), or two warpgroups (BM = 128)",
    ),
}


def reading_tile(v: Mapping[str, Any]) -> tuple[int, int]:
    """Return the outputs of a warpgroup, which reads all columns of its block."""
    return 64, int(v["BN"])


def parts(
    v: Mapping[str, Any], problem: Problem, device: Device, registers: Any, spill_bytes: Any
) -> dict[str, Any]:
    """Return what `autotune.families.Family.parts` says."""
    if registers is None:  # warpgroups share them out anew when they run
        registers, spill_bytes = device.registers_per_sm // v["num_threads"] // 8 * 8, 0 * v["num_threads"]
    tiles = v["tiles_m"] * v["tiles_n"]
    blocks, rounds, _ = resident_blocks(device, tiles, registers, v["num_threads"], v["smem_bytes"])
    several = -(
        -problem.batch * tiles // device.sm_count
    )  # products whose tiles do not fill the GPU share it
    rounds = np.where(tiles < device.sm_count, several, problem.batch * rounds)
    ms_per_clock = 1e-3 / device.clock_mhz
    steps_ms = rounds * v["tiles_k"] * ms_per_clock
    multiplies = max(2 * device.tf32_multiplies_per_sm, 1) * RATE
    tensor = 3 * (v["BM"] + FLAT) * (v["BN"] + NARROW) * v["BK"] / multiplies
    promotion = v["BK"] // v["promote"] * (BUBBLE_CLOCKS + PROMOTION_CLOCKS * v["BN"] / 2)
    promoting = np.where(v["warpgroups"] == 1, promotion, OVERLAPPED * promotion)
    waits = (v["stages"] == 2) & (v["promote"] < v["BK"]) & (v["warpgroups"] < 3)
    twice = np.where(waits, TWO_PROMOTIONS * tensor, 0.0)
    stall = promoting + twice + EXPOSED_CLOCKS / np.maximum(1, 8 * (v["stages"] - 1))
    bandwidth = max(device.bandwidth_gbs, 1) * 1e6  # bytes per ms
    a_bytes, b_bytes, c_bytes = (
        FLOAT_BYTES * problem.batch * extent
        for extent in (problem.m * problem.k, problem.k * problem.n, problem.m * problem.n)
    )
    split_ms = SPLIT_START_US * 1e-3 + 3 * (a_bytes + b_bytes) / (SPLIT_RATE * bandwidth)
    left_ms = LEFT_US * 1e-3 * np.ceil(c_bytes / FLOAT_BYTES / LEFT_TILE / device.sm_count)
    # Nothing multiplies while outputs are written; that wide stores alone take is in the other constants.
    narrow = np.where(v["vec_c"] == 1, NARROW_STORES * (1 + problem.beta), 0.0)
    outputs_ms = (problem.beta + narrow) * c_bytes / bandwidth
    product = np.maximum((tensor + stall) * steps_ms + outputs_ms, (a_bytes + b_bytes + c_bytes) / bandwidth)
    return {
        "ms": split_ms + left_ms + START_US * 1e-3 + product,
        "blocks": blocks,
        "registers": registers,
        "spill_bytes": spill_bytes,
        "tensor_ms": tensor * steps_ms,
        "stall_ms": stall * steps_ms + START_US * 1e-3,
        "split_ms": split_ms + left_ms,
        "dram_ms": (a_bytes + b_bytes + c_bytes) / bandwidth,
        "occupancy": blocks * v["num_threads"] / device.max_threads_per_sm,
        "latency_factor": tensor / (tensor + stall),
        "wave_efficiency": problem.batch * tiles / (rounds * device.sm_count),
        "spill_share": 0.0 * tiles,
    }
