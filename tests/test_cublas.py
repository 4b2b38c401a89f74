from __future__ import annotations

import ctypes
import sys

import pytest

pytest.importorskip("cupy")
from autotune.measure.cublas import _KernelNodeParams, library_candidates, library_version, plain_name


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


def test_the_version_is_read_from_the_library():
    assert library_version(Library(), "cublas") == "13.1.1"


def test_a_library_that_does_not_tell_its_version_has_none():
    silent = Library()
    silent.status = 7
    assert library_version(silent, "cublas") is None
    assert library_version(object(), "cublas") is None
