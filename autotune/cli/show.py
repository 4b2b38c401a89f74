"""``autotune show``: stored records, for people."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import click

from autotune.cli.options import Wanted, cache_option, json_option, wanted_options
from autotune.errors import RecordError, RecordMissing
from autotune.outside import printable

if TYPE_CHECKING:
    from autotune.records import Record, Store


@click.command()
@wanted_options
@click.option("--family", help="Only records of this kernel family.")
@cache_option
@json_option
def command(wanted: Wanted, family: str | None, store: Store, as_json: bool) -> None:
    """Show the record of a problem on every device that has one; without sizes, list all records.

    --family, --layout, --beta and --math choose among them. Exit code 1 when a file cannot be read and no
    other is found.
    """
    from autotune import records
    from autotune.cli.tune import summary

    broken: list[RecordError] = []
    found = [
        entry.record
        for entry in store.entries(broken.append)
        if wanted.takes(entry.record.problem) and family in (None, entry.record.family)
    ]
    for error in broken:
        click.echo(f"autotune: {error}", err=True)
    problem = wanted.problem
    if problem is not None and not found and not broken:
        raise RecordMissing(
            f"{store.root} holds no record of {problem}: run 'autotune tune {problem.cli_flags()}'"
        )
    if as_json:
        objects = [json.loads(records.to_json(record)) for record in found]
        alone = problem is not None and len(objects) == 1
        click.echo(json.dumps(objects[0] if alone else objects, indent=2))
    elif found and problem is not None:
        for record in found:
            click.echo(summary(record))
            if record.imported:
                click.echo(f"  imported  {record.imported[:10]}: it was measured elsewhere")
            _rank(record)
    elif found:
        _list(found)
    elif not broken:
        which = f"{wanted}{f' of family {printable(family, 40)}' if family else ''}"
        what = f"no record{which}" if which else "no records"
        click.echo(f"{store.root} holds {what}: run 'autotune tune --m 4096 --n 4096 --k 4096'", err=True)
    if broken and not found:
        sys.exit(1)


def _list(found: list[Record]) -> None:
    from autotune.cli.tables import Table

    table = Table(
        ("device", "problem", "family", "evidence", "ms", "TFLOP/s", "vs cuBLAS", "seen", "created"),
        drop=("seen", "created", "evidence", "family", "vs cuBLAS", "device"),
        right=("ms", "TFLOP/s", "vs cuBLAS"),
    )
    for record in found:
        table.add_row(
            record.device.name,
            str(record.problem),
            record.family,
            record.evidence,
            f"{record.timing.median_ms:.5g}" if record.timing else "-",
            f"{record.gflops / 1000:.2f}" if record.gflops else "-",
            f"{record.vs_cublas:.3f}" if record.vs_cublas else "-",
            record.search.extent,
            record.created[:10],
        )
    table.echo()


def _rank(record: Record) -> None:
    """Rank the finalists, naming only the parameters in which they differ."""
    if not record.runners_up or record.timing is None:
        return
    from autotune.cli.tables import Table

    timing = record.timing
    rows = [(record.config, timing.median_ms, timing.quantiles_ms, "winner")]
    for each in record.runners_up:
        rows.append((each.config, each.median_ms, each.quantiles_ms, "tied" if each.tied else ""))
    names = [name for name in record.config if len({config.get(name) for config, *_ in rows}) > 1]
    table = Table(("rank", "ms", "10-90 %", "", *names))
    for rank, (config, median_ms, (low, _, high), mark) in enumerate(rows, 1):
        choices = (str(config.get(name)) for name in names)
        table.add_row(str(rank), f"{median_ms:.6g}", f"{low:.5g}-{high:.5g}", mark, *choices)
    table.echo()
