"""Files of measured configs: ours, T4 results, Kernel Tuner's, and from one to another."""

from __future__ import annotations

import gzip
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.errors import REJECTION_KINDS, Rejected, UsageError
from autotune.records.archive import write_archive
from autotune.records.schema import RecordedDevice
from autotune.records.trials import TrialHeader, TrialLog
from autotune.sweep import FORMS, About, Point, Sweep, form_of, left_out, read_sweep, write_sweep
from autotune.sweep.sweep import make_sweep
from autotune.values.device import named_device
from autotune.values.problem import Problem

DATA = Path(__file__).parent / "data"
HEADER = TrialHeader(
    family="sgemm",
    problem=Problem(1000, 200, 30, layout="tn"),
    device=RecordedDevice.of(named_device("h200")),
    space_digest="c" * 64,
    template_digest="b" * 64,
    nvrtc="13.0",
)
ENDINGS = {"csv": ".csv", "trials": ".trials.jsonl", "t4": ".json", "kernel-tuner": ".json.gz"}
CACHE: dict[str, Any] = {
    "device_name": "NVIDIA RTX A4000",
    "kernel_name": "vector_add",
    "problem_size": [4096, 2048],
    "tune_params_keys": ["block_size_x", "method"],
    "tune_params": {"block_size_x": [128, 256], "method": ["plain", "wide"]},
    "objective": "time",
    "cache": {
        "128,plain": {
            "block_size_x": 128,
            "method": "plain",
            "time": 0.5,
            "times": [0.6, 0.5, 0.4],
            "compile_time": 440.5,
            "verification_time": 10,
            "benchmark_time": 1.5,
            "GB/s": 17.0,
        },
        "256,plain": {
            "block_size_x": 256,
            "method": "plain",
            "time": "CompilationFailedConfig",
            "compile_time": 400,
        },
        "256,wide": {"block_size_x": 256, "method": "wide", "__error__": "RuntimeFailedConfig"},
    },
}
T4: dict[str, Any] = {
    "schema_version": "1.0.0",
    "metadata": {"timeunit": "seconds"},
    "results": [
        {
            "timestamp": "2023-12-22 09:54:05.502007+00:00",
            "configuration": {"BM": 64, "loader": "tma"},
            "times": {"compilation": 918.5, "framework": 1, "validation": 2, "runtimes": [3.0, 5.0, 4.0]},
            "invalidity": "correct",
            "correctness": 1,
            "measurements": [{"name": "time", "value": 0.004, "unit": ""}],
            "objectives": ["time"],
        },
        {
            "configuration": {"BM": 32, "loader": "reg"},
            "times": {"compilation_time": 10.0},
            "invalidity": "timeout",
            "correctness": 0,
        },
    ],
}


def written(path: Path, content: Any) -> Path:
    text = content if isinstance(content, str) else json.dumps(content)
    path.write_text(text)
    return path


def test_our_sweep_of_an_h200() -> None:
    sweep = read_sweep(DATA / "h200_sgemm_4096_sweep.csv.gz")
    assert (len(sweep), len(sweep.legal.names), sweep.best_ms) == (3057, 13, 2.59821)
    assert sweep.compile_s is None
    assert sweep.gpu_s is None
    assert sweep.name == "h200_sgemm_4096_sweep"
    assert sweep.legal.choices["BM"] == (64, 128, 256)


def test_clblasts_gemm_on_an_rtx_3090() -> None:
    """Times of AutoTuningAssociation/benchmark_hub (MIT licence), 4096 cubed, means of 32 launches."""
    sweep = read_sweep(DATA / "rtx3090_clblast_gemm_4096_sweep.csv.gz")
    assert (len(sweep), len(sweep.legal.names)) == (17956, 10)
    assert sweep.compile_s is not None
    assert sweep.compile_s.mean() == pytest.approx(0.085, abs=0.01)


def test_columns_of_a_table(tmp_path: Path) -> None:
    text = (
        "LM,LN,BM,loader,threads,status,median_ms,compile_s,why\n"
        "1,32,64,reg,128,ok,1.5,0.25,\n"
        "2,16,64,cp_async,128,compile,,0.75,no such instruction\n"
        "2,16,128,reg,256,ok,2.5,,\n"
    )
    sweep = read_sweep(written(tmp_path / "x.csv", text))
    assert sweep.legal.names == ("LM", "BM", "loader")  # LN follows from LM; threads are known to be none
    assert sweep.legal.choices["loader"] == ("cp_async", "reg")
    assert sweep.points[1].outcome == Rejected("compile", "no such instruction")
    assert sweep.time_ms.tolist()[::2] == [1.5, 2.5]
    assert math.isnan(sweep.time_ms[1])
    assert sweep.compile_s is not None
    assert sweep.compile_s.tolist() == [0.25, 0.75, 0.5]  # an unknown one counts as the median
    assert dict(sweep.legal.config(1)) == {"LM": 2, "BM": 64, "loader": "cp_async"}


