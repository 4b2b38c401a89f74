"""The pipeline with real compiles and a judge that answers at once: nothing is lost, merged or left out."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
from tuning import PLAIN

from autotune.code.compiler import compile_text
from autotune.code.pool import CompilePool
from autotune.code.render import render
from autotune.records.trials import TrialLog, read_log, read_trials
from autotune.search import WAIT, Search
from autotune.search.candidates import Candidates
from autotune.search.demand import SPARE, Demand
from autotune.space.space import Space
from autotune.tuning.budget import Budget
from autotune.tuning.built import KEPT
from autotune.tuning.limits import LAUNCHES, TRIAL_TIMEOUT_S, trial_limit, unlaunchable
from autotune.tuning.pipeline import COMPILE_QUEUE, GPU_QUEUE, Pipeline
from autotune.tuning.progress import Progress
from autotune.tuning.resume import trial_header
from autotune.values.device import named_device
from autotune.values.measurement import Launch, MeasuredTrial, Timing, Verdict
from autotune.values.problem import Problem

H200 = named_device("h200")
PROBLEM = Problem(64, 64, 8)
KERNEL = """
extern "C" __global__ void threads(float alpha, const float* A, const float* B, float beta, float* C)
{
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < {{ m }}LL * {{ n }}) C[i] = alpha * A[0] * B[0];
}
//% if num_threads == 96
//% if broken
{{ 1 // (1 - broken) }}
//% endif
//% endif
"""
SPACE = """
family = "threads"
[parameters]
num_threads = { values = [64, 96, 128] }
broken = { values = [0, 1] }
[launch]
grid = "ceil_div(m * n, num_threads)"
block = "num_threads"
shared_bytes = "SHARED"
"""


class Judge:
    """Measures every candidate at once: the time is the block's threads."""

    def __init__(self):
        self.launches = []
        self._done = []
        self.waitables = ()

    @property
    def pending(self):
        return len(self._done)

    @property
    def next_deadline(self):
        return 0.0 if self._done else None

    def submit(self, key, binary, launch, best_ms, timeout_s, note):
        self.launches.append(launch)
        ms = float(launch.block[0])
        timing = Timing(ms, (ms, ms, ms), 1, 1, "warm", "back-to-back", None, False)
        trial = MeasuredTrial(timing, Verdict(True, 0.0, 1.0, "", "none"))
        note.started()
        note.ended(trial)
        self._done.append((key, trial))

    def collect(self):
        done, self._done = self._done, []
        return done


@pytest.fixture
def run(tmp_path):
    def run(shared="0"):
        (tmp_path / "threads.toml").write_text(SPACE.replace("SHARED", shared))
        (tmp_path / "threads.cu.jinja").write_text(KERNEL)
        space = Space.load(tmp_path / "threads.toml")
        candidates = Candidates([space], PROBLEM, H200)
        progress, judge = Progress(PROBLEM, Budget()), Judge()
        path = tmp_path / "x.trials.jsonl"
        with CompilePool(1) as pool, TrialLog(path, trial_header(space, PROBLEM, H200)) as log:
            search = Search(candidates.families[0].legal, seed=0, strategy="exhaustive")
            pipeline = Pipeline(candidates, search, pool, [judge], [log], progress, lambda _: None)
            pipeline.run()
        return progress, judge, read_trials(path)[1]

    return run


def test_one_machine_code_with_several_launches_is_measured_for_each(run):
    progress, judge, trials = run()
    assert sorted(launch.block[0] for launch in judge.launches) == [64, 96, 128]
    times = {
        trial["config"]["num_threads"]: trial.get("median_ms")
        for trial in trials
        if not trial["config"]["broken"]
    }
    assert times == {64: 64.0, 96: 96.0, 128: 128.0}
    assert progress.best is not None
    assert progress.best.config["num_threads"] == 64


def test_a_config_that_does_not_render_is_one_rejection(run):
    progress, _, trials = run()
    assert progress.outcomes == Counter({"measured": 5, "compile": 1})
    (rejected,) = [trial for trial in trials if trial["outcome"] == "compile"]
    assert rejected["config"] == {"num_threads": 96, "broken": 1}
    assert "zero" in rejected["why"]
    json.dumps(trials)


def test_a_launch_that_cannot_be_is_a_constraint(run):
    progress, judge, _ = run(shared="0 - num_threads")
    assert progress.outcomes["constraint"] == 5
    assert judge.launches == []
    assert "-64 bytes of dynamic shared memory" in progress.examples["constraint"]


@pytest.mark.parametrize(
    "launch",
    [
        Launch.of("cooked", (0, 1, 1), (32, 1, 1)),
        Launch.of("cooked", (1, 1, 1), (2048, 1, 1)),
        Launch.of("cooked", (1, 1, 1), (0, 1, 1)),
        Launch.of("cooked", (1, 1, 65536), (32, 1, 1)),
    ],
)
def test_grids_and_blocks_out_of_range(launch):
    space = Space.load("sgemm")
    problem = Problem(4096, 4096, 4096)
    source = render(space, space.presets["long_block"], problem, H200)
    with CompilePool(1) as pool:
        pool.submit(0, source.text, source.entry, H200.arch)
        ((_, binary),) = pool.collect(30)
    assert unlaunchable(source, binary, H200) is None
    assert "give 1 to 2147483647 blocks" in unlaunchable(replace(source, launch=launch), binary, H200).why


# -- several judges, others, many candidates -----------------------------------------------------------------


@pytest.fixture
def plain(tmp_path):
    """Run a pipeline over the plain family; return it, its progress and the lines of its log."""
    space = Space.load(PLAIN)
    candidates = Candidates([space], PROBLEM, H200)
    path = tmp_path / "x.trials.jsonl"

    def plain(search, judges, budget=None):
        progress = Progress(PROBLEM, budget or Budget())
        with CompilePool(2) as pool, TrialLog(path, trial_header(space, PROBLEM, H200)) as log:
            pipeline = Pipeline(candidates, search, pool, judges, [log], progress, lambda _: None)
            pipeline.run()
            built = pipeline.build(pipeline.fastest()[:20])
        return pipeline, progress, read_log(path)[1], built

    plain.legal = candidates.families[0].legal
    return plain


def test_several_judges_share_the_candidates(plain):
    judges = [Judge(), Judge()]
    _, progress, lines, _ = plain(Search(plain.legal, seed=0, strategy="random"), judges)
    assert progress.outcomes == {"measured": 60}
    assert all(len(judge.launches) > 10 for judge in judges)
    assert {line["gpu"] for line in lines if line.get("event") == "started"} == {0, 1}


def test_only_the_fastest_are_kept_and_others_are_compiled_again(plain):
    pipeline, _, _, built = plain(Search(plain.legal, seed=0, strategy="random"), [Judge()])
    assert len(pipeline._kept) <= KEPT + 20
    order = pipeline.fastest()
    assert len(order) == 60
    assert [pipeline.trials[number].median_ms for number in order[:12]] == [32.0] * 12
    assert list(built) == order[:20]
    for number, each in built.items():
        assert each.source.config == pipeline.trials[number].config
        assert each.code == pipeline.trials[number].code


def test_a_search_that_waits_for_others_is_asked_again(plain):
    class Waiting(Search):
        waits = 3

        def ask(self):
            if self.asked == 5 and self.waits:
                self.waits -= 1
                return WAIT
            return None if self.asked == 8 else super().ask()

    search = Waiting(plain.legal, seed=0, strategy="random")
    _, progress, _, _ = plain(search, [Judge()])
    assert (progress.seen, search.waits) == (8, 0)


def test_the_pipeline_says_where_its_time_went(plain):
    _, progress, _, _ = plain(
        Search(plain.legal, seed=0, strategy="random"), [Judge()], Budget(evaluations=10)
    )
    assert set(progress.stages) == {"propose", "render", "compile", "first_outcome"}
    assert all(seconds > 0 for seconds in progress.stages.values())


def test_the_time_limit_grows_with_the_work_and_with_k():
    assert trial_limit(Problem(64, 64, 64)) == pytest.approx(TRIAL_TIMEOUT_S, rel=1e-3)
    assert trial_limit(Problem(4096, 4096, 4096)) > TRIAL_TIMEOUT_S + LAUNCHES * 0.3  # naive at 4096: 0.3 s
    assert trial_limit(Problem(1, 1, 10**8)) > 100


# -- how many candidates are under way -----------------------------------------------------------------------


def test_as_many_are_wanted_as_compile_while_one_is_measured():
    demand = Demand()
    demand.measured(10.0)
    assert demand.enough(queue=3) == math.inf
    demand.compile_s.add(0.45)
    assert demand.enough(queue=3) == math.inf  # one outcome has no distance
    demand.measured(10.1)
    assert demand.enough(queue=3) == 5 + SPARE + 3
    assert demand.enough(queue=6) == 5 + SPARE + 6
    for _ in range(1000):
        demand.compile_s.add(0.01)
    assert demand.enough(queue=3) == 1 + SPARE + 3


compiled = cache(compile_text)


class SlowPool:
    """Compilers of which one ends when nothing more is submitted; each compile says it took some seconds."""

    waitables = ()
    next_deadline = 0.0

    def __init__(self, workers, seconds):
        self._workers, self._seconds = workers, seconds
        self._jobs = []
        self._fed = False
        self.most = []  # under way after each submission

    @property
    def free(self):
        return self._workers - len(self._jobs)

    @property
    def pending(self):
        return len(self._jobs)

    def submit(self, key, text, entry, arch):
        self._jobs.append((key, compiled(text, entry, arch)))
        self.most.append(self.pending)
        self._fed = True

    def collect(self, timeout=0):
        count, self._fed = 1 - self._fed, False
        done, self._jobs = self._jobs[:count], self._jobs[count:]
        return [(key, replace(binary, seconds=self._seconds)) for key, binary in done]


@pytest.mark.parametrize(("seconds", "most"), [(1e-9, 1 + SPARE + GPU_QUEUE), (1e6, 20 + COMPILE_QUEUE)])
def test_no_more_candidates_are_under_way_than_keep_the_judges_busy(tmp_path, seconds, most):
    """Where compiling takes no time a few do; where it takes for ever, as many as there are compilers."""
    space = Space.load(PLAIN)
    candidates = Candidates([space], PROBLEM, H200)
    pool = SlowPool(20, seconds)
    with TrialLog(tmp_path / "x.trials.jsonl", trial_header(space, PROBLEM, H200)) as log:
        search = Search(candidates.families[0].legal, seed=0, strategy="exhaustive")
        progress = Progress(PROBLEM, Budget())
        Pipeline(candidates, search, pool, [Judge()], [log], progress, lambda _: None).run()
    assert progress.seen == 60
    assert max(pool.most[40:]) == most  # the first are compiled before anything is known
