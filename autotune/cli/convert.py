"""``autotune convert``: exchange measured configs with other tuners."""

from __future__ import annotations

from pathlib import Path

import click

from autotune.cli.options import refuse_overwriting
from autotune.outside import printable


@click.command()
@click.argument("source", metavar="IN", type=click.Path(path_type=Path))
@click.argument("target", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--to", "form", help="csv, trials, t4 or kernel-tuner; default: by the ending of OUT.")
def command(source: Path, target: Path, form: str | None) -> None:
    """Write the measured configs of IN as OUT.

    IN and OUT are a .csv or .csv.gz, the .trials.jsonl log of a search, or a .json or .json.gz with T4
    results (--to t4) or a cache of Kernel Tuner (--to kernel-tuner). Times stay what they were,
    medians or means of the launches: a table names its column median_ms or mean_ms.
    """
    from autotune.errors import UsageError
    from autotune.sweep import FORMS, form_of, left_out, read_sweep, write_sweep

    if form is not None and form not in FORMS:
        raise UsageError(f"form {form!r} is unknown: give one of {', '.join(FORMS)}")
    form = form or form_of(target)
    refuse_overwriting(target, [source])
    sweep = read_sweep(source)
    write_sweep(sweep, target, form)
    if lost := left_out(sweep, form):
        click.echo(f"left out, for {form} has no place for it: {printable(', '.join(lost), 300)}", err=True)
    click.echo(f"{len(sweep)} configs in {printable(str(target))}, as {form}", err=True)
