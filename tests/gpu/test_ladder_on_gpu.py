"""The ladder on a real GPU: every step right, and each great step a gain."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from autotune.paths import cache_dir
from autotune.report.ladder import NOISE, climb
from autotune.report.steps import WINNER, steps
from autotune.values.problem import Problem

pytestmark = pytest.mark.gpu
CUBE = Problem(1024, 1024, 1024)


@pytest.fixture(scope="module")
def ladder():
    started = time.monotonic()
    found = climb(CUBE, root=cache_dir())
    assert time.monotonic() - started < 180
    return found


def milliseconds(ladder):
    return {rung.step.name: rung.timing.median_ms for rung in ladder.rungs if rung.timing is not None}


def test_every_step_is_right_and_timed(ladder):
    assert ladder.measured
    assert [rung.step.name for rung in ladder.rungs] == [step.name for step in steps()]
    for rung in ladder.rungs:
        assert rung.rejected is None, f"{rung.step.name}: {rung.rejected}"
        assert rung.timing is not None
        assert not rung.alone


def test_each_great_step_is_a_gain(ladder):
    took = milliseconds(ladder)
    for chain in (
        ("naive", "coalesced", "register_tile", WINNER),
        ("naive", "coalesced", "one_dimensional", WINNER),
        ("coalesced", "two_dimensional", "double_buffered", WINNER),
    ):
        times = [took[name] for name in chain]
        assert times == sorted(times, reverse=True), dict(zip(chain, times, strict=True))
    assert took["naive"] > 3 * took["coalesced"]
    assert took["coalesced"] > 3 * took[WINNER]


def test_flattening_the_block_changes_nothing(ladder):
    took = milliseconds(ladder)
    assert took["flattened"] == pytest.approx(took["coalesced"], rel=0.1)


def test_a_stored_winner_is_near_cublas(ladder):
    winner = ladder.rungs[-1]
    if ladder.cublas is None or winner.note:
        pytest.skip("no cuBLAS, or no record of this GPU")
    assert ladder.vs_cublas(winner) > 0.9


def test_whatever_is_slower_says_why(ladder):
    for rung in ladder.rungs:
        gain = ladder.speedup(rung)
        assert bool(ladder.slower(rung)) == (gain is not None and gain < 1)
        if gain is not None and gain < 1 - NOISE:
            assert ladder.slower(rung).startswith("slower than ")


@pytest.mark.parametrize("problem", [Problem(1000, 1001, 999, "tt", 1), Problem(1, 4097, 130, "nt")], ids=str)
def test_every_step_is_right_on_odd_problems(problem):
    for rung in climb(problem).rungs:
        assert rung.rejected is None, f"{rung.step.name}: {rung.rejected}"
        assert rung.timing is not None


def test_the_command():
    words = ["--m", "512", "--n", "512", "--k", "512", "--json"]
    command = [sys.executable, "-m", "autotune", "ladder", *words]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    content = json.loads(told.stdout)
    assert content["evidence"] == "measured"
    assert all(step["median_ms"] > 0 for step in content["steps"])
    assert "naive: right, " in told.stderr
