"""The roofline of a device with kernels on it, as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from autotune.model.account import ridge
from autotune.values.device import Device
from autotune.values.problem import Math

WIDTH, HEIGHT = 760, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 150, 44, 56
_LINE = 14  # height of a label
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#222}.t{font-size:15px;font-weight:600}.g{stroke:#ddd}"
    ".r{fill:none;stroke:#222;stroke-width:2}.m{fill:#0a7d45}.s{fill:#666}"
    ".e{fill:#fff;stroke:#0a7d45;stroke-width:2}"
)


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


def draw(device: Device, points: Sequence[Point], title: str, arithmetic: Math = "ffma") -> str:
    """Draw the roofline of a device (peak of an arithmetic and memory bandwidth, log-log) with kernels on it.

    Raises:
        DeviceError: The device's clock or bandwidth is unknown.
    """
    knee, peak = ridge(device, arithmetic), device.peak(arithmetic)
    low_x = 10 ** math.floor(math.log10(min([0.2, *(point.intensity for point in points)])))
    high_x = 10 ** math.ceil(math.log10(max([4 * knee, *(point.intensity for point in points)])))
    low_y = 10 ** math.floor(
        math.log10(min([low_x * device.bandwidth_gbs, *(point.gflops for point in points)]))
    )
    high_y = 10 ** math.ceil(math.log10(peak))

    def x(intensity: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * math.log(intensity / low_x) / math.log(high_x / low_x)

    def y(gflops: float) -> float:
        return (
            HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * math.log(gflops / low_y) / math.log(high_y / low_y)
        )

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f'<style>{_STYLE}</style><rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text class="t" x="{_LEFT}" y="24">{escape(title)}</text>',
    ]
    for value in _decades(low_x, high_x):
        out.append(
            f'<line class="g" x1="{x(value):.1f}" x2="{x(value):.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>'
        )
        out.append(
            f'<text x="{x(value):.1f}" y="{HEIGHT - _BOTTOM + 18}" text-anchor="middle">{value:g}</text>'
        )
    for value in _decades(low_y, high_y):
        out.append(
            f'<line class="g" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
        )
        out.append(f'<text x="{_LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>')
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    out.append(
        f'<text x="{middle:.0f}" y="{HEIGHT - 14}" text-anchor="middle">FLOP per byte of global memory</text>'
    )
    turn = f"rotate(-90 18 {HEIGHT / 2:.0f})"
    out.append(f'<text x="18" y="{HEIGHT / 2:.0f}" transform="{turn}" text-anchor="middle">GFLOP/s</text>')
    roof = [(low_x, low_x * device.bandwidth_gbs), (knee, peak), (high_x, peak)]
    out.append(f'<polyline class="r" points="{" ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in roof)}"/>')
    out.append(
        f'<text class="s" x="{WIDTH - _RIGHT}" y="{y(peak) - 8:.1f}" text-anchor="end">'
        f"{peak / 1000:.1f} TFLOP/s; {device.bandwidth_gbs / 1000:.2f} TB/s; ridge at {knee:.1f}</text>"
    )
    column, below = WIDTH - _RIGHT + 14, -math.inf  # of labels: fastest first, none over another
    for point in sorted(points, key=lambda point: -point.gflops):
        mark, px, py = "m" if point.measured else "e", x(point.intensity), y(point.gflops)
        below = max(below + _LINE, py)
        out.append(f'<line class="g" x1="{px:.1f}" y1="{py:.1f}" x2="{column - 3}" y2="{below:.1f}"/>')
        out.append(f'<circle class="{mark}" cx="{px:.1f}" cy="{py:.1f}" r="5"/>')
        out.append(f'<text x="{column}" y="{below + 4:.1f}">{escape(point.name)}</text>')
    if any(not point.measured for point in points):
        out.append(f'<text class="s" x="{_LEFT}" y="{HEIGHT - 14}">hollow: estimated</text>')
    return "\n".join([*out, "</svg>", ""])


def _decades(low: float, high: float) -> list[float]:
    return [10.0**power for power in range(round(math.log10(low)), round(math.log10(high)) + 1)]
