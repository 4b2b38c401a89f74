from __future__ import annotations

import json
import math
import time

import numpy as np
import pytest
from tuning import PLAIN, PROBLEM

from autotune.code.compiler import compile_text
from autotune.code.render import render
from autotune.errors import Rejected, UsageError
from autotune.space.space import Space
from autotune.tuning.budget import Budget
from autotune.tuning.built import Built
from autotune.tuning.progress import Progress
from autotune.tuning.trial import Trial, trial_id
from autotune.values import typed
from autotune.values.device import named_device
from autotune.values.measurement import Launch, MeasuredTrial, Timing, Verdict

H200 = named_device("h200")
SPACE = Space.load(PLAIN)


def measured(ms):
    timing = Timing(ms, (0.9 * ms, ms, 1.1 * ms), 7, 3, "cold", "graph", None, True)
    return MeasuredTrial(timing, Verdict(True, 1e-7, 1e-6, "", "N(0,1)"), 0.025)


@pytest.fixture(scope="module")
def built():
    source = render(SPACE, SPACE.presets["first"], PROBLEM, H200)
    return Built(source, compile_text(source.text, source.entry, H200.arch))


def trial(ms=None, kind="crash"):
    outcome = Rejected(kind, "because") if ms is None else measured(ms)
    return Trial("x", "plain", SPACE.presets["first"], outcome)


# -- a trial and its line ------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", [measured(1.5), Rejected("timeout", "no result after 5 s")])
def test_a_trial_comes_back_from_its_line(built, outcome):
    whole = Trial.of(built.source, built.binary, outcome, same_as="another")
    line = json.loads(json.dumps(typed.plain(whole.line())))
    back = Trial.read(line, "plain", "cold")
    assert typed.plain(back.line()) == typed.plain(whole.line())
    assert (back.code, back.config, back.median_ms) == (built.code, built.source.config, whole.median_ms)
    assert whole.id == trial_id(built.source)
    assert whole.id.startswith("plain:value3-num_threads64@")


def test_a_trial_that_did_not_compile_has_no_code(built):
    line = Trial.of(built.source, None, Rejected("compile", "bad text")).line()
    assert set(line) == {"id", "config", "outcome", "why"}
    assert Trial.read(line, "plain", "warm").code is None


def test_a_line_that_is_something_else_is_no_trial(built):
    line = json.loads(json.dumps(Trial.of(built.source, built.binary, measured(1.5)).line()))
    assert Trial.read(line, "plain", "warm") is not None
    for name in ("outcome", "median_ms", "quantiles", "config", "id", "error"):
        assert Trial.read({key: value for key, value in line.items() if key != name}, "plain", "warm") is None
    for change in (
        {"median_ms": -1.0},
        {"median_ms": "x"},
        {"quantiles": [1]},
        {"outcome": "estimated"},
        {"config": 3},
    ):
        assert Trial.read({**line, **change}, "plain", "warm") is None


def test_the_code_tells_machine_code_and_launch_apart(built):
    source = built.source
    other = type(source)(**{**vars(source), "launch": Launch.of("cooked", (1, 1, 1), (32, 1, 1))})
    again = compile_text(source.text.replace("3.0f", "4.0f"), source.entry, H200.arch)
    assert len({built.code, Built(other, built.binary).code, Built(source, again).code}) == 3


def test_what_another_process_says_of_a_candidate():
    assert Trial.told("plain", SPACE.presets["first"], 2.5, "measured", "").median_ms == 2.5
    for kind, expected in (("timeout", "timeout"), ("rejected", "crash")):
        told = Trial.told("plain", SPACE.presets["first"], None, kind, "because")
        assert (told.kind, told.why) == (expected, "because")


# -- progress ------------------------------------------------------------------------------------------------


def test_candidates_without_an_improvement_are_counted():
    progress = Progress(PROBLEM, Budget())
    for ms, stale in ((2.0, 0), (None, 1), (1.995, 2), (1.98, 0), (1.975, 1), (1.971, 2), (1.969, 0)):
        progress.count(trial(ms))
        assert progress.stale == stale, ms
    assert progress.best.median_ms == 1.969
    assert progress.outcomes == {"measured": 6, "crash": 1}
    assert progress.examples == {"crash": "value3-num_threads64: because"}


def test_stages_add_up_to_the_time_since_the_command_began():
    progress = Progress(PROBLEM, Budget(), began=time.monotonic() - 3.0)
    progress.add("compile", 10.0)
    before = time.monotonic()
    progress.end("start")
    between = time.monotonic()
    time.sleep(0.05)
    after = time.monotonic()
    progress.end("search")
    assert before - progress.began <= progress.stages["start"] <= between - progress.began
    assert after - between <= progress.stages["search"] <= time.monotonic() - before
    progress.end("finals")
    total = sum(progress.stages[stage] for stage in ("start", "search", "finals"))
    assert after - progress.began <= total <= time.monotonic() - progress.began


def test_a_budget_may_be_its_text():
    assert Budget.of("2m") == Budget(seconds=120.0)
    assert Budget.of(Budget(evaluations=3)) == Budget(evaluations=3)
    with pytest.raises(UsageError, match="is not understood"):
        Budget.of("soon")


def test_a_budget_may_be_a_number_of_candidates():
    for number in (300, np.int64(300), np.uint16(300)):
        assert str(Budget.of(number)) == "300"
        assert type(Budget.of(number).evaluations) is int
    for wrong in (0, -1, True, 2.5, None, [3], 10**20, 10**5000, b"60s", "9" * 5000, "nan", "1e9", ""):
        with pytest.raises(UsageError, match=r"^budget .* (is not understood: give a time|is out of range)"):
            Budget.of(wrong)


@pytest.mark.parametrize(
    ("wrong", "remedy"),
    [
        (10**20, "give less than a billion candidates"),
        pytest.param(10**5000, "give less than a billion candidates", id="5001 digits"),
        ("9" * 30 + "s", "give less than a billion candidates"),
        ("3.5", "is no whole number of candidates: give a time such as"),
        ("0", "give at least one candidate"),
    ],
)
def test_what_is_wrong_with_a_budget_is_said(wrong, remedy):
    with pytest.raises(UsageError, match=remedy):
        Budget.of(wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"seconds": 0},
        {"seconds": -1.0},
        {"seconds": math.nan},
        {"seconds": "x"},
        {"seconds": None},
        {"evaluations": 0},
        {"evaluations": 2.5},
        {"patience": 0},
    ],
)
def test_a_budget_that_ends_nothing_is_refused(wrong):
    with pytest.raises(UsageError, match="is out of range: give positive seconds"):
        Budget(**wrong)


def test_the_rate_is_of_this_run():
    progress = Progress(PROBLEM, Budget(), resumed=10, seconds=5.0)
    progress.outcomes["measured"] = 110
    assert progress.rate == 20.0
