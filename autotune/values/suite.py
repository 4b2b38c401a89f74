"""Suites: problems with their scalars and groups, read from a TOML file."""

from __future__ import annotations

import math
import reprlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.errors import ProblemError, UsageError
from autotune.outside import printable, read_toml
from autotune.values.problem import Problem

BUILT_IN = Path(__file__).with_name("suite.toml")
_KEYS: Mapping[str, tuple[type | tuple[type, ...], str]] = {
    "id": (str, "text"),
    "m": (int, "an integer"),
    "n": (int, "an integer"),
    "k": (int, "an integer"),
    "layout": (str, "text"),
    "alpha": ((int, float), "a number"),
    "beta": ((int, float), "a number"),
    "group": (str, "text"),
    "why": (str, "text"),
}
_NEEDED = ("id", "m", "n", "k")
_LARGEST = (1 << 63) - 1  # integer of TOML
_MOST_CHARACTERS = 200  # of a text


@dataclass(frozen=True)
class Shape:
    """One problem of a suite.

    Attributes:
        id: Its name within the suite.
        problem: The problem; its beta is 1 where `beta` is not 0.
        alpha: Scalar of the product, a float32 value.
        beta: Scalar of C, a float32 value.
        group: Name of the shapes whose speeds are averaged together.
        why: Why the shape is in the suite.
    """

    id: str
    problem: Problem
    alpha: float = 1.0
    beta: float = 0.0
    group: str = "all"
    why: str = ""

    @classmethod
    def of(cls, problem: Problem) -> Shape:
        """Return the shape of a problem alone: alpha 1, and beta 0 or 1 as the problem says."""
        return cls(str(problem), problem, beta=float(problem.beta))


def read_suite(path: Path | None = None) -> tuple[Shape, ...]:
    """Read a suite file, the built-in one when no path is given.

    Raises:
        UsageError: The file is missing or malformed, or a shape of it is; the message names the shape.
    """
    path = path or BUILT_IN
    try:
        table = read_toml(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{path} is not TOML: {error}") from None
    entries = table.pop("shape", [])
    if table:
        raise UsageError(
            f"{path}: {printable(', '.join(table), 80)} is unknown: a suite holds [[shape]] tables only"
        )
    if not isinstance(entries, list) or not entries:
        raise UsageError(f"{path} has no shape: write one [[shape]] table for each, with id, m, n and k")
    shapes = tuple(_shape(entry, f"{path}: shape {number}", path) for number, entry in enumerate(entries, 1))
    seen: set[str] = set()
    for shape in shapes:
        if shape.id in seen:
            raise UsageError(f"{path}: id {shape.id!r} appears twice: give every shape a name of its own")
        seen.add(shape.id)
    return shapes


def chosen(shapes: tuple[Shape, ...], names: tuple[str, ...]) -> tuple[Shape, ...]:
    """Return the shapes whose id or group is among the names; all when no name is given.

    Raises:
        UsageError: A name is neither an id nor a group.
    """
    known = {shape.id for shape in shapes} | {shape.group for shape in shapes}
    for name in names:
        if name not in known:
            groups = ", ".join(dict.fromkeys(shape.group for shape in shapes))
            raise UsageError(f"{name!r} is no shape and no group of the suite: groups are {groups}")
    return tuple(shape for shape in shapes if not names or shape.id in names or shape.group in names)


def _shape(entry: Any, where: str, path: Path) -> Shape:
    if not isinstance(entry, dict):
        raise UsageError(f"{path}: shape is not a list of tables: write [[shape]], with two brackets")
    if isinstance(entry.get("id"), str):
        where += f" ({printable(entry['id'], 40)})"
    for key, value in entry.items():
        if key not in _KEYS:
            raise UsageError(f"{where}: {printable(key, 40)} is unknown: give {', '.join(_KEYS)}")
        kind, noun = _KEYS[key]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise UsageError(f"{where}: {key} = {reprlib.repr(value)} must be {noun}")
        if isinstance(value, int) and abs(value) > _LARGEST:
            raise UsageError(f"{where}: {key} has {value.bit_length()} bits: give an integer of at most 64")
        if isinstance(value, str) and not (value.isprintable() and len(value) <= _MOST_CHARACTERS):
            raise UsageError(
                f"{where}: {key} must be printable, on one line, of at most {_MOST_CHARACTERS} characters"
            )
    missing = [key for key in _NEEDED if key not in entry]
    if missing:
        raise UsageError(f"{where}: {', '.join(missing)} is missing: a shape needs {', '.join(_NEEDED)}")
    for name in ("id", "group"):
        if not entry.get(name, "all").strip():
            raise UsageError(f"{where}: {name} must not be empty")
    alpha, beta = (_scalar(entry, name, default, where) for name, default in (("alpha", 1.0), ("beta", 0.0)))
    if alpha == 0.0:
        raise UsageError(f"{where}: alpha = 0 multiplies nothing: give another number")
    try:
        layout = entry.get("layout", "nn")
        problem = Problem(entry["m"], entry["n"], entry["k"], layout, int(beta != 0.0))
    except ProblemError as error:
        raise UsageError(f"{where}: {error}") from None
    return Shape(entry["id"], problem, alpha, beta, entry.get("group", "all"), entry.get("why", ""))


def _scalar(entry: Mapping[str, Any], name: str, default: float, where: str) -> float:
    """Return a scalar rounded to float32, as a kernel gets it."""
    given = entry.get(name, default)
    try:
        value: float = struct.unpack("f", struct.pack("f", given))[0]
    except OverflowError:
        value = math.inf
    if not math.isfinite(value) or (value == 0.0 and given != 0):
        raise UsageError(f"{where}: {name} = {given} must be a finite float32 number, and not round to 0")
    return value
