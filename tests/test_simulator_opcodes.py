"""Little CUDA kernels, compiled for both PTX dialects, against NumPy."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from autotune.code.compiler import Binary, compile_text
from autotune.simulator import UnsupportedPTX, run_ptx
from autotune.simulator.fma import fma32, fma64

ARCHS = ("sm_90", "sm_120")
THREADS = 256
RNG = np.random.default_rng(7)


def execute(
    body: str, *arrays: np.ndarray, arch: str, threads: int = THREADS, blocks: int = 1, head: str = ""
) -> None:
    """Run a kernel whose pointer parameters are named a, b, c ... and whose thread index is i."""
    ctype = {
        "f4": "float",
        "f8": "double",
        "i4": "int",
        "u4": "unsigned",
        "i8": "long long",
        "u8": "unsigned long long",
    }
    small = {"i2": "short", "u2": "unsigned short", "i1": "signed char", "u1": "unsigned char"}
    declared = ", ".join(
        f"{(ctype | small)[array.dtype.str[1:]]}* {name}"
        for name, array in zip("abcdefgh", arrays, strict=False)
    )
    text = (
        f'{head}\nextern "C" __global__ void k({declared}) {{\n'
        f"  const int i = blockIdx.x * blockDim.x + threadIdx.x;\n{body}\n}}"
    )
    binary = compile_text(text, "k", arch, ("-lineinfo",))
    assert isinstance(binary, Binary), binary
    run_ptx(binary.ptx, "k", (blocks, 1, 1), (threads, 1, 1), arrays, counters=True).raise_if_faulty()


def floats(count: int = THREADS, kind: str = "f4") -> np.ndarray:
    values = RNG.standard_normal(count).astype(kind) * np.exp2(RNG.integers(-8, 8, count)).astype(kind)
    values[:6] = [0.0, -0.0, 1.0, -1.0, 0.5, 2.5]
    return values


def integers(kind: str, count: int = THREADS) -> np.ndarray:
    limits = np.iinfo(kind)
    values = RNG.integers(limits.min, limits.max, count, dtype=kind, endpoint=True)
    values[:6] = [0, 1, limits.max, limits.min, 5, 31]
    return values


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kind", ["f4", "f8"])
def test_float_arithmetic(kind: str, arch: str) -> None:
    a, b, out = floats(kind=kind), floats(kind=kind)[::-1].copy(), np.zeros(9 * THREADS, kind)
    suffix = "f" if kind == "f4" else ""
    execute(
        f"""
        auto x = a[i]; auto y = b[i]; auto* o = c + i;
        o[0] = x + y; o[{THREADS}] = x - y; o[2 * {THREADS}] = x * y;
        o[3 * {THREADS}] = y != 0 ? x / y : x;
        o[4 * {THREADS}] = fmin{suffix}(x, y); o[5 * {THREADS}] = fmax{suffix}(x, y);
        o[6 * {THREADS}] = fabs{suffix}(x); o[7 * {THREADS}] = sqrt{suffix}(fabs{suffix}(y));
        o[8 * {THREADS}] = -x;
        """,
        *(a, b, out),
        arch=arch,
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        expected = [a + b, a - b, a * b, np.where(b != 0, a / b, a), np.minimum(a, b), np.maximum(a, b)]
    expected += [np.abs(a), np.sqrt(np.abs(b)), -a]
    np.testing.assert_array_equal(out.reshape(9, -1), np.array(expected))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kind", ["i4", "u4", "i8", "u8"])
def test_integer_arithmetic(kind: str, arch: str) -> None:
    a, b = integers(kind), np.where(integers(kind) == 0, 3, RNG.permutation(integers(kind)))
    b[b == 0] = 7
    out = np.zeros(10 * THREADS, kind)
    execute(
        f"""
        auto x = a[i]; auto y = b[i]; auto* o = c + i;
        o[0] = x + y; o[{THREADS}] = x - y; o[2 * {THREADS}] = x * y; o[3 * {THREADS}] = x / y;
        o[4 * {THREADS}] = x % y; o[5 * {THREADS}] = x < y ? x : y; o[6 * {THREADS}] = (x & y) ^ (x | ~y);
        o[7 * {THREADS}] = x << (i & 31); o[8 * {THREADS}] = x >> (i & 31); o[9 * {THREADS}] = x * y + 12345;
        """,
        *(a, b, out),
        arch=arch,
    )
    shift = (np.arange(THREADS) & 31).astype(kind)
    with np.errstate(all="ignore"):
        quotient = np.array(
            [
                abs(x) // abs(y) * (-1 if (x < 0) != (y < 0) else 1)
                for x, y in zip(a.tolist(), b.tolist(), strict=True)
            ]
        )
        quotient = np.array([int(q) & ((1 << a.itemsize * 8) - 1) for q in quotient], f"u{a.itemsize}").view(
            kind
        )
        expected = [a + b, a - b, a * b, quotient, a - quotient * b, np.minimum(a, b), (a & b) ^ (a | ~b)]
        expected += [a << shift, a >> shift, a * b + a.dtype.type(12345)]
    np.testing.assert_array_equal(out.reshape(10, -1), np.array(expected))


@pytest.mark.parametrize("arch", ARCHS)
def test_small_integers(arch: str) -> None:
    a, b, c, d = (integers(kind) for kind in ("i1", "u1", "i2", "u2"))
    before = [array.astype(np.int64) for array in (a, b, c, d)]
    execute("a[i] = a[i] + 3; b[i] = b[i] * 5; c[i] = c[i] / 7; d[i] = d[i] >> 3;", a, b, c, d, arch=arch)
    np.testing.assert_array_equal(a, (before[0] + 3).astype(np.int8))
    np.testing.assert_array_equal(b, (before[1] * 5).astype(np.uint8))
    np.testing.assert_array_equal(c, np.trunc(before[2] / 7).astype(np.int16))
    np.testing.assert_array_equal(d, (before[3] >> 3).astype(np.uint16))


@pytest.mark.parametrize("arch", ARCHS)
def test_wide_and_high_products(arch: str) -> None:
    a, b, e, f = integers("i4"), integers("u4"), integers("i8"), integers("u8")
    wide, unsigned, high, uhigh = (np.zeros(THREADS, kind) for kind in ("i8", "u8", "i8", "u8"))
    execute(
        """
        g[i] = __mul64hi(e[i], e[THREADS - 1 - i]); h[i] = __umul64hi(f[i], f[THREADS - 1 - i]);
        c[i] = (long long)a[i] * a[THREADS - 1 - i] + 7;
        d[i] = (unsigned long long)b[i] * b[THREADS - 1 - i] + __umulhi(b[i], 77777u) + __mulhi(a[i], -99999);
        """.replace("THREADS", str(THREADS)),
        *(a, b, wide, unsigned, e, f, high, uhigh),
        arch=arch,
    )
    np.testing.assert_array_equal(wide, a.astype(np.int64) * a[::-1] + 7)
    low = (b.astype(np.uint64) * np.uint64(77777)) >> np.uint64(32)
    signed = (a.astype(np.int64) * -99999) >> 32
    np.testing.assert_array_equal(unsigned, b.astype(np.uint64) * b[::-1] + low + signed.astype(np.uint64))
    assert high.tolist() == [x * y >> 64 for x, y in zip(e.tolist(), e[::-1].tolist(), strict=True)]
    assert uhigh.tolist() == [x * y >> 64 for x, y in zip(f.tolist(), f[::-1].tolist(), strict=True)]


@pytest.mark.parametrize("arch", ARCHS)
def test_bit_functions(arch: str) -> None:
    a, b, out = integers("u4"), integers("u4")[::-1].copy(), np.zeros(11 * THREADS, "u4")
    wide, wide_out = integers("u8"), np.zeros(2 * THREADS, "u8")
    execute(
        """
        unsigned x = a[i], y = b[i]; unsigned* o = c + i;
        o[0] = __popc(x); o[T] = __clz(x); o[2 * T] = __brev(x); o[3 * T] = __ffs(x);
        asm("prmt.b32 %0, %1, %2, %3;" : "=r"(o[4 * T]) : "r"(x), "r"(y), "r"(0x6274 + i));
        o[5 * T] = __funnelshift_l(x, y, i); o[6 * T] = __funnelshift_rc(x, y, i);
        asm("bfe.u32 %0, %1, %2, 7;" : "=r"(o[7 * T]) : "r"(x), "r"(i & 31));
        asm("bfe.s32 %0, %1, %2, 7;" : "=r"(o[8 * T]) : "r"(x), "r"(i & 31));
        asm("bfi.b32 %0, %1, %2, %3, 9;" : "=r"(o[9 * T]) : "r"(x), "r"(y), "r"(i & 31));
        asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(o[10 * T]) : "r"(x), "r"(y), "r"(i * 0x01010101));
        e[i] = __popcll(d[i]) + __clzll(d[i]) * 100; e[T + i] = __brevll(d[i]);
        """.replace("T", str(THREADS)),
        *(a, b, out, wide, wide_out),
        arch=arch,
    )
    rows = out.reshape(11, -1)
    for i, (x, y) in enumerate(zip(a.tolist(), b.tolist(), strict=True)):
        pair, start = (y << 32) | x, i & 31
        octets = pair.to_bytes(8, "little")
        selectors = [(0x6274 + i) >> 4 * n & 15 for n in range(4)]
        chosen = [octets[s & 7] if s < 8 else 255 * (octets[s & 7] >> 7) for s in selectors]
        field = (x >> start) & 127
        signed = ((x - (x >> 31 << 32)) >> start) & 127
        mask = (511 << start) & 0xFFFFFFFF
        ripple = (i * 0x01010101) & 0xFFFFFFFF
        expected = [
            x.bit_count(),
            32 - x.bit_length(),
            int(f"{x:032b}"[::-1], 2),
            (x & -x).bit_length(),
            int.from_bytes(bytes(chosen), "little"),
            ((pair << (i & 31)) >> 32) & 0xFFFFFFFF,
            (pair >> min(i, 32)) & 0xFFFFFFFF,
            field,
            (signed - (signed >> 6 << 7)) & 0xFFFFFFFF,
            (y & ~mask) | ((x << start) & mask),
            (x & y) ^ ripple,
        ]
        assert rows[:, i].tolist() == expected, i
    for i, x in enumerate(wide.tolist()):
        assert wide_out[i] == x.bit_count() + (64 - x.bit_length()) * 100
        assert wide_out[THREADS + i] == int(f"{x:064b}"[::-1], 2)


@pytest.mark.parametrize("arch", ARCHS)
def test_dot_products(arch: str) -> None:
    a, b, c = (integers("u4") for _ in range(3))
    forms = [(f"dp2a.{part}", 16, first) for part, first in (("lo", 0), ("hi", 2))] + [("dp4a", 8, 0)]
    kinds = [(form, one, other) for form in forms for one in "us" for other in "us"]
    out = np.zeros(len(kinds) * THREADS, "u4")
    body = "".join(
        f'asm("{form[0]}.{one}32.{other}32 %0, %1, %2, %3;"'
        f' : "=r"(d[i + {n * THREADS}]) : "r"(a[i]), "r"(b[i]), "r"(c[i]));\n'
        for n, (form, one, other) in enumerate(kinds)
    )
    execute(body, a, b, c, out, arch=arch)

    def piece(value: int, width: int, number: int, kind: str) -> int:
        found = value >> width * number & (1 << width) - 1
        return found - (1 << width) if kind == "s" and found >> width - 1 else found

    for row, ((_, width, first), one, other) in zip(out.reshape(len(kinds), -1), kinds, strict=True):
        for x, y, z, found in zip(*(each.tolist() for each in (a, b, c, row)), strict=True):
            products = [piece(x, width, n, one) * piece(y, 8, first + n, other) for n in range(32 // width)]
            assert found == (z + sum(products)) % 2**32, (one, other)


@pytest.mark.parametrize("arch", ARCHS)
def test_conversions(arch: str) -> None:
    a = floats() * 1000
    a[10:14] = [3e9, -3e9, np.nan, 1e20]
    d, out, wide, real = (
        floats(kind="f8"),
        np.zeros(6 * THREADS, "i4"),
        np.zeros(3 * THREADS, "i8"),
        np.zeros(4 * THREADS, "f4"),
    )
    execute(
        """
        float x = a[i]; int* o = c + i;
        o[0] = __float2int_rz(x); o[T] = __float2int_rn(x); o[2 * T] = __float2int_rd(x);
        o[3 * T] = __float2int_ru(x);
        o[4 * T] = __float2uint_rz(x); o[5 * T] = __float_as_int(x);
        d[i] = __float2ll_rz(x); d[T + i] = (long long)o[0] * 3; d[2 * T + i] = __double2ll_rn(b[i] * 1e12);
        e[i] = (float)o[0]; e[T + i] = (float)(unsigned)o[0]; e[2 * T + i] = (float)b[i];
        e[3 * T + i] = floorf(x) + rintf(x);
        """.replace("T", str(THREADS)),
        *(a, d, out, wide, real),
        arch=arch,
    )
    rows, exact = out.reshape(6, -1), np.where(np.isnan(a), 0, a).astype(np.float64)
    for row, rounding in zip(rows[:4], (np.trunc, np.rint, np.floor, np.ceil), strict=True):
        np.testing.assert_array_equal(row, np.clip(rounding(exact), -(2**31), 2**31 - 1).astype(np.int64))
    np.testing.assert_array_equal(rows[4].view("u4"), np.clip(np.trunc(exact), 0, 2**32 - 1).astype(np.int64))
    np.testing.assert_array_equal(rows[5], a.view("i4"))
    large = exact >= 2.0**63
    expected = np.where(large, np.iinfo("i8").max, np.where(large, 0, np.trunc(exact)).astype("i8"))
    np.testing.assert_array_equal(wide[:THREADS], np.where(np.isnan(a), wide[:THREADS], expected))
    np.testing.assert_array_equal(wide[THREADS : 2 * THREADS], rows[0].astype("i8") * 3)
    np.testing.assert_array_equal(wide[2 * THREADS :], np.rint(d * 1e12).astype("i8"))
    np.testing.assert_array_equal(real[:THREADS], rows[0].astype("f4"))
    np.testing.assert_array_equal(real[THREADS : 2 * THREADS], rows[0].view("u4").astype("f4"))
    np.testing.assert_array_equal(real[2 * THREADS : 3 * THREADS], d.astype("f4"))
    np.testing.assert_array_equal(real[3 * THREADS :], np.floor(a) + np.rint(a))


@pytest.mark.parametrize("arch", ARCHS)
def test_comparisons_with_nan(arch: str) -> None:
    a, b = floats(), floats()[::-1].copy()
    a[20:30], b[25:35] = np.nan, np.nan
    b[40:50] = a[40:50]
    out = np.zeros(THREADS, "i4")
    execute(
        """
        float x = a[i], y = b[i]; int bits = 0;
        if (x < y) bits |= 1; if (x <= y) bits |= 2; if (x > y) bits |= 4; if (x >= y) bits |= 8;
        if (x == y) bits |= 16; if (x != y) bits |= 32; if (!(x < y)) bits |= 64;
        if (!(x >= y) && i > 10) bits |= 128;
        if (isnan(x) || (x < y) != (i & 1)) bits |= 256; if (!(x <= y) && !(x > y)) bits |= 512;
        c[i] = bits;
        """,
        *(a, b, out),
        arch=arch,
    )
    i = np.arange(THREADS)
    tests = [a < b, a <= b, a > b, a >= b, a == b, a != b, ~(a < b), ~(a >= b) & (i > 10)]
    tests += [np.isnan(a) | ((a < b) != (i & 1)), np.isnan(a) | np.isnan(b)]
    np.testing.assert_array_equal(out, sum(test.astype(int) << n for n, test in enumerate(tests)))


@pytest.mark.parametrize("arch", ARCHS)
def test_approximate_functions_are_close(arch: str) -> None:
    a, out = np.linspace(0.1, 6, THREADS, dtype="f4"), np.zeros(8 * THREADS, "f4")
    execute(
        """
        float x = a[i]; float* o = b + i;
        o[0] = exp2f(x); o[T] = log2f(x); o[2 * T] = __sinf(x); o[3 * T] = __cosf(x); o[4 * T] = rsqrtf(x);
        o[5 * T] = __fdividef(x, 3.7f); o[6 * T] = expf(x); o[7 * T] = __frcp_rn(x);
        """.replace("T", str(THREADS)),
        *(a, out),
        arch=arch,
    )
    exact = a.astype("f8")
    expected = [
        2**exact,
        np.log2(exact),
        np.sin(exact),
        np.cos(exact),
        exact**-0.5,
        exact / 3.7,
        np.exp(exact),
        1 / exact,
    ]
    np.testing.assert_allclose(out.reshape(8, -1), expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("arch", ARCHS)
def test_divergence_and_loops_of_each_lane(arch: str) -> None:
    out = np.zeros(THREADS, "i4")
    execute(
        """
        int sum = 0;
        for (int k = 0; k < (i * 7) % 23; ++k) {
            if ((k ^ i) & 1) { sum += k; if (sum > 60) break; } else sum -= 2;
        }
        if (i % 3 == 0) sum *= 2; else if (i % 3 == 1) { sum += 1000; if (i > 200) return; } else sum = -sum;
        a[i] = sum;
        """,
        out,
        arch=arch,
        threads=250,
    )
    for i in range(THREADS):
        total = 0
        for k in range((i * 7) % 23):
            if (k ^ i) & 1:
                total += k
                if total > 60:
                    break
            else:
                total -= 2
        expected = total * 2 if i % 3 == 0 else (0 if i > 200 else total + 1000) if i % 3 == 1 else -total
        assert out[i] == (expected if i < 250 else 0), i


@pytest.mark.parametrize("arch", ARCHS)
def test_switch_by_jump_table(arch: str) -> None:
    a, out = RNG.integers(0, 12, THREADS).astype("i4"), np.zeros(THREADS, "i4")
    cases = " ".join(
        f"case {n}: b[i] = a[(i + {n}) % 256] * {n + 3}; b[i] ^= {n * 77}; break;" for n in range(10)
    )
    execute(f"switch (a[i]) {{ {cases} default: b[i] = -1; }}", a, out, arch=arch)
    expected = [int(a[(i + n) % 256]) * (n + 3) ^ n * 77 if n < 10 else -1 for i, n in enumerate(a.tolist())]
    assert out.tolist() == expected


@pytest.mark.parametrize("arch", ARCHS)
def test_stack_arrays(arch: str) -> None:
    a, out = integers("i4"), np.zeros(THREADS, "i4")
    execute(
        """
        int stack[16];
        for (int k = 0; k < 16; ++k) stack[(k * 5 + i) & 15] = a[(i + k) & 255] * k;
        int sum = 0;
        for (int k = 0; k < 8; ++k) sum += stack[(a[i] + k) & 15] * (k + 1);
        b[i] = sum;
        """,
        *(a, out),
        arch=arch,
    )
    with np.errstate(all="ignore"):
        for i in range(THREADS):
            stack = np.zeros(16, "i4")
            for k in range(16):
                stack[(k * 5 + i) & 15] = a[(i + k) & 255] * np.int32(k)
            assert out[i] == sum(
                (stack[(int(a[i]) + k) & 15] * np.int32(k + 1) for k in range(8)), np.int32(0)
            )


@pytest.mark.parametrize("arch", ARCHS)
def test_warp_functions(arch: str) -> None:
    a, out, votes = floats(), np.zeros(4 * THREADS, "f4"), np.zeros(6 * THREADS, "u4")
    execute(
        """
        float v = a[i];
        b[i] = __shfl_xor_sync(~0u, v, 5); b[T + i] = __shfl_down_sync(~0u, v, 3, 16);
        b[2 * T + i] = __shfl_up_sync(~0u, v, 2); b[3 * T + i] = __shfl_sync(~0u, v, i * 3, 8);
        c[i] = __ballot_sync(~0u, v > 0); c[T + i] = __any_sync(~0u, v > 1000);
        c[2 * T + i] = __all_sync(~0u, v < 1e9f);
        c[3 * T + i] = __activemask();
        if (i % 4 == 1) c[4 * T + i] = __ballot_sync(0x22222222, v > 0);
        c[5 * T + i] = __reduce_add_sync(~0u, i);
        """.replace("T", str(THREADS)),
        *(a, out, votes),
        arch=arch,
    )
    lanes, rows = a.reshape(-1, 32), votes.reshape(6, -1, 32)
    lane = np.arange(32)
    got = out.reshape(4, -1, 32)
    np.testing.assert_array_equal(got[0], lanes[:, lane ^ 5])
    np.testing.assert_array_equal(got[1], lanes[:, np.where(lane % 16 + 3 < 16, lane + 3, lane)])
    np.testing.assert_array_equal(got[2], lanes[:, np.where(lane >= 2, lane - 2, lane)])
    np.testing.assert_array_equal(got[3], lanes[:, lane // 8 * 8 + lane * 3 % 8])
    ballots = ((lanes > 0) * (1 << lane)).sum(1)
    np.testing.assert_array_equal(rows[0], np.broadcast_to(ballots[:, None], rows[0].shape))
    assert not rows[1].any()
    assert (rows[2] == 1).all()
    assert (rows[3] == 0xFFFFFFFF).all()
    expected = np.where(lane % 4 == 1, (ballots & 0x22222222)[:, None], 0)
    np.testing.assert_array_equal(rows[4], expected)
    np.testing.assert_array_equal(rows[5][:, 0], np.arange(THREADS).reshape(-1, 32).sum(1))


@pytest.mark.parametrize("arch", ARCHS)
def test_block_votes(arch: str) -> None:
    out = np.zeros((3, 2 * 64), "i4")
    execute(
        "a[i] = __syncthreads_count(threadIdx.x > 9 + blockIdx.x);"
        "a[128 + i] = __syncthreads_and(blockIdx.x);"
        "a[256 + i] = __syncthreads_or(threadIdx.x == 7 && blockIdx.x);",
        out,
        arch=arch,
        threads=64,
        blocks=2,
    )
    np.testing.assert_array_equal(out[0], [54] * 64 + [53] * 64)
    np.testing.assert_array_equal(out[1:], [[0] * 64 + [1] * 64] * 2)


@pytest.mark.parametrize("arch", ARCHS)
def test_atomics(arch: str) -> None:
    out, real, wide, old = np.zeros(8, "i4"), np.zeros(2, "f4"), np.zeros(2, "u8"), np.zeros(THREADS, "i4")
    out[2:4] = [100, -100]
    execute(
        """
        __shared__ int total; if (threadIdx.x == 0) total = 0; __syncthreads();
        atomicAdd(&total, i); __syncthreads();
        if (threadIdx.x == 0) atomicAdd(a + 1, total);
        d[i] = atomicAdd(a, 3); atomicMin(a + 2, i - 5); atomicMax(a + 3, i - 5);
        atomicOr(a + 4, 1 << (i & 15));
        atomicXor(a + 5, i); if (atomicCAS(a + 6, 0, i + 1) == 0) atomicExch(a + 7, 42);
        atomicAdd(b, 0.5f); atomicAdd(c, 1ull << 33); atomicMax(c + 1, (unsigned long long)i << 20);
        """,
        *(out, real, wide, old),
        arch=arch,
        threads=64,
        blocks=4,
    )
    i = np.arange(THREADS)
    assert out.tolist() == [3 * THREADS, i.sum(), -5, THREADS - 6, 0xFFFF, np.bitwise_xor.reduce(i), 1, 42]
    assert real.tolist() == [128.0, 0.0]
    assert wide.tolist() == [THREADS << 33, (THREADS - 1) << 20]
    assert sorted(old.tolist()) == list(range(0, 3 * THREADS, 3))


@pytest.mark.parametrize("arch", ARCHS)
def test_vector_accesses_and_constants(arch: str) -> None:
    a, out = floats(4 * 64), np.zeros(4 * 64, "f4")
    execute(
        "float4 v = reinterpret_cast<float4*>(a)[i]; float2 w = reinterpret_cast<float2*>(a)[i];"
        "reinterpret_cast<float4*>(b)[63 - i] = make_float4(v.w * scale[i & 3], v.z + bias, w.y, w.x);",
        *(a, out),
        arch=arch,
        threads=64,
        head="__constant__ float scale[4] = {1.5f, 2.0f, -1.0f, 0.25f}; __device__ float bias = 3.0f;",
    )
    scale = np.tile(np.array([1.5, 2, -1, 0.25], "f4"), 16)
    rows, pairs = a.reshape(64, 4), a.reshape(-1, 2)[:64]
    expected = np.stack([rows[:, 3] * scale, rows[:, 2] + np.float32(3), pairs[:, 1], pairs[:, 0]], 1)
    np.testing.assert_array_equal(out.reshape(64, 4)[::-1], expected)


@pytest.mark.parametrize("arch", ARCHS)
def test_generic_addresses(arch: str) -> None:
    a, out = integers("i4"), np.zeros(THREADS, "i4")
    execute(
        """
        __shared__ int s[256]; s[i] = i; __syncthreads();
        int* p = (a[i] & 1) ? s : a;
        b[i] = pick(p, i);
        """,
        *(a, out),
        arch=arch,
        head="__device__ __forceinline__ int pick(volatile int* p, int i) { return p[i ^ 3]; }",
    )
    i = np.arange(THREADS)
    np.testing.assert_array_equal(out, np.where(a & 1, i ^ 3, a[i ^ 3]))


@pytest.mark.parametrize("arch", ARCHS)
def test_double_fma_and_constants(arch: str) -> None:
    a, b, out = floats(kind="f8"), floats(kind="f8")[::-1].copy(), np.zeros(THREADS, "f8")
    execute("c[i] = fma(a[i], b[i], -a[i] * 0.1);", a, b, out, arch=arch)
    addend = -a * 0.1
    expected = [float(Fraction(x) * Fraction(y) + Fraction(z)) for x, y, z in zip(a, b, addend, strict=True)]
    np.testing.assert_array_equal(out, expected)


def rounded(value: Fraction) -> np.float32:
    """Round an exact value to float32 once, ties to even."""
    if value == 0:
        return np.float32(0)
    magnitude = abs(value)
    exponent = max(math.floor(math.log2(magnitude)), -126)
    if Fraction(2) ** exponent > magnitude and exponent > -126:
        exponent -= 1
    step = Fraction(2) ** (exponent - 23)
    return np.float32(float(round(magnitude / step) * step) * (1 if value > 0 else -1))


def test_fma_rounds_once() -> None:
    scale = np.exp2(RNG.integers(-70, 5, 4000)).astype("f4")
    a, b = (RNG.integers(1, 1 << 24, 4000).astype("f4") * scale for _ in range(2))
    # Sums whose float64 value is a tie in float32 while a far smaller term breaks it; and subnormal results.
    c = RNG.integers(1, 1 << 24, 4000).astype("f4") * np.exp2(RNG.integers(-149, -20, 4000)).astype("f4")
    ties_a, ties_b = np.float32(1 + 2**-12), np.float32(1 + 2**-12)
    a[:3], b[:3] = [ties_a, 1 + 2**-23, 2**-75], [ties_b, 1.5, 2**-75]
    c[:3] = [2**-60, -(2.0**-80), 2**-149]
    with np.errstate(all="ignore"):
        got = fma32(a, b, c)
    expected = [
        rounded(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)))
        for x, y, z in zip(a, b, c, strict=True)
    ]
    np.testing.assert_array_equal(got.view("u4"), np.array(expected).view("u4"))


def test_fma_differs_from_two_roundings_where_it_must() -> None:
    # a * b = 1 + 2^-11 + 2^-24 is a tie of float32; the addend breaks it below float64's last bit.
    a = np.full(8, 1 + 2**-12, "f4")
    c = np.full(8, 2.0**-80, "f4")
    c[4:] *= -1
    with np.errstate(all="ignore"):
        got = fma32(a, a, c)
        naive = (a.astype("f8") * a + c).astype("f4")
    exact = [rounded(Fraction(float(x)) ** 2 + Fraction(float(z))) for x, z in zip(a, c, strict=True)]
    np.testing.assert_array_equal(got, np.array(exact))
    assert (got != naive).any()


def test_double_fma_rounds_once() -> None:
    a, b, c = (RNG.standard_normal(2000) for _ in range(3))
    c[::2] = -(a * b)[::2] * (1 + RNG.integers(-3, 3, 1000) * 2.0**-52)
    got = fma64(a, b, c)
    expected = [float(Fraction(x) * Fraction(y) + Fraction(z)) for x, y, z in zip(a, b, c, strict=True)]
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("arch", ARCHS)
def test_tensor_core_product(arch: str) -> None:
    a, b = RNG.integers(-8, 8, (16, 8)).astype("f4"), RNG.integers(-8, 8, (8, 8)).astype("f4")
    out = np.ones((16, 8), "f4")
    execute(
        """
        int g = i >> 2, t = i & 3; unsigned x[4], y[2];
        float u[4] = {a[g * 8 + t], a[(g + 8) * 8 + t], a[g * 8 + t + 4], a[(g + 8) * 8 + t + 4]};
        float v[2] = {b[t * 8 + g], b[(t + 4) * 8 + g]};
        for (int n = 0; n < 4; ++n) asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(x[n]) : "f"(u[n]));
        for (int n = 0; n < 2; ++n) asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y[n]) : "f"(v[n]));
        float d[4] = {1.0f, 1.0f, 1.0f, 1.0f};
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"
            " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));
        c[g * 8 + 2 * t] = d[0]; c[g * 8 + 2 * t + 1] = d[1]; c[(g + 8) * 8 + 2 * t] = d[2];
        c[(g + 8) * 8 + 2 * t + 1] = d[3];
        """,
        *(a, b, out),
        arch=arch,
        threads=32,
    )
    np.testing.assert_array_equal(out, a @ b + 1)


def test_unknown_opcodes_are_named_before_anything_runs() -> None:
    out = np.zeros(32, "f4")
    with pytest.raises(UnsupportedPTX, match=r"stmatrix\.sync\S* .*source line 5.*not supported"):
        execute(
            "__shared__ float s[256]; unsigned r; a[i] = 1.0f;\n"
            'asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%1], {%0};"'
            ' :: "r"(r), "r"((unsigned)__cvta_generic_to_shared(s))); a[i] = r;',
            out,
            arch="sm_90",
            threads=32,
        )
    assert not out.any()


@pytest.mark.parametrize("arch", ARCHS)
def test_directed_rounding(arch: str) -> None:
    a, b, c, out = floats(), floats()[::-1].copy(), floats(), np.zeros(9 * THREADS, "f4")
    calls = [f"__fmaf_{m}(x, y, z)" for m in ("rz", "rd", "ru")] + [
        f"__fadd_{m}(x, y)" for m in ("rz", "rd", "ru")
    ]
    calls += [f"__fmul_{m}(x, y)" for m in ("rz", "rd", "ru")]
    body = " ".join(f"d[{n} * {THREADS} + i] = {call};" for n, call in enumerate(calls))
    execute(f"float x = a[i], y = b[i], z = c[i]; {body}", a, b, c, out, arch=arch)
    x, y, z = ([Fraction(float(value)) for value in array] for array in (a, b, c))
    exact = [[p * q + r for p, q, r in zip(x, y, z, strict=True)], [p + q for p, q in zip(x, y, strict=True)]]
    exact.append([p * q for p, q in zip(x, y, strict=True)])
    for n, row in enumerate(out.reshape(9, -1)):
        for got, value in zip(row, exact[n // 3], strict=True):
            nearest = rounded(value)
            low = nearest if Fraction(float(nearest)) <= value else np.nextafter(nearest, np.float32(-np.inf))
            high = nearest if Fraction(float(nearest)) >= value else np.nextafter(nearest, np.float32(np.inf))
            assert got == [low if value > 0 else high, low, high][n % 3]


def test_functions_that_call_themselves_are_refused() -> None:
    with pytest.raises(UnsupportedPTX, match=r"call of rise .*source line 2.*it calls itself"):
        execute(
            "a[i] = rise(a[i], i);",
            np.ones(32, "f4"),
            arch="sm_90",
            threads=32,
            head='extern "C" __device__ __noinline__ float rise(float x, int n) {\n'
            " return n < 1 ? x : rise(x * 2, n - 1) * x + rise(x, n - 2); }",
        )


def test_cache_hints_change_nothing() -> None:
    a, b = floats(), np.zeros(THREADS, "f4")
    execute(
        """
        unsigned long long policy; float v;
        asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
        asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.f32 %0, [%1], %2;"
            : "=f"(v) : "l"(a + i), "l"(policy));
        asm volatile("st.global.L2::cache_hint.f32 [%0], %1, %2;"
            :: "l"(b + i), "f"(v), "l"(policy) : "memory");
        """,
        *(a, b),
        arch="sm_90",
    )
    np.testing.assert_array_equal(a, b)


def test_accesses_of_32_bytes() -> None:
    a, b = floats(8 * 32), np.zeros(8 * 32, "f4")
    registers = ", ".join(f"%{n}" for n in range(8))
    execute(
        f"""
        float v[8];
        asm volatile("ld.global.v8.f32 {{{registers}}}, [%8];"
            : {", ".join(f'"=f"(v[{n}])' for n in range(8))} : "l"(a + 8 * i));
        asm volatile("st.global.v8.f32 [%8], {{{registers}}};"
            :: {", ".join(f'"f"(v[{n}])' for n in range(8))}, "l"(b + 8 * (31 - i)) : "memory");
        """,
        *(a, b),
        arch="sm_100",
        threads=32,
    )
    np.testing.assert_array_equal(a.reshape(32, 8), b.reshape(32, 8)[::-1])
