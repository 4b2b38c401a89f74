"""One comparison over host memory: kernel and libraries are Python functions on the same addresses."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from types import SimpleNamespace

import numpy as np
import pytest
from host_gpu import HostGpu, NumpyKernels
from test_bench import COMPARISON, FACTS

pytest.importorskip("cupy")
from autotune.errors import DeviceError, MachineFault, Rejected
from autotune.measure import cuda, service, stand
from autotune.measure.comparison import LIBRARIES, Baseline
from autotune.measure.cublas import CublasError
from autotune.measure.places import BOUNDARY, PERIOD, PLACES, STEP
from autotune.measure.site import Site
from autotune.values.device import named_device
from autotune.values.measurement import Launch, MeasuredTrial
from autotune.values.problem import Problem

PROBLEM = Problem(40, 30, 20, "nt", beta=1)


class Entrant:
    """A multiplication on host memory that takes ``ms`` and does what ``mistake`` does to C."""

    def __init__(self, gpu, ms, mistake=lambda out: None, refuses=False):
        self.gpu, self.ms, self.mistake, self.refuses = gpu, ms, mistake, refuses
        self.calls, self.places = [], []

    def __call__(self, alpha, a, b, beta, c):
        if self.refuses:
            raise CublasError("cublasLtMatmul returned status 15")
        self.calls.append((alpha, beta, c))
        self.places.append((a, b, c))
        left = self.gpu.view(a, np.float32, 800).reshape(40, 20)
        right = self.gpu.view(b, np.float32, 600).reshape(30, 20)
        out = self.gpu.view(c, np.float32, 1200).reshape(40, 30)
        out[:] = np.float32(alpha) * (left @ right.T) + (np.float32(beta) * out if beta else 0)
        self.mistake(out)


class Timer:
    """Runs each launch of a sample once, in turns through the operands."""

    def __init__(self, gpu, calls, kernels):
        self.calls, self.next, self.method, self.kernels = calls, 0, None, kernels

    def prepare(self, launches, method):
        self.method = method

    def start(self):
        return self.sample

    def sample(self):
        call = self.calls[self.next]
        self.next = (self.next + 1) % len(self.calls)
        call()
        return call.func.ms


def tf32(out):
    """Err as much as operands of 11 bits do."""
    out *= (1 + 3e-4 * np.random.default_rng(0).standard_normal(out.shape)).astype(np.float32)


@pytest.fixture
def bench(monkeypatch):
    gpu = HostGpu()
    site = object.__new__(Site)  # without a GPU to open
    site.gpu, site.kernels, site.clocks = gpu, NumpyKernels(gpu), None
    site.device, site._driver, site._address, site._uuid, site._start_s = FACTS.device, "1", "0", None, {}
    made = service._Bench(site, None, 1, cold=False)
    made.kernel, made.library = Entrant(gpu, 1.0), Entrant(gpu, 2.0)
    made.algorithms = [
        Entrant(gpu, 1.5),
        Entrant(gpu, 0.1, refuses=True),
        Entrant(gpu, 0.8),
        Entrant(gpu, 0.82),
    ]
    site.cublas = SimpleNamespace(multiplication=lambda problem: made.library)
    made.tf32 = Entrant(gpu, 0.5, tf32)
    site.cublas_tf32 = SimpleNamespace(multiplication=lambda problem: made.tf32)
    site.cublaslt = SimpleNamespace(multiplications=lambda problem: made.algorithms)
    monkeypatch.setattr(stand, "Multiplication", lambda gpu, cubin, launch: made.kernel)
    monkeypatch.setattr(stand, "EventTimer", Timer)
    monkeypatch.setattr(stand, "context_lost", lambda: False)
    monkeypatch.setattr(stand, "kernel_names", lambda gpu, enqueue: f"takes_{enqueue.func.ms}")
    return made


def run(bench, **changes):
    steps = []
    comparison = replace(COMPARISON, **{"problem": PROBLEM, **changes})
    kind, said = bench.answer("comparison", [comparison], steps.append)
    return kind, said, steps


def test_all_are_checked_and_timed_and_the_best_algorithm_is_chosen(bench):
    kind, compared, steps = run(bench, alpha=-1.0, beta=0.5)
    assert kind == "answer"
    assert isinstance(compared.kernel, MeasuredTrial)
    assert compared.kernel.timing.median_ms == 1.0
    assert "all elements" in compared.kernel.verdict.inputs
    cublas = compared.libraries["cublas"]
    assert cublas == Baseline(cublas.timing, "takes_2.0", 1, cublas.error)
    assert 0 < cublas.error < 1e-6
    best = compared.libraries["cublaslt"]
    assert (best.timing.median_ms, best.kernel, best.algorithms) == (0.8, "takes_0.8", 3)
    assert steps[:2] == [None, "kernel"]
    assert {"cublas", "cublaslt"} <= set(steps)
    assert {call[:2] for call in bench.kernel.calls} == {(-1.0, 0.5), (1.0, 0.0)}  # the second: over NaN


def test_a_wrong_kernel_is_not_timed_and_the_libraries_are(bench):
    def mistake(out):
        out[39, 29] += 1

    bench.kernel.mistake = mistake
    kind, compared, _ = run(bench)
    assert kind == "answer"
    assert compared.kernel.kind == "correctness"
    assert "C[39, 29]" in compared.kernel.why
    assert isinstance(compared.libraries["cublas"], Baseline)


def test_a_wrong_library_is_named(bench):
    def mistake(out):
        out[:] = np.nan

    bench.library.mistake = mistake
    _, compared, _ = run(bench)
    assert compared.libraries["cublas"].kind == "correctness"
    assert isinstance(compared.kernel, MeasuredTrial)


TENSOR = {"problem": replace(PROBLEM, math="3xtf32"), "libraries": (*LIBRARIES, "cublas_tf32")}


def test_cublas_in_tf32_is_timed_though_it_errs_as_tf32_does(bench):
    _, compared, _ = run(bench, **TENSOR)
    found = compared.libraries["cublas_tf32"]
    assert isinstance(found, Baseline)
    assert found.timing.median_ms == 0.5
    assert 1e-4 < found.error < 1e-3


@pytest.mark.parametrize(
    ("mistake", "why"),
    [
        (lambda out: None, "it did not compute in TF32"),
        (lambda out: out.__imul__(np.float32(1.1)), "relative error 0.1"),
        (lambda out: out.fill(np.nan), " is nan"),
    ],
)
def test_cublas_in_tf32_that_is_exact_or_wrong_is_no_baseline(bench, mistake, why):
    bench.tf32.mistake = mistake
    _, compared, _ = run(bench, **TENSOR)
    assert compared.libraries["cublas_tf32"].kind == "correctness"
    assert why in compared.libraries["cublas_tf32"].why
    assert isinstance(compared.kernel, MeasuredTrial)


def test_algorithms_that_all_refuse_leave_no_baseline(bench):
    bench.algorithms = [Entrant(bench._site.gpu, 1.0, refuses=True)] * 2
    _, compared, _ = run(bench)
    assert compared.libraries["cublaslt"] == Rejected("crash", "none of 2 algorithms can run")


def test_libraries_that_are_absent_or_lost_are_left_out(bench):
    bench._site.cublas = None
    _, compared, steps = run(bench, libraries=("cublas",))
    assert compared.libraries == {}
    assert set(steps) == {None, "kernel"}


def test_c_stays_finite_whatever_beta_is(bench):
    _, compared, _ = run(bench, beta=100.0)
    assert isinstance(compared.kernel, MeasuredTrial)
    assert {beta for _, beta, _ in bench.kernel.calls} == {100.0, 0.01, 0.0}
    c = bench.kernel.calls[-1][2]
    assert np.isfinite(bench._site.gpu.view(c, np.float32, 1200)).all()


def test_all_are_timed_on_the_same_operands_at_each_place(bench):
    """The places are those of every process: offsets that are spread over 16 KiB, the first at boundaries."""
    _, compared, _ = run(bench, beta=0.5)
    assert isinstance(compared.kernel, MeasuredTrial)
    ours, theirs = (list(dict.fromkeys(each.places[-PLACES * 5 :])) for each in (bench.kernel, bench.library))
    assert ours[-PLACES:] == theirs[-PLACES:]
    offsets = [[address % BOUNDARY for address in place] for place in ours[-PLACES:]]
    assert offsets[0] == [0, 0, 0]
    for own in zip(*offsets, strict=True):
        assert len(set(own)) == PLACES
        assert max(own) < PERIOD
        assert not any(offset % STEP for offset in own)


def test_without_memory_for_another_copy_all_stay_where_they_are(bench, monkeypatch):
    def full(gpu, problem, operands):
        raise cuda.runtime.CUDARuntimeError(2)

    monkeypatch.setattr(stand, "Places", full)
    _, compared, _ = run(bench)
    assert isinstance(compared.kernel, MeasuredTrial)
    assert len({place[2] for place in bench.kernel.places}) == 1


def test_cold_launches_rotate_through_copies_and_use_graphs(bench, monkeypatch):
    monkeypatch.setattr("autotune.measure.rotation.COLD_L2_FACTOR", 0.0005)
    copies = round(0.0005 * named_device("h200").l2_bytes / (4 * (800 + 600 + 1200)) + 0.5)
    assert copies > 2
    _, compared, _ = run(bench, cold=True)
    timing = compared.kernel.timing
    assert (timing.l2, timing.method) == ("cold", "graph")
    assert len({c for _, _, c in bench.kernel.calls}) == copies


def test_operands_that_do_not_fit_are_refused(bench):
    bench._site.gpu.memory_free = 1000
    kind, error, _ = run(bench)
    assert kind == "refused"
    assert isinstance(error, DeviceError)


def test_a_cuda_error_is_a_fault(bench, monkeypatch):
    def broken(*arguments):
        raise CublasError("cublasSgemm_v2 returned status 13")

    bench.library = broken
    kind, rejection, steps = run(bench)
    assert (kind, rejection.kind) == ("fault", "crash")
    assert steps[-1] == "cublas"


# -- candidates and finalists --------------------------------------------------------------------------------


@pytest.fixture
def standing(bench):
    """The same over operands of a problem of its own, with a kernel for each name of an entry."""
    made = service._Bench(bench._site, PROBLEM, 1, cold=False)
    gpu = bench._site.gpu
    bench._site.cublas.version = "13.1.0"
    made.library, made.kernels = bench.library, {"good": bench.kernel, "better": Entrant(gpu, 0.9)}
    made.kernels["wrong"] = Entrant(gpu, 0.1, lambda out: out.__setitem__((39, 29), np.nan))
    made.kernels["broken"] = Entrant(gpu, 0.1, refuses=True)
    return made


def launch(name):
    return Launch.of(name, (1, 1, 1), (32, 1, 1))


@pytest.fixture
def named(standing, monkeypatch):
    def loaded(gpu, cubin, launch):
        return standing.kernels[launch.kernels[0].entry]

    monkeypatch.setattr(stand, "Multiplication", loaded)
    return lambda *names: {10 + i: (b"", launch(name)) for i, name in enumerate(names)}


def test_a_candidate_is_checked_then_timed(standing, named):
    outcome, usable = standing.trial(b"", launch("better"), None)
    assert usable
    assert (outcome.timing.median_ms, outcome.timing.l2, outcome.verdict.ok) == (0.9, "warm", True)
    assert {call[:2] for call in standing.kernels["better"].calls[1:-1]} == {(1.0, 1.0)}
    outcome, usable = standing.trial(b"", launch("wrong"), None)
    assert (outcome.kind, usable) == ("correctness", True)
    assert "C[39, 29]" in outcome.why


def test_finalists_are_timed_in_turns_with_cublas(standing, named):
    steps = []
    kind, finals = standing.answer("finals", [named("good", "wrong", "better"), True], steps.append)
    assert kind == "answer"
    assert list(finals.outcomes) == [10, 11, 12]
    assert [finals.outcomes[n].timing.median_ms for n in (10, 12)] == [1.0, 0.9]
    assert "(all elements, new inputs)" in finals.outcomes[11].why
    assert (finals.cublas.median_ms, finals.cublas_kernel) == (2.0, "takes_2.0")
    assert finals.cublas_version == "13.1.0"
    assert steps[0] is None
    assert set(steps) == {None, 10, 11, 12, "cublas"}


def test_finals_without_cublas_leave_it_alone(standing, named):
    kind, finals = standing.answer("finals", [named("good"), False], [].append)
    assert (kind, finals.cublas, finals.cublas_kernel, finals.cublas_version) == ("answer", None, None, None)
    assert standing.library.calls == []


def test_a_finalist_whose_launch_fails_is_announced_last(standing, named):
    steps = []
    kind, rejection = standing.answer("finals", [named("good", "broken"), True], steps.append)
    assert (kind, rejection.kind, steps[-1]) == ("fault", "crash", 11)


# -- whose fault it is that there is no memory ---------------------------------------------------------------


class Starved:
    """A kernel that needs memory which is not there."""

    def __init__(self, gpu, left):
        self.gpu, self.left = gpu, left

    def __call__(self, *arguments):
        self.gpu.memory_free = self.left
        raise cuda.runtime.CUDARuntimeError(2)


@pytest.fixture
def starving(standing, monkeypatch, named):
    site = standing._site
    before = standing.facts.memory_free
    standing.kernels["others"] = Starved(site.gpu, before // 2)
    standing.kernels["itself"] = Starved(site.gpu, before)
    return named


def test_memory_that_others_took_is_no_fault_of_the_candidate(standing, starving):
    before = standing.facts.memory_free
    outcome, usable = standing.trial(b"", launch("others"), None)
    assert isinstance(outcome, MachineFault)
    assert outcome.why.startswith("cudaErrorMemoryAllocation")
    assert outcome.why.endswith(f": {before // 2} bytes of the GPU are free, {before} were at the start")
    assert not usable  # another process tries again


def test_a_candidate_that_needs_more_memory_than_there_is_is_rejected(standing, starving):
    outcome, usable = standing.trial(b"", launch("itself"), None)
    assert (outcome.kind, outcome.why[:25], usable) == ("crash", "cudaErrorMemoryAllocation", True)


@pytest.mark.parametrize(("name", "kind"), [("others", MachineFault), ("itself", Rejected)])
def test_so_it_is_in_the_finals(standing, starving, name, kind):
    said, fault = standing.answer("finals", [starving("good", name), True], [].append)
    assert said == "fault"
    assert isinstance(fault, kind)


@pytest.mark.parametrize("status", [46, 214, 220, 805, 810])
def test_an_error_of_the_machine_is_no_fault_of_the_candidate(standing, named, status):
    def broken(*arguments):
        raise cuda.runtime.CUDARuntimeError(status)

    standing.kernels["broken"] = broken
    outcome, usable = standing.trial(b"", launch("broken"), None)
    assert isinstance(outcome, MachineFault), outcome
    assert not usable
    said, fault = standing.answer("finals", [named("good", "broken"), True], [].append)
    assert (said, type(fault)) == ("fault", MachineFault)


# -- for seconds ---------------------------------------------------------------------------------------------


def test_those_that_are_right_run_for_seconds_one_after_the_other(bench):
    def mistake(out):
        out[:] = np.nan

    _, compared, steps = run(bench, sustained_s=0.05)
    assert {name: each.mean_ms for name, each in compared.sustained.items()} == pytest.approx(
        {"kernel": 1.0, "cublas": 2.0, "cublaslt": 0.8}
    )
    assert {(each.seconds, each.watts) for each in compared.sustained.values()} == {(0.05, None)}
    turns = [name for name, _ in groupby(steps)]
    assert turns[-5:] == ["kernel", "cublas", "cublaslt", *LIBRARIES], "at last the kernels' names are asked"
    assert run(bench)[1].sustained == {}
    bench.library.mistake = mistake
    assert set(run(bench, sustained_s=0.05)[1].sustained) == {"kernel", "cublaslt"}
    bench.kernel.mistake = mistake
    assert run(bench, sustained_s=0.05)[1].sustained == {}


def test_a_finalist_runs_back_to_back_as_it_was_timed(standing, named):
    _, finals = standing.answer("finals", [named("better"), False], [].append)
    steps = []
    about = [(b"", launch("better")), finals.outcomes[10].timing, 0.05]
    kind, held = standing.answer("sustained", about, steps.append)
    assert (kind, held.seconds, held.mean_ms) == ("answer", 0.05, pytest.approx(0.9))
    assert (held.joules, held.power_by) == (None, None), "nobody reads clocks here"
    assert steps[0] is None
    assert set(steps[1:]) == {"kernel"}
