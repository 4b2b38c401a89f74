"""What instructions of a whole warp compute: shuffles, votes, reductions and tensor-core products.

The lower 13 bits of TF32 operands are ignored; FP16 operands count in full, subnormal ones too. Products are
exact and added in float64, and each sum of an instruction is rounded to float32 towards zero, as the tensor
cores do; that they also cut the terms at some bits below the largest one is not modelled (Fasi, Higham,
Mikaitis and Pranesh, "Numerical behavior of NVIDIA tensor cores", 2021).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from autotune.simulator.atomics import UFUNCS
from autotune.simulator.lanes import WARP, Lanes

_BITS = np.uint32(1) << np.arange(WARP, dtype=np.uint32)
_TF32_BITS = np.uint32(0xFFFFE000)


def _rows(lanes: Lanes, value: Any) -> Any:
    """Spread a register over ``[warps, 32]``."""
    return np.broadcast_to(value, (lanes.count,)).reshape(-1, WARP)


def _active(lanes: Lanes, members: Any, mask: Any) -> Any:
    """Return the running lanes that each lane's mask names, ``[warps, 32 (asking), 32 (named)]`` bool."""
    named = (_rows(lanes, members)[:, :, None] & _BITS) != 0
    return named if mask is None else named & _rows(lanes, mask)[:, None, :]


def shuffle(mode: str, lanes: Lanes, lane: Any, clamp: Any) -> tuple[Any, Any]:
    """Return the lane (counted over all warps) whose value shfl.sync gives each lane, and if it is in range.

    Args:
        mode: "up", "down", "bfly" or "idx".
        lanes: Geometry.
        lane: Source lane or distance.
        clamp: Bits 0-4 the clamp, bits 8-12 the segment mask, as in PTX.
    """
    own = lanes.in_warp
    operand = np.asarray(lane).astype(np.int64) & 31
    limits = np.asarray(clamp).astype(np.int64)
    segment = limits >> 8 & 31
    highest = (own & segment) | (limits & 31 & ~segment)
    if mode == "idx":
        source = (own & segment) | (operand & ~segment)
    else:
        source = {"up": own - operand, "down": own + operand, "bfly": own ^ operand}[mode]
    valid = source >= highest if mode == "up" else source <= highest
    return lanes.index - own + np.where(valid, source, own), np.broadcast_to(valid, (lanes.count,))


def vote_ballot(lanes: Lanes, condition: Any, members: Any, mask: Any) -> Any:
    """Return the bits of the named lanes whose condition holds."""
    yes = _active(lanes, members, mask) & _rows(lanes, condition)[:, None, :]
    return (yes * _BITS).sum(axis=2, dtype=np.uint32).reshape(-1)


def vote_all(lanes: Lanes, condition: Any, members: Any, mask: Any) -> Any:
    """Return whether the condition holds in all named lanes."""
    return (~_active(lanes, members, mask) | _rows(lanes, condition)[:, None, :]).all(axis=2).reshape(-1)


def vote_any(lanes: Lanes, condition: Any, members: Any, mask: Any) -> Any:
    """Return whether the condition holds in one of the named lanes."""
    return (_active(lanes, members, mask) & _rows(lanes, condition)[:, None, :]).any(axis=2).reshape(-1)


def vote_uni(lanes: Lanes, condition: Any, members: Any, mask: Any) -> Any:
    """Return whether the condition is the same in all named lanes."""
    opposite = ~np.asarray(condition)
    return vote_all(lanes, condition, members, mask) | vote_all(lanes, opposite, members, mask)


def match_any(lanes: Lanes, value: Any, members: Any, mask: Any) -> Any:
    """Return the bits of the named lanes that hold the same value."""
    rows = _rows(lanes, value)
    same = _active(lanes, members, mask) & (rows[:, :, None] == rows[:, None, :])
    return (same * _BITS).sum(axis=2, dtype=np.uint32).reshape(-1)


def elect(lanes: Lanes, members: Any, mask: Any) -> tuple[Any, Any]:
    """Return the elected lane (the first one named) to each lane, and whether it is that lane."""
    leader = _active(lanes, members, mask).argmax(axis=2).reshape(-1)
    return leader.astype(np.uint32), leader == lanes.in_warp


