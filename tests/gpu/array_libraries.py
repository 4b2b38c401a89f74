"""Multiplies arrays of each library on a stream of its own and checks the result; run by pytest and by hand.

``python array_libraries.py cupy torch numba jax cupy_graph torch_graph raw`` prints one line for each; a
library that is not installed is "absent". Under compute-sanitizer it is what the sanitizer looks at.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable

import numpy as np

import autotune

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX would take most of the GPU
SIZE = (96, 80, 64)
RANDOM = np.random.default_rng(11)
X, Y, Z = (
    RANDOM.standard_normal(shape, np.float32)
    for shape in ((SIZE[0], SIZE[2]), (SIZE[2], SIZE[1]), (SIZE[0], SIZE[1]))
)
PRODUCT = X.astype(np.float64) @ Y.astype(np.float64)
PAUSE = 20_000_000  # clocks that a stream is kept busy, so that work on another one would come too early


def right(found: object, wanted: np.ndarray = PRODUCT) -> None:
    np.testing.assert_allclose(np.asarray(found), wanted, rtol=1e-4, atol=1e-4)


def kernel(beta: int = 0) -> autotune.Kernel:
    return autotune.best_kernel(*SIZE, beta=beta)


def wait_kernel() -> Callable[..., None]:
    """A kernel that keeps its stream busy, loaded through NVRTC as any other."""
    from cupy.cuda.function import Module

    from autotune.code.compiler import Binary, compile_text
    from autotune.values.device import current_device

    text = """extern "C" __global__ void pause(long long clocks) {
        for (long long start = clock64(); clock64() - start < clocks;) {}
    }"""
    binary = compile_text(text, "pause", current_device(0).arch)
    assert isinstance(binary, Binary)
    module = Module()
    module.load(binary.cubin)
    return module.get_function("pause")


def cupy() -> None:
    import cupy

    pause, one, reading = wait_kernel(), kernel(), kernel(beta=1)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        a, b = cupy.zeros(X.shape, "f"), cupy.zeros(Y.shape, "f")
        sources = cupy.asarray(X), cupy.asarray(Y)
        pause((1,), (1,), (np.int64(PAUSE),))
        cupy.copyto(a, sources[0])
        cupy.copyto(b, sources[1])
        c = one(a, b)  # on the current stream: behind the copies
        assert isinstance(c, cupy.ndarray)
        out = cupy.asarray(Z)
        assert reading(a, b, out=out, alpha=0.5, beta=2) is out
        right(c.get())
        right(out.get(), 0.5 * PRODUCT + 2 * Z)
        right(autotune.matmul(a, b).get())
        right(autotune.matmul(cupy.asfortranarray(a), b.T, transpose_b=True).get())
    pause((1,), (1,), (np.int64(PAUSE),), stream=stream)
    with stream:
        a.fill(0)
        cupy.copyto(a, sources[0])
    late = cupy.empty(Z.shape, "f")
    cupy.cuda.Device().synchronize()
    right(one(a, b, out=late, stream=stream).get(stream=stream))
    padded = cupy.zeros((SIZE[0], SIZE[2] + 7), "f")
    padded[:, 3 : 3 + SIZE[2]] = cupy.asarray(X)
    wide = cupy.full((SIZE[0], SIZE[1] + 5), 7, "f")
    view = wide[:, 1 : 1 + SIZE[1]]
    right(one(padded[:, 3 : 3 + SIZE[2]], cupy.asarray(Y), out=view).get())
    assert bool((wide[:, 0] == 7).all())
    assert bool((wide[:, 1 + SIZE[1] :] == 7).all())


def torch() -> None:
    import torch

    one = kernel()
    stream = torch.cuda.Stream()
    sources = torch.from_numpy(X).cuda(), torch.from_numpy(Y).cuda()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        a, b = torch.zeros_like(sources[0]), torch.zeros_like(sources[1])
        torch.cuda._sleep(PAUSE)
        a.copy_(sources[0])
        b.copy_(sources[1])
        c = one(a, b)
        out = torch.empty(Z.shape, device="cuda")
        assert one(a, b, out=out) is out
        turned = autotune.matmul(a.t().contiguous().t(), b)
    assert type(c) is torch.Tensor
    assert c.device == a.device
    for found in (c, out, turned):
        stream.synchronize()
        right(found.cpu())
    passed = torch.empty_like(out)
    one(sources[0], sources[1], out=passed, stream=stream)
    alone = one(sources[0], sources[1], stream=stream.cuda_stream)
    stream.synchronize()
    right(passed.cpu())
    right(alone.cpu())


def numba() -> None:
    from numba import cuda

    one, stream = kernel(), cuda.stream()
    a, b = cuda.to_device(X, stream=stream), cuda.to_device(Y, stream=stream)
    c = one(a, b)
    assert type(c) is type(a)
    assert int(c.stream) == int(stream)
    out = cuda.device_array(Z.shape, np.float32, stream=stream)
    assert one(a, b, out=out) is out
    turned = autotune.matmul(cuda.to_device(np.asfortranarray(X), stream=stream), b)
    for found in (c, out, turned):
        right(found.copy_to_host(stream=stream))
    plain = cuda.device_array(Z.shape, np.float32)
    one(cuda.to_device(X), cuda.to_device(Y), out=plain, stream=stream)
    stream.synchronize()
    right(plain.copy_to_host())


def jax() -> None:
    import cupy
    import jax

    one, stream = kernel(), cupy.cuda.Stream(non_blocking=True)
    gpu = jax.devices("gpu")[0]
    x, y = jax.device_put(X, gpu), jax.device_put(Y, gpu)
    slow = jax.jit(lambda v: jax.lax.fori_loop(0, 2000, lambda i, u: u + 0.0 * jax.numpy.sin(u), v))
    with stream:
        for _ in range(3):
            c = one(slow(x), y)  # the operand is still being computed when it is passed
            assert isinstance(c, jax.Array)
            right(c * 1.0)
            right(autotune.matmul(x, y))
    out = cupy.empty(Z.shape, "f")
    assert one(x, y, out=out, stream=stream) is out
    right(out.get(stream=stream))
    refused = ""
    try:
        one(x, y, out=c)
    except autotune.UsageError as error:
        refused = str(error)
    assert "never changes" in refused


def cupy_graph() -> None:
    import cupy

    one, stream = kernel(), cupy.cuda.Stream(non_blocking=True)
    with stream:
        a, b, out = cupy.asarray(X), cupy.asarray(Y), cupy.empty(Z.shape, "f")
        one(a, b, out=out)
        autotune.matmul(a, b, out=out)
        stream.synchronize()
        pool = cupy.get_default_memory_pool()
        used = pool.used_bytes(), pool.total_bytes()
        stream.begin_capture()
        one(a, b, out=out)
        autotune.matmul(a, b, out=out, alpha=2.0)
        graph = stream.end_capture()
        assert (pool.used_bytes(), pool.total_bytes()) == used  # nothing was allocated
        for scale in (1, 3):
            cupy.copyto(a, cupy.asarray(scale * X))
            out.fill(0)
            graph.launch(stream)
            right(out.get(), 2 * scale * PRODUCT)


def torch_graph() -> None:
    import torch

    one = kernel()
    a, b = torch.from_numpy(X).cuda(), torch.from_numpy(Y).cuda()
    out = torch.empty(Z.shape, device="cuda")
    one(a, b, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        one(a, b, out=out)
        after = torch.cuda.memory_stats()["allocation.all.allocated"]
    assert after == before
    for scale in (1, 3):
        a.copy_(torch.from_numpy(scale * X))
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        right(out.cpu(), scale * PRODUCT)


def raw() -> None:
    import cupy

    one = kernel()
    a, b, out = cupy.asarray(X), cupy.asarray(Y), cupy.empty(Z.shape, "f")
    one.launch(a.data.ptr, b.data.ptr, out.data.ptr, 3.0)
    right(out.get(), 3 * PRODUCT)
    failures: list[str] = []

    def call() -> None:  # threads that have never used CUDA, each with arrays and a stream of its own
        try:
            mine = cupy.empty(Z.shape, "f")
            cupy.cuda.Device().synchronize()
            one.launch(a.data.ptr, b.data.ptr, mine.data.ptr, 3.0, 0.0, 0)
            right(mine.get(), 3 * PRODUCT)
        except Exception:
            failures.append(traceback.format_exc())

    threads = [threading.Thread(target=call) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


def bare_thread() -> None:
    """A thread whose first use of CUDA is a launch: no context is current in it."""
    import cupy

    one = kernel()
    a, b, out = cupy.asarray(X), cupy.asarray(Y), cupy.zeros(Z.shape, "f")
    cupy.cuda.Device().synchronize()
    failures: list[str] = []

    def call() -> None:
        try:
            one.launch(a.data.ptr, b.data.ptr, out.data.ptr)
        except Exception:
            failures.append(traceback.format_exc())

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert not failures, failures[0]
    right(out.get())


SCENES = {
    scene.__name__: scene for scene in (cupy, torch, numba, jax, cupy_graph, torch_graph, raw, bare_thread)
}


def main(names: list[str]) -> int:
    warnings.simplefilter("ignore", UserWarning)  # what merely differs from the records
    failed = 0
    for name in names or SCENES:
        package = name.partition("_")[0]
        if package in ("torch", "numba", "jax") and importlib.util.find_spec(package) is None:
            print(f"{name}: absent")
            continue
        try:
            SCENES[name]()
        except Exception:
            failed += 1
            print(f"{name}: wrong\n{traceback.format_exc()}")
        else:
            print(f"{name}: right", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
