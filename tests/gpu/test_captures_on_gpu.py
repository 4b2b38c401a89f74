"""Captures into CUDA graphs by CuPy and PyTorch: kernels that work in a workspace, at once, and dropped."""

from __future__ import annotations

import gc

import pytest

import autotune
from autotune.errors import UsageError

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:records were measured under other")]

SHAPES = [  # their kernels cut k over blocks
    {"m": 1, "n": 512, "k": 65536},
    {"m": 16, "n": 1000, "k": 20000, "layout": "nt"},
    {"m": 96, "n": 80, "k": 16384, "layout": "tn"},
    {"m": 96, "n": 80, "k": 16384, "layout": "tn", "math": "3xtf32"},
]


def a_kernel(shape):
    """A kernel of its own, never called, that works in a workspace."""
    made = autotune.best_kernel(**shape)
    assert made._enqueue._workspace_bytes, "this test needs a kernel with a workspace"
    return made


def operands(kernel, seed=0):
    import torch

    problem = kernel.problem
    generator = torch.Generator("cuda").manual_seed(seed)
    a, b = (
        torch.randn(shape, device="cuda", generator=generator) for shape in (problem.a_shape, problem.b_shape)
    )
    return a, b, torch.empty(problem.c_shape, device="cuda")


def references(kernel, seeds):
    """What one call at a time gives."""
    import torch

    found = []
    for seed in seeds:
        a, b, out = operands(kernel, seed)
        found.append(kernel(a, b, out=out).clone())
        torch.cuda.synchronize()
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_pytorch_captures_a_kernel_that_was_never_called(shape):
    torch = pytest.importorskip("torch")
    for number in range(2):  # the second time PyTorch captures on another stream
        kernel = a_kernel(shape)
        a, b, out = operands(kernel)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kernel(a, b, out=out)
            made = kernel(a, b)  # its result lies in the graph's pool
        for seed in (1, 2):
            for old, new in zip((a, b), operands(kernel, seed), strict=False):
                old.copy_(new)
            graph.replay()
            torch.cuda.synchronize()
            (wanted,) = references(kernel, [seed])
            assert torch.equal(out, wanted), (number, seed)
            assert torch.equal(made, wanted), (number, seed)


def test_pytorch_captures_matmul_before_anything_was_loaded():
    """The kernel is rendered, compiled and loaded while the stream is captured in the strictest mode."""
    torch = pytest.importorskip("torch")
    a, b = torch.randn(3, 3001, device="cuda"), torch.randn(3001, 1999, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        out = autotune.matmul(a, b)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.allclose(out.double(), a.double() @ b.double(), rtol=1e-4, atol=1e-3)


def test_a_kernel_is_dropped_while_another_stream_is_captured():
    torch = pytest.importorskip("torch")
    dropped, kernel = a_kernel(SHAPES[0]), a_kernel(SHAPES[0])
    a, b, out = operands(kernel)
    dropped(a, b, out=out)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        kernel(a, b, out=out)
        del dropped
        gc.collect()
        kernel(a, b, out=out)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, references(kernel, [0])[0])


def test_a_graph_keeps_a_kernel_with_a_workspace():
    torch = pytest.importorskip("torch")
    kernel = a_kernel(SHAPES[0])
    a, b, out = operands(kernel)
    (wanted,) = references(kernel, [0])
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        kernel(a, b, out=out)
    del kernel
    gc.collect()
    junk = [torch.full((1 << 20,), 7.0, device="cuda") for _ in range(64)]
    for _ in range(3):
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, wanted)
    del junk


@pytest.mark.parametrize("shape", SHAPES)
def test_two_graphs_and_eager_calls_run_at_once(shape):
    torch = pytest.importorskip("torch")
    kernel = a_kernel(shape)
    wanted = references(kernel, range(4))
    work = [operands(kernel, seed) for seed in range(4)]
    streams = [torch.cuda.Stream() for _ in range(4)]
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    torch.cuda.synchronize()
    for graph, (a, b, out) in zip(graphs, work, strict=False):
        with torch.cuda.graph(
            graph, stream=streams[0]
        ):  # both captured on one stream, eager calls run there too
            for _ in range(20):
                kernel(a, b, out=out)
    for _ in range(10):
        for _, _, out in work:
            out.zero_()
        torch.cuda.synchronize()
        for stream, graph in zip(streams[1:3], graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        for stream, (a, b, out) in ((streams[0], work[2]), (streams[3], work[3])):
            with torch.cuda.stream(stream):
                for _ in range(20):
                    kernel(a, b, out=out)
        torch.cuda.synchronize()
        assert all(torch.equal(out, each) for (_, _, out), each in zip(work, wanted, strict=True))


def test_streams_that_one_capture_joins():
    torch = pytest.importorskip("torch")
    kernel = a_kernel(SHAPES[2])
    wanted = references(kernel, range(2))
    work = [operands(kernel, seed) for seed in range(2)]
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(20):
                kernel(*work[1][:2], out=work[1][2])
        for _ in range(20):
            kernel(*work[0][:2], out=work[0][2])
        torch.cuda.current_stream().wait_stream(side)
    for _ in range(10):
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(out, each) for (_, _, out), each in zip(work, wanted, strict=True))


@pytest.mark.parametrize("mode", ["Relaxed", "ThreadLocal", "Global"])
def test_cupy_captures_a_kernel_that_was_never_called(mode):
    import cupy
    from cupy.cuda import runtime

    kernel = a_kernel(SHAPES[2])
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        a, b = (
            cupy.random.rand(*shape, dtype="f") for shape in (kernel.problem.a_shape, kernel.problem.b_shape)
        )
        out, eager = cupy.empty(kernel.problem.c_shape, "f"), cupy.empty(kernel.problem.c_shape, "f")
        stream.synchronize()
        runtime.streamBeginCapture(stream.ptr, getattr(runtime, f"streamCaptureMode{mode}"))
        for _ in range(3):
            kernel(a, b, out=out)
        graph = stream.end_capture()
        for _ in range(5):
            graph.launch(stream)
        kernel(a, b, out=eager)
        stream.synchronize()
        assert bool((out == eager).all())


def test_graphs_that_are_gone_leave_no_memory_behind():
    torch = pytest.importorskip("torch")
    kernel = a_kernel(SHAPES[2])
    a, b, out = operands(kernel)
    free = []
    for number in range(60):
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            kernel(a, b, out=out)
        graph.replay()
        del graph
        if number in (20, 59):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            free.append(torch.cuda.mem_get_info()[0])
    assert free[0] - free[1] < 16 << 20


def test_a_check_for_finite_operands_is_refused_in_one_line():
    torch = pytest.importorskip("torch")
    kernel = autotune.best_kernel(256, 256, 256, math="3xtf32", check_finite=True)
    a, b, out = operands(kernel)
    torch.cuda.synchronize()
    with (
        torch.cuda.graph(torch.cuda.CUDAGraph()),
        pytest.raises(UsageError, match="made without check_finite"),
    ):
        kernel(a, b, out=out)
