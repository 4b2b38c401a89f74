from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from host_gpu import HostGpu

pytest.importorskip("cupy")
from autotune.measure.cublas import (
    Cublas,
    _KernelNodeParams,
    library_candidates,
    library_version,
    plain_name,
)
from autotune.values.problem import LAYOUTS, Problem


@pytest.mark.parametrize(
    ("symbol", "name"),
    [
        ("sm80_xmma_gemm_f32f32_nn_n_tilesize64x128x8", "sm80_xmma_gemm_f32f32_nn_n_tilesize64x128x8"),
        (
            "_ZN7cutlass7Kernel2I32cutlass_80_simt_sgemm_128x64_8x5EEvNT_6ParamsE",
            "cutlass_80_simt_sgemm_128x64_8x5",
        ),
        ("_ZN8cublasLt19splitKreduce_kernelILi32ELi16EiffffLb1ELb1ELb0EEEvv", "splitKreduce_kernel"),
        ("_Z5plainPf", "plain"),
    ],
)
def test_mangled_names_are_reduced_to_the_kernels_own(symbol, name):
    assert plain_name(symbol) == name


def test_wheels_come_before_the_system_and_newer_majors_first(tmp_path, monkeypatch):
    wheel = tmp_path / "nvidia/cublas/lib/libcublas.so.12"
    wheel.parent.mkdir(parents=True)
    wheel.touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "none"))
    found = list(library_candidates(13))
    assert found.index("libcublas.so.13") < found.index(str(wheel)) < found.index("libcublas.so.12")


def test_a_library_newer_than_the_driver_is_not_tried():
    assert not [path for path in library_candidates(12) if path.endswith(".13")]


def test_kernel_node_params_have_the_layout_of_cuda_h():
    assert ctypes.sizeof(_KernelNodeParams) == 72
    assert _KernelNodeParams.parameters.offset == 40
    assert _KernelNodeParams.kernel.offset == 56


class Library:
    """A library of version 13.1.1, whose functions have the C names and return a status."""

    status = 0

    def cublasGetProperty(self, which, value):  # noqa: N802
        value._obj.value = (13, 1, 1)[which.value]
        return self.status


class Gemm(Library):
    """A cuBLAS whose products are computed by NumPy, column-major as its own."""

    def __init__(self, gpu):
        self.gpu = gpu

    def cublasCreate_v2(self, handle):  # noqa: N802
        return 0

    cublasSetStream_v2 = cublasSetWorkspace_v2 = cublasSetMathMode = lambda self, *words: 0  # noqa: N815

    def cublasSgemm_v2(self, handle, ta, tb, m, n, k, alpha, A, lda, B, ldb, beta, C, ldc):  # noqa: N802
        none = ctypes.c_longlong(0)
        words = (handle, ta, tb, m, n, k, alpha, A, lda, none, B, ldb, none, beta, C, ldc, none)
        return self.cublasSgemmStridedBatched(*words, ctypes.c_int(1))

    def cublasSgemmStridedBatched(  # noqa: N802
        self, handle, ta, tb, m, n, k, alpha, A, lda, a, B, ldb, b, beta, C, ldc, c, batch
    ):
        def matrices(address, rows, cols, lead, apart):
            memory, shape = self.gpu.view(address.value, np.float32), (batch.value, rows.value, cols.value)
            return np.lib.stride_tricks.as_strided(memory, shape, (4 * apart.value, 4, 4 * lead.value))

        left = matrices(A, *((k, m) if ta.value else (m, k)), lda, a)
        right = matrices(B, *((n, k) if tb.value else (k, n)), ldb, b)
        out = matrices(C, m, n, ldc, c)
        left, right = (x.swapaxes(1, 2) if t.value else x for x, t in ((left, ta), (right, tb)))
        out[:] = alpha._obj.value * (left @ right) + beta._obj.value * out
        return 0


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_major_product_comes_out_of_a_column_major_library(layout, batch):
    gpu, problem = HostGpu(), Problem(5, 7, 3, layout, 1, batch=batch)
    gpu.stream = SimpleNamespace(ptr=77)
    a, b, c = (np.random.default_rng(1).standard_normal(shape).astype(np.float32) for shape in problem.arrays)
    op_a, op_b = (
        m if letter == "n" else m.swapaxes(-1, -2) for m, letter in zip((a, b), layout, strict=True)
    )
    addresses = [gpu.array(matrix) for matrix in (a, b, c)]
    Cublas(gpu, Gemm(gpu)).multiplication(problem)(1.5, addresses[0], addresses[1], -0.5, addresses[2])
    found = gpu.view(addresses[2], np.float32, c.size).reshape(c.shape)
    np.testing.assert_allclose(found, 1.5 * op_a @ op_b - 0.5 * c, rtol=1e-5, atol=1e-6)


def test_the_version_is_read_from_the_library():
    assert library_version(Library(), "cublas") == "13.1.1"


def test_a_library_that_does_not_tell_its_version_has_none():
    silent = Library()
    silent.status = 7
    assert library_version(silent, "cublas") is None
    assert library_version(object(), "cublas") is None
