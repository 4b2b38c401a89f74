"""Python statements for PTX logic, shifts and bit fields."""

from __future__ import annotations

import re
from functools import partial

from autotune.simulator.emitter import Emitter, Handler, unsupported
from autotune.simulator.ptx import TYPE_BITS, Instruction, integer


def _logic(e: Emitter, x: Instruction, name: str) -> None:
    kind = x.parts[-1]
    e.call(x.operands[0], kind, name, *(e.read(operand, kind) for operand in x.operands[1:]))


def _cnot(e: Emitter, x: Instruction) -> None:
    kind = x.parts[-1]
    e.write(x.operands[0], kind, f"equal({e.read(x.operands[1], kind)}, 0)")


def _shift(e: Emitter, x: Instruction, ufunc: str, general: str) -> None:
    kind = x.parts[-1]
    bits = TYPE_BITS[kind]
    value, amount = e.read(x.operands[1], kind), x.operands[2]
    if re.fullmatch(r"\d+|0x[0-9a-fA-F]+", amount):
        count = integer(amount)
        if count >= bits and kind[0] != "s":
            e.write(x.operands[0], kind, e.constant(0, kind))
            return
        e.call(x.operands[0], kind, ufunc, value, e.constant(min(count, bits - 1), kind))
    else:
        e.write(x.operands[0], kind, f"{general}({value}, {e.read(amount, 'u32')})")


def _shf(e: Emitter, x: Instruction) -> None:
    low, high, amount = (e.read(operand, "u32") for operand in x.operands[1:])
    side, mode = {"l": "left", "r": "right"}[x.parts[1]], {"wrap": "True", "clamp": "False"}[x.parts[2]]
    e.write(x.operands[0], "b32", f"funnel_{side}({low}, {high}, {amount}, {mode})")


def _bfe(e: Emitter, x: Instruction) -> None:
    kind = x.parts[-1]
    value, start, length = (e.read(x.operands[1], kind), *(e.read(o, "u32") for o in x.operands[2:]))
    e.write(x.operands[0], kind, f"extract_bits({value}, {start}, {length})")


def _bfi(e: Emitter, x: Instruction) -> None:
    kind = x.parts[-1]
    source, target = e.read(x.operands[1], kind), e.read(x.operands[2], kind)
    start, length = (e.read(operand, "u32") for operand in x.operands[3:])
    e.write(x.operands[0], kind, f"insert_bits({source}, {target}, {start}, {length})")


def _bfind(e: Emitter, x: Instruction) -> None:
    shifted = "shiftamt" in x.parts
    e.write(x.operands[0], "u32", f"find_bit({e.read(x.operands[1], x.parts[-1])}, {shifted})")


def _prmt(e: Emitter, x: Instruction) -> None:
    if x.parts != ("prmt", "b32"):
        raise unsupported(x)
    a, b, selector = (e.read(operand, "b32") for operand in x.operands[1:])
    e.write(x.operands[0], "b32", f"permute_bytes({a}, {b}, {selector})")


def _lop3(e: Emitter, x: Instruction) -> None:
    if x.parts != ("lop3", "b32"):
        raise unsupported(x)
    a, b, c = (e.read(operand, "b32") for operand in x.operands[1:4])
    e.write(x.operands[0], "b32", f"logic3({a}, {b}, {c}, {integer(x.operands[4]) & 255})")


def _count(e: Emitter, x: Instruction, name: str) -> None:
    e.write(x.operands[0], "u32", f"{name}({e.read(x.operands[1], x.parts[-1])})")


def _brev(e: Emitter, x: Instruction) -> None:
    e.write(x.operands[0], x.parts[-1], f"reverse_bits({e.read(x.operands[1], x.parts[-1])})")


HANDLERS: dict[str, Handler] = {
    "and": partial(_logic, name="bitwise_and"),
    "or": partial(_logic, name="bitwise_or"),
    "xor": partial(_logic, name="bitwise_xor"),
    "not": partial(_logic, name="invert"),
    "cnot": _cnot,
    "shl": partial(_shift, ufunc="left_shift", general="shift_left"),
    "shr": partial(_shift, ufunc="right_shift", general="shift_right"),
    "shf": _shf,
    "bfe": _bfe,
    "bfi": _bfi,
    "bfind": _bfind,
    "popc": partial(_count, name="count_bits"),
    "clz": partial(_count, name="leading_zeros"),
    "brev": _brev,
    "prmt": _prmt,
    "lop3": _lop3,
}
