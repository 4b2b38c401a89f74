from __future__ import annotations

import dataclasses
import fcntl
import json
import multiprocessing
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from autotune.device import named_device
from autotune.errors import RecordError
from autotune.problem import Problem
from autotune.records.schema import RecordedDevice
from autotune.records.trials import TrialHeader, TrialLog, read_trials, trials_path

HEADER = TrialHeader(
    family="sgemm",
    problem=Problem(4096, 4096, 4096),
    device=RecordedDevice.of(named_device("h200")),
    space_digest="c" * 64,
    template_digest="b" * 64,
    nvrtc="13.5",
)


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
    with TrialLog(path, HEADER) as log:
        log.append({"number": 1})
        log.append({"number": 2, "config": {"BM": "ä"}})
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
    contents = (b"{", b"\xff\n", b"[]\n", b'{"schema": 1}\n', b"\n", b'{"schema": 2}\n')
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
    assert len(path.read_bytes().splitlines()) == 401
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
