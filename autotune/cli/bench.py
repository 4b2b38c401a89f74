"""``autotune bench``: the stored winners of a suite against cuBLAS and the best of cuBLASLt."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from autotune.cli.options import cache_option, file_option, json_option
from autotune.cli.shapes import in_maths, shape_options, shapes_of
from autotune.cli.streams import say
from autotune.cli.watchers import meter
from autotune.errors import Rejected, TuningError, UsageError
from autotune.measure.comparison import KERNEL, NAMES
from autotune.outside import printable
from autotune.paths import write_file
from autotune.values.problem import Math, Problem
from autotune.values.suite import MOST_RANDOM, random_shapes

if TYPE_CHECKING:
    from autotune.measure.comparison import Library
    from autotune.records import Store
    from autotune.report.bench import Report
    from autotune.report.rows import Row

HELD = ("shape", "", "short", "sustained", "W", "SM MHz", "GFLOP/s per W", "limited by")
LONG = ("for long, TFLOP/s", "vs cuBLAS for long", "W", "W of cuBLAS")
SHORTEST_S, LONGEST_S = 0.2, 600.0  # of --sustained
_UNITS: dict[Math, str] = {
    "ffma": "FP32 lanes",
    "3xtf32": "a third of the tensor cores' TF32",
    "3xfp16": "a third of their FP16",
}


@click.command()
@shape_options
@click.option("--cold", is_flag=True, help="Keep operands out of the L2 cache; replay all as CUDA graphs.")
@click.option(
    "--back-to-back",
    is_flag=True,
    help="Launch all one by one; without it all are replayed as CUDA graphs.",
)
@click.option(
    "--random",
    "number",
    type=click.IntRange(1, MOST_RANDOM),
    metavar="N",
    help="N random shapes, each served as if it had no record, against cuBLAS's default.",
)
@click.option(
    "--unseen",
    is_flag=True,
    help="Serve the shapes of --suite or the sizes as if they had no record, against cuBLAS's default.",
)
@click.option(
    "--quick",
    is_flag=True,
    help="With --random: tune each shape first, within seconds, as tune='quick' does.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    help="Of the operands, random when not given; of the draw of random shapes, 0 when not given.",
)
@click.option(
    "--resume/--no-resume",
    default=True,
    show_default=True,
    help="Go on where the same command was stopped; or begin anew.",
)
@click.option(
    "--sustained",
    metavar="TIME",
    help="Then run each back to back for so long, such as 3s: its speed, watts and clock in the second half.",
)
@click.option("--device", "ordinal", type=int, default=0, help="CUDA ordinal of the GPU.")
@file_option("--markdown", "Write the table into this file.")
@cache_option
@json_option
def command(
    problem: Problem | None,
    suite: str | None,
    only: tuple[str, ...],
    maths: tuple[Math, ...],
    cold: bool,
    back_to_back: bool,
    number: int | None,
    unseen: bool,
    quick: bool,
    seed: int | None,
    resume: bool,
    sustained: str | None,
    ordinal: int,
    markdown: Path | None,
    store: Store,
    as_json: bool,
) -> None:
    """Time stored winners against cuBLAS's default and the fastest algorithm of cuBLASLt, in one run.

    Every kernel is first checked in full against float64; then all run in turns on the same operands. Nothing
    is tuned, unless by --quick: a shape without a record is listed with the command that makes one. With
    --math 3xtf32 cuBLAS runs in TF32 too, and relative errors are shown. With --math any each shape is timed
    in every math, and means are of the fastest; --random and --unseen time that which is predicted. A run of
    several shapes that is stopped goes on when the same command is given again.
    """
    if cold and back_to_back:
        raise UsageError("--cold replays all as CUDA graphs: give it or --back-to-back, not both")
    if number is not None and (problem is not None or suite is not None):
        raise UsageError("--random draws its shapes: leave out sizes and --suite")
    if unseen and number is not None:
        raise UsageError("--random serves every shape as if it had no record: leave out --unseen")
    if quick and number is None:
        raise UsageError("--quick tunes random shapes: give --random N too, or run 'autotune tune'")
    sustained_s = 0.0 if sustained is None else _seconds(sustained)
    # Without records it is predicted which math serves a shape; else each is timed.
    open_maths = maths if len(maths) > 1 and (unseen or (number is not None and not quick)) else ()
    stated = maths[:1] if open_maths else maths
    shapes = (
        in_maths(random_shapes(number, seed or 0), stated)
        if number
        else shapes_of(problem, suite, only, stated)
    )
    from autotune.report.bench import bench

    def tell(row: Row) -> None:
        if row.gflops is not None:
            ratio = row.versus("cublas")
            against = "" if ratio is None else f", {ratio:.3f} x cuBLAS"
            line.better(row.gflops, f"{row.gflops / 1000:.2f} TFLOP/s{against}, {_name(row)}")
        line.say(told(row))

    try:
        with meter() as line:
            report = bench(
                shapes,
                ordinal=ordinal,
                cold=cold,
                method="back-to-back" if back_to_back else "graph",
                seed=seed,
                root=store.root,
                predicted=unseen or (number is not None and not quick),
                quick=quick,
                resume=resume,
                sustained_s=sustained_s,
                tell=tell,
                say=line.say,
                meter=line,
                maths=open_maths,
            )
    except KeyboardInterrupt:
        if len(shapes) > 1:
            say("what was timed so far is kept: the same command goes on from there")
        raise
    if markdown is not None:
        write_file(markdown, table(report))
    if as_json:
        click.echo(json.dumps(report.plain(), indent=2))
    else:
        show(report)
    if not report.timed:
        missing = sum(1 for row in report.rows if row.missing)
        raise TuningError(
            f"none of {len(report.rows)} shapes could be timed: {missing} have no record, "
            f"{len(report.rows) - missing} failed"
        )


def _seconds(text: str) -> float:
    """Read the time of --sustained.

    Raises:
        UsageError: It is no time, or out of range.
    """
    from autotune.tuning.budget import Budget

    with suppress(UsageError):
        seconds = Budget.parse(text).seconds  # infinite of a number of candidates
        if SHORTEST_S <= seconds <= LONGEST_S:
            return seconds
    raise UsageError(
        f"--sustained {printable(text, 40)}: give a time of {SHORTEST_S:g}s to {LONGEST_S:g}s, such as 3s"
    )


def told(row: Row) -> str:
    """Return the outcome of a shape in one line."""
    name = f"{row.shape.id}: " if row.shape.id != str(row.shape.problem) else ""
    head = f"{name}{row.shape.problem}"
    if row.missing:
        return f"{head}: {row.missing}: run 'autotune tune {row.shape.problem.cli_flags()}'"
    if row.measured is None:
        kind, why = (row.failure.kind, row.failure.why) if row.failure else ("", "")
        return f"{head}: FAILED, {kind}: {why}"
    line = f"{head}: {row.measured.timing.median_ms:.4g} ms"
    for library, title in NAMES.items():
        found = row.libraries.get(library)
        if isinstance(found, Rejected):
            line += f"; {title} failed, {found.kind}: {found.why}"
        elif found is not None:
            line += f"; {row.versus(library):.3f} x {title}"
    held = row.sustained.get(KERNEL)
    if held is not None:
        power = "" if held.watts is None else f" at {held.watts:.0f} W"
        line += f"; sustained {held.gflops(row.shape.problem.flops) / 1000:.2f} TFLOP/s{power}"
    return line


def caption(report: Report) -> str:
    """Return one line with the GPU, the versions and the date of the report."""
    facts = report.facts
    libraries = f"cuBLAS {facts.cublas}" if facts.cublas else "no cuBLAS"
    launched = "replayed as CUDA graphs" if report.method == "graph" else "launched back to back"
    runs = f"one run, {report.resumed} of them in an earlier one" if report.resumed else "one run"
    return (
        f"{facts.device.name}, driver {facts.driver}, {libraries}, NVRTC {report.nvrtc}, "
        f"{report.created[:10]}; operands {report.l2}, {launched}, "
        f"medians, in turns in {runs}; copy {facts.copy_gbs:,.0f} GB/s"
    )


def table(report: Report) -> str:
    """Write the report as a Markdown table with its caption."""
    versus = [f"vs {NAMES[library]}" for library in report.libraries]
    long = LONG if any(row.sustained for row in report.rows) else ()
    columns = ["shape", "ms", "TFLOP/s", *versus, "% of floor", *long, *_error_columns(report)]
    lines = [f"{caption(report)}.", "", _line(columns), _line(["---"] * len(columns))]
    for row in report.rows:
        name = _name(row)
        if row.measured is None:
            lines.append(_line([name, _status(row), *[""] * (len(columns) - 2)]))
            continue
        cells = [f"{row.measured.timing.median_ms:.4g}", _number((row.gflops or 0) / 1000, ".1f")]
        cells += [_number(row.versus(library), ".2f") for library in report.libraries]
        cells += [_percent(report.share(row)), *(_long(row) if long else [])]
        lines.append(_line([name, *cells, *_errors(report, row)]))
    for mean in report.means:
        if mean.shapes:
            ratios = [_number(mean.versus[library], ".2f") for library in report.libraries]
            name = f"geometric mean, {mean.group} ({mean.shapes})"
            others = [""] * (len(long) + len(_error_columns(report)))
            lines.append(_line([name, "", "", *ratios, _percent(mean.floor), *others]))
    if report.capped:
        lines += ["", f"{_capped(report)}."]
    if report.predicted or report.quick:
        heads = ["all shapes", *spread_columns(report)]
        lines += ["", _line(heads), _line(["---"] * len(heads))]
        lines += [_line([name, *cells]) for name, cells in spread_rows(report)]
    if held := sustained_rows(report):
        lines += ["", f"{_held(held)}.", "", _line([*HELD]), _line(["---"] * len(HELD))]
        lines += [_line(cells) for _, cells in held]
    return "\n".join([*lines, ""])


def _long(row: Row) -> list[str]:
    """Return the cells under `LONG`: what our kernel held for seconds, and against cuBLAS."""
    ours, cublas = row.sustained.get(KERNEL), row.sustained.get("cublas")
    rate = None if ours is None else ours.gflops(row.shape.problem.flops) / 1000
    ratio = None if ours is None or cublas is None else cublas.mean_ms / ours.mean_ms
    return [
        _number(rate, ".1f"),
        _number(ratio, ".2f"),
        *(_number(None if each is None else each.watts, ".0f") for each in (ours, cublas)),
    ]


def _line(cells: list[str]) -> str:
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)


def _error_columns(report: Report) -> list[str]:
    """Head the columns of relative errors; there are none where all compute in FP32."""
    return ["error", "of cuBLAS", "of cuBLAS TF32"] if "cublas_tf32" in report.libraries else []


def _errors(report: Report, row: Row) -> list[str]:
    """Return a shape's relative errors, in the Frobenius norm, against float64."""
    if not _error_columns(report):
        return []
    ours = None if row.measured is None else row.measured.verdict.error
    names: tuple[Library, ...] = ("cublas", "cublas_tf32")
    theirs = [None if (found := row.baseline(name)) is None else found.error for name in names]
    return [_number(error, ".1e") for error in (ours, *theirs)]


