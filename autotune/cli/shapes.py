"""The options that name shapes: one by its sizes, or those of a suite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click

from autotune.cli.options import problem_options
from autotune.errors import UsageError
from autotune.values.problem import Math, Problem
from autotune.values.suite import Shape, chosen, read_suite

F = TypeVar("F", bound=Callable[..., Any])
BUILT_IN = "the built-in suite"


def shape_options(command: F) -> Callable[..., Any]:
    """Add --m --n --k --layout --beta as ``problem``, --math as ``maths``, --suite and --only."""
    command = click.option(
        "--only", multiple=True, metavar="ID|GROUP", help="Only these shapes of the suite; may be repeated."
    )(command)
    command = click.option(
        "--suite",
        is_flag=False,
        flag_value=BUILT_IN,
        metavar="[FILE]",
        help="All shapes of a suite file; without FILE the built-in suite of 24.",
    )(command)
    return problem_options(required=False, any_math=True)(command)


def shapes_of(
    problem: Problem | None, suite: str | None, only: tuple[str, ...], maths: Sequence[Math]
) -> tuple[Shape, ...]:
    """Return the shapes that were named, each in all maths that were asked for.

    Raises:
        UsageError: None or both were named, or the suite is wrong.
    """
    if (problem is None) == (suite is None):
        raise UsageError("give either --suite, or --m, --n and --k")
    if problem is not None:
        if only:
            raise UsageError("--only chooses among the shapes of --suite")
        return tuple(Shape.of(replace(problem, math=math)) for math in maths)
    return in_maths(chosen(read_suite(None if suite == BUILT_IN else Path(str(suite))), only), maths)


def in_maths(shapes: Sequence[Shape], maths: Sequence[Math]) -> tuple[Shape, ...]:
    """Return each shape in all maths; but for the first of them a shape's id says which."""
    return tuple(
        replace(
            shape,
            id=shape.id if math == maths[0] else f"{shape.id} {math}",
            problem=replace(shape.problem, math=math),
        )
        for shape in shapes
        for math in maths
    )
