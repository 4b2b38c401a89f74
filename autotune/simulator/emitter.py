"""Writes operands and results of PTX instructions as Python text that names register rows.

``u[3]`` is row 3 of the 32-bit registers as uint32, ``s[3]`` and ``f[3]`` the same bits as int32 and float32;
``U``, ``S``, ``F`` are the 64-bit registers, ``hu``, ``hs``, ``hf`` the 16-bit ones, ``p`` the predicates.
``M`` is the machine, ``m`` and ``q`` are masks of lanes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.simulator.faults import UnsupportedPTX
from autotune.simulator.ptx import TYPE_BITS, Instruction, Kernel, integer

DTYPES: dict[str, Any] = {
    "pred": np.bool_,
    **{"b8": np.uint8, "u8": np.uint8, "s8": np.int8},
    **{"b16": np.uint16, "u16": np.uint16, "s16": np.int16, "f16": np.float16},
    **{"b32": np.uint32, "u32": np.uint32, "s32": np.int32, "f32": np.float32},
    **{"b64": np.uint64, "u64": np.uint64, "s64": np.int64, "f64": np.float64},
}
_ROWS = {
    (1, "b"): "p",
    **{(16, "b"): "hu", (16, "u"): "hu", (16, "s"): "hs", (16, "f"): "hf"},
    **{(32, "b"): "u", (32, "u"): "u", (32, "s"): "s", (32, "f"): "f"},
    **{(64, "b"): "U", (64, "u"): "U", (64, "s"): "S", (64, "f"): "F"},
}
SPACES = ("global", "shared", "local", "param", "const")
SHARED_WINDOW = 1 << 56  # generic addresses of shared and local memory begin here
LOCAL_WINDOW = 1 << 57
ROW_NAMES = ("u", "s", "f", "U", "S", "F", "hu", "hs", "hf", "p")
SPECIAL = frozenset(
    [f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"]
    + [f"%{name}.{axis}" for name in ("cluster_ctaid", "cluster_nctaid") for axis in "xyz"]
    + [f"%{name}.{axis}" for name in ("clusterid", "nclusterid") for axis in "xyz"]
    + ["%cluster_ctarank", "%cluster_nctarank"]
    + ["%laneid", "%warpid", "%nwarpid", "WARP_SZ", "%lanemask_eq", "%lanemask_lt", "%lanemask_le"]
    + ["%lanemask_gt", "%lanemask_ge", "%smid", "%nsmid", "%gridid"]
)


@dataclass(frozen=True, eq=False)
class Access:
    """The static facts of one memory instruction.

    Attributes:
        space: "global", "shared", "local", "const" or "generic".
        kind: "ld", "st", "atom" or "ldgsts" (the two sides of a cp.async).
        dtype: Type of one element.
        count: Elements per lane.
        size: Bytes per lane.
        offset: Constant part of the address.
        opcode: As written.
        line: CUDA source line, 0 where unknown.
    """

    space: str
    kind: str
    dtype: Any
    count: int
    size: int
    offset: int
    opcode: str
    line: int


class Layout:
    """Where the registers of a kernel lie, and the objects that its statements refer to by name.

    Every name follows from what it stands for, so threads that generate statements at once agree.

    Attributes:
        kernel: The kernel.
        rows: Register name to (width in bits, row), numbered in the order of first use so that a run of
            FMAs writes adjacent rows.
        row_counts: Width in bits to the number of rows.
        names: Constants and memory accesses, and whatever else the statements may call.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.rows: dict[str, tuple[int, int]] = {}
        self.row_counts = {1: 0, 16: 0, 32: 0, 64: 0}
        self.names: dict[str, Any] = {}
        for instruction in kernel.instructions:
            for operand in (*instruction.operands, instruction.predicate or ""):
                for name in re.findall(r"[%\w$]+", operand):
                    bits = kernel.registers.get(name)
                    if bits is not None and name not in self.rows:
                        self.rows[name] = (bits, self.row_counts[bits])
                        self.row_counts[bits] += 1


