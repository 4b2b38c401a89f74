"""Turns rows into tables on stdout; text is shown as it is, brackets and colons too."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PIPE_WIDTH = 160  # columns of a table that no terminal shows


def make_console() -> Console:
    """Make a console on stdout, as wide as the terminal or `PIPE_WIDTH`."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return Console(width=width, markup=False, emoji=False, highlight=False)


def make_table(*columns: str) -> Table:
    """Make an empty table."""
    from rich.table import Table

    return Table(*columns, box=None, header_style="bold")
