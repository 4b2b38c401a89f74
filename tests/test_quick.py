"""`tune="quick"`: the first call for a shape measures a few points; a stub is in the GPU's place."""

from __future__ import annotations

import os
import shutil
import threading
import time
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from stub_gpu import TOO_LARGE
from tuning import PLAIN, Bench

from autotune import records
from autotune.errors import UsageError
from autotune.kernel import best, choices, matmul, multiply
from autotune.kernel.libraries import NumPyLibrary, Taken
from autotune.kernel.machine import NoArray
from autotune.kernel.once import Once
from autotune.measure.worker import GpuWorker
from autotune.records import Store, locks
from autotune.space.space import Space, families
from autotune.tuning import quick, tuner
from autotune.tuning.finals import QUICK_FINALISTS
from autotune.tuning.prediction import prediction
from autotune.values.device import named_device
from autotune.values.problem import MATHS, Problem

H200 = named_device("h200")


class Gpu:
    """The machine that `best_kernel` would find, with a stream that can be in a capture."""

    def __init__(self):
        self.device, self.ordinal, self.options, self.ndarray = H200, 0, (), NoArray
        self.captured = set()

    def capturing(self, stream):
        return stream in self.captured

    def take(self, a, b, out, stream):
        raise AssertionError

    def current_stream(self, ordinal):
        return SimpleNamespace(ptr=0)

    def load(self, source, binary):
        return lambda *words: None


@pytest.fixture
def gpu(monkeypatch):
    """A GPU, and nothing that an earlier test left in the process."""
    machine = Gpu()
    for module in (best, multiply):
        monkeypatch.setattr(module, "machine_of", lambda device: machine)
    monkeypatch.setattr(best, "_told", {})
    monkeypatch.setattr(multiply, "_kernels", Once())
    monkeypatch.setattr(quick, "_failed", {})
    monkeypatch.setattr(quick, "_shops", {})
    monkeypatch.setattr(quick, "SEARCH_S", 60.0)  # it ends when all is measured
    monkeypatch.delenv("AUTOTUNE_TUNE", raising=False)
    yield machine
    quick.close()


@pytest.fixture
def bench(tmp_path, monkeypatch, gpu):
    return Bench(tmp_path, monkeypatch)


def written(folder, more=""):
    """A family of 60 points, of which 15 are presets, because no model knows which are fast."""
    folder.mkdir()
    shutil.copy(PLAIN.with_name("plain.cu.jinja"), folder)
    presets = [
        f"[presets.v{value}t{threads}]\nvalue = {value}\nnum_threads = {threads}\n"
        for value in (0, 5, 9)
        for threads in (32, 64, 96, 128, 160)
    ]
    text, path = PLAIN.read_text(), folder / "plain.toml"
    path.write_text(text[: text.index("[presets")] + "\n".join(presets) + more)
    return Space.load(path)


@pytest.fixture
def space(tmp_path):
    return written(tmp_path / "many")


@pytest.fixture
def asked(bench, space):
    """`best_kernel` for m x 64 x 8."""
    return lambda m=64, **words: best.best_kernel(m, 64, 8, **{"space": space, "root": bench.root, **words})


@pytest.fixture
def served(asked):
    """The same; a warning is an error."""

    def served(*words, **named):
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            return asked(*words, **named)

    return served


@pytest.fixture
def started(monkeypatch):
    """Workers that were started, by what they were to measure first."""
    started = []
    begin = tuner.GpuWorker

    def start(ordinal, problem, cold):
        started.append(problem)
        return begin(ordinal, problem, cold=cold)

    monkeypatch.setattr(tuner, "GpuWorker", start)
    return started


# --- what is measured, and what the record says ---


def test_a_few_points_are_measured_and_the_record_says_how_few(served, bench):
    kernel = served(tune="quick")
    assert (kernel.served, kernel.record.evidence) == ("exact", "measured")
    search = kernel.record.search
    assert (search.strategy, search.complete, search.seen, search.legal) == ("quick", False, 15, 15)
    assert search.extent == "15 of the first 15"
    assert len(bench.outcomes()) == bench.measured.total() == 15 < quick.FIRST
    assert sum(line.get("event") == "final" for line in bench.lines()) == QUICK_FINALISTS
    assert kernel.record.timing.median_ms == min(line["median_ms"] for line in bench.outcomes())
    stored = Store(bench.root).find(H200, "plain", kernel.problem)
    assert records.to_json(stored) == records.to_json(kernel.record)


def test_what_has_a_record_is_not_measured_again(served, bench):
    first = served(tune="quick")
    assert served(tune="quick").record == first.record
    assert bench.measured.total() == 15


def test_a_later_search_goes_on_from_there(served, bench, space):
    first = served(tune="quick").record
    later = bench.tune(space)
    assert (later.search.resumed, later.search.seen, later.search.complete) == (15, 60, True)
    assert max(bench.measured.values()) == 1
    assert later.timing.median_ms <= first.timing.median_ms
    assert served().record.search.strategy == "random"
    assert served(tune="quick").record == served().record


