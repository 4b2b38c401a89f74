"""Parses PTX text into a `Kernel`: parameters, variables, registers and a list of instructions."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autotune.errors import UsageError
from autotune.simulator.faults import UnsupportedPTX

TYPE_BITS = {
    "pred": 1,
    **{f"{kind}8": 8 for kind in "bus"},
    **{f"{kind}16": 16 for kind in ("b", "u", "s", "f", "bf")},
    **{f"{kind}32": 32 for kind in "busf"},
    **{f"{kind}64": 64 for kind in "busf"},
    "f16x2": 32,
    "bf16x2": 32,
    "tf32": 32,
}


@dataclass(frozen=True)
class Parameter:
    """One kernel parameter: its PTX type ("u64", "f32", "b8" for a struct), and its size in bytes."""

    name: str
    type: str
    size: int


@dataclass(frozen=True)
class Symbol:
    """One variable: where it lies in its memory space, and its first bytes if it has an initial value.

    Attributes:
        space: "shared", "local", "global" or "const".
        offset: Bytes from the start of the space's static part.
        size: Bytes; 0 for dynamic shared memory.
        initial: Initial bytes of a global or constant variable.
    """

    space: str
    offset: int
    size: int
    initial: bytes = b""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One PTX instruction.

    Attributes:
        opcode: With all modifiers, such as "ld.global.nc.v4.f32".
        parts: The opcode split at its dots.
        operands: As written; vectors keep their braces, addresses their brackets.
        predicate: Register that decides whether it runs, None for always.
        negated: It runs where the predicate is false.
        line: CUDA source line, 0 where unknown.
    """

    opcode: str
    parts: tuple[str, ...]
    operands: tuple[str, ...]
    predicate: str | None
    negated: bool
    line: int


@dataclass
class Kernel:
    """One kernel of a PTX text.

    Attributes:
        name: Entry name.
        parameters: In order.
        max_threads: Product of ``.maxntid`` or ``.reqntid``, None if not stated.
        capability: Compute capability it was compiled for, 90 for 9.0; None if not stated.
        symbols: Variables by name.
        shared_bytes: Static shared memory, where dynamic shared memory begins.
        local_bytes: Stack of one thread.
        registers: Name to width in bits (1 for predicates).
        instructions: In text order.
        labels: Name to the index of the instruction it stands before.
        tables: Label of a ``.branchtargets`` list to its labels.
    """

    name: str
    parameters: list[Parameter]
    max_threads: int | None
    capability: int | None = None
    symbols: dict[str, Symbol] = field(default_factory=dict)
    shared_bytes: int = 0
    local_bytes: int = 0
    registers: dict[str, int] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    tables: dict[str, tuple[str, ...]] = field(default_factory=dict)


# Of CUDA, for every compute capability (CUDA C++ Programming Guide, "Technical Specifications").
MAX_LOCAL_BYTES = 512 << 10  # of one thread
MAX_CONST_BYTES = 64 << 10
MAX_ARRAY_BYTES = 1 << 39  # of one array; each has an address window of twice that
_MOST_REGISTERS = 1 << 20  # names a kernel may declare; compilers declare some thousands

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_STATEMENT = re.compile(r"\s*(?:(\.(?:loc|file|section)\b[^\n]*)|([{}])|([$\w]+:)(?!:)|([^;]*);)")
_INSTRUCTION = re.compile(r"(?:@(!?)([%$\w]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.S)
_NAME = re.compile(r"(?<![\w$%.])[%$A-Za-z_][\w$]*")
_INTEGER = re.compile(r"-?(?:0|[1-9]\d{0,19}|0[xX][0-9a-fA-F]{1,16}|0[bB][01]{1,64})U?", re.ASCII)
_PARAMETER = re.compile(
    r"\.param\s+(?:\.(?:align\s+\d+|ptr|global|shared|const|local)\s+)*\.(\w+)\s+"
    r"(?:\.(?:align\s+\d+|ptr|global|shared|const|local)\s+)*([\w$]+)\s*(?:\[(\d{1,9})\])?"
)
_VARIABLE = re.compile(
    r"(?:\.(?:visible|extern|weak|common)\s+)*\.(shared|local|global|const)\s+(?:\.align\s+(\d{1,9})\s+)?"
    r"\.(\w+)\s+([\w$]+)\s*((?:\[\d{0,18}\])*)\s*(?:=\s*(.*))?",
    re.S,
)


def split_operands(text: str) -> tuple[str, ...]:
    """Split "a, {b, c}, [d+4]" at the commas outside braces and brackets."""
    if "{" not in text and "(" not in text:
        return tuple(part.strip() for part in text.split(",")) if text else ()
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        if character in "{[(":
            depth += 1
        elif character in "}])":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:position].strip())
            start = position + 1
    parts.append(text[start:].strip())
    return tuple(parts)