def test_a_cache_of_kernel_tuner(tmp_path: Path) -> None:
    sweep = read_sweep(written(tmp_path / "x.json", CACHE))
    assert [point.outcome for point in sweep.points] == [
        0.5,
        Rejected("compile", "CompilationFailedConfig"),
        Rejected("crash", "RuntimeFailedConfig"),
    ]
    first = sweep.points[0]
    assert (first.compile_s, first.gpu_s) == (0.4405, 0.0115)
    assert first.extra == {"times": [0.6, 0.5, 0.4], "GB/s": 17.0}
    assert sweep.about == About("vector_add", "NVIDIA RTX A4000", (4096, 2048), None, "mean")


@pytest.mark.parametrize("indent", [None, "", 4])
def test_a_cache_that_was_not_closed(tmp_path: Path, indent: str | int | None) -> None:
    closed = json.dumps(CACHE, indent=indent)
    body = closed.rstrip("} \n") + "}"
    for open_end in (body, body + ",", body + ",\n"):
        assert len(read_sweep(written(tmp_path / "x.json", open_end))) == 3


def test_a_cache_torn_within_its_last_config(tmp_path: Path) -> None:
    write_sweep(read_sweep(written(tmp_path / "x.json", CACHE)), tmp_path / "y.json", "kernel-tuner")
    text = (tmp_path / "y.json").read_text()
    last = text.rindex('"256,wide"')
    for end in (last + 3, last + 20, len(text) - 8):
        assert len(read_sweep(written(tmp_path / "z.json", text[:end]))) == 2


def test_a_cache_on_one_line_torn_within_its_last_config(tmp_path: Path) -> None:
    text = json.dumps(CACHE)
    last = text.rindex('"256,wide"')
    for end in (last - 1, last + 3, last + 20, text.rindex("}}}") - 2):
        assert len(read_sweep(written(tmp_path / "x.json", text[:end]))) == 2


def test_t4_results(tmp_path: Path) -> None:
    sweep = read_sweep(written(tmp_path / "x.json", T4))
    assert [point.outcome for point in sweep.points] == [4.0, Rejected("timeout", "")]
    assert [point.compile_s for point in sweep.points] == [0.9185, 0.01]
    assert sweep.points[0].gpu_s == 0.014  # the runs, and the validation
    without = json.loads(json.dumps(T4))
    del without["results"][0]["measurements"]
    without["metadata"]["timeunit"] = "miliseconds"  # as published
    assert read_sweep(written(tmp_path / "y.json", without)).best_ms == 4.0


def test_a_log_of_trials(tmp_path: Path) -> None:
    path = tmp_path / "sgemm_x.trials.jsonl"
    config = {"BM": 64, "loader": "reg"}
    with TrialLog(path, HEADER) as log:
        log.event("begin", strategy="gp")
        log.append({"config": config, "outcome": "measured", "median_ms": 2.0, "gpu_s": 0.1})
        log.append({"config": {**config, "BM": 32}, "outcome": "crash", "why": "it is gone"})
        log.append({"config": config, "outcome": "measured", "median_ms": 1.5, "compile_s": 0.3})
        log.append({"config": {**config, "BM": 16}, "outcome": "estimated", "estimate": 0.5})
    sweep = read_sweep(path)
    assert [point.outcome for point in sweep.points] == [1.5, Rejected("crash", "it is gone")]
    assert sweep.points[0].compile_s == 0.3
    assert sweep.about.header == HEADER
    assert sweep.about.header.problem == HEADER.problem


