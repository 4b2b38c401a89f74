"""NVRTC, NVIDIA's run-time compiler: where it is looked for, how it is loaded, and its C interface."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from autotune.errors import ToolchainError
from autotune.values.lazy import cached_property

_LIBRARY = "libnvrtc.so"
_WHEEL_FOLDERS = ("nvidia/cu[0-9]*/lib", "nvidia/cuda_nvrtc/lib")  # CUDA 13 and later; CUDA 12
_SYSTEM_MAJORS = (13, 12)
_BUILD = re.compile(r"^// Cuda compilation tools, release [\d.]+, V(\d+(?:\.\d+)+)", re.MULTILINE)  # in PTX
_REMEDY = "pip install nvidia-cuda-nvrtc, or set AUTOTUNE_NVRTC to the path of a libnvrtc.so"


class Nvrtc:
    """A loaded NVRTC library.

    Attributes:
        path: What was loaded: a file, or the name the system's loader resolved.
        version: (major, minor), all that the library's own function tells.
        supported_archs: Such as ("sm_75", ..., "sm_121"), ascending.

    Raises:
        OSError: It cannot be loaded.
        AttributeError: It is not NVRTC, or older than 11.2.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        # NVRTC asks for its builtins by bare name, which the loader knows once they are loaded.
        for builtins in sorted(Path(path).parent.glob("libnvrtc-builtins.so.*")):
            with contextlib.suppress(OSError):  # NVRTC says so if it misses its own
                ctypes.CDLL(str(builtins))
        self._library = library = ctypes.CDLL(path)
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor, count = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        library.nvrtcGetNumSupportedArchs(ctypes.byref(count))
        numbers = (ctypes.c_int * count.value)()
        library.nvrtcGetSupportedArchs(numbers)
        self.version = (major.value, minor.value)
        self.supported_archs = tuple(f"sm_{number}" for number in sorted(numbers))

    def resolve(self, arch: str) -> str:
        """Return ``arch``, or for a minor newer than the library the highest it knows of that major.

        Machine code runs on a later minor of its major, so "sm_123" may become "sm_121".

        Raises:
            ToolchainError: The library has nothing for this architecture.
        """
        known = [int(name[3:]) for name in self.supported_archs]
        match = re.fullmatch(r"sm_(\d+)([af]?)", arch)
        if match and int(match[1]) in known:
            return arch
        if match and not match[2]:
            wanted = int(match[1])
            older = [number for number in known if number // 10 == wanted // 10 and number < wanted]
            if older:
                return f"sm_{max(older)}"
        raise ToolchainError(
            f"NVRTC {self.version[0]}.{self.version[1]} cannot compile for {arch}: it supports "
            f"{', '.join(self.supported_archs)}. Install another release of nvidia-cuda-nvrtc, "
            f"or set AUTOTUNE_NVRTC (loaded: {self.path})"
        )

    @cached_property
    def build(self) -> str:
        """The full version, such as "13.0.88", by which two releases of one minor version are told apart.

        Only the header of the PTX that it makes says it, so an empty text is compiled: 50 ms, once.
        """
        arch = f"--gpu-architecture=compute_{self.supported_archs[0].removeprefix('sm_')}"
        for options in ((arch, "--minimal"), (arch,)):  # without the headers that an empty text does not need
            code, _, ptx = self._ptx("", options)
            if not code:
                return self.build_of(ptx)
        return self.build_of("")

    def build_of(self, ptx: str) -> str:
        """Return the full version as PTX of this library states it; major and minor where it does not."""
        short = "{}.{}".format(*self.version)
        stated = _BUILD.search(ptx[:1000])
        return stated[1] if stated and same_build(short, stated[1]) else short

    def compile(
        self, text: str, options: tuple[str, ...], kernel: str = ""
    ) -> tuple[int, str, bytes, str, str]:
        """Compile once.

        Args:
            text: CUDA C++.
            options: Of NVRTC.
            kernel: C++ expression for a kernel's address, such as "&sgemm<64, 8>", which is instantiated.

        Returns:
            (nvrtcResult, log, cubin, PTX, name of the kernel in them); the last three are empty on failure.
        """
        code, log, (cubin, ptx, name) = self._compiled(text, options, "CUBIN", "PTX", kernel=kernel)
        log = re.sub(r"(?m)^ptxas info\s*: Compile time = .*\n", "", log)
        return code, log, cubin, ptx.rstrip(b"\0").decode(), name.decode()

    def _ptx(self, text: str, options: tuple[str, ...]) -> tuple[int, str, str]:
        """Compile to PTX alone: (nvrtcResult, log, PTX)."""
        code, log, (ptx,) = self._compiled(text, options, "PTX")
        return code, log, ptx.rstrip(b"\0").decode()

    def _compiled(
        self, text: str, options: tuple[str, ...], *wanted: str, kernel: str | None = None
    ) -> tuple[int, str, list[bytes]]:
        nvrtc, program = self._library, ctypes.c_void_p()

        def read(what: str) -> bytes:
            size = ctypes.c_size_t()
            self._check(getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
            buffer = ctypes.create_string_buffer(size.value)
            self._check(getattr(nvrtc, f"nvrtcGet{what}")(program, buffer))
            return buffer.raw

        self._check(
            nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None)
        )
        try:
            if kernel:
                self._check(nvrtc.nvrtcAddNameExpression(program, kernel.encode()))
            arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            code = int(nvrtc.nvrtcCompileProgram(program, len(options), arguments))
            said = read("ProgramLog").replace(b"\0", b"")  # one precedes ptxas's errors
            made = [b"" if code else read(what) for what in wanted]
            if kernel is not None:
                name = ctypes.c_char_p()
                if kernel and not code:
                    found = nvrtc.nvrtcGetLoweredName(program, kernel.encode(), ctypes.byref(name))
                    self._check(found)
                made.append(name.value or b"")
            return code, said.decode(errors="replace"), made
        finally:
            nvrtc.nvrtcDestroyProgram(ctypes.byref(program))

    def error_name(self, code: int) -> str:
        """Return the name of an nvrtcResult, such as "NVRTC_ERROR_COMPILATION"."""
        return str(self._library.nvrtcGetErrorString(code).decode())

    def _check(self, code: int) -> None:
        if code:
            raise ToolchainError(f"NVRTC reports {self.error_name(code)}; loaded from {self.path}")


@functools.cache
def nvrtc() -> Nvrtc:
    """Load NVRTC: ``AUTOTUNE_NVRTC``, the wheel of the driver's CUDA major version, any wheel, the system.

    Raises:
        ToolchainError: None can be loaded.
    """
    chosen = os.environ.get("AUTOTUNE_NVRTC")
    tried = []
    for path in [chosen] if chosen else _libraries(_driver_major()):
        try:
            return Nvrtc(path)
        except (OSError, AttributeError) as error:
            tried.append(f"{path} ({error})" if os.path.exists(path) else path)
    source = "AUTOTUNE_NVRTC" if chosen else "no wheel on sys.path, system"
    raise ToolchainError(f"NVRTC cannot be loaded; tried {source}: {', '.join(tried)}. {_REMEDY}")


def nvrtc_version() -> str:
    """Return the full version of the loaded NVRTC, such as "13.0.88"."""
    return nvrtc().build


def same_build(stated: str, build: str) -> bool:
    """Return whether a stated version may be this build: "13.0", as older records say, may be any of 13.0."""
    return build == stated or build.startswith(f"{stated}.")


def nvrtc_identity() -> str | None:
    """Return the files that `nvrtc` would choose from, with their sizes and times, without loading one.

    Returns:
        The same text as long as the same library would be loaded; None where only the system's loader knows.
    """
    chosen = os.environ.get("AUTOTUNE_NVRTC")
    first, *others = [chosen] if chosen else _libraries(_driver_major())
    if not os.path.isfile(first):
        return None
    found = [(path, os.stat(path)) for path in (first, *others) if os.path.isfile(path)]
    return "\n".join(f"{path} {facts.st_size} {facts.st_mtime_ns}" for path, facts in found)


def _libraries(driver: int | None) -> Iterator[str]:
    """Yield the places of NVRTC; within wheels and system the driver's major first, then the newest."""

    def preference(major: int) -> tuple[bool, int]:
        return (major != driver, -major)

    wheels = [
        file
        for entry in sys.path
        for folder in _WHEEL_FOLDERS
        for file in Path(entry or ".").glob(f"{folder}/{_LIBRARY}.[0-9]*")
    ]
    yield from map(str, sorted(wheels, key=lambda file: preference(int(file.name.split(".")[2]))))
    for major in sorted(_SYSTEM_MAJORS, key=preference):
        yield f"{_LIBRARY}.{major}"
        yield from map(str, Path("/usr/local").glob(f"cuda*/lib64/{_LIBRARY}.{major}"))
    yield _LIBRARY


def _driver_major() -> int | None:
    """Return the driver's CUDA major version, None without a driver; needs no GPU and creates no context."""
    version = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)):
            return None
    except (OSError, AttributeError):
        return None
    return version.value // 1000
