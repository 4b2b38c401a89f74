"""The progress of long work on stderr: on a terminal a live table or line, else short lines one at a time."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from autotune.cli.streams import say
from autotune.outside import printable
from autotune.tuning.meter import Meter, span

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live
    from rich.text import Text

    from autotune.tuning.campaign import Tuned
    from autotune.tuning.progress import Progress

LOG_EVERY_S = 10.0


def watcher(shapes: int = 1, ends: float = math.inf) -> Board | Log:
    """Return the live table on a terminal, else what writes lines.

    Args:
        shapes: To be searched, one after the other.
        ends: When the budget of all of them ends (`time.monotonic`).
    """
    return Board(shapes, ends) if sys.stderr.isatty() else Log()


def meter() -> Line:
    """Return what shows counted work: a live line on a terminal, else a line now and then."""
    return Line(sys.stderr.isatty())


def counts(outcomes: Mapping[str, int]) -> str:
    """Return outcomes in words: "120 measured, 2 compile"."""
    return ", ".join(f"{count} {kind}" for kind, count in outcomes.items() if count)


def _best(progress: Progress) -> str:
    """Describe the best candidate in a few words; its config's name has some 250 letters."""
    best = progress.best
    if best is None:
        return "none yet"
    if best.median_ms is None:
        return f"{best.label}, by estimate"
    rate = progress.problem.flops / best.median_ms / 1e9
    return f"{best.median_ms:.6g} ms, {rate:.2f} TFLOP/s, {best.label}"


def _told(tuned: Tuned) -> str:
    record = tuned.record
    if record is None or record.timing is None:
        return f"{tuned.shape.id}: {tuned.why}"
    compared = "" if record.vs_cublas is None else f", {record.vs_cublas:.3f} x cuBLAS"
    state = "nothing improves any more" if tuned.settled else "may improve"
    return f"{tuned.shape.id}: {record.timing.median_ms:.5g} ms{compared}, {record.search.seen} seen, {state}"


def _left(progress: Progress) -> str:
    """Return how long a search may still take, in words; "" where nobody knows."""
    budget = progress.budget
    left = budget.seconds - progress.seconds
    if budget.evaluations is not None:
        left = (budget.evaluations - progress.seen) / progress.rate if progress.rate else math.inf
    return f", {span(left)} left" if 0 < left < math.inf else ""


class Line(Meter):
    """One line below all that is said, redrawn on a terminal; elsewhere a line each `LOG_EVERY_S` at most."""

    def __init__(self, live: bool) -> None:
        super().__init__()
        self._last = time.monotonic()
        self._live: Live | None = _live(self._drawn) if live else None

    def __enter__(self) -> Line:
        if self._live is not None:
            self._live.__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        if self._live is not None:
            with suppress(OSError):  # the terminal is gone
                self._live.__exit__(*details)

    def say(self, line: str) -> None:
        """Write a line that stays."""
        self._last = time.monotonic()
        if self._live is None:
            say(line)
        else:
            with suppress(OSError):
                self._live.console.print(printable(line), markup=False, highlight=False, soft_wrap=True)

    def step(self) -> None:
        """Count a step, and give a sign of life if nothing was written for a while."""
        super().step()
        if self._live is None and time.monotonic() - self._last >= LOG_EVERY_S:
            self.say(self.text())

    def _drawn(self) -> Text:
        from rich.text import Text

        return Text(printable(self.text()) if self.stage else "", no_wrap=True, overflow="ellipsis")


def _live(drawn: Callable[[], RenderableType] | None = None) -> Live:
    """Return what draws on the terminal of stderr, and leaves nothing of it there."""
    from rich.console import Console
    from rich.live import Live

    from autotune.cli.streams import raw_stderr

    console = Console(file=raw_stderr())
    return Live(console=console, get_renderable=drawn, refresh_per_second=8, transient=True)


class Log:
    """Plain lines on stderr: every stage, every new best, what the user should know, and a sign of life."""

    def __init__(self) -> None:
        self._stage = ""
        self._legal = 0
        self._notes = 0
        self._best: object = None
        self._last = 0.0

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def watch(self, progress: Progress) -> None:
        """Write a line if something is new, or nothing was written for a while."""
        if progress.device is None:
            return
        now = time.monotonic()
        for note in progress.notes[self._notes :]:
            self._say(note)
        self._notes = len(progress.notes)
        if progress.stage != self._stage:
            legal = f", {progress.legal} legal candidates" if progress.legal and not self._legal else ""
            self._stage, self._legal = progress.stage, progress.legal
            self._say(f"{progress.problem}, {progress.device.name}: {self._stage}{legal}")
        elif progress.best is not self._best or now - self._last >= LOG_EVERY_S:
            self._best = progress.best
            found = f"{counts(progress.outcomes)}; best {_best(progress)}"
            self._say(f"{progress.seconds:6.1f} s  {found}")

    def tell(self, tuned: Tuned) -> None:
        """Write the outcome of a shape of a suite."""
        self._say(_told(tuned))
        self._best, self._legal, self._notes = None, 0, 0  # the next shape has a progress of its own

    def _say(self, line: str) -> None:
        self._last = time.monotonic()
        say(line)


class Board:
    """A live table on a terminal."""

    def __init__(self, shapes: int, ends: float) -> None:
        self._live = _live()
        self._shapes, self._ends = shapes, ends
        self._told: set[str] = set()
        self._stage = ""
        self._updated = 0.0
        self._notes: list[str] = []

    def __enter__(self) -> Board:
        self._live.__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        with suppress(OSError):  # the terminal is gone
            self._live.__exit__(*details)
        for note in self._notes:
            say(note)

    def tell(self, tuned: Tuned) -> None:
        """Write the outcome of a shape of a suite, above the table."""
        self._told.add(tuned.shape.id)
        with suppress(OSError):
            self._live.console.print(printable(_told(tuned)), markup=False, highlight=False)

    def watch(self, progress: Progress) -> None:
        """Redraw, at most eight times a second."""
        now = time.monotonic()
        self._notes = progress.notes
        if now - self._updated < 0.125 and progress.stage == self._stage:
            return
        self._stage, self._updated = progress.stage, now
        self._live.update(self.drawn(progress))

    def drawn(self, progress: Progress) -> RenderableType:
        """Return the table."""
        from rich.table import Table

        table = Table.grid(padding=(0, 2))
        where = "" if progress.device is None else f", {printable(progress.device.name)}"
        table.add_row("[bold]problem", f"{progress.problem}{where}")
        spent = f"{progress.seconds:.0f} s of {progress.budget}{_left(progress)}"
        table.add_row("[bold]stage", f"{progress.stage}, {spent}")
        outcomes = counts(progress.outcomes)
        rate = f"{progress.rate:.1f} per second" + (
            f", {progress.resumed} before" if progress.resumed else ""
        )
        table.add_row("[bold]seen", f"{outcomes or '-'} of {progress.legal} legal ({rate})")
        table.add_row("[bold]best", _best(progress))
        if self._shapes > 1:
            left = max(0.0, self._ends - time.monotonic())
            told = f", {span(left)} left for all" if left < math.inf else ""
            table.add_row("[bold]shapes", f"{len(self._told)} of {self._shapes} done{told}")
        return table