def integer(text: str) -> int:
    """Read an integer operand.

    Raises:
        ValueError: It is none, or needs more than 64 bits.
    """
    if _INTEGER.fullmatch(text) is None or not -(1 << 63) <= (value := int(text.rstrip("U"), 0)) < 1 << 64:
        raise ValueError(text[:80])
    return value


def natural(text: str) -> int:
    """Read an integer operand that is not negative.

    Raises:
        ValueError: It is none.
    """
    if (value := integer(text)) < 0:
        raise ValueError(text)
    return value


def parse_kernel(ptx: str, entry: str) -> Kernel:
    """Parse one kernel of a PTX text.

    Args:
        ptx: As NVRTC returns it.
        entry: Kernel name.

    Raises:
        UsageError: The text has no such kernel.
        UnsupportedPTX: It declares something that the simulator does not support.
    """
    text = _COMMENT.sub("", ptx)
    header = re.search(rf"\.entry\s+{re.escape(entry)}\s*(?:\((.*?)\))?([^{{]*)\{{", text, re.S)
    if header is None:
        present = re.findall(r"\.entry\s+([\w$]+)", text)
        raise UsageError(f"the PTX has no kernel {entry!r:.80}: it has {', '.join(present)[:150] or 'none'}")
    limits = re.search(r"\.(?:max|req)ntid\s+(\d{1,9}(?:\s*,\s*\d{1,9}){0,2})\b", header[2])
    target = re.search(r"^\s*\.target\s+sm_(\d{2,3})", text, re.M)
    kernel = Kernel(
        entry,
        [_parameter(part) for part in split_operands((header[1] or "").strip())],
        math.prod(int(extent) for extent in limits[1].split(",")) if limits else None,
        int(target[1]) if target else None,
    )
    end = _closing_brace(text, header.end())
    _module_variables(kernel, text)
    _Body(kernel).read(text[header.end() : end])
    return kernel


