"""The page of several shapes, of records or of a bench: each against cuBLAS, and how the ratios spread."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from autotune.errors import DeviceError, RecordError
from autotune.measure.comparison import KERNEL, NAMES
from autotune.model.account import roofline_ms
from autotune.outside import MIB, read_bytes
from autotune.records import Record
from autotune.report.bench import SLOWER, geometric_mean, in_fastest_math
from autotune.report.chart import Axis, Chart, Lane, Series
from autotune.report.page import Bar, Cell, Figure, page
from autotune.space.space import Config
from autotune.values import jsontext, typed
from autotune.values.device import Device
from autotune.values.limits import Limit, Milliseconds, Name
from autotune.values.measurement import Sustained
from autotune.values.problem import Layout, Math, Problem

LIMIT = 256 * MIB  # of the file of a bench
APART = ("cublas_tf32",)  # less exact by far, and faster: it would dwarf the others
MOST_LANES, MOST_ROWS = 40, 2000  # shapes of which each has a lane, and of which each has a row
Ratio = Annotated[float, Limit(above=0)]


@dataclass(frozen=True, kw_only=True)
class Line:
    """What is known of one shape.

    Attributes:
        id: Its name.
        status: "timed"; anything else is a shape without a time, whose reason is in `why`.
        share_of_floor: Time of the roofline over that of the kernel.
        vs_cublas: Time of cuBLAS over that of the kernel.
        sustained: What ran back to back, the kernel by `KERNEL` and libraries by their names; None where not.
        short_ms: Their short timings.
    """

    id: str
    m: int
    n: int
    k: int
    layout: Layout
    math: Math = "ffma"
    batch: int = 1
    beta: float = 0.0
    status: str
    why: str = ""
    family: str = ""
    config: str = ""
    median_ms: Milliseconds | None = None
    share_of_floor: Ratio | None = None
    vs_cublas: Ratio | None = None
    sustained: Mapping[Name, Sustained] | None = None
    short_ms: Mapping[Name, Milliseconds] | None = None

    @property
    def problem(self) -> Problem:
        """What it computes."""
        return Problem(self.m, self.n, self.k, self.layout, int(self.beta != 0), self.math, self.batch)


def of_record(name: str, record: Record, device: Device | None) -> Line:
    """Return what a record says of its shape; ``device`` is that of the record with its speeds, if known."""
    problem = record.problem
    if record.timing is None:
        return of_problem(name, problem, "estimated", why="estimated, not measured", family=record.family)
    try:
        floor = None if device is None else roofline_ms(problem, device)
    except DeviceError:
        floor = None
    return of_problem(
        *(name, problem, "timed"),
        family=record.family,
        config=Config(record.config).id,
        median_ms=record.timing.median_ms,
        share_of_floor=None if floor is None else floor / record.timing.median_ms,
        vs_cublas=record.vs_cublas,
        sustained=None if record.sustained is None else {KERNEL: record.sustained},
        short_ms={KERNEL: record.timing.median_ms},
    )


def of_problem(name: str, problem: Problem, status: str, **known: Any) -> Line:
    """Return the line of a shape, with what else is known of it."""
    sizes = {each: getattr(problem, each) for each in ("m", "n", "k", "layout", "math", "batch")}
    return Line(id=name, beta=float(problem.beta), status=status, **sizes, **known)


def of_bench(path: Path) -> tuple[str, list[Line]] | None:
    """Read what ``bench --json`` wrote: where it ran, and its shapes; None for a file that is none of these.

    Raises:
        RecordError: It cannot be read, or is a bench that says something impossible.
    """
    try:
        content = jsontext.load(read_bytes(path, LIMIT).decode("utf-8-sig", errors="replace"), path)
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}") from None
    if not isinstance(content, dict) or not isinstance(content.get("shapes"), list):
        return None
    lines = [
        typed.build(Line, _with_sustained(each), path, at=f"$.shapes[{number}]", defaults=True, others=True)
        for number, each in enumerate(content["shapes"])
    ]
    device = content.get("device")
    where = [device.get("name") if isinstance(device, dict) else None, content.get("created")]
    where += [f"operands {content['l2']}"] if "l2" in content else []
    return ", ".join(str(each) for each in where if each is not None), lines


def _with_sustained(shape: Any) -> Any:
    """Return a shape as ``bench --json`` has it, with what held and the short timings as `Line` has them."""
    held = shape.get("sustained") if isinstance(shape, dict) else None
    if not isinstance(held, dict):
        return shape
    known = {each.name for each in fields(Sustained)}
    kept = {
        name: {key: value for key, value in each.items() if key in known} if isinstance(each, dict) else each
        for name, each in held.items()
    }
    timed = {name: shape if name == KERNEL else shape.get(name) for name in held}
    pairs = [(name, each.get("median_ms")) for name, each in timed.items() if isinstance(each, dict)]
    return {**shape, "sustained": kept, "short_ms": {name: ms for name, ms in pairs if ms is not None}}


def suite_page(title: str, summary: Sequence[str], lines: Sequence[Line]) -> str:
    """Return the page of several shapes."""
    timed = [line for line in lines if line.status == "timed"]
    told = f"{len(timed)} of {len(lines)} shapes have a time."
    held = [sustained_figure(timed)] if any(line.sustained for line in timed) else []
    return page(title, [*summary, told], [ratios_figure(timed), *held, shapes_figure(lines)])


def ratios_figure(timed: Sequence[Line]) -> Figure:
    """Return the ratios to cuBLAS, of each shape in its fastest math, where they are few; how they spread."""
    kept = in_fastest_math((line.id, line.math, 1 / (line.median_ms or math.inf)) for line in timed)
    found = sorted(
        ((line.vs_cublas, line) for line in timed if line.vs_cublas is not None and line.id in kept),
        key=lambda pair: pair[0],
    )
    title = "Against cuBLAS"
    ratios = [ratio for ratio, _ in found]
    mean = geometric_mean(ratios)
    if mean is None:
        return Figure(title, "No shape was timed beside cuBLAS.")
    faster, slower = sum(ratio > 1 for ratio in ratios), sum(ratio < SLOWER for ratio in ratios)
    says = (
        f"{faster} of {len(ratios)} shapes are faster than with cuBLAS, {slower} are below {SLOWER:g}; the "
        f"geometric mean is {mean:.3f}, the worst {ratios[0]:.3f}, of {found[0][1].id}."
    )
    least, most = min(1.0, ratios[0]), max(1.0, ratios[-1])
    x_or_y = Axis("time of cuBLAS / time of the kernel", least / 1.05, 1.05 * most, log=True)
    if len(found) <= MOST_LANES:
        lanes = [
            Lane(
                line.id,
                [Series("other" if ratio < 1 else "ours", "bar", [(1.0, ratio)])],
                f"{ratio:.3f}{' slower' if ratio < 1 else ''}",
            )
            for ratio, line in reversed(found)
        ]
        chart = Chart(x_or_y, across=[Series("them", "rule", [(1.0,)], "cuBLAS")], lanes=lanes)
    else:
        last = max(1, len(ratios) - 1)
        places = [(100 * number / last, ratio) for number, ratio in enumerate(ratios)]
        chart = Chart(
            Axis("shapes that do no better, %", 0.0, 100.0),
            x_or_y,
            [
                Series("them", "line", [(0.0, 1.0), (100.0, 1.0)], "cuBLAS"),
                Series("other", "line", [(0.0, mean), (100.0, mean)], "geometric mean", f"{mean:.3f}"),
                Series("ours", "line", places, "shapes, worst first"),
            ],
        )
    quantiles = (("worst", 0), ("10 %", 10), ("25 %", 25), ("median", 50), ("75 %", 75), ("90 %", 90))
    rows = [[name, f"{ratios[len(ratios) * percent // 100]:.4g}"] for name, percent in quantiles]
    rows += [["best", f"{ratios[-1]:.4g}"], ["geometric mean", f"{mean:.4g}"]]
    return Figure(title, says, [chart], ("shapes", "cuBLAS / ours"), rows)


def sustained_figure(timed: Sequence[Line]) -> Figure:
    """Return what held back to back for seconds, beside the short timings."""
    titles: dict[str, str] = {KERNEL: "ours", **{str(name): title for name, title in NAMES.items()}}
    lanes, rows, rates = [], [], []
    for line in timed:
        flops, problem = line.problem.flops, str(line.problem)
        for name, held in (line.sustained or {}).items():
            who, ours = titles.get(name, name), name == KERNEL
            rate, short_ms = held.gflops(flops) / 1000, (line.short_ms or {}).get(name)
            short = [] if short_ms is None else [flops / short_ms / 1e9]
            watts, efficiency = held.watts, held.gflops_per_watt(flops)
            series = [Series("ours" if ours else "other", "bar", [(0.0, rate)])]
            series += [Series("them", "tick", [(each,)]) for each in short]
            note = f"{rate:.1f} TFLOP/s{'' if watts is None else f', {watts:.0f} W'}"
            if name not in APART:
                lanes.append(Lane(f"{line.id} ours" if ours else who, series, note))
                rates += [rate, *short]
            cells = [(short[0] if short else None, ".2f"), (rate, ".2f"), (watts, ".0f")]
            cells += [(held.sm_mhz, ".0f"), (efficiency, ".1f"), (held.joules, ".4g")]
            numbers = ("-" if value is None else format(value, form) for value, form in cells)
            rows.append([line.id, problem, who, *numbers, ", ".join(held.throttle) or "-"])
    says = (
        "The bar is what each held back to back, over the second half of some seconds; the mark is the rate "
        "of its short timing. A bar that ends before its mark met a limit of the GPU, such as its power cap."
    )
    if len(lanes) < len(rows):
        says += " What computes in TF32, and is as inexact as that, is in the table alone."
    columns = (
        "shape",
        "problem",
        "who",
        "short",
        "TFLOP/s",
        "W",
        "SM MHz",
        "GFLOP/s per W",
        "J",
        "limited by",
    )
    if not 0 < len(lanes) <= MOST_LANES:
        says = "What each held back to back, over the second half of some seconds, beside its short timing."
        return Figure("For long", says, (), columns, rows)
    return Figure(
        "For long", says, [Chart(Axis("TFLOP/s", 0.0, 1.05 * max(rates)), lanes=lanes)], columns, rows
    )


def shapes_figure(lines: Sequence[Line]) -> Figure:
    """Return the table of the shapes, with bars for the ratio and the share of the floor."""
    shown = lines
    if len(lines) > MOST_ROWS:
        shown = sorted(lines, key=lambda line: line.vs_cublas or math.inf)[:MOST_ROWS]
    longest = max((line.vs_cublas or 0.0 for line in shown), default=0.0) or 1.0
    rows: list[list[Cell]] = []
    for line in shown:
        problem, ms = line.problem, line.median_ms
        if line.status != "timed" or ms is None:
            rows.append([line.id, str(problem), "-", "-", "-", "-", line.family, line.why or line.status])
            continue
        cells: Iterable[Cell] = (
            "-" if line.vs_cublas is None else Bar(f"{line.vs_cublas:.3f}", line.vs_cublas / longest),
            "-" if line.share_of_floor is None else Bar(f"{line.share_of_floor:.1%}", line.share_of_floor),
        )
        rate = f"{problem.flops / ms / 1e9:.2f}"
        rows.append([line.id, str(problem), f"{ms:.6g}", rate, *cells, line.family, line.config])
    says = (
        "A head sorts by its column. Bars are the ratio to cuBLAS, the longest that of the best, and the "
        "share of the floor."
    )
    if len(shown) < len(lines):
        says += f" Listed are the {len(shown):,} of {len(lines):,} shapes that do worst."
    last = "config, or why there is no time"
    columns = ("shape", "problem", "ms", "TFLOP/s", "vs cuBLAS", "of floor", "family", last)
    return Figure("The shapes", says, (), columns, rows)
