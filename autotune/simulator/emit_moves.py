"""Python statements for PTX comparisons and moves."""

from __future__ import annotations

from autotune.simulator.emitter import Emitter, Handler, unsupported
from autotune.simulator.ptx import TYPE_BITS, Instruction, split_operands

_COMPARE = {
    **{"eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater"},
    **{"ge": "greater_equal", "lo": "less", "ls": "less_equal", "hi": "greater", "hs": "greater_equal"},
}
_UNORDERED = {"ltu": "greater_equal", "leu": "greater", "gtu": "less_equal", "geu": "less"}  # negated


def _comparison(name: str, kind: str, a: str, b: str) -> tuple[str, list[str], bool]:
    """Return (ufunc, arguments, negate) for one PTX comparison."""
    if kind[0] != "f":
        return _COMPARE[name], [a, b], False
    if name in _UNORDERED:
        return _UNORDERED[name], [a, b], True
    if name in ("ne", "equ"):  # ordered and unequal; its opposite
        return "logical_or", [f"less({a}, {b})", f"greater({a}, {b})"], name == "equ"
    if name in ("num", "nan"):
        return "logical_and", [f"equal({a}, {a})", f"equal({b}, {b})"], name == "nan"
    return _COMPARE[{"neu": "ne"}.get(name, name)], [a, b], False


def _setp(e: Emitter, x: Instruction) -> None:
    kind, name = x.parts[-1], x.parts[1]
    combine = next((part for part in x.parts[2:-1] if part in ("and", "or", "xor")), None)
    if set(x.parts[2:-1]) - {"ftz", "and", "or", "xor"}:
        raise unsupported(x)
    a, b = (e.read(operand, kind) for operand in x.operands[1:3])
    ufunc, arguments, negate = _comparison(name, kind, a, b)
    targets = x.operands[0].split("|")
    if combine is None and len(targets) == 1 and not negate:
        e.call(targets[0], "pred", f"{ufunc}({', '.join(arguments)})")
        return
    e.statement(f"t = {ufunc}({', '.join(arguments)})")
    if negate:
        e.statement("t = invert(t)")
    if combine is None:
        values = ["t", "invert(t)"]
    else:
        other = e.read(x.operands[3], "pred")
        values = [f"bitwise_{combine}(t, {other})", f"bitwise_{combine}(invert(t), {other})"]
        if len(targets) == 2:
            e.statement(f"t, t2 = {values[0]}, {values[1]}")
            values = ["t", "t2"]
    for target, value in zip(targets, values, strict=False):
        e.write(target.strip(), "pred", value)


def _set(e: Emitter, x: Instruction) -> None:
    source, result, name = x.parts[-1], x.parts[-2], x.parts[1]
    if len(x.parts) != 4:
        raise unsupported(x)
    a, b = (e.read(operand, source) for operand in x.operands[1:])
    ufunc, arguments, negate = _comparison(name, source, a, b)
    value = f"{ufunc}({', '.join(arguments)})"
    yes = e.constant(1.0 if result[0] == "f" else -1, result)
    no = e.constant(0.0 if result[0] == "f" else 0, result)
    e.write(x.operands[0], result, f"where({value}, {no if negate else yes}, {yes if negate else no})")


def _part_bits(x: Instruction, kind: str, parts: int) -> int:
    """Return the bits of each element of a vector that is moved as one value."""
    if (TYPE_BITS[kind], parts) not in ((32, 2), (64, 2), (32, 4), (64, 4)):
        raise unsupported(x)
    return TYPE_BITS[kind] // parts


def _mov(e: Emitter, x: Instruction) -> None:
    kind = x.parts[-1]
    target, source = x.operands
    if target.startswith("{"):
        parts = split_operands(target.strip("{} "))
        width = _part_bits(x, kind, len(parts))
        for number, part in enumerate(parts):
            shifted = (
                f"right_shift({e.read(source, f'u{kind[1:]}')}, {e.constant(width * number, f'u{kind[1:]}')})"
            )
            if part != "_":
                e.statement(f"t{number} = {shifted}.astype(uint{width})")
        for number, part in enumerate(parts):
            e.write(part, f"u{width}", f"t{number}")
    elif source.startswith("{"):
        parts = split_operands(source.strip("{} "))
        width, wide, name = _part_bits(x, kind, len(parts)), f"u{kind[1:]}", f"uint{kind[1:]}"
        pieces = [
            f"left_shift({e.read(part, f'u{width}')}, {e.constant(width * number, wide)}, dtype={name})"
            for number, part in enumerate(parts)
        ]
        e.write(target, wide, " | ".join(pieces))
    else:
        e.write(target, kind, e.read(source, kind))


HANDLERS: dict[str, Handler] = {"setp": _setp, "set": _set, "mov": _mov}
