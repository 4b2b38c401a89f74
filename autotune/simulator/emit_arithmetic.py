"""Python statements for PTX arithmetic, integer and floating-point."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from autotune.simulator.emitter import DTYPES, Emitter, Handler, unsupported
from autotune.simulator.ptx import Instruction

_WIDE = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}
_DIRECTED = {"rz", "rm", "rp"}
_PLAIN_FLOAT = {"rn", "ftz", "sat", "approx", "full", "noftz"}


def _float(e: Emitter, x: Instruction, modifiers: set[str]) -> Callable[[str], str]:
    """Check the modifiers of a floating-point instruction; return how its inputs are wrapped."""
    if not modifiers <= _PLAIN_FLOAT:
        raise unsupported(x)
    return (lambda text: f"flush({text})") if "ftz" in modifiers else (lambda text: text)


def _plain(e: Emitter, x: Instruction, ufunc: str, inputs: int) -> None:
    kind, modifiers = x.parts[-1], set(x.parts[1:-1])
    sources = [e.read(operand, kind) for operand in x.operands[1 : inputs + 1]]
    if kind[0] != "f":
        if modifiers - {"lo"}:
            raise unsupported(x)
        e.call(x.operands[0], kind, ufunc, *sources)
        return
    if kind == "f32" and modifiers & _DIRECTED and ufunc in ("add", "subtract", "multiply"):
        a, b = sources
        one, zero = e.constant(1.0, "f32"), e.constant(-0.0, "f32")
        terms = {"add": (a, one, b), "subtract": (b, e.constant(-1.0, "f32"), a), "multiply": (a, b, zero)}
        _directed(e, x, *terms[ufunc])
        return
    wrap = _float(e, x, modifiers)
    sources = [wrap(source) for source in sources]
    if modifiers & {"sat", "ftz"}:
        value = f"{ufunc}({', '.join(sources)})"
        value = f"flush({value})" if "ftz" in modifiers else value
        e.write(x.operands[0], kind, f"saturate({value})" if "sat" in modifiers else value)
    else:
        e.call(x.operands[0], kind, ufunc, *sources)


def _directed(e: Emitter, x: Instruction, a: str, b: str, c: str) -> None:
    """Write a * b + c, rounded towards zero, down or up."""
    (mode,) = set(x.parts[1:-1])  # .ftz or .sat besides the rounding is unknown
    e.write(x.operands[0], "f32", f"fma32_directed({a}, {b}, {c}, {mode!r})")


def _minmax(e: Emitter, x: Instruction, integer: str, floating: str) -> None:
    kind, modifiers = x.parts[-1], set(x.parts[1:-1])
    if "NaN" in modifiers:
        floating, modifiers = integer, modifiers - {"NaN"}
    if modifiers - {"ftz"}:
        raise unsupported(x)
    sources = [e.read(operand, kind) for operand in x.operands[1:]]
    if "ftz" in modifiers:
        sources = [f"flush({source})" for source in sources]
    name = floating if kind[0] == "f" else integer
    while len(sources) > 2:
        sources = [f"{name}({sources[0]}, {sources[1]})", *sources[2:]]
    e.call(x.operands[0], kind, name, *sources)


def _mul(e: Emitter, x: Instruction) -> None:
    kind = x.parts[-1]
    a, b = (e.read(operand, kind) for operand in x.operands[1:])
    if "wide" in x.parts:
        wide = _WIDE[kind]
        e.call(x.operands[0], wide, "multiply", a, b, dtype=np.dtype(DTYPES[wide]).name)
    elif "hi" in x.parts:
        e.write(x.operands[0], kind, f"multiply_high({a}, {b})")
    else:
        _plain(e, x, "multiply", 2)


def _mad(e: Emitter, x: Instruction) -> None:
    kind = x.parts[-1]
    a, b = (e.read(operand, kind) for operand in x.operands[1:3])
    if kind[0] == "f":
        _fma(e, x)
    elif "wide" in x.parts:
        wide = _WIDE[kind]
        product = f"multiply({a}, {b}, dtype={np.dtype(DTYPES[wide]).name})"
        e.call(x.operands[0], wide, "add", product, e.read(x.operands[3], wide))
    elif x.parts[1] == "hi":
        e.call(x.operands[0], kind, "add", f"multiply_high({a}, {b})", e.read(x.operands[3], kind))
    elif x.parts == ("mad", "lo", kind):
        e.call(x.operands[0], kind, "add", f"multiply({a}, {b})", e.read(x.operands[3], kind))
    else:
        raise unsupported(x)


def _mul24(e: Emitter, x: Instruction) -> None:
    kind = x.parts[-1]
    if x.parts[1:] not in (("lo", kind), ("hi", kind)) or kind not in ("s32", "u32"):
        raise unsupported(x)
    a, b, *c = (e.read(operand, kind) for operand in x.operands[1:])
    product = f"multiply24({a}, {b}, {x.parts[1] == 'hi'})"
    e.write(x.operands[0], kind, f"add({product}, {c[0]})" if c else product)


def _fma(e: Emitter, x: Instruction) -> None:
    kind, modifiers = x.parts[-1], set(x.parts[1:-1])
    if kind == "f32" and modifiers & _DIRECTED:
        _directed(e, x, *(e.read(operand, kind) for operand in x.operands[1:]))
        return
    wrap = _float(e, x, modifiers)
    a, b, c = (wrap(e.read(operand, kind)) for operand in x.operands[1:])
    value = wrap(f"{ {'f32': 'fma32', 'f64': 'fma64'}[kind] }({a}, {b}, {c})")
    e.write(x.operands[0], kind, f"saturate({value})" if "sat" in modifiers else value)


def _div(e: Emitter, x: Instruction) -> None:
    kind = x.parts[-1]
    if kind[0] == "f":
        _plain(e, x, "divide", 2)
    else:
        a, b = (e.read(operand, kind) for operand in x.operands[1:])
        e.write(x.operands[0], kind, f"integer_divide({a}, {b})")


def _rem(e: Emitter, x: Instruction) -> None:
    a, b = (e.read(operand, x.parts[-1]) for operand in x.operands[1:])
    e.write(x.operands[0], x.parts[-1], f"integer_remainder({a}, {b})")


def _function(e: Emitter, x: Instruction, name: str) -> None:
    kind = x.parts[-1]
    wrap = _float(e, x, set(x.parts[1:-1]))
    value = wrap(f"{name}({wrap(e.read(x.operands[1], kind))})")
    e.write(x.operands[0], kind, f"saturate({value})" if "sat" in x.parts else value)


def _copysign(e: Emitter, x: Instruction) -> None:
    sign, magnitude = (e.read(operand, x.parts[-1]) for operand in x.operands[1:])
    e.call(x.operands[0], x.parts[-1], "copysign", magnitude, sign)


def _testp(e: Emitter, x: Instruction) -> None:
    name = {"finite": "isfinite", "infinite": "isinf", "notanumber": "isnan", "number": "is_number"}[
        x.parts[1]
    ]
    e.call(x.operands[0], "pred", name, e.read(x.operands[1], x.parts[-1]))


HANDLERS: dict[str, Handler] = {
    "add": partial(_plain, ufunc="add", inputs=2),
    "sub": partial(_plain, ufunc="subtract", inputs=2),
    "neg": partial(_plain, ufunc="negative", inputs=1),
    "abs": partial(_plain, ufunc="absolute", inputs=1),
    "min": partial(_minmax, integer="minimum", floating="fmin"),
    "max": partial(_minmax, integer="maximum", floating="fmax"),
    "mul": _mul,
    "mad": _mad,
    "mul24": _mul24,
    "mad24": _mul24,
    "fma": _fma,
    "div": _div,
    "rem": _rem,
    "sqrt": partial(_function, name="sqrt"),
    "rcp": partial(_function, name="reciprocal"),
    "rsqrt": partial(_function, name="inverse_sqrt"),
    "ex2": partial(_function, name="exp2"),
    "lg2": partial(_function, name="log2"),
    "sin": partial(_function, name="sin"),
    "cos": partial(_function, name="cos"),
    "tanh": partial(_function, name="tanh"),
    "copysign": _copysign,
    "testp": _testp,
}
