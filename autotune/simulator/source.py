"""Compiles CUDA C++ as it is published: finds its kernel and headers, leaves out what only the host runs."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from autotune.errors import Rejected, UsageError

COMPILE_SECONDS = 30.0  # of one text, beyond which it counts as endless; a busy machine gets more
_INCLUDE = Path(__file__).with_name("include")  # headers of C and C++, as far as kernels use them
_BUNDLED_SINCE = (13, 3)  # versions of NVRTC that carry CUDA's headers
_MOST_MISSING = 50  # headers
_MISSING = re.compile(r'open source file "([\w./+-]+)"')
_BLANK = re.compile(
    r'//(?:\\\n|[^\n])*|/\*.*?\*/|R"([^ ()\\]*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'', re.S
)
_PREPROCESSOR = re.compile(r"^[ \t]*#(?:\\\n|[^\n])*", re.M)
_DEFINE = re.compile(r"[ \t]*#[ \t]*define[ \t]+(\w+)(.*)", re.S)
_SCOPE = re.compile(r"(?:\binline\s+)?\bnamespace\b\s*([\w:]*)\s*$|\bextern\s*$")
_CALLABLE = re.compile(r"([~\w]+(?:\s*<[^;{}]*>)?)\s*\((?:[^()]|\([^()]*\))*\)[^()]*$")
_TYPE = re.compile(r"\b(?:struct|class|union|enum)\b[^()]*$|=\s*$")
_WORD = re.compile(r"\s*([~\w:]+)\s*")
_DEVICE = re.compile(r"\b__(?:global|device)__\b")


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

    CUDA's headers are those of an installed toolkit, or what NVRTC carries; a header that is nowhere counts
    as empty. Where the text does not compile, it is compiled without the functions that only hosts can run.

    Args:
        text: CUDA C++.
        entry: The kernel as C++ names it, such as "sgemm<64, 8>"; None for the only one.
        arch: Architecture to compile for.
        options: Of NVRTC.

    Raises:
        UsageError: It does not compile in time, or the kernel is not found.
    """
    from autotune.code.nvrtc import nvrtc
    from autotune.code.single import compile_bounded
    from autotune.paths import cache_dir

    kernel = only_kernel(text) if entry is None else entry.strip()
    library = nvrtc()
    bundled = f"--use-bundled-headers={cache_dir() / 'headers' / library.build}"
    if library.version < _BUNDLED_SINCE:
        bundled = ""
    missing: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        last = (*_installed(library.path), f"-I{_INCLUDE}", f"-I{folder}", "-include=prelude.h")
        while True:
            given = ("-lineinfo", *options, *last)
            outcome = compile_bounded(text, f"&{kernel}", arch, given, timeout_s=COMPILE_SECONDS)
            if not isinstance(outcome, Rejected):
                return outcome.ptx, outcome.entry
            header = _MISSING.search(outcome.why)
            if header and bundled:
                last, bundled = (*last, bundled), ""
            elif header and header[1] not in missing and len(missing) < _MOST_MISSING:
                missing.append(header[1])
                path = Path(folder, header[1].lstrip("/"))
                if ".." in path.parts:
                    break
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
            elif (without := device_code(text)) != text:
                text = without
            else:
                break
    if "__nv_name_map" in outcome.why:
        names = ", ".join(name for name, _ in kernels(text)) or "none"
        raise UsageError(f"the text has no kernel {kernel:.80} (it has {names:.150}): {outcome.why}")
    empty = f" (not found: {', '.join(missing)}; name their folders by options=)" if missing else ""
    raise UsageError(f"kernel {kernel:.80} does not compile: {outcome.why}{empty}")


def _installed(library: str) -> list[str]:
    """Return options with the folders of CUDA's headers on this machine."""
    roots = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    folders = [Path(root, "include") for root in (*roots, Path(library).parents[1]) if root]
    return [f"-I{folder}" for folder in dict.fromkeys(folders) if Path(folder, "cuda_runtime.h").is_file()]


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
    """Blank the functions that are not annotated and that no device code names; lines keep their numbers."""
    code = _code(text)
    pieces = list(_pieces(code))
    macros = [_DEFINE.match(each[0]) for each in _PREPROCESSOR.finditer(text)]
    unused = {found[1]: found[2] for found in macros if found}
    host: dict[int, str] = {}
    used = []
    for number, piece in enumerate(pieces):
        callable_ = _CALLABLE.search(piece.head) if not _TYPE.search(piece.head) else None
        if callable_ is None or _DEVICE.search(piece.head):
            used.append(code[piece.start : piece.stop])
        else:
            host[number] = callable_[1].partition("<")[0].strip()
    while used:
        words = {*re.findall(r"\w+", "\n".join(used))}
        used = [unused.pop(name) for name in words & unused.keys()]
        for number in [number for number, name in host.items() if name in words]:
            if "__host__" not in pieces[number].head:
                used.append(code[pieces[number].start : pieces[number].stop])
                del host[number]
    letters = list(text)
    for number in host:
        for place in range(pieces[number].start, pieces[number].stop):
            if not code[place].isspace() or text[place] != "\n":
                letters[place] = " " if code[place] != "\n" else "\n"
    return "".join(letters)


def _code(text: str) -> str:
    """Blank comments, strings and preprocessor lines."""

    def blank(found: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", found[0])

    return _PREPROCESSOR.sub(blank, _BLANK.sub(blank, text))


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
