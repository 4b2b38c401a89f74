"""What long work says of itself on a terminal, and where there is none."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys

import pytest
from rich.console import Console

from autotune.cli import watchers
from autotune.tuning.budget import Budget
from autotune.tuning.campaign import Tuned
from autotune.tuning.meter import Meter, pace, span
from autotune.tuning.progress import Progress
from autotune.values.problem import Problem
from autotune.values.suite import Shape

BENCH = """
from autotune.report import bench
bench.bench.__kwdefaults__["service"] = "stub_bench:serve"
from autotune.cli import main
main()
"""
LEARN = """
from autotune.tuning import learn
learn.TREES = 2
from autotune.cli import main
main()
"""


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still: what it is set to is the time."""

    class Clock:
        now = 100.0

    monkeypatch.setattr("time.monotonic", lambda: Clock.now)
    return Clock


def test_a_meter_tells_rate_best_and_time_left(clock):
    meter = Meter()
    meter.begin("timing", 24)
    assert meter.text() == "timing: 0 of 24 in 0 s"
    for value, words in ((2.0, "two"), (3.0, "three"), (1.0, "one")):
        clock.now += 4
        meter.step()
        meter.better(value, words)
    assert meter.text() == "timing: 3 of 24 in 12 s, 15.0 per minute, 84 s left; best three"
    meter.begin("fitting")
    meter.step()
    clock.now += 0.5
    assert meter.text() == "fitting: 0 s, 2.0 per second; best three"


@pytest.mark.parametrize(
    ("seconds", "words"), [(0, "0 s"), (119, "119 s"), (121, "2 min"), (7000, "117 min"), (9000, "2.5 h")]
)
def test_a_time_is_told_in_its_unit(seconds, words):
    assert span(seconds) == words


def test_a_slow_rate_is_told_by_the_minute():
    assert (pace(20, 10), pace(5, 10)) == ("2.0 per second", "30.0 per minute")


def test_without_a_terminal_a_line_now_and_then_is_a_sign_of_life(clock, capsys):
    with watchers.Line(live=False) as line:
        line.begin("timing", 30)
        for _ in range(30):
            clock.now += 1
            line.step()
            if line.done == 15:
                line.say("a line of its own")
    told = capsys.readouterr().err.splitlines()
    assert [each.partition(" in")[0] for each in told] == [
        "timing: 10 of 30",
        "a line of its own",
        "timing: 25 of 30",
    ]


@pytest.mark.parametrize(
    ("budget", "left"),
    [(Budget(seconds=60), ", 50 s left"), (Budget(evaluations=300), ", 20 s left"), (Budget(seconds=5), "")],
)
def test_a_search_tells_the_time_left(budget, left):
    progress = Progress(Problem(64, 64, 64), budget, seconds=10.0)
    progress.outcomes["measured"] = 100
    assert watchers._left(progress) == left


def on_a_terminal(words, cwd):
    """Run Python with a terminal as stderr: (exit code, what it drew without colours)."""
    master, slave = pty.openpty()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm", "COLUMNS": "150"}
    process = subprocess.Popen(
        [sys.executable, *map(str, words)], cwd=cwd, env=env, stdout=subprocess.DEVNULL, stderr=slave
    )
    os.close(slave)
    drawn = b""
    try:
        while part := os.read(master, 65536):
            drawn += part
    except OSError:  # as Linux tells that nobody writes any more
        pass
    os.close(master)
    return process.wait(60), re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn.decode()).replace("\r", "\n")


def test_a_bench_on_a_terminal_has_a_line_with_rate_best_and_time_left(tmp_path):
    words = ["bench", "--random", 6, "--seed", 3, "--cache", "records", "--json"]
    code, drawn = on_a_terminal(["-c", BENCH, *words], tmp_path)
    assert code == 0, drawn
    assert re.search(r"choosing kernels: \d of 6 in \d+ s", drawn)
    assert len(re.findall(r"ms; 2\.000 x cuBLAS", drawn)) == 6, "each shape has a line that stays"
    assert re.search(
        r"timing: 6 of 6 in \d+ s, [\d.]+ per (second|minute), 0 s left; "
        r"best [\d.]+ TFLOP/s, 2\.000 x cuBLAS, R00\d ",
        drawn,
    )


def test_learning_on_a_terminal_tells_its_stages(tmp_path):
    words = ["learn", "--fit-only", "--target", "h200", "--cache", "records"]
    code, drawn = on_a_terminal(["-c", LEARN, *words], tmp_path)
    assert code == 0, drawn
    assert "reading trials: " in drawn
    assert re.search(r"fitting families: \d of \d in", drawn)


def test_the_table_of_a_suite_tells_the_shapes_that_are_done_and_the_time_left(clock):
    board = watchers.Board(3, clock.now + 500)
    progress = Progress(Problem(64, 64, 64), Budget(seconds=60), legal=900, stage="searching", seconds=20.0)
    progress.outcomes["measured"] = 100
    board.tell(Tuned(Shape.of(Problem(8, 8, 8)), why="nothing is legal"))
    board.tell(Tuned(Shape.of(Problem(8, 8, 8)), why="in another round"))
    clock.now += 200
    console = Console(file=io.StringIO(), width=120)
    console.print(board.drawn(progress))
    rows = dict(line.split(maxsplit=1) for line in console.file.getvalue().splitlines())
    assert rows["stage"].strip() == "searching, 20 s of 60s, 40 s left"
    assert rows["seen"].strip() == "100 measured of 900 legal (5.0 per second)"
    assert rows["shapes"].strip() == "1 of 3 done, 5 min left for all"