def reduce(operation: str, lanes: Lanes, value: Any, members: Any, mask: Any) -> Any:
    """Return the sum, minimum, maximum or bitwise combination over the named lanes."""
    register = _rows(lanes, value)
    kind, ufunc = register.dtype, UFUNCS[operation]
    neutral = {"min": np.iinfo(kind).max, "max": np.iinfo(kind).min, "and": ~kind.type(0)}.get(operation, 0)
    chosen = np.where(_active(lanes, members, mask), register[:, None, :], kind.type(neutral))
    total: Any = ufunc.reduce(chosen, axis=2, dtype=kind)
    return total.reshape(-1)


def tf32(bits: Any) -> Any:
    """Return what the tensor cores see of 32-bit registers, as float64."""
    return (np.ascontiguousarray(bits) & _TF32_BITS).view(np.float32).astype(np.float64)


def f16(bits: Any) -> Any:
    """Return the pairs of FP16 numbers in 32-bit registers, as float64 with twice as many columns."""
    return np.ascontiguousarray(bits).view(np.float16).astype(np.float64)


def left_fragments(registers: Any, seen: Callable[[Any], Any]) -> Any:
    """Assemble A, `[warps, 16, 8 or 16]` float64, from the 4 registers of each lane, `[4, lanes]` uint32.

    Register q of lane l holds row l / 4 + 8 (q % 2), and of 8 words of that row number l % 4 + 4 (q / 2):
    PTX ISA, m16n8k8 with .tf32, and m64nNk16 of wgmma.
    """
    numbers = seen(registers)
    table = numbers.reshape(2, 2, -1, 8, 4, numbers.shape[1] // registers.shape[1])
    return table.transpose(2, 1, 3, 0, 4, 5).reshape(table.shape[2], 16, -1)


def sum_fragments(registers: Any) -> Any:
    """Assemble C, `[warps, 16, n]` float64, from `[n / 2, lanes]` float32.

    Register 4 j + q of lane l holds row l / 4 + 8 (q / 2), column 8 j + 2 (l % 4) + q % 2.
    """
    count = len(registers)
    table = np.asarray(registers, np.float64).reshape(count // 4, 2, 2, -1, 8, 4)
    return table.transpose(3, 1, 4, 0, 5, 2).reshape(-1, 16, 2 * count)


def sum_registers(matrix: Any) -> Any:
    """Split D, `[warps, 16, n]`, into `[n / 2, lanes]`: the reverse of `sum_fragments`."""
    warps, _, n = matrix.shape
    table = matrix.reshape(warps, 2, 8, n // 8, 4, 2)
    return np.ascontiguousarray(table.transpose(3, 1, 5, 0, 2, 4)).reshape(n // 2, warps * WARP)


def to_zero(total: Any) -> Any:
    """Round float64 to float32 towards zero; what is too large becomes infinite."""
    nearest = total.astype(np.float32)
    beyond = np.abs(nearest.astype(np.float64)) > np.abs(total)
    beyond &= np.isfinite(nearest)
    return np.where(beyond, np.nextafter(nearest, np.float32(0)), nearest)


def mma_m16n8k8_tf32(lanes: int, a: list[Any], b: list[Any], c: list[Any]) -> Any:
    """Multiply A[16, 8] by B[8, 8] and add C[16, 8] in every warp; the fragments are those of PTX's m16n8k8.

    Args:
        lanes: Threads.
        a: 4 registers with TF32 bits, each `[lanes]`, or one number for all.
        b: 2 such registers: number q of lane l holds row l % 4 + 4 q, column l / 4.
        c: 4 registers, float32.

    Returns:
        D, `[4, lanes]` float32.
    """
    left, right, addend = (
        np.stack([np.broadcast_to(each, lanes) for each in registers]) for registers in (a, b, c)
    )
    matrix = tf32(right).reshape(2, -1, 8, 4).transpose(1, 0, 3, 2).reshape(-1, 8, 8)
    return sum_registers(to_zero(left_fragments(left, tf32) @ matrix + sum_fragments(addend)))