def sweeps() -> st.SearchStrategy[Sweep]:
    config = st.fixed_dictionaries(
        {
            "BM": st.sampled_from([16, 32, 96]),
            "loader": st.sampled_from(["reg", "tma"]),
            "pad": st.sampled_from([0, 4]),
        }
    )
    time = st.floats(1e-3, 1e3).map(lambda value: float(f"{value:.6g}"))
    why = st.text("abc, \"'{}[]:\\", max_size=12)
    outcome = time | st.builds(Rejected, st.sampled_from(REJECTION_KINDS), why)
    seconds = st.none() | st.integers(1, 10_000).map(lambda ms: ms / 1e3)
    extra = st.fixed_dictionaries({}, optional={"registers": st.integers(1, 255), "error": time})
    point = st.builds(Point, config, outcome, seconds, seconds, extra)
    return (
        st.lists(point, min_size=1, max_size=8, unique_by=lambda p: tuple(sorted(map(str, p.config.items()))))
        .filter(lambda points: any(isinstance(p.outcome, float) for p in points))
        .map(
            lambda points: make_sweep(
                Path("s.csv"), ["BM", "loader", "pad"], points, About("sgemm", "NVIDIA H200", None, HEADER)
            )
        )
    )


@settings(max_examples=25, deadline=None)
@given(sweep=sweeps(), way=st.lists(st.sampled_from(list(FORMS)), min_size=1, max_size=3))
def test_what_all_forms_hold_survives_any_way_through_them(
    tmp_path_factory: pytest.TempPathFactory, sweep: Sweep, way: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("way")
    there = sweep
    for number, form in enumerate(way):
        if form == "trials" and there.about.header is None:
            continue  # a table does not say what its configs are of
        path = folder / f"s{number}{ENDINGS[form]}"
        write_sweep(there, path, form)
        there = read_sweep(path)
    varying = [name for name in sweep.legal.names if name in there.legal.names]
    assert len(there) == len(sweep)
    for before, after in zip(sweep.points, there.points, strict=True):
        assert all(after.config[name] == before.config[name] for name in varying)
        if isinstance(before.outcome, Rejected):
            assert isinstance(after.outcome, Rejected)
            assert after.outcome.kind == before.outcome.kind
            assert after.outcome.why.split() == before.outcome.why.split()
        else:
            assert after.outcome == before.outcome
        assert after.extra.get("registers") == before.extra.get("registers")
        for name in ("compile_s", "gpu_s"):
            was, became = getattr(before, name), getattr(after, name)
            assert became == pytest.approx(was) or (was is None and not became)
    if "csv" not in way:
        assert there.about.header == HEADER


INVALIDITIES = {"timeout", "compile", "runtime", "correctness", "constraints", "correct"}


def test_t4_results_have_what_the_published_schema_asks_for(tmp_path: Path) -> None:
    """The schema of odgaard/TuningSchema, T4 1.0.0: required fields, types and words."""
    points = [
        Point({"BM": 16}, 1.25, 0.3, 0.1, {"registers": 64, "noisy": True, "at": "2026-01-31T12:00:00Z"})
    ]
    points += [Point({"BM": 17 + i}, Rejected(kind, "why")) for i, kind in enumerate(REJECTION_KINDS)]
    sweep = make_sweep(tmp_path / "x", ["BM"], points, About("sgemm", "NVIDIA H200", None, HEADER))
    write_sweep(sweep, tmp_path / "x.json", "t4")
    content = json.loads((tmp_path / "x.json").read_text())
    assert re.fullmatch(r"\d+\.\d+\.\d+", content["schema_version"])
    assert len(content["results"]) == 1 + len(REJECTION_KINDS)
    for result in content["results"]:
        assert {"configuration", "times", "invalidity", "correctness"} <= result.keys()
        assert isinstance(result["configuration"], dict)
        assert isinstance(result["objectives"], list)
        assert result["invalidity"] in INVALIDITIES
        assert isinstance(result["correctness"], int | float)
        assert isinstance(result.get("timestamp", ""), str)
        times = result["times"]
        for name in ("compilation_time", "framework", "search_algorithm", "validation"):
            assert isinstance(times[name], int | float)
        assert isinstance(times["runtimes"], list)
        for each in result["measurements"]:
            assert each.keys() == {"name", "value", "unit"}
            assert not isinstance(each["value"], bool)
            assert isinstance(each["value"], int | float | str | list)
    assert content["results"][0]["invalidity"] == "correct"
    # Kernel Tuner writes, and autotuning_methodology reads, names that the schema does not have.
    assert {"compilation", "benchmark"} <= content["results"][0]["times"].keys()


def test_a_cache_has_what_kernel_tuner_asks_for(tmp_path: Path) -> None:
    """As `util.read_cache`, `process_cache` and `get_t4_results` of Kernel Tuner 1.5 use it."""
    points = [
        Point({"BM": 16, "loader": "tma"}, 1.25, 0.3),
        Point({"BM": 32, "loader": "reg"}, Rejected("timeout", "no end")),
    ]
    sweep = make_sweep(tmp_path / "x", ["BM", "loader"], points, About("sgemm", "NVIDIA H200", None, HEADER))
    write_sweep(sweep, tmp_path / "x.json", "kernel-tuner")
    text = (tmp_path / "x.json").read_text()
    assert text.endswith("}\n}")  # how it tells a closed cache from one to go on with
    content = json.loads(text)
    assert content["problem_size"] == [1000, 200, 30]
    assert content["tune_params_keys"] == list(content["tune_params"]) == ["BM", "loader"]
    assert list(content["cache"]) == ["16,tma", "32,reg"]
    for entry in content["cache"].values():
        stages = ("compile_time", "verification_time", "benchmark_time", "strategy_time", "framework_time")
        assert all(isinstance(entry[stage], int | float) for stage in stages)
    measured, failed = content["cache"].values()
    assert (measured["time"], measured["compile_time"]) == (1.25, 300)
    assert failed["__error__"] == failed["time"] == "RuntimeFailedConfig"
    assert failed["rejection"] == "timeout"


def cut(content: dict[str, Any], *path: str | int, value: Any = None) -> dict[str, Any]:
    """Copy JSON content with one value replaced, or left out."""
    copy: Any = json.loads(json.dumps(content))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    if value is None:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return dict(copy)


HUGE = 10**400  # no float holds it

BAD: list[tuple[str, Any, str]] = [
    ("empty.csv", "", "the file is empty: give a line with the names of the columns"),
    ("head.csv", "BM,median_ms\n", "there is no config in it"),
    ("notime.csv", "BM,BN\n1,2\n", "no column median_ms or mean_ms among BM, BN: add the time"),
    ("twice.csv", "BM,BM,median_ms\n1,2,3\n", "does not name each column once"),
    ("short.csv", "BM,BN,median_ms\n1,2,3\n1,2\n", "line 3 has 2 values for 3 columns"),
    ("word.csv", "BM,median_ms\n1,fast\n", "line 2, column median_ms is 'fast', not a time"),
    ("nan.csv", "BM,median_ms\n1,nan\n", "line 2, column median_ms is 'nan', not a time"),
    ("zero.csv", "BM,median_ms\n1,0\n", "line 2, column median_ms is 0, not a time"),
    ("gap.csv", "BM,BN,median_ms\n1,,3\n2,2,4\n", "line 2 has no BN"),
    ("state.csv", "BM,status,median_ms\n1,lost,3\n", "line 2 has the status 'lost': give measured or ok"),
    ("none.csv", "registers,median_ms\n1,3\n", "no column is a parameter"),
    ("failed.csv", "BM,outcome,median_ms\n1,crash,\n", "not one of its 1 configs has a time"),
    ("no.json", "no", "not JSON"),
    ("empty.json", "", "not JSON"),
    ("list.json", "[]", "neither a cache file of Kernel Tuner (no field cache) nor T4 results"),
    ("keys.json", cut(CACHE, "tune_params_keys"), "tune_params_keys is None"),
    ("cache.json", cut(CACHE, "cache", value=[1]), "cache is [1]: give an object"),
    (
        "param.json",
        cut(CACHE, "cache", "256,wide", "method"),
        "cache entry '256,wide' has method = None: give a number or a word",
    ),
    ("objective.json", cut(CACHE, "cache", "128,plain", "time"), "cache entry '128,plain' has no time"),
    ("negative.json", cut(CACHE, "cache", "128,plain", "time", value=-1), "'128,plain' is -1, not a time"),
    ("results.json", cut(T4, "results", value={"a": 1}), "results is {'a': 1}: give a list"),
    (
        "config.json",
        cut(T4, "results", 1, "configuration"),
        "result 2, configuration is None: give an object with the value of every parameter",
    ),
    (
        "loader.json",
        cut(T4, "results", 1, "configuration", "loader"),
        "result 2, configuration has loader = None",
    ),
    (
        "word.json",
        cut(T4, "results", 0, "invalidity", value="fine"),
        "result 1: invalidity is 'fine': give one of",
    ),
    ("times.json", cut(T4, "results", 0, "times"), "result 1: times is None"),
    ("unit.json", cut(T4, "metadata", "timeunit", value="hours"), "the unit of time is 'hours'"),
    ("x.trials.jsonl", "", "line 1: not JSON"),
    ("x.txt", "BM", "its ending says no form"),
    (
        "mac.csv",
        "BM,median_ms\r1,2\r",
        "line 1 is not CSV (new-line character seen in unquoted field): end lines",
    ),
    ("long.csv", f"BM,median_ms\n{'x' * 131_073},1\n", "give at most 131,072 characters as a value"),
    (
        "ids.csv",
        "id,median_ms\n" + "".join(f"{i},{1 + i % 97}\n" for i in range(32_769)),
        "parameter 'id' has 32,769 different values, at most 32,768 can be searched",
    ),
    ("vast.csv", f"BM,median_ms\n{HUGE},1\n", "parameter 'BM' has a value that is no number between"),
    ("vasttime.csv", f"BM,median_ms\n1,{HUGE}\n", "line 2, column median_ms is an integer beyond 1.8e308"),
    ("vasts.csv", f"BM,median_ms,gpu_s\n1,1,{HUGE}\n", "line 2, column gpu_s is an integer beyond 1.8e308"),
    ("deep.json", "[" * 100_000, "its lists or objects nest too deeply"),
    ("torn.json", json.dumps(T4)[:-40], "not JSON"),
    (
        "vastparam.json",
        cut(CACHE, "cache", "128,plain", "block_size_x", value=HUGE),
        "parameter 'block_size_x' has a value that is no number between",
    ),
    (
        "nan.json",
        cut(CACHE, "cache", "128,plain", "block_size_x", value=math.nan),
        "parameter 'block_size_x' has a value that is no number between",
    ),
    (
        "vasttime.json",
        cut(CACHE, "cache", "128,plain", "time", value=HUGE),
        "time of cache entry '128,plain' is an integer beyond 1.8e308",
    ),
    (
        "vastcompile.json",
        cut(CACHE, "cache", "128,plain", "compile_time", value=HUGE),
        "compile_time of cache entry '128,plain' is an integer beyond 1.8e308",
    ),
    (
        "twice.json",
        cut(CACHE, "tune_params_keys", value=["method", "method"]),
        "'method' is the name of two parameters: rename",
    ),
    (
        "ours.json",
        {"tune_params_keys": ["median_ms"], "cache": {"1": {"median_ms": 1, "time": 1.0}}},
        "'median_ms' is the name of a result: rename",
    ),
    (
        "theirs.json",
        {"tune_params_keys": ["time"], "cache": {"1": {"time": 1.0}}},
        "tune_params_keys names time, which is a result: rename",
    ),
    (
        "kinds.json",
        cut(T4, "results", 0, "invalidity", value=["x"]),
        "result 1: invalidity is ['x']: give one of",
    ),
    ("five.json", cut(T4, "results", 0, "measurements", value=5), "result 1: measurements is 5: give a list"),
    (
        "vastt4.json",
        cut(T4, "results", 0, "measurements", value=[{"name": "time", "value": HUGE}]),
        "result 1, measurement time is an integer beyond 1.8e308",
    ),
    (
        "vastruns.json",
        cut(T4, "results", 0, "times", "runtimes", value=[HUGE, 1]),
        "result 1, runtimes is an integer beyond 1.8e308",
    ),
]


@pytest.mark.parametrize(("name", "content", "message"), BAD, ids=[name for name, _, _ in BAD])
def test_a_broken_file_gives_one_line(tmp_path: Path, name: str, content: Any, message: str) -> None:
    path = written(tmp_path / name, content)
    with pytest.raises(UsageError, match=re.escape(message)) as failure:
        read_sweep(path)
    assert str(path) in str(failure.value)
    assert "\n" not in str(failure.value)
    assert failure.value.exit_code == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"outcome": "measured", "median_ms": 1.0}, "config of trial 1 is None: give an object"),
        ({"config": {}, "outcome": "measured", "median_ms": 1.0}, "its configs have no parameter"),
        ({"config": {"BM": 1}, "outcome": "measured"}, "median_ms of trial 1 is None, not a time"),
        ({"config": {"BM": 1}, "outcome": "won"}, "trial 1 has outcome 'won'"),
        ({"config": {"BM": 1}, "outcome": "estimated", "estimate": 1.0}, "there is no config in it"),
    ],
)
def test_a_log_with_a_strange_trial(tmp_path: Path, line: dict[str, Any], message: str) -> None:
    path = tmp_path / "x.trials.jsonl"
    with TrialLog(path, HEADER) as log:
        log.append(line)
    with pytest.raises(UsageError, match=re.escape(message)):
        read_sweep(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    whole = gzip.compress(b"BM,median_ms\n1,2\n")
    for content, why in ((whole[:-9], "not a whole gzip file"), (b"BM,median_ms", "not a whole gzip file")):
        (tmp_path / "x.csv.gz").write_bytes(content)
        with pytest.raises(UsageError, match=why):
            read_sweep(tmp_path / "x.csv.gz")
    (tmp_path / "x.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="not UTF-8 text"):
        read_sweep(tmp_path / "x.csv")
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_sweep(tmp_path / "none.csv")


def test_the_form_of_a_file_to_be_written(tmp_path: Path) -> None:
    assert [form_of(Path(name)) for name in ("a.csv", "a.csv.gz", "a.trials.jsonl")] == [
        "csv",
        "csv",
        "trials",
    ]
    with pytest.raises(UsageError, match="does not tell the form: say --to"):
        form_of(Path("a.json"))
    sweep = read_sweep(written(tmp_path / "x.json", CACHE))
    with pytest.raises(UsageError, match="a log says of which space, template and device"):
        write_sweep(sweep, tmp_path / "y.trials.jsonl", "trials")
    with pytest.raises(UsageError, match="cannot be written"):
        write_sweep(sweep, tmp_path / "none" / "y.csv", "csv")


def test_what_csv_cannot_hold(tmp_path: Path) -> None:
    entries = {"x": {"a": "\ud800", "time": 1.0}, "y": {"a": "b", "time": 2.0}}
    half = read_sweep(written(tmp_path / "x.json", {"tune_params_keys": ["a"], "cache": entries}))
    with pytest.raises(
        UsageError, match=r"y.csv cannot be written: '\\ud800' in a name or value of x is half"
    ):
        write_sweep(half, tmp_path / "y.csv", "csv")
    write_sweep(half, tmp_path / "y.json", "t4")
    assert read_sweep(tmp_path / "y.json").legal.choices == half.legal.choices
    named = {"tune_params_keys": ["threads"], "cache": {"x": {"threads": 1, "time": 1.0}}}
    with pytest.raises(
        UsageError, match="'threads' of z has the name of a column that is no parameter in CSV"
    ):
        write_sweep(read_sweep(written(tmp_path / "z.json", named)), tmp_path / "z.csv", "csv")


def test_of_a_config_that_comes_twice_the_last_counts(tmp_path: Path) -> None:
    sweep = read_sweep(written(tmp_path / "x.csv", "BM,median_ms\n1,3\n2,5\n1,4\n"))
    assert sweep.time_ms.tolist() == [4, 5]
    assert np.array_equal(sweep.legal.ordinals, [[0], [1]])


# ------------------------------------------------------------------------------------ means and medians


def test_a_mean_stays_a_mean_in_every_form(tmp_path: Path) -> None:
    there = read_sweep(written(tmp_path / "x.csv", "BM,mean_ms\n1,3.5\n2,5\n"))
    for number, form in enumerate(("kernel-tuner", "t4", "csv", "t4", "kernel-tuner", "csv")):
        path = tmp_path / f"y{number}{ENDINGS[form]}"
        write_sweep(there, path, form)
        there = read_sweep(path)
        assert there.about.statistic == "mean"
        assert there.time_ms.tolist() == [3.5, 5]
    columns = path.read_text().splitlines()[0].split(",")
    assert ("mean_ms" in columns, "median_ms" in columns) == (True, False)


def test_a_median_stays_a_median_in_every_form(tmp_path: Path) -> None:
    there = read_sweep(written(tmp_path / "x.csv", "BM,median_ms\n1,3.5\n2,5\n"))
    for number, form in enumerate(("kernel-tuner", "t4", "csv")):
        path = tmp_path / f"y{number}{ENDINGS[form]}"
        write_sweep(there, path, form)
        there = read_sweep(path)
        assert there.about.statistic == "median"
    columns = path.read_text().splitlines()[0].split(",")
    assert ("mean_ms" in columns, "median_ms" in columns) == (False, True)


def test_a_mean_beside_a_median_is_kept(tmp_path: Path) -> None:
    sweep = read_sweep(written(tmp_path / "x.csv", "BM,mean_ms,median_ms\n1,3.5,3\n2,5,4\n"))
    assert sweep.time_ms.tolist() == [3, 4]
    write_sweep(sweep, tmp_path / "y.csv", "csv")
    again = read_sweep(tmp_path / "y.csv")
    assert [point.extra for point in again.points] == [{"mean_ms": 3.5}, {"mean_ms": 5}]
    assert again.about.statistic == "median"


def test_the_times_of_other_tuners_are_means_unless_they_say_otherwise(tmp_path: Path) -> None:
    assert read_sweep(written(tmp_path / "x.json", CACHE)).about.statistic == "mean"
    assert read_sweep(written(tmp_path / "y.json", T4)).about.statistic == "mean"
    runs = json.loads(json.dumps(T4))
    del runs["results"][0]["measurements"]
    assert read_sweep(written(tmp_path / "z.json", runs)).about.statistic == "median"
    write_sweep(read_sweep(tmp_path / "x.json"), tmp_path / "x.csv", "csv")
    assert "mean_ms" in (tmp_path / "x.csv").read_text().splitlines()[0]


def test_a_log_holds_medians_only(tmp_path: Path) -> None:
    about = About("sgemm", "NVIDIA H200", None, HEADER, "mean")
    sweep = make_sweep(tmp_path / "x.csv", ["BM"], [Point({"BM": 1}, 1.0)], about)
    with pytest.raises(UsageError, match="a log holds medians, and the times of x are means"):
        write_sweep(sweep, tmp_path / "y.trials.jsonl", "trials")


# ------------------------------------------------------------------------------------ hostile files


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    for name in ("x.csv", "x.json", "x.csv.gz", "x.trials.jsonl"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(UsageError, match="it is a pipe, socket or device"):
            read_sweep(tmp_path / name)
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    with pytest.raises(UsageError, match="it is a pipe, socket or device"):
        read_sweep(tmp_path / "zero.json")


def test_a_file_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    for name, most in (("x.csv", 512), ("x.json.gz", 512), ("x.trials.jsonl", 1024)):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, 3 << 30)
        with pytest.raises(UsageError, match=f"longer than {most} MiB, the most that is read"):
            read_sweep(tmp_path / name)


def test_a_byte_order_mark_is_read_past(tmp_path: Path) -> None:
    for name, text in (("x.csv", "BM,median_ms\n1,2\n"), ("x.json", json.dumps(CACHE))):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
    log = tmp_path / "x.trials.jsonl"
    with TrialLog(log, HEADER) as opened:
        opened.append({"config": {"BM": 1}, "outcome": "measured", "median_ms": 1.0})
    log.write_bytes(b"\xef\xbb\xbf" + log.read_bytes())
    assert read_sweep(log).about.header == HEADER
    assert read_sweep(tmp_path / "x.csv").legal.names == ("BM",)
    assert len(read_sweep(tmp_path / "x.json")) == 3


LONG = "9" * 5000  # digits that Python does not read as an integer


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.csv", f"BM,median_ms\n1,{LONG}\n", "column median_ms is inf, not a time"),
        ("x.csv", f"BM,median_ms\n{LONG},1\n", "parameter 'BM' has a value that is no number between"),
        ("x.csv", f"BM,median_ms\n-{LONG},1\n", "parameter 'BM' has a value that is no number between"),
        ("x.json", json.dumps(CACHE).replace("0.5,", f"{LONG},", 1), "'128,plain' is inf, not a time"),
        ("x.json", json.dumps(T4).replace("0.004", LONG), "result 1, measurement time is inf, not a time"),
        ("x.json", '{"results": [' + "[" * 900 + "]" * 900 + "]}", "the first result has"),
        (
            "x.json",
            '{"cache": {"a": ' + "[" * 900 + "]" * 900 + '}, "tune_params_keys": ["a"]}',
            "cache entry",
        ),
        (
            "x.csv",
            ",".join(f"p{i}" for i in range(5000)) + ",median_ms\n" + "1," * 5000 + "1\n",
            "at most 256",
        ),
        (
            "x.json",
            json.dumps({"tune_params_keys": [f"p{i}" for i in range(100_000)], "cache": {}}),
            "at most 256 can be searched",
        ),
        ("x.csv", "BM,\x1b[31mBN,median_ms\n1,,3\n2,2,4\n", r"line 2 has no \x1b[31mBN"),
        ("x.csv", "BM,status,median_ms\n1,\x1b[2J" + 1000 * "x" + ",3\n", r"the status '\x1b[2Jxxx"),
        ("x.json", json.dumps(CACHE).replace("128,plain", "\x1b]0;mine\x07"), "not JSON"),
        (
            "x.json",
            json.dumps({"tune_params_keys": ["a\x1b[2J"], "cache": {"\x1b[2J": {}}}),
            r"cache entry '\x1b[2J' has a\x1b[2J = None",
        ),
    ],
)
def test_a_hostile_file_gives_one_short_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)) as failure:
        read_sweep(written(tmp_path / name, text))
    assert str(failure.value).isprintable()
    assert len(str(failure.value)) < 500 + len(str(tmp_path))


