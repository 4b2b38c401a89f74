"""CUDA text as it is published: functions that are not inlined, printf, assert, variables of the file."""

from __future__ import annotations

import numpy as np
import pytest
from test_simulator_faults import ARCHS, expect, run

CALLS = """struct Pair { float x, y, z; };
__device__ __noinline__ Pair added(Pair p, int n) {
    for (int i = 0; i < n; ++i) {
        if (p.x > 40.0f) return p;
        p.x += p.y;
        p.z = p.x * i;
    }
    return p;
}
__device__ __noinline__ float deeper(const float* a, int i) {
    Pair p = added(Pair{a[i], 2.0f, 0.0f}, i);  // here
    return p.x + p.z;
}
extern "C" __global__ void k(const float* a, float* b) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    b[i] = i % 3 ? deeper(a, i) : added(Pair{1.0f, 1.0f, 3.0f}, 2).z;
}"""


@pytest.mark.parametrize("arch", ARCHS)
def test_functions_that_are_not_inlined(arch: str) -> None:
    a, b = np.arange(128, dtype=np.float32), np.zeros(128, np.float32)
    run(CALLS, arch, a, b, blocks=2).raise_if_faulty()
    for i in range(128):
        x, y, z, n = (float(i), 2.0, 0.0, i) if i % 3 else (1.0, 1.0, 3.0, 2)
        for step in range(n):
            if x > 40:
                break
            x += y
            z = x * step
        assert b[i] == (x + z if i % 3 else z)
    expect(run(CALLS, arch, a[:50], b, blocks=2), "out-of-bounds", CALLS, thread=50)


PRINTS = r"""const char* title = "tile"; __device__ const char* const names[2] = {"even", "odd"};
extern "C" __global__ void k(int* a, float x) {
    if (threadIdx.x > 1) return;
    printf("%s %-5s|%3d|%#x %05.2f %e %c%% %llu %hhd %*d\n", title, names[threadIdx.x], threadIdx.x - 1, 255u,
        x, -0.5, 'z', 1ull << 40, 300, 4, a[threadIdx.x]);
    if (threadIdx.x == 1) printf("only text\n");
}"""


@pytest.mark.parametrize("arch", ARCHS)
def test_printf_is_returned(arch: str) -> None:
    report = run(PRINTS, arch, np.array([7, -7], np.int32), 1.125)
    assert report.faults == ()
    assert report.output == (
        "tile even | -1|0xff 01.12 -5.000000e-01 z% 1099511627776 44    7\n"
        "tile odd  |  0|0xff 01.12 -5.000000e-01 z% 1099511627776 44   -7\n"
        "only text\n"
    )
    endless = 'extern "C" __global__ void k() { for (int i = 0; i < 200; ++i) printf("%0300d\\n", i); }'
    assert len(run(endless, arch, blocks=2).output) == 1 << 20


@pytest.mark.parametrize("arch", ARCHS)
def test_a_fault_names_the_line_of_the_users_file(arch: str) -> None:
    text = """#line 1 "tiles.h"
__device__ float first(const float* a, int i) { return a[i]; }
__device__ float second(const float* a, int i) {
    return first(a, i) + 1.0f;
}
#line 10 "kernel.cu"
__device__ float third(const float* a, int i) { return second(a, i); }
extern "C" __global__ void k(const float* a, float* b) {
    b[threadIdx.x] = third(a, threadIdx.x);
}"""
    report = run(text, arch, np.zeros(60, np.float32), np.zeros(64, np.float32))
    assert report.faults[0].line == 10
