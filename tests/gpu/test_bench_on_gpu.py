"""The bench on a real GPU: kernels that are right and harmful, cuBLAS, and every algorithm of cuBLASLt."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_records import made
from test_gpu_worker import HARM, candidate

from autotune.errors import Rejected
from autotune.measure.comparison import Baseline, Comparison
from autotune.measure.worker import GpuWorker
from autotune.records import Store
from autotune.report.bench import bench
from autotune.space.space import Space
from autotune.values.device import current_device
from autotune.values.measurement import MeasuredTrial
from autotune.values.problem import LAYOUTS, Problem
from autotune.values.suite import Shape

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def device():
    return current_device(0)


@pytest.fixture(scope="module")
def gpu():
    with GpuWorker(0, None) as worker:
        worker.ready()
        yield worker


def comparison(device, problem, mistake="", alpha=1.0, beta=None, cold=False, value=""):
    binary, launch = candidate(device, problem, mistake, value=value)
    return Comparison(
        problem=problem,
        alpha=alpha,
        beta=float(problem.beta) if beta is None else beta,
        cubin=binary.cubin,
        launch=launch,
        seed=1,
        cold=cold,
        timeout_s=5.0,
    )


def test_the_copy_is_below_the_memory_and_not_by_far(gpu, device):
    assert 0.6 * device.bandwidth_gbs < gpu.bench_facts().copy_gbs < 1.02 * device.bandwidth_gbs


def test_what_is_sustained_is_no_faster_than_the_peak_and_draws_power(gpu, device):
    asked = replace(comparison(device, Problem(2048, 2048, 2048)), sustained_s=1.0)
    outcome = gpu.compare(asked)
    assert set(outcome.sustained) == {"kernel", "cublas", "cublaslt"}
    for name, held in outcome.sustained.items():
        brief = outcome.kernel if name == "kernel" else outcome.libraries[name]
        assert held.seconds == 1.0
        assert held.launches * held.mean_ms == pytest.approx(500, rel=0.2)
        assert 0.8 * brief.timing.median_ms < held.mean_ms < 2 * brief.timing.median_ms
        assert held.gflops(asked.problem.flops) < device.peak(asked.problem.math)
        if held.watts is not None:  # NVML serves this GPU
            assert 20 < held.watts < 2000
            assert 100 < held.sm_mhz <= 1.02 * device.clock_mhz


@pytest.mark.parametrize(("layout", "beta"), zip(LAYOUTS, (0, 1, 1, 0), strict=True))
def test_the_kernel_and_both_libraries_are_right_and_timed(gpu, device, layout, beta):
    outcome = gpu.compare(
        comparison(device, Problem(300, 520, 130, layout, beta), alpha=-1.5, beta=0.5 * beta)
    )
    assert isinstance(outcome.kernel, MeasuredTrial), outcome
    facts = gpu.bench_facts()
    for name, version in (("cublas", facts.cublas), ("cublaslt", facts.cublaslt)):
        assert (version is not None) == (name in outcome.libraries)
        if version is not None:
            found = outcome.libraries[name]
            assert isinstance(found, Baseline), found
            assert found.kernel
    if facts.cublaslt is not None:
        assert outcome.libraries["cublaslt"].algorithms > 1


@pytest.mark.parametrize("shape", [(1, 4096, 512), (4095, 33, 7), (5, 1, 1)])
def test_odd_shapes_are_timed_against_the_libraries(gpu, device, shape):
    outcome = gpu.compare(comparison(device, Problem(*shape, beta=1), beta=3.0))
    assert isinstance(outcome.kernel, MeasuredTrial), outcome
    assert all(isinstance(found, Baseline) for found in outcome.libraries.values()), outcome


@pytest.mark.parametrize("harm", ["one past the end", "illegal address", "endless"])
def test_harm_fails_its_own_comparison_only(gpu, device, harm):
    mistake, kind = HARM[harm]
    problem = Problem(256, 512, 64)
    outcome = gpu.compare(comparison(device, problem, mistake))
    assert isinstance(outcome.kernel, Rejected), outcome
    assert outcome.kernel.kind == kind
    assert isinstance(gpu.compare(comparison(device, problem)).kernel, MeasuredTrial)


def test_the_scalars_of_the_shape_are_those_checked(gpu, device):
    problem = Problem(256, 512, 64, beta=1)
    fixed = "1.5f * sum + (beta != 0.0f ? 0.5f * C[row * N + col] : 0.0f)"
    assert (
        gpu.compare(comparison(device, problem, alpha=2.0, beta=0.5, value=fixed)).kernel.kind
        == "correctness"
    )


def test_cold_comparisons_are_replayed_as_graphs(gpu, device):
    outcome = gpu.compare(comparison(device, Problem(64, 1024, 1024), cold=True))
    timings = [outcome.kernel.timing, *(found.timing for found in outcome.libraries.values())]
    assert {(timing.l2, timing.method) for timing in timings} == {("cold", "graph")}


def test_stored_records_are_benched_from_end_to_end(device, tmp_path):
    space = Space.load("sgemm")
    shapes = []
    for problem, alpha, beta in (
        (Problem(256, 256, 256), 1.0, 0.0),
        (Problem(1021, 1021, 100, "nt", 1), -1.0, 1.0),
    ):
        config = space.fitted(space.presets["tiny_block"], problem, device)
        record = made(problem, config=config, device=device)
        Store(tmp_path).write(record)
        shapes.append(Shape(str(problem), problem, alpha, beta))
    shapes.append(replace(shapes[0], id="none", problem=Problem(257, 256, 256)))
    report = bench(shapes, root=tmp_path)
    assert [row.measured is not None for row in report.rows] == [True, True, False], report.rows
    assert report.means[-1].shapes == 2
    assert 0 < report.share(report.rows[0]) < 2
