"""Kernels that are launched while those before them still run find what those have written, on a real GPU."""

from __future__ import annotations

import pytest

import autotune

pytestmark = pytest.mark.gpu

STEPS = 200
SHAPES = [(1, 256), (7, 48), (33, 200), (64, 1024), (300, 333), (256, 256), (517, 512), (1021, 1021)]
CASES = [
    (math, m, n)
    for math in ("ffma", "3xtf32", "3xfp16")
    for m, n in SHAPES
    if math != "3xfp16" or n > 64  # which that family asks of k
]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("records")


@pytest.mark.parametrize("beta", [0, 1])
@pytest.mark.parametrize(("math", "m", "n"), CASES)
def test_a_chain_of_products_is_that_of_products_one_by_one(root, math, m, n, beta):
    import cupy

    kernel = autotune.best_kernel(m, n, n, beta=beta, math=math, root=root)
    assert "griddepcontrol.wait" in kernel.source
    random = cupy.random.default_rng(5)
    start = random.standard_normal((m, n), cupy.float32)
    weights = [random.standard_normal((n, n), cupy.float32) / n**0.5 for _ in range(2)]
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()  # such a stream does not wait for what made them

    def chain(alone=False, between=False):
        """Each product's C is A of the next, and is overwritten by the one after it."""
        with stream:
            x, y = start.copy(), start.copy()
            for step in range(STEPS):
                kernel(x, weights[step % 2], out=y, alpha=0.5, beta=0.5 * beta)
                if alone:
                    stream.synchronize()
                if between:
                    cupy.multiply(y, 0.5, out=y)
                x, y = y, x
            return x.get()

    wanted, halved = chain(alone=True), chain(alone=True, between=True)
    for _ in range(3):
        assert (chain() == wanted).all()
        assert (chain(between=True) == halved).all()
    with stream:
        x, y = start.copy(), start.copy()
        stream.begin_capture()
        for step in range(STEPS):
            kernel(x, weights[step % 2], out=y, alpha=0.5, beta=0.5 * beta)
            x, y = y, x
        graph = stream.end_capture()
        for _ in range(3):
            x[...], y[...] = start, start
            graph.launch(stream)
            assert (x.get() == wanted).all()


@pytest.mark.parametrize("which", ["legacy", "per_thread"])
def test_default_streams_too(root, which):
    import cupy

    kernel = autotune.best_kernel(64, 64, 64, root=root)
    stream = cupy.cuda.Stream.null if which == "legacy" else cupy.cuda.Stream.ptds
    with stream:
        eye = cupy.eye(64, dtype=cupy.float32)
        x = cupy.arange(4096, dtype=cupy.float32).reshape(64, 64)
        wanted, y = x.copy(), cupy.empty_like(x)
        for _ in range(STEPS):
            kernel(x, eye, out=y)
            x, y = y, x
        assert bool((x == wanted).all())
