"""A space of which one candidate in four is broken, in every way: each is named, and no good one is lost."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tuning import Bench

from autotune.errors import TuningError
from autotune.space.space import Space

TORTURE = Path(__file__).parent / "data" / "torture" / "torture.toml"
KINDS = {"compile": 2, "compile_timeout": 2, "timeout": 2, "crash": 4, "correctness": 2}
WHY = {
    "compile": "error: ",
    "compile_timeout": "no binary after 1.5 s of compiling",
    "timeout": "no result after 0.7",
    "correctness": "C[0, 0] is nan",
}


@pytest.fixture
def bench(tmp_path, monkeypatch):
    monkeypatch.setattr("autotune.tuning.request.COMPILE_TIMEOUT_S", 1.5)
    monkeypatch.setattr("autotune.tuning.limits.TRIAL_TIMEOUT_S", 0.7)
    return Bench(tmp_path, monkeypatch)


@pytest.fixture
def space(tmp_path):
    def space(rule=""):
        shutil.copy(TORTURE.with_name("torture.cu.jinja"), tmp_path)
        path = tmp_path / "some.toml"
        path.write_text(f'extends = "{TORTURE}"\n[parameters]\nvariant = [0, 1, 2, 3, 4, 5]\n{rule}')
        return Space.load(path)

    return space


def test_every_broken_candidate_is_named_and_every_good_one_measured(bench, space):
    record = bench.tune(space(), strategy="exhaustive")
    assert record.search.outcomes == {"measured": 36, **KINDS}
    assert (record.search.seen, record.search.complete) == (48, True)
    lines = bench.outcomes("torture")
    assert len({line["id"] for line in lines}) == len(lines) == 48
    for line in lines:
        broken = (line["config"]["variant"] * 8 + line["config"]["num_threads"] // 32 - 1) % 4 == 3
        assert (line["outcome"] != "measured") == broken, line
        assert WHY.get(line["outcome"], "") in line.get("why", "")
    crashes = {line["why"] for line in lines if line["outcome"] == "crash"}
    assert crashes == {
        "the GPU worker died: killed by SIGSEGV",
        "cudaErrorIllegalAddress: an illegal memory access was encountered",
    }
    assert set(bench.measured.values()) == {1}

    again = bench.tune(space(), strategy="exhaustive")
    assert (again.search.resumed, again.search.outcomes) == (48, record.search.outcomes)
    assert set(bench.measured.values()) == {1}


def test_when_all_are_broken_the_kinds_are_counted_with_an_example_each(bench, space):
    only = '[constraints]\nbroken = { expr = "number % 4 == 3", reason = "only those" }\n'
    with pytest.raises(TuningError) as caught:
        bench.tune(space(only), strategy="exhaustive", workers=3)
    told = str(caught.value)
    assert "\n" not in told
    assert told.startswith("0 of 12 candidates are usable (")
    for kind, count in KINDS.items():
        assert f"{count} {kind}, such as variant" in told
    assert not list(bench.root.glob("*/*.json"))
    assert len(bench.outcomes("torture")) == 12
    with pytest.raises(TuningError, match="0 of 12 candidates are usable"):
        bench.tune(space(only), strategy="exhaustive")
    assert set(bench.measured.values()) == {1}
