"""Searches of sweeps without a GPU, and the commands that read sweeps."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.cli import main
from autotune.errors import Rejected, UsageError
from autotune.sweep import About, Point, Sweep, read_sweep
from autotune.sweep.replay import GPU_FIXED_S, LAUNCHES, PROPOSAL_S, WITHIN, replay
from autotune.sweep.sweep import make_sweep

DATA = Path(__file__).parent / "data"
H200, RTX3090 = (DATA / f"{name}_sweep.csv.gz" for name in ("h200_sgemm_4096", "rtx3090_clblast_gemm_4096"))
Run = Callable[..., tuple[int, str, str]]


def line(times: list[float | Rejected], compile_s: float | None, gpu_s: float | None) -> Sweep:
    points = [Point({"x": i}, outcome, compile_s, gpu_s) for i, outcome in enumerate(times)]
    return make_sweep(Path("line.csv"), ["x"], points, About())


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["autotune", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            main()
        told = capsys.readouterr()
        return int(str(end.value.code)), told.out, told.err

    return run


def test_evaluations_are_counted_to_the_first_point_so_near() -> None:
    sweep = line([2.0, 1.08, 1.015, 1.0, 3.0], None, None)
    found = replay(sweep, "exhaustive", seeds=3)
    assert found.evaluations == {10: 2, 5: 3, 2: 3, 1: 4}
    assert found.share == 1
    assert found.seconds is None
    assert replay(sweep, "exhaustive", seeds=1, limit=2).evaluations == {10: 2, 5: None, 2: None, 1: None}


def test_the_clock_of_one_compiler_and_of_two() -> None:
    sweep = line([2.0, 1.0], 1.0, 0.5)
    for workers, last in ((1, 2 * (PROPOSAL_S + 1.0) + 0.5), (2, PROPOSAL_S + 1.0 + 2 * 0.5)):
        found = replay(sweep, "exhaustive", seeds=1, workers=workers)
        assert found.seconds == {per_cent: pytest.approx(last) for per_cent in WITHIN}


def test_a_rejected_candidate_takes_the_gpu_only_if_it_compiles() -> None:
    compiles, crashes = (line([Rejected(kind, ""), 1.0], 1.0, 0.5) for kind in ("compile", "crash"))
    seconds = [replay(sweep, "exhaustive", seeds=1, workers=2).seconds for sweep in (compiles, crashes)]
    assert seconds[0] is not None
    assert seconds[1] is not None
    assert seconds[0][1] == pytest.approx(2 * PROPOSAL_S + 1.0 + 0.5)
    assert seconds[1][1] == pytest.approx(PROPOSAL_S + 1.0 + 2 * 0.5)


def test_unrecorded_gpu_times_are_modelled() -> None:
    found = replay(line([4.0], 1.0, None), "exhaustive", seeds=1)
    assert found.seconds is not None
    assert found.seconds[1] == pytest.approx(PROPOSAL_S + 1.0 + GPU_FIXED_S + LAUNCHES * 4e-3)


@pytest.mark.parametrize("strategy", ["gp", "tpe", "random"])
def test_a_replay_repeats_exactly(strategy: str) -> None:
    sweep = read_sweep(RTX3090)
    first, again = (replay(sweep, strategy, seeds=2, limit=40, workers=15) for _ in range(2))
    assert (first.evaluations, first.seconds, first.share) == (again.evaluations, again.seconds, again.share)


@pytest.mark.parametrize(("path", "middle"), [(H200, 45), (RTX3090, 80)], ids=["h200", "rtx3090"])
def test_the_default_beats_tpe_or_ties_and_beats_chance(path: Path, middle: int) -> None:
    sweep = read_sweep(path)
    gp, chance = (replay(sweep, name, seeds=5, limit=200) for name in ("gp", "random"))
    assert gp.share == 1
    assert gp.evaluations[2] is not None
    assert gp.evaluations[2] <= middle
    assert gp.evaluations[2] < (chance.evaluations[2] or math.inf)


def test_a_table_on_stdout(run: Run) -> None:
    code, out, err = run("replay", RTX3090, "--strategy", "random,exhaustive", "--seeds", 2, "--limit", 20)
    assert code == 0
    assert "17,956 configs, 0 of them rejected; best 5.65784 ms, 3 within 2 % of it" in out
    assert "15 compilers, one GPU, asynchronous; recorded compile times" in out
    rows = [row.split() for row in out.splitlines() if row.lstrip().startswith(("random", "exhaustive"))]
    assert [row[0] for row in rows] == ["random", "exhaustive"]
    assert rows[1][1:5] == [">20"] * 4
    assert "exhaustive, 2 seeds" in err


def test_no_compile_times_no_seconds(run: Run) -> None:
    code, out, _ = run("replay", H200, "--strategy", "random", "--seeds", 1, "--limit", 5)
    assert code == 0
    assert "seconds: not simulated, the sweep has no compile times (a column compile_s)" in out


def test_one_json_object(run: Run) -> None:
    code, out, _ = run("replay", H200, "--seeds", 2, "--limit", 30, "--in-flight", 4, "--json")
    assert code == 0
    found = json.loads(out)
    assert (found["configs"], found["in_flight"], found["compile_times"]) == (3057, 4, "none")
    assert [each["strategy"] for each in found["strategies"]] == ["gp", "tpe", "neighbours", "random"]
    assert all(set(each["evaluations"]) == {"10%", "5%", "2%", "1%"} for each in found["strategies"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none.csv"], "none.csv cannot be read: No such file or directory"),
        ([H200, "--strategy", "gp,genetic"], "search strategy 'genetic' is unknown"),
        ([H200, "--strategy", ","], "--strategy names none"),
        ([H200, "--seeds", "0"], "0 is not in the range"),
        ([H200, "--in-flight", "x"], "'x' is not a valid integer range"),
    ],
)
def test_bad_requests_to_replay(run: Run, words: list[object], message: str) -> None:
    code, out, err = run("replay", *words)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_convert_there_and_back(run: Run, tmp_path: Path) -> None:
    cache, results, table = (tmp_path / name for name in ("a.json", "b.json.gz", "c.csv"))
    assert run("convert", H200, cache, "--to", "kernel-tuner")[0] == 0
    assert run("convert", cache, results, "--to", "t4")[0] == 0
    code, out, err = run("convert", results, table)
    assert (code, out) == (0, "")
    lost, wrote = err.splitlines()
    assert lost == "left out, for csv has no place for it: kernel"
    assert wrote == f"3057 configs in {table}, as csv"
    assert read_sweep(table).time_ms.tolist() == read_sweep(H200).time_ms.tolist()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([H200, "out.json"], "out.json: its ending does not tell the form: say --to csv or trials"),
        (
            [H200, "out.csv", "--to", "xml"],
            "form 'xml' is unknown: give one of csv, trials, t4, kernel-tuner",
        ),
        ([H200, "out.trials.jsonl"], "a log says of which space, template and device its trials are"),
        (["none.csv", "out.csv"], "none.csv cannot be read"),
    ],
)
def test_bad_requests_to_convert(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[object], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run("convert", *words)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_an_unknown_strategy_is_told_before_the_sweep_is_searched() -> None:
    with pytest.raises(UsageError, match="unknown"):
        replay(line([1.0], None, None), "genetic", seeds=1)


@pytest.mark.parametrize("way", ["same", "symlink", "hard link", "other path"])
def test_convert_never_overwrites_what_it_reads(run: Run, tmp_path: Path, way: str) -> None:
    source = tmp_path / "x.csv"
    source.write_text("BM,mean_ms\n1,2\n")
    target = {"same": source, "other path": tmp_path / ".." / tmp_path.name / "x.csv"}.get(
        way, tmp_path / "y.csv"
    )
    if way == "symlink":
        target.symlink_to(source)
    elif way == "hard link":
        target.hardlink_to(source)
    code, _, told = run("convert", source, target, "--to", "t4")
    assert code == 2
    assert "would be overwritten, and is what is read: give another file" in told
    assert source.read_text() == "BM,mean_ms\n1,2\n"
    assert run("convert", source, tmp_path / "z.csv")[0] == 0
    assert (tmp_path / "z.csv").read_text() == "BM,outcome,mean_ms\n1,measured,2.0\n"


@pytest.mark.parametrize("words", [("explain", "--svg"), ("bench", "--markdown")])
def test_no_command_writes_over_the_file_that_it_reads(
    run: Run, tmp_path: Path, words: tuple[str, str]
) -> None:
    command, option = words
    source = tmp_path / "mine.toml"
    source.write_text("[[shape]]\nid = 'S'\nm = 8\nn = 8\nk = 8\n")
    reading = ("--suite", source) if command == "bench" else ("--m", 8, "--n", 8, "--k", 8, "--space", source)
    code, _, told = run(command, *reading, option, source)
    assert (code, "would be overwritten" in told) == (2, True)
    assert source.read_text().startswith("[[shape]]")


def test_the_names_that_commands_print_are_safe(run: Run, tmp_path: Path) -> None:
    source = tmp_path / "\x1b[31mred.csv"
    source.write_text("BM,median_ms\n1,2\n")
    for words in (
        ("replay", source, "--seeds", 1),
        ("convert", source, tmp_path / "\x1b[2J.csv"),
        ("replay", tmp_path / "\x1b.csv"),
    ):
        _, out, told = run(*words)
        assert (out + told).replace("\n", "").isprintable()
