"""Searches that end and go on: nothing is measured twice, nothing is lost but what was on the GPU."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections import Counter

import pytest
from tuning import PLAIN, Bench

from autotune.errors import MachineError, UsageError
from autotune.space.space import Space

TOTAL, FEW = 60, 15  # candidates of the plain family, and of a part of it


@pytest.fixture
def bench(tmp_path, monkeypatch):
    return Bench(tmp_path, monkeypatch)


def test_a_complete_search_is_not_repeated(bench):
    first = bench.tune(bench.few)
    assert (first.search.seen, first.search.complete, first.search.resumed) == (FEW, True, 0)
    assert bench.measured.total() == FEW
    again = bench.tune(bench.few)
    assert bench.measured.total() == FEW
    assert (again.search.seen, again.search.complete, again.search.resumed) == (FEW, True, FEW)
    assert again.config == first.config
    assert again.search.outcomes == first.search.outcomes


def test_a_larger_budget_continues(bench):
    first = bench.tune(budget="7")
    assert (first.search.seen, first.search.complete) == (7, False)
    second = bench.tune(budget="19", resume=True)
    assert (second.search.seen, second.search.resumed, second.search.legal) == (19, 7, TOTAL)
    assert set(bench.measured.values()) == {1}
    assert bench.measured.total() == 19
    assert second.timing.median_ms <= first.timing.median_ms
    third = bench.tune(budget="5")
    assert (third.search.seen, third.config) == (19, second.config)
    assert bench.measured.total() == 19


def test_the_study_learns_from_what_was_measured_before(bench):
    bench.tune(budget="20", strategy="tpe")
    told = [json.dumps(line["config"]) for line in bench.outcomes()]
    bench.tune(budget="40", strategy="tpe")
    proposed = [json.dumps(line["config"]) for line in bench.outcomes()]
    assert proposed[:20] == told
    assert len(set(proposed)) == 40


def test_without_resume_a_search_begins_anew_and_the_old_log_is_kept(bench):
    bench.tune(budget="6")
    before = bench.logs[0].read_bytes()
    record = bench.tune(budget="6", resume=False)
    assert (record.search.seen, record.search.resumed) == (6, 0)
    kept = [path for path in bench.logs if ".old" in path.name]
    assert [path.read_bytes() for path in kept] == [before]
    assert len(bench.outcomes()) == 6


@pytest.fixture
def altered(tmp_path):
    """The same family with another template."""

    def altered(name, old, new):
        folder = tmp_path / "altered"
        folder.mkdir()
        for file in PLAIN.parent.iterdir():
            text = file.read_text()
            (folder / file.name).write_text(text.replace(old, new) if file.name == name else text)
        return Space.load(folder / "plain.toml")

    return altered


@pytest.mark.parametrize(
    ("name", "old", "new", "says"),
    [
        ("plain.cu.jinja", "blockIdx.x", "blockIdx.x  ", "another template"),
        ("plain.toml", "9, 10, 11", "9, 10", "another search space"),
    ],
)
def test_the_log_of_another_space_is_not_continued(bench, altered, name, old, new, says):
    bench.tune(budget="6")
    before = bench.logs[0].read_bytes()
    space = altered(name, old, new)
    with pytest.raises(
        UsageError, match=rf"^cannot resume: .*\.trials\.jsonl is of {says}; without --resume"
    ):
        bench.tune(space, budget="6", resume=True)
    assert [path.read_bytes() for path in bench.logs] == [before]
    record = bench.tune(space, budget="6")
    assert record.search.resumed == 0
    assert before in [path.read_bytes() for path in bench.logs]


def test_the_log_of_another_nvrtc_is_not_continued(bench, monkeypatch):
    bench.tune(budget="6")
    monkeypatch.setattr("autotune.tuning.resume.nvrtc_version", lambda: "12.9")
    with pytest.raises(
        UsageError, match=r"is of NVRTC \d+\.\d+\.\d+, not 12\.9; without --resume it is kept as plain"
    ):
        bench.tune(budget="6", resume=True)
    assert bench.tune(budget="6").search.resumed == 0
    assert len(bench.logs) == 2


def test_cold_times_are_not_mixed_with_warm_ones(bench):
    bench.tune(budget="6")
    with pytest.raises(UsageError, match=r"is of l2 warm, not cold"):
        bench.tune(budget="6", resume=True, cold=True)


def test_there_need_be_nothing_to_resume(bench):
    assert bench.tune(budget="6", resume=True).search.seen == 6


def test_one_machine_code_is_measured_once_even_in_two_runs(bench, altered):
    space = altered("plain.cu.jinja", "{{ value }}.0f", "{{ value // 6 }}.0f")  # 12 values, 2 codes
    bench.tune(space, budget="15")
    record = bench.tune(space)
    assert record.search.seen == TOTAL
    assert bench.measured == Counter(dict.fromkeys(bench.measured, 1))
    assert bench.measured.total() == 10
    twins = [line for line in bench.outcomes() if "same_as" in line]
    assert len(twins) == TOTAL - 10
    assert {line["same_as"] for line in twins} <= {
        line["id"] for line in bench.outcomes() if "same_as" not in line
    }


def test_each_candidate_is_named_before_it_is_launched(bench):
    bench.tune(budget="9")
    lines = bench.lines()
    assert [line["event"] for line in lines if line.get("event") in ("begin", "end")] == ["begin", "end"]
    started = {line["id"]: n for n, line in enumerate(lines) if line.get("event") == "started"}
    ended = {line["id"]: n for n, line in enumerate(lines) if "event" not in line}
    assert set(started) == set(ended)
    assert all(started[name] < ended[name] for name in started)
    times = [line["s"] for line in lines]
    assert times == sorted(times)
    assert len({line["run"] for line in lines}) == 1
    assert all(line["at"].endswith("Z") for line in lines)


def test_a_candidate_that_was_on_the_gpu_when_two_runs_died_is_given_up(bench, monkeypatch):
    monkeypatch.setenv("STUB_SECONDS", "5")
    for _ in range(2):
        assert not bench.killed_after(2.5, budget="10", workers=1)
    (died,) = {line["id"] for line in bench.lines()[:2] if line.get("event") == "started"}
    monkeypatch.setenv("STUB_SECONDS", "0.002")
    record = bench.tune(budget="10", workers=1)
    assert record.search.outcomes == {"measured": 9, "crash": 1}
    (crashed,) = [line for line in bench.outcomes() if line["outcome"] == "crash"]
    assert crashed["id"] == died
    assert crashed["why"] == "2 runs were killed or died while it was on the GPU"
    again = bench.tune(budget="10", workers=1)
    assert again.search.outcomes == record.search.outcomes
    assert len([line for line in bench.outcomes() if line["outcome"] == "crash"]) == 1
    assert max(bench.measured.values()) == 2


@pytest.mark.slow
def test_killed_at_twenty_random_moments(bench, monkeypatch):
    start = time.monotonic()
    bench.tune(budget="2")
    usual = time.monotonic() - start  # of a start, on this machine today
    monkeypatch.setenv("STUB_SECONDS", "0.08")
    monkeypatch.setenv("STUB_FINALS", "0.5")  # should the search be over before: in the finals then
    chance = random.Random(5)
    kills = 0
    for _ in range(20):
        kills += not bench.killed_after(chance.uniform(0.2, 1.8) * usual)
        for path in bench.logs:
            for number, line in enumerate(path.read_bytes().split(b"\n")[:-1]):
                assert isinstance(json.loads(line), dict), (path, number)
    assert kills >= 18
    lines = bench.lines()
    for run in {line["run"] for line in lines}:
        ours = [line for line in lines if line["run"] == run]
        started = {line["id"] for line in ours if line.get("event") == "started"}
        assert len(started - {line["id"] for line in ours if "outcome" in line}) <= 1
    monkeypatch.setenv("STUB_SECONDS", "0.002")
    monkeypatch.setenv("STUB_FINALS", "0.002")
    record = bench.tune()
    assert (record.search.seen, record.search.complete) == (TOTAL, True)
    outcomes = bench.outcomes()
    assert Counter(line["id"] for line in outcomes) == Counter({line["id"] for line in outcomes})
    assert {line["outcome"] for line in outcomes} <= {"measured", "crash"}
    again = bench.measured.total() - len(bench.measured)
    assert again <= kills  # the one on the GPU when it was killed, and no other
    assert max(bench.measured.values()) <= 2


def test_two_processes_share_a_study(bench, tmp_path):
    storage = f"journal:{tmp_path / 'study.journal'}"
    others = [
        bench.started(storage=storage, root=tmp_path / name, seed=seed)
        for seed, name in enumerate(("one", "two"))
    ]
    assert [other() for other in others] == [0, 0]
    assert bench.measured == Counter(dict.fromkeys(bench.measured, 1))
    assert bench.measured.total() == TOTAL
    for name in ("one", "two"):
        (path,) = (tmp_path / name).glob("*/*.json")
        search = json.loads(path.read_text())["search"]
        assert (search["seen"], search["complete"]) == (TOTAL, True)
        assert 0 < search["resumed"] < TOTAL  # what the other measured
    third = bench.tune(storage=storage)
    assert (third.search.seen, third.search.resumed) == (TOTAL, TOTAL)
    assert bench.measured.total() == TOTAL


def test_a_storage_that_cannot_be_used_is_one_line(bench):
    with pytest.raises(UsageError, match=r"^storage .* cannot be used: "):
        bench.tune(storage="postgresql://nobody@127.0.0.1:9/nothing")
    assert bench.measured.total() == 0


def test_a_line_with_a_config_that_no_space_could_have_is_skipped(bench):
    bench.tune(budget="7")
    log = next(bench.root.glob("*/*.trials.jsonl"))
    header, *lines = log.read_text().splitlines()
    odd = [json.loads(line) for line in lines]
    for line in odd:
        if "config" in line:
            line["config"] = {name: [value] for name, value in line["config"].items()}
    log.write_text("\n".join([header, *map(json.dumps, odd), ""]))
    record = bench.tune(budget="9")
    assert (record.search.seen, record.search.resumed) == (9, 0)


@pytest.mark.parametrize("what", ["the log", "the folder"])
def test_a_log_that_is_deleted_meanwhile_begins_anew(bench, what):
    """As by ``cache prune --trials``, or by hand: the search goes on, and so does the next one."""
    seen = []

    def delete(progress):
        seen.append(progress.seen)
        if progress.seen == 5 and seen.count(5) == 1:
            if what == "the log":
                bench.logs[0].unlink()
            else:
                shutil.rmtree(bench.root, ignore_errors=True)  # something may be written meanwhile

    record = bench.tune(budget="20", watch=delete)
    assert record.search.outcomes == {"measured": 20}
    kept = len(bench.outcomes())
    assert 20 - 5 - 2 <= kept <= 20  # one may have been written while the fifth was told
    again = bench.tune(budget="30")
    assert again.search.resumed == kept
    assert again.timing.median_ms <= record.timing.median_ms


# -- faults of the machine are no property of a candidate ----------------------------------------------------


def test_killed_compilers_end_the_search_in_one_line_and_leave_nothing_behind(bench, monkeypatch):
    with monkeypatch.context() as killed:
        killed.setattr("autotune.code.pool._SERVICE", "stub_gpu:killed_compiler")
        with pytest.raises(MachineError) as caught:
            bench.tune(bench.few)
    told = str(caught.value)
    assert told.startswith("the machine failed in 5 compiles in a row, not the candidates: ")
    assert "killed by SIGKILL" in told
    assert "\n" not in told
    assert bench.outcomes() == []
    record = bench.tune(bench.few)
    assert (record.search.seen, record.search.complete) == (FEW, True)


@pytest.mark.parametrize("fault", ["killed", "starved"])
def test_a_gpu_that_others_fill_ends_the_search_and_rejects_nobody(bench, tmp_path, monkeypatch, fault):
    file = tmp_path / "fault"
    file.write_text(fault)
    monkeypatch.setenv("STUB_FAULT", str(file))
    with pytest.raises(MachineError, match=r"^the machine failed in 5 measurements in a row, not the cand"):
        bench.tune(bench.few)
    assert bench.outcomes() == []
    assert {line["event"] for line in bench.lines()} >= {"started", "fault"}
    file.unlink()
    record = bench.tune(bench.few)
    assert record.search.outcomes == {"measured": FEW}


def test_a_candidate_without_an_outcome_is_measured_by_the_next_run(bench, monkeypatch):
    bench.tune(bench.few, budget="5")
    (digest, *_) = bench.measured
    for log in bench.logs:
        log.unlink()
    monkeypatch.setenv("STUB_STARVED", digest)
    record = bench.tune(bench.few)
    assert (record.search.seen, record.search.complete) == (FEW - 1, False)
    assert digest in bench.measured
    monkeypatch.delenv("STUB_STARVED")
    record = bench.tune(bench.few)
    assert (record.search.seen, record.search.resumed, record.search.complete) == (FEW, FEW - 1, True)


def test_finalists_that_cannot_be_compiled_now_end_the_run_and_not_their_records(bench, monkeypatch):
    record = bench.tune(budget="10")
    with monkeypatch.context() as killed:
        killed.setattr("autotune.code.pool._SERVICE", "stub_gpu:killed_compiler")
        with pytest.raises(MachineError, match=r"^the machine failed twice while it compiled a finalist: "):
            bench.tune(budget="10")
    assert len(bench.outcomes()) == 10
    assert bench.tune(budget="10").config == record.config
