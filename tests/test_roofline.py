"""The roofline drawing: marks lie where the numbers say."""

from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from autotune.errors import DeviceError
from autotune.report.roofline import HEIGHT, WIDTH, Point, draw
from autotune.values.device import Device, named_device

SVG = "{http://www.w3.org/2000/svg}"
H200 = named_device("h200")


def circles(svg: str) -> list[tuple[float, float]]:
    return [
        (float(each.attrib["cx"]), float(each.attrib["cy"]))
        for each in ElementTree.fromstring(svg).iter(f"{SVG}circle")
    ]


def test_a_point_at_the_ridge_lies_on_the_knee():
    knee = H200.peak_gflops / H200.bandwidth_gbs
    svg = draw(H200, [Point("knee", knee, H200.peak_gflops, True)], "title")
    (line,) = ElementTree.fromstring(svg).iter(f"{SVG}polyline")
    x, y = (float(part) for part in line.attrib["points"].split()[1].split(","))
    assert circles(svg) == [(pytest.approx(x, abs=0.1), pytest.approx(y, abs=0.1))]


def test_faster_is_higher_and_more_intense_is_further_right():
    svg = draw(H200, [Point("a", 1, 100, True), Point("b", 10, 10000, False)], "title")
    (bx, by), (ax, ay) = circles(svg)  # the faster first
    assert bx > ax
    assert by < ay
    assert all(0 < x < WIDTH and 0 < y < HEIGHT for x, y in circles(svg))


def test_estimates_are_marked_and_names_escaped():
    svg = draw(H200, [Point("<&>", 5, 1000, False)], "a < b")
    assert "&lt;&amp;&gt;" in svg
    assert "hollow: estimated" in svg
    assert "hollow" not in draw(H200, [Point("x", 5, 1000, True)], "t")
    assert len(re.findall('class="e"', svg)) == 1


def test_labels_do_not_overlap():
    svg = draw(H200, [Point(f"kernel {n}", 20, 50000 + n, True) for n in range(8)], "title")
    heights = [
        float(each.attrib["y"])
        for each in ElementTree.fromstring(svg).iter(f"{SVG}text")
        if (each.text or "").startswith("kernel")
    ]
    assert len(heights) == 8
    assert all(b - a >= 12 for a, b in pairwise(heights))


def test_a_device_of_unknown_speed_is_refused():
    unknown = Device("mystery", "9.0", 1, 1, 1, 1, 1, 1, 1)
    with pytest.raises(DeviceError, match="speed of mystery is unknown"):
        draw(unknown, [], "title")
