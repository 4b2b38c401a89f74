"""Products of warpgroups, against NumPy, and what a kernel may not do around them."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.errors import UsageError
from autotune.simulator import SimulationFault, UnsupportedPTX, simulate

RNG = np.random.default_rng(3)

# A warpgroup (or several, each with 64 rows) multiplies a[rows][8 slices] by b[columns][8 slices] along k, A
# from registers or from shared memory, where rows of 32 floats have the 128-byte swizzle.
KERNEL = """// architecture sm_90a
constexpr int columns = COLUMNS, slices = SLICES;

__device__ unsigned long long descriptor(const float* rows)
{
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(rows));
    return SWIZZLEull << 62 | 64ull << 32 | 1ull << 16 | (address >> 4 & 0x3fff);
}

extern "C" __global__ void __launch_bounds__(256) k(const float* a, const float* b, float* c)
{
    __shared__ __align__(1024) float right[columns * 32], left[64 * 32];
    const int i = threadIdx.x, warp = i / 32, lane = i % 32;
    auto fill = [&](float* to, const float* from, int rows) {
        for (int at = i; at < rows * 32; at += blockDim.x) {
            const int row = at / 32, col = at % 32;
            const float value = col < 8 * slices ? from[row * 8 * slices + col] : 0;
            to[row * 32 + (col / 4 ^ row % 8) * 4 + col % 4] = value;
        }
    };
    fill(right, b, columns);
    fill(left, a, 64);
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
            x[s][q] = __float_as_uint(a[(row + q % 2 * 8) * 8 * slices + s * 8 + lane % 4 + q / 2 * 4]);
    REGISTER_FENCE
    if (BRANCH)
        #pragma unroll
        for (int s = 0; s < slices; ++s)
            asm volatile(
                "{ .reg .pred add; setp.ne.b32 add, %ADD, 0;"
                " wgmma.mma_async.sync.aligned.m64nCOLUMNSk8.f32.tf32.tf32"
                " {SUMS}, LEFT, %RIGHT, add, SIGNS; }"
                : OUTPUTS : LEFT_OPERANDS, "l"(descriptor(right) + 2 * s), "r"(ADDS || s > 0 ? 1 : 0));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    BEFORE_WAIT
    asm volatile("wgmma.wait_group.sync.aligned PENDING;" ::: "memory");
    #pragma unroll
    for (int j = 0; j < columns / 2; ++j) {
        asm volatile("" : "+f"(sum[j]));
        c[(row + j % 4 / 2 * 8) * columns + j / 4 * 8 + lane % 4 * 2 + j % 2] = sum[j];
    }
    AFTER
}
"""


def kernel(columns: int = 16, slices: int = 1, left_shared: bool = False, **changes: str) -> str:
    n = columns // 2
    operands = (
        '"l"(descriptor(left) + 2 * s)' if left_shared else ", ".join(f'"r"(x[s][{q}])' for q in range(4))
    )
    left = f"%{n}" if left_shared else "{" + ", ".join(f"%{n + q}" for q in range(4)) + "}"
    last = n + (1 if left_shared else 4)
    words = {
        "PROXY_FENCE": 'asm volatile("fence.proxy.async.shared::cta;" ::: "memory");',
        "REGISTER_FENCE": 'asm volatile("wgmma.fence.sync.aligned;" ::: "memory");',
        "BEFORE_WAIT": "",
        "AFTER": "",
        "BRANCH": "true",
        "ADDS": "true",
        "PENDING": "0",
        "SWIZZLE": "1",
        "SIGNS": "1, 1",
        "SUMS": ", ".join(f"%{j}" for j in range(n)),
        "OUTPUTS": ", ".join(f'"+f"(sum[{j}])' for j in range(n)),
        "LEFT_OPERANDS": operands,
        "COLUMNS": str(columns),
        "SLICES": str(slices),
    } | changes
    text = KERNEL.replace("%ADD", f"%{last + 1}").replace("%RIGHT", f"%{last}").replace("LEFT,", f"{left},")
    for word, meaning in words.items():
        text = text.replace(word, meaning)
    return text


def run(text: str, a: np.ndarray, b: np.ndarray, c: np.ndarray, threads: int = 128) -> np.ndarray:
    simulate(text, (1, 1, 1), (threads, 1, 1), (a, b, c), entry="k").raise_if_faulty()
    return c


def integers(*shape: int) -> np.ndarray:
    return RNG.integers(-9, 10, shape).astype(np.float32)


@pytest.mark.parametrize("left_shared", [False, True])
@pytest.mark.parametrize(("columns", "slices"), [(8, 1), (64, 4), (256, 2)])
def test_a_warpgroup_multiplies(columns: int, slices: int, left_shared: bool) -> None:
    a, b, c = integers(64, 8 * slices), integers(columns, 8 * slices), integers(64, columns)
    expected = a @ b.T + c
    np.testing.assert_array_equal(run(kernel(columns, slices, left_shared), a, b, c), expected)


def test_every_warpgroup_has_rows_of_its_own() -> None:
    a, b, c = integers(128, 8), integers(16, 8), integers(128, 16)
    expected = a @ b.T + c
    np.testing.assert_array_equal(run(kernel(), a, b, c, threads=256), expected)


def test_sums_may_begin_at_zero_and_operands_be_negated() -> None:
    a, b, c = integers(64, 8), integers(16, 8), np.full((64, 16), np.nan, np.float32)
    np.testing.assert_array_equal(run(kernel(ADDS="false", SIGNS="1, -1"), a, b, c), -(a @ b.T))


def test_operands_lose_what_tf32_lacks_and_sums_are_rounded_towards_zero() -> None:
    bits = RNG.integers(0x3F000000, 0x40000000, (64, 8)).astype(np.uint32)
    a, b = bits.view(np.float32), np.zeros((16, 8), np.float32)
    b[np.arange(8), np.arange(8)] = 1.0 + 2.0**-23  # seen as 1
    out = run(kernel(), a, b, np.zeros((64, 16), np.float32))
    np.testing.assert_array_equal(out[:, :8], (bits & np.uint32(0xFFFFE000)).view(np.float32))
    a, b = np.zeros((64, 8), np.float32), np.zeros((16, 8), np.float32)
    a[:, 0], b[:, 0] = 1.5, 2.0**-24
    c = np.ones((64, 16), np.float32)
    c[32:] = -1
    out = run(kernel(), a, b, c.copy())
    np.testing.assert_array_equal(out[:32], 1)  # 1 + 1.5 2^-24 is nearer to 1 + 2^-23
    np.testing.assert_array_equal(out[32:], -(1 - 2.0**-23))  # 1 - 1.5 2^-24 lies between it and 1 - 2^-24


def test_sums_are_unknown_before_the_wait() -> None:
    a, b, c = integers(64, 8), integers(16, 8), integers(64, 16)
    out = run(kernel(PENDING="1"), a, b, c)
    assert np.isnan(out).all()


FAULTS = {
    "the proxy fence": (
        {"PROXY_FENCE": ""}, 128, "async-product: .*reads what thread .* wrote without fence.proxy.async"
    ),
    "the fence of registers": ({"REGISTER_FENCE": ""}, 128, "async-product: .*without wgmma.fence"),
    "a wait before shared memory is written": (
        {"BEFORE_WAIT": "__syncthreads(); right[i] = 0;"},
        128,
        "async-product: .*writes what a wgmma may still read",
    ),
    "a barrier between the wait and a write": (
        {"AFTER": "right[i] = 0;"}, 128, "shared-race: .*writes what .* read since the last barrier"
    ),
    "a whole warpgroup": ({}, 96, "divergent-warp: .*needs four warps"),
    "one of the four warps": ({"BRANCH": "warp != 2"}, 128, "divergent-warp: .*wgmma"),
}  # fmt: skip


@pytest.mark.parametrize("missing", FAULTS)
def test_a_fault_is_named_where_a_kernel_lacks(missing: str) -> None:
    changes, threads, message = FAULTS[missing]
    a, b, c = integers(64, 8), integers(16, 8), integers(64, 16)
    with pytest.raises(SimulationFault, match=message):
        run(kernel(16, 1, False, **changes), a, b, c, threads)


def test_operands_in_registers_must_stay_until_the_wait() -> None:
    text = kernel().replace('"r"(x[s][0])', '"r"(held)').replace("    REGISTER_FENCE", "")
    text = text.replace("    if (true)", "    unsigned held = x[0][0];\n    if (true)")
    again = 'asm volatile("mov.b32 %0, 0;" : "+r"(held));'
    broken = text.replace(':: "memory");\n    \n', f':: "memory");\n    {again}\n', 1)
    a, b, c = integers(64, 8), integers(16, 8), integers(64, 16)
    expected = a @ b.T + c
    np.testing.assert_array_equal(run(text, a, b, c.copy()), expected)
    assert broken != text
    with pytest.raises(SimulationFault, match=r"async-product: .*a register .* changes before its wait"):
        run(broken, a, b, c)


def test_other_layouts_of_shared_memory_are_refused() -> None:
    with pytest.raises(UnsupportedPTX, match="only the 128-byte swizzle"):
        run(kernel(SWIZZLE="2"), integers(64, 8), integers(16, 8), integers(64, 16))


def test_wgmma_needs_the_line_that_names_its_architecture() -> None:
    text = kernel().replace("// architecture sm_90a\n", "")
    with pytest.raises(UsageError, match="does not compile"):
        run(text, integers(64, 8), integers(16, 8), integers(64, 16))
