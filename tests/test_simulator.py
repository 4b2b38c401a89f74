"""The simulator as its callers see it: arguments, reports, whole kernels, time and memory."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest

from autotune.code.compiler import Binary, compile_text
from autotune.errors import UsageError
from autotune.simulator import SimulationFault, run_ptx, simulate
from autotune.simulator.machine import GROUP_BYTES, MAX_LANES, Machine
from autotune.simulator.memory import GlobalMemory
from autotune.simulator.program import load_program

ARCHS = ("sm_90", "sm_120")

# 128 x 128 x 8 tiles, 8 x 8 outputs per thread, 256 threads, float4 accesses, A transposed in shared memory.
SGEMM = """
constexpr int BM = 128, BN = 128, BK = 8, TM = 8, TN = 8;
extern "C" __global__ void __launch_bounds__(256)
sgemm(int n, int k, const float* A, const float* B, float* C) {
    __shared__ __align__(16) float As[BK][BM];
    __shared__ __align__(16) float Bs[BK][BN];
    const int tid = threadIdx.x, tx = tid % 16, ty = tid / 16;
    A += blockIdx.y * BM * k + (tid / 2) * k + (tid % 2) * 4;
    B += blockIdx.x * BN + (tid / 32) * n + (tid % 32) * 4;
    float acc[TM][TN] = {};
    #pragma unroll 1
    for (int step = 0; step < k; step += BK) {
        const float4 a = *reinterpret_cast<const float4*>(A + step);
        const float4 b = *reinterpret_cast<const float4*>(B + step * n);
        As[tid % 2 * 4 + 0][tid / 2] = a.x; As[tid % 2 * 4 + 1][tid / 2] = a.y;
        As[tid % 2 * 4 + 2][tid / 2] = a.z; As[tid % 2 * 4 + 3][tid / 2] = a.w;
        *reinterpret_cast<float4*>(&Bs[tid / 32][tid % 32 * 4]) = b;
        __syncthreads();
        #pragma unroll
        for (int kk = 0; kk < BK; ++kk) {
            float reg_m[TM], reg_n[TN];
            #pragma unroll
            for (int i = 0; i < TM; ++i) reg_m[i] = As[kk][ty * 4 + i / 4 * 64 + i % 4];
            #pragma unroll
            for (int j = 0; j < TN; ++j) reg_n[j] = Bs[kk][tx * 4 + j / 4 * 64 + j % 4];
            #pragma unroll
            for (int i = 0; i < TM; ++i)
                #pragma unroll
                for (int j = 0; j < TN; ++j) acc[i][j] += reg_m[i] * reg_n[j];
        }
        __syncthreads();
    }
    #pragma unroll
    for (int i = 0; i < TM; ++i)
        #pragma unroll
        for (int j = 0; j < TN; ++j)
            C[(blockIdx.y * BM + ty * 4 + i / 4 * 64 + i % 4) * n
                + blockIdx.x * BN + tx * 4 + j / 4 * 64 + j % 4] = acc[i][j];
}
"""
SCALE = """extern "C" __global__ void k(float* a, float x, int n, double y) {
    a[threadIdx.x] = a[threadIdx.x] * x + n + y;
}"""


def ptx_of(text: str, entry: str = "k", arch: str = "sm_90") -> str:
    binary = compile_text(text, entry, arch, ("-lineinfo",))
    assert isinstance(binary, Binary), binary
    return binary.ptx


def fma_chain(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Multiply with one exactly rounded FMA per term, in ascending k: what the kernel promises."""
    c = np.zeros((a.shape[0], b.shape[1]), np.float32)
    for k in range(a.shape[1]):
        product = a[:, k : k + 1].astype(np.float64) * b[k]
        total = product + c
        # Rounding to odd: move inexact sums with an even last bit towards the exact value.
        part = total - product
        error = (product - (total - part)) + (c - part)
        odd = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
        c = np.where((error != 0) & (total.view(np.uint64) & np.uint64(1) == 0), odd, total).astype(
            np.float32
        )
    return c


