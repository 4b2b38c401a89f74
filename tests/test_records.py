from __future__ import annotations

import copy
import dataclasses
import json
import multiprocessing
import os
import pickle
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune import records
from autotune.code.render import Source
from autotune.errors import REJECTION_KINDS, RecordError
from autotune.records import Store
from autotune.records.files import Record, RecordedDevice, from_json, to_json
from autotune.records.schema import OUTCOMES
from autotune.space.space import Config
from autotune.values.device import known_devices, named_device
from autotune.values.problem import Problem

H200 = named_device("h200")
PROBLEM = Problem(1024, 1024, 1016)  # none of the shipped records
CONFIG: dict[str, int | str] = {
    "BM": 128,
    "BN": 256,
    "BK": 16,
    "TM": 8,
    "TN": 8,
    "stages": 3,
    "loader": "cp_async",
    "edge": "exact",
}
QUANTILES = (2.3101234567, 2.3141234567, 2.3201234567)


def make_record(**changes: Any) -> Record:
    record = Record(
        evidence="measured",
        problem=PROBLEM,
        device=RecordedDevice.of(H200),
        family="sgemm",
        config=CONFIG,
        launch=records.Launch.of("sgemm", (512, 1, 1), (256, 1, 1), 49152),
        code_digest="a" * 64,
        template_digest="b" * 64,
        space_digest="c" * 64,
        toolchain=records.Toolchain("13.5", "580.65.06", ("-std=c++17",)),
        resources=records.Resources(168, 0, 1024),
        timing=records.Timing(
            QUANTILES[1], QUANTILES, 30, 4, "warm", "graph", {"sm_mhz": (1980, 1975)}, False
        ),
        sustained=records.Sustained(0.5, 96, 2.61, 1.81234567, "energy counter", 1755.5, ("power cap",)),
        gflops=PROBLEM.flops / QUANTILES[1] / 1e6,
        vs_cublas=1.01234567,
        cublas=records.Cublas(2.3427, None),
        verification=records.Verification(3.12e-7, 1.2e-6, "uniform [-1, 1)"),
        search=records.Searched("tpe", "60s", 61.2, True, 300, 149048, {"measured": 280, "compile": 20}, 0),
        runners_up=(records.RunnerUp({**CONFIG, "BK": 8}, "d" * 64, 2.32, (2.31, 2.32, 2.33), True),),
        created="2026-01-31T12:00:00Z",
    )
    return dataclasses.replace(record, **changes)


def timed(median_ms: float, **changes: Any) -> Record:
    """The record with another time, and whatever else follows from it."""
    timing = dataclasses.replace(
        make_record().timing,  # type: ignore[type-var]
        median_ms=median_ms,
        quantiles_ms=(median_ms, median_ms, median_ms),
        **changes.pop("timing", {}),
    )
    flops = changes.get("problem", PROBLEM).flops
    rates = {"gflops": flops / median_ms / 1e6, "vs_cublas": 2.3427 / median_ms}
    return from_json(to_json(make_record(timing=timing, **rates, **changes)), "x")


def estimated() -> Record:
    return make_record(
        evidence="estimated", timing=None, sustained=None, gflops=None, vs_cublas=None, cublas=None,
        runners_up=(), toolchain=records.Toolchain("13.5", None, ()),
    )  # fmt: skip


TEXT = to_json(make_record())


