"""Reads the statements of a kernel's body; functions that it calls are read where they are called."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autotune.simulator.faults import UnsupportedPTX
from autotune.simulator.ptx import (
    TYPE_BITS,
    Function,
    Instruction,
    Kernel,
    Symbol,
    declare,
    read_module,
    split_operands,
)

BUILTINS = ("vprintf", "__assertfail")  # of CUDA: the machine executes them
_MOST_INLINED = 64  # functions, one in the other
_MOST_REGISTERS = 1 << 20  # names a kernel may declare; compilers declare some thousands
_PLACE = re.compile(r"\.loc (\d+) (\d+) (\d+)(?:, ?function_name .*, ?inlined_at (\d+) (\d+) (\d+))?")
_STATEMENT = re.compile(r"\s*(?:(\.(?:loc|file|section)\b[^\n]*)|([{}])|([$\w]+:)(?!:)|([^;]*);)")
_INSTRUCTION = re.compile(r"(?:@(!?)([%$\w]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.S)
_NAME = re.compile(r"(?<![\w$%.])[%$A-Za-z_][\w$]*")


def parse_kernel(ptx: str, entry: str) -> Kernel:
    """Parse one kernel of a PTX text.

    Args:
        ptx: As NVRTC returns it.
        entry: Kernel name.

    Raises:
        UsageError: The text has no such kernel.
        UnsupportedPTX: It declares something that the simulator does not support.
    """
    kernel, functions, body, file = read_module(ptx, entry)
    Body(kernel, functions, file).read(body)
    return kernel


class Body:
    """Reads the statements of one kernel body; braces open scopes whose names are their own.

    Args:
        kernel: What is read goes into it.
        functions: That it may call.
        file: Number of the user's file; None where it is unknown: that of the first line.
    """

    def __init__(self, kernel: Kernel, functions: Mapping[str, Function], file: str | None) -> None:
        self.kernel, self.functions, self.file = kernel, functions, file
        self.line = 0
        self.calls: list[tuple[str, str]] = []  # functions being read, and the label behind each
        self.inlined: dict[
            tuple[str | Any, ...], tuple[str | Any, ...]
        ] = {}  # place -> the place it was inlined at
        self.scopes: list[dict[str, str]] = []
        self.scope_starts: list[int] = []
        self.inner_names = 0

    def read(self, body: str) -> None:
        """Read the kernel's body."""
        self._read(body)
        if self.scopes:
            raise UnsupportedPTX("the PTX text ends inside a scope")
        # Dynamic shared memory begins behind every static variable, wherever it was declared.
        end = -(-self.kernel.shared_bytes // 16) * 16
        for name, symbol in self.kernel.symbols.items():
            if symbol.space == "shared" and symbol.size == 0:
                self.kernel.symbols[name] = Symbol("shared", end, 0)
                self.kernel.shared_bytes = end

    def _read(self, body: str) -> None:
        position = 0
        while position < len(body):
            found = _STATEMENT.match(body, position)
            if found is None:
                if rest := body[position:].strip():
                    raise UnsupportedPTX(f"PTX statement {rest[:80]!r} has no end")
                break
            position = found.end()
            directive, brace, label, statement = found.groups()
            if label is not None:
                self._label(label[:-1])
            elif brace is not None:
                self._brace(brace)
            else:
                text = " ".join((directive or statement).split())
                try:
                    self._statement(text)
                except (IndexError, ValueError):
                    raise UnsupportedPTX(f"PTX statement {text[:80]!r} cannot be read") from None

    def _label(self, name: str) -> None:
        self.kernel.labels[self._declared(name, self.kernel.labels)] = len(self.kernel.instructions)

    def _brace(self, brace: str) -> None:
        if brace == "{":
            self.scopes.append({})
            self.scope_starts.append(len(self.kernel.instructions))
        elif self.scopes:
            self._close_scope()
        else:
            raise UnsupportedPTX("the PTX text closes a scope that it did not open")

    def _statement(self, text: str) -> None:
        kernel = self.kernel
        if text.startswith(".loc "):
            self._place(text)
        elif text.startswith(".reg"):
            self._registers(text)
        elif text.startswith(".branchtargets"):
            label = next(reversed(kernel.labels), "")  # it stands before the list
            kernel.tables[label] = split_operands(text.removeprefix(".branchtargets").strip())
        elif text.startswith((".shared", ".local", ".param")):
            name = declare(kernel, text.replace(".param", ".local"))
            if self.scopes:
                kernel.symbols[self._declared(name, kernel.symbols)] = kernel.symbols.pop(name)
        elif not text or re.match(r"\.(pragma|file|section|callprototype)\b", text):
            pass
        elif text.startswith("."):
            raise UnsupportedPTX(f"PTX directive {text[:80]!r} is not supported by the simulator")
        else:
            self._instruction(text)

    def _place(self, text: str) -> None:
        """Read ".loc file line column, function_name f, inlined_at file line column"."""
        if (found := _PLACE.fullmatch(text)) is None:
            raise ValueError(text)
        place, self.inlined[found.group(1, 2, 3)] = found.group(1, 2, 3), found.group(4, 5, 6)
        self.file = self.file or place[0]
        for _ in range(_MOST_INLINED):
            if place[0] == self.file:
                self.line = int(place[1]) or self.line
                break
            place = self.inlined.get(place, place)

    def _call(self, instruction: Instruction) -> None:
        """Read the body of a function in place of its call."""
        operands = [split_operands(each.strip("() ")) for each in instruction.operands]
        at = next(n for n, each in enumerate(instruction.operands) if each[:1] != "(")
        name = instruction.operands[at]
        returned, given = sum(operands[:at], ()), sum(operands[at + 1 :], ())
        if name in BUILTINS:
            parts = ("call", name)
            named = replace(instruction, opcode=".".join(parts), parts=parts, operands=given)
            self.kernel.instructions.append(named)
            return
        function = self.functions.get(name)
        if function is None or any(name == caller for caller, _ in self.calls):
            why = "it calls itself" if function else "the text has no such function"
            place = f" (source line {self.line})" if self.line else ""
            raise UnsupportedPTX(f"PTX call of {name}{place} is not supported by the simulator: {why}")
        self._brace("{")
        self.scopes[-1].update(zip(function.returns + function.takes, returned + given, strict=True))
        behind = self._declared("", self.kernel.labels)
        if instruction.predicate is not None:
            skip = ("bra", ("bra",), (behind,), instruction.predicate, not instruction.negated)
            self.kernel.instructions.append(Instruction(*skip, self.line))
        self.calls.append((name, behind))
        line = self.line
        self._read(function.body)
        self.line = line
        self.kernel.labels[behind] = len(self.kernel.instructions)
        self.calls.pop()
        self._close_scope()

    def _registers(self, text: str) -> None:
        words = re.match(r"\.reg\s+\.(\w+)\s+(.*)", text, re.S)
        if words is None or words[1] not in TYPE_BITS:
            raise UnsupportedPTX(f"PTX declaration {text!r} is not supported by the simulator")
        bits = max(TYPE_BITS[words[1]], 16) if words[1] != "pred" else 1
        for name in split_operands(words[2]):
            many = re.fullmatch(r"([%$\w]+)<(\d{1,7})>", name)
            if not many and not re.fullmatch(r"[%$\w]+", name):
                raise UnsupportedPTX(f"PTX declaration {text[:80]!r} is not supported by the simulator")
            count = int(many[2]) if many else 1
            if len(self.kernel.registers) + count > _MOST_REGISTERS:
                raise UnsupportedPTX(f"{text[:80]!r}: a kernel may declare {_MOST_REGISTERS} registers")
            for single in [f"{many[1]}{number}" for number in range(count)] if many else [name]:
                self.kernel.registers[self._declared(single, self.kernel.registers)] = bits

    def _declared(self, name: str, known: Mapping[str, object]) -> str:
        """Return the spelling of a name that is declared here: that of an inner scope is made unique."""
        if name in (self.scopes[-1] if self.scopes else known):
            raise UnsupportedPTX(f"PTX name {name} is declared twice")
        if self.scopes:
            self.inner_names += 1
            unique = self.scopes[-1][name] = f"{name}${self.inner_names}"
            return unique
        return name

    def _close_scope(self) -> None:
        """Forget the names of the innermost scope; branches to its labels may stand before the label."""
        names, start = self.scopes.pop(), self.scope_starts.pop()
        for index in range(start, len(self.kernel.instructions)):
            branch = self.kernel.instructions[index]
            if branch.parts[0] in ("bra", "brx"):
                operands = tuple(names.get(operand, operand) for operand in branch.operands)
                self.kernel.instructions[index] = replace(branch, operands=operands)
        for label in names.values():
            if label in self.kernel.tables:
                table = self.kernel.tables[label]
                self.kernel.tables[label] = tuple(names.get(each, each) for each in table)

    def _resolve(self, match: re.Match[str]) -> str:
        for scope in reversed(self.scopes):
            if match[0] in scope:
                return scope[match[0]]
        return match[0]

    def _instruction(self, text: str) -> None:
        found = _INSTRUCTION.fullmatch(text)
        if found is None:
            raise UnsupportedPTX(f"PTX statement {text[:80]!r} is not supported by the simulator")
        opcode, operands, predicate = found[3], found[4], found[2]
        if self.scopes:
            operands = _NAME.sub(self._resolve, operands)
            predicate = _NAME.sub(self._resolve, predicate) if predicate else None
        if opcode.startswith(("ld.param", "st.param")) and any(
            name in self.kernel.symbols for name in _NAME.findall(operands)
        ):
            opcode = opcode.replace(".param", ".local")  # of a call
        parts = tuple(opcode.split("."))
        if self.calls and parts[0] == "ret":
            parts, operands = ("bra",), self.calls[-1][1]
        instruction = Instruction(
            ".".join(parts), parts, split_operands(operands), predicate, bool(found[1]), self.line
        )
        if parts[0] == "call":
            self._call(instruction)
        else:
            self.kernel.instructions.append(instruction)
