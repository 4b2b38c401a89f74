"""``autotune ladder``: every step from the naive kernel to the tuned one, measured and explained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autotune.cli.options import (
    cache_option,
    device_of,
    json_option,
    problem_options,
    svg_option,
    target_options,
)
from autotune.cli.tables import Table, paragraph
from autotune.cli.watchers import meter
from autotune.errors import DeviceError
from autotune.paths import write_file
from autotune.values.problem import Problem

if TYPE_CHECKING:
    from autotune.records import Store
    from autotune.report.ladder import Ladder


@click.command()
@problem_options()
@target_options
@cache_option
@svg_option
@json_option
def command(
    problem: Problem,
    ordinal: int | None,
    target: str | None,
    store: Store,
    svg: Path | None,
    as_json: bool,
) -> None:
    """Climb from the naive kernel to the tuned one: what each step changes, and what that gives.

    On a GPU every step is verified, then timed beside cuBLAS, and its time kept for 'report'. With --target,
    or without a GPU, all but the times: registers and occupancy from the compiler, loads and reads from the
    formulas. With --math 3xtf32 or 3xfp16 the last step is the kernel on tensor cores.
    """
    from autotune.report.kept_steps import keep, recalled
    from autotune.report.ladder import climb, describe

    device, note = device_of(ordinal, target)
    if why := device.shortage(problem):
        raise DeviceError(why)
    with meter() as line:
        if target is None and not note:
            ladder = climb(problem, ordinal=ordinal or 0, root=store.root, tell=line.say, meter=line)
            if why := keep(ladder, store):
                line.say(why)
        else:
            ladder = describe(problem, device, root=store.root, tell=line.say, meter=line)
    if svg is not None:
        from autotune.report.roofline import draw_accounts

        drawn = ladder if ladder.measured else recalled(ladder, store)
        named = [
            (rung.step.name, None if rung.rejected else rung.account, drawn.gflops(rung))
            for rung in drawn.rungs
        ]
        title = f"the ladder: {ladder.problem} on {ladder.device.name}"
        write_file(svg, draw_accounts(named, ladder.problem, ladder.device, title))
    if as_json:
        click.echo(json.dumps(ladder.plain(), indent=2))
    else:
        show(ladder)
    if note:
        click.echo(note, err=True)


def show(ladder: Ladder) -> None:
    """Print the table, and below it what each step changed and why one is slower than the one before."""
    title = f"{ladder.problem} on {ladder.device.name}"
    if ladder.cublas is not None:
        title += f"; cuBLAS {ladder.cublas.median_ms:.4g} ms"
    click.echo(f"{title}{'' if ladder.measured else ': counted, not timed'}\n")
    times = ("ms", "TFLOP/s", "of cuBLAS", "speed-up") if ladder.measured else ()
    numbers = (*times, "registers", "spilled", "occupancy", "loads", "reads")
    table = Table(
        ("", "step", *numbers),
        drop=("spilled", "speed-up", "reads", "loads", "occupancy", "registers"),
        right=("", *numbers),
    )
    for number, rung in enumerate(ladder.rungs, 1):
        row = [str(number), rung.step.name]
        if ladder.measured:
            mark, rate = "*" if rung.alone else "", ladder.gflops(rung)
            row += [
                _number(None if rung.timing is None else rung.timing.median_ms, ".4g") + mark,
                _number(None if rate is None else rate / 1000, ".2f"),
                _number(ladder.vs_cublas(rung), ".1%"),
                _number(ladder.speedup(rung), ".2f"),
            ]
        found = rung.account
        row += [
            _number(None if found is None else found.binary.registers, "d"),
            _number(None if found is None else found.binary.spill_bytes, "d"),
            _number(None if found is None else found.occupancy.fraction, ".0%"),
            floats(rung.global_loads),
            floats(rung.shared_reads),
        ]
        table.add_row(*row)
    table.echo()
    click.echo("\nloads, reads: floats per output, from global and from shared memory", nl=False)
    alone = any(rung.alone for rung in ladder.rungs)
    click.echo("; *: timed alone, the others in turns with cuBLAS\n" if alone else "\n")
    if ladder.problem.layout != "nn":
        click.echo(
            "the sentences speak of layout nn: where A or B is transposed, other lanes are neighbours\n"
        )
    for number, rung in enumerate(ladder.rungs, 1):
        paragraph(f"{number:2}  {rung.step.name}: {rung.step.changed}")
        if rung.note:
            paragraph(f"    ({rung.note})")
        if rung.rejected is not None:
            paragraph(f"    FAILED, {rung.rejected.kind}: {rung.rejected.why}")
        if slower := ladder.slower(rung):
            paragraph(f"    {slower}")


def floats(value: float | None) -> str:
    """Return floats per output, those of a short k in two digits."""
    return _number(value, ".2g" if value and value < 10 else ",.0f")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
