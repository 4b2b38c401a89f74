"""The instruction mix of a main loop, from machine code of kernels whose mix is known."""

from __future__ import annotations

import pytest

from autotune.code import sass
from autotune.code.compiler import Binary, compile_text
from autotune.code.sass import main_loop
from autotune.errors import ToolchainError

LOOP = """
extern "C" __global__ void chain(float* out, int n)
{
    float a = threadIdx.x, b = blockIdx.x;
    float before = a * b + 1.0f;
    #pragma unroll 1
    for (int i = 0; i < n; ++i) {
        #pragma unroll
        for (int j = 0; j < 24; ++j)
            a = a * b + before;
    }
    out[threadIdx.x] = a;
}
"""


def binary(text: str, entry: str, arch: str = "sm_90") -> Binary:
    made = compile_text(text, entry, arch)
    assert isinstance(made, Binary), made
    return made


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_120"])
def test_the_loop_with_the_ffmas_is_found(arch):
    loop = main_loop(binary(LOOP, "chain", arch).cubin, "chain")
    assert loop.opcodes["FFMA"] == 24
    assert 24 < loop.instructions < 40
    assert loop.instructions < loop.total
    assert loop.code_bytes == 16 * loop.instructions
    assert loop.share("FFMA") == pytest.approx(24 / loop.instructions)
    assert loop.ratio("LDS") == 0


def test_of_a_loop_over_tiles_it_is_the_one_within():
    text = """
extern "C" __global__ void tiles(float* out, int n, int all)
{
    #pragma unroll 1
    for (int tile = blockIdx.x; tile < all; tile += gridDim.x) {
        float a = tile, b = out[tile], before = a * b + 1.0f;
        #pragma unroll 1
        for (int i = 0; i + 4 < n; i += 4)
            #pragma unroll
            for (int j = 0; j < 24; ++j)
                a = a * b + before;
        #pragma unroll 1
        for (int i = 0; i < n % 4; ++i)
            #pragma unroll
            for (int j = 0; j < 6; ++j)
                a = a * b + before;
        out[tile] = a;
    }
}
"""
    assert main_loop(binary(text, "tiles").cubin, "tiles").opcodes["FFMA"] == 24


def test_a_kernel_without_a_loop_counts_whole():
    text = 'extern "C" __global__ void one(float* out) { out[threadIdx.x] = threadIdx.x * 2.5f; }'
    loop = main_loop(binary(text, "one").cubin, "one")
    assert loop.instructions == loop.total
    assert loop.ratio("STG") == float("inf")  # no FFMA to divide by
    assert loop.opcodes["STG"] == 1


@pytest.mark.parametrize("alpha", [True, False])
def test_a_loop_that_adds_up_is_not_the_one_that_multiplies(alpha):
    """Where the multiplies are unrolled whole, what follows may be the only loop, with one FFMA or none."""
    text = """
    extern "C" __global__ void flat(float* out, int n)
    {
        float a = threadIdx.x, b = blockIdx.x;
        #pragma unroll
        for (int j = 0; j < 24; ++j)
            a = a * b + n;
        #pragma unroll 1
        for (int i = 0; i < n; ++i)
            out[i] = SUM;
    }
    """.replace("SUM", "out[i] * b + a" if alpha else "out[i] + a")
    loop = main_loop(binary(text, "flat").cubin, "flat")
    assert loop.opcodes["FFMA"] == 24 + alpha
    assert (loop.first, loop.instructions) == (0, loop.total)


def test_machine_code_that_is_none_is_one_clear_line():
    with pytest.raises(ToolchainError, match="does not read the machine code of chain"):
        main_loop(b"not an ELF file", "chain")
    with pytest.raises(ToolchainError, match="does not read the machine code of other"):
        main_loop(binary(LOOP, "chain").cubin, "other")


def test_a_missing_disassembler_is_named_with_its_remedy(monkeypatch):
    sass.nvdisasm.cache_clear()
    monkeypatch.setattr(sass.sys, "path", [])
    monkeypatch.setattr(sass.shutil, "which", lambda *_, **__: None)
    try:
        with pytest.raises(ToolchainError, match="pip install nvidia-cuda-nvdisasm"):
            sass.nvdisasm()
    finally:
        sass.nvdisasm.cache_clear()


def test_the_loop_of_a_kernel_on_tensor_cores_is_the_one_that_multiplies():
    text = """
extern "C" __global__ void k(float* out, const unsigned* in, int n)
{
    float s[4] = {};
    unsigned a[4], b[2];
    #pragma unroll 1
    for (int i = 0; i < n; ++i) {
        for (int q = 0; q < 4; ++q)
            a[q] = in[i * 6 + q];
        for (int q = 0; q < 2; ++q)
            b[q] = in[i * 6 + 4 + q];
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"
            " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
    #pragma unroll 1
    for (int i = 0; i < n; ++i)
        out[i] = s[0] + s[1] + s[2] + s[3];
}
"""
    loop = main_loop(binary(text, "k").cubin, "k")
    assert loop.multiply == "HMMA"
    assert loop.opcodes["HMMA"] >= 1
    assert loop.ratio("LDG") == loop.opcodes["LDG"] / loop.opcodes["HMMA"]
