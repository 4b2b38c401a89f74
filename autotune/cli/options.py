"""The options that several commands share, turned into problems, devices and folders."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from autotune.errors import DeviceError, UsageError
from autotune.values.device import Device, current_device, named_device
from autotune.values.problem import ANY, LAYOUTS, MATHS, Problem, asked_maths

if TYPE_CHECKING:
    from autotune.records import Store
    from autotune.space.space import Space

F = TypeVar("F", bound=Callable[..., Any])
BATCH = "Products of these sizes, computed by one launch; 1 if not given."


def problem_options(required: bool = True, any_math: bool = False) -> Callable[[F], Callable[..., Any]]:
    """Add --m --n --k --batch --layout --beta --math; the command gets ``problem``, None without a size.

    With ``any_math`` it also gets ``maths``, all that were asked for; the problem has the first.
    """

    def add(command: F) -> Callable[..., Any]:
        @functools.wraps(command)
        def call(
            m: int | None,
            n: int | None,
            k: int | None,
            batch: int | None,
            layout: str,
            beta: int,
            math: str,
            **others: Any,
        ) -> Any:
            if any_math:
                others["maths"] = asked_maths(math)
                math = others["maths"][0]
            return command(problem=_problem(m, n, k, layout, beta, math, batch), **others)

        wrapped: Callable[..., Any] = call
        for name, kind, default, text in (
            ("--math", str, "ffma", f"Arithmetic: {', '.join((*MATHS, ANY) if any_math else MATHS)}."),
            ("--beta", int, 0, "0: C is never read. 1: it is, and scaled by a beta."),
            ("--layout", str, "nn", f"How A and B are stored: {', '.join(LAYOUTS)}."),
        ):
            wrapped = click.option(name, type=kind, default=default, show_default=True, help=text)(wrapped)
        wrapped = click.option("--batch", type=int, help=BATCH)(wrapped)
        for name, text in (
            ("--k", "Length of each dot product."),
            ("--n", "Columns of C."),
            ("--m", "Rows of C."),
        ):
            wrapped = click.option(name, type=int, required=required, help=text)(wrapped)
        return wrapped

    return add


@dataclass(frozen=True)
class Wanted:
    """Which problems are asked for: one, or all that have what was given of these.

    Attributes:
        problem: The one; None where no size was given.
        layout: As given, None where it was not.
        beta: Likewise.
        math: Likewise.
        batch: Likewise.
    """

    problem: Problem | None
    layout: str | None
    beta: int | None
    math: str | None
    batch: int | None

    def takes(self, problem: Problem) -> bool:
        """Return whether a problem is asked for."""
        if self.problem is not None:
            return problem == self.problem
        return all(getattr(problem, name) == asked for name, asked in self.given().items())

    def __str__(self) -> str:
        if self.problem is not None:
            return f" of {self.problem}"
        told = ", ".join(f"{name} {value}" for name, value in self.given().items())
        return f" of {told}" if told else ""

    def given(self) -> dict[str, Any]:
        """Return what was given beside sizes."""
        facts = {"layout": self.layout, "beta": self.beta, "math": self.math, "batch": self.batch}
        return {name: value for name, value in facts.items() if value is not None}


def wanted_options(command: F) -> Callable[..., Any]:
    """Add --m --n --k --batch --layout --beta --math, none of them needed; the command gets ``wanted``."""

    @functools.wraps(command)
    def call(
        m: int | None,
        n: int | None,
        k: int | None,
        batch: int | None,
        layout: str | None,
        beta: int | None,
        math: str | None,
        **others: Any,
    ) -> Any:
        whole: Any = (layout or "nn", beta or 0, math or MATHS[0], 1 if batch is None else batch)
        Problem(1, 1, 1, *whole)  # Problem checks the words
        return command(wanted=Wanted(_problem(m, n, k, *whole), layout, beta, math, batch), **others)

    wrapped: Callable[..., Any] = call
    for name, kind, text in (
        ("--math", str, f"Arithmetic: {', '.join(MATHS)}."),
        ("--beta", int, "0: C is never read. 1: it is, and scaled by a beta."),
        ("--layout", str, f"How A and B are stored: {', '.join(LAYOUTS)}; nn where sizes are given."),
        ("--batch", int, "Products of these sizes, computed by one launch; 1 where sizes are given."),
        ("--k", int, "Length of each dot product."),
        ("--n", int, "Columns of C."),
        ("--m", int, "Rows of C."),
    ):
        wrapped = click.option(name, type=kind, help=text)(wrapped)
    return wrapped


def _problem(
    m: int | None, n: int | None, k: int | None, layout: str, beta: int, math: str, batch: int | None
) -> Problem | None:
    if m is None and n is None and k is None:
        return None
    if m is None or n is None or k is None:
        raise UsageError("a problem needs all of --m, --n and --k")
    words: Any = (layout, beta, math, 1 if batch is None else batch)
    return Problem(m, n, k, *words)  # Problem checks the words


def space_option(command: F) -> F:
    """Add --space as ``space_name``."""
    text = "A family, or a .toml file that narrows or replaces one; default: those that serve the problem."
    return click.option("--space", "space_name", metavar="FAMILY|FILE", help=text)(command)


def spaces_of(space_name: str | None, problem: Problem, device: Device) -> list[Space]:
    """Load the space that was named, else all that serve the problem.

    Raises:
        SpaceError: It cannot be loaded, or computes another math.
        UsageError: None serves the problem.
    """
    from autotune.space.space import Space, families, unserved

    found = families(problem, device) if space_name is None else [Space.load(space_name)]
    for space in found:
        space.require_math(problem)
    if not found:
        raise UsageError(unserved(problem, device))
    return found


def tune_command(problem: Problem, space_name: str | None = None, more: str = "") -> str:
    """Return the command that tunes a problem, with what --space said and further flags."""
    from autotune.space.space import quoted

    space = "" if space_name is None else f" --space {quoted(space_name)}"
    return f"autotune tune {problem.cli_flags()}{space}{more}"


def json_option(command: F) -> F:
    """Add --json as ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help="Write one JSON value to stdout.")(command)


