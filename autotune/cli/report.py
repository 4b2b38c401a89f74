"""``autotune report``: a page of figures, of one problem, of several shapes, or of a bench."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from autotune.cli.options import (
    cache_option,
    device_of,
    file_option,
    refuse_overwriting,
    target_options,
    tune_command,
)
from autotune.cli.pages import write_lines, write_problem, write_suite
from autotune.cli.shapes import shape_options, shapes_of
from autotune.errors import RecordMissing, UsageError
from autotune.values.device import Device
from autotune.values.problem import Math, Problem

if TYPE_CHECKING:
    from autotune.records import Record, Store


@click.command()
@click.argument("files", nargs=-1, metavar="[FILE ...]", type=click.Path(path_type=Path, dir_okay=False))
@shape_options
@click.option(
    "--ladder",
    "climbed",
    is_flag=True,
    help="Add the ladder's steps to the roofline, as 'ladder' timed them, else as estimated.",
)
@target_options
@file_option("--out", "The HTML file to write.")
@cache_option
def command(
    files: tuple[Path, ...],
    problem: Problem | None,
    suite: str | None,
    only: tuple[str, ...],
    maths: tuple[Math, ...],
    climbed: bool,
    ordinal: int | None,
    target: str | None,
    out: Path | None,
    store: Store,
) -> None:
    """Write one HTML file that shows how a kernel was found, how fast and how sure that is, and why.

    It needs no network and no server. Without sizes it is made of FILEs: a record, several records, or what
    'bench --json' wrote. A trial log beside a record, which 'tune' writes, adds the course of the search. A
    suite, several records and a bench become a table with bars, and the spread of the ratios to cuBLAS.
    """
    if out is None:
        raise UsageError("say where the page goes: --out FILE")
    refuse_overwriting(out, files)
    if files:
        if problem is not None or suite is not None:
            raise UsageError("give FILEs, or sizes, or --suite")
        _of_files(out, files, store, climbed)
        return
    if problem is None and suite is None:
        raise UsageError("say what the page is about: --m, --n and --k, --suite, or FILEs")
    from autotune.cli.tune import summary

    shapes = shapes_of(problem, suite, only, maths)
    device, note = device_of(ordinal, target)
    if suite is None and len(shapes) == 1:
        try:
            record = stored(shapes[0].problem, device, store)
        except RecordMissing as error:
            flags = shapes[0].problem.cli_flags()
            raise RecordMissing(f"{error}; 'autotune show {flags}' shows what is predicted") from None
        estimated = record.timing is None
        path = store.path(record.device, record.family, record.problem, estimated=estimated)
        write_problem(out, record, path.parent, store, summary(record), climbed)
    else:
        found: list[tuple[str, Problem, Record | str]] = []
        for shape in shapes:
            try:
                found.append((shape.id, shape.problem, stored(shape.problem, device, store)))
            except RecordMissing as error:
                found.append((shape.id, shape.problem, str(error)))
        write_suite(out, f"{len(shapes)} shapes on {device.name}", found)
    if note:
        click.echo(note, err=True)


def _of_files(out: Path, files: tuple[Path, ...], store: Store, climbed: bool) -> None:
    from autotune import records
    from autotune.cli.tune import summary
    from autotune.report.suite_page import of_bench

    bench = of_bench(files[0]) if len(files) == 1 else None
    if bench is not None:
        write_lines(out, f"Bench of {len(bench[1])} shapes", [bench[0]], bench[1])
        return
    found = [records.read(file) for file in files]
    if len(found) == 1:
        write_problem(out, found[0], files[0].parent, store, summary(found[0]), climbed)
    else:
        told = [(file.stem, record.problem, record) for file, record in zip(files, found, strict=True)]
        write_suite(out, f"{len(files)} records", told)


def stored(problem: Problem, device: Device, store: Store) -> Record:
    """Return the best record of a problem, measured if there is one, else estimated.

    Raises:
        RecordMissing: There is none.
    """
    from autotune.space.space import families

    names = [space.family for space in families(problem, device)]
    for estimated in (False, True):
        record = store.best(device, names, problem, estimated=estimated)
        if record is not None:
            return record
    raise RecordMissing(f"no record of {problem} on {device.name}: run '{tune_command(problem)}'")
