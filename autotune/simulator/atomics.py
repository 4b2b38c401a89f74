"""Atomic operations, applied lane after lane."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def _increment(old: Any, limit: Any) -> Any:
    return old.dtype.type(0) if old >= limit else old + old.dtype.type(1)


def _decrement(old: Any, limit: Any) -> Any:
    return limit if old == 0 or old > limit else old - old.dtype.type(1)


UFUNCS: dict[str, Any] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
_STEPS: dict[str, Callable[..., Any]] = {
    **UFUNCS,
    "exch": lambda old, new: new,
    "cas": lambda old, expected, new: new if old == expected else old,
    "inc": _increment,
    "dec": _decrement,
}


def apply_atomic(operation: str, memory: Any, index: Any, operands: list[Any], wanted: bool) -> Any:
    """Apply an atomic operation in lane order.

    Args:
        operation: As PTX spells it: "add", "cas" and so on.
        memory: Elements, changed in place.
        index: Element of each lane, ``[lanes]`` int64.
        operands: One array per operand, ``[lanes]``.
        wanted: Whether the old values are needed.

    Returns:
        The value each lane found, ``[lanes]``; None if not wanted.
    """
    if operation in UFUNCS and not wanted:
        UFUNCS[operation].at(memory, index, operands[0])
        return None
    if operation in UFUNCS and len(np.unique(index)) == len(index):
        old = memory[index]
        memory[index] = UFUNCS[operation](old, operands[0])
        return old
    step = _STEPS[operation]
    old = np.empty(len(index), memory.dtype)
    for lane, place in enumerate(index):
        old[lane] = memory[place]
        memory[place] = step(memory[place], *(operand[lane] for operand in operands))
    return old
