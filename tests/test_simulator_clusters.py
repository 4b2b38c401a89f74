"""Clusters in the simulator: distributed shared memory, their barrier, st.async; mistakes are named."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.errors import UsageError
from autotune.simulator import Report, UnsupportedPTX, simulate

HEAD = """
__device__ unsigned to_shared(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ unsigned of_block(unsigned address, unsigned rank) {
    unsigned there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}
__device__ float read(const float* here, unsigned rank) {
    float value;
    const unsigned there = of_block(to_shared(here), rank);
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(there) : "memory");  // read
    return value;
}
__device__ void arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ void wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ void meet() { arrive(); wait(); }
__device__ unsigned rank_here() { unsigned r; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
"""
# Each block adds up what all four blocks of its cluster have at its threads' places.
PULL = (
    HEAD
    + """extern "C" __global__ void __cluster_dims__(4) k(const float* a, float* b) {
    __shared__ float s[64];
    s[threadIdx.x] = a[blockIdx.x * 64 + threadIdx.x];
    FIRST
    float sum = 0.0f;
    for (int r = 0; r < 4; ++r)
        sum += read(&s[threadIdx.x], r);
    b[blockIdx.x * 64 + threadIdx.x] = sum;
    LAST
}  // end
"""
)
# Each block sends its numbers to the next block of its cluster, which waits for their bytes.
PUSH = (
    HEAD
    + """extern "C" __global__ void __cluster_dims__(2) k(const float* a, float* b) {
    __shared__ __align__(16) float s[64];
    __shared__ unsigned long long full;
    const unsigned other = rank_here() ^ 1;
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(to_shared(&full)) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 256;"
            :: "r"(to_shared(&full)) : "memory");
    }
    BEFORE
    const float* from = a + blockIdx.x * 64 + threadIdx.x * 4;
    if (threadIdx.x < 16)
        asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32"
            " [%0], { %1, %2, %3, %4 }, [%5];" :: "r"(of_block(to_shared(s + threadIdx.x * 4), other)),
            "f"(from[0]), "f"(from[1]), "f"(from[2]), "f"(from[3]),
            "r"(of_block(to_shared(&full), REPORTS)) : "memory");
    WAIT
    b[blockIdx.x * 64 + threadIdx.x] = s[threadIdx.x];
}
"""
)
# What a thread reads between arriving and waiting, of a block that may not have arrived or may already go on.
AHEAD = "b[blockIdx.x * 64 + threadIdx.x] = read(&s[threadIdx.x], (rank_here() + 1) % 4);"
ONE_FIRST, ONE_LAST = (
    f"if (__builtin_expect(rank_here() == 0, {likely})) {{ arrive(); {AHEAD} wait(); }} else meet();"
    for likely in (1, 0)
)
SHOWN = 'asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); wait();'
FULL = """asm volatile("{ .reg .pred p;"
        "AGAIN: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], 0;"
        "@p bra DONE; bra AGAIN; DONE: }" :: "r"(to_shared(&full)) : "memory");"""
A = np.random.default_rng(3).standard_normal((8, 64)).astype(np.float32)


def run(
    text: str, *, grid: int | tuple[int, ...] = 8, threads: int = 64, **marks: str
) -> tuple[Report, np.ndarray]:
    for mark, words in marks.items():
        text = text.replace(mark, words)
    b = np.zeros_like(A)
    return simulate(text, grid, threads, [A, b], options=["-lineinfo"]), b


def line_of(text: str, mark: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if mark in line)


def test_blocks_read_each_others_shared_memory() -> None:
    report, b = run(PULL, FIRST="meet();", LAST="meet();")
    assert (report.faults, report.notes) == ((), ())
    sums = A.reshape(2, 4, 64).cumsum(1, dtype=np.float32)[:, 3]  # in the order of the kernel
    np.testing.assert_array_equal(b, np.repeat(sums, 4, axis=0))


@pytest.mark.parametrize(
    ("first", "last", "kind", "words"),
    [
        ("", "meet();", "shared-race", "no barrier of the cluster"),
        ("__syncthreads();", "meet();", "shared-race", "no barrier of the cluster"),
        ('asm volatile("barrier.cluster.arrive.relaxed;"); wait();', "meet();", "shared-race", "thread"),
        ("meet();", "", "early-exit", "read its shared memory"),
        ("meet();", "__syncthreads();", "early-exit", "read its shared memory"),
        ("meet();", "__syncthreads(); s[threadIdx.x] = sum; meet();", "shared-race", "read"),
        (f"arrive(); {AHEAD} wait();", "meet();", "shared-race", "no barrier of the cluster"),
        (f"meet(); arrive(); {AHEAD} wait(); s[threadIdx.x] = 0.0f;", "meet();", "shared-race", "read"),
        (f"meet(); {ONE_FIRST} s[threadIdx.x] = 0.0f;", "meet();", "shared-race", "read"),
        (f"meet(); {ONE_LAST} s[threadIdx.x] = 0.0f;", "meet();", "shared-race", "read"),
        (ONE_FIRST, "meet();", "shared-race", "no barrier of the cluster"),
        (ONE_LAST, "meet();", "shared-race", "no barrier of the cluster"),
        ("meet();", ONE_FIRST, "early-exit", "read its shared memory"),
        ("meet();", ONE_LAST, "early-exit", "has ended"),
        ("meet();", "arrive(); arrive(); wait();", "deadlock", "did not wait"),
        ("wait();", "", "deadlock", "did not arrive"),
        ('meet(); if (rank_here() == 0) asm volatile("exit;");', "meet();", "early-exit", "has ended"),
        ("meet(); b[1] = read(s, 4);", "meet();", "out-of-bounds", "shared memory"),
    ],
)  # fmt: skip
def test_what_lies_between_is_missed(first: str, last: str, kind: str, words: str) -> None:
    report, _ = run(PULL, FIRST=first, LAST=last)
    assert [fault.kind for fault in report.faults] == [kind]
    assert words in report.faults[0].message


@pytest.mark.parametrize(
    "between",
    [
        f"arrive(); {AHEAD} wait();",
        f"{ONE_FIRST} {ONE_LAST}",
        f'asm volatile("barrier.cluster.arrive.relaxed;"); {AHEAD} wait();',
    ],
)
def test_what_an_earlier_barrier_showed_may_be_read_before_waiting_at_the_next(between: str) -> None:
    report, _ = run(PULL, FIRST=f"meet(); {between} meet(); s[threadIdx.x] = 0.0f; meet();", LAST="meet();")
    assert (report.faults, report.notes) == ((), ())


def test_faults_name_line_and_block() -> None:
    text = PULL.replace("FIRST", "__syncthreads();").replace("LAST", "meet();")
    fault = run(text)[0].faults[0]
    assert (fault.line, fault.where) == (line_of(text, "// read"), "shared")
    assert fault.message.endswith("and no barrier of the cluster lies between")
    text = PULL.replace("FIRST", "meet();").replace("LAST", "")
    assert run(text)[0].faults[0].line == line_of(text, "// end")


@pytest.mark.parametrize("arch", ["sm_90", "sm_120"])
def test_stores_that_an_mbarrier_counts(arch: str) -> None:
    text = PUSH.replace("BEFORE", SHOWN).replace("WAIT", FULL).replace("REPORTS", "other")
    b = np.zeros_like(A)
    report = simulate(text, 8, 64, [A, b], arch=arch)
    assert (report.faults, report.notes) == ((), ())
    np.testing.assert_array_equal(b, A.reshape(4, 2, 64)[:, ::-1].reshape(8, 64))
    assert report.counters is not None
    assert report.counters["smsp__inst_executed_op_shared_st.sum"] == 8


@pytest.mark.parametrize(
    ("before", "wait", "reports", "kind", "words"),
    [
        (SHOWN, "", "other", "async-copy", "did not wait for its mbarrier"),
        ("__syncthreads();", FULL, "other", "uninitialised-read", "since the barrier"),
        (SHOWN, FULL, "other ^ 1", "out-of-bounds", "mbarrier of another"),
        (f"{SHOWN} s[threadIdx.x] = 0.0f;", FULL, "other", "shared-race", "wrote"),
    ],
)
def test_stores_that_lack_an_order(before: str, wait: str, reports: str, kind: str, words: str) -> None:
    report, _ = run(PUSH, BEFORE=before, WAIT=wait, REPORTS=reports)
    assert [fault.kind for fault in report.faults] == [kind]
    assert words in report.faults[0].message


def test_generic_addresses_and_atomics() -> None:
    text = (
        HEAD
        + """extern "C" __global__ void __cluster_dims__(2, 1, 1) k(const float* a, float* b) {
        __shared__ int bins[4];
        if (threadIdx.x < 4) bins[threadIdx.x] = 0;
        meet();
        int* theirs;
        asm("mapa.u64 %0, %1, %2;" : "=l"(theirs) : "l"(bins), "r"(threadIdx.x % 2));
        atomicAdd(theirs + threadIdx.x % 4, 1);
        meet();
        if (threadIdx.x < 4) b[blockIdx.x * 4 + threadIdx.x] = bins[threadIdx.x];
    }"""
    )
    report, b = run(text, grid=2)
    assert report.faults == ()
    np.testing.assert_array_equal(b.reshape(-1)[:8], [32, 0, 32, 0, 0, 32, 0, 32])


def test_the_barrier_orders_global_memory() -> None:
    text = (
        HEAD
        + """extern "C" __global__ void __cluster_dims__(2) k(const float* a, float* b) {
        b[blockIdx.x * 64 + threadIdx.x] = a[blockIdx.x * 64 + threadIdx.x];
        MEET
        const float other = b[(blockIdx.x ^ 1) * 64 + threadIdx.x];
        meet();
        b[blockIdx.x * 64 + threadIdx.x] = other;
    }"""
    )
    report, b = run(text, MEET="meet();")
    assert report.faults == ()
    np.testing.assert_array_equal(b, A.reshape(4, 2, 64)[:, ::-1].reshape(8, 64))
    assert run(text, MEET="__syncthreads();")[0].faults[0].kind == "global-race"
    assert run(text.replace("^ 1", "^ 2"), MEET="meet();")[0].faults[0].kind == "global-race"


def test_registers_of_clusters() -> None:
    names = ("cluster_ctarank", "cluster_nctarank", "cluster_ctaid.x", "cluster_nctaid.x", "clusterid.x")
    text = 'extern "C" __global__ void __cluster_dims__(4) k(const float* a, float* b) { unsigned v;'
    for i, name in enumerate(names):
        text += f'asm("mov.u32 %0, %%{name};" : "=r"(v)); b[blockIdx.x * 64 + {i}] = v;'
    text += "}"
    report, b = run(text, threads=1)
    assert report.faults == ()
    assert b[6, :5].tolist() == [2, 4, 2, 4, 1]


def test_launches_that_clusters_forbid() -> None:
    with pytest.raises(UsageError, match=r"whole clusters of 4 blocks"):
        run(PULL, grid=6, FIRST="meet();", LAST="meet();")
    with pytest.raises(UnsupportedPTX, match=r"only such along x"):
        run(PULL.replace("dims__(4)", "dims__(2, 2)"), grid=(2, 4), FIRST="meet();", LAST="meet();")


def test_cooperative_groups() -> None:
    text = """#include <cooperative_groups.h>
    namespace cg = cooperative_groups;
    __global__ void __cluster_dims__(2) k(const float* a, float* b) {
        __shared__ float s[64];
        const cg::cluster_group cluster = cg::this_cluster();
        s[threadIdx.x] = a[blockIdx.x * 64 + threadIdx.x];
        SYNC
        b[blockIdx.x * 64 + threadIdx.x] = cluster.map_shared_rank(s, cluster.block_rank() ^ 1)[threadIdx.x];
        cluster.sync();
    }"""
    report, b = run(text, SYNC="cluster.sync();")
    assert report.faults == ()
    np.testing.assert_array_equal(b, A.reshape(4, 2, 64)[:, ::-1].reshape(8, 64))
    assert run(text, SYNC="cg::this_thread_block().sync();")[0].faults[0].kind == "shared-race"
