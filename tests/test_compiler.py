from __future__ import annotations

import re
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

from autotune.code import compiler
from autotune.code.compiler import Binary, compile_text
from autotune.code.nvrtc import _libraries, nvrtc, nvrtc_version, same_build
from autotune.errors import Rejected, ToolchainError

SCALE = """
extern "C" __global__ void scale(const float* x, float* y) {
    __shared__ float tile[64];
    tile[threadIdx.x] = 2.0f * x[threadIdx.x];
    __syncthreads();
    y[threadIdx.x] = tile[63 - threadIdx.x];
}
"""

SEVERAL = """
__device__ __noinline__ float twice(float x) { return x + x; }
extern "C" __global__ void scale2(float* y) { y[threadIdx.x] = twice(y[threadIdx.x]); }
extern "C" __global__ void scale(float* y) { __shared__ float tile[32]; tile[threadIdx.x] = y[0];
    __syncthreads(); y[threadIdx.x] = twice(tile[31 - threadIdx.x]); }
extern "C" __global__ void scale3(float* y) { y[0] = 1.0f; }
"""

SPILLING = """
extern "C" __global__ void __launch_bounds__(1024, 2) spill(const float* a, const float* b, float* c) {
    float acc[64] = {};
    for (int k = 0; k < 1024; ++k)
        #pragma unroll
        for (int i = 0; i < 64; ++i) acc[i] += a[k * 64 + i] * b[k * 1024 + threadIdx.x];
    for (int i = 0; i < 64; ++i) c[i * 1024 + threadIdx.x] = acc[i];
}
"""

# 4096 accumulators, fully unrolled: about a minute of compiling.
ENDLESS = """
extern "C" __global__ void endless(const float* a, const float* b, float* c) {
    float acc[64][64] = {};
    for (int k = 0; k < 64; ++k)
        #pragma unroll
        for (int i = 0; i < 64; ++i)
            #pragma unroll
            for (int j = 0; j < 64; ++j) acc[i][j] += a[k * 64 + i] * b[k * 64 + j + threadIdx.x];
    #pragma unroll
    for (int i = 0; i < 64; ++i)
        #pragma unroll
        for (int j = 0; j < 64; ++j) c[(i * 64 + j) * 256 + threadIdx.x] = acc[i][j];
}
"""


def compiled(text: str, entry: str, arch: str = "sm_90") -> Binary:
    outcome = compile_text(text, entry, arch)
    assert isinstance(outcome, Binary)
    return outcome


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_one_compile_gives_cubin_ptx_and_resources(arch: str) -> None:
    binary = compiled(SCALE, "scale", arch)
    assert binary.cubin.startswith(b"\x7fELF")
    assert f".target {arch}" in binary.ptx
    assert ".entry scale(" in binary.ptx
    assert not binary.ptx.endswith("\0")
    assert (binary.arch, binary.entry, binary.nvrtc) == (arch, "scale", nvrtc_version())
    assert f"--gpu-architecture={arch}" in binary.options
    assert 4 <= binary.registers <= 32
    assert (binary.shared_bytes, binary.spill_bytes, binary.stack_bytes) == (256, 0, 0)
    assert len(binary.digest) == 64


def test_same_input_gives_an_equal_binary() -> None:
    first, second = compiled(SCALE, "scale"), compiled(SCALE, "scale")
    assert first == second
    assert first.digest == second.digest
    assert compiled(SCALE.replace("2.0f", "3.0f"), "scale").digest != first.digest


def test_resources_are_those_of_the_entry() -> None:
    shared = {entry: compiled(SEVERAL, entry).shared_bytes for entry in ("scale", "scale2", "scale3")}
    assert shared == {"scale": 128, "scale2": 0, "scale3": 0}


def test_spills_are_counted() -> None:
    binary = compiled(SPILLING, "spill")
    assert binary.registers <= 32
    assert binary.spill_bytes >= 256
    assert binary.stack_bytes >= 128


