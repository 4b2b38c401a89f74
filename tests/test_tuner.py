"""Which candidates reach the finals, which of them wins, and what is stored of them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits
from tuning import PLAIN, PROBLEM, Bench

from autotune import records
from autotune.code.compiler import compile_text
from autotune.code.render import render
from autotune.errors import DeviceError, Rejected, TuningError, UsageError
from autotune.records import Store
from autotune.space.space import Space
from autotune.tuning.budget import Budget
from autotune.tuning.built import Built
from autotune.tuning.finals import FINALISTS, finalists, ranked, sustained_s
from autotune.tuning.held import SUSTAINED_S
from autotune.tuning.progress import Progress
from autotune.tuning.trial import Trial
from autotune.values.device import named_device
from autotune.values.measurement import Finals, MeasuredTrial, Timing, Verdict
from autotune.values.problem import Problem

H200 = named_device("h200")
SPACE = Space.load(PLAIN)


def measured(ms, spread=0.0):
    timing = Timing(ms, (ms * (1 - spread), ms, ms * (1 + spread)), 7, 1, "warm", "back-to-back", None, False)
    return MeasuredTrial(timing, Verdict(True, 0.0, 1.0, "", "none"))


class Ended:
    """What the finals ask of a pipeline."""

    def __init__(self, **trials):
        config = SPACE.presets["first"]
        self.trials = {
            int(name[1:]): Trial(name, "plain", config, outcome, code or name)
            for name, (outcome, code) in trials.items()
        }

    def fastest(self):
        timed = [number for number, trial in self.trials.items() if trial.median_ms is not None]
        distinct = {self.trials[n].code: n for n in sorted(timed, key=lambda n: -self.trials[n].cost)}
        return sorted(distinct.values(), key=lambda n: self.trials[n].cost)


def progress():
    return Progress(PROBLEM, Budget())


def test_the_fastest_of_distinct_code_and_then_those_behind_them():
    pipeline = Ended(**{f"t{n}": (measured(1.0 + n), f"c{n // 2}") for n in range(2 * FINALISTS + 4)})
    first, second = finalists(pipeline, [], progress())
    assert first == [2 * n for n in range(FINALISTS)]
    assert second == [2 * FINALISTS, 2 * FINALISTS + 2]


def test_stored_winners_defend_themselves_however_slow():
    pipeline = Ended(**{f"t{n}": (measured(1.0 + n), None) for n in range(FINALISTS + 5)})
    first, *_ = finalists(pipeline, [0, FINALISTS + 2, FINALISTS + 4], progress())
    assert first == [*range(FINALISTS), FINALISTS + 2, FINALISTS + 4]


def test_a_stored_winner_that_was_not_reached_or_failed_is_no_finalist():
    pipeline = Ended(t0=(measured(2.0), None), t1=(Rejected("compile", "no"), None))
    assert list(finalists(pipeline, [1, 99], progress())) == [[0]]


def test_nothing_measured_is_an_error_that_counts():
    told = progress()
    failed = Trial("x", "plain", SPACE.presets["first"], Rejected("compile", "bad text"))
    told.count(failed)
    told.count(failed)
    with pytest.raises(
        TuningError,
        match=r"0 of 2 candidates are usable \(2 compile, such as value3-num_threads64: bad text\)",
    ):
        next(finalists(Ended(), [], told))
    with pytest.raises(TuningError, match="ended first; give more"):
        next(finalists(Ended(), [], progress()))


# -- the choice ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built():
    legal = SPACE.enumerate(PROBLEM, H200)

    def built(number, registers):
        source = render(SPACE, legal.config(number), PROBLEM, H200)
        binary = compile_text(source.text, source.entry, H200.arch)
        return Built(source, dataclasses.replace(binary, registers=registers))

    return {number: built(number, registers) for number, registers in enumerate((40, 32, 32, 24, 255))}


def ranking(built, *times, defended=()):
    outcomes = dict(enumerate(times))
    return ranked(Finals(outcomes, None, None), built, list(defended))


def test_the_fastest_wins(built):
    times = [measured(ms) for ms in (1.03, 1.02, 1.01, 1.04, 1.0)]
    assert ranking(built, *times) == [4, 2, 1, 0, 3]
    assert ranking(built, *reversed(times)) == [0, 2, 3, 4, 1]


def test_of_those_within_half_a_percent_the_one_with_the_fewest_registers(built):
    assert ranking(built, *[measured(ms) for ms in (1.004, 1.003, 1.002, 1.02, 1.0)]) == [1, 4, 2, 0, 3]
    assert ranking(built, *[measured(ms) for ms in (1.0, 1.006, 1.002, 1.02, 1.0)]) == [2, 0, 4, 1, 3]


def test_a_stored_winner_stays_within_half_a_percent(built):
    times = [measured(ms) for ms in (1.004, 1.003, 1.002, 1.02, 1.0)]
    assert ranking(built, *times, defended=[0])[0] == 0
    assert ranking(built, *times, defended=[3])[0] == 1


def test_a_rejected_finalist_is_not_ranked(built):
    assert ranking(built, Rejected("crash", "x"), measured(2.0), Rejected("timeout", "y")) == [1]
    assert ranking(built, Rejected("crash", "x")) == []


# -- whole runs on a stub ------------------------------------------------------------------------------------


@pytest.fixture
def bench(tmp_path, monkeypatch):
    return Bench(tmp_path, monkeypatch)


@pytest.fixture
def other(tmp_path):
    """A second family, of two candidates."""
    folder = tmp_path / "other"
    folder.mkdir()
    for file in PLAIN.parent.iterdir():
        text = (
            file.read_text().replace("plain", "second").replace(" = { values = [0, 1,", " = { values = [3,")
        )
        text = text.replace("[3, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]", "[3]").replace(
            "[32, 64, 96, 128, 160]", "[32, 64]"
        )
        (folder / file.name.replace("plain", "second")).write_text(text)
    return Space.load(folder / "second.toml")


@pytest.fixture
def both(other, monkeypatch):
    monkeypatch.setattr("autotune.tuning.tuner.families", lambda problem, device: [SPACE, other])


def test_several_families_are_one_search(bench, both):
    record = bench.tune(space=None)
    assert (record.search.seen, record.search.legal, record.search.complete) == (62, 62, True)
    assert len(bench.outcomes("plain")) == 60
    assert len(bench.outcomes("second")) == 2
    times = [line["median_ms"] for name in ("plain", "second") for line in bench.outcomes(name)]
    assert record.timing.median_ms == pytest.approx(min(times), rel=0.005)
    stored = Store(bench.root).find(H200, record.family, PROBLEM)
    assert records.to_json(stored) == records.to_json(record)
    again = bench.tune(space=None)
    assert (again.search.resumed, again.config) == (62, record.config)
    assert bench.measured.total() == 62


def test_a_family_without_a_legal_config_is_left_out_with_a_word(bench, tmp_path, monkeypatch):
    path = tmp_path / "none.toml"
    path.write_text(f'extends = "{PLAIN}"\n[constraints]\nno = {{ expr = "value > 99", reason = "none" }}\n')
    monkeypatch.setattr("autotune.tuning.tuner.families", lambda problem, device: [SPACE, Space.load(path)])
    notes = []
    record = bench.tune(space=None, budget="3", watch=lambda progress: notes.append(list(progress.notes)))
    assert record.search.seen == 3
    assert notes[-1] == [
        f"left out: none.toml: no config is legal for {PROBLEM} on NVIDIA H200; the last were "
        "removed by no, value > 99 (none): widen [parameters]"
    ]


def test_the_winner_of_each_family_defends_itself(bench, both, other):
    alone = bench.tune(space=other)
    whole = bench.tune(space=None)
    second = Store(bench.root).find(H200, "second", PROBLEM)
    if whole.family == "plain":
        assert second.config == alone.config
        configs = [line["config"] for line in bench.lines("second") if line.get("event") == "final"]
        assert dict(alone.config) in configs[1:]


def test_a_stored_time_that_a_loser_no_longer_reaches_is_renewed(bench, both, other):
    alone = bench.tune(space=other)
    timing = dataclasses.replace(alone.timing, median_ms=0.5, quantiles_ms=(0.5, 0.5, 0.5))
    gflops = PROBLEM.flops / timing.median_ms / 1e6
    Store(bench.root).write(dataclasses.replace(alone, timing=timing, gflops=gflops))
    whole = bench.tune(space=None)
    assert whole.family == "plain"
    renewed = Store(bench.root).find(H200, "second", PROBLEM)
    assert renewed.timing.median_ms >= whole.timing.median_ms
    assert renewed.config == alone.config


def test_the_winner_is_run_back_to_back_for_its_energy(bench):
    record = bench.tune(budget="20")
    held = record.sustained
    assert (held.seconds, held.power_by) == (SUSTAINED_S, "energy counter")
    assert held.mean_ms == pytest.approx(1.25 * record.timing.median_ms, rel=1e-5)
    assert held.watts == pytest.approx(700, rel=1e-5)
    assert record == Store(bench.root).find(H200, "plain", PROBLEM)


@pytest.mark.parametrize(("budget", "seconds"), [("60s", SUSTAINED_S), ("300", SUSTAINED_S), ("2s", 0.0)])
def test_that_run_is_taken_from_a_budget_that_can_spare_it(budget, seconds):
    assert sustained_s(Budget.parse(budget)) == seconds


def test_what_replaces_a_winner_that_was_run_so_is_run_too_in_however_short_a_search(bench):
    assert bench.tune(budget="0.5s").sustained is None
    assert bench.tune(budget="20").sustained is not None
    assert bench.tune(budget="0.5s").sustained is not None


@pytest.mark.parametrize(
    ("fault", "why"), [("crash", "crash, the GPU worker died"), ("killed", "the GPU worker failed 3 times")]
)
def test_a_winner_that_fails_back_to_back_is_stored_without_its_energy(bench, monkeypatch, fault, why):
    monkeypatch.setenv("STUB_SUSTAINED", fault)
    notes = []
    record = bench.tune(budget="20", watch=lambda progress: notes.append(list(progress.notes)))
    assert record.sustained is None
    assert record == Store(bench.root).find(H200, "plain", PROBLEM)
    assert notes[-1][-1].startswith(f"the energy of a launch is not known: {why}")


def test_the_record_says_where_the_time_went(bench):
    search = bench.tune(budget="20").search
    stages = search.stages_s
    assert set(stages) == {
        "start",
        "search",
        "finals",
        "compile",
        "gpu",
        "propose",
        "render",
        "first_outcome",
    }
    assert stages["search"] == pytest.approx(search.seconds, abs=2)
    assert stages["start"] < stages["first_outcome"] < stages["start"] + stages["search"]
    assert 0.04 < stages["gpu"] < stages["search"]


def test_a_search_proposes_with_one_thread_of_blas_and_sets_it_back(bench):
    def threads():
        return [each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"]

    def watch(progress):
        if progress.stage == "searching":
            within.append(threads())

    within = []
    with threadpool_limits(2, user_api="blas"):
        if threads() != [2] * len(threads()) or not threads():
            pytest.skip("the threads of NumPy's BLAS cannot be set")
        bench.tune(budget="3", watch=watch)
        assert threads() == [2] * len(threads())
    assert within
    assert all(set(each) == {1} for each in within)


# -- what is plainly meant -----------------------------------------------------------------------------------


def test_arguments_may_be_what_is_plainly_meant(bench):
    record = bench.tune(
        space=str(bench.few),
        budget=3,
        seed=np.int64(1),
        ordinal=np.int32(0),
        workers=np.int64(1),
        root=str(bench.root),
    )
    assert (record.search.seen, record.search.seed, record.search.budget) == (3, 1, 3)
    again = bench.tune(bench.few, budget=np.int64(5), gpus=np.array([0]))
    assert (again.search.seen, again.search.resumed) == (5, 3)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"budget": True}, "budget True is not understood: give a time such as 60s"),
        ({"budget": 1.5}, "budget 1.5 is not understood"),
        ({"budget": None}, "budget None is not understood"),
        ({"budget": 0}, "budget '0' is out of range: give at least one candidate"),
        ({"budget": -3}, "budget '-3' is not understood"),
        ({"ordinal": "0"}, "GPU '0' is not a CUDA ordinal"),
        ({"ordinal": True}, "GPU True is not a CUDA ordinal"),
        ({"gpus": 2}, "gpus 2: give a list of CUDA ordinals, such as [0, 1]"),
        ({"gpus": [0, 0]}, "gpus [0, 0]: name one GPU or several, each once"),
        ({"gpus": [0.0]}, "GPU 0.0 is not a CUDA ordinal"),
        ({"workers": 0}, "workers 0: give the number of compiling processes"),
        ({"workers": 1.5}, "workers 1.5: give the number"),
        ({"seed": -1}, "seed -1 is out of range"),
        ({"problem": (64, 64, 8)}, "(64, 64, 8) is not a problem: give an autotune.Problem"),
    ],
)
def test_arguments_that_mean_nothing_are_one_line(bench, wrong, says):
    with pytest.raises(UsageError) as caught:
        bench.tune(**wrong)
    assert str(caught.value).startswith(says)
    assert bench.measured.total() == 0


def test_operands_that_do_not_fit_into_the_gpu_are_refused(bench):
    with pytest.raises(
        DeviceError, match=r"^A, B and C of 1000000 x .* take 12,000\.0 GB, and NVIDIA H200 has"
    ):
        bench.tune(problem=Problem(10**6, 10**6, 10**6))
    assert not bench.logs
