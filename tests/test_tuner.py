"""Which candidates reach the finals."""

from __future__ import annotations

import pytest

from autotune.compiler import compile_text
from autotune.device import named_device
from autotune.errors import Rejected, TuningError
from autotune.gpu.worker import MeasuredTrial
from autotune.problem import Problem
from autotune.progress import Budget, Progress, Trial
from autotune.render import render
from autotune.space import Space
from autotune.timing import Timing
from autotune.tuner import FINALISTS, _finalists
from autotune.verify import Verdict

PROBLEM = Problem(256, 256, 128)
H200 = named_device("h200")
SPACE = Space.load("sgemm")


@pytest.fixture(scope="module")
def trial():
    source = render(SPACE, SPACE.presets["tiny_block"], PROBLEM, H200)
    binary = compile_text(source.text, source.entry, H200.arch)

    def trial(ms, digest):
        timing = Timing(ms, (ms, ms, ms), 7, 1, "warm", "back-to-back", False)
        own = type(binary)(**{**vars(binary), "cubin": digest})
        return Trial(source, own, MeasuredTrial(timing, Verdict(True, 0.0, 1.0, "", "none")))

    return trial


def progress():
    return Progress(PROBLEM, Budget())


def test_the_fastest_of_distinct_machine_code(trial):
    trials = {n: trial(1.0 + n, b"code %d" % (n // 2)) for n in range(2 * FINALISTS + 4)}
    chosen = _finalists(trials, None, progress())
    assert [each.median_ms for each in chosen] == [1.0 + 2 * n for n in range(FINALISTS)]


def test_the_stored_winner_defends_itself_however_slow(trial):
    trials = {n: trial(1.0 + n, b"code %d" % n) for n in range(FINALISTS + 5)}
    assert trials[FINALISTS + 2] in _finalists(trials, FINALISTS + 2, progress())
    assert len(_finalists(trials, 0, progress())) == FINALISTS  # it is among them


def test_a_stored_winner_that_was_not_reached_or_failed_is_no_finalist(trial):
    failed = Trial(trial(1.0, b"x").source, None, Rejected("compile", "no"))
    trials = {0: trial(2.0, b"a"), 1: failed}
    for defended in (1, 99):
        assert _finalists(trials, defended, progress()) == [trials[0]]


def test_nothing_measured_is_an_error_that_counts(trial):
    told = progress()
    failed = Trial(trial(1.0, b"x").source, None, Rejected("compile", "bad text"))
    told.count(failed)
    with pytest.raises(
        TuningError, match=r"0 of 1 candidates are usable \(1 compile, such as BM.*: bad text\)"
    ):
        _finalists({0: failed}, None, told)
    with pytest.raises(TuningError, match="ended first; give more"):
        _finalists({}, None, progress())
