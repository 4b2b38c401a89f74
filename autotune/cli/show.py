"""``autotune show``: stored records, for people."""

from __future__ import annotations

import json
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autotune.cli.options import cache_option, json_option, problem_options
from autotune.errors import RecordMissing
from autotune.values.problem import Problem

if TYPE_CHECKING:
    from autotune.records import Record, Store


@click.command()
@problem_options(required=False)
@click.option("--family", help="Only records of this kernel family.")
@cache_option
@json_option
def command(problem: Problem | None, family: str | None, store: Store, as_json: bool) -> None:
    """Show the record of a problem on every device that has one; without sizes, list all records."""
    from autotune import records
    from autotune.cli.tune import summary

    name = "*.json" if problem is None else f"{'*' if family is None else escape(family)}_{problem.key}.json"
    entries = store.entries(lambda error: click.echo(f"autotune: {error}", err=True), name=name)
    found = [entry.record for entry in entries]
    if problem is not None and not found:
        raise RecordMissing(
            f"{store.root} holds no record of {problem}: run 'autotune tune {problem.cli_flags()}'"
        )
    if as_json:
        objects = [json.loads(records.to_json(record)) for record in found]
        alone = problem is not None and len(objects) == 1
        click.echo(json.dumps(objects[0] if alone else objects, indent=2))
    elif problem is None:
        _list(found, store.root)
    else:
        for record in found:
            click.echo(summary(record))
            _rank(record)


def _list(found: list[Record], folder: Path) -> None:
    if not found:
        click.echo(f"{folder} holds no records: run 'autotune tune --m 4096 --n 4096 --k 4096'", err=True)
        return
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
            f"{record.search.seen} of {record.search.legal}",
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