def cache_option(command: F) -> F:
    """Add --cache; the command gets the ``store`` of that folder, or of the usual one."""

    def opened(context: click.Context, option: click.Parameter, folder: Path | None) -> Store:
        from autotune.records import Store

        return Store(folder)

    kind = click.Path(path_type=Path, file_okay=False)
    return click.option("--cache", "store", type=kind, callback=opened, help="Folder of records.")(command)


def file_option(name: str, text: str) -> Callable[[F], F]:
    """Add an option for a file to write; its folder must be there, and the command must not read the file."""

    def checked(context: click.Context, option: click.Parameter, file: Path | None) -> Path | None:
        if file is not None and not file.parent.is_dir():
            raise UsageError(f"{name} {file}: there is no folder {file.parent}")
        return file

    def add(command: F) -> F:
        @functools.wraps(command)
        def call(**given: Any) -> Any:
            own = name.removeprefix("--")
            refuse_overwriting(given[own], [value for other, value in given.items() if other != own])
            return command(**given)

        path = click.Path(path_type=Path, dir_okay=False)
        return cast(F, click.option(name, type=path, callback=checked, help=text)(call))

    return add


def refuse_overwriting(file: Path | None, read: Iterable[object]) -> None:
    """Check that a file to be written is none of those that the command reads.

    Args:
        file: To be written; None without one.
        read: Values of the other arguments and options; whichever names the file is read.

    Raises:
        UsageError: It is one of them, under this name or another.
    """
    if file is None or not file.exists():
        return
    for other in read:
        if isinstance(other, str | Path) and os.path.exists(other) and os.path.samefile(other, file):
            raise UsageError(f"{file} would be overwritten, and is what is read: give another file to write")


def svg_option(command: F) -> F:
    """Add --svg as ``svg``."""
    return file_option("--svg", "Draw the roofline into this file.")(command)


def target_options(command: F) -> F:
    """Add --device as ``ordinal``, and --target."""
    command = click.option("--target", help="A GPU of the built-in table, such as h200; needs no GPU.")(
        command
    )
    return click.option("--device", "ordinal", type=int, help="CUDA ordinal of a GPU here.")(command)


def device_of(ordinal: int | None, target: str | None) -> tuple[Device, str]:
    """Choose the device: the named target, the GPU of this machine, else the H200 of the table.

    Returns:
        The device; and what to tell the user behind the answer, "" unless the device was assumed.

    Raises:
        UsageError: Both were given, or the target is unknown.
        DeviceError: The GPU that was asked for cannot be used.
    """
    if target is not None:
        if ordinal is not None:
            raise UsageError("--device is a GPU here and --target one of the table: give one of them")
        return named_device(target), ""
    try:
        return current_device(ordinal or 0), ""
    except DeviceError:
        if ordinal is not None:
            raise
        return named_device("h200"), "no GPU here: this is for an NVIDIA H200 (see --target)"
