"""FP16 products of warpgroups, and pipelines that feed them: right, or named where something is missing."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.simulator import SimulationFault, UnsupportedPTX, run_ptx, simulate

RNG = np.random.default_rng(5)

# a[64][16 slices] times b[columns][16 slices], by a warpgroup; tiles come as they are in shared memory.
PRODUCT = """// architecture sm_90a
#include <cuda_fp16.h>
constexpr int columns = COLUMNS, slices = SLICES;

__device__ unsigned long long descriptor(const __half* tile, int further, int stride)
{
    const unsigned long long address = __cvta_generic_to_shared(tile);
    return 1ull << 62 | (unsigned long long)(stride >> 4) << 32 | further >> 4 << 16 | address >> 4;
}

extern "C" __global__ void k(
    const __half* a, const __half* b, const uint4* a_tile, const uint4* b_tile, float* c)
{
    __shared__ __align__(1024) __half left[64 * 64], right[(columns + 63) / 64 * 64 * 64];
    const int i = threadIdx.x, warp = i / 32, lane = i % 32;
    for (int at = i; at < sizeof(left) / 16; at += 128) reinterpret_cast<uint4*>(left)[at] = a_tile[at];
    for (int at = i; at < sizeof(right) / 16; at += 128) reinterpret_cast<uint4*>(right)[at] = b_tile[at];
    PROXY_FENCE
    __syncthreads();
    float sum[columns / 2];
    const int row = warp * 16 + lane / 4;
    #pragma unroll
    for (int j = 0; j < columns / 2; ++j)
        sum[j] = c[(row + j % 4 / 2 * 8) * columns + j / 4 * 8 + lane % 4 * 2 + j % 2];
    unsigned x[slices][4];
    #pragma unroll
    for (int s = 0; s < slices; ++s)
        #pragma unroll
        for (int q = 0; q < 4; ++q)
            x[s][q] = *reinterpret_cast<const unsigned*>(
                a + (row + q % 2 * 8) * 16 * slices + s * 16 + lane % 4 * 2 + q / 2 * 8);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    #pragma unroll
    for (int s = 0; s < slices; ++s)
        asm volatile(
            "{ .reg .pred add; setp.ne.b32 add, %ADD, 0;"
            " wgmma.mma_async.sync.aligned.m64nCOLUMNSk16.f32.f16.f16"
            " {SUMS}, LEFT, %RIGHT, add, SIGNS; }"
            : OUTPUTS : LEFT_OPERANDS, "l"(RIGHT_TILE), "r"(ADDS || s > 0 ? 1 : 0));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    #pragma unroll
    for (int j = 0; j < columns / 2; ++j) {
        asm volatile("" : "+f"(sum[j]));
        c[(row + j % 4 / 2 * 8) * columns + j / 4 * 8 + lane % 4 * 2 + j % 2] = sum[j];
    }
}
"""


def tile(matrix: np.ndarray, turned: bool = False) -> np.ndarray:
    """Return a matrix [rows][up to 64 of k] as it lies in shared memory: rows of 64 halves, swizzled.

    Turned, a row of shared memory is one step of k for 64 rows of the matrix.
    """
    rows = -(-len(matrix) // 64) * 64
    padded = np.zeros((rows, 64), np.float16)
    padded[: len(matrix), : matrix.shape[1]] = matrix
    lines = padded.reshape(-1, 64, 64).swapaxes(1, 2).reshape(-1, 64) if turned else padded
    pieces = lines.reshape(-1, 8, 8)
    line, piece = np.arange(len(pieces))[:, None], np.arange(8)
    return pieces[line, piece ^ line % 8].reshape(-1)


def multiplied(
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    left: str = "shared",
    turned: tuple[bool, bool] = (False, False),
    **changes: str,
) -> np.ndarray:
    columns, slices = len(b), a.shape[1] // 16
    n, shared = columns // 2, left == "shared"
    places = [f"descriptor({name}, 8192, 1024) + {128 if turn else 2} * s"
              for name, turn in zip(("left", "right"), turned, strict=True)]  # fmt: skip
    registers = ", ".join(f'"r"(x[s][{q}])' for q in range(4))
    flags = ", ".join(str(int(turn)) for turn in (turned if shared else turned[1:]))
    last = n + (1 if shared else 4)
    words = {
        "LEFT_OPERANDS": f'"l"({places[0]})' if shared else registers,
        "LEFT,": f"%{n}," if shared else "{" + ", ".join(f"%{n + q}" for q in range(4)) + "},",
        "RIGHT_TILE": places[1],
        "%ADD": f"%{last + 1}",
        "%RIGHT": f"%{last}",
        "SIGNS": "1, 1, FLAGS",
        "FLAGS": flags,
        "SUMS": ", ".join(f"%{j}" for j in range(n)),
        "OUTPUTS": ", ".join(f'"+f"(sum[{j}])' for j in range(n)),
        "PROXY_FENCE": 'asm volatile("fence.proxy.async.shared::cta;" ::: "memory");',
        "ADDS": "true",
        "COLUMNS": str(columns),
        "SLICES": str(slices),
    } | changes
    text = PRODUCT
    for word, meaning in words.items():
        text = text.replace(word, meaning)
    tiles = [tile(matrix, turn).view(np.uint32) for matrix, turn in zip((a, b), turned, strict=True)]
    simulate(text, (1, 1, 1), (128, 1, 1), (a, b, *tiles, c), entry="k").raise_if_faulty()
    return c


def integers(*shape: int) -> np.ndarray:
    return RNG.integers(-9, 10, shape).astype(np.float16)


LAYOUTS = {
    "A in registers": ("registers", (False, False)),
    "A in registers, B turned": ("registers", (False, True)),
    "both in shared memory": ("shared", (False, False)),
    "A turned": ("shared", (True, False)),
    "both turned": ("shared", (True, True)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("columns", "slices"), [(8, 1), (64, 4), (200, 2)])
def test_a_warpgroup_multiplies(columns: int, slices: int, layout: str) -> None:
    a, b, c = integers(64, 16 * slices), integers(columns, 16 * slices), RNG.random((64, columns), np.float32)
    expected = np.float32(a) @ np.float32(b).T + np.float32(np.round(c * 64))
    np.testing.assert_array_equal(multiplied(a, b, np.round(c * 64), *LAYOUTS[layout]), expected)


def test_sums_may_begin_at_zero_and_operands_be_negated() -> None:
    a, b, c = integers(64, 16), integers(16, 16), np.full((64, 16), np.nan, np.float32)
    out = multiplied(a, b, c, ADDS="false", SIGNS="-1, 1, FLAGS")
    np.testing.assert_array_equal(out, -(np.float32(a) @ np.float32(b).T))


def test_subnormal_operands_count_and_sums_are_rounded_towards_zero() -> None:
    a, b = np.zeros((64, 16), np.float16), np.zeros((16, 16), np.float16)
    a[:, 0], b[:, 0] = 3 * 2.0**-24, 2.0**-1  # 1.5 2^-24, exactly
    out = multiplied(a, b, np.zeros((64, 16), np.float32))
    np.testing.assert_array_equal(out, np.float32(1.5 * 2.0**-24))
    c = np.ones((64, 16), np.float32)
    c[32:] = -1
    out = multiplied(a, b, c)
    np.testing.assert_array_equal(out[:32], 1)  # 1 + 1.5 2^-24 is nearer to 1 + 2^-23
    np.testing.assert_array_equal(out[32:], -(1 - 2.0**-23))  # 1 - 1.5 2^-24 lies between it and 1 - 2^-24


MISPLACED = {
    "no fence between proxies": ({"PROXY_FENCE": ""}, "async-product: .*wrote without fence.proxy.async"),
    "behind the end": ({"RIGHT_TILE": "descriptor(right + 4096, 8192, 1024)"}, "out-of-bounds: .*reads byte"),
    "a stride too long": ({"RIGHT_TILE": "descriptor(right, 8192, 9216)"}, "out-of-bounds: .*reads byte"),
}


@pytest.mark.parametrize("mistake", MISPLACED)
def test_operands_lie_and_are_shown_where_a_product_reads_them(mistake: str) -> None:
    changes, message = MISPLACED[mistake]
    with pytest.raises(SimulationFault, match=message):
        multiplied(integers(64, 16), integers(16, 16), np.zeros((64, 16), np.float32), **changes)


@pytest.mark.parametrize("bits", ["3ull << 62", "1ull << 62 | 1ull << 49"])
def test_other_layouts_of_shared_memory_are_refused(bits: str) -> None:
    place = f"descriptor(right, 0, 1024) & ~(3ull << 62) | {bits}"
    with pytest.raises(UnsupportedPTX, match="only the 128-byte swizzle"):
        multiplied(integers(64, 16), integers(8, 16), np.zeros((64, 8), np.float32), RIGHT_TILE=place)


@pytest.mark.parametrize("signs", ["1, 1", "1, 1, 0", "1, 1, 0, 2", "1, 3, 0, 0"])
def test_operands_that_no_assembler_takes_are_refused(signs: str) -> None:
    text = PTX.replace("1, 1, 0, 0;", f"{signs};")
    with pytest.raises(UnsupportedPTX, match=r"wgmma\.mma_async"):
        run_ptx(text, "k", 1, 128, ())


PTX = """.version 8.0
.target sm_90a
.address_size 64
.visible .entry k()
{
 .reg .pred %p<2>;
 .reg .f32 %f<5>;
 .reg .b64 %rd<2>;
 wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f1, %f2, %f3, %f4}, %rd1, %rd1, %p1, 1, 1, 0, 0;
 ret;
}
"""

# Warp 8 brings blocks of 64 x 64 halves of A (two warpgroups, one block each) and of B; it leaves first.
PIPELINE = """// architecture sm_90a
constexpr int stages = 2, block_bytes = 8192;

