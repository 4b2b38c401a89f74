"""``autotune show``: stored records, two of them side by side, and what would serve where there is none."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from autotune.cli.options import (
    Wanted,
    cache_option,
    device_of,
    json_option,
    spaces_of,
    target_options,
    wanted_options,
)
from autotune.errors import RecordError, UsageError
from autotune.outside import printable

if TYPE_CHECKING:
    from autotune.records import Record, Store
    from autotune.report.expected import Expected
    from autotune.report.side_by_side import SideBySide
    from autotune.values.device import Device
    from autotune.values.problem import Problem


@click.command()
@click.argument("names", nargs=-1, metavar="[A [B]]")
@wanted_options
@click.option("--family", help="Only records of this kernel family.")
@target_options
@cache_option
@json_option
def command(
    names: tuple[str, ...],
    wanted: Wanted,
    family: str | None,
    ordinal: int | None,
    target: str | None,
    store: Store,
    as_json: bool,
) -> None:
    """Show the record of a problem on every device that has one; without sizes, list all records.

    Where nothing was measured, show what would serve the problem and why: the kernel that a model predicts to
    be fastest. Nothing is written. --family, --layout, --beta and --math choose among records, --device and
    --target name one GPU. Exit code 1 when a file cannot be read and no other is found.

    A and B name records: each a file, sizes such as 4096x4096x4096 or '4096 x 4096 x 4096 nt 3xtf32', or the
    name of a record's file. With two, what differs is put side by side: problem, config, time, resources and
    circumstances.
    """
    from autotune import records
    from autotune.cli.tune import summary
    from autotune.records.schema import identity_of

    if names:
        from autotune.cli.named import problem_named, record_named

        if len(names) > 2:
            raise UsageError(f"show takes one or two records, not {len(names)}")
        if wanted.problem is not None:
            raise UsageError("a record is named by A, or by --m, --n and --k: leave out one")
        if len(names) == 1 and (sizes := problem_named(names[0], wanted)) is not None:
            wanted, names = replace(wanted, problem=sizes), ()
    problem, note = wanted.problem, ""
    device: Device | None = None
    if ordinal is not None or target is not None:
        device, note = device_of(ordinal, target)
    broken: list[RecordError] = []

    def takes(record: Record) -> bool:
        on_device = device is None or identity_of(record.device) == identity_of(device)
        return on_device and family in (None, record.family)

    if names:
        found = [record_named(name, wanted, store, takes, broken.append) for name in names]
    else:
        found = [
            entry.record
            for entry in store.entries(broken.append)
            if wanted.takes(entry.record.problem) and takes(entry.record)
        ]
    for error in broken:
        click.echo(f"autotune: {error}", err=True)
    foreseen: Expected | None = None
    if problem is not None and not any(record.timing for record in found):
        if device is None:
            device, note = device_of(None, None)
        foreseen = _foreseen(problem, device, family, store)
    if len(names) == 2:
        from autotune.report.side_by_side import SideBySide

        compared = SideBySide(*found)
        if as_json:
            click.echo(json.dumps(compared.plain(), indent=2))
        else:
            _compare(compared)
    elif as_json:
        objects = [json.loads(records.to_json(record)) for record in found]
        objects += [] if foreseen is None or device is None else [foreseen.plain(device.name)]
        alone = (problem is not None or names) and len(objects) == 1
        click.echo(json.dumps(objects[0] if alone else objects, indent=2))
    elif problem is not None or names:
        for record in found:
            click.echo(summary(record))
            if record.imported:
                click.echo(f"  imported  {record.imported[:10]}: it was measured elsewhere")
            _rank(record)
        if foreseen is not None and problem is not None and device is not None:
            _foresee(foreseen, problem, device)
    elif found:
        _list(found)
    elif not broken:
        given = wanted.given() | ({"space": printable(family, 40)} if family else {})
        which = f"{wanted}{f' of family {printable(family, 40)}' if family else ''}"
        what = f"no record{which}" if which else "no records"
        flags = "".join(f" --{name} {value}" for name, value in given.items())
        example = f"autotune tune --m 4096 --n 4096 --k 4096{flags}"
        click.echo(f"{store.root} holds {what}: run '{example}'", err=True)
    if note:
        click.echo(note, err=True)
    if broken and not found:
        sys.exit(1)


def _foreseen(problem: Problem, device: Device, family: str | None, store: Store) -> Expected:
    """Return what would serve a problem, leaving nothing on disk."""
    from autotune.kernel.choices import Choices
    from autotune.records import Store
    from autotune.report.expected import expected

    spaces = None if family is None else spaces_of(family, problem, device)
    return expected(Choices(problem, device, Store(store.root, depot_bytes=0), spaces=spaces))


def _foresee(foreseen: Expected, problem: Problem, device: Device) -> None:
    """Print what would serve, and why; each time says that it is none that was measured."""
    from autotune.cli.tables import Table, paragraph

    first, ms = foreseen.first, foreseen.predicted_ms(foreseen.first)
    origin = "the model's first point" if first.point else "no model knows this family"
    stored = first.record is not None or first.config in first.space.presets.values()
    lines = {"from": f"{origin}; its config is that of {first.place}" if stored else origin}
    roofline = foreseen.roofline_ms
    if ms is not None and first.point is not None:
        on, floor = foreseen.learned[first.space.family], ""
        if roofline is not None:
            floor = f", {roofline / ms:.0%} of the roofline ({roofline:.4g} ms)"
        lines["predicted"] = f"{ms:.4g} ms, {foreseen.gflops(ms) / 1000:.2f} TFLOP/s{floor}"
        lines["by"] = (
            f"the static estimate, {first.point.estimate_ms:.4g} ms, x {ms / first.point.estimate_ms:.2f} as "
            f"learned from {on.trials:,} trials of {on.problems} shapes; of shapes held out, the first "
            f"choice took {on.corrected.mean:.3f} times the best time measured, {on.corrected.p90:.2f} at "
            "the ninth decile"
        )
    elif first.point is not None:
        rate = foreseen.gflops(first.point.estimate_ms) / 1000
        lines["estimated"] = (
            f"{first.point.estimate_ms:.4g} ms, {rate:.2f} TFLOP/s by the static estimate alone: good for "
            "order, not for claims"
        )
    if foreseen.modelled is not None:
        parts = {name: ms for name, ms in foreseen.modelled.parts.items() if name.endswith("_ms") and ms}
        shares = ", ".join(f"{name.removesuffix('_ms')} {ms:.4g}" for name, ms in parts.items())
        lines["its parts"] = f"{shares}; with predicted registers, where explain has the compiled ones"
    if foreseen.limit is not None:
        lines["limited"] = (
            f"probably by {foreseen.limit.because} ({foreseen.blocks} blocks on {device.sm_count} SMs); "
            f"{foreseen.limit.relief}"
        )
    if first.note:
        lines["note"] = first.note
    lines["missing"] = f"{foreseen.missing}: run '{foreseen.command}', or call with tune=\"quick\""
    click.echo(f'{problem} on {device.name}: this would serve, as "predicted"; nothing is measured')
    click.echo(f"  config    {first.space.family} {first.config.id}")
    for name, text in lines.items():
        paragraph(f"  {name:<9} {text}", indent=12)
    names = [
        name
        for name in first.config
        if len({each.config.get(name) for each in foreseen.choices if each.space is first.space}) > 1
    ]
    table = Table(
        ("", "predicted", "estimated", "family", *names, "from"),
        drop=("from", *reversed(names), "estimated", "family"),
        right=("predicted", "estimated"),
    )
    for number, choice in enumerate(foreseen.choices, 1):
        own = foreseen.predicted_ms(choice)
        table.add_row(
            str(number),
            "" if own is None else f"{own:.4g} ms",
            "" if choice.point is None else f"{choice.point.estimate_ms:.4g} ms",
            choice.space.family,
            *(str(choice.config.get(name, "")) for name in names),
            choice.place,
        )
    table.echo()


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


def _compare(compared: SideBySide) -> None:
    """Print what differs between two records, each time, and in a few lines what is alike."""
    from autotune.cli.tables import Table, paragraph
    from autotune.report.side_by_side import parts

    alone = [compared.alone(0), compared.alone(1)]
    table = Table(("", "fact", "A", "B", "B / A"), drop=("B / A", ""), wrap=("A", "B"), right=("B / A",))
    alike, names = [], []
    for part, facts in parts(compared.facts):
        heading: str = part
        for fact in facts:
            a, b = fact.shown
            if fact.path == "cublas.kernel":  # names of some 150 letters
                names += [(title, name) for title, name in zip("AB", (a, b), strict=True) if fact.differs]
            elif fact.path.startswith("config.") and any(fact.name in own for own in alone):
                continue
            elif fact.differs or (part == "time" and fact.values != (None, None)):
                table.add_row(heading, fact.name, a, b, "" if fact.ratio is None else f"{fact.ratio:.3f}")
                heading = ""
            elif a != "-":
                alike.append(f"{fact.name} {a}")
    for title, record in zip("AB", (compared.a, compared.b), strict=True):
        click.echo(f"{title}  {record.problem} on {record.device.name}: {record.family}")
    table.echo()
    for title, own in zip("AB", alone, strict=True):
        if own:
            paragraph(f"{title} alone: {', '.join(f'{name} {value}' for name, value in own.items())}")
    if alike:
        paragraph(f"alike: {', '.join(alike)}")
    for title, name in names:
        paragraph(f"cuBLAS of {title}: {name}")


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
