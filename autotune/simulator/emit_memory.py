"""Python statements for PTX loads, stores, atomics and async copies."""

from __future__ import annotations

import re

import numpy as np

from autotune.simulator.emitter import DTYPES, SPACES, Emitter, Handler, unsupported
from autotune.simulator.ptx import TYPE_BITS, Instruction, integer, split_operands


def _memory_parts(x: Instruction) -> tuple[str, int, str]:
    """Return (space, elements, their type)."""
    if x.parts[-1] == "pred":
        raise unsupported(x)
    space = next((s for s in SPACES for part in x.parts if part.split("::")[0] == s), "generic")
    count = next((int(part[1]) for part in x.parts if re.fullmatch(r"v[248]", part)), 1)
    return space, count, x.parts[-1]


_STORE_ASYNC = ("async", "mbarrier::complete_tx::bytes")
_RELEASES = {"release", "acq_rel"}
_ATOMICS = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")
_QUALIFIERS = re.compile(
    r"nc|ca|cg|cs|cv|lu|wb|wt|volatile|weak|relaxed|acquire|release|acq_rel|gpu|cta|sys|cluster|v[248]|unified"
    r"|(?:L1|L2)::[\w]+|(?:global|shared|local|param|const)(?:::\w+)?"
)


def _check_qualifiers(e: Emitter, x: Instruction, *known: str) -> None:
    if not all(part in known or _QUALIFIERS.fullmatch(part) for part in x.parts[1:-1]):
        raise unsupported(x)


def _without_policy(x: Instruction, operands: tuple[str, ...]) -> tuple[str, ...]:
    """Drop the cache policy, which changes no result."""
    return operands[:-1] if "L2::cache_hint" in x.parts else operands


def _ld(e: Emitter, x: Instruction) -> None:
    _check_qualifiers(e, x)
    space, count, element = _memory_parts(x)
    targets = split_operands(x.operands[0].strip("{} "))
    if len(targets) != count or len(_without_policy(x, x.operands)) != 2:
        raise unsupported(x)
    if space == "param":
        found = re.fullmatch(r"\[\s*([\w$]+)\s*(?:\+\s*(\d{1,9})\s*)?\]", x.operands[1])
        sizes = {parameter.name: parameter.size for parameter in e.kernel.parameters}
        first, width = int(found[2] or 0) if found else 0, TYPE_BITS[element] // 8
        if found is None or first + width * len(targets) > sizes.get(found[1], 0):
            raise unsupported(x)
        for number, target in enumerate(targets):
            start = first + number * width
            e.write(target, element, f"M.parameter({found[1]!r}, {start}, {np.dtype(DTYPES[element]).name})")
        return
    address, offset = e.address(x.operands[1])
    access = e.access(x, space, "ld", element, count, offset)
    rows = ", ".join("None" if target == "_" else e.row(target, element) for target in targets)
    e.statement(f"M.load({access}, {address}, {e.active}, ({rows},))")


def _st(e: Emitter, x: Instruction) -> None:
    _check_qualifiers(e, x)
    space, count, element = _memory_parts(x)
    address, offset = e.address(x.operands[0])
    sources = split_operands(x.operands[1].strip("{} "))
    if space == "param" or len(sources) != count or len(_without_policy(x, x.operands)) != 2:
        raise unsupported(x)
    access = e.access(x, space, "st", element, count, offset)
    values = ", ".join(e.read(source, element) for source in sources)
    e.statement(f"M.store({access}, {address}, {e.active}, ({values},))")


def _store_async(e: Emitter, x: Instruction) -> None:
    _check_qualifiers(e, x, *_STORE_ASYNC)
    _, count, element = _memory_parts(x)
    (address, offset), (mbarrier, mbarrier_offset) = e.address(x.operands[0]), e.address(x.operands[2])
    sources = split_operands(x.operands[1].strip("{} "))
    if len(sources) != count or len(x.operands) != 3 or not {*_STORE_ASYNC, "shared::cluster"} <= {*x.parts}:
        raise unsupported(x)
    to = e.access(x, "shared", "st", element, count, offset)
    barrier = e.access(x, "mbarrier", "st", "b64", 1, mbarrier_offset)
    values = ", ".join(e.read(source, element) for source in sources)
    e.statement(f"M.store_async({to}, {barrier}, ({address}, {mbarrier}), {e.active}, ({values},))")


