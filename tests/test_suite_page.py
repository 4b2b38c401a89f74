"""The page of several shapes: its figures are those of the records or of the bench, however many they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from made_records import H200, made, made_estimate
from page_reader import check
from tuning import PLAIN

from autotune import records
from autotune.cli.report import command
from autotune.errors import RecordError
from autotune.model.account import roofline_ms
from autotune.report.suite_page import MOST_LANES, MOST_ROWS, of_bench, of_problem, of_record, suite_page
from autotune.values import typed
from autotune.values.measurement import Sustained
from autotune.values.problem import Problem

SUITE = """
[[shape]]
id = "one"
m = 64
n = 64
k = 64
[[shape]]
id = "two"
m = 128
n = 64
k = 64
[[shape]]
id = "nobody's"
m = 96
n = 64
k = 64
"""


def beside_cublas(problem: Problem, ms: float, cublas_ms: float) -> records.Record:
    found = records.Cublas(cublas_ms, None, "13.1.0")
    return made(problem, ms=ms, cublas=found, vs_cublas=cublas_ms / ms)


@pytest.fixture(scope="module")
def found():
    return [
        beside_cublas(Problem(64, 64, 64), 0.004, 0.006),
        beside_cublas(Problem(128, 64, 64), 0.005, 0.004),
    ]


def test_the_shapes_of_a_suite(found, tmp_path):
    store = records.Store(tmp_path)
    for record in found:
        store.write(record)
    (tmp_path / "suite.toml").write_text(SUITE)
    out = tmp_path / "page.html"
    words = ["--suite", str(tmp_path / "suite.toml"), "--target", "h200", "--cache", str(tmp_path)]
    told = CliRunner().invoke(command, [*words, "--out", str(out)], catch_exceptions=False)
    assert told.exit_code == 0
    page = check(out.read_text(), 1_000_000)
    one, two, third = page.tables["f2"][1:]
    for row, record in ((one, found[0]), (two, found[1])):
        assert float(row[2]) == record.timing.median_ms
        assert float(row[3]) == round(record.gflops / 1000, 2)
        assert float(row[4]) == round(record.vs_cublas, 3)
        assert row[5] == f"{roofline_ms(record.problem, H200) / record.timing.median_ms:.1%}"
    assert third[:3] == ["nobody's", "96 x 64 x 64 nn", "-"]
    assert "run 'autotune tune --m 96" in third[-1]
    spread = {row[0]: float(row[1]) for row in page.tables["f1"][1:]}
    assert (spread["worst"], spread["best"]) == (0.8, 1.5)
    assert spread["geometric mean"] == pytest.approx((0.8 * 1.5) ** 0.5, rel=1e-3)
    assert "0.800 slower" in out.read_text()  # not by its colour alone


def test_several_record_files_are_a_suite_too(found, tmp_path):
    files = [str(records.Store(tmp_path).write(record)) for record in found]
    told = CliRunner().invoke(command, [*files, "--out", str(tmp_path / "page.html")], catch_exceptions=False)
    assert told.exit_code == 0
    assert len(check((tmp_path / "page.html").read_text()).tables["f2"]) == 3


def test_an_estimated_record_has_no_time():
    line = of_record("x", made_estimate(Problem(64, 64, 64)), H200)
    assert (line.status, line.median_ms, line.vs_cublas) == ("estimated", None, None)
    check(suite_page("t", [], [line]))


def bench_file(path, ratios):
    shapes = [
        {
            **{"id": f"R{number:03}", "m": 64, "n": 32, "k": 16, "layout": "nt", "math": "ffma", "batch": 1},
            **{"beta": 1.0, "status": "timed", "family": "sgemm", "config": "c", "median_ms": 0.01},
            **{"share_of_floor": 0.25, "vs_cublas": ratio, "cublas": {"median_ms": 0.01 * ratio}},
        }
        for number, ratio in enumerate(ratios)
    ]
    failed = {**shapes[0], "id": "bad", "status": "failed", "why": "<i>it crashed</i>"}
    content = {
        "device": {"name": "NVIDIA H200"},
        "created": "2026-11-30",
        "l2": "warm",
        "shapes": [*shapes, failed],
    }
    path.write_text(json.dumps(content))
    return path


def test_the_distribution_of_a_bench(tmp_path):
    ratios = [0.9 + number / 100 for number in range(MOST_LANES + 60)]
    path = bench_file(tmp_path / "bench.json", ratios)
    told = CliRunner().invoke(command, [str(path), "--out", str(tmp_path / "x.html")], catch_exceptions=False)
    assert told.exit_code == 0
    html = (tmp_path / "x.html").read_text()
    page = check(html)
    assert "NVIDIA H200, 2026-11-30, operands warm" in html
    assert "7 are below 0.97" in html
    spread = {row[0]: float(row[1]) for row in page.tables["f1"][1:]}
    assert spread["10 %"] == ratios[len(ratios) // 10]
    assert spread["median"] == ratios[len(ratios) // 2]
    assert len(page.tables["f2"]) == len(ratios) + 2
    assert page.tables["f2"][-1][-1] == "<i>it crashed</i>"


def test_a_shape_counts_in_its_fastest_math_alone():
    problem = Problem(64, 64, 64)
    lines = [
        of_problem(f"a{suffix}", replace(problem, math=math), "timed", median_ms=ms, vs_cublas=1 / ms)
        for math, suffix, ms in (("ffma", "", 1.0), ("3xtf32", " 3xtf32", 0.25), ("3xfp16", " 3xfp16", 2.0))
    ]
    page = check(suite_page("t", [], lines))
    assert page.tables["f1"][1] == ["worst", "4"]
    assert [row[0] for row in page.tables["f2"][1:]] == ["a", "a 3xtf32", "a 3xfp16"]


def held_file(path):
    """A bench of one shape, of which two contestants ran for seconds."""
    content = json.loads(bench_file(path, [1.5]).read_text())
    held = Sustained(3.0, 9, 0.0125, 0.0075, "energy counter", 1650.0, ("power cap",))
    content["shapes"][0]["sustained"] = {
        name: {**typed.plain(held), "gflops": 1.0, "watts": 600.0} for name in ("kernel", "cublas")
    }
    path.write_text(json.dumps(content))
    return path


def test_what_held_stands_beside_the_short_timings(tmp_path):
    path = held_file(tmp_path / "bench.json")
    where, lines = of_bench(path)
    html = suite_page("t", [where], lines)
    page = check(html)
    flops = 2 * 64 * 32 * 16
    rates = [f"{flops / ms / 1e9:.2f}" for ms in (0.01, 0.0125)]
    ours, cublas = page.tables["f2"][1:]
    assert ours[2:] == ["ours", *rates, "600", "1650", f"{flops / 0.0075 / 1e9:.1f}", "0.0075", "power cap"]
    assert cublas[2:5] == ["cuBLAS", f"{flops / 0.015 / 1e9:.2f}", rates[1]]
    assert "600 W" in html
    content = json.loads(path.read_text())
    content["shapes"][0]["sustained"]["kernel"]["mean_ms"] = "long"
    path.write_text(json.dumps(content))
    with pytest.raises(RecordError, match=r"sustained\.kernel\.mean_ms: expected a number"):
        of_bench(path)


def test_records_that_held_have_that_figure_too(found):
    held = Sustained(0.8, 9, 0.005, 0.0035, "power readings")
    lines = [of_record("one", replace(found[0], sustained=held), H200), of_record("two", found[1], H200)]
    (row,) = check(suite_page("t", [], lines)).tables["f2"][1:]
    efficiency = f"{found[0].problem.flops / 0.0035 / 1e9:.1f}"
    assert (row[0], row[5:]) == ("one", ["700", "-", efficiency, "0.0035", "-"])


@pytest.mark.parametrize("names", [["cublas_tf32"], [f"library{n}" for n in range(MOST_LANES + 1)]])
def test_what_has_no_picture_has_a_table(names):
    held = Sustained(3.0, 9, 0.0125)
    line = of_problem("x", Problem(64, 64, 64), "timed", median_ms=0.01, sustained=dict.fromkeys(names, held))
    html = suite_page("t", [], [line])
    assert len(check(html).tables["f2"]) == len(names) + 1
    assert "The bar is" not in html


def test_a_page_of_many_shapes_stays_small():
    lines = [
        of_problem(
            f"R{n}", Problem(64, 64, 64), "timed", median_ms=0.01, vs_cublas=1 + n / 1e4, config="c" * 150
        )
        for n in range(10_000)
    ]
    page = check(suite_page("t", [], lines), 1_000_000)
    assert len(page.tables["f2"]) == MOST_ROWS + 1
    assert page.tables["f2"][1][0] == "R0"


@pytest.mark.parametrize(
    ("shape", "says"),
    [({"m": "x"}, r"\$.shapes\[0\].m"), ({"vs_cublas": -1}, r"\$.shapes\[0\].vs_cublas"), (3, "shapes")],
)
def test_a_bench_that_says_what_cannot_be_is_refused(shape, says, tmp_path):
    path = bench_file(tmp_path / "bench.json", [1.0])
    content = json.loads(path.read_text())
    content["shapes"][0] = {**content["shapes"][0], **shape} if isinstance(shape, dict) else shape
    path.write_text(json.dumps(content))
    with pytest.raises(RecordError, match=says):
        of_bench(path)


def test_a_record_is_no_bench(found, tmp_path):
    assert of_bench(records.Store(tmp_path).write(found[0])) is None


def test_tune_writes_the_page_of_what_it_found(tmp_path):
    """Through a real search whose GPU is a stub: the page has its log, in which times only fall."""
    tests = Path(__file__).parent
    words = "tune --m 64 --n 64 --k 8 --strategy random --budget 6 --workers 2"
    program = [tests / "stub_cli.py", *words.split(), "--space", PLAIN, "--cache", tmp_path / "records"]
    page = tmp_path / "page.html"
    environment = {**os.environ, "STUB_GPU": str(tmp_path / "measured")}
    environment["PYTHONPATH"] = os.pathsep.join([str(tests), *sys.path])
    command = [sys.executable, *map(str, program), "--report", str(page)]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert told.returncode == 0, told.stderr
    rows = check(page.read_text()).tables["f1"][1:]
    assert rows
    times = [float(row[2]) for row in rows]
    assert times == sorted(times, reverse=True)
