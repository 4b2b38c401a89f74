"""Turns PTX instructions of warpgroups into Python statements."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.simulator.emitter import Access, Emitter, Handler
from autotune.simulator.ptx import Instruction, split_operands

_SHAPE = re.compile(r"m64n(\d+)k8")


@dataclass(frozen=True, eq=False)
class Product:
    """The static facts of one wgmma.mma_async.

    Attributes:
        access: Its side of shared memory, for faults.
        columns: N of its shape.
        sums: Register rows of D, `[columns / 2]`.
        left: Register rows of A, `[4]`; None where A lies in shared memory.
        signs: Product of its two scale operands, 1 or -1.
    """

    access: Access
    columns: int
    sums: Any
    left: Any
    signs: int


def _wgmma(e: Emitter, x: Instruction) -> None:
    if x.parts[2:4] != ("sync", "aligned"):
        raise e.unsupported(x)
    if x.parts[1] == "mma_async":
        _multiply(e, x)
    elif x.parts[1] == "fence":
        e.statement(f"M.wgmma_fence({e.active})")
    elif x.parts[1] == "commit_group":
        e.statement(f"M.wgmma_commit({e.active})")
    elif x.parts[1] == "wait_group":
        e.statement(f"M.wgmma_wait({int(x.operands[0], 0)}, {e.active})")
    else:
        raise e.unsupported(x)


def _multiply(e: Emitter, x: Instruction) -> None:
    shape = _SHAPE.fullmatch(x.parts[4])
    if shape is None or x.parts[5:] != ("f32", "tf32", "tf32"):
        raise e.unsupported(x)
    columns = int(shape[1])
    target, left, right, add, *signs = x.operands
    sums = _rows(e, target)
    if len(sums) != columns // 2 or columns % 8:
        raise e.unsupported(x)
    in_registers = left.startswith("{")
    access = e.access(x, "shared", "wgmma", "b32", 1, 0)
    name = f"W{e.index}"
    e.names[name] = Product(
        e.names[access],
        columns,
        sums,
        _rows(e, left) if in_registers else None,
        int(signs[0]) * int(signs[1]),
    )
    descriptor = "None" if in_registers else e.read(left, "b64")
    e.statement(
        f"M.wgmma_multiply({name}, {descriptor}, {e.read(right, 'b64')}, {e.read(add, 'pred')}, {e.active})"
    )


def _rows(e: Emitter, operand: str) -> Any:
    """Return the register rows of "{%f1, %f2}"."""
    names = split_operands(operand.strip("{} "))
    if any(e.rows[name][0] != 32 for name in names):
        raise ValueError(operand)
    return np.array([e.rows[name][1] for name in names])


HANDLERS: dict[str, Handler] = {"wgmma": _wgmma}
