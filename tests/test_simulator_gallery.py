"""Kernels of the kinds that tutorials, samples and generators publish, written anew: right, and no alarm."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.simulator import Report, run_ptx, simulate

Floats = np.ndarray


def floats(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def clean(report: Report, notes: tuple[str, ...] = ()) -> None:
    assert report.faults == ()
    assert tuple(note.kind for note in report.notes) == notes


NAIVE = """
__global__ void naive(int M, int N, int K, float alpha, const float* A, const float* B,
    float beta, float* C) {
    const uint x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
    if (x < M && y < N) {
        float sum = 0.0;
        for (int i = 0; i < K; ++i) sum += A[x * K + i] * B[i * N + y];
        C[x * N + y] = alpha * sum + beta * C[x * N + y];
    }
}"""
COALESCED = """
template <const uint SIZE>
__global__ void coalesced(int M, int N, int K, float alpha, const float* A, const float* B,
    float beta, float* C) {
    const int row = blockIdx.x * SIZE + threadIdx.x / SIZE, col = blockIdx.y * SIZE + threadIdx.x % SIZE;
    if (row < M && col < N) {
        float sum = 0.0;
        for (int i = 0; i < K; ++i) sum += A[row * K + i] * B[i * N + col];
        C[row * N + col] = alpha * sum + beta * C[row * N + col];
    }
}"""
TILED_1D = """
#include <cassert>
template <const int BM, const int BN, const int BK, const int TM>
__global__ void tiled(int M, int N, int K, float alpha, const float* A, const float* B,
    float beta, float* C) {
    __shared__ float As[BM * BK], Bs[BK * BN];
    const int threadCol = threadIdx.x % BN, threadRow = threadIdx.x / BN;
    A += blockIdx.y * BM * K; B += blockIdx.x * BN; C += blockIdx.y * BM * N + blockIdx.x * BN;
    assert(BM * BK == blockDim.x); assert(BN * BK == blockDim.x);
    float sums[TM] = {0.0};
    for (int k = 0; k < K; k += BK) {
        As[threadIdx.x] = A[threadIdx.x / BK * K + threadIdx.x % BK];
        Bs[threadIdx.x] = B[threadIdx.x / BN * N + threadIdx.x % BN];
        __syncthreads();
        A += BK; B += BK * N;
        for (int i = 0; i < BK; ++i) {
            const float b = Bs[i * BN + threadCol];
            for (int r = 0; r < TM; ++r) sums[r] += As[(threadRow * TM + r) * BK + i] * b;
        }
        __syncthreads();
    }
    for (int r = 0; r < TM; ++r) {
        float* c = &C[(threadRow * TM + r) * N + threadCol];
        *c = alpha * sums[r] + beta * *c;
    }
}"""
STAGED = """
template <int T> __global__ void __launch_bounds__(T* T)
staged(int M, int N, int K, float alpha, const float* A, const float* B,
    float beta, float* C) {
    __shared__ float As[2][T][T + 1], Bs[2][T][T];
    const int x = threadIdx.x % T, y = threadIdx.x / T, row = blockIdx.y * T + y, col = blockIdx.x * T + x;
    float a = A[row * K + x], b = B[y * N + col], sum = 0;
    As[0][y][x] = a; Bs[0][y][x] = b;
    __syncthreads();
    for (int t = 0, now = 0; t < K / T; ++t, now ^= 1) {
        if (t + 1 < K / T) { a = A[row * K + (t + 1) * T + x]; b = B[((t + 1) * T + y) * N + col]; }
        for (int k = 0; k < T; ++k) sum += As[now][y][k] * Bs[now][k][x];
        if (t + 1 < K / T) { As[now ^ 1][y][x] = a; Bs[now ^ 1][y][x] = b; }
        __syncthreads();
    }
    C[row * N + col] = alpha * sum + beta * C[row * N + col];
}"""
# Half of the warps load a stage while the others compute: each waits at barriers of its own in the text.
TURNS = """
template <int T> __global__ void
turns(int M, int N, int K, float alpha, const float* A, const float* B,
    float beta, float* C) {
    __shared__ float As[2][T][T], Bs[2][T][T];
    const int id = threadIdx.x % (T * T), x = id % T, y = id / T;
    const int row = blockIdx.y * T + y, col = blockIdx.x * T + x;
    float sum = 0;
    if (threadIdx.x >= T * T) {
        for (int t = 0; t < K / T; ++t) {
            As[t & 1][y][x] = A[row * K + t * T + x]; Bs[t & 1][y][x] = B[(t * T + y) * N + col];
            __syncthreads();
        }
    } else {
        for (int t = 0; t < K / T; ++t) {
            __syncthreads();
            for (int k = 0; k < T; ++k) sum += As[t & 1][y][k] * Bs[t & 1][k][x];
        }
        C[row * N + col] = alpha * sum + beta * C[row * N + col];
    }
}"""
PIPELINED = """
#include <cuda_pipeline.h>
template <int T, int STAGES> __global__ void
pipelined(int M, int N, int K, float alpha, const float* A, const float* B,
    float beta, float* C) {
    __shared__ __align__(16) float As[STAGES][T][T], Bs[STAGES][T][T];
    const int quad = threadIdx.x % (T / 4) * 4, line = threadIdx.x / (T / 4);
    const int row = blockIdx.y * T + line, col = blockIdx.x * T + quad;
    auto load = [&](int t) {
        if (t < K / T) {
            __pipeline_memcpy_async(&As[t % STAGES][line][quad], &A[row * K + t * T + quad], 16);
            __pipeline_memcpy_async(&Bs[t % STAGES][line][quad], &B[(t * T + line) * N + col], 16);
        }
        __pipeline_commit();
    };
    float4 sum = make_float4(0, 0, 0, 0);
    for (int t = 0; t < STAGES - 1; ++t) load(t);
    for (int t = 0; t < K / T; ++t) {
        __pipeline_wait_prior(STAGES - 2);
        __syncthreads();
        load(t + STAGES - 1);
        for (int k = 0; k < T; ++k) {
            const float a = As[t % STAGES][line][k];
            const float4 b = *reinterpret_cast<float4*>(&Bs[t % STAGES][k][quad]);
            sum.x += a * b.x; sum.y += a * b.y; sum.z += a * b.z; sum.w += a * b.w;
        }
    }
    float4* c = reinterpret_cast<float4*>(&C[row * N + col]);
    float4 old = *c;
    old.x = alpha * sum.x + beta * old.x; old.y = alpha * sum.y + beta * old.y;
    old.z = alpha * sum.z + beta * old.z; old.w = alpha * sum.w + beta * old.w;
    *c = old;
}"""
SPLIT = """
__global__ void split(int M, int N, int K, float alpha, const float* A, const float* B,
    float beta, float* C) {
    const int col = blockIdx.x * 32 + threadIdx.x, row = blockIdx.y * 8 + threadIdx.y, part = K / gridDim.z;
    float sum = 0;
    for (int k = blockIdx.z * part; k < (blockIdx.z + 1) * part; ++k) sum += A[row * K + k] * B[k * N + col];
    atomicAdd(&C[row * N + col], alpha * sum);
}"""

PRODUCTS = {
    "naive": (NAIVE, None, (3, 4), (16, 16), (45, 63, 33), ()),
    "coalesced": (COALESCED, "coalesced<16>", (3, 4), 256, (45, 63, 33), ()),
    "1D tiles": (TILED_1D, "tiled<64, 64, 8, 8>", (2, 1), 512, (64, 128, 32), ()),
    "register staging": (STAGED, "staged<16>", (2, 3), 256, (48, 32, 64), ()),
    "warps in turns": (TURNS, "turns<8>", (2, 2), 128, (16, 16, 40), ("divergent-barrier",)),
    "cp.async": (PIPELINED, "pipelined<32, 3>", (2, 1), 256, (32, 64, 160), ()),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str) -> None:
    text, entry, grid, block, (m, n, k), notes = PRODUCTS[name]
    a, b, c = floats(m, k), floats(k, n, seed=1), floats(m, n, seed=2)
    expected = 1.5 * (a.astype(np.float64) @ b) - 0.5 * c
    clean(simulate(text, grid, block, (m, n, k, 1.5, a, b, -0.5, c), entry=entry), notes)
    np.testing.assert_allclose(c, expected, rtol=1e-4, atol=1e-4)
    for barrier in ("__syncthreads();", "__pipeline_wait_prior(STAGES - 2);"):
        if barrier in text:  # every one of them is needed
            start = -1
            while (start := text.find(barrier, start + 1)) >= 0:
                without = text[:start] + text[start + len(barrier) :]
                faults = simulate(without, grid, block, (m, n, k, 1.5, a, b, -0.5, c), entry=entry).faults
                if faults:
                    assert faults[0].kind in ("shared-race", "async-copy", "uninitialised-read")
                else:  # warps that end count as present at the barriers of others
                    assert name == "warps in turns"
                    assert not np.allclose(c, expected, rtol=1e-4, atol=1e-4)


def test_parts_of_k_are_added_atomically() -> None:
    a, b, c = floats(16, 64), floats(64, 64, seed=1), np.zeros((16, 64), np.float32)
    clean(simulate(SPLIT, (2, 2, 4), (32, 8), (16, 64, 64, 2.0, a, b, 0.0, c)))
    np.testing.assert_allclose(c, 2 * (a @ b), rtol=1e-4, atol=1e-4)
    plain = SPLIT.replace("atomicAdd(&C[row * N + col], alpha * sum)", "C[row * N + col] += alpha * sum")
    faults = simulate(plain, (2, 2, 4), (32, 8), (16, 64, 64, 2.0, a, b, 0.0, c)).faults
    assert faults[0].kind == "global-race"


SMALL = {
    "reduction": """
