"""Sectors and wavefronts of a memory instruction, counted from its addresses as the hardware counts them.

The rules give Nsight Compute's numbers for the kernels they were compared with on an H200; the wavefronts
of ``cp.async`` on the shared side and of accesses wider than 16 bytes were not compared.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from autotune.simulator.lanes import WARP

SECTOR_BYTES = 32
BANKS = 32
_LANES_PER_PHASE = {8: 16, 16: 8, 32: 4}  # lanes that share a wavefront at best, by bytes per lane


def _by_warp(address: Any, lanes: Any) -> Any:
    """Spread addresses over ``[warps, 32]``; -1 where a lane takes no part; only warps that take part."""
    warps, row = np.unique(lanes // WARP, return_inverse=True)
    table = np.full((len(warps), WARP), -1, np.int64)
    table[row, lanes % WARP] = address
    return table


def _distinct(table: Any) -> Any:
    """Count the distinct non-negative values of each row."""
    ordered = np.sort(table, axis=1)
    new = np.ones(ordered.shape, bool)
    new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    return (new & (ordered >= 0)).sum(axis=1)


def global_traffic(address: Any, lanes: Any) -> tuple[int, int]:
    """Count requests (warps) and 32-byte sectors of a global access.

    Args:
        address: Byte address of each active lane, ``[active]`` int64.
        lanes: The active lanes, ``[active]``.
    """
    table = _by_warp(address, lanes)
    sectors = np.where(table < 0, -1, table // SECTOR_BYTES)
    return len(table), int(_distinct(sectors).sum())


def shared_traffic(address: Any, lanes: Any, size: int, is_load: bool) -> tuple[int, int, int]:
    """Count requests (warps), wavefronts and the wavefronts a conflict-free pattern would take.

    A warp's 8-byte access is served as two half-warps, a 16-byte access as four quarter-warps; a load
    whose lane pairs (i, i^1) or (i, i^2) read the same words is served in half as many phases. Within a
    phase, each bank delivers one word per wavefront, and one word may go to any number of lanes.

    Args:
        address: Byte address of each active lane within the block's shared memory, ``[active]`` int64.
        lanes: The active lanes, ``[active]``.
        size: Bytes per lane.
        is_load: Whether the instruction is a load.
    """
    table = _by_warp(address, lanes)
    width = _LANES_PER_PHASE.get(size, WARP)
    if width == WARP or not is_load:
        wavefronts, phases = _phases(table, width, size)
        return len(table), wavefronts, phases
    lane = np.arange(WARP)
    merged = _pairs_agree(table, lane ^ 1) | _pairs_agree(table, lane ^ 2)
    wavefronts, phases = _phases(table[~merged], width, size)
    more_wavefronts, more_phases = _phases(table[merged], width * 2, size)
    return len(table), wavefronts + more_wavefronts, phases + more_phases


def _pairs_agree(table: Any, partner: Any) -> Any:
    other = table[:, partner]
    return ((table == other) | (table < 0) | (other < 0)).all(axis=1)


def _phases(table: Any, width: int, size: int) -> tuple[int, int]:
    """Count wavefronts (in each phase the words of its busiest bank) and non-empty phases."""
    if not len(table):
        return 0, 0
    phases = table.reshape(-1, width)
    words = np.where(phases[:, :, None] < 0, -1, phases[:, :, None] // 4 + np.arange(max(1, size // 4)))
    words = np.sort(words.reshape(len(phases), -1), axis=1)
    new = words >= 0
    new[:, 1:] &= words[:, 1:] != words[:, :-1]
    row, column = np.nonzero(new)
    load = np.bincount(row * BANKS + words[row, column] % BANKS, minlength=len(phases) * BANKS)
    return int(load.reshape(len(phases), BANKS).max(axis=1).sum()), int((phases >= 0).any(axis=1).sum())
