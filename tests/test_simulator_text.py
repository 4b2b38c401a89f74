"""CUDA text as it is published: functions that are not inlined, printf, assert, variables of the file."""

from __future__ import annotations

import numpy as np
import pytest
from test_simulator_faults import ARCHS, expect, run

from autotune.code.published import device_code, kernels
from autotune.errors import UsageError
from autotune.simulator import simulate

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


PUBLISHED = """// __global__ void commented(float* x) {}
#include <cassert>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <vector>
#include <cuda_runtime.h>
#include "helper_cuda.h"
#define CHECK(call) check(call, __FILE__, __LINE__)
#define CEIL_DIV(m, n) (((m) + (n)-1) / (n))
const char* title = "__global__ void quoted(float* x) {}";
const int WIDTH = 32;
void check(cudaError_t error, const char* file, int line) {
    if (error != cudaSuccess) { std::cerr << cudaGetErrorString(error) << file << line; exit(1); }
}
int tiles(int n) { return CEIL_DIV(n, WIDTH); }
namespace tiled {
__constant__ float scale[4];
template <const int BN, typename T>
__global__ void __launch_bounds__((BN / 4) * 2) multiply(const T* x, T* y, int n) {
    __shared__ T s[BN];
    assert(n % BN == 0);
    const int i = blockIdx.x * BN + threadIdx.x * 2;
    for (int j = 0; j < 2; ++j) s[threadIdx.x * 2 + j] = x[i + j];
    __syncthreads();
    for (int j = 0; j < 2; ++j)
        y[i + j] = s[BN - 1 - threadIdx.x * 2 - j] * scale[j] + std::sqrt((T)tiles(n)) * 0 + INFINITY * 0 * 0;
}
}
int repeats = CEIL_DIV(1024, WIDTH);
template <typename T> void multiply(T* x, int n) { tiled::multiply<64, T><<<16, 32>>>(x, x, n); }
template void multiply<float>(float* x, int n);
void randomize(float* m, int n) {
    for (int i = 0; i < n; ++i) m[i] = (float)(rand() % 5);
}
int main(int argc, char** argv) {
    std::vector<float> h(1024);
    float* d;
    CHECK(cudaMalloc(&d, h.size() * sizeof(float)));
    randomize(h.data(), 1024);
    tiled::multiply<64, float><<<16, 32>>>(d, d, 1024);
    printf("%s\\n", title);
    return 0;
}
"""


def test_a_published_file_runs_as_it_is() -> None:
    text = PUBLISHED.replace(" + INFINITY * 0 * 0", "")
    x, y = np.arange(256, dtype=np.float32), np.zeros(256, np.float32)
    scale, entry = np.array([2, 3, 0, 0], np.float32), "tiled::multiply<64, float>"
    report = simulate(text, 4, 32, (x, y, 256), entry=entry, constants={"scale": scale})
    assert report.faults == ()
    expected = x.reshape(4, 64)[:, ::-1].reshape(-1, 2) * scale[:2]
    np.testing.assert_array_equal(y.reshape(-1, 2), expected)
    faults = simulate(text, 4, 32, (x, y, 250), entry=entry).faults
    assert str(faults[0]).startswith("assertion: assert(n % BN == 0) failed (line 22, block (0, 0, 0)")
    ndebug = simulate(text, 4, 32, (x, y, 250), entry=entry, options=["-DNDEBUG"])
    assert ndebug.faults == ()
    with pytest.raises(UsageError, match=r"kernel tiled::multiply is a template: name an instance"):
        simulate(text, 4, 32, (x, y, 256))
    with pytest.raises(UsageError, match=r"no kernel tiled::multipy<64, float> \(it has tiled::multiply\)"):
        simulate(text, 4, 32, (x, y, 256), entry="tiled::multipy<64, float>")
    with pytest.raises(UsageError, match=r"variable scale has 16 bytes; 20 were given"):
        simulate(text, 4, 32, (x, y, 256), entry=entry, constants={"scale": x[:5]})
    with pytest.raises(UsageError, match=r"the kernel has no variable 'scales'; it has .*scale"):
        simulate(text, 4, 32, (x, y, 256), entry=entry, constants={"scales": x[:4]})


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("__global__ void __launch_bounds__((128 / 4) * 2) k(float* x) {}", [("k", False)]),
        ("__launch_bounds__(64) __global__ void k(float* x) {}", [("k", False)]),
        ('extern "C" __global__ __launch_bounds__(64) void k(float* x) {}', [("k", False)]),
        ('// __global__ void a(int)\n/* __global__ void b(int) */ char c[] = "__global__ void d(int)";', []),
        ("template <int N>\n__global__ void k();\ntemplate <int N> __global__ void k() {}", [("k", True)]),
        ("namespace a { namespace b { __global__ void k() {} } int n; }", [("a::b::k", False)]),
        ("#define KERNEL(name) __global__ void name()\nstruct S { int x[2] = {1, 2}; };", []),
        ("__global__ __cluster_dims__(1, 1, 1) void\nk(\nfloat* x) {}", [("k", False)]),
    ],
)  # fmt: skip
def test_kernels_of_a_text(text: str, names: list[tuple[str, bool]]) -> None:
    assert kernels(text) == names


