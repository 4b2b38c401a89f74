"""FP32 on the tensor cores of a real GPU: layouts, edges, parts of k, infinities, bench, the simulator."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from autotune import best_kernel
from autotune.code.compiler import Binary, compile_text
from autotune.code.pool import default_workers
from autotune.code.render import Source, render
from autotune.kernel.kernel import CheckedKernel
from autotune.measure.comparison import Baseline
from autotune.report.bench import bench
from autotune.simulator import run_ptx
from autotune.simulator.launches import workspace_of
from autotune.space.space import Space, families
from autotune.values.device import current_device
from autotune.values.problem import LAYOUTS, Problem
from autotune.values.suite import Shape

pytestmark = pytest.mark.gpu
UNIT = 2.0**-24


def operands(problem: Problem, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return tuple(random.standard_normal(shape, np.float32) for shape in (problem.a_shape, problem.b_shape))  # type: ignore[return-value]


def exact(problem: Problem, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The product and |A||B| in float64."""
    wide_a = (a if problem.layout[0] == "n" else a.T).astype(np.float64)
    wide_b = (b if problem.layout[1] == "n" else b.T).astype(np.float64)
    return wide_a @ wide_b, np.abs(wide_a) @ np.abs(wide_b)


def compiled(source: Source) -> Binary:
    binary = compile_text(source.text, source.entry, current_device(0).arch)
    assert isinstance(binary, Binary), binary
    return binary


def launched(source: Source, binary: Binary, a: np.ndarray, b: np.ndarray, times: int = 2) -> np.ndarray:
    """C of the last of some launches, which share a workspace."""
    import cupy

    from autotune.kernel.cuda import cuda_machine

    enqueue = cuda_machine(0).load(source, binary)
    on_a, on_b = cupy.asarray(a), cupy.asarray(b)
    c = cupy.asarray(np.full(source.problem.c_shape, np.nan, np.float32))
    for _ in range(times):
        enqueue(on_a.data.ptr, on_b.data.ptr, c.data.ptr, 1.0, 0.0, 0)
    return np.asarray(cupy.asnumpy(c))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [(1024, 1024, 1024), (1000, 1003, 1001), (65, 513, 4099), (3, 5, 7)])
def test_every_family_is_right(size: tuple[int, int, int], layout: str) -> None:
    problem = Problem(*size, layout, math="3xtf32")  # type: ignore[arg-type]
    device, (a, b) = current_device(0), operands(problem)
    reference, limit = exact(problem, a, b)
    sources = []
    for space in families(problem, device):
        legal = space.enumerate(problem, device)
        chosen = {*space.starts(legal), *np.random.default_rng(1).integers(0, len(legal), 6).tolist()}
        sources += [render(space, legal.config(index), problem, device) for index in sorted(chosen)]
    assert sources
    with ThreadPoolExecutor(default_workers()) as pool:
        binaries = list(pool.map(compiled, sources))
    for source, binary in zip(sources, binaries, strict=True):
        out = launched(source, binary, a, b)
        assert (np.abs(out - reference) <= 16 * problem.k * UNIT * limit).all(), source.config.id
        assert np.linalg.norm(out - reference) <= 1e-6 * np.linalg.norm(reference), source.config.id


@pytest.mark.parametrize("family", ["sgemm_3xtf32", "sgemm_3xtf32_wgmma"])
def test_the_gpu_errs_as_the_simulator_says(family: str) -> None:
    """Not bit by bit: the tensor cores also cut terms, which the simulator does not model."""
    problem, device, space = Problem(64, 64, 1024, math="3xtf32"), current_device(0), Space.load(family)
    if not space.serves(problem, device):
        pytest.skip(f"{family} does not serve {device.name}")
    config = space.fitted(list(space.presets.values())[-1], problem, device)
    source, (a, b) = render(space, config, problem, device), operands(problem)
    reference, _ = exact(problem, a, b)
    binary = compiled(source)
    c, launch = np.zeros(problem.c_shape, np.float32), source.launch
    args: tuple[Any, ...] = (1.0, a, b, 0.0, c, *workspace_of(source.launch).values())
    run_ptx(
        binary.ptx, source.entry, launch.grid, launch.block, args, shared_bytes=launch.shared_bytes
    ).raise_if_faulty()
    errors = [np.linalg.norm(each - reference) for each in (launched(source, binary, a, b), c)]
    assert 0.5 < errors[0] / errors[1] < 2


def test_operands_that_are_not_finite_go_to_the_fp32_kernel() -> None:
    import cupy

    kernel = best_kernel(512, 512, 512, math="3xtf32", check_finite=True)
    assert isinstance(kernel, CheckedKernel)
    a, b = operands(kernel.problem)
    on_b = cupy.asarray(b)
    assert np.isfinite(cupy.asnumpy(kernel(cupy.asarray(a), on_b))).all()
    a[17, 33] = np.inf
    on_a = cupy.asarray(a)
    found, strict = (cupy.asnumpy(each(on_a, on_b)) for each in (kernel, kernel.strict))
    assert np.isinf(found[17]).all()
    np.testing.assert_array_equal(found, strict)


def test_bench_compares_with_cublas_in_tf32_and_shows_how_exact_each_is() -> None:
    """By a record that comes with the package."""
    problem = Problem(1024, 1024, 1024, math="3xtf32")
    (row,) = bench([Shape.of(problem)]).rows
    if row.missing:
        pytest.skip(row.missing)
    assert row.measured is not None, row.failure
    fp32, tf32 = row.libraries["cublas"], row.libraries["cublas_tf32"]
    assert isinstance(fp32, Baseline), fp32
    assert isinstance(tf32, Baseline), tf32
    assert fp32.error is not None
    assert tf32.error is not None
    assert row.measured.verdict.error <= fp32.error < 1e-5 < tf32.error < 1e-2
    assert tf32.timing.median_ms < fp32.timing.median_ms
    fastest = best_kernel(1024, 1024, 1024, math="any")
    assert (fastest.served, fastest.problem.math) == ("exact", "3xtf32")