class Emitter:
    """Writes the statements for one instruction of a kernel.

    Args:
        layout: Of the kernel.
        index: Position of the instruction.
        mask: Name of the mask of lanes under which it runs, None for all lanes.

    Attributes:
        lines: The statements so far.
    """

    def __init__(self, layout: Layout, index: int, mask: str | None) -> None:
        self.kernel, self.rows, self.names = layout.kernel, layout.rows, layout.names
        self.index, self._mask = index, mask
        self.lines: list[str] = []

    def constant(self, value: int | float, kind: str) -> str:
        """Return the name of a constant of a PTX type."""
        bits = TYPE_BITS[kind]
        if kind[0] in "bus" and kind != "bf16":
            value = np.array(int(value) & (1 << bits) - 1, f"u{bits // 8}").view(DTYPES[kind])[()]
        return self._named(DTYPES[kind](value))

    def _named(self, value: Any) -> str:
        name = f"K_{type(value).__name__}_{value.tobytes().hex()}"
        self.names[name] = value
        return name

    def row(self, name: str, kind: str) -> str:
        """Return the text of a register's row, seen as a PTX type of its width, or of fewer bits."""
        bits, row = self.rows[name]
        if bits < TYPE_BITS[kind] or (bits == 1) != (kind == "pred"):
            raise ValueError(name)
        return f"{_ROWS[bits, kind[0] if bits > 1 else 'b']}[{row}]"

    def read(self, operand: str, kind: str) -> str:
        """Return an expression for an operand, seen as a PTX type."""
        if operand in self.rows:
            have = self.rows[operand][0]
            if have == TYPE_BITS[kind]:
                return self.row(operand, kind)
            if have > TYPE_BITS[kind]:
                unsigned = {8: "uint8", 16: "uint16", 32: "uint32"}[TYPE_BITS[kind]]
                return (
                    f"{self.row(operand, f'b{have}')}.astype({unsigned}).view({np.dtype(DTYPES[kind]).name})"
                )
            raise ValueError(operand)
        if operand.startswith("!"):
            return f"invert({self.row(operand[1:], 'pred')})"
        if operand.startswith("%") or operand == "WARP_SZ":
            if operand not in SPECIAL:
                raise UnsupportedPTX(f"PTX special register {operand} is not supported by the simulator")
            value = f"M.special[{operand!r}]"
            return value if kind in ("u32", "b32") else f"{value}.astype({np.dtype(DTYPES[kind]).name})"
        if operand in self.kernel.symbols:
            return self.symbol(operand, kind)
        if operand[:2].lower() in ("0f", "0d"):
            bits, size = int(operand[2:], 16), 4 if operand[1] in "fF" else 8
            if kind[0] != "f":
                return self.constant(bits, kind)
            return self._named(DTYPES[kind](np.array(bits, f"u{size}").view(f"f{size}")[()]))
        number = integer(operand)
        return self.constant(number != 0 if kind == "pred" else number, kind)

    def symbol(self, name: str, kind: str) -> str:
        """Return an expression for a variable's address within its memory space."""
        symbol = self.kernel.symbols[name]
        if symbol.space in ("global", "const"):
            return f"M.memory.variables[{name!r}]"
        return self.constant(symbol.offset, kind)

    def write(self, destination: str, kind: str, expression: str) -> None:
        """Write the assignment of an expression of a PTX type to a register."""
        if destination == "_":
            return
        where = f", where={self._mask}" if self._mask else ""
        self.lines.append(f"copyto({self.row(destination, kind)}, {expression}{where})")

    def call(self, destination: str, kind: str, call: str) -> None:
        """Write the assignment of a function's value to a register; a ufunc writes there itself."""
        by_itself = isinstance(getattr(np, call.split("(")[0], None), np.ufunc)
        if self._mask or destination == "_" or not by_itself:
            self.write(destination, kind, call)
        else:
            self.lines.append(f"{call[:-1]}, out={self.row(destination, kind)})")

    def statement(self, text: str) -> None:
        """Add a statement as it is."""
        self.lines.append(text)

    @property
    def active(self) -> str:
        """The mask as an argument."""
        return self._mask or "None"

    def access(self, x: Instruction, space: str, kind: str, element: str, count: int, offset: int) -> str:
        """Register one memory instruction and return its name in the statements."""
        name = f"A{self.index}_{space}"
        if name not in self.names:
            dtype = np.dtype(DTYPES[element])
            size = dtype.itemsize * count
            self.names.setdefault(name, Access(space, kind, dtype, count, size, offset, x.opcode, x.line))
        return name

    def address(self, operand: str) -> tuple[str, int]:
        """Split "[%rd1+4]" into an expression for the lanes' addresses and the constant offset."""
        found = re.fullmatch(r"\[\s*([%$\w]+)\s*(?:\+\s*(-?\w+)\s*)?\]", operand)
        if found is None:
            raise ValueError(operand)
        offset = integer(found[2]) if found[2] else 0
        name = found[1]
        if name in self.rows:
            return self.row(name, "u32" if self.rows[name][0] == 32 else "u64"), offset
        if name in self.kernel.symbols:
            return self.symbol(name, "u64"), offset
        return self.constant(integer(name), "u64"), offset


Handler = Callable[[Emitter, Instruction], None]


def unsupported(x: Instruction) -> UnsupportedPTX:
    """Return the error that names an instruction."""
    line = f" (source line {x.line})" if x.line else ""
    text = f"{x.opcode} {', '.join(x.operands)}".strip()
    text = text if len(text) <= 80 else f"{text[:77]}..."
    return UnsupportedPTX(f"PTX instruction {text}{line} is not supported by the simulator")
