"""Kernels with one planted mistake each: the simulator must name it, its line, its block and its thread."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.code.compiler import Binary, compile_text
from autotune.simulator import Report, SimulationFault, run_ptx

ARCHS = ("sm_90", "sm_120")


def run(text: str, arch: str, *args: object, threads: int = 64, blocks: int = 1, **options: object) -> Report:
    binary = compile_text(text, "k", arch, ("-lineinfo",))
    assert isinstance(binary, Binary), binary
    return run_ptx(binary.ptx, "k", (blocks, 1, 1), (threads, 1, 1), args, **options)


def line_of(text: str, mark: str = "// here") -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if mark in line)


def expect(report: Report, kind: str, text: str, thread: int | None = None, block: int | None = 0) -> str:
    assert len(report.faults) == 1
    fault = report.faults[0]
    assert fault.kind == kind, fault
    assert fault.line == line_of(text), fault
    if thread is not None:
        assert fault.thread == (thread, 0, 0), fault
    if block is not None:
        assert fault.block == (block, 0, 0), fault
    with pytest.raises(SimulationFault, match=kind):
        report.raise_if_faulty()
    return fault.message


@pytest.mark.parametrize("arch", ARCHS)
def test_reads_past_the_end(arch: str) -> None:
    text = """extern "C" __global__ void k(const float* a, float* b, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i <= n)
            b[i] = 2.0f * a[i];  // here
    }"""
    whole = np.ones(1000, np.float32)
    report = run(text, arch, whole[:100], np.zeros(128, np.float32), 100, blocks=2)
    message = expect(report, "out-of-bounds", text, thread=36, block=1)
    assert "at byte 400 of argument 1, which has 400" in message
    run(text, arch, whole[:101], np.zeros(128, np.float32), 100, blocks=2).raise_if_faulty()


@pytest.mark.parametrize("arch", ARCHS)
def test_stray_pointers_meet_no_other_array(arch: str) -> None:
    text = """extern "C" __global__ void k(float* a, float* b) {
        a[(int)threadIdx.x - 1] = 1.0f;  // here
    }"""
    base = np.zeros(256, np.float32)
    report = run(text, arch, base[128:192], base[:128])
    message = expect(report, "out-of-bounds", text, thread=0)
    assert "at byte -4 of argument 1, which has 256" in message
    assert not base[:128].any()
    text = text.replace("(int)threadIdx.x - 1", "threadIdx.x * 1234567890123456ll")
    assert "far from every array" in expect(
        run(text, arch, base[128:192], base[:128]), "out-of-bounds", text, thread=1
    )


@pytest.mark.parametrize("arch", ARCHS)
def test_misaligned_vectors(arch: str) -> None:
    text = """extern "C" __global__ void k(const float* a, float4* b, int n) {
        b[threadIdx.x] = *reinterpret_cast<const float4*>(a + threadIdx.x * n);  // here
    }"""
    a, b = np.ones(4096, np.float32), np.zeros((64, 4), np.float32)
    run(text, arch, a, b, 12).raise_if_faulty()
    assert "multiple of 16" in expect(run(text, arch, a, b, 6), "misaligned", text, thread=1)
    expect(
        run(text, arch, a[1:], b, 12), "misaligned", text, thread=0
    )  # a view that begins 4 bytes into its base
    run(text, arch, a[4:], b, 12).raise_if_faulty()


@pytest.mark.parametrize("arch", ARCHS)
def test_views_at_odd_places_read_correctly(arch: str) -> None:
    text = """extern "C" __global__ void k(const float* a, float* b) { b[threadIdx.x] = a[threadIdx.x]; }"""
    base = np.arange(100, dtype=np.float32)
    out = np.zeros(200, np.float32)
    run(text, arch, base[3:67], out[7:71]).raise_if_faulty()
    np.testing.assert_array_equal(out[7:71], base[3:67])
    assert not out[:7].any()
    assert not out[71:].any()


def test_places_in_a_grid_that_runs_in_groups() -> None:
    text = """extern "C" __global__ void k(int* a) {
        int block = blockIdx.y * gridDim.x + blockIdx.x;
        a[block * 256 + threadIdx.y * 16 + threadIdx.x] = 1;  // here
    }"""
    binary = compile_text(text, "k", "sm_90", ("-lineinfo",))
    assert isinstance(binary, Binary)
    a = np.zeros(256 * 40 * 30 - 3, np.int32)
    fault = run_ptx(binary.ptx, "k", (40, 30, 1), (16, 16, 1), [a]).faults[0]
    assert (fault.block, fault.thread, fault.line) == ((39, 29, 0), (13, 15, 0), line_of(text))
    assert a[: 256 * 40 * 29].all()  # the groups before it have run


@pytest.mark.parametrize("arch", ARCHS)
def test_shared_and_local_bounds(arch: str) -> None:
    text = """extern "C" __global__ void k(float* a, int n) {
        __shared__ float s[64];
        s[threadIdx.x + n] = 1.0f;  // here
        __syncthreads();
        a[threadIdx.x] = s[63 - threadIdx.x];
    }"""
    a = np.zeros(64, np.float32)
    run(text, arch, a, 0).raise_if_faulty()
    assert expect(run(text, arch, a, 3), "out-of-bounds", text, thread=61).endswith(
        "of which the block has 256"
    )
    text = """extern "C" __global__ void k(int* a, int n) {
        int stack[8] = {1, 2, 3, 4, 5, 6, 7, 8};
        stack[a[threadIdx.x] & 7] = n;
        a[threadIdx.x] = stack[threadIdx.x / n];  // here
    }"""
    b = np.zeros(64, np.int32)
    run(text, arch, b, 8).raise_if_faulty()
    expect(run(text, arch, b, 4), "out-of-bounds", text, thread=32)
    text = """extern "C" __global__ void k(int* a, int n) {
        __align__(16) char stack[64];
        for (int i = 0; i < 64; ++i) stack[(i + a[i]) & 63] = i;
        a[threadIdx.x + 64] = *reinterpret_cast<int*>(stack + threadIdx.x / 2 * n);  // here
    }"""
    b = np.zeros(96, np.int32)
    run(text, arch, b, 4, threads=32).raise_if_faulty()
    expect(run(text, arch, b, 2, threads=32), "misaligned", text, thread=2)


@pytest.mark.parametrize("arch", ARCHS)
def test_constant_arrays_are_not_written(arch: str) -> None:
    text = """extern "C" __global__ void k(float* a) {
        a[threadIdx.x] = 1.0f;  // here
    }"""
    a = np.zeros(64, np.float32)
    a.flags.writeable = False
    expect(run(text, arch, a), "read-only", text, thread=0)


RACES = {
    "write after read": """extern "C" __global__ void k(float* a, int n) {
        __shared__ float s[64];
        for (int t = 0; t < n; ++t) {
            s[threadIdx.x] = a[threadIdx.x] + t;  // here
            __syncthreads();
            a[threadIdx.x] = s[63 - threadIdx.x];
        }
    }""",
    "read after write": """extern "C" __global__ void k(float* a, int n) {
        __shared__ float s[64];
        s[threadIdx.x] = a[threadIdx.x];
        a[threadIdx.x] = s[threadIdx.x ^ 1];  // here
    }""",
    "write after write": """extern "C" __global__ void k(float* a, int n) {
        __shared__ float s[64];
        s[threadIdx.x] = a[threadIdx.x];
        s[(threadIdx.x + 32) & 63] = n;  // here
        __syncthreads();
        a[threadIdx.x] = s[threadIdx.x];
    }""",
    "write with write": """extern "C" __global__ void k(float* a, int n) {
        __shared__ float s[64];
        s[threadIdx.x / 2] = a[threadIdx.x] + threadIdx.x;  // here
        __syncthreads();
        a[threadIdx.x] = s[threadIdx.x / 2];
    }""",
    "vector over scalar": """extern "C" __global__ void k(float* a, int n) {
        __shared__ __align__(16) float s[64];
        s[threadIdx.x] = a[threadIdx.x];
        if (threadIdx.x < 16)
            a[threadIdx.x] = reinterpret_cast<float4*>(s)[threadIdx.x].z;  // here
    }""",
    "atomic after write": """extern "C" __global__ void k(float* a, int n) {
        __shared__ float s[64];
        s[threadIdx.x] = 0.0f;
        atomicAdd(s + (threadIdx.x & 7), 1.0f);  // here
        __syncthreads();
        a[threadIdx.x] = s[threadIdx.x];
    }""",
    "an update by several warps": """extern "C" __global__ void k(float* a, int n) {
        __shared__ float s[1];
        s[0] = 1.0f;
        __syncthreads();
        s[0] += 1.0f;  // here
        __syncthreads();
        a[threadIdx.x] = s[0];
    }""",
    "neighbouring bytes": """extern "C" __global__ void k(float* a, int n) {
        __shared__ unsigned char s[256];
        s[threadIdx.x] = n + threadIdx.x;
        s[(threadIdx.x + 1) & 63] = n;  // here
        __syncthreads();
        a[threadIdx.x] = s[threadIdx.x];
    }""",
}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", RACES)
def test_races(name: str, arch: str) -> None:
    text = RACES[name]
    a = np.ones(64, np.float32)
    report = run(text, arch, a, 4)
    expect(report, "shared-race", text)
    fault = report.faults[0]
    assert fault.where == "shared"
    assert fault.address is not None
    assert not run(text, arch, a, 4, checks=False).faults  # lock step hides it


CLEAN = {
    "double buffer": """extern "C" __global__ void k(float* a, int n) {
        __shared__ float s[2][64];
        s[0][threadIdx.x] = a[threadIdx.x];
        __syncthreads();
        for (int t = 0; t < n; ++t) {
            s[(t + 1) & 1][threadIdx.x] = s[t & 1][threadIdx.x ^ 37] + 1;
            __syncthreads();
        }
        a[threadIdx.x] = s[n & 1][63 - threadIdx.x];
    }""",
    "own words": """extern "C" __global__ void k(float* a, int n) {
        __shared__ float s[64];
        s[threadIdx.x] = a[threadIdx.x];
        for (int t = 0; t < n; ++t) s[threadIdx.x] += s[threadIdx.x] * t;
        a[threadIdx.x] = s[threadIdx.x];
    }""",
    "atomics of one thread": """extern "C" __global__ void k(float* a, int n) {
        __shared__ float s[64];
        s[threadIdx.x] = a[threadIdx.x];
        atomicAdd(s + threadIdx.x, 1.0f);
        a[threadIdx.x] = s[threadIdx.x];
        s[threadIdx.x] = 2.0f;
    }""",
    "one thread writes": """extern "C" __global__ void k(float* a, int n) {
        __shared__ float s[1];
        for (int t = 0; t < n; ++t) {
            if (threadIdx.x == t) s[0] = a[t] + t;
            __syncthreads();
            a[threadIdx.x] += s[0];
            __syncthreads();
        }
    }""",
    "bytes of one word": """extern "C" __global__ void k(float* a, int n) {
        __shared__ unsigned char s[64];
        s[threadIdx.x] = n + threadIdx.x;
        a[threadIdx.x] = s[threadIdx.x];
    }""",
    "atomics": """extern "C" __global__ void k(float* a, int n) {
        __shared__ float s[8];
        if (threadIdx.x < 8) s[threadIdx.x] = 0;
        __syncthreads();
        atomicAdd(s + (threadIdx.x & 7), a[threadIdx.x]);
        atomicAdd(s + (threadIdx.x & 3), 1.0f);
        __syncthreads();
        a[threadIdx.x] = s[threadIdx.x & 7];
    }""",
    "warp sync": """extern "C" __global__ void k(float* a, int n) {
        __shared__ float s[64];
        s[threadIdx.x] = a[threadIdx.x];
        __syncwarp();
        float v = s[threadIdx.x ^ 7];
        __syncwarp();
        s[threadIdx.x] = v + 1;
        __syncwarp();
        a[threadIdx.x] = s[threadIdx.x ^ 31];
    }""",
    "blocks in different epochs": """extern "C" __global__ void k(float* a, int n) {
        __shared__ float s[64];
        for (int t = 0; t < n + 3 * (int)blockIdx.x; ++t) {
            s[threadIdx.x] = t;
            __syncthreads();
            a[blockIdx.x * 64 + threadIdx.x] += s[threadIdx.x ^ 5];
            __syncthreads();
        }
    }""",
    "early exit": """extern "C" __global__ void k(float* a, int n) {
        __shared__ float s[64];
        s[threadIdx.x] = a[threadIdx.x];
        __syncthreads();
        if (threadIdx.x >= 40) return;
        a[threadIdx.x] = s[threadIdx.x + 20];
    }""",
}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", CLEAN)
def test_clean_kernels_have_no_faults(name: str, arch: str) -> None:
    blocks = 3 if "blocks" in name else 1
    a = np.ones(64 * blocks, np.float32)
    report = run(CLEAN[name], arch, a, 4, blocks=blocks)
    assert report.faults == ()
    assert report.raise_if_faulty() is report


@pytest.mark.parametrize("arch", ARCHS)
def test_warp_sync_orders_only_its_warp(arch: str) -> None:
    text = """extern "C" __global__ void k(float* a) {
        __shared__ float s[64];
        s[threadIdx.x] = a[threadIdx.x];
        __syncwarp();
        a[threadIdx.x] = s[threadIdx.x ^ 32];  // here
    }"""
    expect(run(text, arch, np.ones(64, np.float32)), "shared-race", text)


@pytest.mark.parametrize("arch", ARCHS)
def test_uninitialised_shared_memory(arch: str) -> None:
    text = """extern "C" __global__ void k(float* a) {
        __shared__ float s[65];
        s[threadIdx.x] = a[threadIdx.x];
        __syncthreads();
        a[threadIdx.x] = s[threadIdx.x + 1];  // here
    }"""
    expect(run(text, arch, np.ones(64, np.float32)), "uninitialised-read", text, thread=63)


COPY = """extern "C" __global__ void k(const float* a, float* b, int n) {{
    __shared__ __align__(16) float s[2][256];
    unsigned to = (unsigned)__cvta_generic_to_shared(&s[0][threadIdx.x * 4]);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
        :: "r"(to), "l"(a + threadIdx.x * 4), "r"(n) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;"
        :: "r"(to + 1024), "l"(a + threadIdx.x) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
    asm volatile("cp.async.wait_group {pending};" ::: "memory");
    {barrier}
    b[threadIdx.x] = s[0][(threadIdx.x * 4 + {shift}) & 255];  // here
}}"""


@pytest.mark.parametrize("arch", ARCHS)
def test_async_copies(arch: str) -> None:
    a, b = np.arange(256, dtype=np.float32), np.zeros(64, np.float32)
    good = COPY.format(pending=1, barrier="__syncthreads();", shift=9)
    run(good, arch, a, b, 16).raise_if_faulty()
    np.testing.assert_array_equal(b, a[(np.arange(64) * 4 + 9) & 255])
    run(good, arch, a, b, 4).raise_if_faulty()  # the rest becomes zero
    assert not b.any()
    own = COPY.format(pending=1, barrier="", shift=2)  # a thread's own copy needs no barrier
    run(own, arch, a, b, 12).raise_if_faulty()
    np.testing.assert_array_equal(b, a[2::4])
    unwaited = COPY.format(pending=2, barrier="__syncthreads();", shift=9)
    assert "no cp.async.wait_group" in expect(run(unwaited, arch, a, b, 16), "async-copy", unwaited)
    unsynced = COPY.format(pending=0, barrier="", shift=9)
    assert "no barrier after its wait" in expect(run(unsynced, arch, a, b, 16), "async-copy", unsynced)


@pytest.mark.parametrize("arch", ARCHS)
def test_async_copies_check_their_source(arch: str) -> None:
    text = COPY.format(pending=0, barrier="__syncthreads();", shift=0).replace("  // here", "")
    text = text.replace('16, %2;"', '16, %2;"  // here')
    a, b = np.arange(300, dtype=np.float32), np.zeros(64, np.float32)
    expect(run(text, arch, a[:250], b, 16), "out-of-bounds", text, thread=62)
    expect(run(text, arch, a[2:], b, 16), "misaligned", text, thread=0)
    run(text, arch, a[:1], b, 0)  # nothing is read where the size is 0


@pytest.mark.parametrize("arch", ARCHS)
def test_divergent_barriers(arch: str) -> None:
    text = """extern "C" __global__ void k(float* a) {
        __shared__ float s[64];
        s[threadIdx.x] = a[blockIdx.x * 64 + threadIdx.x];
        if (threadIdx.x < 16) {
            __syncthreads();  // here
            a[blockIdx.x * 64 + threadIdx.x] = s[63 - threadIdx.x];
        } else {
            a[blockIdx.x * 64 + threadIdx.x] += 3.0f;
            __syncthreads();
            a[blockIdx.x * 64 + threadIdx.x] = s[threadIdx.x] * 2;
        }
    }"""
    message = expect(run(text, arch, np.ones(128, np.float32), blocks=2), "divergent-barrier", text, thread=0)
    assert f"16 at line {line_of(text)}" in message


@pytest.mark.parametrize("arch", ARCHS)
def test_named_barriers_synchronise_some_warps(arch: str) -> None:
    text = """extern "C" __global__ void k(float* a) {
        __shared__ float s[32];
        if (threadIdx.x < 32) {
            s[threadIdx.x] = a[threadIdx.x];
            asm volatile("bar.arrive 1, 64;" ::: "memory");
        } else {
            asm volatile("bar.sync 1, %0;" :: "n"(WAIT) : "memory");  // here
            a[threadIdx.x] = s[63 - threadIdx.x];
        }
    }"""
    a = np.arange(64, dtype=np.float32)
    run(text.replace("WAIT", "64"), arch, a).raise_if_faulty()
    np.testing.assert_array_equal(a[32:], np.arange(32)[::-1])
    expect(run(text.replace("WAIT", "96"), arch, a), "deadlock", text, thread=32)
    missing = text.replace(
        'bar.sync 1, %0;" :: "n"(WAIT)', 'bar.sync %1, 64;" :: "n"(0), "r"(16 + (int)a[0])'
    )
    assert "a block has 16" in expect(run(missing, arch, a), "deadlock", text, thread=32)


@pytest.mark.parametrize("arch", ARCHS)
def test_warp_operations_that_lack_lanes(arch: str) -> None:
    text = """extern "C" __global__ void k(float* a) {
        if (threadIdx.x < 40) {
            a[threadIdx.x] = __shfl_xor_sync(0xffffffff, a[threadIdx.x], 1);  // here
        } else {
            __syncthreads();
            a[threadIdx.x] *= 2.0f;
        }
    }"""
    expect(run(text, arch, np.ones(64, np.float32)), "divergent-warp", text, thread=32)


@pytest.mark.parametrize("arch", ARCHS)
def test_two_blocks_write_one_place(arch: str) -> None:
    text = """extern "C" __global__ void k(float* a, int n) {
        a[blockIdx.x * n + threadIdx.x] = blockIdx.x;  // here
    }"""
    a = np.zeros(64 * 300, np.float32)
    run(text, arch, a, 64, blocks=300).raise_if_faulty()
    message = expect(run(text, arch, a, 63, blocks=300), "write-conflict", text, block=None)
    assert "of block (1, 0, 0) stores too" in message
    assert not run(text, arch, a, 63, blocks=300, checks=False).faults
    atomics = text.replace("a[blockIdx.x * n + threadIdx.x] = blockIdx.x", "atomicAdd(a + threadIdx.x, 1.0f)")
    run(atomics, arch, a, 0, blocks=4).raise_if_faulty()
    again = text.replace(
        "a[blockIdx.x * n + threadIdx.x] = blockIdx.x", "a[0] = 1.0f; a[1] = 2.0f; a[0] = 3.0f"
    )
    run(again, arch, a, 0).raise_if_faulty()  # one block may write a place as often as it likes


@pytest.mark.parametrize("arch", ARCHS)
def test_bytes_of_one_word_from_two_blocks(arch: str) -> None:
    text = """extern "C" __global__ void k(unsigned char* a, int n) {
        a[blockIdx.x * n + threadIdx.x] = blockIdx.x;  // here
    }"""
    a = np.zeros(200, np.uint8)
    run(text, arch, a, 65, threads=65, blocks=3).raise_if_faulty()
    expect(run(text, arch, a, 64, threads=65, blocks=3), "write-conflict", text, block=None)


@pytest.mark.parametrize("arch", ARCHS)
def test_endless_loops(arch: str) -> None:
    text = """extern "C" __global__ void k(volatile int* a) {
        while (a[threadIdx.x] == 0) a[threadIdx.x + 64] += 1;  // here
    }"""
    a = np.zeros(128, np.int32)
    assert "2000 basic blocks" in expect(run(text, arch, a, max_steps=2000), "endless-loop", text)
    assert a[64] > 100


@pytest.mark.parametrize("arch", ARCHS)
def test_traps(arch: str) -> None:
    text = """extern "C" __global__ void k(int* a) {
        if (threadIdx.x == 33) __trap();  // here
        a[threadIdx.x] = 1;
    }"""
    expect(run(text, arch, np.zeros(64, np.int32)), "trap", text, thread=33)


def test_without_line_information_there_is_no_line() -> None:
    binary = compile_text('extern "C" __global__ void k(float* a) { a[threadIdx.x] = 1; }', "k", "sm_90")
    assert isinstance(binary, Binary)
    report = run_ptx(binary.ptx, "k", (1, 1, 1), (64, 1, 1), [np.zeros(10, np.float32)])
    assert report.faults[0].line is None
    assert "line" not in str(report.faults[0])
    assert "thread (10, 0, 0)" in str(report.faults[0])


BULK = """
__device__ __forceinline__ unsigned to_shared(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void wait(unsigned bar, unsigned parity) {
    asm volatile("{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;"
        "@p bra DONE; bra AGAIN; DONE: }"
        :: "r"(bar), "r"(parity) : "memory");
}
extern "C" __global__ void k(const float* a, float* b, int n) {
    __shared__ __align__(16) float s[2][256];
    __shared__ unsigned long long full[2], empty[2];
    const unsigned f = to_shared(full), e = to_shared(empty);
    if (threadIdx.x == 0)
        for (int i = 0; i < 2; ++i) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(f + 8 * i) : "memory");
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
                :: "r"(e + 8 * i), "n"(READERS) : "memory");
        }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    __syncthreads();
    if (threadIdx.x >= 64) {
        if (threadIdx.x == 64)
            for (int t = 0; t < n; ++t) {
                const int i = t & 1;
                if (t >= 2) wait(e + 8 * i, (t / 2 - 1) & 1);
                asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 1024;"
                    :: "r"(f + 8 * i) : "memory");
                asm volatile(  // copy
                   "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 1024, [%2];"
                    :: "r"(to_shared(s[i])), "l"(a + t * 256), "r"(f + 8 * i) : "memory");
            }
    } else {
        float sum = 0.0f;
        for (int t = 0; t < n; ++t) {
            const int i = t & 1;
            WAIT
            sum += s[i][threadIdx.x * 4 + 1];  // here
            asm volatile("{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0]; }"
                :: "r"(e + 8 * i) : "memory");
        }
        b[threadIdx.x] = sum;
    }
}
"""
WAIT = "wait(f + 8 * i, (t / 2) & 1);"


@pytest.mark.parametrize("arch", ARCHS)
def test_bulk_copies_and_mbarriers(arch: str) -> None:
    n = 7
    a, b = np.arange(256 * n, dtype=np.float32), np.zeros(64, np.float32)
    good = BULK.replace("WAIT", WAIT).replace("READERS", "64")
    report = run(good, arch, a, b, n, threads=96, blocks=1)
    assert report.faults == ()
    np.testing.assert_array_equal(b, a.reshape(n, 256)[:, 1::4].sum(0))
    unwaited = BULK.replace("WAIT", "").replace("READERS", "64")
    report = run(unwaited, arch, a, b, n, threads=96)
    assert report.faults[0].line == line_of(unwaited)
    assert report.faults[0].kind in ("async-copy", "uninitialised-read")  # nothing may have come yet
    late = unwaited.replace("float sum = 0.0f;", "float sum = 0.0f; wait(f + 8, 0);")
    assert "did not wait" in expect(run(late, arch, a, b, n, threads=96), "async-copy", late)
    early = good.replace("if (t >= 2) wait", "if (t >= 200) wait")
    report = run(early, arch, a, b, n, threads=96)
    assert report.faults[0].line == line_of(early, "// copy")
    assert report.faults[0].kind in ("shared-race", "async-copy")
    stuck = BULK.replace("WAIT", WAIT).replace("READERS", "65")
    assert "mbarrier" in run(stuck, arch, a, b, n, threads=96).faults[0].message
    assert run(stuck, arch, a, b, n, threads=96).faults[0].kind == "deadlock"
    report = run(good, arch, a[: 256 * n - 2], b, n, threads=96)
    assert report.faults[0].kind == "out-of-bounds"
    assert report.faults[0].line == line_of(good, "// copy")
    report = run(good, arch, a[2:].copy()[2:], b, n - 1, threads=96)
    assert report.faults[0].kind == "misaligned"


@pytest.mark.parametrize("arch", ARCHS)
def test_async_copies_shared_within_a_warp(arch: str) -> None:
    text = COPY.format(pending=1, barrier="__syncwarp();", shift=4)
    a, b = np.arange(256, dtype=np.float32), np.zeros(32, np.float32)
    run(text.replace("& 255", "& 127"), arch, a, b, 16, threads=32).raise_if_faulty()
    np.testing.assert_array_equal(b, a[(np.arange(32) * 4 + 4) & 127])
    expect(run(text, arch, a, np.zeros(64, np.float32), 16), "async-copy", text)


@pytest.mark.parametrize("tebibytes", range(-4, 5))
def test_a_round_distance_never_leads_into_another_array(tebibytes):
    text = """
constexpr long long far[2] = {1, 2};
extern "C" __global__ void k(float* a, float* b, long long floats) { a[floats] = b[0] + far[threadIdx.x]; }
"""
    a, b = np.zeros(4, np.float32), np.zeros(4, np.float32)
    binary = compile_text(text, "k", "sm_90", ("-lineinfo",))
    report = run_ptx(binary.ptx, "k", (1, 1, 1), (1, 1, 1), (a, b, tebibytes << 38))
    kinds = [fault.kind for fault in report.faults]
    assert kinds == (["out-of-bounds"] if tebibytes else [])
