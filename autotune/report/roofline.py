"""The roofline of a device with kernels on it, as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from autotune.model.account import ridge
from autotune.report.explain import Account
from autotune.values.device import Device
from autotune.values.problem import Math, Problem

WIDTH, HEIGHT = 860, 460  # the height grows with the labels
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 250, 44, 72
_LINE = 15  # height of a label
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#222}.t{font-size:15px;font-weight:600}.g{stroke:#ddd}"
    ".r{fill:none;stroke:#222;stroke-width:2}.m{fill:#0a7d45;stroke:#fff}.s{fill:#666}"
    ".e{fill:#fff;stroke:#0a7d45;stroke-width:2}"
)
_STEPS = (1, 2, 5, 10)  # of the grid, within a decade


@dataclass(frozen=True)
class Point:
    """One kernel on the drawing.

    Attributes:
        name: Label.
        intensity: FLOP per byte of global memory.
        gflops: Rate.
        measured: False draws a hollow mark: an estimate.
    """

    name: str
    intensity: float
    gflops: float
    measured: bool


def draw_accounts(
    accounts: Iterable[tuple[str, Account | None, float | None]], problem: Problem, device: Device, title: str
) -> str:
    """Draw the kernels of one problem on the roofline of a device, as measured, else as estimated.

    Args:
        accounts: Name, account and rate in GFLOP/s of each kernel; without a rate that of its record, else of
            its estimate. A kernel without any is named below the drawing.
        problem: What they compute.
        device: Where.
        title: Headline.

    Raises:
        DeviceError: The device's clock or bandwidth is unknown.
    """
    points, missing = [], []
    for name, account, rate in accounts:
        measured = rate if rate is not None or account is None else account.gflops
        estimated = None if account is None or not account.estimate_ms else account.estimate_ms
        if account is None or (measured is None and estimated is None):
            missing.append(name)
        elif measured is not None:
            points.append(Point(name, account.tile_intensity, measured, True))
        elif estimated is not None:
            points.append(Point(name, account.tile_intensity, problem.flops / estimated / 1e6, False))
    return draw(device, points, title, problem.math, missing)


def draw(
    device: Device,
    points: Sequence[Point],
    title: str,
    arithmetic: Math = "ffma",
    missing: Sequence[str] = (),
) -> str:
    """Draw the roofline of a device (peak of an arithmetic and memory bandwidth, log-log) with kernels on it.

    Args:
        device: Where.
        points: The kernels.
        title: Headline.
        arithmetic: Whose peak.
        missing: Kernels that have no place on it.

    Raises:
        DeviceError: The device's clock or bandwidth is unknown.
    """
    knee = ridge(device, arithmetic)
    peak, bandwidth = device.peak(arithmetic) / 1000, device.bandwidth_gbs / 1000
    intensities, rates = [knee], [peak]
    for point in points:
        intensities.append(point.intensity)
        rates.append(point.gflops / 1000)
    low_x, high_x = _step_below(min(intensities) / 1.5), _step_above(1.5 * max(intensities))
    low_y, high_y = _step_below(min(rates) / 1.5), _step_above(1.2 * max(rates))
    height = max(HEIGHT, _TOP + _BOTTOM + _LINE * len(points))

    def x(intensity: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * math.log(intensity / low_x) / math.log(high_x / low_x)

    def y(tflops: float) -> float:
        share = math.log(tflops / low_y) / math.log(high_y / low_y)
        return height - _BOTTOM - (height - _TOP - _BOTTOM) * share

    bottom, right = height - _BOTTOM, WIDTH - _RIGHT
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f'<style>{_STYLE}</style><rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text class="t" x="{_LEFT}" y="24">{escape(title)}</text>',
    ]
    for value in _grid(low_x, high_x):
        out.append(f'<line class="g" x1="{x(value):.1f}" x2="{x(value):.1f}" y1="{_TOP}" y2="{bottom}"/>')
        out.append(f'<text x="{x(value):.1f}" y="{bottom + 18}" text-anchor="middle">{value:g}</text>')
    for value in _grid(low_y, high_y):
        out.append(f'<line class="g" x1="{_LEFT}" x2="{right}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        out.append(f'<text x="{_LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>')
    middle = (_LEFT + right) / 2
    out.append(
        f'<text x="{middle:.0f}" y="{bottom + 36}" text-anchor="middle">FLOP per byte of global memory</text>'
    )
    turn = f"rotate(-90 18 {height / 2:.0f})"
    out.append(f'<text x="18" y="{height / 2:.0f}" transform="{turn}" text-anchor="middle">TFLOP/s</text>')
    first = max(low_x, low_y / bandwidth)  # where the slope enters the drawing
    roof = [(first, first * bandwidth), (knee, peak), (high_x, peak)]
    out.append(f'<polyline class="r" points="{" ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in roof)}"/>')
    out.append(
        f'<text class="s" x="{right}" y="{y(peak) - 8:.1f}" text-anchor="end">'
        f"{peak:.1f} TFLOP/s; {bandwidth:.2f} TB/s; ridge at {knee:.1f}</text>"
    )
    column = right + 14
    ordered = sorted(points, key=lambda point: -point.gflops)
    places = _apart([y(point.gflops / 1000) for point in ordered], bottom)
    for point, label in zip(ordered, places, strict=True):
        px, py = x(point.intensity), y(point.gflops / 1000)
        out.append(f'<line class="g" x1="{px:.1f}" y1="{py:.1f}" x2="{column - 3}" y2="{label:.1f}"/>')
    for point, label in zip(ordered, places, strict=True):  # marks lie above all lines
        px, py = x(point.intensity), y(point.gflops / 1000)
        mark, about = ("m", "") if point.measured else ("e", "about ")
        out.append(f'<circle class="{mark}" cx="{px:.1f}" cy="{py:.1f}" r="4.5"/>')
        out.append(
            f'<text x="{column}" y="{label + 4:.1f}">{escape(point.name)}'
            f'<tspan class="s"> {about}{point.gflops / 1000:.3g} TFLOP/s</tspan></text>'
        )
    notes = ["hollow: estimated, not measured"] if any(not point.measured for point in points) else []
    notes += [f"neither measured nor estimated: {', '.join(missing)}"] if missing else []
    out.append(f'<text class="s" x="{_LEFT}" y="{height - 12}">{escape("; ".join(notes))}</text>')
    return "\n".join([*out, "</svg>", ""])


def _apart(places: list[float], bottom: float) -> list[float]:
    """Move labels, ordered from the top, so that each is a line below the last, and none below the bottom."""
    placed: list[float] = []
    for place in places:
        placed.append(max(place, placed[-1] + _LINE) if placed else place)
    limit = bottom
    for number in reversed(range(len(placed))):
        placed[number] = min(placed[number], limit)
        limit = placed[number] - _LINE
    return placed


def _step_below(value: float) -> float:
    """Return the largest 1, 2 or 5 of a decade that is not above a value."""
    decade = 10.0 ** math.floor(math.log10(value))
    return max(step * decade for step in _STEPS if step * decade <= value * (1 + 1e-9))


def _step_above(value: float) -> float:
    """Return the smallest 1, 2 or 5 of a decade that is not below a value."""
    decade = 10.0 ** math.floor(math.log10(value))
    return min(step * decade for step in _STEPS if step * decade >= value * (1 - 1e-9))


def _grid(low: float, high: float) -> list[float]:
    """Return the lines of a grid: the decades, or each 1, 2 and 5 where there would be few."""
    steps = _STEPS[:1] if high / low > 2e3 else _STEPS[:3]
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    lines = [step * 10.0**decade for decade in decades for step in steps]
    return [line for line in lines if low * 0.999 <= line <= high * 1.001]
