from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import multiprocessing
import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import RecordError, UsageError
from autotune.records import trials as trials_module
from autotune.records.schema import RecordedDevice
from autotune.records.trials import Run, TrialHeader, TrialLog, add_line, deaths, read_log, trials_path
from autotune.values.device import named_device
from autotune.values.problem import Problem

HEADER = TrialHeader(
    family="sgemm",
    problem=Problem(4096, 4096, 4096),
    device=RecordedDevice.of(named_device("h200")),
    space_digest="c" * 64,
    template_digest="b" * 64,
    nvrtc="13.5",
)


def read_trials(path: Path) -> tuple[TrialHeader, list[dict[str, Any]]]:
    """Read the trials of a log without the stamps of their lines."""
    header, lines = trials_module.read_trials(path)
    stamps = ("run", "at", "s")
    assert all(set(stamps) <= set(line) for line in lines)
    return header, [{name: value for name, value in line.items() if name not in stamps} for line in lines]


def test_path_lies_beside_the_record() -> None:
    assert trials_path(Path("c/sgemm.v2_f32.json")) == Path("c/sgemm.v2_f32.trials.jsonl")


def test_trials_come_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x.trials.jsonl"
    log = TrialLog(path, HEADER)
    assert not path.parent.exists()  # nothing is created before the first trial
    trials: list[dict[str, Any]] = [
        {"config": {"BM": 128}, "median_ms": 1.5},
        {"config": {"BM": 64}, "rejected": "compile"},
    ]
    for count, trial in enumerate(trials, start=1):
        log.append(trial)
        assert read_trials(path) == (HEADER, trials[:count])  # each is in the file at once
    log.close()
    first = json.loads(path.read_text().splitlines()[0])
    assert list(first) == [
        "schema",
        "family",
        "problem",
        "device",
        "space_digest",
        "template_digest",
        "nvrtc",
        "driver",
        "flags",
        "l2",
    ]


def test_the_same_header_continues_the_log(tmp_path: Path) -> None:
    path = tmp_path / "x.trials.jsonl"
    for number in (1, 2, 3):
        with TrialLog(path, HEADER) as log:
            log.append({"number": number})
    assert read_trials(path) == (HEADER, [{"number": 1}, {"number": 2}, {"number": 3}])


def test_another_header_starts_anew_and_keeps_the_old_log(tmp_path: Path) -> None:
    path = tmp_path / "x.trials.jsonl"
    other = dataclasses.replace(HEADER, space_digest="d" * 64)
    with TrialLog(path, HEADER) as log:
        log.append({"number": 1})
    with TrialLog(path, other) as log:
        log.append({"number": 2})
    assert read_trials(path) == (other, [{"number": 2}])
    assert read_trials(tmp_path / "x.old.trials.jsonl") == (HEADER, [{"number": 1}])


def test_every_torn_end_is_read_and_continued(tmp_path: Path) -> None:
    path = tmp_path / "x.trials.jsonl"
    log = TrialLog(path, HEADER)
    log.append({"number": 1})
    log.append({"number": 2, "config": {"BM": "ä"}})
    log.close()
    whole = path.read_bytes()
    second = whole.rindex(b'{"number": 2')
    for length in range(second, len(whole)):
        path.write_bytes(whole[:length])
        _, trials = read_trials(path)
        assert trials[0] == {"number": 1}
        assert len(trials) == (2 if length == len(whole) - 1 else 1)  # whole but for its newline
        with TrialLog(path, HEADER) as log:
            log.append({"number": 3})
        assert read_trials(path)[1] == [*trials, {"number": 3}]


def test_a_torn_header_is_refused_by_reading_and_replaced_by_writing(tmp_path: Path) -> None:
    path = tmp_path / "x.trials.jsonl"
    contents = (b"{", b"\xff\n", b"[]\n", b'{"schema": 1}\n', b"\n", b'{"schema": 3}\n')
    for number, content in enumerate(contents, 1):
        path.write_bytes(content)
        with pytest.raises(RecordError, match=r"x\.trials\.jsonl"):
            read_trials(path)
        with TrialLog(path, HEADER) as log:
            log.append({"number": 1})
        assert read_trials(path) == (HEADER, [{"number": 1}])
        kept = tmp_path / f"x.old{number if number > 1 else ''}.trials.jsonl"
        assert kept.read_bytes() == content
        path.unlink()


def test_an_empty_file_is_not_a_log(tmp_path: Path) -> None:
    path = tmp_path / "x.trials.jsonl"
    path.touch()
    with pytest.raises(RecordError, match="line 1: not JSON"):
        read_trials(path)
    with pytest.raises(RecordError, match="cannot be read: No such file"):
        read_trials(tmp_path / "none.trials.jsonl")


def test_a_trial_without_json_form_is_refused_and_not_written(tmp_path: Path) -> None:
    path = tmp_path / "x.trials.jsonl"
    with TrialLog(path, HEADER) as log:
        log.append({"number": 1})
        with pytest.raises(RecordError, match="cannot be written as JSON"):
            log.append({"median_ms": float("nan")})
        log.append({"number": 2})
    assert read_trials(path)[1] == [{"number": 1}, {"number": 2}]


