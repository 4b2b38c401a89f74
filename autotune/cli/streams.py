"""Standard streams: closed ones, control characters in what is written, and talk that need not arrive."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import click

from autotune.outside import printable


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
    stream = sys.stdout.stream if isinstance(sys.stdout, _Escaped) else sys.stdout
    return isinstance(stream, _Nowhere) and stream.used


@contextmanager
def escaped_streams() -> Iterator[None]:
    """Write control characters of names and files as escapes, which a terminal would obey.

    Characters that a stream's encoding lacks become escapes too.
    """
    before = sys.stdout, sys.stderr
    for stream in before:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.stdout, sys.stderr = _Escaped(before[0]), _EscapedTalk(before[1])
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for number, stream in enumerate(before, 1):
            _flush_or_drop(stream, number)


def raw_stderr() -> Any:
    """Return stderr for what draws with control characters of its own."""
    return sys.stderr.stream if isinstance(sys.stderr, _Escaped) else sys.stderr


def _flush_or_drop(stream: Any, number: int) -> None:
    """Write what a stream has buffered, or drop it: else the interpreter ends with a traceback."""
    try:
        stream.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)


class _Escaped:
    """A text stream that writes control characters, but for line breaks and tabs, as escapes.

    Where it cannot write, the error names it.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        shown = text
        if not text.isprintable():
            shown = "".join(each if each in "\n\t" else printable(each) for each in text)
        with self._named():
            self.stream.write(shown)
        return len(text)

    def flush(self) -> None:
        with self._named():
            self.stream.flush()

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OSError(error.errno, f"cannot be written ({error.strerror})", "standard output") from error

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class _EscapedTalk(_Escaped):
    """Standard error, whose reader or disk may be gone: what is said there ends no command."""

    @contextmanager
    def _named(self) -> Iterator[None]:
        with suppress(OSError):
            yield


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
