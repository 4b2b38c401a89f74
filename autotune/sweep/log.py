"""Sweeps in the log of a search, whose trials they are."""

from __future__ import annotations

import reprlib
from pathlib import Path
from typing import Any

from autotune.errors import REJECTION_KINDS, RecordError, Rejected, UsageError
from autotune.records.trials import read_trials
from autotune.sweep.sweep import About, Point, Sweep, config_of, make_sweep, seconds_of, time_of
from autotune.values import jsontext, typed

OWN = {"config", "outcome", "why", "median_ms", "compile_s", "gpu_s"}


def read_log_sweep(path: Path) -> Sweep:
    """Read a log; estimates are left out.

    Raises:
        UsageError: It cannot be read, or a trial is malformed.
    """
    try:
        header, trials = read_trials(path)
    except RecordError as error:
        raise UsageError(f"{error}: give a log with its header in the first line") from None
    names: list[str] = []
    points = []
    for number, trial in enumerate(trials, 1):
        config, kind = trial.get("config"), trial.get("outcome")
        if kind in ("estimated", "proven"):  # without a GPU
            continue
        names = names or list(config if isinstance(config, dict) else {})
        if isinstance(config, dict) and len(config) > len(names):
            raise UsageError(f"{path}: config of trial {number} has parameters that the first one has not")
        config = config_of(config, names, lambda n=number: f"{path}: config of trial {n}")  # type: ignore[misc]
        outcome: float | Rejected
        if kind in REJECTION_KINDS:
            outcome = Rejected(kind, str(trial.get("why", "")))
        elif kind == "measured":
            outcome = time_of(trial.get("median_ms"), lambda n=number: f"{path}: median_ms of trial {n}")  # type: ignore[misc]
        else:
            raise UsageError(
                f"{path}: trial {number} has outcome {reprlib.repr(kind)}: "
                "give measured or a kind of rejection"
            )
        extra = {name: value for name, value in trial.items() if name not in OWN}
        compile_s, gpu_s = (
            seconds_of(trial.get(name), lambda name=name, n=number: f"{path}: {name} of trial {n}")  # type: ignore[misc]
            for name in ("compile_s", "gpu_s")
        )
        points.append(Point(config, outcome, compile_s, gpu_s, extra))
    about = About(header.family, header.device.name, None, header)
    return make_sweep(path, names, points, about)


def write_log(sweep: Sweep, path: Path) -> str:
    """Write a sweep as a log.

    Raises:
        UsageError: The sweep does not say what its trials belong to, or its times are means.
    """
    header = sweep.about.header
    if header is None:
        raise UsageError(
            f"{path}: a log says of which space, template and device its trials are, and {sweep.name} does "
            "not: convert it to csv, t4 or kernel-tuner"
        )
    if sweep.about.statistic != "median":
        raise UsageError(
            f"{path}: a log holds medians, and the times of {sweep.name} are means: convert it to csv, t4 or "
            "kernel-tuner"
        )
    lines = [typed.plain(header), *(_line(point) for point in sweep.points)]
    return "".join(jsontext.compact(line) + "\n" for line in lines)


def _line(point: Point) -> dict[str, Any]:
    line: dict[str, Any] = {"config": dict(point.config)}
    if isinstance(point.outcome, Rejected):
        line |= {"outcome": point.outcome.kind, "why": point.outcome.why}
    else:
        line |= {"outcome": "measured", "median_ms": point.outcome}
    line |= {"compile_s": point.compile_s} if point.compile_s is not None else {}
    line |= {"gpu_s": point.gpu_s} if point.gpu_s is not None else {}
    return line | dict(point.extra)
