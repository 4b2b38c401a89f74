"""The roofline of a device with kernels on it, as a chart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autotune.model.account import problem_intensity, ridge
from autotune.report.chart import Axis, Chart, Series
from autotune.report.explain import Account
from autotune.values.device import Device
from autotune.values.problem import Math, Problem

SAYS = "Rate over FLOP per byte of global memory, below the peak and the bandwidth of the device"


@dataclass(frozen=True)
class Point:
    """One kernel on the drawing.

    Attributes:
        name: Label.
        intensity: FLOP per byte of global memory, of its tile; of the problem where reuse in L2, which a tile
            does not count, lets it be faster than the bandwidth allows its tile.
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
    points, missing = placed(accounts, problem, device)
    return draw(device, points, title, problem.math, missing)


def placed(
    accounts: Iterable[tuple[str, Account | None, float | None]], problem: Problem, device: Device
) -> tuple[list[Point], list[str]]:
    """Return the kernels that have a rate, and the names of those that have none: see `draw_accounts`."""
    points, missing = [], []
    for name, account, rate in accounts:
        measured = rate if rate is not None or account is None else account.gflops
        estimated = None if account is None or not account.estimate_ms else account.estimate_ms
        if account is None or (measured is None and estimated is None):
            missing.append(name)
            continue
        gflops = measured if measured is not None else problem.flops / (estimated or 1) / 1e6
        below = gflops <= account.tile_intensity * device.bandwidth_gbs
        intensity = account.tile_intensity if below else problem_intensity(problem)
        points.append(Point(name, intensity, gflops, measured is not None))
    return points, missing


def draw(
    device: Device,
    points: Sequence[Point],
    title: str,
    arithmetic: Math = "ffma",
    missing: Sequence[str] = (),
) -> str:
    """Draw the roofline as a file of its own: see `roofline`."""
    return roofline(device, points, arithmetic, missing).svg(SAYS, title)


def roofline(
    device: Device,
    points: Sequence[Point],
    arithmetic: Math = "ffma",
    missing: Sequence[str] = (),
    ceilings: Sequence[tuple[str, float]] = (),
) -> Chart:
    """Return the roofline of a device (peak of an arithmetic and memory bandwidth, log-log), kernels on it.

    Args:
        device: Where.
        points: The kernels.
        arithmetic: Whose peak.
        missing: Kernels that have no place on it.
        ceilings: Other levels, such as cuBLAS or what power allows: the name of each, and GFLOP/s.

    Raises:
        DeviceError: The device's clock or bandwidth is unknown.
    """
    knee = ridge(device, arithmetic)
    peak, bandwidth = device.peak(arithmetic) / 1000, device.bandwidth_gbs / 1000
    x = Axis.around(
        "FLOP per byte of global memory",
        [knee, *(1.25 * point.intensity for point in points), *(point.intensity for point in points)],
        log=True,
    )
    rates = [*(point.gflops for point in points), *(gflops for _, gflops in ceilings)]
    y = Axis.around("TFLOP/s", [peak, *(rate / 1000 for rate in rates)], log=True)
    first = max(x.low, y.low / bandwidth)  # where the slope enters the drawing
    series = [Series("roof", "line", [(first, first * bandwidth), (knee, peak), (x.high, peak)])]
    for name, gflops in ceilings:
        rate = gflops / 1000
        begin = max(x.low, rate / bandwidth)
        series.append(Series("them", "line", [(begin, rate), (x.high, rate)], name, f"{rate:.3g} TFLOP/s"))
    series += [
        Series(
            *("ours", "disc" if point.measured else "ring", [(point.intensity, point.gflops / 1000)]),
            *(point.name, f"{'' if point.measured else 'about '}{point.gflops / 1000:.3g} TFLOP/s"),
        )
        for point in sorted(points, key=lambda point: point.measured)  # what was measured lies above
    ]
    notes = [f"roof: {peak:.1f} TFLOP/s, {bandwidth:.2f} TB/s, ridge at {knee:.1f}"]
    notes += ["hollow: estimated, not measured"] if any(not point.measured for point in points) else []
    notes += [f"neither measured nor estimated: {', '.join(missing)}"] if missing else []
    return Chart(x, y, series, notes=notes)