def _parameter(text: str) -> Parameter:
    """Read one parameter, such as ".param .align 8 .b8 k_param_3[16]"."""
    found = _PARAMETER.fullmatch(text)
    if found is None or found[1] not in TYPE_BITS:
        raise UnsupportedPTX(f"PTX parameter {text[:80]!r} is not supported by the simulator")
    return Parameter(found[2], found[1], TYPE_BITS[found[1]] // 8 * int(found[3] or 1))


def _closing_brace(text: str, start: int) -> int:
    depth = 1
    for brace in re.finditer(r"[{}]", text[start:]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return start + brace.start()
    raise UnsupportedPTX("the PTX text ends inside a kernel")


def _module_variables(kernel: Kernel, text: str) -> None:
    """Read the variables declared outside functions."""
    outside, position = [], 0
    for function in re.finditer(r"\.(?:entry|func)\b[^{;]*\{", text):
        if function.start() < position:
            continue
        outside.append(text[position : function.start()])
        position = _closing_brace(text, function.end()) + 1
    outside.append(text[position:])
    for statement in map(str.strip, "".join(outside).split(";")):
        stray = statement and statement[0] not in ".}"
        if stray or re.search(r"^\s*\.loc\b", statement, re.M):
            raise UnsupportedPTX(
                f"PTX statement {' '.join(statement.split())[:80]!r} stands outside a function"
            )
        declaration = re.search(r"(?:\.\w+\s+)*\.(?:shared|global|const)\s.*", statement, re.S)
        if declaration:
            _declare(kernel, declaration[0])


def _declare(kernel: Kernel, statement: str) -> str:
    """Add one variable to the kernel and return its name."""
    found = _VARIABLE.fullmatch(statement.strip())
    if found is None or found[3] not in TYPE_BITS or found[3] == "pred" or found[2] == "0":
        raise UnsupportedPTX(f"PTX declaration {statement.strip()[:80]!r} is not supported by the simulator")
    space, kind, name = found[1], found[3], found[4]
    width = TYPE_BITS[kind] // 8
    align = int(found[2] or width)
    size = width * math.prod(int(extent or 0) for extent in re.findall(r"\[(\d*)\]", found[5]))
    initial = b"".join(_initial_bytes(number, width) for number in re.findall(r"[^\s{},]+", found[6] or ""))
    if len(initial) > size:
        raise UnsupportedPTX(f"PTX variable {name} of {size} bytes has initial values of {len(initial)}")
    most = {"const": MAX_CONST_BYTES, "local": MAX_LOCAL_BYTES, "global": MAX_ARRAY_BYTES}.get(space)
    if most is not None and size + (kernel.local_bytes if space == "local" else 0) > most:
        raise UsageError(f"PTX variable {name[:80]} has {size} bytes; .{space} memory allows {most}")
    if space == "local":
        offset = -(-kernel.local_bytes // align) * align
        kernel.local_bytes = offset + size
    elif space == "shared":
        offset = -(-kernel.shared_bytes // align) * align
        kernel.shared_bytes = offset + size
        if size == 0:  # dynamic: it begins where the static part ends, however many names it has
            align = max(align, 16)
            kernel.shared_bytes = offset = -(-kernel.shared_bytes // align) * align
    else:
        offset = 0
    kernel.symbols[name] = Symbol(space, offset, size, initial)
    return name


def _initial_bytes(number: str, width: int) -> bytes:
    """Encode one initial value: an integer, or the bits of a float as 0f3F800000."""
    try:
        value = int(number[2:], 16) if number[:2].lower() in ("0f", "0d") else int(number, 0)
    except ValueError:
        raise UnsupportedPTX(f"PTX initial value {number!r} is not supported by the simulator") from None
    return (value & ((1 << 8 * width) - 1)).to_bytes(width, "little")


class _Body:
    """Reads the statements of one kernel body; braces open scopes whose registers are their own."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.line = 0
        self.scopes: list[dict[str, str]] = []
        self.scope_starts: list[int] = []
        self.inner_names = 0

    def read(self, body: str) -> None:
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
        if self.scopes:
            raise UnsupportedPTX("the PTX text ends inside a scope")
        # Dynamic shared memory begins behind every static variable, wherever it was declared.
        end = -(-self.kernel.shared_bytes // 16) * 16
        for name, symbol in self.kernel.symbols.items():
            if symbol.space == "shared" and symbol.size == 0:
                self.kernel.symbols[name] = Symbol("shared", end, 0)
                self.kernel.shared_bytes = end

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
            self.line = int(text.split()[2]) or self.line
        elif text.startswith(".reg"):
            self._registers(text)
        elif text.startswith(".branchtargets"):
            label = next(reversed(kernel.labels), "")  # it stands before the list
            kernel.tables[label] = split_operands(text.removeprefix(".branchtargets").strip())
        elif text.startswith((".shared", ".local")):
            _declare(kernel, text)
        elif not text or re.match(r"\.(pragma|file|section|param|callprototype)\b", text):
            pass
        elif text.startswith("."):
            raise UnsupportedPTX(f"PTX directive {text[:80]!r} is not supported by the simulator")
        else:
            self._instruction(text)

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

    def _declared(self, name: str, known: Mapping[str, int]) -> str:
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
            if branch.parts[0] == "bra" and branch.operands[0] in names:
                self.kernel.instructions[index] = replace(branch, operands=(names[branch.operands[0]],))

    def _resolve(self, match: re.Match[str]) -> str:
        for scope in reversed(self.scopes):
            if match[0] in scope:
                return scope[match[0]]
        return match[0]

    def _instruction(self, text: str) -> None:
        found = _INSTRUCTION.fullmatch(text)
        if found is None:
            raise UnsupportedPTX(f"PTX statement {text[:80]!r} is not supported by the simulator")
        operands, predicate = found[4], found[2]
        if self.scopes:
            operands = _NAME.sub(self._resolve, operands)
            predicate = _NAME.sub(self._resolve, predicate) if predicate else None
        self.kernel.instructions.append(
            Instruction(
                found[3],
                tuple(found[3].split(".")),
                split_operands(operands),
                predicate,
                bool(found[1]),
                self.line,
            )
        )
