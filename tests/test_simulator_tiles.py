"""How FP32 products fill and read tiles: ldmatrix, copies with zeros, copies that an mbarrier waits for."""

from __future__ import annotations

import numpy as np
import pytest
from test_simulator_faults import ARCHS, expect, run

from autotune.code.compiler import Binary, compile_text
from autotune.simulator import UnsupportedPTX, run_ptx

MATRICES = """extern "C" __global__ void k(const unsigned* a, unsigned* b, int n) {
    __shared__ __align__(16) unsigned short s[4 * 8 * 8];
    for (int i = threadIdx.x; i < n; i += 32) reinterpret_cast<unsigned*>(s)[i] = a[i];
    BARRIER
    const unsigned at = (unsigned)__cvta_generic_to_shared(s + threadIdx.x * 8) + SHIFT;
    unsigned r[4] = {};
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"  // here
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
    for (int q = 0; q < 4; ++q) b[q * 32 + threadIdx.x] = r[q];
}"""


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_are_spread_over_a_warp(arch: str, count: int, transposed: bool) -> None:
    text = MATRICES.replace("BARRIER", "__syncwarp();").replace("SHIFT", "0")
    names = ", ".join(f"%{n}" for n in range(count))
    text = text.replace(".x4.", f".x{count}.trans." if transposed else f".x{count}.")
    text = text.replace("{%0, %1, %2, %3}, [%4]", f"{{{names}}}, [%{count}]")
    outputs = ", ".join(f'"=r"(r[{n}])' for n in range(count))
    text = text.replace('"=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])', outputs)
    halves = np.arange(4 * 8 * 8, dtype=np.uint16)
    b = np.zeros((4, 32), np.uint32)
    report = run(text, arch, halves.view(np.uint32), b, 128, threads=32)
    assert (report.faults, report.notes) == ((), ())
    matrices = halves.reshape(4, 8, 8)
    for q in range(count):
        matrix = matrices[q].T if transposed else matrices[q]
        np.testing.assert_array_equal(b[q], np.ascontiguousarray(matrix).view(np.uint32).reshape(-1))
    assert not b[count:].any()


@pytest.mark.parametrize("arch", ARCHS)
def test_mistakes_around_matrices(arch: str) -> None:
    halves, b = np.arange(256, dtype=np.uint16).view(np.uint32), np.zeros(128, np.uint32)

    for kind, barrier, shift, n in (
        ("shared-race", "", "0", 128),
        ("misaligned", "__syncwarp();", "(threadIdx.x == 3) * 8", 128),
        ("out-of-bounds", "__syncwarp();", "16", 128),
        ("uninitialised-read", "__syncwarp();", "0", 100),
        ("divergent-warp", "__syncwarp(); if (threadIdx.x == 7) return;", "0", 128),
    ):
        text = MATRICES.replace("BARRIER", barrier).replace("SHIFT", shift)
        expect(run(text, arch, halves, b, n, threads=32), kind, text)
    text = MATRICES.replace("BARRIER", "__syncwarp();").replace("SHIFT", "0")
    binary = compile_text(text, "k", arch)
    assert isinstance(binary, Binary)
    with pytest.raises(UnsupportedPTX, match=r"ldmatrix\.sync\.aligned\.m16n16"):
        run_ptx(binary.ptx.replace("m8n8", "m16n16"), "k", 1, 32, [halves, b, 128])


IGNORED = """extern "C" __global__ void k(const float* a, float* b, int n) {
    __shared__ __align__(16) float s[256];
    const unsigned to = (unsigned)__cvta_generic_to_shared(s + threadIdx.x * 4);
    asm volatile("{ .reg .pred p; setp.ge.s32 p, %2, %3;"  // here
        " cp.async.cg.shared.global [%0], [%1], 16, p; }"
        :: "r"(to), "l"(a + threadIdx.x * 4), "r"((int)threadIdx.x), "r"(n) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
    for (int i = 0; i < 4; ++i) b[i * 64 + threadIdx.x] = s[i * 64 + threadIdx.x];
}"""