__device__ unsigned to_shared(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }

__device__ void wait(unsigned barrier, unsigned parity)
{
    asm volatile("{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;"
        " @p bra DONE; bra AGAIN; DONE: }" :: "r"(barrier), "r"(parity) : "memory");
}

__device__ void bring(unsigned to, const unsigned short* from, unsigned barrier)
{
    asm volatile(  // copy
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        :: "r"(to), "l"(from), "r"(BYTES), "r"(barrier) : "memory");
}

__device__ unsigned long long descriptor(unsigned address)
{
    return 1ull << 62 | 64ull << 32 | 1ull << 16 | address >> 4;
}

extern "C" __global__ void __launch_bounds__(384) k(
    const unsigned short* a, const unsigned short* b, float* c, int chunks)
{
    extern __shared__ unsigned char storage[];
    __shared__ __align__(8) unsigned long long full[stages], empty[stages];
    unsigned char* tiles = storage + (-to_shared(storage) & 1023);  // stages of two blocks of A and one of B
    const unsigned base = to_shared(tiles), f = to_shared(full), e = to_shared(empty);
    const int group = threadIdx.x / 128, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0)
        for (int s = 0; s < stages; ++s) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(f + 8 * s) : "memory");
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 2;" :: "r"(e + 8 * s) : "memory");
        }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    __syncthreads();
    if (group == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (warp != 8) return;
        unsigned chosen;
        asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(chosen));
        if (!CHOSEN) return;
        for (int t = 0; t < chunks; ++t) {
            const int s = t % stages;
            if (t >= EARLIEST) wait(e + 8 * s, t / stages - 1 & 1);
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], EXPECTED;"
                :: "r"(f + 8 * s) : "memory");
            for (int g = 0; g < 2; ++g)
                bring(base + (3 * s + g) * block_bytes, a + (t * 2 + g) * 4096, f + 8 * s);
            bring(base + (3 * s + 2) * block_bytes, b + t * 4096, f + 8 * s);
        }
        return;
    }
    MORE
    float sum[32];
    for (int t = 0; t < chunks; ++t) {
        const int s = t % stages;
        FULL
        const unsigned long long left = descriptor(base + (3 * s + group) * block_bytes);
        const unsigned long long right = descriptor(base + (3 * s + 2) * block_bytes);
        REGISTER_FENCE
        #pragma unroll
        for (int q = 0; q < 4; ++q)
            asm volatile(  // product
                "{ .reg .pred add; setp.ne.b32 add, %34, 0;"
                " wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {SUMS}, %32, %33, add, 1, 1, 0, 0; }"
                : OUTPUTS : "l"(left + 2 * q), "l"(right + 2 * q), "r"(t + q));
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        EARLY
        asm volatile("wgmma.wait_group.sync.aligned PENDING;" ::: "memory");
        RELEASE
    }
    #pragma unroll
    for (int j = 0; j < 32; ++j) asm volatile("" : "+f"(sum[j]));
    float* rows = reinterpret_cast<float*>(tiles);  // 128 x 64 of C
    BEFORE
    #pragma unroll
    for (int j = 0; j < 32; ++j)
        rows[(warp * 16 + lane / 4 + j % 4 / 2 * 8) * 64 + j / 4 * 8 + lane % 4 * 2 + j % 2] = sum[j];
    BEHIND
    for (int i = threadIdx.x; i < 128 * 64; i += 256) c[i] = rows[i];  // rows
}
"""
ARRIVE = """if (threadIdx.x % 128 == 0)
            asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(e + 8 * s) : "memory");"""
MEET = 'asm volatile("bar.sync 1, 256;" ::: "memory");'


def pipeline(**changes: str) -> str:
    words = {
        "MORE": 'asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");',
        "CHOSEN": "chosen",
        "EARLIEST": "stages",
        "EXPECTED": "24576",
        "BYTES": "8192",
        "FULL": "wait(f + 8 * s, t / stages & 1);",
        "REGISTER_FENCE": 'asm volatile("wgmma.fence.sync.aligned;" ::: "memory");',
        "EARLY": "",
        "PENDING": "0",
        "RELEASE": f'asm volatile("bar.sync %0, 128;" :: "r"(2 + group) : "memory"); {ARRIVE}',
        "BEFORE": MEET,
        "BEHIND": MEET,
        "SUMS": ", ".join(f"%{j}" for j in range(32)),
        "OUTPUTS": ", ".join(f'"+f"(sum[{j}])' for j in range(32)),
    } | changes
    text = PIPELINE
    for word, meaning in words.items():
        text = text.replace(word, meaning)
    return text


def run_pipeline(text: str, chunks: int = 5) -> tuple[np.ndarray, np.ndarray]:
    a, b = integers(128, 64 * chunks), integers(64, 64 * chunks)
    a_blocks = np.concatenate([tile(a[:, 64 * t : 64 * t + 64]) for t in range(chunks)])
    b_blocks = np.concatenate([tile(b[:, 64 * t : 64 * t + 64]) for t in range(chunks)])
    c = np.full((128, 64), np.nan, np.float32)
    report = simulate(
        text, (1, 1, 1), (384, 1, 1), (a_blocks, b_blocks, c, chunks), entry="k", shared_bytes=58368
    )
    report.raise_if_faulty()
    assert report.notes == ()
    return c, np.float32(a) @ np.float32(b).T


def test_a_producer_feeds_two_warpgroups_and_leaves_first() -> None:
    c, expected = run_pipeline(pipeline())
    np.testing.assert_array_equal(c, expected)


MISTAKES = {
    "tiles are read before they came": ({"FULL": ""}, "product", "uninitialised-read|async-copy"),
    "a phase of the mbarrier is not waited for": (
        {"FULL": "if (t != 2) wait(f + 8 * s, t / stages & 1);"}, "product", "async-copy: .*did not wait"
    ),
    "a stage is filled before it is free": ({"EARLIEST": "9"}, "copy", "async-product|-race|async-copy"),
    "a stage is released before its products are waited for": (
        {"EARLY": ARRIVE, "RELEASE": ""}, "copy", "async-product: .*writes what a wgmma may still read"
    ),
    "no fence of registers": ({"REGISTER_FENCE": ""}, "product", "async-product: .*without wgmma.fence"),
    "more bytes are expected than come": ({"EXPECTED": "24592"}, "", "deadlock: .*mbarrier never completes"),
    "a copy of odd size": ({"BYTES": "8184"}, "copy", "misaligned: .*8184 bytes"),
    "nobody releases a stage": ({"RELEASE": ""}, "", "deadlock: .*mbarrier never completes"),
    "warpgroups do not meet before rows are read": ({"BEHIND": ""}, "rows", "shared-race"),
    "a barrier waits for the producer too": (
        {"BEHIND": MEET.replace("256", "288")}, "", "deadlock: a barrier waits for more threads"
    ),
    "a warp asks for no registers": (
        {"MORE": 'if (warp != 5) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");'},
        "", "divergent-warp: setmaxnreg.* waits for lanes of its warp",
    ),
    "every thread of the producer copies": ({"CHOSEN": "true"}, "", "shared-race|async|deadlock"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_pipeline_is_named(mistake: str) -> None:
    changes, place, message = MISTAKES[mistake]
    text = pipeline(**changes)
    with pytest.raises(SimulationFault, match=message) as raised:
        run_pipeline(text)
    if place:
        line = next(n for n, line in enumerate(text.split("\n"), 1) if f"// {place}" in line)
        assert f"line {line}" in str(raised.value)


def test_sums_are_unknown_while_products_are_under_way() -> None:
    text = pipeline(PENDING="1", BEFORE=f"{MEET} rows += 6144;")  # behind what is read
    c, _ = run_pipeline(text, chunks=1)
    assert np.isnan(c).all()


SPLIT = """#include <cuda_fp16.h>
extern "C" __global__ void k(const float* x, __half* hi, __half2* lo)
{
    __shared__ float rest[64];
    const int i = threadIdx.x;
    hi[i] = __float2half_rn(x[i]);
    rest[i] = x[i] - __half2float(hi[i]);
    __syncthreads();
    if (i < 32) lo[i] = __floats2half2_rn(rest[2 * i], rest[2 * i + 1]);
}
"""


def test_floats_are_split_into_halves() -> None:
    x = (RNG.standard_normal(64) * 2.0 ** RNG.integers(-24, 15, 64)).astype(np.float32)
    x[:6] = 0, -0.0, 65504, 2.0**-24, 3 * 2.0**-26, 1e6
    hi, lo = np.zeros(64, np.float16), np.zeros(64, np.float16)
    simulate(SPLIT, (1, 1, 1), (64, 1, 1), (x, hi, lo), entry="k").raise_if_faulty()
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(hi.view(np.uint16), x.astype(np.float16).view(np.uint16))
        rest = (x - hi.astype(np.float32)).astype(np.float16)
    np.testing.assert_array_equal(lo.view(np.uint16), rest.view(np.uint16))