@pytest.mark.parametrize("arch", ARCHS)
def test_sgemm_is_bitwise_a_chain_of_fmas(arch: str) -> None:
    rng = np.random.default_rng(1)
    m, n, k = 256, 128, 40
    a, b = rng.standard_normal((m, k)).astype(np.float32), rng.standard_normal((k, n)).astype(np.float32)
    c = np.full((m, n), np.nan, np.float32)
    report = run_ptx(
        ptx_of(SGEMM, "sgemm", arch), "sgemm", (1, 2, 1), (256, 1, 1), [n, k, a, b, c], counters=True
    )
    assert report.faults == ()
    np.testing.assert_array_equal(c, fma_chain(a, b))
    assert report.counters is not None
    assert report.counters["smsp__sass_thread_inst_executed_op_ffma_pred_on.sum"] == m * n * k
    assert report.counters["l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum"] == 0


@pytest.mark.timing
def test_sgemm_is_fast_enough() -> None:
    ptx = ptx_of(SGEMM, "sgemm")
    a = np.ones((128, 128), np.float32)
    c = np.zeros_like(a)
    load_program.cache_clear()
    seconds = []
    for checks in (True, False, False):
        start = time.perf_counter()
        run_ptx(ptx, "sgemm", (1, 1, 1), (256, 1, 1), [128, 128, a, a, c], checks=checks, counters=checks)
        seconds.append(time.perf_counter() - start)
    assert (c == 128).all()
    assert seconds[0] < 1.5  # 0.1 s on an idle machine, parsing included
    assert seconds[2] < 0.5  # 0.015 s


def test_groups_of_blocks_stay_within_their_memory() -> None:
    # 220 KB of shared memory per block: with checks, bookkeeping allows few blocks at once.
    text = """extern "C" __global__ void k(float* a) {
        extern __shared__ float s[];
        s[threadIdx.x * 1700] = blockIdx.x; __syncthreads();
        a[blockIdx.x * 32 + threadIdx.x] = s[(31 - threadIdx.x) * 1700] + threadIdx.x;
    }"""
    program = load_program(ptx_of(text), "k")
    machine = Machine(
        program, (1000, 1, 1), (32, 1, 1), GlobalMemory(program.kernel, []), {}, 225280, True, False
    )
    blocks = machine._blocks_at_once()
    assert 1 < blocks < MAX_LANES // 32
    assert blocks * 225280 * 9 <= GROUP_BYTES
    a = np.zeros((600, 32), np.float32)
    run_ptx(ptx_of(text), "k", (600, 1, 1), (32, 1, 1), [a], shared_bytes=225280).raise_if_faulty()
    np.testing.assert_array_equal(a, np.arange(600)[:, None] + np.arange(32))


def test_three_dimensional_launches() -> None:
    text = """extern "C" __global__ void k(int* a) {
        int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
        int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
        a[block * 30 + thread] = blockIdx.x + 10 * blockIdx.y + 100 * blockIdx.z + 1000 * threadIdx.x
            + 10000 * threadIdx.y + 100000 * threadIdx.z;
    }"""
    a = np.zeros((4, 3, 2, 2, 3, 5), np.int32)
    run_ptx(ptx_of(text), "k", (2, 3, 4), (5, 3, 2), [a]).raise_if_faulty()
    z, y, x, w, v, u = np.indices(a.shape)
    np.testing.assert_array_equal(a, x + 10 * y + 100 * z + 1000 * u + 10000 * v + 100000 * w)


