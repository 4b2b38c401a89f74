"""Finds which arrays a kernel may store to, by following pointers from parameters through its registers."""

from __future__ import annotations

import re

from autotune.simulator.ptx import Instruction, Kernel

_STORES = ("st", "atom", "red")
_NAME = re.compile(r"[%\w$]+")


def stored(kernel: Kernel) -> frozenset[str] | None:
    """Return the parameters and variables through which the kernel may store to global memory.

    Every register holds what any instruction may ever have brought there, in whatever order they run.

    Returns:
        Their names; None where an address comes from memory, so that it may lie anywhere.
    """
    sources: dict[str, set[str]] = {}
    origins = {parameter.name for parameter in kernel.parameters}
    origins |= {name for name, symbol in kernel.symbols.items() if symbol.space in ("global", "const")}
    changed = True
    while changed:
        changed = False
        for x in kernel.instructions:
            brought = set() if x.parts[0] in ("st", "red") else _brought(x, sources, origins)
            for target in _NAME.findall(x.operands[0]) if brought else ():
                found = sources.setdefault(target, set())
                if not brought <= found:
                    found |= brought
                    changed = True
    written: set[str] = set()
    for x in kernel.instructions:
        if x.parts[0] in _STORES and not {"shared", "local"} & {part.split("::")[0] for part in x.parts}:
            address = next(operand for operand in x.operands if operand[0] == "[")
            reached = set().union(*(sources.get(n, {n} & origins) for n in _NAME.findall(address)))
            if not reached or "" in reached:
                return None
            written |= reached
    return frozenset(written)


def _brought(x: Instruction, sources: dict[str, set[str]], origins: set[str]) -> set[str]:
    """Return the origins of what an instruction writes; "" stands for memory."""
    if x.parts[0] == "ld" and "param" not in x.parts:
        return {""} if x.parts[-1][1:] == "64" and x.parts[-1][0] != "f" else set()
    names = [name for operand in x.operands[1:] for name in _NAME.findall(operand)]
    return set().union(*(sources.get(name, {name} & origins) for name in names))
