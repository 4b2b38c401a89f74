"""Turns the registers of whole warps into shuffles, votes, reductions and matrix products."""

from __future__ import annotations

from typing import Any

import numpy as np

from autotune.simulator.lanes import WARP, Lanes

_BITS = np.uint32(1) << np.arange(WARP, dtype=np.uint32)


def _rows(lanes: Lanes, value: Any) -> Any:
    """Spread a register over ``[warps, 32]``."""
    return np.broadcast_to(value, (lanes.count,)).reshape(-1, WARP)


def _active(lanes: Lanes, members: Any, mask: Any) -> Any:
    """Tell which lanes each lane's mask names and that run, ``[warps, 32 (asking), 32 (named)]``."""
    named = (_rows(lanes, members)[:, :, None] & _BITS) != 0
    return named if mask is None else named & _rows(lanes, mask)[:, None, :]


def shuffle(mode: str, lanes: Lanes, value: Any, lane: Any, clamp: Any) -> tuple[Any, Any]:
    """Return what shfl.sync hands to each lane, and whether its source was in range.

    Args:
        mode: "up", "down", "bfly" or "idx".
        lanes: Geometry.
        value: Source register.
        lane: Source lane or distance.
        clamp: Bits 0-4 the clamp, bits 8-12 the segment mask, as in PTX.
    """
    own = lanes.in_warp
    operand = np.asarray(lane).astype(np.int64) & 31
    limits = np.asarray(clamp).astype(np.int64)
    segment = limits >> 8 & 31
    highest = (own & segment) | (limits & 31 & ~segment)
    if mode == "up":
        source = own - operand
        valid = source >= highest
    elif mode == "down":
        source = own + operand
        valid = source <= highest
    elif mode == "bfly":
        source = own ^ operand
        valid = source <= highest
    else:
        source = (own & segment) | (operand & ~segment)
        valid = source <= highest
    source = np.where(valid, source, own)
    register = np.broadcast_to(value, (lanes.count,))
    return register[lanes.index - own + source], np.broadcast_to(valid, (lanes.count,))


def vote_ballot(lanes: Lanes, condition: Any, members: Any, mask: Any) -> Any:
    """Return the bits of the named lanes whose condition holds."""
    yes = _active(lanes, members, mask) & _rows(lanes, condition)[:, None, :]
    return (yes * _BITS).sum(axis=2, dtype=np.uint32).reshape(-1)


def vote_all(lanes: Lanes, condition: Any, members: Any, mask: Any) -> Any:
    """Tell whether the condition holds in all named lanes."""
    return (~_active(lanes, members, mask) | _rows(lanes, condition)[:, None, :]).all(axis=2).reshape(-1)


def vote_any(lanes: Lanes, condition: Any, members: Any, mask: Any) -> Any:
    """Tell whether the condition holds in one of the named lanes."""
    return (_active(lanes, members, mask) & _rows(lanes, condition)[:, None, :]).any(axis=2).reshape(-1)


def vote_uni(lanes: Lanes, condition: Any, members: Any, mask: Any) -> Any:
    """Tell whether the condition is the same in all named lanes."""
    opposite = ~np.asarray(condition)
    return vote_all(lanes, condition, members, mask) | vote_all(lanes, opposite, members, mask)


def match_any(lanes: Lanes, value: Any, members: Any, mask: Any) -> Any:
    """Return the bits of the named lanes that hold the same value."""
    rows = _rows(lanes, value)
    same = _active(lanes, members, mask) & (rows[:, :, None] == rows[:, None, :])
    return (same * _BITS).sum(axis=2, dtype=np.uint32).reshape(-1)


def elect(lanes: Lanes, members: Any, mask: Any) -> tuple[Any, Any]:
    """Return the first named lane, and whether each lane is the one."""
    leader = _active(lanes, members, mask).argmax(axis=2).reshape(-1)
    return leader.astype(np.uint32), leader == lanes.in_warp


def reduce(operation: str, lanes: Lanes, value: Any, members: Any, mask: Any) -> Any:
    """Return the sum, minimum, maximum or bitwise combination over the named lanes."""
    register = _rows(lanes, value)
    kind = register.dtype
    neutral: dict[str, int] = {
        "add": 0,
        "min": int(np.iinfo(kind).max),
        "max": int(np.iinfo(kind).min),
        "and": -1 if kind.kind == "i" else int(np.iinfo(kind).max),
        "or": 0,
        "xor": 0,
    }
    ufunc = {
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }[operation]
    chosen = np.where(_active(lanes, members, mask), register[:, None, :], kind.type(neutral[operation]))
    total: Any = ufunc.reduce(chosen, axis=2, dtype=kind)
    return total.reshape(-1)


def mma_m16n8k8_tf32(lanes: Lanes, a: list[Any], b: list[Any], c: list[Any]) -> list[Any]:
    """Multiply A[16, 8] by B[8, 8] and add C[16, 8] in every warp.

    The fragments are laid out as PTX states for m16n8k8 with .tf32; the lower 13 bits of A and B are
    ignored. The products are summed in float64 and rounded once, which tensor cores do not promise.

    Args:
        lanes: Geometry.
        a: 4 registers with TF32 bits.
        b: 2 registers with TF32 bits.
        c: 4 registers, float32.

    Returns:
        4 registers of D, float32.
    """
    group, member = np.arange(WARP) >> 2, np.arange(WARP) & 3
    warps = lanes.count // WARP

    def tf32(register: Any) -> Any:
        bits = np.ascontiguousarray(_rows(lanes, register)) & np.uint32(0xFFFFE000)
        return bits.view(np.float32).astype(np.float64)

    left, right, total = np.zeros((warps, 16, 8)), np.zeros((warps, 8, 8)), np.zeros((warps, 16, 8))
    for number, register in enumerate(a):
        left[:, group + 8 * (number & 1), member + 4 * (number >> 1)] = tf32(register)
    for number, register in enumerate(b):
        right[:, member + 4 * number, group] = tf32(register)
    places = [(group + 8 * (number >> 1), 2 * member + (number & 1)) for number in range(4)]
    for (row, column), register in zip(places, c, strict=True):
        total[:, row, column] = _rows(lanes, register)
    result = (left @ right + total).astype(np.float32)
    return [result[:, row, column].reshape(-1) for row, column in places]