def test_a_bad_header_is_refused_before_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "x.trials.jsonl"
    log = TrialLog(path, dataclasses.replace(HEADER, nvrtc=""))
    with pytest.raises(RecordError, match=r"\$\.nvrtc"):
        log.append({"number": 1})
    with pytest.raises(RecordError):
        read_trials(path)


def test_headers_that_alternate_lose_no_log(tmp_path: Path) -> None:
    path = tmp_path / "x.trials.jsonl"
    other = dataclasses.replace(HEADER, space_digest="f" * 64)
    for number in range(4):
        with TrialLog(path, (HEADER, other)[number % 2]) as log:
            log.append({"number": number})
    kept = [read_trials(each)[1][0]["number"] for each in sorted(tmp_path.iterdir())]
    assert sorted(kept) == [0, 1, 2, 3]


def test_an_unwritable_folder_names_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RecordError, match="set AUTOTUNE_CACHE_DIR"):
        TrialLog(tmp_path / "file" / "x.trials.jsonl", HEADER).append({})


def _append_many(path: Path, writer: int) -> None:
    with TrialLog(path, HEADER) as log:
        for number in range(100):
            log.append({"writer": writer, "number": number, "text": "x" * 500})


def test_several_processes_share_one_log(tmp_path: Path) -> None:
    path = tmp_path / "x.trials.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_append_many, args=(path, writer)) for writer in range(4)]
    for process in writers:
        process.start()
    for process in writers:
        process.join()
    _, trials = read_trials(path)
    assert len(path.read_bytes().splitlines()) == 405  # a header, the trials, and an end for each writer
    for writer in range(4):
        assert [trial["number"] for trial in trials if trial["writer"] == writer] == list(range(100))
    assert os.listdir(tmp_path) == [path.name]


def test_opening_waits_for_another_opener_and_follows_the_path(tmp_path: Path) -> None:
    path = tmp_path / "x.trials.jsonl"
    with path.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        log = TrialLog(path, HEADER)
        thread = threading.Thread(target=log.append, args=({"number": 1},))
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()  # waits, although it could have written its header
        moved = path.rename(tmp_path / "moved")
    thread.join(10)
    log.close()
    assert moved.read_bytes() == b""
    assert read_trials(path) == (HEADER, [{"number": 1}])


def test_a_second_header_is_not_a_trial(tmp_path: Path) -> None:
    path = tmp_path / "x.trials.jsonl"
    with TrialLog(path, HEADER) as log:
        log.append({"number": 1})
    header = path.read_bytes().splitlines(keepends=True)[0]
    path.write_bytes(header + path.read_bytes())  # as two writers leave it where there are no locks
    assert read_trials(path) == (HEADER, [{"number": 1}])


# -- events --------------------------------------------------------------------------------------------------


def event(run: str, kind: str, name: str = "x") -> dict[str, Any]:
    about = {"outcome": "measured"} if kind == "outcome" else {"event": kind}
    return {"run": run, "id": name, **about}


def test_a_run_that_died_is_charged_to_what_it_left_without_an_outcome() -> None:
    first = [event("a", "begin"), event("a", "started"), event("a", "outcome"), event("a", "started", "y")]
    second = [event("b", "begin"), event("b", "started", "y")]
    assert deaths([first]) == {"y": 1}
    assert deaths([[*first, *second]]) == {"y": 2}
    assert deaths([[*first, *second, event("b", "outcome", "y")]]) == {"y": 1}


def test_a_run_that_ended_or_was_interrupted_is_charged_to_nothing() -> None:
    begun = [event("a", "begin"), event("a", "started")]
    assert deaths([[*begun, event("a", "end")]]) == {}
    assert deaths([begun, [event("a", "end")]]) == {}  # the end is in the log of another family


def test_an_end_says_how_it_came(tmp_path: Path) -> None:
    path = tmp_path / "x.trials.jsonl"

    def ended(error: BaseException | None) -> None:
        with contextlib.suppress(BaseException), TrialLog(path, HEADER) as log:
            log.append({"number": 1})
            if error is not None:
                raise error

    for error in (None, KeyboardInterrupt(), OSError()):
        ended(error)
    _, lines = read_log(path)
    assert [line["why"] for line in lines if line.get("event") == "end"] == ["done", "interrupted", "failed"]
    assert len({line["run"] for line in lines}) == 3


def test_another_process_of_the_run_adds_lines(tmp_path: Path) -> None:
    path, run = tmp_path / "x.trials.jsonl", Run()
    log = TrialLog(path, HEADER, run)
    log.append({"number": 1})
    context = multiprocessing.get_context("fork")
    process = context.Process(target=add_line, args=(path, HEADER, run, {"number": 2, "ms": 1.23456789}))
    process.start()
    process.join()
    log.append({"number": 3})
    _, lines = read_log(path)
    assert [line["number"] for line in lines] == [1, 2, 3]
    assert lines[1]["ms"] == 1.23457
    assert {line["run"] for line in lines} == {run.token}
    assert lines[0]["s"] <= lines[1]["s"] <= lines[2]["s"]