@pytest.mark.parametrize("arch", ARCHS)
def test_copies_that_ignore_their_source_bring_zeros(arch: str) -> None:
    a, b = np.arange(1, 257, dtype=np.float32), np.full(256, -1, np.float32)
    run(IGNORED, arch, a[:80], b, 20).raise_if_faulty()  # what is ignored may lie out of bounds
    np.testing.assert_array_equal(b, np.where(np.arange(256) < 80, a, 0))
    expect(run(IGNORED, arch, a[:80], b, 21), "out-of-bounds", IGNORED, thread=20)


ARRIVES = """
__device__ __forceinline__ unsigned shared(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
extern "C" __global__ void k(const float* a, float* b, int n) {
    __shared__ __align__(16) float s[2][256];
    __shared__ unsigned long long full[2];
    if (threadIdx.x == 0)
        for (int i = 0; i < 2; ++i)
            asm volatile("mbarrier.init.shared::cta.b64 [%0], ARRIVALS;" :: "r"(shared(full + i)) : "memory");
    __syncthreads();
    for (int t = 0; t < n; ++t) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"  // copy
            :: "r"(shared(&s[t & 1][threadIdx.x * 4])), "l"(a + t * 256 + threadIdx.x * 4) : "memory");
        asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];"
            :: "r"(shared(full + (t & 1))) : "memory");
        WAIT
        b[t * 64 + threadIdx.x] = s[t & 1][(threadIdx.x * 4 + 9) & 255];  // here
        if (t & 1) __syncthreads();
    }
}"""
TRY = """asm volatile("{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;"
            "@p bra DONE; bra AGAIN; DONE: }" :: "r"(shared(full + (t & 1))), "r"(t / 2 & 1) : "memory");"""


@pytest.mark.parametrize("arch", ARCHS)
def test_an_mbarrier_waits_for_copies(arch: str) -> None:
    n = 6
    a, b = np.arange(256 * n, dtype=np.float32), np.zeros(64 * n, np.float32)
    good = ARRIVES.replace("ARRIVALS", "64").replace("WAIT", TRY)
    report = run(good, arch, a, b, n)
    assert (report.faults, report.notes) == ((), ())
    np.testing.assert_array_equal(b.reshape(n, 64), a.reshape(n, 256)[:, (np.arange(64) * 4 + 9) & 255])
    unwaited = ARRIVES.replace("ARRIVALS", "64").replace("WAIT", "")
    assert "did not wait for its mbarrier" in expect(run(unwaited, arch, a, b, n), "async-copy", unwaited)
    stuck = ARRIVES.replace("ARRIVALS", "65").replace("WAIT", TRY)
    assert run(stuck, arch, a, b, n).faults[0].kind == "deadlock"
    counted = good.replace(".noinc", "").replace(
        "        WAIT", ""
    )  # such an arrival adds the one that it makes: the phase never ends
    assert run(counted, arch, a, b, n).faults[0].kind == "deadlock"


@pytest.mark.parametrize("arch", ARCHS)
def test_products_of_24_bits(arch: str) -> None:
    text = """extern "C" __global__ void k(const int* a, const int* b, int* c) {
        const int i = threadIdx.x;
        c[i] = __mul24(a[i], b[i]);
        c[64 + i] = (int)__umul24((unsigned)a[i], (unsigned)b[i]);
        asm("mul24.hi.s32 %0, %1, %2;" : "=r"(c[128 + i]) : "r"(a[i]), "r"(b[i]));
        asm("mul24.hi.u32 %0, %1, %2;" : "=r"(c[192 + i]) : "r"(a[i]), "r"(b[i]));
        asm("mad24.lo.s32 %0, %1, %2, %3;" : "=r"(c[256 + i]) : "r"(a[i]), "r"(b[i]), "r"(i));
    }"""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-(2**31), 2**31, 64).astype(np.int32) for _ in range(2))
    c = np.zeros((5, 64), np.int32)
    run(text, arch, a, b, c).raise_if_faulty()
    signed = [(each.astype(np.int64) + 2**23) % 2**24 - 2**23 for each in (a, b)]
    plain = [each.astype(np.int64) % 2**24 for each in (a, b)]
    low, high = signed[0] * signed[1], plain[0] * plain[1]
    expected = [low, high, low >> 16, high >> 16, low + np.arange(64)]
    np.testing.assert_array_equal(c, np.array(expected).astype(np.int32))
