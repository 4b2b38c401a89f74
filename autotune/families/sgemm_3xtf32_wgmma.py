"""The model of `sgemm_3xtf32_wgmma`: as that of `sgemm_3xtf32`, with the instructions of warpgroups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from autotune.families.sgemm_3xtf32 import (
    COMMON_NAMES,
    COPY_SLOTS,
    SPLIT_SLOTS,
    capped_registers,
    tensor_parts,
)
from autotune.families.sgemm_3xtf32 import RELIEF as WARP_RELIEF
from autotune.values.device import Device
from autotune.values.problem import Problem

WARPGROUP_ROWS = 64
BESIDE_CLOCKS = 1.8  # of an instruction beside the tensor cores, for one scheduler: few warps hide it
EXPOSED_CLOCKS = 1600.0  # of the way to memory
ONE_MEETING = 0.75  # of them, where the warpgroups of a block meet once in a step
REGISTER_BASE = 90.0  # beside sums: rows of two tiles, addresses

NAMES = COMMON_NAMES | {"columns", "warpgroups", "splits"}  # what the model reads of a config
FOLLOWS: frozenset[str] | None = None  # the whole space is listed within milliseconds


RELIEF = {
    **WARP_RELIEF,
    "issue": (
        WARP_RELIEF["issue"][0],
        "a larger tile (BM, BN) splits and reads less for each product",
    ),
    "stall": (
        "latency: the way to memory is longer than what the buffers cover, and warpgroups wait at barriers",
        "more buffers (stages), a third for what is split (splits = 3), or a second block on an SM hide it",
    ),
}


def reading_tile(v: Mapping[str, Any]) -> tuple[int, int]:
    """Return the outputs of a warpgroup, which reads all columns of its block."""
    return WARPGROUP_ROWS, int(v["columns"])


def parts(
    v: Mapping[str, Any], problem: Problem, device: Device, registers: Any, spill_bytes: Any
) -> dict[str, Any]:
    """Return what `autotune.families.Family.parts` says."""
    if registers is None:
        registers, spill_bytes = capped_registers(v["columns"] + REGISTER_BASE, v, device)
    rows = (1 + SPLIT_SLOTS) * v["BK"] / 2
    columns = v["columns"] * v["BK"] / v["num_threads"] * (SPLIT_SLOTS + 0.5)  # read and written by fours
    copies = COPY_SLOTS * (v["a_pieces"] + v["b_pieces"]) / v["num_threads"]
    return tensor_parts(
        *(v, problem, device, registers, spill_bytes),
        clocks=3 * v["BM"] * v["BN"] * v["BK"] / max(device.tf32_multiplies_per_sm, 1),
        slots=rows + columns + v["columns"] / 2 + copies,
        beside=BESIDE_CLOCKS,
        exposed=EXPOSED_CLOCKS * np.where(v["splits"] == 2, 1.0, ONE_MEETING),
        enough_warps=0,  # warpgroups do not wait for their own products
    )
