"""cuBLASLt as a baseline: for one problem, every algorithm that its heuristics propose.

cuBLAS picks one kernel; cuBLASLt lists those it thinks of, its own choice first, and runs any of them: the
best is the harder baseline. Constants and structs are those of cublasLt.h and cublas_api.h of CUDA 12 and 13.
"""

from __future__ import annotations

import ctypes
from typing import Any

from cupy.cuda import runtime

from autotune.measure.cublas import OPERATIONS, CublasError, library_candidates, library_version
from autotune.measure.cuda import Gpu
from autotune.values.problem import Problem

WORKSPACE_BYTES = 64 << 20
ALGORITHMS = 64  # asked for; the heuristics list fewer
_COMPUTE_32F = 68  # cublasComputeType_t: FP32 proper, no TF32
_R_32F = 0  # cudaDataType
_TRANSPOSE_A, _TRANSPOSE_B = 3, 4  # cublasLtMatmulDescAttributes_t
_MAX_WORKSPACE_BYTES = 1  # cublasLtMatmulPreferenceAttributes_t
_BATCH_COUNT, _BATCH_OFFSET = 5, 6  # cublasLtMatrixLayoutAttribute_t


Description = tuple[ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
"""What to compute: the operation, and the layouts of B, A and C."""


class Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t: 64 bytes that only the library reads."""

    _fields_ = (("data", ctypes.c_uint64 * 8),)


class Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: one algorithm of the list."""

    _fields_ = (
        ("algorithm", Algorithm),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class CublasLt:
    """A cuBLASLt handle with a workspace, on the GPU's stream.

    Attributes:
        version: Such as "13.1.1"; None where the library does not tell.

    Args:
        gpu: Where to run.
        library: libcublasLt.

    Raises:
        CublasError: The library refuses this GPU or driver.
        AttributeError: The library is not cuBLASLt.
    """

    def __init__(self, gpu: Gpu, library: ctypes.CDLL) -> None:
        self._library = library
        self._stream = ctypes.c_void_p(gpu.stream.ptr)
        self._handle = self._created("cublasLtCreate")
        self._memory = gpu.allocate(WORKSPACE_BYTES)
        self.version = library_version(library, "cublasLt")

    @classmethod
    def open(cls, gpu: Gpu) -> CublasLt | None:
        """Load the first cuBLASLt that works with this driver; None when there is none."""
        for path in library_candidates(runtime.driverGetVersion() // 1000):
            try:
                return cls(gpu, ctypes.CDLL(path.replace("libcublas", "libcublasLt")))
            except (OSError, AttributeError, CublasError):
                continue
        return None

    def multiplications(self, problem: Problem) -> list[LtMultiplication]:
        """List what the heuristics propose for a problem, their own choice first; empty when they refuse.

        A row-major C is computed as its transpose, as in `measure.cublas`: C^T = op(B)^T op(A)^T. The
        descriptors are small and live as long as the process.
        """
        try:
            description = self._described(problem)
            preference = self._created("cublasLtMatmulPreferenceCreate")
            self._set("MatmulPreference", preference, _MAX_WORKSPACE_BYTES, ctypes.c_uint64(WORKSPACE_BYTES))
            found, count = (Heuristic * ALGORITHMS)(), ctypes.c_int()
            self.call(
                "cublasLtMatmulAlgoGetHeuristic",
                self._handle,
                *description,
                description[-1],  # D is C
                preference,
                ctypes.c_int(ALGORITHMS),
                found,
                ctypes.byref(count),
            )
        except CublasError:
            return []
        usable = [each for each in found[: count.value] if each.state == 0]
        return [LtMultiplication(self, description, each.algorithm) for each in usable]

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the library.

        Raises:
            CublasError: It returned a status other than success.
        """
        status = getattr(self._library, name)(*arguments)
        if status:
            raise CublasError(f"{name} returned status {status}")

    def enqueue(
        self,
        description: Description,
        algorithm: Algorithm,
        alpha: float,
        a: int,
        b: int,
        beta: float,
        c: int,
    ) -> None:
        """Enqueue C = alpha op(A) op(B) + beta C by one algorithm, the matrices as addresses."""
        operation, first, second, result = description
        factors = ctypes.c_float(alpha), ctypes.c_float(beta)
        out = ctypes.c_void_p(c), result
        self.call(
            "cublasLtMatmul",
            *(self._handle, operation),
            *(ctypes.byref(factors[0]), ctypes.c_void_p(b), first, ctypes.c_void_p(a), second),
            *(ctypes.byref(factors[1]), *out, *out),
            ctypes.byref(algorithm),
            *(ctypes.c_void_p(self._memory.ptr), ctypes.c_size_t(WORKSPACE_BYTES), self._stream),
        )

    def _described(self, problem: Problem) -> Description:
        """Describe the operation and the layouts of B, A and C, as column-major matrices."""
        operation = self._created(
            "cublasLtMatmulDescCreate", ctypes.c_int(_COMPUTE_32F), ctypes.c_int(_R_32F)
        )
        for attribute, letter in zip((_TRANSPOSE_A, _TRANSPOSE_B), reversed(problem.layout), strict=True):
            self._set("MatmulDesc", operation, attribute, ctypes.c_int32(OPERATIONS[letter]))
        stored = (
            (problem.b_shape, problem.ldb, problem.stride_b),
            (problem.a_shape, problem.lda, problem.stride_a),
            (problem.c_shape, problem.ldc, problem.stride_c),
        )
        layouts = []
        for (rows, cols), lead, apart in stored:
            layout = self._created(
                "cublasLtMatrixLayoutCreate",
                ctypes.c_int(_R_32F),
                ctypes.c_uint64(cols),  # a row here is a column there
                ctypes.c_uint64(rows),
                ctypes.c_int64(lead),
            )
            if problem.batch > 1:
                self._set("MatrixLayout", layout, _BATCH_COUNT, ctypes.c_int32(problem.batch))
                self._set("MatrixLayout", layout, _BATCH_OFFSET, ctypes.c_int64(apart))
            layouts.append(layout)
        first, second, result = layouts
        return operation, first, second, result

    def _created(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        self.call(name, ctypes.byref(made), *arguments)
        return made

    def _set(self, kind: str, target: ctypes.c_void_p, attribute: int, value: Any) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        name = f"cublasLt{kind}SetAttribute"
        self.call(name, target, ctypes.c_int(attribute), ctypes.byref(value), size)


class LtMultiplication:
    """One algorithm of cuBLASLt for one problem: ``C = alpha op(A) op(B) + beta C`` on addresses."""

    def __init__(self, library: CublasLt, description: Description, algorithm: Algorithm) -> None:
        self._library = library
        self._description = description
        self._algorithm = algorithm

    def __call__(self, alpha: float, a: int, b: int, beta: float, c: int) -> None:
        """Enqueue one call.

        Raises:
            CublasError: The algorithm does not take this problem after all.
        """
        self._library.enqueue(self._description, self._algorithm, alpha, a, b, beta, c)