template <unsigned SIZE> __global__ void reduce(const float* x, float* y, int n) {
    extern __shared__ float s[];
    float sum = 0;
    for (unsigned i = blockIdx.x * SIZE * 2 + threadIdx.x; i < n; i += SIZE * 2 * gridDim.x)
        sum += x[i] + (i + SIZE < n ? x[i + SIZE] : 0.0f);
    s[threadIdx.x] = sum;
    __syncthreads();
    if (SIZE >= 128) {
        if (threadIdx.x < 64) s[threadIdx.x] = sum = sum + s[threadIdx.x + 64];
        __syncthreads();
    }
    if (threadIdx.x < 32) {
        sum += s[threadIdx.x + 32];
        for (int d = 16; d > 0; d /= 2) sum += __shfl_down_sync(0xffffffff, sum, d);
    }
    if (threadIdx.x == 0) y[blockIdx.x] = sum;
}""",
    "histogram": """
__global__ void histogram(const unsigned char* x, unsigned* bins, int n) {
    __shared__ unsigned s[256];
    s[threadIdx.x] = 0;
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += blockDim.x * gridDim.x)
        atomicAdd(&s[x[i]], 1);
    __syncthreads();
    atomicAdd(&bins[threadIdx.x], s[threadIdx.x]);
}""",
    "scan": """