def show(report: Report) -> None:
    """Print the shapes, the geometric means, and which kernels ran."""
    from autotune.cli.tables import Table, paragraph

    click.echo(f"{caption(report)}\n")
    versus = [f"vs {NAMES[library].removeprefix('best ')}" for library in report.libraries]
    errors = _error_columns(report)
    numbers = ("ms", "TFLOP/s", "GB/s", *versus, "of floor", *errors)
    shapes = Table(
        ("shape", "group", *numbers),
        drop=("group", "GB/s", *errors, "of floor", "TFLOP/s"),
        right=numbers,
    )
    for row in report.timed:
        assert row.measured is not None
        shapes.add_row(
            _name(row),
            row.shape.group,
            f"{row.measured.timing.median_ms:.4g}",
            _number((row.gflops or 0) / 1000, ".2f"),
            _number(row.gbs, ",.0f"),
            *(_number(row.versus(library), ".3f") for library in report.libraries),
            _percent(report.share(row)),
            *_errors(report, row),
        )
    for mean in report.means:
        if mean.shapes and report.timed:
            ratios = (_number(mean.versus[library], ".3f") for library in report.libraries)
            name = f"geometric mean of {mean.shapes}"
            shapes.add_row(name, mean.group, "", "", "", *ratios, _percent(mean.floor), *("" for _ in errors))
    if report.timed:
        shapes.echo()
        _worst(report)
        if report.capped:
            paragraph(_capped(report))
        _hold(report)
        if report.predicted or report.quick:
            _spread(report)
        else:
            click.echo()
            _kernels(report)
    others = [row for row in report.rows if row.measured is None]
    if others:
        click.echo("\nnot timed:" if report.timed else "not timed:")
    for row in others:
        click.echo(f"  {told(row)}")


