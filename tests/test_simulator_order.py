"""Who may touch what when: races in global memory, what orders blocks, and what is only a note."""

from __future__ import annotations

import numpy as np
import pytest
from test_simulator_faults import ARCHS, expect, line_of, run

from autotune.errors import UsageError

K = 'extern "C" __global__ void k'

RACES = {
    "an update by the threads of a block": (
        "(float* x) {\n x[0] += 1.0f;  // here\n}",
        "global-race",
        1,
    ),
    "an update by blocks": (
        "(float* x) {\n if (threadIdx.x == 0)\n x[0] += 1.0f;  // here\n}",
        "global-race",
        4,
    ),
    "a neighbour of another block": (
        "(float* x) {\n x[blockIdx.x] = x[(blockIdx.x + 1) % gridDim.x] + 1.0f;  // here\n}",
        "global-race",
        4,
    ),
    "two warps overwrite each other": (
        "(float* x) {\n x[threadIdx.x % 32] = threadIdx.x;  // here\n}",
        "global-race",
        1,
    ),
    "a neighbour's value without a barrier": (
        "(float* x) {\n x[threadIdx.x] = 1.0f;\n x[64 + threadIdx.x] = x[threadIdx.x ^ 33];  // here\n}",
        "global-race",
        1,
    ),
    "a vector over what another thread writes": (
        "(float4* x) {\n if (threadIdx.x < 16) x[threadIdx.x] = make_float4(1, 2, 3, threadIdx.x);\n"
        " else ((float*)x)[threadIdx.x] = 1.0f;  // here\n}",
        "global-race",
        1,
    ),
    "an update without an atomic operation": (
        "(float* x) {\n if (blockIdx.x) atomicAdd(x, 1.0f);\n else x[0] = 2.0f;  // here\n}",
        "write-conflict",
        2,
    ),
    "a variable of the text": (
        "(float* x) {\n total = total + x[threadIdx.x];  // here\n}",
        "global-race",
        1,
    ),
    "a pointer from memory": (
        "(float* x) {\n float** p = (float**)(x + 64); if (threadIdx.x == 0) *p = x;\n __syncthreads();\n"
        " (*p)[threadIdx.x / 2] = threadIdx.x;  // here\n}",
        "global-race",
        1,
    ),
}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", RACES)
def test_races_in_global_memory(name: str, arch: str) -> None:
    body, kind, blocks = RACES[name]
    text = f"__device__ float total;\n{K}{body}"
    x = np.zeros(256, np.float32)
    expect(run(text, arch, x, blocks=blocks), kind, text, block=None)
    assert not run(text, arch, x, blocks=blocks, checks=False).faults


CLEAN = {
    "what a barrier orders": "x[threadIdx.x] = 1; __syncthreads(); x[threadIdx.x ^ 33] += 1; __syncthreads();"
    "if (threadIdx.x == 0) for (int i = 0; i < 64; ++i) x[64] += x[i];",
    "what a warp's barrier orders": "x[threadIdx.x] = 1; __syncwarp();"
    "x[64 + threadIdx.x] = x[threadIdx.x ^ 7];",
    "atomic operations of blocks": "atomicAdd(x, 1.0f); atomicMax((int*)x + 1, threadIdx.x);",
    "each its own": "x[blockIdx.x * 64 + threadIdx.x] += 1; x[blockIdx.x * 64 + threadIdx.x] *= 2;",
    "what nobody writes": "x[blockIdx.x * 64 + threadIdx.x] = y[threadIdx.x / 3] + y[0];",
    "volatile flags": "volatile float* v = x;"
    "if (threadIdx.x == 0) { v[0] = blockIdx.x; x[64 + blockIdx.x] = v[0]; }",
}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", CLEAN)
def test_ordered_accesses_are_neither_faults_nor_notes(name: str, arch: str) -> None:
    blocks = 1 if "orders" in name else 3
    text = f"{K}(float* x, const float* y) {{ {CLEAN[name]} }}"
    report = run(text, arch, np.zeros(256, np.float32), np.ones(64, np.float32), blocks=blocks)
    assert report.faults == ()
    assert report.notes == ()