def test_what_the_host_alone_runs_is_left_out() -> None:
    text = device_code(PUBLISHED)
    assert len(text.splitlines()) == len(PUBLISHED.splitlines())
    for name in ("int main", "void randomize", "void check", "template void multiply", "int repeats"):
        assert name in PUBLISHED
        assert name not in text
    for kept in ("int tiles", "multiply(const T", "#define CHECK", "const int WIDTH", "__constant__"):
        assert kept in text


def test_a_kernel_may_be_written_with_macros_beside_classes_of_the_host() -> None:
    text = """#include <cstdint>
#include <stdexcept>
#include "helpers of mine.h"
#define KERNEL extern "C" ENTRY
#define ENTRY __global__
template <class T> struct Stream { Stream(int size); int n; };
template <class T> Stream<T>::Stream(int size) : n(size) { throw std::runtime_error("none"); }
KERNEL void k(std::uint32_t* x, int n) { x[threadIdx.x] = n + BEYOND; }
"""
    x = np.zeros(32, np.uint32)
    simulate(text.replace("BEYOND", "1"), 1, 32, (x, 2), entry="k").raise_if_faulty()
    assert (x == 3).all()
    with pytest.raises(UsageError, match=r"kernel k does not compile: .*\(8\): error: identifier \"BEYOND\""):
        simulate(text, 1, 32, (x, 2), entry="k")


def test_headers_of_cuda_are_found(tmp_path) -> None:
    (tmp_path / "mine.h").write_text("#define TWICE(x) ((x) * 2)\n")
    text = """#include <cooperative_groups.h>
#include <cuda_fp16.h>
#include "mine.h"
namespace cg = cooperative_groups;
__global__ void k(float* x) {
    cg::thread_block block = cg::this_thread_block();
    __shared__ float s[64];
    s[block.thread_rank()] = __half2float(__float2half(x[threadIdx.x]));
    block.sync();
    x[threadIdx.x] = TWICE(s[63 - block.thread_rank()]);
}"""
    x = np.arange(64, dtype=np.float32)
    simulate(text, 1, 64, (x,), options=[f"-I{tmp_path}"]).raise_if_faulty()
    np.testing.assert_array_equal(x, np.arange(64)[::-1] * 2)
    with pytest.raises(UsageError, match=r"TWICE.* is undefined.*\(not found: mine.h"):
        simulate(text, 1, 64, (x,))
    with pytest.raises(UsageError, match="options are words for NVRTC"):
        simulate(text, 1, 64, (x,), options="-DN=1")
