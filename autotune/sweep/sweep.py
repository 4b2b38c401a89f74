"""A sweep: measured configs, as a legal list that can be searched again without a GPU."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from autotune.errors import RecordError, Rejected, UsageError
from autotune.outside import printable
from autotune.records.trials import TrialHeader
from autotune.space.space import Legal
from autotune.values import typed
from autotune.values.lazy import cached_property

Statistic = Literal["median", "mean"]  # what the time of a config is of its launches
TIMES: dict[str, Statistic] = {f"{statistic}_ms": statistic for statistic in get_args(Statistic)}
OUTCOMES = ("outcome", "status")
SECONDS = ("compile_s", "gpu_s")
RESERVED = {*TIMES, *OUTCOMES, *SECONDS, "why"}  # columns of a table with the outcome of a config
MOST_PARAMETERS = 256
MOST_VALUES = 1 << 15  # of a parameter: a legal list has them in 16 bits
LARGEST = 1 << 63  # numbers are less than this


@dataclass(frozen=True)
class Point:
    """One config and its outcome.

    Attributes:
        config: Value of each parameter.
        outcome: Time of a launch in milliseconds, or why there is none.
        compile_s: Seconds of compiling; None if unknown.
        gpu_s: Seconds on the GPU, verification and repeats included; None if unknown.
        extra: Everything else in the file, JSON values by name.
    """

    config: Mapping[str, Any]
    outcome: float | Rejected
    compile_s: float | None = None
    gpu_s: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class About:
    """What was measured, and on what, as far as the file says.

    Attributes:
        kernel: Name of the kernel or family.
        device: Name of the GPU.
        size: Size of the problem, as the tuner wrote it.
        header: Identity of our own trials; None for those of other tuners.
        statistic: Which statistic of its launches the time of a config is.
    """

    kernel: str | None = None
    device: str | None = None
    size: tuple[int, ...] | None = None
    header: TrialHeader | None = None
    statistic: Statistic = "median"

    @property
    def extents(self) -> tuple[int, ...]:
        """Size of the problem, as far as it is known: m, n and k of ours."""
        ours = None if self.header is None else self.header.problem
        return (self.size or ()) if ours is None else (ours.m, ours.n, ours.k)


@dataclass(frozen=True, eq=False)
class Sweep:
    """The measured configs of a space.

    Attributes:
        name: Name of the file without its endings, safe to print.
        points: In the order of the file; each config once.
        legal: Their configs, in the same order.
        about: What was measured.
    """

    name: str
    points: tuple[Point, ...]
    legal: Legal
    about: About = field(default_factory=About)

    def __len__(self) -> int:
        return len(self.points)

    @cached_property
    def time_ms(self) -> NDArray[np.float64]:
        """`[count]` float64, milliseconds, `About.statistic` of the launches; NaN where rejected."""
        return np.array([p.outcome if isinstance(p.outcome, float) else math.nan for p in self.points])

    @cached_property
    def compile_s(self) -> NDArray[np.float64] | None:
        """`[count]` float64, seconds; the median where one is unknown, None where all are."""
        return _filled([point.compile_s for point in self.points])

    @cached_property
    def gpu_s(self) -> NDArray[np.float64] | None:
        """`[count]` float64, seconds; the median where one is unknown, None where all are."""
        return _filled([point.gpu_s for point in self.points])

    @property
    def best_ms(self) -> float:
        """Time of the fastest config, milliseconds."""
        return float(np.nanmin(self.time_ms))


def make_sweep(path: Path, names: Sequence[str], points: Sequence[Point], about: About) -> Sweep:
    """Return a sweep; of a config that occurs several times the last one counts.

    Args:
        path: The file, for the sweep's name and for errors.
        names: Parameters, in order.
        points: With a value for each of them.
        about: What was measured.

    Raises:
        UsageError: There is no point, or none with a time; or there are too many parameters, or one has a
            name that is taken, too many values, or one that is out of range.
    """
    if len(names) > MOST_PARAMETERS:
        raise UsageError(
            f"{path}: it has {len(names):,} parameters, at most {MOST_PARAMETERS} can be searched: leave out "
            "what only describes a config"
        )
    for name in names:
        if name in RESERVED or names.count(name) > 1:
            why = "is the name of a result" if name in RESERVED else "is the name of two parameters"
            raise UsageError(f"{path}: {name!r:.80} {why}: rename the parameter")
    if not points:
        raise UsageError(f"{path}: there is no config in it: give a file with measured configs")
    if not names:
        raise UsageError(f"{path}: its configs have no parameter: give the value of each parameter")
    latest = {tuple(point.config[name] for name in names): point for point in points}
    kept = tuple(latest.values())
    if not any(isinstance(point.outcome, float) for point in kept):
        raise UsageError(
            f"{path}: not one of its {len(kept)} configs has a time: give a file with measured configs"
        )
    occurring = {name: {row[i] for row in latest} for i, name in enumerate(names)}
    for name, values in occurring.items():
        if any(not isinstance(value, str) and not -LARGEST < value < LARGEST for value in values):  # or NaN
            raise UsageError(
                f"{path}: parameter {name!r:.80} has a value that is no number between -2^63 and 2^63: "
                "give a smaller number, or a word"
            )
        if len(values) > MOST_VALUES:
            raise UsageError(
                f"{path}: parameter {name!r:.80} has {len(values):,} different values, at most "
                f"{MOST_VALUES:,} can be searched: leave it out if it only numbers the configs"
            )
    choices = {name: _ordered(values) for name, values in occurring.items()}
    places = [{value: place for place, value in enumerate(choices[name])} for name in names]
    ordinals = np.array(
        [[place[value] for place, value in zip(places, row, strict=True)] for row in latest], np.int16
    ).reshape(len(kept), len(names))
    raw = math.prod(map(len, choices.values()))
    legal = Legal(tuple(names), choices, ordinals, raw, ())
    name = path.name
    for ending in (".gz", ".csv", ".jsonl", ".json", ".trials"):
        name = name.removesuffix(ending)
    return Sweep(printable(name), kept, legal, about)


def header_of(value: Any, path: Path) -> TrialHeader | None:
    """Return the header of our trials that a file of another form carries, or None where it carries none.

    Raises:
        UsageError: It is broken.
    """
    if value is None:
        return None
    try:
        return typed.build(TrialHeader, value, f"{path}, autotune")
    except RecordError as error:
        raise UsageError(f"{error}: leave it out, or convert the trials again") from None


def statistic_of(value: Any, header: TrialHeader | None) -> Statistic:
    """Return the statistic that a file of another form names; else the median of our trials, others' mean."""
    if value in get_args(Statistic):
        return value  # type: ignore[no-any-return]
    return "mean" if header is None else "median"


