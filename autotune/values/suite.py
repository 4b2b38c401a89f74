"""Suites: problems with their scalars and groups, read from a TOML file."""

from __future__ import annotations

import math
import random
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from autotune.errors import ProblemError, UsageError
from autotune.outside import printable, read_toml
from autotune.values import typed
from autotune.values.limits import Limit
from autotune.values.problem import LAYOUTS, Problem

MOST_RANDOM = 10_000
BUILT_IN = Path(__file__).with_name("suite.toml")
_Word = Annotated[str, Limit(pattern=r"(?=.*\S).{1,200}")]  # printable, on one line, not blank


@dataclass(frozen=True)
class _Entry:
    """One ``[[shape]]`` table, as it is written."""

    id: _Word
    m: int
    n: int
    k: int
    layout: str = "nn"
    batch: int = 1
    alpha: float = 1.0
    beta: float = 0.0
    group: _Word = "all"
    why: Annotated[str, Limit(pattern=".{0,200}")] = ""


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
    shapes = tuple(_shape(entry, number, path) for number, entry in enumerate(entries, 1))
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


def _shape(value: Any, number: int, path: Path) -> Shape:
    if not isinstance(value, dict):
        raise UsageError(f"{path}: shape is not a list of tables: write [[shape]], with two brackets")
    where = f"{path}: shape {number}"
    if isinstance(value.get("id"), str):
        where += f" ({printable(value['id'], 40)})"
    entry = typed.build(_Entry, value, where, error=UsageError, defaults=True)
    alpha, beta = (_scalar(getattr(entry, name), name, where) for name in ("alpha", "beta"))
    if alpha == 0.0:
        raise UsageError(f"{where}: alpha = 0 multiplies nothing: give another number")
    try:
        layout: Any = entry.layout
        problem = Problem(entry.m, entry.n, entry.k, layout, int(beta != 0.0), batch=entry.batch)
    except ProblemError as error:
        raise UsageError(f"{where}: {error}") from None
    return Shape(entry.id, problem, alpha, beta, entry.group, entry.why)


def _scalar(value: float, name: str, where: str) -> float:
    """Round to float32, as which a kernel takes it."""
    rounded = float(struct.unpack("f", struct.pack("f", value))[0])
    if math.isinf(rounded) or (value and not rounded):
        raise UsageError(f"{where}: {name} = {value:g} is beyond float32: give 1e-45 to 3.4e+38")
    return rounded


def random_shapes(number: int, seed: int = 0, *, batches: bool = False) -> list[Shape]:
    """Draw shapes as programs have them: from tiny to large, square to thin, in every layout.

    Each extent is 2^x with x uniform between 3.5 and 13; in half of the shapes all are cut to multiples of
    16. 2^19 < mnk < 2^36; the layouts are equally likely; 15 % have beta = 1.

    Args:
        number: How many; none is drawn twice.
        seed: Of the draw.
        batches: Make them batches of 2^x products, x uniform between 1 and 11, of extents up to 2^10; all
            products together have the limits above.

    Raises:
        UsageError: The number is out of range.
    """
    if not 1 <= number <= MOST_RANDOM:
        raise UsageError(f"{number} random shapes: give 1 to {MOST_RANDOM}")
    draw = random.Random(seed)
    shapes: dict[Problem, Shape] = {}
    while len(shapes) < number:
        m, n, k = (int(2 ** draw.uniform(3.5, 10 if batches else 13)) for _ in range(3))
        batch = int(2 ** draw.uniform(1, 11)) if batches else 1
        if draw.random() < 0.5:
            m, n, k = (max(16, extent // 16 * 16) for extent in (m, n, k))
        if 2**19 < batch * m * n * k < 2**36:
            layout = draw.choice(LAYOUTS)
            problem = Problem(m, n, k, layout, int(draw.random() < 0.15), batch=batch)
            name = f"R{len(shapes):03d}"
            shapes.setdefault(problem, Shape(name, problem, beta=float(problem.beta), group="random"))
    return list(shapes.values())
