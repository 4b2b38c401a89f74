"""Charts as SVG: series on a plane or in lanes, placed here and written by `pages/chart.svg.jinja`."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.outside import printable

if TYPE_CHECKING:
    import jinja2

PAGES = Path(__file__).with_name("pages")
WIDTH, PLANE = 800, 344  # the plane grows with its labels
_LEFT, _RIGHT, _TOP, _BOTTOM = 96, 240, 26, 44
_LANE, _LINE = 22, 16  # heights of a lane and of a label
_LETTER = 7  # width of a letter, about
_NOTE = 100  # characters of a line below
_STEPS = (1, 2, 5, 10)  # of an axis, within a decade

SHAPES = {  # how a mark at (x, y), reaching to another x, is drawn; top and bottom are those of the chart
    "dot": "M{x} {y}h0",
    "disc": "M{x} {y}m-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0-9 0z",
    "ring": "M{x} {y}m-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0-9 0z",
    "cross": "M{x} {y}m-4-4l8 8m0-8l-8 8",
    "tick": "M{x} {y}m0-6v12",
    "bar": "M{x} {y}m0-6H{to}v12H{x}z",
    "span": "M{x} {y}m0-4v8m0-4H{to}m0-4v8",
    "rule": "M{x} {top}V{bottom}",
    "band": "M{x} {top}H{to}V{bottom}H{x}z",
}


@dataclass(frozen=True)
class Axis:
    """What a direction of a chart shows.

    Attributes:
        label: What it counts, with the unit.
        low: Its least value; above 0 where it is logarithmic.
        high: Its greatest, above the least.
        log: Whether equal steps are equal ratios.
    """

    label: str
    low: float
    high: float
    log: bool = False

    @classmethod
    def around(cls, label: str, values: Iterable[float], *, log: bool = False, zero: bool = False) -> Axis:
        """Return an axis on which all values lie, with room beyond them."""
        found = list(values) or [1.0]
        low, high = min(found), max(found)
        if log:
            return cls(label, _step(low / 1.5, up=False), _step(1.2 * high, up=True), True)
        room = 0.06 * (high - low) or abs(high) / 10 or 1.0
        return cls(label, 0.0 if zero else low - room, high + room)

    def share(self, value: float) -> float:
        """Return where a value lies, 0 at the low end and 1 at the high one."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Return the values that are written beside it."""
        if self.log:
            steps = _STEPS[:1] if self.high / self.low > 2e3 else _STEPS[:3]
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            decades = range(first, last + 1, 1 + (last - first) // 8)
            lines = [step * 10.0**decade for decade in decades for step in steps]
            return [line for line in lines if self.low * 0.999 <= line <= self.high * 1.001]
        step = _step((self.high - self.low) / 6, up=True)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [float(f"{number * step:.6g}") for number in range(first, last + 1)]

    def text(self, tick: float) -> str:
        """Return what is written beside a tick: of many decades such as 1e8, not 1e+08 beside 100000."""
        if self.log and tick >= 1e5:
            return f"{tick:.0e}".replace("e+0", "e").replace("e+", "e")
        return f"{tick:g}"


@dataclass(frozen=True)
class Series:
    """Marks that mean one thing.

    Attributes:
        style: Class of the drawing: "ours", "them", "other", "bad", "roof" or "faint".
        shape: One of `SHAPES`, or "line".
        points: (x, y) on the plane, (x,) or (x, to) in a lane or across the chart.
        label: Written in the column at the right, beside the last point; above it for a rule.
        note: Behind the label, paler.
    """

    style: str
    shape: str
    points: Sequence[tuple[float, ...]]
    label: str = ""
    note: str = ""


@dataclass(frozen=True)
class Lane:
    """A row of a chart with marks along x; its note stands at the right."""

    name: str
    series: Sequence[Series]
    note: str = ""


@dataclass(frozen=True)
class Chart:
    """A chart: a plane of x and y, or none, and lanes below it.

    Attributes:
        x: The axis below.
        y: The axis at the left of the plane; None for a chart of lanes alone.
        series: On the plane, those drawn first below those that follow.
        across: Rules and bands over the whole height.
        lanes: From above.
        notes: Below all, in lines.
    """

    x: Axis
    y: Axis | None = None
    series: Sequence[Series] = ()
    across: Sequence[Series] = ()
    lanes: Sequence[Lane] = ()
    notes: Sequence[str] = ()

    def svg(self, says: str, title: str = "") -> str:
        """Return the drawing; with a title it is a file of its own, which carries its style.

        Args:
            says: What it shows, for those who do not see it.
            title: Headline.
        """
        template = environment().get_template("chart.svg.jinja")
        return template.render(**self._placed(24 if title else 0), says=says, title=title)

    def _placed(self, head: int) -> dict[str, Any]:
        """Return everything in the coordinates of the drawing, y downwards."""
        top = head + _TOP
        labelled = sorted((each for each in self.series if each.label), key=lambda each: -each.points[-1][1])
        plane = 0 if self.y is None else max(PLANE, _LINE * (len(labelled) + 1))
        floor = top + plane  # of the plane
        first = floor + (_LANE / 2 if plane and self.lanes else 0)  # below the lowest number of the plane
        bottom = first + _LANE * len(self.lanes)
        left = max(_LEFT, 24 + max((_LETTER * len(lane.name) for lane in self.lanes), default=0))
        right = WIDTH - _RIGHT

        def x(value: float) -> float:
            return round(left + (right - left) * self.x.share(value), 1)

        def y(value: float) -> float:
            assert self.y is not None, "points with a y need an axis"
            return round(floor - plane * self.y.share(value), 1)

        def drawn(series: Series, level: float | None = None) -> dict[str, str]:
            if series.shape == "line":
                path = "M" + "L".join(f"{x(point[0])} {y(point[1])}" for point in series.points)
            else:
                form = SHAPES[series.shape]
                path = "".join(
                    form.format(
                        x=x(point[0]),
                        to=x(point[-1]),
                        y=y(point[1]) if "{y}" in form and level is None else level,
                        top=top,
                        bottom=bottom,
                    )
                    for point in series.points
                )
            told = f"{series.label} {series.note}".strip()  # where the pointer rests on it
            return {"style": f"{series.style} {series.shape}", "d": path, "told": told}

        places = _apart([y(each.points[-1][1]) for each in labelled], floor)
        notes = [line for note in self.notes for line in textwrap.wrap(note, _NOTE)]
        lanes = [(first + _LANE * number + _LANE / 2, lane) for number, lane in enumerate(self.lanes)]
        return {
            "width": WIDTH,
            "height": bottom + _BOTTOM + _LINE * len(notes),
            **{"left": left, "right": right, "top": top, "floor": floor, "bottom": bottom},
            "x_label": self.x.label,
            "y_label": "" if self.y is None else self.y.label,
            "x_ticks": [(x(value), self.x.text(value)) for value in self.x.ticks()],
            "y_ticks": [] if self.y is None else [(y(value), self.y.text(value)) for value in self.y.ticks()],
            "across": [drawn(each, 0) for each in self.across],
            "heads": [(x(each.points[0][0]), each.label) for each in self.across if each.label],
            "series": [drawn(each) for each in self.series],
            "labels": [
                (x(each.points[-1][0]), y(each.points[-1][1]), place, each.label, each.note)
                for each, place in zip(labelled, places, strict=True)
            ],
            "lanes": [
                (level, lane.name, lane.note, [drawn(each, level) for each in lane.series])
                for level, lane in lanes
            ],
            "notes": [(bottom + _BOTTOM + _LINE * number, text) for number, text in enumerate(notes)],
        }


@cache
def environment() -> jinja2.Environment:
    """Return what renders the pages: everything that is written is escaped, and printable."""
    import jinja2
    from markupsafe import Markup

    def written(value: object) -> object:
        return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(PAGES),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        finalize=written,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.globals["style"] = {
        name: Markup((PAGES / f"{name}.css").read_text("utf-8")) for name in ("chart", "page")
    }
    found.globals["script"] = Markup((PAGES / "page.js").read_text("utf-8"))
    return found


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


def _step(value: float, *, up: bool) -> float:
    """Return the 1, 2 or 5 of a decade that is next to a value, above or below it."""
    decade = 10.0 ** math.floor(math.log10(value))
    if up:
        return min(step * decade for step in _STEPS if step * decade >= value * (1 - 1e-9))
    return max(step * decade for step in _STEPS if step * decade <= value * (1 + 1e-9))