LAST_BLOCK = (
    K
    + """(const float* x, float* part, unsigned* count, float* y) {
    __shared__ float s[64];
    __shared__ bool last;
    s[threadIdx.x] = x[blockIdx.x * 64 + threadIdx.x];
    __syncthreads();
    for (int n = 32; n > 0; n /= 2) {
        if (threadIdx.x < n) s[threadIdx.x] += s[threadIdx.x + n];
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        part[blockIdx.x] = s[0];
        __threadfence();  // fence
        last = atomicInc(count, gridDim.x - 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (last) {
        float sum = 0;
        for (int i = threadIdx.x; i < gridDim.x; i += 64) sum += part[i];  // here
        atomicAdd(y, sum);
    }
}"""
)
ALL_WRITE = (
    K
    + """(float* x, unsigned* count, float* y) {
    __shared__ bool last;
    x[blockIdx.x * 64 + threadIdx.x] = blockIdx.x;
    __threadfence();
    __syncthreads();  // barrier
    if (threadIdx.x == 0) last = atomicAdd(count, 1) == gridDim.x - 1;
    __syncthreads();
    if (last)
        for (int i = 0; i < gridDim.x; ++i)
            y[threadIdx.x] += x[i * 64 + (threadIdx.x ^ 37)];  // here
}"""
)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("blocks", [7, 300])
def test_a_fence_and_an_atomic_operation_order_blocks(arch: str, blocks: int) -> None:
    x = np.arange(64 * blocks, dtype=np.float32)
    part, y = np.zeros(blocks, np.float32), np.zeros(1, np.float32)
    count = np.zeros(1, np.uint32)
    for _ in range(2):  # the counter is back at zero
        y[0] = 0
        report = run(LAST_BLOCK, arch, x, part, count, y, blocks=blocks)
        assert (report.faults, report.notes, count[0]) == ((), (), 0)
        np.testing.assert_allclose(y[0], x.sum(dtype=np.float64), rtol=1e-5)
    unfenced = LAST_BLOCK.replace("__threadfence();", "")
    assert "nothing orders" in expect(
        run(unfenced, arch, x, part, count, y, blocks=blocks), "global-race", unfenced, block=None
    )
    late = LAST_BLOCK.replace("part[blockIdx.x] = s[0];", "").replace(
        "== gridDim.x - 1;\n", "== gridDim.x - 1; part[blockIdx.x] = s[0];\n"
    )
    expect(run(late, arch, x, part, count, y, blocks=blocks), "global-race", late, block=None)
    z, y, count = np.zeros(64 * blocks, np.float32), np.zeros(64, np.float32), np.zeros(1, np.uint32)
    assert run(ALL_WRITE, arch, z, count, y, blocks=blocks).faults == ()
    np.testing.assert_array_equal(y, blocks * (blocks - 1) / 2)
    unsynced = ALL_WRITE.replace("__syncthreads();  // barrier", "")
    count[0] = 0
    expect(run(unsynced, arch, z, count, y, blocks=blocks), "global-race", unsynced, block=None)


APART = (
    K
    + """(float* x) {
    if (threadIdx.x < 32) {
        x[threadIdx.x] = 1.0f;
        __syncthreads();  // first
    } else {
        __syncthreads();
        x[threadIdx.x] = x[threadIdx.x - 32];  // here
    }
}"""
)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("checks", [True, False])
def test_whole_warps_may_wait_at_different_barriers(arch: str, checks: bool) -> None:
    x = np.zeros(64, np.float32)
    report = run(APART, arch, x, checks=checks)
    assert report.faults == ()
    assert (x == 1).all()
    (note,) = report.notes
    assert note.kind == "divergent-barrier"
    assert f"32 at line {line_of(APART, '// first')}" in note.message
    split = APART.replace("threadIdx.x < 32", "threadIdx.x < 16")
    assert run(split, arch, x, checks=checks).faults[0].kind == "divergent-barrier"


EQUAL = {
    "warps": "s[threadIdx.x / 32] = y[0]; __syncthreads(); x[threadIdx.x] = s[threadIdx.x / 32];",
    "a block": "s[0] = y[0]; __syncthreads(); x[threadIdx.x] = s[0];",
    "one warp after the other": "if (threadIdx.x < 32) s[0] = y[0]; else s[0] = 1.0f; __syncthreads();"
    " x[threadIdx.x] = s[0];",
    "blocks": "if (threadIdx.x == 0) x[0] = 1.0f;",
    "threads": "x[0] = y[0];",
}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", EQUAL)
def test_equal_values_stored_to_one_place_are_a_note(name: str, arch: str) -> None:
    text = f"{K}(float* x, const float* y) {{ __shared__ float s[2]; {EQUAL[name]} }}"
    blocks = 2 if name in ("blocks", "threads") else 1
    x, y = np.zeros(64, np.float32), np.ones(64, np.float32)
    report = run(text, arch, x, y, blocks=blocks)
    assert report.faults == ()
    assert x[0] == 1
    assert report.notes
    assert {note.line for note in report.notes} == {1}
    other = text.replace("y[0]", "threadIdx.x").replace("= 1.0f", "= blockIdx.x + threadIdx.x / 32")
    assert run(other, arch, x, y, blocks=blocks).faults[0].kind in (
        "shared-race",
        "global-race",
        "write-conflict",
    )
    read = text.replace("__syncthreads();", 'asm volatile("" ::: "memory");')
    if read != text:
        assert run(read, arch, x, y, blocks=blocks).faults[0].kind == "shared-race"
    read = text.replace("= y[0]", "= y[0] + 0.0f * x[0]").replace("x[0] = 1.0f", "x[0] = 1.0f + 0.0f * x[0]")
    if blocks == 2:
        assert run(read, arch, x, y, blocks=blocks).faults[0].kind == "global-race"


