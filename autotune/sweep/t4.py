"""Sweeps in T4 results, the common output format of autotuners.

The file is a JSON object with ``results``: each has a ``configuration``, ``times``, an ``invalidity``
("correct", or why there is no time), ``correctness``, ``measurements`` (name, value, unit), ``objectives``.
The published schema (odgaard/TuningSchema, T4 1.0.0) names ``compilation_time``; Kernel Tuner writes
``compilation`` and autotuning_methodology reads that, so both are written. The measurement ``time`` is taken
for the mean of the launches, as Kernel Tuner writes it, unless ``time_statistic`` in ``metadata``, our
addition, says "median". What the format has no field for is kept in further measurements, and under
``metadata`` in ``autotune``.
"""

from __future__ import annotations

import json
import reprlib
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from autotune.errors import REJECTION_KINDS, Rejected, RejectionKind, UsageError
from autotune.sweep.sweep import (
    About,
    Point,
    Statistic,
    Sweep,
    config_of,
    from_ms,
    header_of,
    make_sweep,
    seconds_of,
    statistic_of,
    time_of,
)
from autotune.values import typed

VERSION: Final = "1.0.0"
CORRECT: Final = "correct"
KINDS: dict[str, RejectionKind] = {
    "constraints": "constraint",
    "compile": "compile",
    "runtime": "crash",
    "timeout": "timeout",
    "correctness": "correctness",
}
INVALIDITIES: dict[RejectionKind, str] = {
    "constraint": "constraints",
    "compile": "compile",
    "compile_timeout": "compile",
    "crash": "runtime",
    "timeout": "timeout",
    "correctness": "correctness",
}
TO_MS = {
    **dict.fromkeys(("", "ms", "millisecond", "milliseconds", "miliseconds"), 1.0),  # the last as published
    **dict.fromkeys(("s", "second", "seconds"), 1e3),
    **dict.fromkeys(("us", "microsecond", "microseconds"), 1e-3),
}


def read_t4(path: Path, content: Mapping[str, Any]) -> Sweep:
    """Read T4 results.

    Raises:
        UsageError: A field is missing or of the wrong type.
    """
    results = content.get("results")
    if not isinstance(results, list):
        raise UsageError(f"{path}: results is {reprlib.repr(results)}: give a list")
    metadata = content.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    unit = str(metadata.get("timeunit", ""))
    first = results[0].get("configuration") if results and isinstance(results[0], dict) else None
    names = list(first) if isinstance(first, dict) else []
    if results and not names:
        raise UsageError(f"{path}: the first result has no configuration: give one for every result")
    header = header_of(metadata.get("autotune"), path)
    statistic: Statistic = "median"
    if any("time" in _measurements(result)[0] for result in results):
        statistic = statistic_of(metadata.get("time_statistic"), header)
    points = [
        _point(path, number, result, names, unit, statistic) for number, result in enumerate(results, 1)
    ]
    kernel, device = (metadata.get(name) for name in ("kernel_name", "device_name"))
    about = About(
        kernel if isinstance(kernel, str) else None,
        device if isinstance(device, str) else None,
        None,
        header,
        statistic,
    )
    return make_sweep(path, names, points, about)


def write_t4(sweep: Sweep) -> str:
    """Write a sweep as T4 results."""
    about = sweep.about
    metadata: dict[str, Any] = {"timeunit": "milliseconds", "time_statistic": about.statistic}
    metadata |= {"kernel_name": about.kernel} if about.kernel else {}
    metadata |= {"device_name": about.device} if about.device else {}
    metadata |= {"autotune": typed.plain(about.header)} if about.header is not None else {}
    results = ",\n".join(json.dumps(_result(point, sweep.legal.names)) for point in sweep.points)
    head = json.dumps({"schema_version": VERSION, "metadata": metadata})
    return f'{head[:-1]},\n"results": [\n{results}\n]}}\n'