def places(value: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Every path within a JSON value, the whole value first."""
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*at, key))


def changed(at: tuple[str | int, ...], new: Any) -> str:
    value = json.loads(TEXT)
    if not at:
        return json.dumps(new)
    inner = value
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = new
    return json.dumps(value)


def fault(text: str) -> str:
    with pytest.raises(RecordError) as caught:
        from_json(text, "x.json")
    message = str(caught.value)
    assert message.startswith("x.json: ")
    assert "\n" not in message
    return message.removeprefix("x.json: ")


def is_refused(text: str) -> bool:
    """Read any text; whatever else than a RecordError is an error of this test."""
    try:
        from_json(text, "x.json")
    except RecordError:
        return True
    return False


# --- the file as text ---


def test_keys_come_in_the_documented_order() -> None:
    value = json.loads(TEXT)
    assert list(value) == [
        "schema", "evidence", "problem", "device", "gpu_uuid", "family", "config", "launch", "code_digest",
        "machine_code_digest", "template_digest", "space_digest", "toolchain", "resources", "timing",
        "sustained", "gflops", "vs_cublas", "cublas", "verification", "search", "runners_up", "created",
        "imported",
    ]  # fmt: skip
    assert list(value["timing"]) == [
        "median_ms", "quantiles_ms", "repeats", "launches", "l2", "method", "clocks", "noisy"
    ]  # fmt: skip
    assert list(value["config"]) == list(CONFIG)


def test_a_batch_is_named_and_one_product_is_not(tmp_path: Path) -> None:
    assert "batch" not in json.loads(TEXT)["problem"]
    problem = dataclasses.replace(PROBLEM, batch=3)
    record = timed(7.5, problem=problem)
    assert json.loads(to_json(record))["problem"]["batch"] == 3
    assert from_json(to_json(record), "x") == record
    path = Store(tmp_path).write(record)
    assert path.name == "sgemm_f32_nn_m1024_n1024_k1016_batch3_beta0_ffma.json"
    assert [file.problem for file in records.filed(path.parent)] == [problem]
    assert records.serves(record, H200, PROBLEM, rendered("a", record.launch)) == (
        "the record is for batch 3, not 1"
    )
    wrong = json.loads(to_json(record))
    wrong["problem"]["batch"] = "many"
    assert fault(json.dumps(wrong)).startswith("$.problem.batch: expected an int, got a string, 'many'")


def test_numbers_are_rounded_for_readers() -> None:
    value = json.loads(TEXT)
    assert value["timing"]["quantiles_ms"] == [2.31012, 2.31412, 2.32012]
    assert value["gflops"] == 920.7
    assert value["vs_cublas"] == 1.0123
    assert value["verification"]["error"] == 3.12e-07


def test_a_tiny_rate_is_not_rounded_to_zero() -> None:
    assert json.loads(to_json(timed(1.62, problem=Problem(10, 10, 10))))["gflops"] == 0.001235


def test_a_written_record_reads_back_and_writes_the_same_text() -> None:
    record = from_json(TEXT, "x")
    assert to_json(record) == TEXT
    assert record.problem == PROBLEM
    assert record.config == CONFIG
    assert record.search.outcomes == {"measured": 280, "compile": 20}
    assert from_json(to_json(estimated()), "x") == estimated()


def test_a_record_is_a_value() -> None:
    record = from_json(TEXT, "x")
    assert hash(record) == hash(from_json(TEXT, "y"))
    assert pickle.loads(pickle.dumps(record)) == record
    assert copy.deepcopy(record) == record
    with pytest.raises(TypeError):
        record.config["BM"] = 64  # type: ignore[index]


@pytest.mark.parametrize(
    "changes",
    [
        {"gflops": float("nan")},
        {"gflops": float("inf")},
        {"code_digest": "not a digest"},
        {"family": "../sgemm"},
        {"config": {"BM": [1]}},
        {"config": {"a b": 1}},
        {"search": 3},
    ],
)
def test_what_could_not_be_read_is_not_written(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(RecordError):
        Store(tmp_path).write(make_record(**changes))
    assert list(tmp_path.iterdir()) == []


def test_clocks_and_workspaces_survive_the_file() -> None:
    measured = records.Timing(
        median_ms=2.31412, quantiles_ms=(1.9, 2.3, 2.4), repeats=7, launches=4, l2="cold",
        method="back-to-back", noisy=False,
        clocks={"sm_mhz_min": 1980, "sm_mhz_max": 1980, "throttle": ("power cap",)},
    )  # fmt: skip
    launch = records.Launch.of("sgemm", (512, 1, 1), (256, 1, 1), 49152)
    record = make_record(timing=measured, launch=launch)
    assert from_json(to_json(record), "x").timing == record.timing
    assert from_json(to_json(record), "x").launch == record.launch


# --- reading any text whatever ---


def test_a_file_cut_anywhere_is_refused() -> None:
    whole = TEXT.rstrip("\n")
    assert not is_refused(whole)
    assert [length for length in range(len(whole)) if not is_refused(whole[:length])] == []


WRONG: list[Any] = [
    None,
    True,
    -1,
    2**70,
    -1.5,
    1e300,
    "",
    "x",
    "\x1b[2J",
    "\ud800",
    [],
    [None],
    {},
    {"x": None},
    [[[]]],
]


def test_wrong_types_anywhere_raise_nothing_else() -> None:
    original = json.loads(TEXT)
    for at in places(original):
        for wrong in WRONG:
            is_refused(changed(at, wrong))
        assert is_refused(changed(at, [[[]]])), at
        assert is_refused(changed(at, {"x": {}})), at
        assert is_refused(changed(at, "\x1b[2J")), at
        assert is_refused(changed(at, 2**70)), at


def test_each_missing_and_each_unknown_key_is_named() -> None:
    original = json.loads(TEXT)
    free = {"config", "outcomes", "clocks", "stages_s"}  # objects whose keys are not fixed
    checked = 0
    for at in places(original):
        inner = original
        for key in at:
            inner = inner[key]
        if not isinstance(inner, dict) or free & set(at):
            continue
        where = "$" + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in at)
        assert fault(changed(at, {**inner, "confg": 1})) == f"{where}: unknown key 'confg'"
        for key in set(inner) - {"sustained"}:  # which is left out where there is none
            less = {name: item for name, item in inner.items() if name != key}
            assert fault(changed(at, less)) == f"{where}: missing key {key!r}"
            checked += 1
    assert checked > 50


@settings(max_examples=200, deadline=None)
@given(st.text() | st.binary().map(lambda raw: raw.decode("utf-8", "surrogateescape")))
def test_random_text_raises_nothing_else(text: str) -> None:
    assert is_refused(text)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(TEXT) - 1), st.text(max_size=3), st.integers(0, 5))
def test_random_edits_raise_nothing_else(at: int, new: str, removed: int) -> None:
    is_refused(TEXT[:at] + new + TEXT[at + removed :])


@pytest.mark.parametrize(
    ("at", "new", "message"),
    [
        (("config", "BM"), [], "$.config.BM: expected an int or a string, got a list"),
        (("config", "BM"), True, "$.config.BM: expected an int or a string, got a bool, True"),
        (("config", "BM"), 2**63, f"$.config.BM: {2**63} is out of range: 64 bits are the limit"),
        (("timing", "median_ms"), 0, "$.timing.median_ms: expected more than 0, got 0"),
        (("timing", "l2"), "hot", "$.timing.l2: expected 'warm' or 'cold', got 'hot'"),
        (("timing", "quantiles_ms"), [1, 2], "$.timing.quantiles_ms: expected a list of 3, got one of 2"),
        (("timing", "quantiles_ms"), [3, 2, 1], "$: timing.quantiles_ms must ascend, got 3, 2, 1"),
        (("runners_up", 0, "tied"), 1, "$.runners_up[0].tied: expected a bool, got an int, 1"),
        (("problem", "m"), 0, "$.problem: m = 0 is out of range: give 1 to 2147483647 (2^31 - 1)"),
        (("problem", "beta"), 2, "$.problem: beta = 2 is unknown"),
        (("search", "outcomes", "melted"), 1, "$.search: unknown outcome 'melted': expected one of measured"),
        (("search", "outcomes", "compile"), -1, "$.search.outcomes.compile: expected at least 0, got -1"),
        (
            ("verification", "error"),
            1,
            "$.verification: error 1 exceeds its bound 1.2e-06: not a verified kernel",
        ),
        (("gflops",), None, "$: a measured record needs timing and gflops"),
        (("vs_cublas",), None, "$: vs_cublas and cublas go together: both or neither"),
        (("evidence",), "estimated", "$: an estimated record holds no timing, sustained, gflops"),
        (("created",), "2026-02-31T12:00:00Z", "$: created is not a time: day is out of range"),
        (("created",), "today", "$.created: expected text that matches"),
        (("family",), "../../x", "$.family: expected text that matches"),
        (("device", "name"), "a\nb", "$.device.name: expected printable characters, got 'a\\nb'"),
        (("schema",), 0, "$.schema: expected 5, got 0"),
        ((), [], "$: expected an object, got a list"),
    ],
)
def test_the_message_leads_to_the_fault(at: tuple[str | int, ...], new: Any, message: str) -> None:
    assert fault(changed(at, new)).startswith(message)


def test_a_newer_schema_is_refused_before_its_keys_are_judged() -> None:
    message = fault('{"schema": 6, "unheard_of": 1}')
    assert message.startswith("schema 6 is newer than 5, the latest this version reads: update")


def test_outcomes_know_every_rejection_kind() -> None:
    counts = dict.fromkeys(OUTCOMES, 1)
    assert set(REJECTION_KINDS) < set(counts)
    search = dataclasses.replace(make_record().search, outcomes=counts)
    assert from_json(to_json(make_record(search=search)), "x").search.outcomes == counts


# --- files ---


def test_path_and_slug() -> None:
    root = Path("/r")
    assert Store(root).path(H200, "sgemm", PROBLEM) == Path(
        "/r/NVIDIA_H200/sgemm_f32_nn_m1024_n1024_k1016_beta0_ffma.json"
    )
    assert Store(root).path(H200, "sgemm", PROBLEM, estimated=True).parent == Path("/r/NVIDIA_H200/estimated")
    for device in known_devices().values():
        for one in (device, dataclasses.replace(device, mig="1g.18gb")):
            assert RecordedDevice.of(one).slug == one.slug


def test_the_cache_folder_is_the_default_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTUNE_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert Store().write(make_record()).is_relative_to(tmp_path / "elsewhere")
    assert Store().find(H200, "sgemm", PROBLEM) is not None


def test_write_then_find(tmp_path: Path) -> None:
    assert Store(tmp_path).find(H200, "sgemm", PROBLEM) is None
    path = Store(tmp_path).write(make_record())
    assert path == Store(tmp_path).path(H200, "sgemm", PROBLEM)
    assert os.listdir(path.parent) == [path.name]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
    assert Store(tmp_path).find(H200, "sgemm", PROBLEM) == records.read(path)
    assert Store(tmp_path).find(H200, "sgemm", Problem(1024, 1024, 1015)) is None
    assert Store(tmp_path).find(H200, "naive", PROBLEM) is None


def test_estimated_and_measured_never_meet(tmp_path: Path) -> None:
    guess = Store(tmp_path).write(estimated())
    assert Store(tmp_path).find(H200, "sgemm", PROBLEM) is None
    assert Store(tmp_path).find(H200, "sgemm", PROBLEM, estimated=True) == estimated()
    path = Store(tmp_path).write(make_record())
    Store(tmp_path).write(estimated())
    assert records.read(path).evidence == "measured"

    path.write_bytes(guess.read_bytes())  # by hand, where a measured one belongs
    with pytest.warns(UserWarning, match="its content belongs in .*estimated"):
        assert Store(tmp_path).find(H200, "sgemm", PROBLEM) is None


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", TEXT[:-5].encode(), b"[" * 50_000])
def test_a_broken_file_is_passed_over_with_one_warning_and_left_alone(content: bytes, tmp_path: Path) -> None:
    path = Store(tmp_path).write(make_record())
    path.write_bytes(content)
    with pytest.warns(UserWarning, match="record ignored") as caught:
        assert Store(tmp_path).find(H200, "sgemm", PROBLEM) is None
    (warning,) = caught
    message = str(warning.message)
    assert message.startswith(f"record ignored: {path}: ")
    assert "\n" not in message
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert path.read_bytes() == content


def test_a_newer_file_is_left_alone(tmp_path: Path) -> None:
    path = Store(tmp_path).write(make_record())
    path.write_text('{"schema": 6}')
    with pytest.raises(RecordError, match="schema 6 is newer"):
        Store(tmp_path).find(H200, "sgemm", PROBLEM)
    assert path.read_text() == '{"schema": 6}'


def test_read_names_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"x\.json cannot be read: No such file"):
        records.read(tmp_path / "x.json")
    with pytest.raises(RecordError, match="cannot be read: Is a directory"):
        records.read(tmp_path)


def test_an_unwritable_folder_is_one_line_with_the_remedy(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    for attempt in (
        lambda: Store(in_the_way).check_writable(),
        lambda: Store(in_the_way / "deeper").check_writable(),
        lambda: Store(in_the_way).write(make_record()),
        lambda: Store(Path("/proc/autotune")).check_writable(),  # refuses even root
    ):
        with pytest.raises(RecordError, match=r"cannot be written .*: set AUTOTUNE_CACHE_DIR") as caught:
            attempt()
        assert "\n" not in str(caught.value)


def test_check_writable_leaves_nothing_behind(tmp_path: Path) -> None:
    Store(tmp_path / "new" / "cache").check_writable()
    assert list((tmp_path / "new" / "cache").iterdir()) == []


def test_a_failed_replacement_leaves_no_temporary_file(tmp_path: Path) -> None:
    path = Store(tmp_path).path(H200, "sgemm", PROBLEM)
    path.mkdir(parents=True)
    with pytest.raises(RecordError, match="cannot be written"):
        Store(tmp_path).write(make_record())
    assert os.listdir(path.parent) == [path.name]


def _write_many(root: Path, gflops: float) -> None:
    for _ in range(40):
        Store(root).write(timed(1 / gflops))


def test_concurrent_writers_never_show_a_torn_file(tmp_path: Path) -> None:
    path = Store(tmp_path).write(timed(1.0))
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_many, args=(tmp_path, float(i + 1))) for i in range(3)]
    for writer in writers:
        writer.start()
    seen = {records.read(path).timing}
    while any(writer.is_alive() for writer in writers):
        seen.add(records.read(path).timing)
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert seen <= {timed(1 / each).timing for each in (1.0, 2.0, 3.0)}
    assert os.listdir(path.parent) == [path.name]


# --- the better of two ---


def test_an_offer_to_an_empty_folder_is_stored(tmp_path: Path) -> None:
    record = from_json(TEXT, "x")
    assert Store(tmp_path).offer(record) == record
    assert Store(tmp_path).find(H200, "sgemm", PROBLEM) == record


def test_what_was_stored_meanwhile_stays_if_it_is_better(tmp_path: Path) -> None:
    fast, slow = timed(1.0), timed(2.0)
    Store(tmp_path).write(fast)
    assert Store(tmp_path).offer(slow) == fast
    assert Store(tmp_path).find(H200, "sgemm", PROBLEM) == fast
    Store(tmp_path).write(slow)
    assert Store(tmp_path).offer(fast) == fast
    assert Store(tmp_path).find(H200, "sgemm", PROBLEM) == fast


def test_what_the_caller_measured_again_is_replaced_whatever_it_said(tmp_path: Path) -> None:
    fast, slow = timed(1.0), timed(2.0)
    Store(tmp_path).write(fast)
    assert Store(tmp_path).offer(slow, over=fast) == slow
    assert Store(tmp_path).find(H200, "sgemm", PROBLEM) == slow


@pytest.mark.parametrize(
    "changes",
    [
        {"template_digest": "d" * 64},  # of other code
        {"device": dataclasses.replace(RecordedDevice.of(H200), sm_count=114)},
    ],
)
def test_a_stored_record_that_is_not_comparable_is_replaced(tmp_path: Path, changes: dict[str, Any]) -> None:
    Store(tmp_path).write(timed(1.0, **changes))
    slow = timed(2.0)
    assert Store(tmp_path).offer(slow) == slow


def test_cold_and_warm_times_are_not_compared(tmp_path: Path) -> None:
    Store(tmp_path).write(timed(1.0, timing={"l2": "cold"}))
    assert Store(tmp_path).offer(timed(2.0)) == timed(2.0)


def test_an_offered_record_of_older_templates_does_not_replace_a_current_one(tmp_path: Path) -> None:
    current, older = timed(2.0), timed(1.0, template_digest="d" * 64)
    Store(tmp_path).write(current)
    assert Store(tmp_path).offer(older, stale=lambda each: each == older) == current
    assert Store(tmp_path).offer(older) == older  # as far as it says, its templates are today's


def test_an_offer_replaces_what_is_broken_and_keeps_it_aside(tmp_path: Path) -> None:
    path = Store(tmp_path).write(timed(1.0))
    path.write_text("{")
    assert Store(tmp_path).offer(timed(2.0)) == timed(2.0)
    assert path.with_name(f"{path.name}.bad").read_text() == "{"


def test_an_offer_leaves_a_newer_file_alone(tmp_path: Path) -> None:
    path = Store(tmp_path).write(timed(1.0))
    path.write_text('{"schema": 999}')
    with pytest.raises(RecordError, match="schema 999 is newer"):
        Store(tmp_path).offer(timed(0.5))
    assert path.read_text() == '{"schema": 999}'


def _offer_many(root: Path, times: list[float]) -> None:
    for median_ms in times:
        Store(root).offer(timed(median_ms))


def test_processes_and_threads_that_offer_at_once_leave_the_best(tmp_path: Path) -> None:
    times = [1 + (37 * number % 101) / 100 for number in range(101)]
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_offer_many, args=(tmp_path, times[n::5])) for n in range(4)]
    for process in processes:
        process.start()
    threads = [threading.Thread(target=_offer_many, args=(tmp_path, times[4::5][n::4])) for n in range(4)]
    for thread in threads:
        thread.start()
    path = Store(tmp_path).path(H200, "sgemm", PROBLEM)
    last = float("inf")
    while any(process.is_alive() for process in processes):
        if path.exists():
            seen = records.read(path).timing
            assert seen is not None
            assert seen.median_ms <= last  # never a worse one than before
            last = seen.median_ms
    for worker in (*processes, *threads):
        worker.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert records.read(path) == timed(min(times))
    assert os.listdir(path.parent) == [path.name]


def test_files_are_listed_by_their_names(tmp_path: Path) -> None:
    path = Store(tmp_path).write(make_record())
    Store(tmp_path).write(timed(2.0, family="my_own_9", problem=Problem(7, 8, 9, "tt", 1)))
    for name in (
        "x.json",
        "sgemm_f32_nn_m0_n1_k1_beta0_ffma.json",
        "sgemm_f32_nn_m1_n1_k1_beta0_ffma.json.bad",
    ):
        path.with_name(name).write_text("")
    found = {(file.family, file.problem) for file in records.filed(path.parent)}
    assert found == {("sgemm", PROBLEM), ("my_own_9", Problem(7, 8, 9, "tt", 1))}
    assert records.filed(tmp_path / "nowhere") == []


def test_set_aside(tmp_path: Path) -> None:
    path = Store(tmp_path).write(make_record())
    assert Store(tmp_path).set_aside(path) == path.with_name(f"{path.name}.bad")
    assert not path.exists()
    with pytest.raises(RecordError, match="cannot be written"):
        Store(tmp_path).set_aside(path)


# --- the match rule ---


def rendered(code: str, launch: records.Launch) -> Source:
    return Source("sgemm", Config({}), PROBLEM, "", "sgemm", launch, code, "t" * 64, "s" * 64)


def test_serves() -> None:
    record = make_record()
    launch = records.Launch.of("sgemm", record.launch.grid, record.launch.block, record.launch.shared_bytes)
    same = rendered(record.code_digest, launch)
    assert records.serves(record, H200, PROBLEM, same) is None
    other_limits = dataclasses.replace(H200, l2_bytes=1, shared_per_block=1)
    assert records.serves(record, other_limits, PROBLEM, same) is None
    renamed = dataclasses.replace(H200, name="NVIDIA H200 NVL")
    other_code = rendered("d" * 64, launch)
    other_launch = rendered(
        record.code_digest, records.Launch.of("sgemm", (1, 1, 1), launch.block, launch.shared_bytes)
    )
    for device, problem, source, why in (
        (H200, Problem(1024, 1024, 1016, beta=1), same, "the record is for beta 0, not 1"),
        (H200, Problem(1024, 512, 1016), same, "the record is for n 1024, not 512"),
        (H200, Problem(1024, 1024, 1016, "tn"), same, "the record is for layout nn, not tn"),
        (renamed, PROBLEM, same, "the record is for NVIDIA H200, not NVIDIA H200 NVL"),
        (
            dataclasses.replace(H200, compute_capability="8.0"),
            PROBLEM,
            same,
            "the record is for compute capability 9.0, not 8.0",
        ),
        (dataclasses.replace(H200, sm_count=114), PROBLEM, same, "the record is for 132 SMs, not 114"),
        (
            dataclasses.replace(H200, mig="1g.18gb"),
            PROBLEM,
            same,
            "the record is for a whole GPU, not 1g.18gb",
        ),
        (H200, PROBLEM, other_code, "the record is stale: its config rendered to code aaaaaaaaaaaa then"),
        (H200, PROBLEM, other_launch, "the record is stale: its kernel was launched as"),
    ):
        found = records.serves(record, device, problem, source)
        assert found is not None
        assert found.startswith(why)


def test_differences() -> None:
    record = make_record()
    same: dict[str, str | None] = {"nvrtc": "13.5", "driver": "580.65.06"}
    assert records.differences(record, nvrtc="13.5", driver="580.65.06") == []
    assert records.differences(record, nvrtc=None, driver=None) == []
    assert records.differences(estimated(), nvrtc="13.5", driver="580.65.06") == []
    assert records.differences(record, nvrtc="13.0", driver=same["driver"]) == ["NVRTC 13.5 then, 13.0 now"]
    assert records.differences(record, nvrtc="13.5.37", driver=same["driver"]) == []
    built = dataclasses.replace(record, toolchain=dataclasses.replace(record.toolchain, nvrtc="13.5.37"))
    assert records.differences(built, nvrtc="13.5.37", driver=same["driver"]) == []
    assert records.differences(built, nvrtc="13.5.40", driver=None) == ["NVRTC 13.5.37 then, 13.5.40 now"]
    assert len(records.differences(record, nvrtc="1", driver="2")) == 2


def test_now_is_a_valid_time() -> None:
    assert from_json(to_json(make_record(created=records.now())), "x").created.endswith("Z")


def test_import_stays_light() -> None:
    heavy = "numpy optuna cupy jinja2 rich click platformdirs"
    code = "import sys, autotune.records, autotune.records.trials;"
    code += f"print(*(set('{heavy}'.split()) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def older(schema: int) -> dict[str, Any]:
    """The record as an earlier version wrote it."""
    old = json.loads(TEXT)
    old["schema"] = schema
    del old["sustained"]
    if schema == 4:
        return old
    kernel = old["launch"].pop("kernels")[0]
    old["launch"] |= {name: kernel[name] for name in ("grid", "block", "shared_bytes")}
    if schema == 3:
        return old
    old["timing"]["quantiles"] = old["timing"].pop("quantiles_ms")
    old["timing"]["clocks"] = {"sm_mhz": [1980, 1975], "others": 2}
    old["resources"]["shared_bytes"] = old["resources"].pop("static_shared_bytes")
    del old["search"]["stages_s"]
    old["search"]["stages"] = {"first": 1.5, "search": 60.0}
    winner = {
        "config": dict(old["config"]),
        "median_ms": 2.31412,
        "quantiles": [2.31, 2.314, 2.32],
        "tied": False,
    }
    listed = old.pop("runners_up")
    for each in listed:
        del each["code_digest"]
        each["quantiles"] = each.pop("quantiles_ms")
    old["finalists"] = [winner, *listed]
    for key in ("gpu_uuid", "machine_code_digest", "imported"):
        del old[key]
    if schema == 1:
        parts = {"launch": ["workspace_bytes"], "cublas": ["version"], "search": ["resumed", "stages"]}
        for part, keys in parts.items():
            for key in keys:
                del old[part][key]
    return old


SILENT = dataclasses.replace(from_json(TEXT, "x"), sustained=None)


def test_a_record_of_schema_4_is_migrated() -> None:
    old = json.dumps(older(4))
    assert from_json(old, "x") == SILENT
    assert "sustained" not in to_json(SILENT)


def test_a_record_of_schema_3_is_migrated() -> None:
    old = older(3)
    assert from_json(json.dumps(old), "x") == SILENT
    old["launch"]["workspace_bytes"] = 64
    launch = from_json(json.dumps(old), "x").launch
    assert (launch.kernels[0].entry, launch.kernels[0].arguments[-1]) == ("sgemm", "workspace")
    assert launch == records.Launch.of("sgemm", (512, 1, 1), (256, 1, 1), 49152, 64)


def test_a_record_of_schema_2_is_migrated() -> None:
    record = from_json(json.dumps(older(2)), "x")
    assert (record.schema, record.gpu_uuid, record.machine_code_digest, record.imported) == (
        5,
        None,
        None,
        None,
    )
    assert record.timing is not None
    assert record.timing.quantiles_ms == from_json(TEXT, "x").timing.quantiles_ms  # type: ignore[union-attr]
    assert record.timing.clocks == {"sm_mhz": (1980, 1975), "other_processes": 2}
    assert record.resources.static_shared_bytes == 1024
    assert record.search.stages_s == {"first_outcome": 1.5, "search": 60.0}
    (other,) = record.runners_up
    assert (other.config["BK"], other.code_digest, other.tied) == (8, None, True)
    assert from_json(to_json(record), "x") == record


def test_what_migration_cannot_read_is_one_line_too() -> None:
    for at in places(older(2)):
        for wrong in (None, [], {}, [[]], "x", 3):
            value = older(2)
            inner: Any = value
            for key in at[:-1]:
                inner = inner[key]
            if at:
                inner[at[-1]] = wrong
            is_refused(json.dumps(value))
    for missing in older(2):
        assert is_refused(json.dumps({key: item for key, item in older(2).items() if key != missing})), (
            missing
        )
    value = older(2)
    value["finalists"][0]["config"]["BM"] = 64
    assert fault(json.dumps(value)) == "$.finalists[0].config is not the record's config"


def test_a_record_of_schema_1_is_migrated() -> None:
    old = older(1)
    record = from_json(json.dumps(old), "x")
    assert (record.schema, record.launch.workspace_bytes, record.search.stages_s) == (5, 0, {})
    assert record.cublas is not None
    assert record.cublas.version is None
    old["launch"] = 3
    assert fault(json.dumps(old)).startswith("$.launch: expected an object, got an int, 3")


@pytest.mark.parametrize(
    ("at", "new", "message"),
    [
        (("timing", "median_ms"), 1e-9, "$: timing.median_ms 1e-09 is not between its quantiles"),
        (("timing", "median_ms"), 3.0, "$: timing.median_ms 3 is not between its quantiles"),
        (("gflops",), 930.0, "$: gflops 930 is not 2mnk / median_ms, which is 920.7"),
        (("sustained", "mean_ms"), 1e-9, "$: median_ms 1e-09 is impossible"),
        (("sustained", "power_by"), None, "$.sustained: joules and power_by go together"),
        (("vs_cublas",), 2.0, "$: vs_cublas 2 is not cuBLAS / ours, 1.0123"),
        (
            ("runners_up", 0, "median_ms"),
            1e-9,
            "$.runners_up[0]: median_ms 1e-09 is not between its quantiles",
        ),
        (("runners_up", 0, "config"), CONFIG, "$: the record's own config is among its runners_up"),
        (("imported",), "2026-02-31T12:00:00Z", "$: imported is not a time"),
    ],
)
def test_what_can_be_computed_again_must_agree(at: tuple[str | int, ...], new: Any, message: str) -> None:
    assert fault(changed(at, new)).startswith(message)


@pytest.mark.parametrize(
    ("problem", "ms"),
    [
        (PROBLEM, 0.03),  # 71 TFLOP/s where 67 are the peak
        (Problem(1024, 1024, 1016, math="3xtf32"), 0.011),  # 194 where 178 are
        (Problem(1, 1, 1), 1e-4),  # shorter than any launch
    ],
)
def test_a_time_that_the_gpu_cannot_reach_is_refused(problem: Problem, ms: float) -> None:
    with pytest.raises(RecordError, match="is impossible: NVIDIA H200 takes"):
        timed(ms, problem=problem)
    assert timed(10 * ms, problem=problem).timing is not None


def test_a_clock_beyond_the_tables_counts_if_the_gpu_had_it() -> None:
    fast = {"clocks": {"sm_mhz_max": 2400}}
    assert timed(0.03, timing=fast).timing is not None
    with pytest.raises(RecordError, match="is impossible"):
        timed(0.001, timing={"clocks": {"sm_mhz_max": 10**9}})
    other = dataclasses.replace(RecordedDevice.of(H200), name="NVIDIA Unheard Of")
    assert timed(0.02, device=other).timing is not None
    with pytest.raises(RecordError, match="is impossible"):
        timed(0.01, device=other)
