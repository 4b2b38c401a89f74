"""The page of a problem: well-formed, self-contained, and its numbers are those of record and log."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from made_records import H200, SGEMM, fitted, made, made_estimate
from page_reader import check

from autotune import records
from autotune.cli.report import command
from autotune.code.depot import Depot
from autotune.errors import Rejected
from autotune.records.trials import Run, TrialHeader, TrialLog, trials_path
from autotune.report.page import page as page_of
from autotune.report.problem_page import (
    Candidate,
    importance,
    parameters_figure,
    problem_page,
    search_figure,
    searched,
)
from autotune.space.space import Config
from autotune.tuning.trial import Trial
from autotune.values.measurement import MeasuredTrial, Timing, Verdict
from autotune.values.problem import Problem

PROBLEM = Problem(64, 64, 64)
TIMES = {"tiny_block": (0.004, 0.0031, 0.0029), "small_block": (0.005,)}  # ms of candidates with these tiles


def measured(config: Config, ms: float) -> Trial:
    timing = Timing(ms, (0.98 * ms, ms, 1.02 * ms), 7, 20, "warm", "graph", None, False)
    return Trial(
        f"sgemm:{config.id}@{ms}", "sgemm", config, MeasuredTrial(timing, Verdict(True, 0, 1, "", ""))
    )


@pytest.fixture(scope="module")
def record():
    """A winner with a runner-up beside cuBLAS, at the power cap."""
    timing = Timing(
        0.0029,
        (0.0028, 0.0029, 0.00301),
        9,
        20,
        "warm",
        "graph",
        {"watts": 690, "throttle": ("power cap",)},
        False,
    )
    return made(
        PROBLEM,
        ms=0.0029,
        others=[fitted(PROBLEM, "small_block")],
        timing=timing,
        cublas=records.Cublas(0.00351, "cublas <kernel>", "13.1.0"),
        vs_cublas=0.00351 / 0.0029,
        search=records.Searched(
            "gp", "1s", 1.0, False, 6, 999, {"measured": 4, "correctness": 1, "compile": 1}, 0
        ),
    )


@pytest.fixture(scope="module")
def folder(record, tmp_path_factory):
    """A log of two runs: four candidates in one and, 100 s of its own clock later, rejections in another."""
    found = tmp_path_factory.mktemp("records")
    write_log(found, record)
    return found


def write_log(folder, record, **changes):
    facts = {
        name: getattr(record, name)
        for name in ("family", "problem", "device", "space_digest", "template_digest")
    }
    header = TrialHeader(**{**facts, **changes}, nvrtc="13.0")
    path = trials_path(folder / records.path_within(record.device, "sgemm", PROBLEM).name)
    with TrialLog(path, header) as log:
        for preset, times in TIMES.items():
            for ms in times:
                log.append(measured(fitted(PROBLEM, preset), ms).line())
    with TrialLog(path, header) as log:
        config = fitted(PROBLEM, "small_block")
        for kind in ("correctness", "compile"):
            log.append(Trial(f"x{kind}", "sgemm", config, Rejected(kind, "<b>wrong</b>")).line())


@pytest.fixture(scope="module")
def html(record, folder):
    depot = Depot(folder)
    return problem_page(record, folder, H200, depot, ["a summary <script>alert(1)</script>", "\x1b[31mred"])


@pytest.fixture(scope="module")
def page(html):
    return check(html)


def test_what_others_wrote_is_escaped(html, page):
    assert "<script>alert" not in html
    assert "&lt;script&gt;alert(1)" in html
    assert "\x1b" not in html
    assert html.count("<script>") == 1


def test_the_search_is_that_of_the_log(record, folder, page, html):
    candidates = searched(record, folder)
    assert [each.trial.kind for each in candidates] == ["measured"] * 4 + ["correctness", "compile"]
    assert [each.number for each in candidates] == [1, 2, 3, 4, 5, 6]
    seconds = [each.seconds for each in candidates]
    assert seconds == sorted(seconds)
    rows = page.tables["f1"][1:]
    assert [row[2] for row in rows] == ["0.004", "0.0031", "0.0029"]  # each time a better one
    assert [row[3] for row in rows] == [f"{PROBLEM.flops / float(row[2]) / 1e9:.2f}" for row in rows]
    assert "number 2 was the first to pass cuBLAS" in html
    assert html.count(">1 rejected</text>") == 6  # two kinds, against seconds and candidates and in the space


def test_a_long_search_makes_no_long_page(record):
    config, wrong = fitted(PROBLEM), Rejected("crash", "why")
    trials = [
        *(measured(config, 1 + 1 / (n % 7 + 1)) for n in range(5000)),
        *(Trial(f"{n}", "sgemm", config, wrong) for n in range(5000)),
    ]
    candidates = [Candidate(n, n / 10, trial) for n, trial in enumerate(trials, 1)]
    html = page_of("t", [], [search_figure(record, candidates), parameters_figure(record, candidates)])
    check(html)
    assert ">5,000 rejected</text>" in html
    assert "of 10,000 candidates</text>" in html


def test_a_log_of_another_space_is_not_that_of_the_record(record, tmp_path):
    write_log(tmp_path, record, space_digest="0" * 64)
    assert searched(record, tmp_path) == []


def test_the_finalists_are_those_of_the_record(record, page):
    winner, second, cublas = page.tables["f2"][1:]
    low, median, high = record.timing.quantiles_ms
    assert [float(each) for each in winner[1:4]] == [median, low, high]
    (other,) = record.runners_up
    assert [float(each) for each in second[1:4]] == [
        other.median_ms,
        other.quantiles_ms[0],
        other.quantiles_ms[2],
    ]
    assert second[5] == "tied"
    assert cublas[0] == "cuBLAS"
    assert float(cublas[1]) == record.cublas.median_ms
    assert float(winner[4]) == round(record.gflops / 1000, 2)


def test_the_roofline_has_the_level_of_cublas_and_that_of_power_where_the_winner_ran_for_long(record, page):
    rows = {row[0]: row[1:] for row in page.tables["f3"][1:]}
    assert rows["winner"][1:] == [f"{record.gflops / 1000:.2f}", "measured"]
    assert not any(name.startswith("power cap") for name in rows)
    assert float(rows["cuBLAS"][1]) == round(PROBLEM.flops / record.cublas.median_ms / 1e9, 2)


def test_the_best_time_of_each_value(record, page):
    rows = [row for row in page.tables["f4"][1:] if row[0] == "BM"]
    tiles = {fitted(PROBLEM, preset)["BM"]: times for preset, times in TIMES.items()}
    assert {int(row[2]): float(row[3]) for row in rows} == {tile: min(times) for tile, times in tiles.items()}
    assert {int(row[2]): int(row[5]) for row in rows} == {tile: len(times) for tile, times in tiles.items()}
    assert sum(row[6] != "" for row in rows) == 1


def test_importance_is_the_share_of_variance_between_values():
    assert importance([(1, 2.0), (1, 2.0), (2, 8.0), (2, 8.0)]) == pytest.approx(1)
    assert importance([(1, 2.0), (1, 8.0), (2, 2.0), (2, 8.0)]) == pytest.approx(0)
    assert importance([(1, 1.0), (1, 1.0)]) == 0


def test_the_funnel_counts_as_the_space_does(record, page):
    legal = SGEMM.enumerate(PROBLEM, H200)
    left = {row[0]: int(row[1].replace(",", "")) for row in page.tables["f5"][1:]}
    assert left["points"] == legal.raw
    removed = [rule.name for rule, points in legal.removals if points]
    assert left[removed[-1]] == len(legal)
    assert (left["legal"], left["tried"], left["compiled"], left["measured"]) == (999, 6, 5, 4)
    assert (left["correctness"], left["compile"]) == (1, 1)


def test_the_source_has_costs_in_its_margin_and_the_record_stands_below(html, record):
    assert re.search(r"executed +sectors +wavefronts +conflicts", html)
    assert "__launch_bounds__" in html
    assert record.code_digest in html


def test_a_record_without_a_log_says_so(record, tmp_path):
    html = problem_page(record, tmp_path, None, Depot(tmp_path), [])
    check(html)
    assert html.count("No trial log lies beside this record") == 2
    assert "neither here nor in the built-in table" in html


def test_an_estimated_record_has_a_page_too(tmp_path):
    html = problem_page(made_estimate(PROBLEM), tmp_path, None, Depot(tmp_path), [])
    check(html)
    assert "Nothing was measured" in html
    assert html.count("No trial log lies beside this record") == 2


def test_a_config_that_cannot_be_rendered_today_is_told(record, tmp_path):
    odd = replace(record, config={**record.config, "BM": 7})
    html = problem_page(odd, tmp_path, H200, Depot(tmp_path), [])
    check(html)
    assert html.count("The kernel cannot be rendered and counted today") == 3


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "say where the page goes: --out FILE"),
        (("--out", "x.html"), "say what the page is about: --m, --n and --k, --suite, or FILEs"),
        (("--out", "none/x.html"), "there is no folder none"),
        (
            ("--m", "3", "--n", "5", "--k", "7", "--target", "h200", "--out", "x.html"),
            "no record of 3 x 5 x 7 nn on NVIDIA H200: run 'autotune tune --m 3 --n 5 --k 7'; "
            "'autotune show --m 3 --n 5 --k 7' shows what is predicted",
        ),
    ],
)
def test_what_cannot_be_reported_is_told_in_a_line(words, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = CliRunner().invoke(command, words)
    assert says in str(told.exception or told.output) + told.output
    assert not (tmp_path / "x.html").exists()


def test_the_page_of_a_file_and_of_a_stored_problem_are_one(record, folder, tmp_path):
    store = records.Store(tmp_path)
    path = store.write(record)
    write_log(path.parent, record)
    words = ["--cache", str(tmp_path), "--out"]
    sizes = ["--m", "64", "--n", "64", "--k", "64", "--target", "h200"]
    for given, name in (([str(path)], "file"), (sizes, "problem")):
        told = CliRunner().invoke(command, [*given, *words, str(tmp_path / name)], catch_exceptions=False)
        assert told.output.endswith("KB\n")
    assert (tmp_path / "file").read_text() == (tmp_path / "problem").read_text()


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[1] / "docs").glob("*.html")), ids=lambda path: path.stem
)
def test_the_pages_of_the_documentation_are_sound(path):
    check(path.read_text())


def test_runs_that_interleave_do_not_stretch_the_time(record, tmp_path):
    """Two processes of ten and of four seconds write one log in turns."""
    facts = ("family", "problem", "device", "space_digest", "template_digest")
    header = TrialHeader(**{name: getattr(record, name) for name in facts}, nvrtc="13.0")
    path = trials_path(tmp_path / records.path_within(record.device, "sgemm", PROBLEM).name)
    runs = [Run(time.monotonic() - age) for age in (10, 4)]
    for number in range(6):
        with TrialLog(path, header, runs[number % 2]) as log:
            log.append(measured(fitted(PROBLEM), 1.0 + number).line())
            time.sleep(0.002)  # stamps have milliseconds
    assert searched(record, tmp_path)[-1].seconds == pytest.approx(14, abs=2)
