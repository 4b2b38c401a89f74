"""Turns the registers of whole warps into shuffles, votes and reductions."""

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