def test_the_name_of_a_sweep_is_safe_to_print(tmp_path: Path) -> None:
    path = written(tmp_path / "\x1b[31mred.csv", "BM,median_ms\n1,2\n")
    assert read_sweep(path).name == r"\x1b[31mred"


def test_the_configs_of_a_log_have_the_same_parameters(tmp_path: Path) -> None:
    path = tmp_path / "x.trials.jsonl"
    with TrialLog(path, HEADER) as log:
        log.append({"config": {"BM": 1}, "outcome": "measured", "median_ms": 1.0})
        log.append({"config": {"BM": 1, "BN": 2}, "outcome": "measured", "median_ms": 2.0})
    with pytest.raises(UsageError, match="config of trial 2 has parameters that the first one has not"):
        read_sweep(path)


def test_a_log_is_never_written_over(tmp_path: Path) -> None:
    path = tmp_path / "x.trials.jsonl"
    with TrialLog(path, HEADER) as log:
        log.append({"config": {"BM": 1}, "outcome": "measured", "median_ms": 1.0})
    before = path.read_bytes()
    for form in FORMS:
        with pytest.raises(UsageError, match="is a log, which may hold trials of a search"):
            write_sweep(read_sweep(path), path, form)
    with pytest.raises(UsageError, match="is no archive of records"):
        write_archive([], path)
    assert path.read_bytes() == before


