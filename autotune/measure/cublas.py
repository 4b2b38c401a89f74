"""cuBLAS, where this machine has it, as a baseline that is called like a candidate.

The library is loaded by ctypes, because CuPy knows fewer places and fails later. It computes in FP32: default
math mode, with `gpu.worker.ENVIRONMENT` against TF32 and emulation. In TF32 it computes for a comparison of
kernels on tensor cores, in a process where nothing forbids it.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cupy.cuda import runtime

from autotune.measure.cuda import Gpu
from autotune.values.problem import Problem

WORKSPACE_BYTES = (
    32 << 20
)  # what cuBLAS takes by default on Hopper; given by us, it is not allocated in a capture
FP32_MATH, TF32_MATH = 0, 3  # cublasMath_t: CUBLAS_DEFAULT_MATH, CUBLAS_TF32_TENSOR_OP_MATH
OPERATIONS = {"n": 0, "t": 1}  # cublasOperation_t
_KERNEL_NODE = 0  # CUgraphNodeType
_FOLDERS = {13: "nvidia/cu13/lib", 12: "nvidia/cublas/lib"}  # of the wheels, by CUDA major


class CublasError(RuntimeError):
    """A call of cuBLAS failed."""


class Cublas:
    """A cuBLAS handle on the GPU's stream.

    Attributes:
        version: Such as "13.1.1"; None where the library does not tell.

    Args:
        gpu: Where to run.
        library: libcublas.
        mode: `FP32_MATH` or `TF32_MATH`.

    Raises:
        CublasError: The library refuses this GPU or driver.
        AttributeError: The library is not cuBLAS.
    """

    def __init__(self, gpu: Gpu, library: ctypes.CDLL, mode: int = FP32_MATH) -> None:
        self._library = library
        self._handle = ctypes.c_void_p()
        self._call("cublasCreate_v2", ctypes.byref(self._handle))
        self.version = library_version(library, "cublas")
        self._workspace = gpu.allocate(WORKSPACE_BYTES)
        self._call("cublasSetStream_v2", self._handle, ctypes.c_void_p(gpu.stream.ptr))
        self._call(
            "cublasSetWorkspace_v2",  # after the stream, which resets it
            self._handle,
            ctypes.c_void_p(self._workspace.ptr),
            ctypes.c_size_t(WORKSPACE_BYTES),
        )
        self._call("cublasSetMathMode", self._handle, ctypes.c_int(mode))

    @classmethod
    def open(cls, gpu: Gpu, mode: int = FP32_MATH) -> Cublas | None:
        """Load the first cuBLAS that works with this driver; None when there is none."""
        for path in library_candidates(runtime.driverGetVersion() // 1000):
            try:
                _preload(path.replace("libcublas", "libcublasLt"))
                return cls(gpu, ctypes.CDLL(path), mode)
            except (OSError, AttributeError, CublasError):
                continue
        return None

    def multiplication(self, problem: Problem) -> Callable[[float, int, int, float, int], None]:
        """Return a function that enqueues C = alpha op(A) op(B) + beta C for (alpha, A, B, beta, C).

        cuBLAS is column-major, where a row-major C is its transpose: C^T = op(B)^T op(A)^T. The stored
        matrices are transposed by the same view, so each is used plain or transposed as our layout says.
        """
        operations = [ctypes.c_int(OPERATIONS[letter]) for letter in reversed(problem.layout)]
        extents = [ctypes.c_int(extent) for extent in (problem.n, problem.m, problem.k)]
        stored_a, stored_b, stored_c = (
            [ctypes.c_int(lead), *([ctypes.c_longlong(apart)] if problem.batch > 1 else [])]
            for lead, apart in (
                (problem.lda, problem.stride_a),
                (problem.ldb, problem.stride_b),
                (problem.ldc, problem.stride_c),
            )
        )
        several = [ctypes.c_int(problem.batch)] if problem.batch > 1 else []
        name = "cublasSgemmStridedBatched" if several else "cublasSgemm_v2"

        def multiply(alpha: float, a: int, b: int, beta: float, c: int) -> None:
            factors = ctypes.c_float(alpha), ctypes.c_float(beta)
            self._call(
                name,
                self._handle,
                *operations,
                *extents,
                ctypes.byref(factors[0]),
                *(ctypes.c_void_p(b), *stored_b, ctypes.c_void_p(a), *stored_a),
                ctypes.byref(factors[1]),
                *(ctypes.c_void_p(c), *stored_c, *several),
            )

        return multiply

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise CublasError(f"{name} returned status {status}")


def library_version(library: ctypes.CDLL, prefix: str) -> str | None:
    """Read the version of a library, such as "13.1.1", by ``<prefix>GetProperty``; None if unknown."""
    parts = []
    for which in range(3):  # libraryPropertyType: major, minor, patch
        value = ctypes.c_int()
        try:
            status = getattr(library, f"{prefix}GetProperty")(ctypes.c_int(which), ctypes.byref(value))
        except AttributeError:
            return None
        if status:
            return None
        parts.append(str(value.value))
    return ".".join(parts)


def kernel_names(gpu: Gpu, enqueue: Callable[[], None]) -> str | None:
    """Return the kernels that a call launches, joined by " + "; None if the driver does not tell.

    The call is captured into a CUDA graph, not run, and the driver names the functions of its nodes.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        runtime.streamBeginCapture(gpu.stream.ptr, runtime.streamCaptureModeRelaxed)
        try:
            enqueue()
        finally:
            graph = runtime.streamEndCapture(gpu.stream.ptr)
        try:
            names = [plain_name(name) for name in _graph_kernels(driver, graph)]
        finally:
            runtime.graphDestroy(graph)
    except Exception:  # a name for people to read is never worth a failed run
        return None
    return " + ".join(names) or None


