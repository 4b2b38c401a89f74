"""Writing a page of figures, and saying so: for `report`, and for `tune` at its end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autotune.cli.watchers import meter
from autotune.errors import DeviceError
from autotune.paths import write_file
from autotune.values.device import Device, current_device, known_devices
from autotune.values.problem import Problem

if TYPE_CHECKING:
    from autotune.records import Record, Store
    from autotune.report.suite_page import Line


def write_suite(out: Path, title: str, found: Sequence[tuple[str, Problem, Record | str]]) -> None:
    """Write the page of shapes: the name and problem of each, and its record or why there is none."""
    from autotune.report.suite_page import of_problem, of_record

    lines = [
        of_problem(name, problem, "missing", why=record)
        if isinstance(record, str)
        else of_record(name, record, _whole(record))
        for name, problem, record in found
    ]
    write_lines(out, title, ["Times are those of the records, each from its own search."], lines)


def write_lines(out: Path, title: str, summary: Sequence[str], lines: Sequence[Line]) -> None:
    """Write the page of shapes."""
    from autotune.report.suite_page import suite_page

    _write(out, suite_page(title, summary, lines))


def _write(out: Path, html: str) -> None:
    write_file(out, html)
    click.echo(f"{out}: {len(html.encode()) / 1000:.0f} KB", err=True)


def write_problem(
    out: Path, record: Record, folder: Path, store: Store, summary: str, climbed: bool = False
) -> None:
    """Write the page of a record that lies in a folder, and say where it is."""
    from autotune.report.kept_steps import recalled
    from autotune.report.ladder import describe
    from autotune.report.problem_page import problem_page

    device = _whole(record)
    with meter() as line:
        ladder = None
        if climbed and device is not None:
            ladder = recalled(describe(record.problem, device, root=store.root, meter=line), store)
        line.begin("counting and drawing")
        html = problem_page(record, folder, device, store.depot, summary.splitlines(), ladder)
    _write(out, html)


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
