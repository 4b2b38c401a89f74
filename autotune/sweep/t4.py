"""Turns T4 results, the common output format of autotuners, into a `Sweep`, and back.

The file is a JSON object with ``results``: each has a ``configuration``, ``times``, an ``invalidity``
("correct", or why there is no time), ``correctness``, ``measurements`` (name, value, unit), ``objectives``.
The published schema (odgaard/TuningSchema, T4 1.0.0) names ``compilation_time``; Kernel Tuner writes
``compilation`` and autotuning_methodology reads that, so both are written. What the format has no word for is
kept in further measurements, and under ``metadata`` in ``autotune``.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from autotune.errors import REJECTION_KINDS, Rejected, RejectionKind, UsageError
from autotune.sweep.headers import header_of, plain_header
from autotune.sweep.sweep import About, Point, Sweep, from_ms, make_sweep, seconds_of, time_of

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
        raise UsageError(f"{path}: results is {results!r:.80}: give a list")
    metadata = content.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    unit = str(metadata.get("timeunit", ""))
    first = results[0].get("configuration") if results and isinstance(results[0], dict) else None
    names = list(first) if isinstance(first, dict) else []
    if results and not names:
        raise UsageError(f"{path}: the first result has no configuration: give one for every result")
    points = [_point(path, number, result, names, unit) for number, result in enumerate(results, 1)]
    header = header_of(metadata.get("autotune"), path)
    kernel, device = metadata.get("kernel_name"), metadata.get("device_name")
    return make_sweep(path, names, points, About(kernel, device, None, header))


def write_t4(sweep: Sweep) -> str:
    """Write a sweep as T4 results."""
    about = sweep.about
    metadata: dict[str, Any] = {"timeunit": "milliseconds"}
    metadata |= {"kernel_name": about.kernel} if about.kernel else {}
    metadata |= {"device_name": about.device} if about.device else {}
    metadata |= {"autotune": plain_header(about.header)} if about.header is not None else {}
    results = ",\n".join(json.dumps(_result(point, sweep.legal.names)) for point in sweep.points)
    head = json.dumps({"schema_version": VERSION, "metadata": metadata})
    return f'{head[:-1]},\n"results": [\n{results}\n]}}\n'


def _point(path: Path, number: int, result: Any, names: list[str], unit: str) -> Point:
    def fault(name: str, value: Any, remedy: str) -> UsageError:
        return UsageError(f"{path}: result {number}: {name} is {value!r:.80}: {remedy}")

    def at(name: str) -> Callable[[], str]:
        return lambda: f"{path}: result {number}, {name}"

    if not isinstance(result, dict):
        raise fault("it", result, "give an object")
    config, times = result.get("configuration"), result.get("times")
    if not isinstance(config, dict):
        raise fault("configuration", config, "give an object with the value of every parameter")
    for name in names:
        if not isinstance(config.get(name), int | float | str):
            raise fault(f"configuration.{name}", config.get(name), "give a number or a word")
    if not isinstance(times, dict):
        raise fault("times", times, "give an object")

    def spent_on(name: str) -> float | None:
        return seconds_of(times.get(name), at(name))

    invalidity = result.get("invalidity")
    if not isinstance(invalidity, str) or (invalidity != CORRECT and invalidity not in KINDS):
        raise fault("invalidity", invalidity, f"give one of {CORRECT}, {', '.join(KINDS)}")
    measured: dict[str, Any] = {}
    units: dict[str, str] = {}
    measurements = result.get("measurements") or []
    if not isinstance(measurements, list):
        raise fault("measurements", measurements, "give a list of objects")
    for each in measurements:
        if isinstance(each, dict) and isinstance(each.get("name"), str):
            measured[each["name"]] = each.get("value")
            units[each["name"]] = str(each.get("unit") or "")
    runtimes = times.get("runtimes")
    runtimes = runtimes if isinstance(runtimes, list) else []
    outcome: float | Rejected
    if invalidity == CORRECT:
        own_unit = units.get("time") or unit
        if own_unit not in TO_MS:
            raise fault("the unit of time", own_unit, f"give one of {', '.join(filter(None, TO_MS))}")
        time = measured.get("time")
        if time is None and runtimes:
            time = statistics.median(time_of(each, at("runtimes")) for each in runtimes)
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
        config={name: config[name] for name in names},
        outcome=outcome,
        compile_s=from_ms(spent_on("compilation" if "compilation" in times else "compilation_time")),
        gpu_s=from_ms(sum(ms for ms in spent if ms) or None),
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
            if isinstance(value, int | float | str | list)
        ],
        "objectives": ["time"],
    }


def _unit(name: str) -> str:
    return "milliseconds" if name == "time" or name.endswith("_ms") else ""
