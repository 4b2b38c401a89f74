"""Tables on stdout that fit the terminal: columns are left out by their rank, and no number is ever cut."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import click

from autotune.outside import printable

PIPE_WIDTH = 160  # columns to which prose is wrapped where no terminal shows it
PAGE_WIDTH = 110  # columns of a paragraph at most
NARROWEST = 12  # columns that prose is wrapped to before whole columns are left out
GAP = "  "


@dataclass
class Table:
    """Rows under named columns.

    In a terminal that is too narrow, first prose is wrapped, then columns are left out, with a line that
    names them, and at last each row becomes lines of names and values. Where no terminal shows the table,
    no column is left out. A column without any text is not shown.

    Attributes:
        columns: Their names, the first the most important.
        drop: Columns that may be left out, the least important first.
        wrap: Columns of prose, which may take several lines.
        right: Columns of numbers, aligned on the right.
    """

    columns: Sequence[str]
    drop: Sequence[str] = ()
    wrap: Collection[str] = ()
    right: Collection[str] = ()
    rows: list[tuple[str, ...]] = field(default_factory=list)

    def add_row(self, *cells: str) -> None:
        """Add a row: one cell for each column."""
        assert len(cells) == len(self.columns), cells
        self.rows.append(tuple(map(printable, cells)))

    def echo(self) -> None:
        """Write the table to stdout, as wide as the terminal."""
        for line in self.lines(terminal_width()):
            click.echo(line)

    def lines(self, width: int | None) -> list[str]:
        """Lay the table out for so many columns; None is a pipe, which takes any width."""
        filled = [index for index in range(len(self.columns)) if any(cells[index] for cells in self.rows)]
        shown = filled or list(range(len(self.columns)))
        left_out: list[str] = []
        ranked = [] if width is None else list(self.drop)
        while (widths := self._widths(shown, width or PIPE_WIDTH)) is None and ranked:
            name = ranked.pop(0)
            if any(self.columns[index] == name for index in shown):
                shown = [index for index in shown if self.columns[index] != name]
                left_out.append(name)
        for name in reversed(left_out):  # what was wide may leave room for what is narrow
            more = sorted([*shown, *(index for index in filled if self.columns[index] == name)])
            if widths is not None and (wider := self._widths(more, width or PIPE_WIDTH)) is not None:
                shown, widths = more, wider
                left_out = [each for each in left_out if each != name]
        if widths is None and width is None:
            widths = [self._longest(index) for index in shown]
        if widths is None:
            return self._stacked(width or PIPE_WIDTH)
        lines = [*self._row(self.columns, shown, widths)]
        for cells in self.rows:
            lines += self._row(cells, shown, widths)
        if left_out:
            names = ", ".join(name for name in self.columns if name in left_out)
            note = f"not shown in {width} columns: {names}; --json has them"
            lines += textwrap.wrap(note, width or PIPE_WIDTH, initial_indent=" ", subsequent_indent=" ")
        return lines

    def _longest(self, index: int) -> int:
        return max(len(cells[index]) for cells in (tuple(self.columns), *self.rows))

    def _widths(self, shown: list[int], width: int) -> list[int] | None:
        """Return the columns' widths, or None if they do not fit even with prose wrapped."""
        widths = [self._longest(index) for index in shown]
        excess = 1 + sum(widths) + len(GAP) * (len(shown) - 1) - width
        while excess > 0:
            prose = [place for place, index in enumerate(shown) if widths[place] > self._least(index)]
            if not prose:
                return None
            widest = max(prose, key=lambda place: widths[place])
            second = max((widths[place] for place in prose if place != widest), default=0)
            least = max(self._least(shown[widest]), min(second, widths[widest] - 1))
            less = min(excess, widths[widest] - least)
            widths[widest] -= less
            excess -= less
        return widths

    def _least(self, index: int) -> int:
        """Return the width below which a column cannot go: that of its longest word if it is prose."""
        if self.columns[index] not in self.wrap:
            return self._longest(index)
        words = [word for cells in (tuple(self.columns), *self.rows) for word in cells[index].split()]
        return min(self._longest(index), max(NARROWEST, *map(len, words), 1))

    def _row(self, cells: Sequence[str], shown: list[int], widths: list[int]) -> list[str]:
        wrapped = [
            textwrap.wrap(cells[index], width, break_long_words=False, break_on_hyphens=False)
            if len(cells[index]) > width
            else [cells[index]]
            for index, width in zip(shown, widths, strict=True)
        ]
        lines = []
        for number in range(max(map(len, wrapped))):
            parts = []
            for part, index, width in zip(wrapped, shown, widths, strict=True):
                text = part[number] if number < len(part) else ""
                parts.append(text.rjust(width) if self.columns[index] in self.right else text.ljust(width))
            lines.append(f" {GAP.join(parts)}".rstrip())
        return lines

    def _stacked(self, width: int) -> list[str]:
        """Write each row as its first cell, and below it names and values, which are never parted."""
        lines = []
        for first, *cells in self.rows:
            name = self.columns[0]
            line = f" {name} {first}".rstrip() if name else f" {first}"
            pairs = [
                f"{name} {cell}".strip() for name, cell in zip(self.columns[1:], cells, strict=True) if cell
            ]
            lines.append(line)
            line = "  "
            for number, pair in enumerate(pairs):
                piece = f" {pair}{',' if number + 1 < len(pairs) else ''}"
                if line.strip() and len(line) + len(piece) > width:
                    lines.append(line)
                    line = "  "
                line += piece
            if line.strip():
                lines.append(line)
        return lines


def paragraph(text: str, indent: int = 4) -> None:
    """Write prose to stdout, its further lines indented, no wider than the terminal or a page."""
    width = min(PAGE_WIDTH, terminal_width() or PAGE_WIDTH)
    click.echo(
        textwrap.fill(
            text, width, subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False
        )
    )


def terminal_width() -> int | None:
    """Return the columns of the terminal that shows stdout, or of COLUMNS; None where neither is known."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal():
        return max(20, shutil.get_terminal_size().columns)
    return None
