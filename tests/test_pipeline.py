"""The pipeline with real compiles and a judge that answers at once: nothing is lost, merged or left out."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

from autotune import records
from autotune.compiler import CompilePool
from autotune.device import named_device
from autotune.gpu.worker import MeasuredTrial
from autotune.nvrtc import nvrtc_version
from autotune.pipeline import LAUNCHES, TRIAL_TIMEOUT_S, Pipeline, trial_limit, unlaunchable
from autotune.problem import Problem
from autotune.progress import Budget, Progress
from autotune.records.trials import TrialHeader, TrialLog, read_trials
from autotune.render import Launch, render
from autotune.search import Search
from autotune.space import Space
from autotune.timing import Timing
from autotune.verify import Verdict

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
{{ nothing }}
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
        self.next_deadline = None

    @property
    def pending(self):
        return len(self._done)

    def submit(self, key, binary, launch, best_ms, timeout_s):
        self.launches.append(launch)
        ms = float(launch.block[0])
        timing = Timing(ms, (ms, ms, ms), 1, 1, "warm", "back-to-back", False)
        self._done.append((key, MeasuredTrial(timing, Verdict(True, 0.0, 1.0, "", "none"))))

    def collect(self):
        done, self._done = self._done, []
        return done


@pytest.fixture
def run(tmp_path):
    def run(shared="0"):
        (tmp_path / "threads.toml").write_text(SPACE.replace("SHARED", shared))
        (tmp_path / "threads.cu.jinja").write_text(KERNEL)
        space = Space.load(tmp_path / "threads.toml")
        legal = space.enumerate(PROBLEM, H200)
        progress, judge = Progress(PROBLEM, Budget()), Judge()
        header = TrialHeader(
            family="threads",
            problem=PROBLEM,
            device=records.RecordedDevice.of(H200),
            space_digest="0" * 64,
            template_digest="0" * 64,
            nvrtc=nvrtc_version(),
        )
        path = tmp_path / "x.trials.jsonl"
        with CompilePool(1) as pool, TrialLog(path, header) as log:
            search = Search(legal, seed=0, strategy="exhaustive")
            Pipeline(space, legal, search, pool, judge, log, progress, lambda _: None, H200).run()
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
    assert "nothing" in rejected["why"]
    json.dumps(trials)


def test_a_launch_that_cannot_be_is_a_constraint(run):
    progress, judge, _ = run(shared="0 - num_threads")
    assert progress.outcomes["constraint"] == 5
    assert judge.launches == []
    assert "-64 bytes of dynamic shared memory" in progress.examples["constraint"]


@pytest.mark.parametrize(
    "launch",
    [Launch((0, 1, 1), (32, 1, 1), 0), Launch((1, 1, 1), (2048, 1, 1), 0), Launch((1, 1, 1), (0, 1, 1), 0)],
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


def test_the_time_limit_grows_with_the_work_and_with_k():
    assert trial_limit(Problem(64, 64, 64)) == pytest.approx(TRIAL_TIMEOUT_S, rel=1e-3)
    assert trial_limit(Problem(4096, 4096, 4096)) > TRIAL_TIMEOUT_S + LAUNCHES * 0.3  # naive at 4096: 0.3 s
    assert trial_limit(Problem(1, 1, 10**8)) > 100
