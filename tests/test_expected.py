"""What is shown of a kernel that a model predicts: where it comes from, and that nothing is measured."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from made_records import H200, SGEMM, made, made_estimate

from autotune.cli import cli
from autotune.errors import RecordMissing, UsageError
from autotune.kernel.choices import Choices
from autotune.records import Store
from autotune.report.expected import expected
from autotune.report.export import to_export
from autotune.report.steps import fitted_step, steps
from autotune.space.space import Space
from autotune.values.device import named_device
from autotune.values.problem import Problem

PROBLEM = Problem(200, 136, 72)  # there is no record of it in cache/
SIZES = ["--m", "200", "--n", "136", "--k", "72"]
TARGET = ["--target", "h200"]


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOTUNE_CACHE_DIR", str(tmp_path / "records"))

    def invoke(*words):
        done = CliRunner().invoke(cli, [*map(str, words)], catch_exceptions=False)
        return done.exit_code, done.stdout, done.stderr

    return invoke


def found(root, problem=PROBLEM, device=H200, spaces=None):
    return expected(Choices(problem, device, Store(root, depot_bytes=0), spaces=spaces))


# --- the account ---


def test_the_first_choice_is_what_would_serve_and_the_model_says_why(tmp_path):
    told = found(tmp_path)
    assert told.first.config == next(Choices(PROBLEM, H200, Store(tmp_path)).all()).config
    times = [told.predicted_ms(choice) for choice in told.choices]
    assert times == sorted(times)
    assert told.modelled.ms == pytest.approx(told.first.point.estimate_ms)
    assert (told.limit.name, told.blocks) == ("fill", told.first.source.launch.grid[0])
    assert told.learned["sgemm"].problems > 100
    assert told.command == "autotune tune --m 200 --n 136 --k 72"


def test_where_nothing_was_learned_there_is_an_order_and_no_time(tmp_path):
    told = found(tmp_path, device=named_device("a100"))
    assert {told.predicted_ms(choice) for choice in told.choices} == {None}
    assert told.first.note.startswith("nothing was learned of NVIDIA A100")
    plain = told.plain("NVIDIA A100")
    assert plain["predicted_ms"] is plain["predicted_gflops"] is plain["learned"] is None
    assert plain["estimate_ms"] > 0


def test_a_family_without_a_model_has_its_presets(tmp_path):
    told = found(tmp_path, spaces=[Space.load("shared_tile")])
    assert told.first.place == "a preset of shared_tile"
    assert (told.modelled, told.plain("")["estimate_ms"]) == (None, None)
    assert told.limit.name in ("fill", "shared")


def test_where_nothing_serves_it_says_so(tmp_path, run):
    with pytest.raises(
        UsageError, match=r"200 x 136 x 72 nn on NVIDIA H200: sgemm_skinny needs min\(m, n\) <= 32"
    ):
        found(tmp_path, spaces=[Space.load("sgemm_skinny")])
    with pytest.raises(UsageError, match="no kernel family computes 200 x 136 x 72 nn 3xtf32 on Tesla T4"):
        run("show", *SIZES, "--math", "3xtf32", "--target", "t4")


# --- show ---


def test_show_says_in_one_screen_what_would_serve_and_writes_nothing(run, tmp_path):
    status, out, err = run("show", *SIZES, *TARGET)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert (
        lines[0] == '200 x 136 x 72 nn on NVIDIA H200: this would serve, as "predicted"; nothing is measured'
    )
    assert len(lines) < 24
    assert [line.split()[0] for line in lines[1:5]] == ["config", "from", "predicted", "by"]
    assert "run 'autotune tune --m 200 --n 136 --k 72', or call with" in " ".join(out.split())
    assert "limited   probably by too few blocks (" in out
    assert lines[-5].split()[:2] == ["1", lines[3].split()[1]]
    assert not (tmp_path / "records").exists()


def test_show_as_json_calls_nothing_measured(run):
    status, out, err = run("show", *SIZES, *TARGET, "--json")
    plain = json.loads(out)
    assert (status, err) == (0, "")
    assert (plain["evidence"], plain["served"], plain["family"]) == ("predicted", "predicted", "sgemm")
    assert plain["predicted_ms"] <= min(each["predicted_ms"] for each in plain["next"])
    assert plain["predicted_gflops"] == pytest.approx(PROBLEM.flops / plain["predicted_ms"] / 1e6)
    assert plain["learned"]["held_out_regret"]["mean"] > 1
    assert not {"median_ms", "gflops", "timing"} & plain.keys()
    assert "measured" not in out.replace(plain["missing"], "")


def test_show_names_the_stored_winner_whose_config_it_is(run, tmp_path):
    near = Problem(200, 136, 80)
    config = SGEMM.fitted(found(tmp_path).first.config, near, H200)
    assert config == found(tmp_path).first.config
    Store(tmp_path / "records").write(made(near, config=config))
    out = run("show", *SIZES, *TARGET)[1]
    assert "its config is that of the record of 200 x 136 x 80 nn on NVIDIA H200" in " ".join(out.split())


def test_show_of_a_gpu_that_was_not_learned_gives_an_order_and_a_note(run):
    status, out, err = run("show", *SIZES, "--target", "t4")
    assert (status, err) == (0, "")
    assert re.search(r"\n  estimated \S+ ms, \S+ TFLOP/s by the static estimate alone: good for order", out)
    assert re.search(
        r"\n  its parts .*; with predicted\s+registers, where explain has the compiled ones", out
    )
    assert "\n  predicted" not in out
    assert "note      nothing was learned of Tesla T4" in out


def test_a_record_is_shown_in_place_of_a_prediction_and_an_estimated_one_beside_it(run, tmp_path):
    store = Store(tmp_path / "records")
    store.write(made_estimate(PROBLEM))
    out = run("show", *SIZES, *TARGET)[1]
    assert out.startswith("200 x 136 x 72 nn for NVIDIA H200: estimated, compiled and simulated\n")
    assert 'on NVIDIA H200: this would serve, as "predicted"; nothing is measured\n' in out
    assert [each["evidence"] for each in json.loads(run("show", *SIZES, *TARGET, "--json")[1])] == [
        "estimated",
        "predicted",
    ]
    assert "would serve" in run("show", *SIZES)[1]
    store.write(made(PROBLEM))
    assert "would serve" not in run("show", *SIZES, *TARGET)[1]
    assert "would serve" in run("show", *SIZES, "--target", "a100")[1]  # which has no record
    assert "would serve" not in run("show", *SIZES)[1]


def test_without_a_gpu_the_device_is_assumed_and_told(run, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    status, out, err = run("show", *SIZES)
    assert (status, err) == (0, "no GPU here: this is for an NVIDIA H200 (see --target)\n")
    assert "on NVIDIA H200" in out


# --- the others ---

TOLD = (
    "this is predicted to be fastest (a prediction of sgemm), nothing of it is measured: "
    "run 'autotune tune --m 200 --n 136 --k 72'\n"
)


def test_emit_writes_what_is_predicted_and_says_so(run, tmp_path):
    status, out, err = run("emit", *SIZES, *TARGET)
    assert (status, err) == (0, TOLD)
    assert out == found(tmp_path).first.source.text
    Store(tmp_path / "records").write(made(PROBLEM))
    assert run("emit", *SIZES, *TARGET)[1:] != (out, TOLD)
    assert run("emit", *SIZES, *TARGET, "--predicted")[1:] == (out, TOLD)


def test_explain_names_the_predicted_kernel_and_its_time(run):
    status, out, err = run("explain", *SIZES, *TARGET)
    assert (status, err) == (0, TOLD)
    assert out.startswith("200 x 136 x 72 nn on NVIDIA H200: predicted\n")
    assert " TFLOP/s; expected, not measured\n" in out
    assert "\n  measured" not in out


def test_explain_puts_the_record_beside_what_is_predicted(run, tmp_path):
    Store(tmp_path / "records").write(made(PROBLEM))
    status, out, err = run("explain", "record", "predicted", *SIZES, *TARGET, "--json")
    record, predicted = json.loads(out)
    assert (status, err) == (0, TOLD)
    assert (record["title"], record["median_ms"], record["predicted_ms"]) == ("record", 1.0, None)
    assert (predicted["title"], predicted["median_ms"]) == ("predicted", None)
    assert predicted["predicted_ms"] > 0


def test_the_ladder_ends_on_what_is_predicted(tmp_path):
    store = Store(tmp_path)
    fit = fitted_step(steps()[-1], PROBLEM, H200, store)
    assert (fit.config, fit.record) == (found(tmp_path, spaces=[SGEMM]).first.config, None)
    assert fit.note.startswith("a prediction of sgemm stands in: no record of 200 x 136 x 72 nn")


def test_an_export_says_that_it_is_predicted(run, tmp_path):
    status, out, err = run("export", *SIZES, "--target", "t4", "--any", "--out", tmp_path)
    assert status == 0
    assert err.startswith("nothing was learned of Tesla T4")
    header = next(Path(line) for line in out.splitlines() if line.endswith(".h"))
    said = "predicted to be fastest (a prediction of sgemm), not measured for this problem"
    assert to_export(PROBLEM, named_device("t4"), Store(), substitute=True).origin == said
    assert header.is_file()
    assert said in header.with_suffix(".cu").read_text()
    with pytest.raises(RecordMissing, match="or add --any for what is predicted to be fastest"):
        run("export", *SIZES, *TARGET, "--out", tmp_path)
