"""cuBLASLt over host memory: the library is a class with its C functions, which computes column-major."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
from host_gpu import HostGpu

pytest.importorskip("cupy")
from autotune.measure import cublaslt
from autotune.measure.cublas import CublasError
from autotune.measure.cublaslt import WORKSPACE_BYTES, Algorithm, CublasLt, Heuristic
from autotune.values.problem import LAYOUTS, Problem

# ruff: noqa: N802 -- names of the library


class Library:
    """The part of libcublasLt that is used, on the memory of a `HostGpu`."""

    def __init__(self, gpu, states=(0, 15, 0)):
        self.gpu = gpu
        self.states = states
        self.objects = {}
        self.ran = []

    def _make(self, out, **facts):
        out._obj.value = len(self.objects) + 1
        self.objects[out._obj.value] = facts
        return 0

    def cublasLtCreate(self, out):
        return self._make(out)

    def cublasLtGetProperty(self, which, value):
        value._obj.value = (13, 1, 1)[which.value]
        return 0

    def cublasLtMatmulDescCreate(self, out, compute, scale):
        assert (compute.value, scale.value) == (68, 0)  # CUBLAS_COMPUTE_32F, CUDA_R_32F
        return self._make(out, transposed={3: 0, 4: 0})  # CUBLASLT_MATMUL_DESC_TRANSA, _TRANSB

    def cublasLtMatmulDescSetAttribute(self, desc, attribute, value, size):
        assert size.value == 4
        self.objects[desc.value]["transposed"][attribute.value] = value._obj.value
        return 0

    def cublasLtMatrixLayoutCreate(self, out, kind, rows, cols, stride):
        assert kind.value == 0
        return self._make(out, rows=rows.value, cols=cols.value, stride=stride.value, batch={5: 1, 6: 0})

    def cublasLtMatrixLayoutSetAttribute(self, layout, attribute, value, size):
        assert size.value == {5: 4, 6: 8}[attribute.value]  # _BATCH_COUNT, _STRIDED_BATCH_OFFSET
        self.objects[layout.value]["batch"][attribute.value] = value._obj.value
        return 0

    def cublasLtMatmulPreferenceCreate(self, out):
        return self._make(out)

    def cublasLtMatmulPreferenceSetAttribute(self, preference, attribute, value, size):
        assert (attribute.value, value._obj.value, size.value) == (1, WORKSPACE_BYTES, 8)
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, handle, desc, a, b, c, d, preference, asked, found, count):
        assert c.value == d.value
        assert asked.value >= len(self.states)
        for index, state in enumerate(self.states):
            found[index].state, found[index].algorithm.data[0] = state, 100 + index
        count._obj.value = len(self.states)
        return 0

    def cublasLtMatmul(self, handle, desc, alpha, A, a, B, b, beta, C, c, D, d, algo, work, size, stream):
        assert (C.value, c.value) == (D.value, d.value)
        assert (len(self.gpu.view(work.value, np.uint8)), size.value) == (WORKSPACE_BYTES, WORKSPACE_BYTES)
        assert stream.value == self.gpu.stream.ptr
        if algo._obj.data[0] == 102:
            return 15  # CUBLAS_STATUS_NOT_SUPPORTED
        self.ran.append(algo._obj.data[0])
        transposed = self.objects[desc.value]["transposed"]
        left, right = self._matrix(A, a), self._matrix(B, b)
        left = left.swapaxes(1, 2) if transposed[3] else left
        right = right.swapaxes(1, 2) if transposed[4] else right
        out = self._matrix(C, c)
        product = np.float32(alpha._obj.value) * (left @ right)
        out[:] = product + (np.float32(beta._obj.value) * out if beta._obj.value else 0)
        return 0

    def _matrix(self, address, layout):
        facts = self.objects[layout.value]
        rows, cols, stride = facts["rows"], facts["cols"], facts["stride"]
        memory = self.gpu.view(address.value, np.float32)
        count, apart = facts["batch"][5], facts["batch"][6]
        return np.lib.stride_tricks.as_strided(memory, (count, rows, cols), (4 * apart, 4, 4 * stride))


@pytest.fixture
def gpu():
    made = HostGpu()
    made.stream = SimpleNamespace(ptr=77)
    return made


def test_structs_have_the_size_that_the_library_writes():
    assert ctypes.sizeof(Algorithm) == 64
    assert ctypes.sizeof(Heuristic) == 96
    assert (Heuristic.workspace_bytes.offset, Heuristic.state.offset, Heuristic.waves.offset) == (64, 72, 76)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("beta", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_major_product_comes_out_of_a_column_major_library(gpu, layout, beta, batch):
    problem = Problem(5, 7, 3, layout, beta, batch=batch)
    random = np.random.default_rng(1)
    a, b, c = (random.standard_normal(shape).astype(np.float32) for shape in problem.arrays)
    op_a, op_b = (
        m if letter == "n" else m.swapaxes(-1, -2) for m, letter in zip((a, b), layout, strict=True)
    )
    addresses = [gpu.array(matrix) for matrix in (a, b, c)]
    first, _ = CublasLt(gpu, Library(gpu)).multiplications(problem)
    first(1.5, addresses[0], addresses[1], -0.5 * beta, addresses[2])
    found = gpu.view(addresses[2], np.float32, c.size).reshape(c.shape)
    np.testing.assert_allclose(found, 1.5 * op_a @ op_b - 0.5 * beta * c, rtol=1e-5, atol=1e-6)


def test_only_usable_algorithms_are_listed_and_each_runs_itself(gpu):
    library = Library(gpu, states=(0, 15, 0, 0))
    problem = Problem(2, 2, 2)
    address = gpu.array(np.zeros(4, np.float32))
    listed = CublasLt(gpu, library).multiplications(problem)
    assert len(listed) == 3
    listed[0](1.0, address, address, 0.0, address)
    with pytest.raises(CublasError, match="cublasLtMatmul returned status 15"):
        listed[1](1.0, address, address, 0.0, address)
    listed[2](1.0, address, address, 0.0, address)
    assert library.ran == [100, 103]


def test_a_problem_that_the_heuristics_refuse_has_no_algorithm(gpu):
    library = Library(gpu)
    library.cublasLtMatmulAlgoGetHeuristic = lambda *arguments: 15
    assert CublasLt(gpu, library).multiplications(Problem(2, 2, 2)) == []


def test_no_library_is_no_baseline(gpu, monkeypatch):
    monkeypatch.setattr(cublaslt, "library_candidates", lambda major: ["libcublas-that-is-not-there.so"])
    monkeypatch.setattr(cublaslt.runtime, "driverGetVersion", lambda: 13000, raising=False)
    assert CublasLt.open(gpu) is None


def test_a_library_that_refuses_the_gpu_is_no_baseline(gpu, monkeypatch):
    library = Library(gpu)
    library.cublasLtCreate = lambda out: 1
    monkeypatch.setattr(cublaslt, "library_candidates", lambda major: ["libcublas.so.13"])
    monkeypatch.setattr(cublaslt.ctypes, "CDLL", lambda path: library)
    assert CublasLt.open(gpu) is None