def test_scalars_are_converted_and_structs_pass_as_bytes() -> None:
    a = np.arange(32, dtype=np.float32)
    run_ptx(ptx_of(SCALE), "k", (1, 1, 1), (32, 1, 1), [a, 2, -3, np.float64(0.5)]).raise_if_faulty()
    np.testing.assert_array_equal(a, np.arange(32) * 2 - 2.5)
    text = """struct Pair { float x; int n; };
    extern "C" __global__ void k(float* a, Pair p, unsigned long long u, short s) {
        a[threadIdx.x] = p.x * p.n + u + s;
    }"""
    pair = np.array([(1.5, 4)], [("x", "f4"), ("n", "i4")])[0]
    run_ptx(ptx_of(text), "k", (1, 1, 1), (32, 1, 1), [a, pair, 7, np.int16(-1)]).raise_if_faulty()
    assert (a == 12).all()
    run_ptx(ptx_of(text), "k", (1, 1, 1), (32, 1, 1), [a, pair.tobytes(), 7, -1]).raise_if_faulty()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"args": [np.zeros(32, np.float32), 1.0, 1]}, "kernel k takes 4 arguments; 3 were given"),
        ({"args": [1.5, 1.0, 1, 1.0]}, r"argument 1 \(k_param_0\) is a u64: give an integer, not 1.5"),
        ({"args": [np.zeros(32, np.float32), np.zeros(1), 1, 1.0]}, "argument 2 .* is a f32, not a pointer"),
        ({"args": [np.zeros(64, np.float32)[::2], 1.0, 1, 1.0]}, "argument 1 .* not C-contiguous"),
        (
            {"args": [np.zeros(32, np.float32), np.float64(1), 1, 1.0]},
            "argument 2 .* of 4 bytes; float64 was given",
        ),
        ({"args": [np.zeros(32, np.float32), 1.0, 1.5, 1.0]}, "argument 3 .* give an integer, not 1.5"),
        ({"args": [np.zeros(32, np.float32), 1.0, 1 << 33, 1.0]}, "argument 3 .* does not fit into 32 bits"),
        (
            {"args": [np.zeros(32, np.float32), "1", 1, 1.0]},
            "argument 2 .* give a number or an array, not str",
        ),
        ({"args": [np.array([None] * 32), 1.0, 1, 1.0]}, "argument 1 .* Python objects"),
        ({"grid": (0, 1, 1)}, r"grid \(0, 1, 1\) is no launch"),
        ({"block": (32, 1, 1, 1)}, r"block \(32, 1, 1, 1\) is no launch"),
        ({"block": (32, 33, 1)}, "1056 threads; kernel k allows 1024"),
        ({"shared_bytes": -4}, "shared_bytes = -4"),
        ({"entry": "other"}, "the PTX has no kernel 'other': it has k"),
    ],
)
def test_wrong_requests_are_refused_in_one_line(change: dict[str, object], message: str) -> None:
    request: dict[str, object] = {
        "entry": "k",
        "grid": (1, 1, 1),
        "block": (32, 1, 1),
        "args": [np.zeros(32, np.float32), 1.0, 1, 1.0],
    }
    with pytest.raises(UsageError, match=message) as caught:
        run_ptx(ptx_of(SCALE), **(request | change))
    assert "\n" not in str(caught.value)


def test_launch_bounds_limit_the_block() -> None:
    a = np.zeros((128, 128), np.float32)
    with pytest.raises(UsageError, match="512 threads; kernel sgemm allows 256"):
        run_ptx(ptx_of(SGEMM, "sgemm"), "sgemm", (1, 1, 1), (512, 1, 1), [128, 128, a, a, a.copy()])


def test_overlapping_arguments_share_their_bytes() -> None:
    text = """extern "C" __global__ void k(const float* a, float* b) {
        float v = a[threadIdx.x];
        __syncthreads();
        b[threadIdx.x] = v;
    }"""
    base = np.arange(65, dtype=np.float32)
    run_ptx(ptx_of(text), "k", (1, 1, 1), (64, 1, 1), [base[:64], base[1:]]).raise_if_faulty()
    np.testing.assert_array_equal(base[1:], np.arange(64))


def test_simulate_compiles_and_runs() -> None:
    a = np.arange(32, dtype=np.float32)
    report = simulate(SCALE, (1, 1, 1), (32, 1, 1), [a, 3.0, 1, 0.0])
    np.testing.assert_array_equal(a, np.arange(32) * 3 + 1)
    assert report.counters is not None
    with pytest.raises(SimulationFault, match=r"out-of-bounds: .*line 2, "):
        simulate(SCALE, (1, 1, 1), (64, 1, 1), [a, 3.0, 1, 0.0], arch="sm_120").raise_if_faulty()
    with pytest.raises(UsageError, match="does not compile"):
        simulate(SCALE.replace("a[", "q["), (1, 1, 1), (32, 1, 1), [a, 3.0, 1, 0.0])
    with pytest.raises(UsageError, match="2 kernels"):
        simulate(SCALE + SCALE.replace("k(", "l("), (1, 1, 1), (32, 1, 1), [a, 3.0, 1, 0.0])
    with pytest.raises(UsageError, match="the text has no kernel"):
        simulate("int x;", (1, 1, 1), (32, 1, 1), [])
    simulate(
        SCALE + SCALE.replace("k(", "l("), (1, 1, 1), (32, 1, 1), [a, 3.0, 1, 0.0], entry="l"
    ).raise_if_faulty()


def test_needs_numpy_only() -> None:
    code = (
        "import sys; import autotune.simulator;"
        "heavy = ('cupy', 'optuna', 'jinja2', 'click', 'autotune.code.published')\n"
        "print([n for n in heavy if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