def _atomic(e: Emitter, x: Instruction, target: str, operands: tuple[str, ...]) -> None:
    space, count, element = _memory_parts(x)
    operation = next(part for part in x.parts[1:] if part in _ATOMICS)
    _check_qualifiers(e, x, operation)
    operands = _without_policy(x, operands)
    unknown = element == "f16" or (element[0] == "f" and operation != "add")
    if count != 1 or unknown or len(operands) != (3 if operation == "cas" else 2):
        raise unsupported(x)
    address, offset = e.address(operands[0])
    access = e.access(x, space, "atom", element, 1, offset)
    values = ", ".join(e.read(operand, element) for operand in operands[1:])
    call = f"M.atomic({access}, {address}, {e.active}, {operation!r}, ({values},), {target != '_'})"
    if target == "_":
        e.statement(call)
    else:
        e.statement(f"t = {call}")
        e.write(target, element, "t")


def _cp(e: Emitter, x: Instruction) -> None:
    if x.parts[1:3] == ("async", "bulk"):
        _bulk_copy(e, x)
    elif x.parts[1] == "async" and x.parts[2] in ("ca", "cg"):
        _copy(e, x)
    else:
        raise unsupported(x)


def _copy(e: Emitter, x: Instruction) -> None:
    if not all(_QUALIFIERS.fullmatch(part) for part in x.parts[2:]):
        raise unsupported(x)
    shared, shared_offset = e.address(x.operands[0])
    source, source_offset = e.address(x.operands[1])
    size = integer(x.operands[2])
    element, count = {4: ("b32", 1), 8: ("b32", 2), 16: ("b32", 4)}[size]
    to_access = e.access(x, "shared", "ldgsts", element, count, shared_offset)
    from_access = e.access(x, "global", "ldgsts", element, count, source_offset)
    rest = _without_policy(x, x.operands)[3:]
    sizes = "None"
    if rest and e.rows.get(rest[0].removeprefix("!"), (0,))[0] == 1:  # whether the source is ignored
        sizes = f"where({e.read(rest[0], 'pred')}, uint32(0), uint32({size}))"
    elif rest:
        sizes = e.read(rest[0], "u32")
    e.statement(f"M.copy_async({to_access}, {from_access}, {shared}, {source}, {sizes}, {e.active})")


def _bulk_copy(e: Emitter, x: Instruction) -> None:
    spaces = [part.split("::")[0] for part in x.parts[3:5]]
    if spaces != ["shared", "global"] or set(x.parts[5:]) - {
        "mbarrier::complete_tx::bytes",
        "L2::cache_hint",
    }:
        raise unsupported(x)
    (shared, shared_offset), (source, source_offset) = (e.address(operand) for operand in x.operands[:2])
    mbarrier, mbarrier_offset = e.address(x.operands[3])
    to_access = e.access(x, "shared", "bulk", "b32", 4, shared_offset)
    from_access = e.access(x, "global", "bulk", "b32", 4, source_offset)
    barrier = e.access(x, "mbarrier", "bulk", "b64", 1, mbarrier_offset)
    operands = f"({shared}, {source}, {e.read(x.operands[2], 'u32')}, {mbarrier})"
    e.statement(f"M.bulk_copy({to_access}, {from_access}, {barrier}, {operands}, {e.active})")


def is_fence(x: Instruction) -> bool:
    """Return whether an instruction orders what blocks see of each other's accesses, or may do so."""
    fence = x.parts[0] in ("membar", "fence") and "proxy" not in x.parts
    return (fence and "cta" not in x.parts) or not _RELEASES.isdisjoint(x.parts)


def _fence(e: Emitter, x: Instruction) -> None:
    if "proxy" in x.parts and "async" not in x.parts:
        raise unsupported(x)
    to_tensor_cores = "proxy" in x.parts and "global" not in x.parts
    call = "M.fence_proxy" if to_tensor_cores else "M.fence" if is_fence(x) else ""
    e.statement(f"{call}({e.active})" if call else "pass")


def _call(e: Emitter, x: Instruction) -> None:
    first, *rest = (e.kernel.symbols[operand].offset for operand in x.operands)
    if x.parts[1] == "vprintf":
        e.statement(f"M.printf({first}, {rest[0]}, {e.active})")
    else:
        e.statement(f"M.fail_assertion({first}, {x.line}, {e.active})")


HANDLERS: dict[str, Handler] = {
    "ld": _ld,
    "ldu": _ld,
    "st": lambda e, x: (_store_async if x.parts[1] == "async" else _st)(e, x),
    "atom": lambda e, x: _atomic(e, x, x.operands[0], x.operands[1:]),
    "red": lambda e, x: _atomic(e, x, "_", x.operands),
    "cp": _cp,
    "call": _call,
    "griddepcontrol": lambda e, x: e.statement("pass"),  # a kernel is executed alone
    "membar": _fence,
    "fence": _fence,
}
