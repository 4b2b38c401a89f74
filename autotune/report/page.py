"""A page of figures as one HTML file that needs nothing else, written by `pages/page.html.jinja`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autotune import __version__
from autotune.report.chart import Chart, environment


@dataclass(frozen=True)
class Bar:
    """A number of a table with a bar behind it.

    Attributes:
        text: As it is written.
        share: Length of the bar, at most 1.
    """

    text: str
    share: float


Cell = str | Bar


@dataclass(frozen=True)
class Figure:
    """A part of a page: what to see, the pictures of it, and their numbers.

    Attributes:
        title: Its heading.
        says: One sentence that says what to see, or why there is nothing to be seen.
        charts: The pictures.
        columns: Heads of the table.
        rows: Of the table, as long as the heads.
        lines: Text as it stands, such as source, one line each.
    """

    title: str
    says: str
    charts: Sequence[Chart] = ()
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[Cell]] = ()
    lines: Sequence[str] = ()


def page(title: str, summary: Sequence[str], figures: Sequence[Figure]) -> str:
    """Return a page as HTML.

    Args:
        title: Headline.
        summary: Lines below it.
        figures: In their order.
    """
    template = environment().get_template("page.html.jinja")
    return template.render(title=title, summary=summary, figures=figures, version=__version__)
