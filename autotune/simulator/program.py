"""Compiles a kernel: splits it into basic blocks, and generates a Python function over all lanes for each."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from autotune.simulator import arithmetic, fma, warp
from autotune.simulator.body import parse_kernel
from autotune.simulator.emit_memory import is_fence
from autotune.simulator.emitter import LOCAL_WINDOW, ROW_NAMES, SHARED_WINDOW, SPECIAL, Layout, unsupported
from autotune.simulator.faults import UnsupportedPTX
from autotune.simulator.lanes import WARPGROUP
from autotune.simulator.opcodes import WHOLE_WARP, WHOLE_WARPGROUP, emit, is_control, is_warp_wide
from autotune.simulator.provenance import stored
from autotune.simulator.ptx import Instruction, Kernel, integer

BlockFunction = Callable[[Any, Any], None]
_RUNS = {"fma.rn.f32": 3, "mul.f32": 2, "mul.rn.f32": 2, "mov.f32": 1, "mov.b32": 1, "mov.u32": 1}
_ROWS_USED = re.compile(rf"(?<![\w.])({'|'.join(ROW_NAMES)})\[")
_OF_CLUSTER = re.compile(r"barrier\.cluster\.(arrive(\.(release|relaxed))?|wait(\.acquire)?)(\.aligned)?")
_SHORTEST_RUN = 4
_REDUCTIONS = ("popc", "and", "or")
# What statements call: functions and types of NumPy, and the modules that go beyond it.
_CALLED: dict[str, Any] = {
    **{name: each for name, each in vars(np).items() if isinstance(each, (np.ufunc, type))},
    **{"where": np.where, "copyto": np.copyto, "warp": warp},
    **{"SHARED": np.uint64(SHARED_WINDOW), "LOCAL": np.uint64(LOCAL_WINDOW)},
    **{
        name: each
        for name, each in (vars(arithmetic) | vars(fma)).items()
        if callable(each) and name[0] != "_"
    },
}


@dataclass(frozen=True)
class Block:
    """Instructions that run one after another, without a branch into or out of their middle.

    Attributes:
        start: Index of the first instruction.
        stop: Index behind the last one, the control transfer left out.
        control: The control transfer that ends it, None if it just runs on.
        members: Operand with the lane mask of the warp-wide instruction it begins with, if it does.
        warps: Warps that must come to that instruction together.
    """

    start: int
    stop: int
    control: Instruction | None
    members: str | None
    warps: int = 1


class Program:
    """An executable kernel; its functions are generated when first needed.

    Attributes:
        kernel: The parsed kernel.
        layout: Where its registers lie.
        blocks: In text order.
        targets: Label to the number of its block (``len(blocks)`` for the end).
        shared_unit: Bytes of the smallest access to shared memory, 1 to 4.
        global_unit: Bytes of the smallest store to global memory, 1 to 4.
        stored: Parameters and variables that may be stored to; None for any memory.
        orders_blocks: Whether there are atomic operations, and fences between blocks; or clusters.
        uses: Opcodes of its instructions, and their first words.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.layout = Layout(kernel)
        self._after: dict[int, frozenset[int]] = {}
        self._functions: dict[tuple[int, bool], BlockFunction] = {}
        self._namespace = self.layout.names
        self._namespace.update(_CALLED)
        self._check_names()
        self._check_opcodes()
        self._split()
        self.shared_unit = self._smallest("shared", ("ld", "st", "atom", "red"))
        self.global_unit = self._smallest("global", ("st", "atom", "red"))
        self.stored = stored(kernel)
        atomic = any(x.parts[0] in ("atom", "red") or "volatile" in x.parts for x in kernel.instructions)
        self.orders_blocks = atomic and any(is_fence(x) for x in kernel.instructions)
        self.orders_blocks |= kernel.cluster != (1, 1, 1)
        self.uses = {word for x in kernel.instructions for word in (x.opcode, x.parts[0])}

    def _check_names(self) -> None:
        for instruction in self.kernel.instructions:
            for operand in instruction.operands:
                for name in re.findall(r"%[\w$.]+", operand):
                    if name not in self.layout.rows and name not in SPECIAL:
                        raise UnsupportedPTX(f"PTX special register {name} is not supported by the simulator")

    def _check_opcodes(self) -> None:
        """Emit one instruction of each form, so that an unknown one is refused before anything runs."""
        seen = set()
        rows = self.layout.rows
        for index, x in enumerate(self.kernel.instructions):
            if is_control(x):
                self._check_control(x)
                continue
            if is_warp_wide(x) and x.parts[0] not in WHOLE_WARP:
                self._check_words(x, x.operands[-1:] or ("",))
            registers = (rows[o][0] if o in rows else o[:1] if o[:1] in "[{" else "" for o in x.operands)
            form = (x.opcode, rows.get(x.predicate or "", (0,))[0], *registers)
            if form not in seen:
                seen.add(form)
                emit(self.layout, x, index, False)

    def _check_control(self, x: Instruction) -> None:
        """Refuse a control transfer that leads nowhere, or whose operands the machine cannot read."""
        rows, labels = self.layout.rows, self.kernel.labels
        name, operands = x.parts[0], list(x.operands)
        if x.predicate is not None and rows.get(x.predicate, (0,))[0] != 1:
            raise unsupported(x)
        if name == "bra":
            known = len(operands) == 1 and operands[0] in labels
        elif name == "brx":
            table = self.kernel.tables.get(operands[1], ()) if len(operands) == 2 else ()
            known = bool(table) and labels.keys() >= set(table)
            self._check_words(x, operands[:1])
        elif "cluster" in x.parts[1:2]:
            known = not operands and _OF_CLUSTER.fullmatch(x.opcode) is not None
        elif name in ("bar", "barrier"):
            form = tuple(part for part in x.parts[1:] if part not in ("cta", "aligned"))
            known = form in (("sync",), ("arrive",))
            if form[:1] == ("red",) and form[1:2] and form[1] in _REDUCTIONS and len(operands) > 2:
                target, condition = rows.get(operands.pop(0), (0,))[0], operands.pop().removeprefix("!")
                known = target == (32 if form[1] == "popc" else 1) and rows.get(condition, (0,))[0] == 1
            known &= 1 + (form == ("arrive",)) <= len(operands) <= 2
            self._check_words(x, operands)
        else:
            known = not operands
        if not known:
            raise unsupported(x)

    def _check_words(self, x: Instruction, operands: Sequence[str]) -> None:
        """Refuse operands other than 32-bit registers and integers."""
        for operand in operands:
            try:
                if operand not in self.layout.rows:
                    integer(operand)
                elif self.layout.rows[operand][0] != 32:
                    raise unsupported(x)
            except ValueError:
                raise unsupported(x) from None

    @staticmethod
    def is_plain_barrier(x: Instruction) -> bool:
        """Return whether a control transfer is __syncthreads()."""
        return x.parts[0] in ("bar", "barrier") and "sync" in x.parts and len(x.operands) == 1

    def line_of(self, number: int) -> int:
        """Return the source line of a basic block's first instruction, 0 if unknown."""
        return self.kernel.instructions[self.blocks[number].start].line if number < len(self.blocks) else 0

    def leads_to(self, number: int) -> frozenset[int]:
        """Return the blocks with instructions that may follow a block without a step back."""
        found = self._after.get(number)
        if found is None:
            reached, waiting = set(), [number]
            while waiting:
                at = waiting.pop()
                if at not in reached and number <= at < len(self.blocks):
                    reached.add(at)
                    waiting.extend(self._successors(at))
            found = frozenset(n for n in reached - {number} if self.blocks[n].stop > self.blocks[n].start)
            self._after[number] = found
        return found

    def _successors(self, number: int) -> set[int]:
        control = self.blocks[number].control
        if control is None or control.parts[0] not in ("bra", "brx"):
            ends = control is not None and control.predicate is None
            return set() if control and ends and control.parts[0] not in ("bar", "barrier") else {number + 1}
        labels = self.kernel.tables.get(control.operands[-1], control.operands)
        past = {number + 1} if control.predicate is not None else set()
        return past | {self.targets[label] for label in labels}

    def _smallest(self, space: str, opcodes: tuple[str, ...]) -> int:
        sizes = [4]
        for x in self.kernel.instructions:
            generic = not any(
                part.split("::")[0] in ("global", "shared", "local", "param", "const") for part in x.parts
            )
            here = any(part.split("::")[0] == space for part in x.parts)
            if x.parts[0] in opcodes and (here or generic):
                bits = re.search(r"\d+$", x.parts[-1])
                sizes.append(int(bits[0]) // 8 if bits else 4)
        return min(sizes)

    def _split(self) -> None:
        instructions = self.kernel.instructions
        leaders = {0, *self.kernel.labels.values()}
        for index, x in enumerate(instructions):
            if is_control(x):
                leaders.add(index + 1)
            elif is_warp_wide(x):
                leaders.add(index)
        starts = sorted(index for index in leaders if index < len(instructions))
        number = {start: position for position, start in enumerate(starts)}
        self.targets = {name: number.get(index, len(starts)) for name, index in self.kernel.labels.items()}
        self.blocks = []
        for start, stop in pairwise([*starts, len(instructions)]):
            last, first = instructions[stop - 1], instructions[start]
            control = last if is_control(last) else None
            members = None
            if is_warp_wide(first):
                members = "0xffffffff" if first.parts[0] in WHOLE_WARP else first.operands[-1]
            warps = WARPGROUP if first.parts[0] in WHOLE_WARPGROUP else 1
            self.blocks.append(Block(start, stop - (control is not None), control, members, warps))

    def function(self, number: int, masked: bool) -> BlockFunction:
        """Return the function of a block: ``function(machine, mask)``."""
        found = self._functions.get((number, masked))
        if found is None:
            found = self._functions[number, masked] = self._generate(number, masked)
        return found

    def _generate(self, number: int, masked: bool) -> BlockFunction:
        block = self.blocks[number]
        lines: list[str] = []
        index = block.start
        while index < block.stop:
            x = self.kernel.instructions[index]
            stop = self._run_end(index, block.stop) if x.opcode in _RUNS else index
            if stop - index >= _SHORTEST_RUN:
                lines.append(self._emit_run(index, stop, masked))
                index = stop
            else:
                lines.extend(emit(self.layout, x, index, masked))
                index += 1
        text = "\n ".join(lines)
        used = set(_ROWS_USED.findall(text))
        head = "".join(f" {name} = M.{name}\n" for name in ROW_NAMES if name in used)
        source = f"def block(M, m):\n{head} {text or 'pass'}\n"
        made: dict[str, BlockFunction] = {}  # not the namespace, which threads share
        exec(compile(source, f"<{self.kernel.name}, block {number}>", "exec"), self._namespace, made)
        return made["block"]

    def _run_end(self, index: int, stop: int) -> int:
        """Return the end of a run of equal instructions, none of which depends on another one."""
        opcode, inputs = self.kernel.instructions[index].opcode, _RUNS[self.kernel.instructions[index].opcode]
        written: set[str] = set()
        read: set[str] = set()
        rows = self.layout.rows
        while index < stop:
            x = self.kernel.instructions[index]
            if x.opcode != opcode or x.predicate is not None or len(x.operands) != inputs + 1:
                break
            if any(name not in rows or rows[name][0] != 32 for name in x.operands):
                break
            target, sources = x.operands[0], x.operands[1:]
            if target in written or target in read or not written.isdisjoint(sources):
                break
            written.add(target)
            read.update(sources)
            index += 1
        return index

    def _emit_run(self, start: int, stop: int, masked: bool) -> str:
        instructions = self.kernel.instructions[start:stop]
        rows = [tuple(self.layout.rows[name][1] for name in x.operands) for x in instructions]
        if instructions[0].opcode == "fma.rn.f32":
            rows, grid = _as_grid(rows)
        else:
            grid = None
        columns = [np.array(column) for column in zip(*rows, strict=True)]
        if grid is not None:
            columns[1], columns[2] = columns[1][:: grid[1]], columns[2][: grid[1]]
        names = []
        for position, column in enumerate(columns):
            name = f"R{start}_{position}"
            in_order = len(column) > 1 and bool((np.diff(column) == 1).all()) and position not in (1, 2)
            self._namespace[name] = slice(int(column[0]), int(column[-1]) + 1) if in_order else column
            names.append(name)
        if len(columns) == 4:
            return f"fma32_run(M.f2, {', '.join(names)}, {grid}, {'m' if masked else 'None'})"
        if len(columns) == 3:
            value = f"multiply(M.f2[{names[1]}], M.f2[{names[2]}])"
            return f"M.f2[{names[0]}] = {f'where(m, {value}, M.f2[{names[0]}])' if masked else value}"
        value = f"M.u2[{names[1]}]"
        return f"M.u2[{names[0]}] = {f'where(m, {value}, M.u2[{names[0]}])' if masked else value}"


def _as_grid(rows: list[tuple[int, ...]]) -> tuple[list[tuple[int, ...]], tuple[int, int] | None]:
    """Return FMAs in the order of an outer product if they are one: every left row times every right row."""
    left, right = {row[1] for row in rows}, {row[2] for row in rows}
    if len(left) * len(right) != len(rows) or len({row[1:3] for row in rows}) != len(rows) or len(rows) < 4:
        return rows, None
    position = {row: order for order, row in enumerate(dict.fromkeys(row[1] for row in rows))}
    place = {row: order for order, row in enumerate(dict.fromkeys(row[2] for row in rows))}
    return sorted(rows, key=lambda row: (position[row[1]], place[row[2]])), (len(left), len(right))


@lru_cache(maxsize=32)
def load_program(ptx: str, entry: str) -> Program:
    """Return a kernel parsed and prepared for execution; the last 32 are kept.

    Raises:
        UsageError: The text has no such kernel.
        UnsupportedPTX: It is malformed, or holds something that the simulator does not support.
    """
    return Program(parse_kernel(ptx, entry))
