"""Kernels and random changes of their PTX, as no compiler writes it: each must be refused in one line."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from test_simulator import SGEMM
from test_simulator_faults import BULK, WAIT
from test_simulator_fp16 import pipeline

from autotune.code.compiler import Binary, compile_text
from autotune.code.render import render
from autotune.measure.proof import small_problem
from autotune.simulator.launches import workspace_of
from autotune.simulator.ptx import TYPE_BITS
from autotune.space.space import Space
from autotune.values.device import named_device
from autotune.values.problem import Problem

MIXED = """
struct Pair { float x; int n; };
__constant__ float table[4] = {1.0f, 2.0f, 3.0f, 4.0f};
__device__ int counter = 3;
extern "C" __global__ void k(float* a, double* b, int* c, Pair p, unsigned long long u) {
    __shared__ float s[64];
    const int i = threadIdx.x;
    float local[8];
    #pragma unroll 1
    for (int j = 0; j < 8; ++j) local[(j + i) & 7] = a[(i + j) & 63] * p.x;
    s[i] = local[i & 7];
    __syncthreads();
    float v = s[63 - i];
    v += __shfl_xor_sync(0xffffffff, v, 1) + __shfl_down_sync(0xffffffff, v, 2);
    const unsigned votes = __ballot_sync(0xffffffff, v > 1.0f);
    int w = __popc(votes) + __clz(i) + __ffs(i) + (int)__brev(i) + __byte_perm(i, votes, 0x3210);
    switch (i & 7) {
        case 0: w += 3; break;
        case 1: w *= 5; break;
        case 2: w ^= 9; break;
        case 3: w -= __float2int_rn(v); break;
        case 4: w = __mulhi(w, 77); break;
        case 5: w /= 3; break;
        default: w %= 7;
    }
    atomicAdd(c + 64, w);
    atomicMax(&counter, i);
    if (__syncthreads_or(w > 1000)) v *= 2.0f;
    b[i] = b[i] * v + sqrt(fabs(b[i])) + (double)u;
    a[i] = v * table[i & 3] + __expf(v * 0.001f) + __fdividef(1.0f, 1.0f + v * v);
    c[i] = w + (__any_sync(0xffffffff, w > 3) ? 1 : 0) + min(w, 9) + (w >> 2) + (w << 3);
}
"""


@dataclass(frozen=True)
class Launchable:
    """One kernel with a launch that takes less than a tenth of a second."""

    ptx: str
    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    arguments: Callable[[], list[Any]]
    shared_bytes: int = 0


def _compiled(text: str, entry: str, arch: str = "sm_90") -> str:
    binary = compile_text(text, entry, arch, ("-lineinfo",))
    assert isinstance(binary, Binary), binary
    return binary.ptx


def _rendered(family: str, preset: str, problem: Problem) -> Launchable:
    space, device = Space.load(family), named_device("h200")
    config = space.fitted(space.presets[preset], problem, device)
    small = small_problem(space, config, problem, device)
    source = render(space, config, small, device)
    launch = source.launch

    def arguments() -> list[Any]:
        ones = [np.ones(shape, np.float32) for shape in (small.a_shape, small.b_shape, small.c_shape)]
        return [1.0, ones[0], ones[1], 0.5, ones[2], *workspace_of(source.launch).values()]

    ptx = _compiled(source.text, source.entry)
    return Launchable(ptx, source.entry, launch.grid, launch.block, arguments, launch.shared_bytes)


_SQUARE = np.ones((128, 128), np.float32)
_MAKERS: dict[str, Callable[[], Launchable]] = {
    "tiles": lambda: Launchable(
        _compiled(SGEMM, "sgemm"), "sgemm", (1, 1, 1), (256, 1, 1),
        lambda: [128, 16, _SQUARE, _SQUARE, _SQUARE.copy()],
    ),
    "mixed": lambda: Launchable(
        _compiled(MIXED, "k"), "k", (1, 1, 1), (64, 1, 1),
        lambda: [np.ones(64, np.float32), np.ones(64), np.ones(65, np.int32), bytes(8), 7],
    ),
    "bulk": lambda: Launchable(
        _compiled(BULK.replace("WAIT", WAIT).replace("READERS", "64"), "k"), "k", (1, 1, 1), (96, 1, 1),
        lambda: [np.ones(768, np.float32), np.ones(64, np.float32), 3],
    ),
    "copies": lambda: _rendered("sgemm", "tiny_block", Problem(1000, 1001, 1003)),
    "skinny": lambda: _rendered("sgemm_skinny", "rows_along", Problem(5, 1001, 1003, "nt")),
    "mma": lambda: _rendered("sgemm_3xtf32", "narrow_warps", Problem(256, 256, 256)),
    "pipeline": lambda: Launchable(
        _compiled(pipeline(), "k"), "k", (1, 1, 1), (384, 1, 1),
        lambda: [*(np.ones(n, np.float16) for n in (16384, 8192)), np.ones(8192, np.float32), 2], 58368,
    ),
    "wgmma": lambda: _rendered("sgemm_3xtf32_wgmma", "small_block", Problem(256, 256, 256, "nt")),
}  # fmt: skip
LAUNCHABLES = tuple(_MAKERS)


@cache
def launchable(name: str) -> Launchable:
    """Return a kernel of `LAUNCHABLES`."""
    return _MAKERS[name]()


# fmt: off
_NUMBERS = ("0", "-1", "1", "3", "16", "4294967295", "-2147483648", "9" * 20, "9" * 5000, "0x", "1e9", "1_0")
_WORDS = (
    "%r1", "%rd1", "%f1", "%p1", "%r1|%p1", "%tid.x", "%nothing", "_", "x", "k_param_0", "$L__BB0_1",
    "[%rd1]", "[k_param_0+99999]", "{%r1, %r2}", "!", "!!!!%p1", "()", "[", "{{", "0d", "0f", "0f7F800000",
    "", "\0", "\n", "ü", "\u0665", "';M", "\\",
)
_KINDS = (
    "delete", "duplicate", "swap", "move", "operand", "operand", "word", "word", "type", "type", "modifier",
    "opcode", "label", "number", "number", "letter", "insert", "join", "cut",
)
# fmt: on
_OPERAND = re.compile(r"\[[^\]\n]*\]|\{[^}\n]*\}|[%$\w.|!-]+")


def mutated(text: str, choose: random.Random) -> tuple[str, str]:
    """Return (what was done, the text) for one change at random; most changes hit instructions."""
    lines = text.split("\n")
    code = [
        n
        for n, line in enumerate(lines)
        if line.strip() and not line.lstrip().startswith(("//", ".loc", ".file"))
    ]
    at = choose.choice(code)
    line = lines[at]

    def swapped(pattern: str | re.Pattern[str], replacement: str) -> str:
        found = list(re.finditer(pattern, line))
        if not found:
            return line[:-1]
        one = choose.choice(found)
        return line[: one.start()] + replacement + line[one.end() :]

    kind = choose.choice(_KINDS)
    other = lines[choose.choice(code)]
    if kind == "delete":
        del lines[at]
    elif kind == "duplicate":
        lines.insert(at, line)
    elif kind == "swap":
        to = choose.choice(code)
        lines[at], lines[to] = lines[to], line
    elif kind == "move":
        lines.insert(choose.choice(code), lines.pop(at))
    elif kind == "operand":
        lines[at] = swapped(_OPERAND, choose.choice(_OPERAND.findall(other) or ["x"]))
    elif kind == "word":
        lines[at] = swapped(_OPERAND, choose.choice(_WORDS))
    elif kind == "type":
        lines[at] = swapped(r"(?<=\.)(?:pred|b?[busf]\d+)\b", choose.choice(list(TYPE_BITS)))
    elif kind == "modifier":
        lines[at] = swapped(r"\.[a-z]\w*", choose.choice(re.findall(r"\.[a-z]\w*", text)))
    elif kind == "opcode":
        codes = re.findall(r"(?m)^\s*(?:@!?\S+\s+)?([a-z][\w.:]*)\s", text)
        lines[at] = swapped(r"(?<=\s)[a-z][\w.:]*(?=\s)", choose.choice(codes))
    elif kind == "label":
        lines[at] = swapped(r"\$L\w+", choose.choice(re.findall(r"\$L\w+", text) or ["$L"]))
    elif kind == "number":
        lines[at] = swapped(r"(?<![\w%$])-?\d\w*|(?<=[<\[+])-?\d+", choose.choice(_NUMBERS))
    elif kind == "letter":
        place = choose.randrange(len(line))
        lines[at] = line[:place] + line[place + 1 :]
    elif kind == "insert":
        place = choose.randrange(len(line))
        lines[at] = line[:place] + choose.choice(';,:.{}[]()@!|%$+-<>" 0aZ') + line[place:]
    elif kind == "join":
        lines[at : at + 2] = ["".join(lines[at : at + 2])]
    else:
        del lines[at:]
    return f"{kind} at line {at + 1}: {line.strip()[:60]!r}", "\n".join(lines)


def mutations(kernel: Launchable, count: int, seed: int) -> Iterator[tuple[str, Launchable]]:
    """Yield (what was done, the kernel) for that many changes; every third time two changes at once."""
    choose = random.Random(seed)
    for number in range(count):
        what, ptx = mutated(kernel.ptx, choose)
        if number % 3 == 0:
            more, ptx = mutated(ptx, choose)
            what = f"{what}; {more}"
        yield what, replace(kernel, ptx=ptx)