def sustained_rows(report: Report) -> list[tuple[float, list[str]]]:
    """Return for each shape and contestant that ran for seconds: for how many, and the cells under `HELD`."""
    rows = []
    for row in report.timed:
        flops = row.shape.problem.flops
        for name, held in row.sustained.items():
            library = cast("Library", name)
            found = row.measured if name == KERNEL else row.baseline(library)
            brief = None if found is None else flops / found.timing.median_ms / 1e9
            cells = [
                _name(row),
                "ours" if name == KERNEL else NAMES[library],
                _number(brief, ".2f"),
                f"{held.gflops(flops) / 1000:.2f}",
                _number(held.watts, ".0f"),
                _number(held.sm_mhz, ".0f"),
                _number(held.gflops_per_watt(flops), ".1f"),
                ", ".join(held.throttle) or "-",
            ]
            rows.append((held.seconds, cells))
    return rows


def _held(rows: list[tuple[float, list[str]]]) -> str:
    told = f"TFLOP/s, short and over the second half of {rows[0][0]:g} s back to back"
    return f"{told}; watts and clock of that half"


def _hold(report: Report) -> None:
    """Print what held for seconds, beside the short timings."""
    from autotune.cli.tables import Table

    rows = sustained_rows(report)
    if rows:
        table = Table(HELD, drop=("SM MHz", "short", "limited by", "GFLOP/s per W"), right=HELD[2:7])
        for _, cells in rows:
            table.add_row(*cells)
        click.echo(f"\n{_held(rows)}:")
        table.echo()


