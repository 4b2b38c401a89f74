"""Compiles CUDA C++ as it is published: finds its kernel and headers, leaves out what only the host runs."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from autotune.code.nvrtc import nvrtc
from autotune.code.single import compile_bounded
from autotune.errors import Rejected, UsageError
from autotune.paths import cache_dir

_FILE = "kernel.cu"  # as NVRTC is told
COMPILE_SECONDS = 30.0  # of one text, beyond which it counts as endless; a busy machine gets more
_INCLUDE = Path(__file__).with_name("include")  # headers of C and C++, as far as kernels use them
_BUNDLED_SINCE = (13, 3)  # versions of NVRTC that carry CUDA's headers
_MOST_MISSING = 50  # headers
_REFUSED = re.compile(r"(/[^()\n]+)\(\d+\): ")
_MISSING = re.compile(r'open source file "([\w./ +-]+)"')
_BLANK = re.compile(
    r'//(?:\\\n|[^\n])*|/\*.*?\*/|R"([^ ()\\]*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'', re.S
)
_PREPROCESSOR = re.compile(r"^[ \t]*#(?:\\\n|[^\n])*", re.M)
_DEFINE = re.compile(r"[ \t]*#[ \t]*define[ \t]+(\w+)(.*)", re.S)
_SCOPE = re.compile(r"(?:\binline\s+)?\bnamespace\b\s*([\w:]*)\s*$|\bextern\s*$")
_CALLABLE = re.compile(r"([~\w]+(?:\s*<[^;{}]*>)?)\s*\((?:[^()]|\([^()]*\))*\)[^()]*$")
_INITIALISERS = re.compile(r"\)\s*(?:noexcept\s*)?:(?!:).*", re.S)  # of a constructor
_TYPE = re.compile(r"\b(?:struct|class|union|enum)\b[^()]*$|=\s*$")
_ALIGNMENT = re.compile(r"\b(?:alignas|__align__|__attribute__)\s*\((?:[^()]|\([^()]*\))*\)")
_WORD = re.compile(r"\s*([~\w:]+)\s*")
_DEVICE = {"__global__", "__device__", "__constant__", "__shared__", "__managed__"}
_WORDS = re.compile(r"[A-Za-z_]\w*")
_KEYWORDS = {
    *("auto", "bool", "char", "class", "const", "constexpr", "double", "enum", "extern", "float", "inline"),
    *("int", "long", "namespace", "short", "signed", "size_t", "static", "std", "struct", "template"),
    *("typedef", "typename", "union", "unsigned", "using", "void", "volatile", "T"),
}
_INCLUDES = re.compile(r'[ \t]*#[ \t]*include[ \t]*["<]([^">]+)[">]')
_ONCE = re.compile(r"[ \t]*#[ \t]*pragma[ \t]+once\b")


@dataclass(frozen=True)
class _Piece:
    """One definition or declaration of a text: where it stands, and the namespaces around it."""

    scope: str
    start: int
    head: str
    stop: int


@lru_cache(maxsize=32)
def compiled(text: str, entry: str | None, arch: str, options: tuple[str, ...]) -> tuple[str, str]:
    """Return the PTX of a text and the name of its kernel in it.

    CUDA's headers are those of an installed toolkit, or what NVRTC carries; a header that is nowhere, or that
    only hosts can use, counts as empty. Where the text does not compile, it is compiled without what no code
    for the device names.

    Args:
        text: CUDA C++.
        entry: The kernel as C++ names it, such as "sgemm<64, 8>"; None for the only one.
        arch: Architecture to compile for.
        options: Of NVRTC.

    Raises:
        UsageError: It does not compile in time, or the kernel is not found.
    """
    kernel = only_kernel(text) if entry is None else entry.strip()
    library = nvrtc()
    bundled = f"--use-bundled-headers={cache_dir() / 'headers' / library.build}"
    if library.version < _BUNDLED_SINCE:
        bundled = ""
    missing: list[str] = []
    with tempfile.TemporaryDirectory() as front, tempfile.TemporaryDirectory() as folder:
        installed = _installed(library.path)
        last = (f"-I{front}", *(f"-I{each}" for each in (*installed, _INCLUDE, folder)), "-include=prelude.h")
        while True:
            given = ("-lineinfo", *options, *last)
            outcome = compile_bounded(text, f"&{kernel}", arch, given, timeout_s=COMPILE_SECONDS)
            if not isinstance(outcome, Rejected):
                return outcome.ptx, outcome.entry
            header = _MISSING.search(outcome.why)
            refused = _REFUSED.match(outcome.why)  # a header for the host alone
            inside = next(
                (each for each in installed if refused and Path(refused[1]).is_relative_to(each)), None
            )
            if header and bundled:
                last, bundled = (*last, bundled), ""
            elif header and header[1] not in missing and len(missing) < _MOST_MISSING:
                missing.append(header[1])
                path = Path(folder, header[1].lstrip("/"))
                if ".." in path.parts:
                    break
                _make_empty(path)
            elif (without := device_code(flattened(text, options))) != text:
                text = without
            elif (
                refused
                and inside
                and not (path := Path(front, Path(refused[1]).relative_to(inside))).exists()
            ):
                _make_empty(path)
            else:
                break
    if "__nv_name_map" in outcome.why:
        names = ", ".join(name for name, _ in kernels(text)) or "none"
        raise UsageError(f"the text has no kernel {kernel:.80} (it has {names:.150}): {outcome.why}")
    empty = f" (not found: {', '.join(missing)}; name their folders by options=)" if missing else ""
    raise UsageError(f"kernel {kernel:.80} does not compile: {outcome.why}{empty}")


def _make_empty(header: Path) -> None:
    header.parent.mkdir(parents=True, exist_ok=True)
    header.touch()


def _installed(library: str) -> list[Path]:
    """Return the folders of CUDA's headers on this machine."""
    roots = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    folders = [Path(root, "include") for root in (*roots, Path(library).parents[1]) if root]
    return [folder for folder in dict.fromkeys(folders) if Path(folder, "cuda_runtime.h").is_file()]


