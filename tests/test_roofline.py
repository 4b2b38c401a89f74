"""The roofline drawing: marks lie where the numbers say."""

from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from autotune.errors import DeviceError
from autotune.report.chart import PLANE, WIDTH
from autotune.report.roofline import Point, draw, draw_accounts
from autotune.values.device import Device, named_device
from autotune.values.problem import Problem

SVG = "{http://www.w3.org/2000/svg}"
H200 = named_device("h200")


def marks(svg: str, style: str = "(?:disc|ring)") -> list[tuple[float, float]]:
    """Centres of the marks, in the order in which they are drawn."""
    found = re.findall(rf'class="ours {style}" d="M([\d.]+) ([\d.]+)m', svg)
    return [(float(x), float(y)) for x, y in found]


def height(svg: str) -> float:
    return float(ElementTree.fromstring(svg).attrib["viewBox"].split()[3])


def test_a_point_at_the_ridge_lies_on_the_knee():
    knee = H200.peak_gflops / H200.bandwidth_gbs
    svg = draw(H200, [Point("knee", knee, H200.peak_gflops, True)], "title")
    (line,) = re.findall('class="roof line" d="M([^"]*)"', svg)
    x, y = (float(part) for part in line.split("L")[1].split())
    assert marks(svg) == [(pytest.approx(x, abs=0.1), pytest.approx(y, abs=0.1))]


def test_faster_is_higher_and_more_intense_is_further_right():
    svg = draw(H200, [Point("a", 1, 100, True), Point("b", 10, 10000, False)], "title")
    (bx, by), (ax, ay) = marks(svg)  # what was measured is drawn last
    assert bx > ax
    assert by < ay
    assert all(0 < x < WIDTH and 0 < y < height(svg) for x, y in marks(svg))


def test_estimates_are_marked_and_names_escaped():
    svg = draw(H200, [Point("<&>", 5, 1000, False)], "a < b")
    assert "&lt;&amp;&gt;" in svg
    assert "hollow: estimated, not measured" in svg
    assert '>&lt;&amp;&gt;<tspan class="faint"> about 1 TFLOP/s</tspan>' in svg
    assert "hollow" not in draw(H200, [Point("x", 5, 1000, True)], "t")
    assert len(marks(svg, "ring")) == 1


def test_labels_do_not_overlap():
    svg = draw(H200, [Point(f"kernel {n}", 20, 50000 + n, True) for n in range(8)], "title")
    heights = [
        float(each.attrib["y"])
        for each in ElementTree.fromstring(svg).iter(f"{SVG}text")
        if (each.text or "").startswith("kernel")
    ]
    assert len(heights) == 8
    assert all(b - a >= 12 for a, b in pairwise(heights))


@pytest.mark.parametrize("count", [1, 12, 40])
def test_labels_of_slow_kernels_stay_on_the_drawing(count):
    svg = draw(H200, [Point(f"kernel {n}", 5, 100 + n, True) for n in range(count)], "title")
    root = ElementTree.fromstring(svg)
    labels = [each for each in root.iter(f"{SVG}text") if (each.text or "").startswith("kernel")]
    heights = [float(each.attrib["y"]) for each in labels]
    assert len(heights) == count
    assert all(b - a >= 12 for a, b in pairwise(heights))
    assert max(heights) < height(svg) - 50  # above the names of the axis
    assert min(heights) > 30


def test_kernels_fill_the_drawing():
    """Twelve kernels within a factor of 200 are not one heap in a corner."""
    rates = [300 * 1.6**n for n in range(12)]
    svg = draw(H200, [Point(str(n), 4 + 2 * n, rate, True) for n, rate in enumerate(rates)], "t")
    heights = sorted(y for _, y in marks(svg))
    assert max(heights) - min(heights) > 0.6 * PLANE
    assert all(b - a > 15 for a, b in pairwise(heights))


def test_axis_and_labels_have_one_unit():
    svg = draw(H200, [Point("x", 5, 20000, True)], "t")
    assert "GFLOP" not in svg.replace("TFLOP", "")
    grid = [each.text for each in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert {"20", "50", "100"} <= set(grid)
    assert re.search(r">x<tspan[^>]*> 20 TFLOP/s<", svg)


def test_what_has_no_rate_is_named_and_a_record_is_a_measurement():
    """Of the steps of a ladder without a GPU some have neither time nor estimate."""
    from dataclasses import replace as changed

    from autotune.report.explain import explain
    from autotune.space.space import Space

    problem, naive, sgemm = Problem(256, 256, 256), Space.load("naive"), Space.load("sgemm")
    unknown = explain(naive, next(iter(naive.presets.values())), problem, H200)
    config = sgemm.fitted(sgemm.presets["tiny_block"], problem, H200)
    estimated = explain(sgemm, config, problem, H200)
    recorded = changed(estimated, median_ms=0.01)
    named = [
        ("a", unknown, None),
        ("b", estimated, None),
        ("c", recorded, None),
        ("d", unknown, 5e3),
        ("e", None, None),
    ]
    svg = draw_accounts(named, problem, H200, "title")
    assert "neither measured nor estimated: a, e<" in svg
    told = re.findall(r">(\w)<tspan[^>]*> (about)?", svg)
    assert sorted(told) == [("b", "about"), ("c", ""), ("d", "")]
    assert (len(marks(svg, "ring")), len(marks(svg, "disc"))) == (1, 2)
    assert f"> {problem.flops / 0.01 / 1e9:.3g} TFLOP/s<" in svg


def test_a_device_of_unknown_speed_is_refused():
    unknown = Device("mystery", "9.0", 1, 1, 1, 1, 1, 1, 1)
    with pytest.raises(DeviceError, match="speed of mystery is unknown"):
        draw(unknown, [], "title")