def _measurements(result: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the value and the unit of each measurement of a result, by name."""
    listed = result.get("measurements") if isinstance(result, dict) else None
    named = [
        each
        for each in (listed if isinstance(listed, list) else [])
        if isinstance(each, dict) and isinstance(each.get("name"), str)
    ]
    return (
        {each["name"]: each.get("value") for each in named},
        {each["name"]: str(each.get("unit") or "") for each in named},
    )


def _point(path: Path, number: int, result: Any, names: list[str], unit: str, statistic: Statistic) -> Point:
    def fault(name: str, value: Any, remedy: str) -> UsageError:
        return UsageError(f"{path}: result {number}: {name} is {reprlib.repr(value)}: {remedy}")

    def at(name: str) -> Callable[[], str]:
        return lambda: f"{path}: result {number}, {name}"

    if not isinstance(result, dict):
        raise fault("it", result, "give an object")
    config, times = config_of(result.get("configuration"), names, at("configuration")), result.get("times")
    if not isinstance(times, dict):
        raise fault("times", times, "give an object")

    def spent_on(name: str) -> float | None:
        return seconds_of(times.get(name), at(name))

    invalidity = result.get("invalidity")
    if not isinstance(invalidity, str) or (invalidity != CORRECT and invalidity not in KINDS):
        raise fault("invalidity", invalidity, f"give one of {CORRECT}, {', '.join(KINDS)}")
    if not isinstance(result.get("measurements") or [], list):
        raise fault("measurements", result["measurements"], "give a list of objects")
    measured, units = _measurements(result)
    runtimes = times.get("runtimes")
    runtimes = runtimes if isinstance(runtimes, list) else []
    outcome: float | Rejected
    if invalidity == CORRECT:
        own_unit = units.get("time") or unit
        if own_unit not in TO_MS:
            raise fault("the unit of time", own_unit, f"give one of {', '.join(filter(None, TO_MS))}")
        time, objectives = measured.get("time"), result.get("objectives")
        if time is None and isinstance(objectives, list) and objectives and "time" not in objectives:
            raise fault("the objective", ", ".join(map(str, objectives)), "tune with the objective time")
        if time is None and runtimes:
            middle = statistics.median if statistic == "median" else statistics.fmean
            time = middle([time_of(each, at("runtimes")) for each in runtimes])
        outcome = time_of(time, at("measurement time"))
        outcome = time_of(outcome * TO_MS[own_unit], at("measurement time in milliseconds"))
    else:
        own = measured.get("rejection")
        outcome = Rejected(own if own in REJECTION_KINDS else KINDS[invalidity], str(measured.get("why", "")))
    spent = [spent_on("benchmark"), spent_on("validation")]
    if times.get("benchmark") is None:
        known = [seconds_of(each, at("runtimes")) or 0.0 for each in runtimes]
        spent[0] = sum(known) if known else None
    stamp = {"at": result["timestamp"]} if isinstance(result.get("timestamp"), str) else {}
    return Point(
        config=config,
        outcome=outcome,
        compile_s=from_ms(spent_on("compilation" if "compilation" in times else "compilation_time")),
        gpu_s=from_ms(sum(ms for ms in spent if ms)),
        extra=stamp | {n: v for n, v in measured.items() if n not in ("time", "rejection", "why")},
    )


def _result(point: Point, names: tuple[str, ...]) -> dict[str, Any]:
    rejected = point.outcome if isinstance(point.outcome, Rejected) else None
    compile_ms = 1e3 * (point.compile_s or 0.0)
    measured: dict[str, Any] = {}
    if rejected is None:
        measured["time"] = point.outcome
    else:
        measured |= {"rejection": rejected.kind, "why": rejected.why}
    measured |= {
        name: value for name, value in point.extra.items() if name not in ("at", "times", "timestamp")
    }
    runtimes = point.extra.get("times")
    at = point.extra.get("at", point.extra.get("timestamp"))
    return {
        **({"timestamp": at} if isinstance(at, str) else {}),
        "configuration": {name: point.config[name] for name in names},
        "times": {
            "compilation_time": compile_ms,
            "compilation": compile_ms,
            "benchmark": 1e3 * (point.gpu_s or 0.0),
            "framework": 0,
            "search_algorithm": 0,
            "validation": 0,
            "runtimes": runtimes if isinstance(runtimes, list) else [],
        },
        "invalidity": CORRECT if rejected is None else INVALIDITIES[rejected.kind],
        "correctness": 1 if rejected is None else 0,
        "measurements": [
            {"name": name, "value": int(value) if isinstance(value, bool) else value, "unit": _unit(name)}
            for name, value in measured.items()
            if keeps(value)
        ],
        "objectives": ["time"],
    }


def keeps(value: Any) -> bool:
    """Return whether a measurement can have this value."""
    return isinstance(value, int | float | str | list)


def _unit(name: str) -> str:
    return "milliseconds" if name == "time" or name.endswith("_ms") else ""