def config_of(value: Any, names: Sequence[str], where: Callable[[], str]) -> dict[str, Any]:
    """Return the value of each parameter of a config in a file.

    Raises:
        UsageError: It is no object, or a value is missing or neither a number nor a word.
    """
    if not isinstance(value, dict):
        raise UsageError(
            f"{where()} is {reprlib.repr(value)}: give an object with the value of every parameter"
        )
    for name in names:
        if not isinstance(value.get(name), int | float | str):
            found = reprlib.repr(value.get(name))
            raise UsageError(f"{where()} has {printable(name, 80)} = {found}: give a number or a word")
    return {name: value[name] for name in names}


def time_of(value: Any, where: Callable[[], str]) -> float:
    """Return a time in milliseconds.

    Raises:
        UsageError: It is not a positive finite number.
    """
    number = _in_range(value, where)
    if number is None or number <= 0:
        raise UsageError(f"{where()} is {reprlib.repr(value)}, not a time: give milliseconds above 0")
    return number


def seconds_of(value: Any, where: Callable[[], str]) -> float | None:
    """Return a number of seconds, or None where there is no usable one.

    Raises:
        UsageError: It is an integer beyond the range of a float.
    """
    number = _in_range(value, where)
    return number if number is not None and number >= 0 else None


def from_ms(milliseconds: float | None) -> float | None:
    """Return milliseconds as seconds, without digits that the division adds; None for 0, as unknown ones."""
    return round(milliseconds / 1e3, 12) if milliseconds else None


def _in_range(value: Any, where: Callable[[], str]) -> float | None:
    """Return a finite number as a float; None for anything else."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer; it may have too many digits to be shown
        raise UsageError(f"{where()} is an integer beyond 1.8e308, not a time: give a smaller one") from None


def _filled(values: Sequence[float | None]) -> NDArray[np.float64] | None:
    column = np.array([math.nan if value is None else value for value in values])
    known = column[~np.isnan(column)]
    if not known.any():  # unknown, or all 0: the tuner did not keep them
        return None
    return np.where(np.isnan(column), np.median(known), column)


def _ordered(values: set[Any]) -> tuple[Any, ...]:
    """Sort numbers by size, and words after them by the alphabet."""
    return tuple(sorted(values, key=lambda value: (isinstance(value, str), value)))