def plain_name(symbol: str) -> str:
    """Return the longest identifier of a mangled C++ name, which of a template is the kernel's own."""
    if not symbol.startswith("_Z"):
        return symbol
    identifiers, position = [], 0
    while match := re.compile(r"\d+").search(symbol, position):
        position = match.end()
        identifier = symbol[position : position + int(match[0])]
        if len(identifier) == int(match[0]) and re.fullmatch(r"[A-Za-z_]\w*", identifier):
            identifiers.append(identifier)
            position += len(identifier)
    return max(identifiers, key=len, default=symbol)


class _KernelNodeParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2 of cuda.h."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("parameters", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


def _graph_kernels(driver: ctypes.CDLL, graph: int) -> Iterator[str]:
    """Yield the function name of every kernel node, in the order of the driver's list."""

    def call(name: str, *arguments: Any) -> None:
        if status := getattr(driver, name)(*arguments):
            raise OSError(f"{name} returned {status}")

    count = ctypes.c_size_t()
    call("cuGraphGetNodes", ctypes.c_void_p(graph), None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    call("cuGraphGetNodes", ctypes.c_void_p(graph), nodes, ctypes.byref(count))
    for node in nodes:
        kind = ctypes.c_int()
        call("cuGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
        if kind.value != _KERNEL_NODE:
            continue
        params, name = _KernelNodeParams(), ctypes.c_char_p()
        call("cuGraphKernelNodeGetParams_v2", ctypes.c_void_p(node), ctypes.byref(params))
        if params.function:
            call("cuFuncGetName", ctypes.byref(name), ctypes.c_void_p(params.function))
        else:
            call("cuKernelGetName", ctypes.byref(name), ctypes.c_void_p(params.kernel))
        yield (name.value or b"").decode()


def library_candidates(driver_major: int) -> Iterator[str]:
    """Yield the libraries that the driver may serve, the newest first, wheels before the system."""
    toolkits = [os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    for major, folder in _FOLDERS.items():
        if major > driver_major:
            continue
        name = f"libcublas.so.{major}"
        for root in sys.path:
            if root:
                yield from (str(path) for path in [Path(root, folder, name)] if path.is_file())
        for toolkit in filter(None, toolkits):
            yield from (str(path) for path in [Path(toolkit, "lib64", name)] if path.is_file())
        yield name


def _preload(path: str) -> None:
    """Load a library that another one will ask for by its bare name; leave its absence to that other one."""
    try:
        ctypes.CDLL(path)
    except OSError:
        return
