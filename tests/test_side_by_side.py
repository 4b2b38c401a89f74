"""Records that the user names, one alone and two side by side."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner
from made_records import H200, fitted, made, made_estimate

from autotune.cli.show import command
from autotune.errors import RecordError, RecordMissing, UsageError
from autotune.records import Store, to_json
from autotune.report.side_by_side import FACTS, SideBySide
from autotune.space.space import Space
from autotune.values.device import named_device
from autotune.values.measurement import Timing
from autotune.values.problem import Problem

SMALL, LARGE = Problem(64, 96, 40), Problem(128, 96, 40, "nt", 1)
SKINNY = Space.load("sgemm_skinny")


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setattr("autotune.records.store.data_dir", lambda name: tmp_path / "none")
    return Store(tmp_path / "records")


@pytest.fixture
def show(store, monkeypatch):
    def show(*words, columns=110):
        outcome = CliRunner(env={"COLUMNS": str(columns)}).invoke(
            command, [*words, "--cache", str(store.root)], catch_exceptions=False
        )
        return outcome.output

    return show


def watts(ms, watts):
    clocks = {"sm_mhz_min": 1965, "sm_mhz_max": 1980, "throttle": (), "watts": watts}
    return Timing(ms, (0.99 * ms, ms, 1.01 * ms), 7, 1, "warm", "graph", clocks, False)


def test_what_differs_is_told_part_by_part(store, show):
    roomy = {**fitted(LARGE), "min_blocks": 3}
    store.write(made(SMALL, timing=watts(0.5, 300), gflops=SMALL.flops / 5e5))
    store.write(made(LARGE, config=roomy, timing=watts(0.25, 600), gflops=LARGE.flops / 25e4))
    told = show("64x96x40", "128 x 96 x 40 nt beta")
    assert told.startswith(
        "A  64 x 96 x 40 nn on NVIDIA H200: sgemm\nB  128 x 96 x 40 nt beta on NVIDIA H200"
    )
    rows = {" ".join(line.split()) for line in told.splitlines()}
    assert {
        "problem m 64 128",
        "layout nn nt",
        "time ms 0.5 0.25 0.500",
        "noisy no no",
        "circumstances watts 300 600",
    } <= rows
    assert any(row.startswith("min_blocks") and row.endswith(" 3") for row in rows)
    assert f"TFLOP/s {SMALL.flops / 5e8:.2f} {LARGE.flops / 25e7:.2f} 4.000" in rows
    assert "GFLOP" not in told
    assert "alike: n 96, k 40" in told
    assert "lowest SM MHz 1965" in told.split("alike")[1].replace("\n   ", "")
    assert all(len(line) <= 80 for line in show("64x96x40", "128x96x40 nt beta", columns=80).splitlines())


def test_json_has_both_and_names_each_difference_by_its_path(store, show):
    one, other = made(SMALL, ms=0.5), made(LARGE, ms=0.25)
    store.write(one)
    store.write(other)
    told = json.loads(show("64x96x40", "sgemm_f32_nt_m128_n96_k40_beta1_ffma", "--json"))
    assert told["a"] == json.loads(to_json(one))
    assert told["b"] == json.loads(to_json(other))
    assert list(told["differences"]) == list(FACTS)
    assert told["differences"]["problem"]["problem.m"] == {"a": 64, "b": 128}
    assert told["differences"]["time"]["timing.median_ms"] == {"a": 0.5, "b": 0.25, "ratio": 0.5}
    assert "problem.n" not in told["differences"]["problem"]


def test_a_record_beside_itself_differs_in_nothing(store, show):
    record = made(SMALL)
    assert not any(fact.differs for fact in SideBySide(record, record).facts)
    store.write(record)
    told = show("64x96x40", "64x96x40")
    assert [line.split()[0] for line in told.splitlines() if line.endswith(" 1.000")] == ["time", "TFLOP/s"]


def test_parameters_of_one_family_alone_are_a_paragraph(store, show):
    thin = Problem(8, 96, 64)
    skinny = made(thin, config=SKINNY.enumerate(thin, H200).config(0), space=SKINNY, ms=0.5)
    tiled = made(thin, ms=0.25)
    store.write(skinny)
    store.write(tiled)
    pair = SideBySide(tiled, skinny)
    assert "TW" in pair.alone(1)
    assert "BM" in pair.alone(0)
    told = show("sgemm_f32_nn_m8_n96_k64_beta0_ffma", "sgemm_skinny_f32_nn_m8_n96_k64_beta0_ffma")
    for title, which, own in (("A alone: ", 0, "BM"), ("B alone: ", 1, "TW")):
        paragraph = told.split(title)[1].split("alone: ")[0].split("alike: ")[0]
        assert f"{own} {pair.alone(which)[own]}" in " ".join(paragraph.split())
    assert show("8x96x64", "8x96x64").startswith("A  8 x 96 x 64 nn on NVIDIA H200: sgemm\n"), "the fastest"
    assert "sgemm_skinny" in show("8x96x64", "8x96x64", "--family", "sgemm_skinny")


def test_an_estimated_record_has_no_times(store, show):
    store.write(made_estimate(SMALL))
    store.write(made(LARGE))
    told = show("64x96x40", "128x96x40 nt beta")
    assert next(line.split()[1:] for line in told.splitlines() if "TFLOP/s" in line)[0] == "-"
    assert "evidence" in told


def test_a_file_anywhere_is_a_record(tmp_path, store, show):
    file = tmp_path / "mine.json"
    file.write_text(to_json(made(SMALL, device=replace(H200, name="Some GPU"))))
    store.write(made(SMALL))
    assert "Some GPU" in show(str(file), "64x96x40")
    assert show(str(file)).startswith("64 x 96 x 40 nn on Some GPU: ")
    assert json.loads(show(str(file), "--json"))["problem"]["m"] == 64


def test_sizes_alone_show_what_sizes_by_options_show(store, show):
    store.write(made(SMALL))
    options = show("--m", "64", "--n", "96", "--k", "40")
    assert show("64 x 96 x 40 nn") == options
    assert "this would serve" in show("65x96x40", "--target", "h200")


def test_what_is_no_record_is_named(tmp_path, store, show):
    store.write(made(SMALL))
    (tmp_path / "broken.json").write_text("{")
    for words, error, told in (
        (("a b", "64x96x40"), UsageError, "'a b' names no record: give a .json file, sizes such as"),
        (("64x96x40", "9x9x9"), RecordMissing, "no such record of 9 x 9 x 9 nn: run 'autotune tune --m 9"),
        (("64x96x40", "nothing"), RecordMissing, "no such record of nothing: 'autotune show' lists all"),
        (("64x96x40", "*"), UsageError, "names no record"),
        (("9x9x9 nx", "64x96x40"), UsageError, "'nx' is unknown: behind the sizes give one of nn, nt"),
        (("64x96x40", "x", "y"), UsageError, "show takes one or two records, not 3"),
        (("64x96x40", "--m", "1", "--n", "1", "--k", "1"), UsageError, "leave out one"),
        ((str(tmp_path / "gone.json"), "64x96x40"), RecordError, "gone.json cannot be read"),
        ((str(tmp_path / "broken.json"), "64x96x40"), RecordError, "broken.json"),
        (("64x96x40", "64x96x40", "--target", "a100"), RecordMissing, "no such record"),
    ):
        with pytest.raises(error) as raised:
            show(*words)
        assert told in str(raised.value)
        assert "\n" not in str(raised.value)


def test_records_of_several_gpus_are_told_apart_by_the_target(store, show):
    store.write(made(SMALL))
    store.write(made(SMALL, device=named_device("a10"), ms=2.0))
    with pytest.raises(UsageError, match=r"on NVIDIA_A10, NVIDIA_H200: add --target, or give a file"):
        show("64x96x40", "64x96x40")
    assert "NVIDIA A10" in show("64x96x40", "64x96x40", "--target", "a10")