def test_log_parser_keeps_functions_apart() -> None:
    # Both orders in which ptxas prints functions that were not inlined.
    log = """
ptxas info    : Compiling entry function 'ka' for 'sm_90'
ptxas info    : Function properties for ka
ptxas         .     8 bytes stack frame, 16 bytes spill stores, 32 bytes spill loads
ptxas info    : Function properties for _Z5twicef
ptxas         .     1 bytes stack frame, 2 bytes spill stores, 3 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 8 bytes cumulative stack size, 512 bytes smem
ptxas info    : Compiling entry function 'ka2' for 'sm_90'
ptxas info    : Function properties for ka2
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers
ptxas info    : Function properties for _Z6thricef
ptxas         .     1 bytes stack frame, 2 bytes spill stores, 3 bytes spill loads
"""
    assert compiler._resources(log, "ka") == (40, 48, 8, 512)
    assert compiler._resources(log, "ka2") == (8, 0, 0, 0)
    assert compiler._resources(log, "k") is None
    assert compiler._resources(log, "_Z5twicef") is None


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("int x = y; zz(1);", 'kernel.cu(1): error: identifier "y" is undefined (2 errors)'),
        ('int error = 1; asm("foo.bar;");', "ptxas application ptx input, line"),
        ("\n#error " + "x" * 5000, "error: #error directive: xxx"),
        ('static_assert(1 > 2, "BM must divide");', 'error: static assertion failed with "BM must divide"'),
        (
            "__shared__ float s[65536]; s[threadIdx.x] = a[0]; __syncthreads(); a[0] = s[9];",
            "ptxas error   : Entry function 'k' uses too much shared data (0x40000 bytes, 0xc000 max)",
        ),
    ],
)
def test_failing_compile_is_a_value_in_one_line(body: str, why: str) -> None:
    outcome = compile_text(f'extern "C" __global__ void k(float* a) {{ {body} }}', "k", "sm_90")
    assert isinstance(outcome, Rejected)
    assert outcome.kind == "compile"
    assert why in outcome.why
    assert outcome.why.isprintable()
    assert len(outcome.why) < 350


def test_what_is_no_candidates_fault_raises() -> None:
    with pytest.raises(ToolchainError, match=r"no kernel other \(it has scale\)"):
        compile_text(SCALE, "other", "sm_90")
    with pytest.raises(ToolchainError, match="--no-such-option"):
        compile_text(SCALE, "scale", "sm_90", ("--no-such-option",))


def test_architectures() -> None:
    library = nvrtc()
    assert {"sm_80", "sm_90", "sm_120"} <= set(library.supported_archs)
    assert library.resolve("sm_90a") == "sm_90a"
    highest = max(int(name[3:]) for name in library.supported_archs)
    assert library.resolve(f"sm_{highest // 10}9") == f"sm_{highest}"
    assert compiled(SCALE, "scale", f"sm_{highest // 10}9").arch == f"sm_{highest}"
    for unknown in ("sm_35", "sm_999", "sm_129a", "90"):
        with pytest.raises(ToolchainError, match=f"for {unknown}: it supports .*sm_90"):
            library.resolve(unknown)


def test_lookup(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    load = nvrtc.__wrapped__
    monkeypatch.setenv("AUTOTUNE_NVRTC", nvrtc().path)
    assert load().version == nvrtc().version
    for wrong in (tmp_path / "absent.so", Path(__file__)):
        monkeypatch.setenv("AUTOTUNE_NVRTC", str(wrong))
        with pytest.raises(
            ToolchainError, match=rf"AUTOTUNE_NVRTC: {wrong}.*pip install nvidia-cuda-nvrtc"
        ) as caught:
            load()
        assert "\n" not in str(caught.value)


def test_lookup_prefers_the_drivers_major(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    twelve = tmp_path / "nvidia/cuda_nvrtc/lib/libnvrtc.so.12"
    thirteen = tmp_path / "nvidia/cu13/lib/libnvrtc.so.13"
    for file in (twelve, thirteen):
        file.parent.mkdir(parents=True)
        file.touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert list(_libraries(None))[:3] == [str(thirteen), str(twelve), "libnvrtc.so.13"]
    assert list(_libraries(12))[:3] == [str(twelve), str(thirteen), "libnvrtc.so.12"]


# -- the full version ----------------------------------------------------------------------------------------


def test_the_full_build_identifies_nvrtc() -> None:
    short = "{}.{}".format(*nvrtc().version)
    assert re.fullmatch(rf"{re.escape(short)}\.\d+", nvrtc_version())
    assert compiled(SCALE, "scale").nvrtc == nvrtc_version()
    if "site-packages/nvidia" in nvrtc().path:
        wheels = [f"nvidia-cuda-nvrtc{suffix}" for suffix in ("", "-cu12")]
        found = [dist.version for dist in distributions() if dist.metadata["Name"] in wheels]
        assert nvrtc_version() in found


def test_a_header_that_says_no_build_leaves_major_and_minor() -> None:
    library = nvrtc()
    short = "{}.{}".format(*library.version)
    assert library.build_of("// Cuda compilation tools, release 1.0, V1.0.3\n") == short
    assert library.build_of(f"//\n// Cuda compilation tools, release {short}, V{short}.48\n") == f"{short}.48"
    assert library.build_of("") == short


@pytest.mark.parametrize(
    ("stated", "build", "same"),
    [
        ("13.0", "13.0.48", True),
        ("13.0", "13.0.88", True),
        ("13.0.88", "13.0.88", True),
        ("13.0.48", "13.0.88", False),
        ("13.0.8", "13.0.88", False),
        ("13.0", "13.01.1", False),
        ("13", "12.9.1", False),
    ],
)
def test_an_older_record_agrees_with_every_build_of_its_version(stated: str, build: str, same: bool) -> None:
    assert same_build(stated, build) is same