def kernels(text: str) -> list[tuple[str, bool]]:
    """Return the qualified name of each kernel of a text, and whether it is a template, in their order."""
    found: dict[str, bool] = {}
    for piece in _pieces(_code(text)):
        if "__global__" in piece.head and (name := _kernel_name(piece.head)):
            full = f"{piece.scope}::{name}" if piece.scope else name
            found[full] = found.get(full, False) or re.search(r"\btemplate\s*<", piece.head) is not None
    return list(found.items())


def only_kernel(text: str) -> str:
    """Return the name of the one kernel of a text.

    Raises:
        UsageError: It has none or several, or a template.
    """
    found = kernels(text)
    if not found:
        raise UsageError("the text has no kernel: write one as __global__ void name(...)")
    if len(found) > 1:
        names = ", ".join(name for name, _ in found)
        raise UsageError(f"the text has {len(found)} kernels ({names}): name one by entry=")
    name, template = found[0]
    if template:
        raise UsageError(f"kernel {name} is a template: name an instance, such as entry='{name}<64, 8>'")
    return name


def device_code(text: str) -> str:
    """Blank what stands outside functions for the device and is not named in them; lines keep their numbers.

    What a kernel needs is kept: functions without annotation, types, variables and macros, wherever it or
    what it needs names them. Directives for the preprocessor stay.
    """
    code = _code(text)
    macros = [_DEFINE.match(each[0]) for each in _PREPROCESSOR.finditer(text)]
    unused = {found[1]: found[2] for found in macros if found}
    marks = set(_DEVICE)  # and macros that stand for one
    while more := {name for name, body in unused.items() if marks.intersection(_WORDS.findall(body))} - marks:
        marks |= more
    host: list[tuple[set[str], _Piece]] = []
    used = []
    for piece in _pieces(code):
        names = _declared(piece, code, marks)
        if names is None:  # its own name may be that of a function which launches it
            own = _CALLABLE.search(piece.head)
            head = piece.head[: own.start(1)] + piece.head[own.end(1) :] if own else piece.head
            used.append(head + code[piece.start + len(piece.head.lstrip()) : piece.stop])
        else:
            host.append((names, piece))
    launching = (names for names, piece in host if "<<<" in code[piece.start : piece.stop])
    never = set().union(*launching)  # nor what is declared or instantiated under its name
    host = [(names - never, piece) for names, piece in host]
    while used:
        words = {*_WORDS.findall("\n".join(used))}
        used = [unused.pop(name) for name in words & unused.keys()]
        used += [code[piece.start : piece.stop] for names, piece in host if names & words]
        host = [each for each in host if not each[0] & words]
    kept = [False] * len(text)
    for found in _PREPROCESSOR.finditer(_BLANK.sub(_blank, text)):
        kept[found.start() : found.end()] = [True] * (found.end() - found.start())
    letters = list(text)
    for _, piece in host:
        for place in range(piece.start, piece.stop):
            letters[place] = letters[place] if kept[place] or letters[place] == "\n" else " "
    return "".join(letters)