def test_the_points_are_the_first_that_the_model_expects_of_all_families(bench, monkeypatch):
    monkeypatch.setattr(quick, "FIRST", 2)
    problem = Problem(200, 136, 72)
    spaces = families(problem, H200)
    expected = prediction(problem, H200, spaces, Store(bench.root)).points[:2]
    kernel = best.best_kernel(200, 136, 72, tune="quick", root=bench.root)
    assert kernel.served == "exact"
    tried = [line["config"] for path in bench.logs for line in bench.outcomes(path.name.partition("_f32")[0])]
    found = {tuple(config.items()) for config in tried}
    assert found == {tuple(point.config.items()) for point, _ in expected}


def test_every_math_without_a_record_is_measured_within_the_same_limits(bench, tmp_path, monkeypatch, gpu):
    spaces = {
        "ffma": written(tmp_path / "lanes"),
        **{math: written(tmp_path / math, f'\n[serves]\nmath = "{math}"\n') for math in ("3xtf32", "3xfp16")},
    }
    for module in (best, choices, tuner):
        monkeypatch.setattr(module, "families", lambda problem, device: [spaces[problem.math]])
    problems = [Problem(64, 64, 8, math=math) for math in MATHS]
    best.search_missing(problems, gpu, Store(bench.root), tune="quick")
    names = {path.name for path in bench.root.glob("*/*.json")}
    assert names == {f"plain_{problem.key}.json" for problem in problems}
    found = [Store(bench.root).find(H200, "plain", problem).search.seen for problem in problems]
    assert found == [5, 5, 5]


# --- who asks ---


def test_the_environment_asks_for_programs_that_do_not(served, bench, monkeypatch):
    assert served().served == "predicted"
    monkeypatch.setenv("AUTOTUNE_TUNE", "")
    assert served().served == "predicted"
    monkeypatch.setenv("AUTOTUNE_TUNE", "quick")
    assert served(tune=False).served == "predicted"
    assert bench.measured.total() == 0
    assert served().record.search.strategy == "quick"


def test_an_explicit_search_is_no_quick_one(served, monkeypatch):
    monkeypatch.setenv("AUTOTUNE_TUNE", "quick")
    assert served(tune=True, budget=20).record.search.strategy == "gp"


def test_what_the_environment_cannot_mean_is_one_line(served, monkeypatch):
    monkeypatch.setenv("AUTOTUNE_TUNE", "fast")
    with pytest.raises(UsageError, match=r"^AUTOTUNE_TUNE='fast' is unknown: set it to quick, or unset it$"):
        served()
    assert served(tune=False).served == "predicted"
    assert served(tune="quick").served == "exact"


@pytest.mark.parametrize("wrong", ["", "fast", "QUICK", 2, 1.0, [], np.zeros(2)])
def test_what_an_argument_cannot_mean_is_one_line(served, wrong):
    with pytest.raises(UsageError, match=r"^tune .* is unknown: give True, False, 'quick', or None$"):
        served(tune=wrong)


def test_the_simulator_is_not_tuned_whatever_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOTUNE_TUNE", "quick")
    a = np.ones((9, 5), np.float32)
    assert (matmul(a, a.T, device="simulator") == 5).all()
    for asked in ("quick", True):
        with pytest.raises(UsageError, match=f"in the simulator: leave out tune={asked!r}"):
            best.best_kernel(9, 9, 5, device="simulator", tune=asked, root=tmp_path)


# --- what fails ---


def test_a_worker_that_cannot_start_is_one_line_and_what_is_predicted_serves(asked, served, monkeypatch):
    started = []

    def start(ordinal, problem, cold):
        started.append(problem)
        return GpuWorker(ordinal, problem, cold=cold, service="stub_gpu:never_starts")

    monkeypatch.setattr(tuner, "GpuWorker", start)
    with pytest.warns(UserWarning, match="^tune='quick' measured nothing, and what is predicted") as told:
        assert asked(tune="quick").served == "predicted"
    (told,) = (each for each in told if each.category is UserWarning)
    assert "libsomething.so is missing" in str(told.message)
    for m in (64, 96):
        assert served(m, tune="quick").served == "predicted"
    assert len(started) == 1  # it would fail again


def test_a_shape_without_room_leaves_the_others(asked, served):
    with pytest.warns(UserWarning, match="needs 2 bytes of device memory and 1 are free"):
        assert asked(TOO_LARGE, tune="quick").served == "predicted"
    assert served(64, tune="quick").served == "exact"