__global__ void scan(const float* x, float* y) {
    __shared__ float s[2][256];
    int out = 0;
    s[0][threadIdx.x] = x[blockIdx.x * 256 + threadIdx.x];
    __syncthreads();
    for (int d = 1; d < 256; d *= 2) {
        out ^= 1;
        const float before = threadIdx.x >= d ? s[out ^ 1][threadIdx.x - d] : 0.0f;
        s[out][threadIdx.x] = s[out ^ 1][threadIdx.x] + before;
        __syncthreads();
    }
    y[blockIdx.x * 256 + threadIdx.x] = s[out][threadIdx.x];
}""",
    "stencil": """
__constant__ float weights[9];
__global__ void stencil(const float* x, float* y, int n) {
    __shared__ float s[64 + 8];
    const int i = blockIdx.x * 64 + threadIdx.x;
    s[threadIdx.x + 4] = i < n ? x[i] : 0.0f;
    if (threadIdx.x < 4) {
        s[threadIdx.x] = i >= 4 ? x[i - 4] : 0.0f;
        s[threadIdx.x + 68] = i + 64 < n ? x[i + 64] : 0.0f;
    }
    __syncthreads();
    float sum = 0;
    for (int j = 0; j < 9; ++j) sum += weights[j] * s[threadIdx.x + j];
    if (i < n) y[i] = sum;
}""",
    "layernorm": """