def _declared(piece: _Piece, code: str, marks: set[str]) -> set[str] | None:
    """Return the names that something for the host alone declares; None for what has a mark of the device."""
    head = _INITIALISERS.sub(")", piece.head.strip())
    if marks.intersection(_WORDS.findall(head)) or head.startswith(("using namespace", "static_assert")):
        return None
    kind = _ALIGNMENT.sub(" ", head)
    function = None if _TYPE.search(kind) or "(" not in kind.partition("=")[0] else _CALLABLE.search(head)
    if function is not None:
        name = function[1].partition("<")[0].strip()
        return set() if name == "main" or "__host__" in head else {name}
    enum = re.search(r"\b(?:enum|typedef)\b", head)
    return {*_WORDS.findall(code[piece.start : piece.stop] if enum else head.partition("=")[0])} - _KEYWORDS


def flattened(text: str, options: Sequence[str]) -> str:
    """Put the headers of the folders of options, and those beside each, in place of the lines that name them.

    Args:
        text: CUDA C++.
        options: Of NVRTC; folders are those of -I.
    """
    words = iter(options)
    folders = [word[2:] or next(words, "") for word in words if word.startswith("-I")]
    seen: set[Path] = set()

    def put(text: str, name: str, near: list[str]) -> str:
        lines = []
        for number, line in enumerate(text.splitlines(), 1):
            found = _INCLUDES.match(line)
            paths = [Path(folder, found[1]) for folder in (*near, *folders)] if found else []
            path = next((path for path in paths if path.is_file()), None)
            if path is None:
                lines.append(line)
            elif path.resolve() not in seen:
                seen.add(path.resolve())
                inner = put(path.read_text(errors="replace"), path.name, [str(path.parent)])
                lines.append(f'#line 1 "{path.name}"\n{inner}\n#line {number + 1} "{name}"')
        return "\n".join(line for line in lines if not _ONCE.match(line)) + "\n"

    return put(text, _FILE, [])


def _code(text: str) -> str:
    """Blank comments, strings and preprocessor lines."""
    return _PREPROCESSOR.sub(_blank, _BLANK.sub(_blank, text))


def _blank(found: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", found[0])


def _pieces(code: str) -> Iterator[_Piece]:
    """Yield what stands in namespaces: definitions with their bodies, and declarations."""
    scopes: list[str] = []
    start = position = 0
    for found in re.finditer(r"[{};]", code):
        if found.start() < position:
            continue
        position = found.end()
        head = code[start : found.start()]
        first = start + len(head) - len(head.lstrip())
        if found[0] == "{":
            if scope := _SCOPE.search(head):
                scopes.append(scope[1] or "")
            else:
                position = _closing(code, position)
                yield _Piece("::".join(filter(None, scopes)), first, head, position)
        elif found[0] == "}":
            scopes = scopes[:-1]
        elif head.strip():
            yield _Piece("::".join(filter(None, scopes)), first, head, position)
        start = position


def _closing(code: str, start: int) -> int:
    """Return the place behind the brace that closes what one before ``start`` opened."""
    depth = 1
    for brace in re.compile(r"[{}]").finditer(code, start):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return brace.end()
    return len(code)


def _kernel_name(head: str) -> str | None:
    """Return the function name behind __global__: attributes with arguments may stand before it."""
    place = head.index("__global__") + len("__global__")
    while word := _WORD.match(head, place):
        place = word.end()
        if head[place : place + 1] == "(":
            if not word[1].startswith("__"):
                return word[1]
            depth, place = 1, place + 1
            while depth and place < len(head):
                depth += {"(": 1, ")": -1}.get(head[place], 0)
                place += 1
    return None
