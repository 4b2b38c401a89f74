"""Parses PTX text into a `Kernel`: parameters, variables, registers and a list of instructions."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

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
        references: Byte and name of each variable whose address is among them.
    """

    space: str
    offset: int
    size: int
    initial: bytes = b""
    references: tuple[tuple[int, str], ...] = ()


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
        cluster: Blocks of a cluster in x, y, z: ``.reqnctapercluster``.
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
    cluster: tuple[int, int, int] = (1, 1, 1)
    symbols: dict[str, Symbol] = field(default_factory=dict)
    shared_bytes: int = 0
    local_bytes: int = 0
    registers: dict[str, int] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    tables: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Function:
    """A device function that was not inlined: the names of what it returns and takes, and its body."""

    returns: tuple[str, ...]
    takes: tuple[str, ...]
    body: str


# Of CUDA, for every compute capability (CUDA C++ Programming Guide, "Technical Specifications").
MAX_LOCAL_BYTES = 512 << 10  # of one thread
MAX_CONST_BYTES = 64 << 10
MAX_ARRAY_BYTES = 1 << 39  # of one array; each has an address window of twice that
USER_FILE = "kernel.cu"  # as NVRTC is told

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_INTEGER = re.compile(r"-?(?:0|[1-9]\d{0,19}|0[xX][0-9a-fA-F]{1,16}|0[bB][01]{1,64})U?", re.ASCII)
_PARAMETER = re.compile(
    r"\.param\s+(?:\.(?:align\s+\d+|ptr|global|shared|const|local)\s+)*\.(\w+)\s+"
    r"(?:\.(?:align\s+\d+|ptr|global|shared|const|local)\s+)*([\w$]+)\s*(?:\[(\d{1,9})\])?"
)
_FUNCTION = re.compile(r"\.func\s*(?:\((.*?)\)\s*)?([\w$]+)\s*(?:\((.*?)\))?", re.S)
_PARAMETER_NAME = re.compile(r"([\w$]+)\s*(?:\[\d*\])?\s*(?:,|$)")
_REFERENCE = re.compile(r"generic\(([\w$]+)\)|([A-Za-z_$][\w$]*)")
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


def read_module(ptx: str, entry: str) -> tuple[Kernel, dict[str, Function], str, str | None]:
    """Read all of a PTX text but the bodies: see `body.parse_kernel`.

    Returns:
        (kernel without its body, functions, body, number of the user's file or None).
    """
    files = dict(re.findall(r'\.file\s+(\d+)\s+"(.*?)"', ptx))
    text = _COMMENT.sub("", ptx)
    header = re.search(rf"\.entry\s+{re.escape(entry)}\s*(?:\((.*?)\))?([^{{]*)\{{", text, re.S)
    if header is None:
        present = re.findall(r"\.entry\s+([\w$]+)", text)
        raise UsageError(f"the PTX has no kernel {entry!r:.80}: it has {', '.join(present)[:150] or 'none'}")
    limits = re.search(r"\.(?:max|req)ntid\s+(\d{1,9}(?:\s*,\s*\d{1,9}){0,2})\b", header[2])
    cluster = re.search(r"\.reqnctapercluster\s+(\d{1,9})\s*,\s*(\d{1,9})\s*,\s*(\d{1,9})", header[2])
    target = re.search(r"^\s*\.target\s+sm_(\d{2,3})", text, re.M)
    kernel = Kernel(
        entry,
        [_parameter(part) for part in split_operands((header[1] or "").strip())],
        math.prod(int(extent) for extent in limits[1].split(",")) if limits else None,
        int(target[1]) if target else None,
        (int(cluster[1]), int(cluster[2]), int(cluster[3])) if cluster else (1, 1, 1),
    )
    end = _closing_brace(text, header.end())
    functions = _module(kernel, text)
    own = next((number for number, path in files.items() if path.endswith(USER_FILE)), None)
    return kernel, functions, text[header.end() : end], own


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


def _module(kernel: Kernel, text: str) -> dict[str, Function]:
    """Read the variables declared outside functions; return the functions."""
    outside, position, functions = [], 0, {}
    for found in re.finditer(r"\.(?:entry|func)\b[^{;]*\{", text):
        if found.start() < position:
            continue
        outside.append(text[position : found.start()])
        position = _closing_brace(text, found.end()) + 1
        if head := _FUNCTION.match(found[0]):
            returns, takes = (tuple(_PARAMETER_NAME.findall(part or "")) for part in head.group(1, 3))
            functions[head[2]] = Function(returns, takes, text[found.end() : position - 1])
    outside.append(text[position:])
    for statement in map(str.strip, "".join(outside).split(";")):
        stray = statement and statement[0] not in ".}"
        if stray or re.search(r"^\s*\.loc\b", statement, re.M):
            raise UnsupportedPTX(
                f"PTX statement {' '.join(statement.split())[:80]!r} stands outside a function"
            )
        declaration = re.search(r"(?:\.\w+\s+)*\.(?:shared|global|const)\s.*", statement, re.S)
        if declaration:
            declare(kernel, declaration[0])
    return functions


def declare(kernel: Kernel, statement: str) -> str:
    """Add one variable to the kernel and return its name."""
    found = _VARIABLE.fullmatch(statement.strip())
    if found is None or found[3] not in TYPE_BITS or found[3] == "pred" or found[2] == "0":
        raise UnsupportedPTX(f"PTX declaration {statement.strip()[:80]!r} is not supported by the simulator")
    space, kind, name = found[1], found[3], found[4]
    width = TYPE_BITS[kind] // 8
    align = int(found[2] or width)
    size = width * math.prod(int(extent or 0) for extent in re.findall(r"\[(\d*)\]", found[5]))
    initial, references = b"", []
    for value in re.findall(r"[^\s{},]+", found[6] or ""):
        if reference := _REFERENCE.fullmatch(value):
            references.append((len(initial), reference[1] or reference[2]))
        initial += _initial_bytes("0" if reference else value, width)
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
    kernel.symbols[name] = Symbol(space, offset, size, initial, tuple(references))
    return name


def _initial_bytes(number: str, width: int) -> bytes:
    """Encode one initial value: an integer, or the bits of a float as 0f3F800000."""
    try:
        value = int(number[2:], 16) if number[:2].lower() in ("0f", "0d") else int(number, 0)
    except ValueError:
        raise UnsupportedPTX(f"PTX initial value {number!r} is not supported by the simulator") from None
    return (value & ((1 << 8 * width) - 1)).to_bytes(width, "little")