@pytest.mark.parametrize("arch", ARCHS)
def test_an_atomic_operation_made_of_compare_and_swap(arch: str) -> None:
    text = (
        K
        + """(int* x, const int* y) {
    int old = x[0], assumed;
    do {
        assumed = old;
        old = atomicCAS(x, assumed, max(assumed, y[blockIdx.x * 64 + threadIdx.x]));
    } while (old != assumed);
}"""
    )
    x, y = np.zeros(1, np.int32), np.random.default_rng(0).integers(0, 9999, 640, np.int32)
    report = run(text, arch, x, y, blocks=10)
    assert report.faults == ()
    assert x[0] == y.max()
    shared = text.replace("x[0], assumed", "s[0], assumed").replace("CAS(x", "CAS(s")
    shared = shared.replace("    int old", "    __shared__ int s[1]; s[0] = 0; __syncthreads();\n    int old")
    shared = shared.replace("assumed);\n}", "assumed);\n    __syncthreads(); x[0] = s[0];\n}")
    x[0] = 0
    assert run(shared, arch, x, y).faults == ()
    assert x[0] == y[:64].max()
    unsynced = shared.replace("__syncthreads(); x[0]", "x[0]").replace("CAS(s, assumed, ", "Max(s, ")
    assert run(unsynced, arch, x, y).faults[0].kind == "shared-race"


@pytest.mark.parametrize("arch", ARCHS)
def test_a_shuffle_that_names_lanes_which_do_not_come(arch: str) -> None:
    text = (
        K
        + """(float* x) {
    float v = x[threadIdx.x];
    if (threadIdx.x % 32 < 16)
        v += __shfl_xor_sync(MASK, v, 1);  // here
    x[threadIdx.x] = v;
}"""
    )
    full, half = text.replace("MASK", "0xffffffffu"), text.replace("MASK", "0xffffu")
    x = np.ones(64, np.float32)
    assert "went past it" in expect(run(full, arch, x), "divergent-warp", full, thread=16)
    report = run(half, arch, x)
    assert (report.faults, report.notes) == ((), ())
    np.testing.assert_array_equal(x, np.tile(np.repeat([2, 1], 16), 2))
    last = (
        K
        + """(float* x) {
    if (threadIdx.x % 32 < 16)
        x[threadIdx.x] = __shfl_down_sync(0xffffffffu, x[threadIdx.x], N);  // here
}"""
    )
    reads = last.replace("N)", "1)")
    assert "reads lane 16" in expect(run(reads, arch, x), "divergent-warp", reads, thread=15)
    within = last.replace("N)", "0)")
    report = run(within, arch, x)
    assert report.faults == ()
    assert [note.line for note in report.notes] == [line_of(within)]
    early = text.replace("MASK", "0xffffffffu").replace(
        "if (threadIdx.x % 32 < 16)", "if (x[80] == 0) return;"
    )
    assert run(early, arch, np.zeros(96, np.float32)).faults == ()


@pytest.mark.parametrize("arch", ARCHS)
def test_global_memory_that_nothing_wrote(arch: str) -> None:
    text = (
        K + "(const float* x, float* y, float beta) {\n"
        " y[threadIdx.x] = x[threadIdx.x] + beta * y[threadIdx.x];\n}"
    )
    x, y = np.ones(64, np.float32), np.zeros(64, np.float32)
    assert run(text, arch, x, y, 0.5).faults == ()
    report = run(text, arch, x, y, 0.0, unwritten=[y])
    assert report.faults[0].kind == "uninitialised-read"
    assert "of argument 2" in report.faults[0].message
    assert report.faults[0].line == 2
    assert run(text, arch, x, y, 0.0, unwritten=[y], checks=False).faults == ()
    guarded = text.replace("beta *", "(beta == 0.0f ? 0.0f : beta *").replace("];\n}", "]);\n}")
    assert run(guarded, arch, x, y, 0.0, unwritten=[y]).faults == ()
    added = text.replace("y[threadIdx.x] = x[threadIdx.x]", "atomicAdd(y, x[threadIdx.x])").split(" + beta")[
        0
    ]
    assert run(added + ";}", arch, x, y, 0.0, unwritten=[y]).faults[0].kind == "uninitialised-read"
    with pytest.raises(UsageError, match="unwritten= has an array that is no argument"):
        run(text, arch, x, y, 0.0, unwritten=[y[:32]])
