"""Sweeps in a cache file of Kernel Tuner.

The file is a JSON object: ``device_name``, ``kernel_name``, ``problem_size``, ``tune_params_keys``,
``tune_params``, ``objective`` and ``cache``. That maps "value,value,.." to a config with its ``time`` in ms,
or an error in its place or in ``__error__``, and with the milliseconds of ``compile_time``,
``verification_time`` and ``benchmark_time``. ``time`` is the mean of ``times`` unless ``time_statistic``, our
addition, says "median". While the file is being written its last two braces are missing and a comma may stand
in their place; Kernel Tuner recognises a closed file by its last three characters. Checked against Kernel
Tuner 1.5 (June 2026). What the format has no field for is kept in ``rejection`` and ``autotune``, which it
does not read.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from autotune.errors import REJECTION_KINDS, Rejected, RejectionKind, UsageError
from autotune.sweep.sweep import (
    About,
    Point,
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

KINDS: dict[str, RejectionKind] = {
    "CompilationFailedConfig": "compile",
    "RuntimeFailedConfig": "crash",
    "InvalidConfig": "constraint",
    "ErrorConfig": "crash",
}
ERRORS: dict[RejectionKind, str] = {
    "constraint": "InvalidConfig",
    "compile": "CompilationFailedConfig",
    "compile_timeout": "CompilationFailedConfig",
    "crash": "RuntimeFailedConfig",
    "timeout": "RuntimeFailedConfig",
    "correctness": "RuntimeFailedConfig",
}
NO_TIME = 1e20  # written by older versions for a config that failed
STAGES = ("compile_time", "verification_time", "benchmark_time", "strategy_time", "framework_time")
UNKNOWN = "unknown"  # the format has no place for no device
TRIES = 8  # positions where a torn file may end; each attempt parses it again
MOST_DIGITS = 4300  # of an integer that Python reads
GIVE = "give a cache file of Kernel Tuner or T4 results"
OWN = {"time", "__error__", "rejection", "why", *STAGES}


def parse_cache(path: Path, text: str) -> Any:
    """Parse the JSON of a cache file, closed or not; what follows the last whole config is dropped.

    The end of that config is looked for at the last `TRIES` positions where a comma follows an object.

    Raises:
        UsageError: It is not JSON, or nests too deeply.
    """
    try:
        return _parsed(text)
    except RecursionError:
        raise UsageError(f"{path}: its lists or objects nest too deeply: {GIVE}") from None
    except ValueError as error:
        why = error
    rest = text.rstrip()
    for _ in range(TRIES):
        rest = rest.removesuffix(",")
        for end in ("}}", "}"):
            with suppress(ValueError, RecursionError):
                content = _parsed(rest + end)
                if isinstance(content, dict) and "cache" in content:
                    return content
        rest = rest[: rest.rfind("},") + 1]
        if not rest:
            break
    raise UsageError(f"{path}: not JSON ({why}): {GIVE}")


def read_cache(path: Path, content: Mapping[str, Any]) -> Sweep:
    """Read the content of a cache file.

    Raises:
        UsageError: A field is missing or of the wrong type.
    """
    names, entries = content.get("tune_params_keys"), content.get("cache")
    if not (isinstance(names, list) and names and all(isinstance(name, str) for name in names)):
        raise UsageError(
            f"{path}: tune_params_keys is {reprlib.repr(names)}: give the list of parameter names"
        )
    taken = next((name for name in names if name in OWN), None)
    if taken is not None:
        raise UsageError(f"{path}: tune_params_keys names {taken}, which is a result: rename the parameter")
    if not isinstance(entries, dict):
        raise UsageError(
            f"{path}: cache is {reprlib.repr(entries)}: give an object with a config in each of its entries"
        )
    points = [_point(path, key, entry, names) for key, entry in entries.items()]
    header = header_of(content.get("autotune"), path)
    size = content.get("problem_size")
    sizes = tuple(size) if isinstance(size, list) else (size,)
    about = About(
        kernel=_word(content.get("kernel_name")),
        device=_word(content.get("device_name")),
        size=sizes if all(isinstance(each, int) for each in sizes) else None,
        header=header,
        statistic=statistic_of(content.get("time_statistic"), header),
    )
    return make_sweep(path, names, points, about)


def write_cache(sweep: Sweep) -> str:
    """Write a sweep as a closed cache file."""
    about, legal = sweep.about, sweep.legal
    head = {
        "device_name": about.device or UNKNOWN,
        "kernel_name": about.kernel or sweep.name,
        "problem_size": list(about.extents),
        "tune_params_keys": list(legal.names),
        "tune_params": {name: list(values) for name, values in legal.choices.items()},
        "objective": "time",
        "time_statistic": about.statistic,
        **({"autotune": typed.plain(about.header)} if about.header is not None else {}),
    }
    lines = []
    for point in sweep.points:
        values = {name: point.config[name] for name in legal.names}
        key = ",".join(map(str, values.values()))
        lines.append(f"{json.dumps(key)}: {json.dumps(_entry(point, values))}")
    return json.dumps(head)[:-1] + ',\n"cache": {\n' + ",\n".join(lines) + "}\n}"


def _parsed(text: str) -> Any:
    """Parse JSON; an integer that Python would refuse to read is infinite."""
    return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < MOST_DIGITS else math.inf)


def _word(value: Any) -> str | None:
    return value if isinstance(value, str) and value != UNKNOWN else None


def _point(path: Path, key: str, entry: Any, names: list[str]) -> Point:
    config = config_of(entry, names, lambda: f"{path}: cache entry {reprlib.repr(key)}")
    time, error = entry.get("time"), entry.get("__error__")
    outcome: float | Rejected
    if isinstance(error, str) or isinstance(time, str) or time == NO_TIME:
        word = error if isinstance(error, str) else str(time)
        own = entry.get("rejection")
        kind = own if own in REJECTION_KINDS else KINDS.get(word, "crash")
        outcome = Rejected(kind, str(entry.get("why", word)))
    elif time is None:
        raise UsageError(f"{path}: cache entry {reprlib.repr(key)} has no time: tune with the objective time")
    else:
        outcome = time_of(time, lambda: f"{path}: time of cache entry {reprlib.repr(key)}")

    def spent_on(stage: str) -> float | None:
        return seconds_of(entry.get(stage), lambda: f"{path}: {stage} of cache entry {reprlib.repr(key)}")

    spent = [spent_on("verification_time"), spent_on("benchmark_time")]
    return Point(
        config=config,
        outcome=outcome,
        compile_s=from_ms(spent_on("compile_time")),
        gpu_s=from_ms(sum(ms for ms in spent if ms)),
        extra={name: value for name, value in entry.items() if name not in OWN and name not in names},
    )


def _entry(point: Point, values: Mapping[str, Any]) -> dict[str, Any]:
    entry = dict(values)
    if isinstance(point.outcome, Rejected):
        error = ERRORS[point.outcome.kind]
        entry |= {
            "time": error,
            "__error__": error,
            "rejection": point.outcome.kind,
            "why": point.outcome.why,
        }
    else:
        entry |= {"time": point.outcome}
    stages = dict.fromkeys(STAGES, 0.0)
    stages["compile_time"] = 1e3 * (point.compile_s or 0.0)
    stages["benchmark_time"] = 1e3 * (point.gpu_s or 0.0)
    extra = {name: value for name, value in point.extra.items() if name not in entry}
    return entry | stages | extra
