"""Standard streams: those that were closed when the command began, and talk that need not arrive."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress

import click


def replace_closed() -> None:
    """Put the null device in the place of closed standard streams.

    Otherwise the next file that is opened, such as a log, gets the number of a stream, and what this process
    or its children write to the stream ends up in it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
            os.set_inheritable(number, True)
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115 -- for as long as the process lives
    if sys.stdout is None:
        sys.stdout = _Nowhere()
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def lost_output() -> bool:
    """Return whether something was written to standard output although it was closed."""
    return isinstance(sys.stdout, _Nowhere) and sys.stdout.used


def say(line: str) -> None:
    """Write a line to standard error, if that can still be written: its terminal or reader may be gone."""
    with suppress(OSError):
        click.echo(line, err=True)


class _Nowhere(io.TextIOBase):
    """A standard output that remembers whether anything was written."""

    used = False
    encoding = "utf-8"

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.used = self.used or bool(text)
        return len(text)