def _capped(report: Report) -> str:
    names = ", ".join(row.shape.id for row in report.capped)
    alone = "" if any(row.sustained for row in report.rows) else " (--sustained 3s runs each alone)"
    return f"held at the power cap, with all that was timed in turns: {names}{alone}"


def _worst(report: Report) -> None:
    for library, title in NAMES.items():
        row = report.worst(library)
        if row is not None:
            click.echo(f"worst against {title}: {_name(row)}, {row.versus(library):.3f}")
    maths: tuple[Math, ...] = tuple({row.shape.problem.math: None for row in report.timed}) or ("ffma",)
    peaks = [f"{report.facts.device.peak(math) / 1000:.1f} TFLOP/s ({_UNITS[math]}" for math in maths]
    click.echo(
        f"floor: the longer of 2mnk / {'), or '.join(peaks)} at their highest clock) and "
        f"bytes / {report.facts.copy_gbs:,.0f} GB/s (a copy, timed in this run)"
    )


def _spread(report: Report) -> None:
    """Print what serving is worth over all shapes, and what it costs the host."""
    from autotune.cli.tables import Table

    heads = spread_columns(report)
    table = Table(("", *heads), right=heads)
    for name, cells in spread_rows(report):
        table.add_row(name, *cells)
    how = "served by prediction" if report.predicted else _tuned(report)
    click.echo(f"\n{len(report.timed)} shapes {how}, time of the library over ours:")
    table.echo()


def spread_columns(report: Report) -> tuple[str, ...]:
    """Head the figures of `spread_rows`."""
    from autotune.report.bench import SLOWER

    verb = "choose" if report.predicted else "tune"
    return (
        *("geometric mean", "tenth percentile", "worst", f"below {SLOWER:g}"),
        *(f"ms to {verb}, median", "longest"),
    )


def spread_rows(report: Report) -> list[tuple[str, list[str]]]:
    """Return the figures of all shapes against each library."""
    rows = []
    for library in report.libraries:
        spread = report.spread(library)
        if spread is not None:
            numbers = [f"{spread.mean:.3f}", f"{spread.p10:.2f}", f"{spread.worst:.2f}"]
            numbers += [
                f"{spread.slower:.1%}",
                f"{spread.choosing_ms:.0f}",
                f"{spread.choosing_worst_ms:.0f}",
            ]
            rows.append((f"vs {NAMES[library]}", numbers))
    return rows


def _tuned(report: Report) -> str:
    """Say that the shapes were tuned quickly, and how many could not be."""
    others = sum(row.winner is not None and row.winner.served != "exact" for row in report.timed)
    return "tuned by tune='quick'" + (f" ({others} of them could not be: predicted)" if others else "")


def _kernels(report: Report) -> None:
    """List what ran: our config, and the kernels that the libraries chose."""
    for row in report.timed:
        assert row.winner is not None
        click.echo(f"{_name(row)}: {row.winner.family} {row.winner.id}")
        for library, title in NAMES.items():
            found = row.baseline(library)
            if found is not None:
                of = f", of {found.algorithms} algorithms" if library == "cublaslt" else ""
                click.echo(f"  {title} {found.timing.median_ms:.4g} ms{of}: {found.kernel or 'not told'}")


def _name(row: Row) -> str:
    named = row.shape.id != str(row.shape.problem)
    return f"{row.shape.id} {row.shape.problem}" if named else row.shape.id


def _status(row: Row) -> str:
    return "no record" if row.failure is None else f"failed: {row.failure.kind}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