__global__ void layernorm(float* out, float* mean, float* rstd, const float* in, const float* w,
                          const float* b, int rows, int cols) {
    const int lane = threadIdx.x % warpSize, warp = threadIdx.x / warpSize;
    const int row = blockIdx.x * (blockDim.x / warpSize) + warp;
    if (row >= rows) return;
    const float* x = in + row * cols;
    float sum = 0.0f, squares = 0.0f;
    for (int i = lane; i < cols; i += warpSize) sum += x[i];
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffff, sum, d);
    const float m = sum / cols;
    for (int i = lane; i < cols; i += warpSize) squares += (x[i] - m) * (x[i] - m);
    for (int d = 16; d > 0; d /= 2) squares += __shfl_xor_sync(0xffffffff, squares, d);
    const float s = rsqrtf(squares / cols + 1e-5f);
    if (lane == 0 && mean != nullptr) __stcs(mean + row, m);
    if (lane == 0 && rstd != nullptr) __stcs(rstd + row, s);
    for (int i = lane; i < cols; i += warpSize)
        __stcs(out + row * cols + i, s * (__ldcs(x + i) - m) * w[i] + b[i]);
}""",
    "softmax": """
__device__ float warpMax(float v) {
    for (int d = 16; d > 0; d /= 2) v = fmaxf(v, __shfl_down_sync(0xFFFFFFFF, v, d));
    return v;
}
__global__ void softmax(float* out, const float* in, int cols) {
    extern __shared__ float shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const float* x = in + blockIdx.x * cols;
    float most = -INFINITY;
    for (int i = threadIdx.x; i < cols; i += blockDim.x) most = fmaxf(most, x[i]);
    most = warpMax(most);
    if (lane == 0) shared[warp] = most;
    __syncthreads();
    if (threadIdx.x == 0) {
        float v = shared[0];
        for (int i = 1; i < warps; ++i) v = fmaxf(v, shared[i]);
        shared[0] = v;
    }
    __syncthreads();
    const float offset = shared[0];
    float sum = 0.0f;
    for (int i = threadIdx.x; i < cols; i += blockDim.x) {
        out[blockIdx.x * cols + i] = expf(x[i] - offset);
        sum += out[blockIdx.x * cols + i];
    }
    for (int d = 16; d > 0; d /= 2) sum += __shfl_down_sync(0xFFFFFFFF, sum, d);
    __syncthreads();
    if (lane == 0) shared[warp] = sum;
    __syncthreads();
    sum = 0.0f;
    for (int i = 0; i < warps; ++i) sum += shared[i];
    for (int i = threadIdx.x; i < cols; i += blockDim.x) out[blockIdx.x * cols + i] /= sum;
}""",
}


def test_reductions_and_scans() -> None:
    x, y = floats(3000), np.zeros(4, np.float32)
    clean(simulate(SMALL["reduction"], 4, 128, (x, y, 3000), entry="reduce<128>", shared_bytes=512))
    np.testing.assert_allclose(y.sum(), x.sum(), rtol=1e-4)
    octets, bins = np.random.default_rng(0).integers(0, 256, 5000, np.uint8), np.zeros(256, np.uint32)
    clean(simulate(SMALL["histogram"], 3, 256, (octets, bins, 5000)))
    np.testing.assert_array_equal(bins, np.bincount(octets, minlength=256))
    x, y = floats(2, 256), np.zeros((2, 256), np.float32)
    clean(simulate(SMALL["scan"], 2, 256, (x, y)))
    np.testing.assert_allclose(y, x.cumsum(axis=1), rtol=1e-3, atol=1e-4)
    x, y, weights = floats(300), np.zeros(300, np.float32), floats(9, seed=1)
    clean(simulate(SMALL["stencil"], 5, 64, (x, y, 300), constants={"weights": weights}))
    np.testing.assert_allclose(y, np.convolve(x, weights[::-1], "same"), rtol=1e-4, atol=1e-4)


def test_norms_of_rows() -> None:
    x, w, b = floats(6, 100), floats(100, seed=1), floats(100, seed=2)
    out, mean, rstd = np.zeros_like(x), np.zeros(6, np.float32), np.zeros(6, np.float32)
    clean(
        simulate(SMALL["layernorm"], 2, 128, (out, mean, rstd, x, w, b, 6, 100), unwritten=[out, mean, rstd])
    )
    normal = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(out, normal * w + b, rtol=1e-3, atol=1e-4)
    clean(simulate(SMALL["layernorm"], 2, 128, (out, 0, 0, x, w, b, 6, 100)))  # null pointers
    clean(simulate(SMALL["softmax"], 6, 96, (out, x, 100), shared_bytes=12, unwritten=[out]))
    exact = np.exp(x - x.max(1, keepdims=True))
    np.testing.assert_allclose(out, exact / exact.sum(1, keepdims=True), rtol=1e-4)
    raced = SMALL["softmax"].replace(
        "sum = 0.0f;\n    for (int i = 0", "sum = 0.0f; shared[warp] = 0.0f;\n    for (int i = 0"
    )
    assert simulate(raced, 6, 96, (out, x, 100), shared_bytes=12).faults[0].kind == "shared-race"


# As Triton writes it: predicated accesses with braces and blanks, hexadecimal numbers, dynamic shared memory.
GENERATED = """
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry sum_rows(
.param .u64 .ptr .global .align 1 sum_rows_param_0,
.param .u64 .ptr .global .align 1 sum_rows_param_1,
.param .u32 sum_rows_param_2
)
.reqntid 64
{
.reg .pred %p<6>;
.reg .b32 %r<40>;
.reg .b64 %rd<8>;
.loc 1 5 0
$L__func_begin0:
ld.param.b64 %rd1, [sum_rows_param_0];
ld.param.b64 %rd2, [sum_rows_param_1];
ld.param.b32 %r1, [sum_rows_param_2];
.loc 1 6 10
// begin inline asm
mov.u32 %r2, %ctaid.x;
// end inline asm
mov.u32 %r3, %tid.x;
setp.lt.s32 %p1, %r3, %r1;
mad.lo.s32 %r4, %r2, %r1, %r3;
mad.wide.s32 %rd3, %r4, 4, %rd1;
// begin inline asm
mov.u32 %r5, 0x0;
@%p1 ld.global.b32 { %r5 }, [ %rd3 + 0 ];
@!%p1 mov.u32 %r5, 0x0;
// end inline asm
.loc 1 7 3
shfl.sync.bfly.b32 %r6, %r5, 16, 31, -1;
add.f32 %r7, %r5, %r6;
shfl.sync.bfly.b32 %r8, %r7, 8, 31, -1;
add.f32 %r9, %r7, %r8;
shfl.sync.bfly.b32 %r10, %r9, 4, 31, -1;
add.f32 %r11, %r9, %r10;
shfl.sync.bfly.b32 %r12, %r11, 2, 31, -1;
add.f32 %r13, %r11, %r12;
shfl.sync.bfly.b32 %r14, %r13, 1, 31, -1;
add.f32 %r15, %r13, %r14;
and.b32 %r16, %r3, 31;
setp.eq.s32 %p2, %r16, 0;
shr.u32 %r17, %r3, 3;
mov.b32 %r18, global_smem;
add.s32 %r19, %r18, %r17;
// begin inline asm
@%p2 st.shared.b32 [ %r19 + 0 ], %r15;
// end inline asm
bar.sync 0;
ld.shared.v2.b32 {%r20, %r21}, [global_smem];
add.f32 %r22, %r20, %r21;
setp.eq.s32 %p3, %r3, 0;
mad.wide.s32 %rd4, %r2, 4, %rd2;
.loc 1 9 3
// begin inline asm
@%p3 st.global.b32 [ %rd4 + 0 ], { %r22 };
// end inline asm
ret;
$L__tmp1:
$L__func_end0:
}
.file 1 "/home/user/rows.py"
.section .debug_abbrev
{
.b8 1
.b8 0
}
.section .debug_macinfo { }
"""


def test_generated_ptx() -> None:
    x, y = floats(5, 50), np.zeros(5, np.float32)
    clean(run_ptx(GENERATED, "sum_rows", 5, 64, (x, y, 50), shared_bytes=8, unwritten=[y]))
    np.testing.assert_allclose(y, x.sum(axis=1), rtol=1e-4, atol=1e-5)
    fault = run_ptx(
        GENERATED.replace("bar.sync 0;", ""), "sum_rows", 5, 64, (x, y, 50), shared_bytes=8
    ).faults[0]
    assert (fault.kind, fault.line) == ("shared-race", 7)
    fault = run_ptx(GENERATED, "sum_rows", 6, 64, (x, y, 50), shared_bytes=8).faults[0]
    assert (fault.kind, fault.line) == ("out-of-bounds", 6)