def test_a_log_that_is_deleted_begins_anew_with_its_header(tmp_path: Path) -> None:
    path, run = tmp_path / "folder" / "x.trials.jsonl", Run()
    with TrialLog(path, HEADER, run) as log:
        for number, write in enumerate((log.append, partial(add_line, path, HEADER, run)) * 2):
            write({"number": number})
            assert read_trials(path) == (HEADER, [{"number": number}])
            path.unlink()
            path.parent.rmdir()
    assert read_trials(path) == (HEADER, [])  # it ended


def test_a_log_of_schema_1_is_read_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "x.trials.jsonl"
    with TrialLog(path, HEADER) as log:
        log.append({"number": 1})
    old = json.loads(path.read_text().splitlines()[0])
    old = {name: value for name, value in old.items() if name not in ("driver", "flags", "l2")}
    path.write_text(json.dumps(old | {"schema": 1}) + '\n{"config": {}, "outcome": "measured"}\n')
    header, lines = read_log(path)
    assert (header.schema, header.nvrtc, header.driver) == (1, "13.5", None)
    assert lines == [{"config": {}, "outcome": "measured"}]
    log = TrialLog(path, HEADER)
    assert log.past() == []
    with pytest.raises(UsageError, match=r"is of schema 1, not 2; without --resume it is kept as x\.old"):
        log.past(required=True)
    log.append({"number": 1})
    assert read_log(tmp_path / "x.old.trials.jsonl")[1] == lines


def test_what_differs_is_named(tmp_path: Path) -> None:
    other = dataclasses.replace(
        HEADER, nvrtc="12.9", driver="580.1", device=RecordedDevice.of(named_device("a10")), l2="cold"
    )
    assert HEADER.differences(HEADER) == ""
    assert HEADER.differences(other) == (
        "device NVIDIA A10 with 72 SMs, not NVIDIA H200, NVRTC 12.9, not 13.5, driver 580.1, not None, "
        "l2 cold, not warm"
    )


def test_a_log_of_a_newer_schema_is_never_continued(tmp_path: Path) -> None:
    path = tmp_path / "x.trials.jsonl"
    path.write_text('{"schema": 3}\n')
    with pytest.raises(UsageError, match=r"cannot resume: .*schema 3 is newer than 2"):
        TrialLog(path, HEADER).past(required=True)
    assert TrialLog(path, HEADER).past() == []


def test_a_line_that_was_cut_by_a_full_disk_does_not_spoil_the_next(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "x.trials.jsonl"
    log = TrialLog(path, HEADER)
    log.append({"number": 1})
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, content: write(file, content[: len(content) // 2]))
    with pytest.raises(RecordError, match="No space left"):
        log.append({"number": 2})
    monkeypatch.undo()
    log.append({"number": 3})
    assert read_trials(path)[1] == [{"number": 1}, {"number": 3}]


# --- whether a run is alive ---


def _search(path: Path, header: TrialHeader, told: Any, go_on: Any) -> None:
    with TrialLog(path, header) as log:
        log.append({"event": "started", "id": "one", "config": {"BM": 8}})
        told.set()
        go_on.wait(60)


def test_a_run_is_dead_when_its_process_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "x.trials.jsonl"
    context = multiprocessing.get_context("fork")
    told, go_on = context.Event(), context.Event()
    runs = [context.Process(target=_search, args=(path, HEADER, told, go_on)) for _ in range(2)]
    for run in runs:
        told.clear()
        run.start()
        assert told.wait(30)
    log = TrialLog(path, HEADER)
    lines = log.past()
    alive = log.alive(lines)
    assert len(alive) == 2
    assert deaths([lines], alive) == {}
    runs[0].kill()
    runs[0].join()
    alive = log.alive(lines)
    assert len(alive) == 1
    assert deaths([lines], alive) == {"one": 1}
    runs[1].kill()
    runs[1].join()
    assert log.alive(lines) == set()
    assert deaths([lines]) == {"one": 2}
    assert log.alive([{"run": "../x"}, {"run": 3}, {}]) == set()


def test_a_log_of_an_older_build_of_nvrtc_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "x.trials.jsonl"
    with TrialLog(path, dataclasses.replace(HEADER, nvrtc="13.0")) as log:
        log.append({"id": "one"})
    exact = TrialLog(path, dataclasses.replace(HEADER, nvrtc="13.0.88"))
    assert [line["id"] for line in exact.past() if "id" in line] == ["one"]
    with exact as log:
        log.append({"id": "two"})
    assert os.listdir(tmp_path) == [path.name]
    assert TrialLog(path, dataclasses.replace(HEADER, nvrtc="13.1.80")).past() == []


def test_a_log_that_is_a_pipe_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "x.trials.jsonl"
    os.mkfifo(path)
    with pytest.raises(RecordError, match="cannot be written"):
        TrialLog(path, HEADER).append({"id": "one"})
    with pytest.raises(RecordError, match="cannot be written"):
        add_line(path, HEADER, Run(), {"id": "one"})
    assert TrialLog(path, HEADER).past() == []
