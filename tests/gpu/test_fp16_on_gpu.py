"""Three FP16 products for each of FP32 on a real GPU: layouts, edges, range, graphs, a prepared B, bench."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from test_tf32_on_gpu import UNIT, compiled, exact, launched, operands

from autotune import best_kernel
from autotune.code.compiler import Binary
from autotune.code.pool import default_workers
from autotune.code.render import Source, render
from autotune.measure.comparison import Baseline
from autotune.report.bench import bench
from autotune.space.space import Space
from autotune.values.device import current_device
from autotune.values.problem import LAYOUTS, Problem
from autotune.values.suite import Shape

pytestmark = pytest.mark.gpu
SPACE = Space.load("sgemm_3xfp16_wgmma")


@pytest.fixture(autouse=True)
def _needs_hopper() -> None:
    if current_device(0).capability != 90:
        pytest.skip("only compute capability 9.0 has wgmma")


SIZES = [(1024, 1024, 1024), (1000, 1003, 1001), (65, 513, 4099), (3, 5, 70)]
EVERY = [Problem(*size, layout, math="3xfp16") for size in SIZES for layout in LAYOUTS]
LEFT = Problem(700, 520, 600, math="3xfp16")


@functools.cache
def kernels() -> dict[Problem, list[tuple[Source, Binary]]]:
    """Three kernels for each problem, its first and two drawn, all compiled side by side."""
    device = current_device(0)
    found = []
    for problem in (*EVERY, LEFT):
        legal = SPACE.enumerate(problem, device)
        chosen = {SPACE.starts(legal)[0], *np.random.default_rng(1).integers(0, len(legal), 2).tolist()}
        found += [render(SPACE, legal.config(index), problem, device) for index in sorted(chosen)]
    made: dict[Problem, list[tuple[Source, Binary]]] = {}
    with ThreadPoolExecutor(default_workers()) as pool:
        for source, binary in zip(found, pool.map(compiled, found), strict=True):
            made.setdefault(source.problem, []).append((source, binary))
    return made


@pytest.mark.parametrize("problem", EVERY, ids=str)
def test_every_layout_and_edge_is_right(problem: Problem) -> None:
    a, b = operands(problem)
    reference, limit = exact(problem, a, b)
    for source, binary in kernels()[problem]:
        out = launched(source, binary, a, b)
        assert (np.abs(out - reference) <= 16 * problem.k * UNIT * limit).all(), source.config.id
        assert np.linalg.norm(out - reference) <= 4e-7 * np.linalg.norm(reference), source.config.id


@pytest.mark.parametrize("kind", ["huge", "inf", "nan", "all sizes", "along k"])
def test_what_is_out_of_range_has_the_bits_of_3xtf32(kind: str) -> None:
    a, b = operands(LEFT)
    random = np.random.default_rng(2)
    if kind == "all sizes":
        a *= np.exp2(random.integers(-30, 31, a.shape)).astype(np.float32)
    elif kind == "along k":
        scale = np.exp2(random.integers(-50, 51, LEFT.k)).astype(np.float32)
        a, b = a * scale, b / scale[:, None]
    else:
        a[300, 100] = {"huge": 1e30, "inf": np.inf, "nan": np.nan}[kind]
    fallback = SPACE.fallback(LEFT, current_device(0))
    assert fallback is not None
    left = render(*fallback)
    theirs = launched(left, compiled(left), a, b)
    for source, binary in kernels()[LEFT]:
        np.testing.assert_array_equal(launched(source, binary, a, b), theirs)


def test_rows_of_any_scale_stay_in_range_and_deciding_needs_no_host() -> None:
    """In a captured graph, whose replays see other operands each time."""
    import cupy

    kernel = best_kernel(512, 512, 1024, math="3xfp16")
    a, b = (cupy.asarray(each) for each in operands(kernel.problem))
    out, stream = cupy.empty((512, 512), cupy.float32), cupy.cuda.Stream(non_blocking=True)
    with stream:
        kernel(a, b, out=out)
        stream.begin_capture()
        kernel(a, b, out=out)
        graph = stream.end_capture()
        for change in (1.0, 2.0**50, 2.0**-90, np.inf, 1.0):
            scaled = a.copy()
            scaled[7] *= np.float32(change)
            kept, a[...] = a.copy(), scaled
            graph.launch(stream)
            stream.synchronize()
            found = cupy.asnumpy(out)
            reference = cupy.asnumpy(scaled).astype(np.float64) @ cupy.asnumpy(b).astype(np.float64)
            rows = np.isfinite(reference).all(axis=1)
            assert rows.sum() == (512 if np.isfinite(change) else 511)
            error = np.linalg.norm(found[rows] - reference[rows], axis=1) / np.linalg.norm(
                reference[rows], axis=1
            )
            assert error.max() < 1e-6
            a[...] = kept


def test_a_batch_is_right_where_one_product_is_left_to_3xtf32() -> None:
    import cupy

    kernel = best_kernel(200, 136, 264, batch=3, math="3xfp16")
    random = np.random.default_rng(3)
    a, b = (random.standard_normal(shape, np.float32) for shape in kernel.problem.arrays[:2])
    a[1, 3, 3] = 1e20
    found = cupy.asnumpy(kernel(cupy.asarray(a), cupy.asarray(b)))
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    limit = np.abs(wide_a) @ np.abs(wide_b)
    assert (np.abs(found - wide_a @ wide_b) <= 16 * 264 * UNIT * limit).all()


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_a_prepared_b_gives_the_same_bits(library: str) -> None:
    module = pytest.importorskip(library)
    kernel = best_kernel(64, 1024, 2048, math="3xfp16")
    host = operands(kernel.problem)
    a, b = (module.asarray(each) if library == "cupy" else module.from_numpy(each).cuda() for each in host)
    prepared = kernel.prepare(b)
    for _ in range(2):
        assert (kernel(a, prepared) == kernel(a, b)).all()
        a[5, 5] = 1e30  # left to 3xTF32, which reads b itself


def test_bench_shows_that_it_is_more_exact_than_cublas(tmp_path: Any) -> None:
    shape = Shape.of(Problem(2048, 2048, 2048, math="3xfp16"))
    (row,) = bench([shape], root=tmp_path, predicted=True).rows
    assert row.measured is not None, row.failure
    fp32 = row.libraries["cublas"]
    assert isinstance(fp32, Baseline), fp32
    assert fp32.error is not None
    assert row.measured.verdict.error <= fp32.error
