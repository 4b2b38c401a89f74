"""Charts: where marks, labels and lanes lie, and which numbers an axis has."""

from __future__ import annotations

import re

import pytest

from autotune.report.chart import Axis, Chart, Lane, Series


@pytest.mark.parametrize(
    ("low", "high", "log", "ticks"),
    [
        (0, 48.7, False, [0, 10, 20, 30, 40]),
        (0.92, 0.976, False, [0.92, 0.93, 0.94, 0.95, 0.96, 0.97]),
        (0.5, 5, True, [0.5, 1, 2, 5]),
        (1, 1e14, True, [1e0, 1e2, 1e4, 1e6, 1e8, 1e10, 1e12, 1e14]),
    ],
)
def test_an_axis_has_round_numbers_and_few(low, high, log, ticks):
    assert Axis("", low, high, log).ticks() == pytest.approx(ticks)


@pytest.mark.parametrize("values", [[], [3.0], [0.0, 0.0], [1e-9, 1e9]])
def test_any_values_have_an_axis_around_them(values):
    axis = Axis.around("", values)
    assert all(0 <= axis.share(value) <= 1 for value in values)
    assert axis.ticks()


def test_lanes_lie_below_the_plane_and_its_numbers():
    y = Axis("y", 0.0, 10.0)
    chart = Chart(Axis("x", 0.0, 1.0), y, lanes=[Lane("lane", [Series("bad", "cross", [(0.5,)])], "note")])
    svg = chart.svg("says", "title")
    zero = float(re.search(r'y="([\d.]+)" text-anchor="end">0<', svg)[1])
    lane = float(re.search(r'y="([\d.]+)" text-anchor="end">lane<', svg)[1])
    cross = float(re.search(r'class="bad cross" d="M[\d.]+ ([\d.]+)m', svg)[1])
    assert lane - zero > 15
    assert cross == pytest.approx(lane - 4)


def test_ticks_of_many_decades_are_short():
    axis = Axis("candidates", 0.5, 3e14, log=True)
    assert [axis.text(tick) for tick in axis.ticks()] == ["100", "1e5", "1e8", "1e11", "1e14"]
    assert Axis("candidates", 0, 2e5).text(150_000) == "150000"
