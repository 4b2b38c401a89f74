"""Counters on access patterns whose numbers are known, and on the matrix products of every tutorial."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.code.compiler import Binary, compile_text
from autotune.simulator import Counters, run_ptx
from autotune.simulator.traffic import global_traffic, shared_traffic

ARCHS = ("sm_90", "sm_120")
FFMA = "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum"
SECTORS = "l1tex__t_sectors_pipe_lsu_mem_global_op_{}.sum"
REQUESTS = "l1tex__t_requests_pipe_lsu_mem_global_op_{}.sum"
WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_{}.sum"
CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_{}.sum"


def count(
    text: str, arch: str, grid: tuple[int, int, int], block: tuple[int, int, int], *args: object
) -> Counters:
    binary = compile_text(text, "k", arch, ("-lineinfo",))
    assert isinstance(binary, Binary), binary
    report = run_ptx(binary.ptx, "k", grid, block, args, counters=True).raise_if_faulty()
    assert report.counters is not None
    return report.counters


def line_of(text: str, mark: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if mark in line)


LANES = np.arange(32)


@pytest.mark.parametrize(
    ("address", "size", "is_load", "wavefronts", "ideal"),
    [
        (LANES * 4, 4, True, 1, 1),  # a word for each bank
        (LANES * 0, 4, True, 1, 1),  # one word for all
        (LANES * 8, 4, True, 2, 1),  # every second word
        (LANES * 128, 4, True, 32, 1),  # one column of a 32-word row
        (LANES * 132, 4, True, 1, 1),  # the same with padding
        (LANES % 16 * 4, 4, True, 1, 1),
        (LANES * 8, 8, True, 2, 2),  # half-warps
        (LANES // 2 * 8, 8, True, 1, 1),  # lane pairs agree: one phase
        (LANES * 16, 8, True, 4, 2),
        (LANES * 16, 16, True, 4, 4),  # quarter-warps
        (LANES // 2 * 16, 16, True, 2, 2),
        (LANES % 2 * 16 + LANES // 4 * 32, 16, True, 2, 2),  # lanes i and i^2 agree
        (LANES // 16 * 16, 16, True, 2, 2),
        (LANES // 16 * 16, 16, False, 4, 4),  # stores are not merged
        (LANES * 32, 16, True, 8, 4),
        (LANES * 1, 1, True, 1, 1),
    ],
)
def test_wavefront_rule(address: np.ndarray, size: int, is_load: bool, wavefronts: int, ideal: int) -> None:
    assert shared_traffic(address, LANES, size, is_load) == (1, wavefronts, ideal)
    two_warps = np.concatenate([address, address + 512])
    assert shared_traffic(two_warps, np.arange(64), size, is_load) == (2, 2 * wavefronts, 2 * ideal)


def test_inactive_lanes_cost_nothing() -> None:
    half = LANES[:16]
    assert shared_traffic(half * 128, half, 4, True) == (1, 16, 1)
    assert shared_traffic(half * 16, half, 16, True) == (1, 2, 2)
    assert global_traffic(half * 4, half) == (1, 2)
    assert global_traffic(LANES * 4, LANES * 3) == (3, 6)


@pytest.mark.parametrize(
    ("address", "sectors"),
    [(LANES * 4, 4), (LANES * 4 + 4, 5), (LANES * 0, 1), (LANES * 16, 16), (LANES * 400, 32)],
)
def test_sector_rule(address: np.ndarray, sectors: int) -> None:
    assert global_traffic(address, LANES) == (1, sectors)


@pytest.mark.parametrize("arch", ARCHS)
def test_naive_and_coalesced_products(arch: str) -> None:
    text = """extern "C" __global__ void k(int n, const float* A, const float* B, float* C) {
        int row = blockIdx.x * 32 + %s;
        int column = blockIdx.y * 32 + %s;
        float sum = 0.0f;
        for (int k = 0; k < n; ++k)
            sum += A[row * n + k] * B[k * n + column];  // product
        C[row * n + column] = sum;  // result
    }"""
    n = 64
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((n, n)).astype(np.float32) for _ in range(2))
    warps = n * n // 32
    for row, column, loads, stores in (
        ("threadIdx.x % 32", "threadIdx.x / 32", 33, 32),
        ("threadIdx.x / 32", "threadIdx.x % 32", 5, 4),
    ):
        c = np.zeros((n, n), np.float32)
        found = count(text % (row, column), arch, (2, 2, 1), (1024, 1, 1), n, a, b, c)
        np.testing.assert_allclose(c, a @ b, rtol=1e-4, atol=1e-5)
        assert found[FFMA] == n**3
        assert found[SECTORS.format("ld")] == warps * n * loads
        assert found[REQUESTS.format("ld")] == warps * n * 2
        assert found[SECTORS.format("st")] == warps * stores
        assert found[REQUESTS.format("st")] == warps
        product = found.lines[line_of(text, "// product")]
        assert product[SECTORS.format("ld")] == warps * n * loads
        assert product[FFMA] == n**3
        assert SECTORS.format("ld") not in found.lines[line_of(text, "// result")]
        assert found.opcodes["fma.rn.f32"] == n**3 // 32
        assert found.thread_opcodes["fma.rn.f32"] == n**3


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("stride", "ways"), [(33, 1), (34, 2), (32, 32)])
def test_bank_conflicts_of_a_transposed_tile(stride: int, ways: int, arch: str) -> None:
    text = f"""extern "C" __global__ void k(const float* a, float* b) {{
        __shared__ float s[32 * {stride}];
        int x = threadIdx.x % 32, y = threadIdx.x / 32;
        s[y * {stride} + x] = a[threadIdx.x];  // store
        __syncthreads();
        b[threadIdx.x] = s[x * {stride} + y];  // load
    }}"""
    a, b = np.arange(1024, dtype=np.float32), np.zeros(1024, np.float32)
    found = count(text, arch, (1, 1, 1), (1024, 1, 1), a, b)
    np.testing.assert_array_equal(b.reshape(32, 32), a.reshape(32, 32).T)
    assert found[WAVEFRONTS.format("st")] == 32
    assert found[CONFLICTS.format("st")] == 0
    assert found[WAVEFRONTS.format("ld")] == 32 * ways
    assert found[CONFLICTS.format("ld")] == 32 * (ways - 1)
    assert found.lines[line_of(text, "// load")][WAVEFRONTS.format("ld")] == 32 * ways
    assert found.lines[line_of(text, "// store")][WAVEFRONTS.format("st")] == 32
    assert found[SECTORS.format("ld")] == 128


@pytest.mark.parametrize("arch", ARCHS)
def test_divergence_counts_warps_and_threads(arch: str) -> None:
    text = """extern "C" __global__ void k(float* a, float x) {
        float v = a[threadIdx.x];
        if (threadIdx.x < 40)
            for (int n = 0; n < 5; ++n) { v = v * x + 1.0f; asm volatile("" : "+f"(v)); }  // loop
        a[threadIdx.x] = v;
    }"""
    found = count(text, arch, (1, 1, 1), (96, 1, 1), np.ones(96, np.float32), np.float32(2))
    assert found[FFMA] == 40 * 5
    assert found.opcodes["fma.rn.f32"] == 2 * 5
    assert found.lines[line_of(text, "// loop")][FFMA] == 40 * 5


@pytest.mark.parametrize("arch", ARCHS)
def test_async_copies_are_counted_as_loads_and_apart(arch: str) -> None:
    text = """extern "C" __global__ void k(const float* a, float* b) {
        __shared__ __align__(16) float s[256];
        unsigned to = (unsigned)__cvta_generic_to_shared(s + threadIdx.x * 4);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
            :: "r"(to), "l"(a + threadIdx.x * 4) : "memory");
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads();
        b[threadIdx.x] = s[threadIdx.x];
    }"""
    a, b = np.arange(256, dtype=np.float32), np.zeros(64, np.float32)
    found = count(text, arch, (1, 1, 1), (64, 1, 1), a, b)
    np.testing.assert_array_equal(b, a[:64])
    assert found[SECTORS.format("ldgsts")] == 32
    assert found[REQUESTS.format("ldgsts")] == 2
    assert found[SECTORS.format("ld")] == 32  # as the hardware counts
    assert found[WAVEFRONTS.format("ldgsts")] == 8
