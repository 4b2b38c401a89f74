"""Sweeps in a CSV file: a line for each config, a column for each parameter.

``median_ms`` is the time, or ``mean_ms`` where there is no median. ``outcome`` or ``status`` is "measured" or
"ok", or the kind of a rejection, which needs no time. ``compile_s`` and ``gpu_s`` are seconds. `OTHERS` are
not parameters either; a ``size`` that all lines share, such as 4096 or 4096x4096x1024, is the problem's.
Every other column is a parameter, unless it follows from a single column before it
(lanes along n from lanes along m).
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.errors import REJECTION_KINDS, Rejected, UsageError
from autotune.outside import printable
from autotune.sweep.sweep import (
    MOST_PARAMETERS,
    OUTCOMES,
    SECONDS,
    TIMES,
    About,
    Point,
    Sweep,
    make_sweep,
    seconds_of,
    time_of,
)

MEASURED = ("measured", "ok")
MOST_DIGITS = 4300  # of an integer that Python reads
OTHERS = (
    *("why", "min_ms", "registers", "spill_bytes", "threads", "num_threads", "smem_bytes", "shared_bytes"),
    *("gflops", "error", "size"),
    "mean_ms",  # beside median_ms
)


def read_table(path: Path, text: str) -> Sweep:
    """Read a CSV file.

    Raises:
        UsageError: A column is missing, or a value cannot be read: the file, line and column.
    """
    reader = csv.reader(io.StringIO(text))
    try:
        rows = list(reader)
    except csv.Error as error:
        raise UsageError(
            f"{path}: line {reader.line_num} is not CSV ({str(error).partition(' - ')[0]}): end lines by LF "
            f"or CR LF, and give at most {csv.field_size_limit():,} characters as a value"
        ) from None
    if not rows:
        raise UsageError(
            f"{path}: the file is empty: give a line with the names of the columns, then configs"
        )
    header, lines = [name.strip() for name in rows[0]], [row for row in rows[1:] if row]
    if len(set(header)) < len(header) or "" in header:
        raise UsageError(
            f"{path}: its first line does not name each column once: {printable(', '.join(header), 200)}"
        )
    time_column = next((name for name in TIMES if name in header), None)
    if time_column is None:
        raise UsageError(
            f"{path}: no column {' or '.join(TIMES)} among {printable(', '.join(header), 200)}: "
            "add the time of a launch in milliseconds"
        )
    outcome_column = next((name for name in OUTCOMES if name in header), None)
    for number, row in enumerate(lines, 2):
        if len(row) != len(header):
            raise UsageError(f"{path}: line {number} has {len(row)} values for {len(header)} columns")
    columns = {name: [row[i].strip() for row in lines] for i, name in enumerate(header)}
    known = {*TIMES, *OUTCOMES, *SECONDS, *OTHERS}
    values = {name: _values(columns[name]) for name in header if name not in known}
    if len(values) > MOST_PARAMETERS:
        raise UsageError(
            f"{path}: {len(values):,} columns are parameters, at most {MOST_PARAMETERS} can be searched: "
            "leave out what only describes a config"
        )
    if not values:
        raise UsageError(f"{path}: no column is a parameter: add one for each, such as BM")
    for name, column in values.items():
        if "" in column:
            line = column.index("") + 2
            raise UsageError(
                f"{path}: line {line} has no {printable(name, 80)}: give every parameter of every config"
            )
    names = _independent(values)
    points = []
    for i in range(len(lines)):
        cells = {name: column[i] for name, column in columns.items()}
        points.append(
            Point(
                config={name: values[name][i] for name in names},
                outcome=_outcome(path, i + 2, cells, time_column, outcome_column),
                compile_s=_seconds(path, i + 2, cells, "compile_s"),
                gpu_s=_seconds(path, i + 2, cells, "gpu_s"),
                extra={
                    name: _number(cells[name])
                    for name in header
                    if name in OTHERS and name not in ("why", time_column) and cells[name]
                },
            )
        )
    about = About(size=_size(columns.get("size", ())), statistic=TIMES[time_column])
    return make_sweep(path, names, points, about)


def write_table(sweep: Sweep) -> str:
    """Write a sweep as CSV, with the columns that at least one config has a value for.

    Raises:
        UsageError: A parameter has the name of a column that is not read as a parameter.
    """
    taken = next((name for name in sweep.legal.names if name in OTHERS), None)
    if taken is not None:
        raise UsageError(
            f"parameter {taken!r} of {sweep.name} has the name of a column that is no parameter in CSV: "
            "convert it --to t4 or kernel-tuner"
        )
    times: dict[str, list[Any]] = {
        "outcome": [p.outcome.kind if isinstance(p.outcome, Rejected) else "measured" for p in sweep.points],
        f"{sweep.about.statistic}_ms": [
            "" if isinstance(p.outcome, Rejected) else p.outcome for p in sweep.points
        ],
        "compile_s": [p.compile_s for p in sweep.points],
        "gpu_s": [p.gpu_s for p in sweep.points],
        **{
            name: [p.extra.get(name) for p in sweep.points]
            for name in OTHERS
            if name != f"{sweep.about.statistic}_ms"
        },
        "size": ["x".join(map(str, sweep.about.extents)) or p.extra.get("size") for p in sweep.points],
        "why": [p.outcome.why if isinstance(p.outcome, Rejected) else None for p in sweep.points],
    }
    kept = {name: column for name, column in times.items() if any(v is not None for v in column)}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*sweep.legal.names, *kept])
    for i, point in enumerate(sweep.points):
        values = [point.config[name] for name in sweep.legal.names]
        writer.writerow(values + ["" if column[i] is None else column[i] for column in kept.values()])
    return text.getvalue()


def _size(column: Sequence[str]) -> tuple[int, ...] | None:
    """Return the size of the problem, if the column states one."""
    stated = set(column)
    words = stated.pop().split("x") if len(stated) == 1 else [""]
    return tuple(map(int, words)) if all(re.fullmatch(r"[0-9]{1,18}", word) for word in words) else None


def _outcome(
    path: Path, number: int, line: Mapping[str, str], time_column: str, outcome_column: str | None
) -> float | Rejected:
    word = line[outcome_column] if outcome_column else ""
    if word and word not in (*MEASURED, *REJECTION_KINDS):
        raise UsageError(
            f"{path}: line {number} has the {outcome_column} {word!r:.80}: give {' or '.join(MEASURED)}, "
            f"or one of {', '.join(REJECTION_KINDS)}"
        )
    if word in REJECTION_KINDS:
        return Rejected(word, line.get("why", ""))
    return time_of(_number(line[time_column]), lambda: f"{path}: line {number}, column {time_column}")


def _seconds(path: Path, number: int, line: Mapping[str, str], column: str) -> float | None:
    return seconds_of(_number(line.get(column, "")), lambda: f"{path}: line {number}, column {column}")


def _values(column: Sequence[str]) -> list[Any]:
    """Return a column as numbers if all its values are numbers, else as text."""
    numbers = [_number(text) for text in column]
    return list(column) if any(isinstance(number, str) for number in numbers) else numbers


def _number(text: str) -> Any:
    """Return text as an integer or else a finite number; other text unchanged.

    An integer that Python would refuse to read is infinite.
    """
    try:
        return int(text)
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        return text
    return number if math.isfinite(number) or len(text) > MOST_DIGITS else text


def _independent(values: Mapping[str, Sequence[Any]]) -> list[str]:
    """Return the columns without those whose values map one to one to an earlier column's."""
    kept: list[str] = []
    for name, column in values.items():
        count = len(set(column))
        twin = any(
            count > 1
            and len(set(values[other])) == count == len(set(zip(values[other], column, strict=True)))
            for other in kept
        )
        if not twin:
            kept.append(name)
    return kept