def test_a_compile_time_that_is_unknown_stays_so(tmp_path: Path) -> None:
    there = read_sweep(written(tmp_path / "x.csv", "BM,median_ms\n1,3.5\n2,5\n"))
    for form in ("kernel-tuner", "t4", "csv"):
        path = tmp_path / f"y{ENDINGS[form]}"
        write_sweep(there, path, form)
        there = read_sweep(path)
    assert path.read_text() == "BM,outcome,median_ms\n1,measured,3.5\n2,measured,5.0\n"


def test_what_a_form_has_no_place_for_is_named(tmp_path: Path) -> None:
    sweep = read_sweep(written(tmp_path / "x.json", CACHE))
    assert left_out(sweep, "csv") == ["kernel", "device", "times", "GB/s"]
    assert left_out(sweep, "t4") == ["size"]
    assert left_out(sweep, "kernel-tuner") == []
    odd = json.loads(json.dumps(CACHE))
    odd["cache"]["128,plain"]["power"] = {"mean": 3}
    assert left_out(read_sweep(written(tmp_path / "y.json", odd)), "t4") == ["size", "power"]
    write_sweep(sweep, tmp_path / "x.csv", "csv")
    assert left_out(read_sweep(tmp_path / "x.csv"), "csv") == []


def test_results_of_another_objective_than_time_are_refused(tmp_path: Path) -> None:
    result = {
        "configuration": {"BM": 64},
        "times": {"runtimes": [1.5, 2.5]},
        "invalidity": "correct",
        "objectives": ["GFLOP/s"],
        "measurements": [{"name": "GFLOP/s", "value": 900.0, "unit": "GFLOP/s"}],
    }
    with pytest.raises(
        UsageError, match=r"result 1: the objective is 'GFLOP/s': tune with the objective time"
    ):
        read_sweep(written(tmp_path / "x.json", {"results": [result]}))
    result["measurements"].append({"name": "time", "value": 2.0, "unit": "ms"})
    assert read_sweep(written(tmp_path / "y.json", {"results": [result]})).points[0].outcome == 2.0


def test_a_csv_states_the_size_of_the_problem(tmp_path: Path) -> None:
    for stated, size in (("4096x2048x64", [4096, 2048, 64]), ("1024", [1024])):
        sweep = read_sweep(written(tmp_path / "x.csv", f"size,BM,median_ms\n{stated},1,3.5\n{stated},2,5\n"))
        assert sweep.about.size == tuple(size)
        write_sweep(sweep, tmp_path / "y.json", "kernel-tuner")
        assert json.loads((tmp_path / "y.json").read_text())["problem_size"] == size
        write_sweep(read_sweep(tmp_path / "y.json"), tmp_path / "z.csv", "csv")
        assert read_sweep(tmp_path / "z.csv").about.size == tuple(size)
    several = read_sweep(written(tmp_path / "x.csv", "size,BM,median_ms\n64,1,3.5\n128,2,5\n"))
    assert several.about.size is None
