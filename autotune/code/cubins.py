"""Machine code on disk: each text is compiled once, and found again by every process.

The key of a binary is the SHA-256 of the text without comments, the entry, the architecture, the options and
the full version of NVRTC. Two compiles of one text need not give the same machine code, so a record's kernel
is looked for under the NVRTC that it was measured with, and compiled again only where nothing is found.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, TypeVar

from autotune.code import nvrtc as library
from autotune.code.compiler import OPTIONS, Binary
from autotune.code.depot import Depot, depot_key
from autotune.code.pool import CompilePool
from autotune.code.render import code_of
from autotune.code.single import compile_bounded
from autotune.errors import MachineFault, Rejected

_FORMAT = 1
_LINES = "-lineinfo"
K = TypeVar("K", bound=Hashable)

_compiling = threading.Lock()  # of several threads that want one text, one compiles it


def _reopen() -> None:
    """Forget who was compiling: a forked child has no thread that would ever finish."""
    global _compiling
    _compiling = threading.Lock()


os.register_at_fork(after_in_child=_reopen)


def load(
    text: str,
    entry: str,
    arch: str,
    *,
    depot: Depot,
    nvrtc: str | None = None,
    options: tuple[str, ...] = (),
) -> Binary | None:
    """Find a binary on disk; None when there is none.

    Args:
        text: CUDA C++.
        entry: Name of the kernel.
        arch: Architecture asked for, such as "sm_90".
        nvrtc: Version that compiled it, such as "13.0.88"; the one of this machine when not given.
        options: As for `compile_bounded`.
        depot: Where it is kept.

    Raises:
        ToolchainError: No version was given and NVRTC is missing.
    """
    version = nvrtc or installed_version(depot)
    content = depot.get(_key(text, entry, arch, version, options))
    return None if content is None else _decoded(content)


def put(text: str, binary: Binary, arch: str, *, depot: Depot, options: tuple[str, ...] = ()) -> bool:
    """Keep a binary, in place of one that was there; return whether it could be written.

    Args:
        text: What it was compiled from.
        binary: As `compile_bounded` returned it.
        arch: Architecture that was asked for.
        options: That were passed to `compile_bounded`.
        depot: Where it is kept.
    """
    key = _key(text, binary.entry, arch, binary.nvrtc, options)
    return depot.put(key, _encoded(binary))


def load_or_compile(
    text: str,
    entry: str,
    arch: str,
    *,
    depot: Depot,
    nvrtc: str | None = None,
    options: tuple[str, ...] = (),
) -> Binary | Rejected:
    """Find a binary on disk, else compile it, within a limit of time, and keep it.

    Args:
        text: CUDA C++.
        entry: Name of the kernel.
        arch: Architecture to compile for, such as "sm_90".
        nvrtc: Version whose binary goes first if there is one: that of a record. Then this machine's.
        options: As for `compile_bounded`.
        depot: Where it is kept.

    Raises:
        ToolchainError: NVRTC is needed and missing, or refuses the architecture; or the compiler is killed.
    """
    found = _found(text, entry, arch, nvrtc, options, depot)
    if found is not None:
        return found
    with _compiling:
        found = load(text, entry, arch, options=options, depot=depot)  # another thread may have been first
        if found is not None:
            return found
        binary = compile_bounded(text, entry, arch, options)
        if isinstance(binary, Binary):
            put(text, binary, arch, options=options, depot=depot)
        return binary


def load_or_compile_all(
    wanted: Mapping[K, tuple[str, str, str | None]],
    arch: str,
    *,
    depot: Depot,
    workers: int,
    timeout_s: float,
) -> Iterator[tuple[K, Binary | Rejected | MachineFault]]:
    """Find binaries on disk, else compile them side by side and keep them; yield each as soon as it is there.

    Args:
        wanted: Of each: text, entry, and the version of NVRTC whose binary goes first if there is one.
        arch: Architecture to compile for, such as "sm_90".
        depot: Where they are kept.
        workers: Processes at most.
        timeout_s: Limit of one compile, seconds.

    Raises:
        ToolchainError: NVRTC is needed and missing, or refuses the architecture.
        MachineError: No process can be started.
    """
    with CompilePool(workers, timeout_s) as pool:
        for key, (text, entry, nvrtc) in wanted.items():
            found = _found(text, entry, arch, nvrtc, (), depot)
            if found is None:
                pool.submit(key, text, entry, arch)
            else:
                yield key, found
        while pool.pending:
            binary: Binary | Rejected | MachineFault
            done: Any
            for done, binary in pool.collect(1.0):
                if isinstance(binary, Binary):
                    put(wanted[done][0], binary, arch, depot=depot)
                yield done, binary


def _found(
    text: str, entry: str, arch: str, nvrtc: str | None, options: tuple[str, ...], depot: Depot
) -> Binary | None:
    """Find the binary of a version of NVRTC, else that of this machine's."""
    if nvrtc is not None:
        found = load(text, entry, arch, nvrtc=nvrtc, options=options, depot=depot)
        if found is not None:
            return found
    return load(text, entry, arch, options=options, depot=depot)


def installed_version(depot: Depot) -> str:
    """Return the full version of this machine's NVRTC, without loading it where it was loaded before.

    Raises:
        ToolchainError: There is none.
    """
    if library.nvrtc.cache_info().currsize:
        return library.nvrtc_version()
    identity = library.nvrtc_identity()
    if identity is None:
        return library.nvrtc_version()
    key = "nvrtc-build." + hashlib.sha256(identity.encode()).hexdigest()
    known = depot.get(key)
    if known is not None:
        return known.decode()
    version = library.nvrtc_version()
    depot.put(key, version.encode())
    return version


def _key(text: str, entry: str, arch: str, version: str, options: tuple[str, ...]) -> str:
    code = text if _LINES in options else code_of(text)  # without comments lines have other numbers
    parts = (str(_FORMAT), entry, arch, version, *OPTIONS, *options, code)
    return depot_key("cubin", parts)


def _encoded(binary: Binary) -> bytes:
    """Write a binary: one line of JSON, the cubin, the PTX."""
    facts = {name: value for name, value in vars(binary).items() if name not in ("cubin", "ptx")}
    head = json.dumps({**facts, "cubin_bytes": len(binary.cubin)})
    return head.encode() + b"\n" + binary.cubin + binary.ptx.encode()


def _decoded(content: bytes) -> Binary:
    head, _, rest = content.partition(b"\n")
    facts = json.loads(head)
    size = facts.pop("cubin_bytes")
    options = tuple(facts.pop("options"))
    return Binary(cubin=rest[:size], ptx=rest[size:].decode(), options=options, **facts)
