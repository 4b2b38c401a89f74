"""Compiling CUDA text by NVRTC, in this process or in a pool of child processes that can be killed."""

from __future__ import annotations

import hashlib
import re
import time
from dataclasses import dataclass, field

from autotune.code.nvrtc import nvrtc as nvrtc
from autotune.code.nvrtc import nvrtc_version as nvrtc_version
from autotune.errors import Rejected, ToolchainError
from autotune.outside import printable

OPTIONS = ("-std=c++17", "-default-device", "-Xptxas=-v")
_NO_CACHE = "--no-cache"  # a hit in NVRTC's own cache, in use where there is a driver, leaves the log empty
_CACHE_SINCE = (12, 9)
_OUT_OF_MEMORY = 1  # nvrtcResult
_CANDIDATE_FAULTS = (6, 11)  # nvrtcResult: compilation, internal error
_STARVED = re.compile(r"(?i)out of memory|memory allocation fail")  # as ptxas says it
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_ARCHITECTURE = re.compile(r"^// architecture (sm_\d+[af])\b", re.MULTILINE)
_LONGEST_ERROR = 300  # characters: a text may put any number of them into #error
_ERROR = re.compile(r"^(?!.*\b(?:warning|note) #)\S.*?\b(?:error|fatal)\b[ #\w-]*: .*$", re.MULTILINE)


class CompilerStarvedError(ToolchainError):
    """NVRTC had not enough memory."""


@dataclass(frozen=True)
class Binary:
    """One compile: machine code, the PTX it was assembled from, and what it needs.

    Attributes:
        cubin: ELF image for ``arch``.
        ptx: PTX of the same compile.
        arch: Architecture compiled for, such as "sm_90".
        entry: ``extern "C"`` name of the kernel.
        registers: 32-bit registers per thread.
        spill_bytes: Bytes of spill stores plus spill loads in the code of one thread.
        stack_bytes: Stack frame of one thread.
        shared_bytes: Static shared memory of one block.
        log: What the compiler said, without its timings.
        nvrtc: Full version that compiled it, such as "13.0.88".
        options: Everything NVRTC was told.
        seconds: Compile time, wall clock; not part of equality.
    """

    cubin: bytes = field(repr=False)
    ptx: str = field(repr=False)
    arch: str
    entry: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    log: str = field(repr=False)
    nvrtc: str
    options: tuple[str, ...]
    seconds: float = field(compare=False)

    @property
    def digest(self) -> str:
        """SHA-256 of the cubin, hexadecimal."""
        return hashlib.sha256(self.cubin).hexdigest()


def stated_arch(text: str, arch: str) -> str:
    """Return what a text is compiled for on ``arch``: itself, or its variant that the text states."""
    stated = _ARCHITECTURE.search(text)
    return stated[1] if stated and stated[1][:-1] == arch else arch


def compile_text(text: str, entry: str, arch: str, options: tuple[str, ...] = ()) -> Binary | Rejected:
    """Compile CUDA text for one architecture; the same input gives an equal result.

    A text with instructions that one architecture alone has, such as wgmma, says so in a line of its own,
    ``// architecture sm_90a``: for "sm_90" it is then compiled with them.

    Args:
        text: CUDA C++ that declares ``entry`` as ``extern "C" __global__``.
        entry: Name of the kernel; or, from "&" on, a C++ expression for its address, such as "&sgemm<64, 8>".
        arch: Such as "sm_90", see `Nvrtc.resolve`.
        options: Added to `OPTIONS`.

    Returns:
        The binary, or ``Rejected("compile", first error)``.

    Raises:
        ToolchainError: NVRTC is missing or refuses the architecture or an option; the text lacks the entry.
        CompilerStarvedError: NVRTC had not enough memory.
    """
    library = nvrtc()
    target = library.resolve(stated_arch(text, arch))
    uncached = (_NO_CACHE,) if library.version >= _CACHE_SINCE else ()
    given = (f"--gpu-architecture={target}", *OPTIONS, *uncached, *options)
    start = time.perf_counter()
    code, log, cubin, ptx, name = library.compile(text, given, entry if entry[:1] == "&" else "")
    seconds = time.perf_counter() - start
    if code == _OUT_OF_MEMORY or (code and _STARVED.search(_first_error(log))):
        raise CompilerStarvedError(
            f"NVRTC had not enough memory: {_first_error(log) or library.error_name(code)}"
        )
    if code in _CANDIDATE_FAULTS:
        return Rejected("compile", _first_error(log) or library.error_name(code))
    if code:
        raise ToolchainError(f"NVRTC reports {library.error_name(code)} for {' '.join(given)}: {log.strip()}")
    entry = name or entry
    resources = _resources(log, entry)
    if resources is None:
        others = ", ".join(re.findall(r"Compiling entry function '(.+?)' for", log)) or "none"
        raise ToolchainError(
            f'the text has no kernel {entry} (it has {others}): declare it extern "C" __global__'
        )
    return Binary(cubin, ptx, target, entry, *resources, log, library.build_of(ptx), given, seconds)


def _resources(log: str, entry: str) -> tuple[int, int, int, int] | None:
    """Read (registers, spill, stack, static shared bytes) of one kernel from the output of ``ptxas -v``.

    The log may hold several kernels, and device functions that were not inlined ("Function properties for",
    without a line of registers) before or after the registers of the kernel.
    """
    kernel = function = ""
    frames: dict[str, tuple[int, int]] = {}
    used: dict[str, tuple[int, int]] = {}
    for line in log.splitlines():
        if match := re.search(r"Compiling entry function '(.+?)' for", line):
            kernel = function = match[1]
        elif match := re.search(r"Function properties for (\S+)", line):
            function = match[1]
        elif match := _FRAME.search(line):
            frames[function] = (int(match[2]) + int(match[3]), int(match[1]))
        elif match := re.search(r"Used (\d+) registers", line):
            shared = re.search(r"(\d+) bytes smem", line)
            used[kernel] = (int(match[1]), int(shared[1]) if shared else 0)
    if entry not in used or entry not in frames:
        return None
    registers, shared_bytes = used[entry]
    spill_bytes, stack_bytes = frames[entry]
    return registers, spill_bytes, stack_bytes, shared_bytes


def _first_error(log: str) -> str:
    """Find the first error line, with the number of errors; "" if the log has none."""
    errors = _ERROR.findall(log)
    errors = [
        each for each in errors if "__nv_name_map" not in each
    ] or errors  # what else is wrong comes first
    first = printable(errors[0], _LONGEST_ERROR) if errors else ""
    return first if len(errors) < 2 else f"{first} ({len(errors)} errors)"
