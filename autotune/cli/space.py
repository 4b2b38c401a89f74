"""``autotune space``: what a search space holds for a problem and a device."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import click

from autotune.cli.options import (
    device_of,
    json_option,
    problem_options,
    space_option,
    spaces_of,
    target_options,
)
from autotune.values.problem import Problem

if TYPE_CHECKING:
    from autotune.space.space import Legal, Space
    from autotune.values.device import Device


@click.command()
@problem_options()
@space_option
@target_options
@json_option
def command(
    problem: Problem, space_name: str | None, ordinal: int | None, target: str | None, as_json: bool
) -> None:
    """Count a search space: its parameters, how many points each rule removes and why, and what is left.

    Without --space it is the first family that serves the problem; the others are named.
    """
    device, note = device_of(ordinal, target)
    space, *others = spaces_of(space_name, problem, device)
    if others:
        also = f"searched too: {', '.join(other.family for other in others)} (see --space)"
        note = "\n".join(filter(None, (note, also)))
    started = time.perf_counter()
    legal = space.enumerate(problem, device)
    seconds = time.perf_counter() - started
    if as_json:
        _write_json(space, legal, problem, device, seconds)
    else:
        _write_tables(space, legal, problem, device, seconds)
    if note:
        click.echo(note, err=True)


def _write_json(space: Space, legal: Legal, problem: Problem, device: Device, seconds: float) -> None:
    rules = [
        {
            "name": rule.name,
            "narrows": rule.narrows,
            "removed": points,
            "expr": rule.expression.text,
            "reason": rule.reason,
        }
        for rule, points in legal.removals
    ]
    content = {
        "family": space.family,
        "space_digest": space.digest,
        "device": device.name,
        "problem": problem.key,
        "raw": legal.raw,
        "legal": len(legal),
        "seconds": round(seconds, 4),
        "parameters": {name: list(values) for name, values in space.parameters.items()},
        "rules": rules,
    }
    click.echo(json.dumps(content, indent=2))


def _write_tables(space: Space, legal: Legal, problem: Problem, device: Device, seconds: float) -> None:
    from autotune.cli.tables import Table

    click.echo(f"{space.family}: {space.summary}")
    found = f"{legal.raw:,} points, {len(legal):,} legal, listed in {seconds * 1000:.0f} ms"
    click.echo(f"{problem} on {device.name}: {found}\n")
    table = Table(("parameter", "values", "meaning"), wrap=("values", "meaning"))
    for name, values in space.parameters.items():
        table.add_row(name, " ".join(map(str, values)), space.meanings[name])
    table.echo()
    for narrows, title in ((False, "constraint"), (True, "search rule")):
        table = Table(
            (title, "removed", "must hold", "because"),
            drop=("must hold",),
            wrap=("must hold", "because"),
            right=("removed",),
        )
        for rule, points in legal.removals:
            if rule.narrows == narrows:
                table.add_row(rule.name, f"{points:,}", rule.expression.text, rule.reason)
        if table.rows:
            click.echo()
            table.echo()