def test_a_gpu_on_which_nothing_fits_is_left_alone_after_some_tries(asked, started):
    for n in range(quick.MOST_FAILURES + 2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert (
                asked(TOO_LARGE, layout=("nn", "nt", "tn", "tt", "nn")[n], beta=n // 4, tune="quick").served
                == "predicted"
            )
    assert len(started) == quick.MOST_FAILURES


def test_a_space_without_a_legal_point_is_no_fault_of_the_gpu(asked, served, tmp_path):
    nothing = '\n[constraints]\nno = { expr = "value > 99", reason = "none" }\n'
    space = written(tmp_path / "none", nothing)
    for m in range(64, 64 + quick.MOST_FAILURES):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(UsageError, match="no config is legal for"):
                asked(m, space=space, tune="quick")
    assert served(tune="quick").served == "exact"


def test_a_folder_that_cannot_be_written_is_one_line(asked, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="cannot be written"):
        assert asked(tune="quick", root=tmp_path / "file").served == "predicted"


def test_a_candidate_that_kills_the_worker_hurts_nobody_else(served, bench, monkeypatch, tmp_path):
    (tmp_path / "fault").write_text("first crash")
    monkeypatch.setenv("STUB_FIRST", str(tmp_path / "once"))
    monkeypatch.setenv("STUB_FAULT", str(tmp_path / "fault"))
    kernel = served(tune="quick")
    assert kernel.served == "exact"
    assert kernel.record.search.outcomes["crash"] == 1


# --- streams in a capture ---


def test_nothing_is_measured_while_a_stream_is_captured(served, bench, gpu):
    gpu.captured.add(None)  # the current one
    assert served(tune="quick").served == "predicted"
    assert not bench.logs
    gpu.captured.clear()
    assert served(tune="quick").served == "exact"


def test_matmul_measures_at_the_first_call_outside_of_a_capture(bench, gpu, monkeypatch):
    monkeypatch.setattr(quick, "FIRST", 1)
    monkeypatch.setenv("AUTOTUNE_CACHE_DIR", str(bench.root))
    monkeypatch.setenv("AUTOTUNE_TUNE", "quick")
    called = []
    monkeypatch.setattr("autotune.kernel.kernel.Kernel.run", lambda kernel, *words: called.append(kernel))
    library = NumPyLibrary()

    def taken(a, b, out, stream):
        left, right = (library.view("a", each, 0)[0]._replace(ordinal=0) for each in (a, b))
        return Taken(left, right, None, stream, library, a)

    monkeypatch.setattr(multiply, "take", taken)
    a, b = np.ones((44, 20), np.float32), np.ones((20, 36), np.float32)
    gpu.captured.add(7)
    for stream in (7, 5, 7):
        matmul(a, b, stream=stream)
    matmul(a, b, stream=5, tune=False)
    assert [kernel.served for kernel in called[:3]] == ["predicted", "exact", "exact"]
    assert called[3] is called[0]
    assert bench.measured.total() == 1


# --- the processes that are kept ---


def test_one_worker_serves_many_shapes_and_threads(asked, served, bench, started):
    served(64, tune="quick")
    found = []
    threads = [
        threading.Thread(target=lambda m=m: found.append(asked(m, tune="quick"))) for m in (96, 96, 128)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [kernel.served for kernel in found] == ["exact"] * 3
    assert len(started) == 1
    assert bench.measured.total() == 45
    assert max(bench.measured.values()) <= 3  # once for each shape


def test_processes_without_work_are_let_go(served, started, monkeypatch):
    monkeypatch.setattr(quick, "IDLE_S", 0.3)
    served(64, tune="quick")
    (shop,) = quick._shops.values()
    end = time.monotonic() + 20
    while shop._shop is not None:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert served(96, tune="quick").served == "exact"
    assert len(started) == 2


def test_a_forked_process_has_a_worker_of_its_own(served, started, bench):
    served(64, tune="quick")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if not quick._shops and served(96, tune="quick").served == "exact" else 2
            quick.close()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert served(128, tune="quick").served == "exact"
    assert len(started) == 1


# --- several processes ---


def test_two_processes_do_the_work_once(served, bench, monkeypatch):
    monkeypatch.setenv("STUB_SECONDS", "0.05")
    children = []
    for _ in range(3):
        children.append(os.fork())
        if children[-1] == 0:
            status = 1
            try:
                status = 0 if served(tune="quick").served == "exact" else 2
                quick.close()
            finally:
                os._exit(status)
    ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert ends == [0, 0, 0]
    assert bench.measured.total() == 15
    assert not list(bench.root.glob("*/*.lock"))


def test_who_waits_for_too_long_serves_what_is_predicted(asked, served, bench, monkeypatch):
    monkeypatch.setattr(quick, "WAIT_S", 0.1)
    problem = Problem(64, 64, 8)
    path = Store(bench.root).home(H200) / f"{problem.key}.quick.lock"
    with locks.held(path, 1) as mine:
        assert mine
        with pytest.warns(UserWarning, match="another process has been tuning 64 x 64 x 8 nn for more than"):
            assert asked(tune="quick").served == "predicted"
    assert served(tune="quick").served == "exact"
