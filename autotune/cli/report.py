"""``autotune report``: a page of figures, of one problem, of records, or of a bench."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from autotune.cli.options import (
    cache_option,
    device_of,
    file_option,
    problem_options,
    target_options,
    tune_command,
)
from autotune.errors import DeviceError, RecordMissing, UsageError
from autotune.paths import write_file
from autotune.values.device import Device, current_device, known_devices
from autotune.values.problem import Problem

if TYPE_CHECKING:
    from autotune.records import Record, Store


@click.command()
@click.argument("files", nargs=-1, metavar="[RECORD ...]", type=click.Path(path_type=Path, dir_okay=False))
@problem_options(required=False)
@click.option(
    "--ladder", "climbed", is_flag=True, help="Add the ladder's steps to the roofline, as estimated."
)
@target_options
@file_option("--out", "The HTML file to write.")
@cache_option
def command(
    files: tuple[Path, ...],
    problem: Problem | None,
    climbed: bool,
    ordinal: int | None,
    target: str | None,
    out: Path | None,
    store: Store,
) -> None:
    """Write one HTML file that shows how a kernel was found, how fast and how sure that is, and why.

    It needs no network and no server. Without a GPU it is made for --target, or from a RECORD file. A trial
    log beside the record, which 'tune' writes, adds the course of the search.
    """
    if out is None:
        raise UsageError("say where the page goes: --out FILE")
    if (problem is None) == (not files):
        raise UsageError("give either --m, --n and --k, or RECORD files")
    if len(files) > 1:
        raise UsageError(f"a page is about one record, not {len(files)}")
    from autotune import records

    if problem is not None:
        device, note = device_of(ordinal, target)
        record = stored(problem, device, store)
        folder = store.home(record.device)
        if record.timing is None:
            folder /= "estimated"
        if note:
            click.echo(note, err=True)
    else:
        record, folder = records.read(files[0]), files[0].parent
    write_problem(out, record, folder, store, climbed)


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


def write_problem(out: Path, record: Record, folder: Path, store: Store, climbed: bool = False) -> None:
    """Write the page of a record, and say where it is."""
    from autotune.cli.tune import summary
    from autotune.report.ladder import describe
    from autotune.report.problem_page import problem_page

    device = _whole(record)
    ladder = describe(record.problem, device, root=store.root) if climbed and device is not None else None
    html = problem_page(record, folder, device, store.depot, summary(record).splitlines(), ladder)
    write_file(out, html)
    click.echo(f"{out}: {len(html.encode()) / 1000:.0f} KB")


def _whole(record: Record) -> Device | None:
    """Return the device of a record with all its limits: of the table, or of this machine."""
    from autotune.records.schema import identity_of

    for device in known_devices().values():
        if identity_of(device) == identity_of(record.device):
            return device
    try:
        device = current_device(0)
    except DeviceError:
        return None
    return device if identity_of(device) == identity_of(record.device) else None
