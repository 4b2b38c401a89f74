"""Python statements for PTX instructions of whole warps and of warpgroups."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.simulator import warp
from autotune.simulator.emitter import Access, Emitter, Handler, unsupported
from autotune.simulator.ptx import Instruction, integer, split_operands

_SHAPE = re.compile(r"m64n(\d+)k(8|16)")
# What the tensor cores see of operands of wgmma, by depth and types.
_SEEN: dict[tuple[str, ...], Callable[[Any], Any]] = {
    ("8", "tf32", "tf32"): warp.tf32,
    ("16", "f16", "f16"): warp.f16,
}


@dataclass(frozen=True, eq=False)
class Product:
    """The static facts of one wgmma.mma_async.

    Attributes:
        access: Its side of shared memory, for faults.
        columns: N of its shape.
        sums: Register rows of D, `[columns / 2]`.
        left: Register rows of A, `[4]`; None where A lies in shared memory.
        signs: Product of its two scale operands, 1 or -1.
        seen: What the tensor cores see of 32 bits of an operand.
        turned: Whether A and B lie in shared memory with k as the slower direction.
    """

    access: Access
    columns: int
    sums: Any
    left: Any
    signs: int
    seen: Callable[[Any], Any]
    turned: tuple[bool, bool]


def _mma(e: Emitter, x: Instruction) -> None:
    if x.opcode != "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32":
        raise unsupported(x)
    target, a, b, c = (split_operands(operand.strip("{} ")) for operand in x.operands)
    if [len(part) for part in (target, a, b, c)] != [4, 4, 2, 4]:
        raise unsupported(x)
    lists = [
        "[" + ", ".join(e.read(name, kind) for name in names) + "]"
        for names, kind in ((a, "b32"), (b, "b32"), (c, "f32"))
    ]
    e.statement(f"t = warp.mma_m16n8k8_tf32(M.lanes.count, {', '.join(lists)})")
    for number, name in enumerate(target):
        e.write(name, "f32", f"t[{number}]")


def _ldmatrix(e: Emitter, x: Instruction) -> None:
    *_, shape, count = (*x.parts[:4], x.parts[4]) if len(x.parts) > 4 else x.parts
    words = set(x.parts[5:-1]) - {"trans", "shared", "shared::cta"}
    targets = split_operands(x.operands[0].strip("{} "))
    if (*x.parts[1:3], shape, x.parts[-1]) != ("sync", "aligned", "m8n8", "b16") or words:
        raise unsupported(x)
    if count not in ("x1", "x2", "x4") or len(targets) != int(count[1:]):
        raise unsupported(x)
    address, offset = e.address(x.operands[1])
    access = e.access(x, "shared", "ld", "b32", 4, offset)
    rows = ", ".join(e.row(target, "b32") for target in targets)
    e.statement(f"M.load_matrices({access}, {address}, {e.active}, ({rows},), {'trans' in x.parts})")


def _multiply(e: Emitter, x: Instruction) -> None:
    shape = _SHAPE.fullmatch(x.parts[4])
    if x.parts[1:4] != ("mma_async", "sync", "aligned") or shape is None or x.parts[5] != "f32":
        raise unsupported(x)
    columns, seen = int(shape[1]), _SEEN[shape[2], *x.parts[6:]]
    target, left, right, add, *immediates = x.operands
    sums = _register_rows(e, target)
    in_registers = left.startswith("{")
    rows = _register_rows(e, left) if in_registers else None
    signs, turned = immediates[:2], immediates[2:]
    if len(turned) != (0 if seen is warp.tf32 else 2 - in_registers) or set(turned) - {"0", "1"}:
        raise unsupported(x)
    if set(signs) - {"1", "-1"} or len(sums) != columns // 2 or columns not in range(8, 257, 8):
        raise unsupported(x)
    if rows is not None and len(rows) != 4:
        raise unsupported(x)
    access = e.access(x, "shared", "wgmma", "b32", 4, 0)
    name = f"W{e.index}"
    sign, (*_, turned_a, turned_b) = integer(signs[0]) * integer(signs[1]), ("0", "0", *turned)
    product = Product(e.names[access], columns, sums, rows, sign, seen, (turned_a == "1", turned_b == "1"))
    e.names.setdefault(name, product)
    descriptor = "None" if in_registers else e.read(left, "b64")
    e.statement(
        f"M.wgmma_multiply({name}, {descriptor}, {e.read(right, 'b64')}, {e.read(add, 'pred')}, {e.active})"
    )


def _register_rows(e: Emitter, operand: str) -> Any:
    """Return the register rows of "{%f1, %f2}"."""
    names = split_operands(operand.strip("{} "))
    if any(e.rows[name][0] != 32 for name in names):
        raise ValueError(operand)
    return np.array([e.rows[name][1] for name in names])


HANDLERS: dict[str, Handler] = {"mma": _mma, "ldmatrix": _ldmatrix, "wgmma": _multiply}
