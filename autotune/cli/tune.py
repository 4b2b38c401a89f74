"""``autotune tune``: search, watch, report."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autotune.cli.options import cache_option, json_option, problem_options, space_option, target_options
from autotune.device import Device, has_gpu, named_device
from autotune.errors import UsageError
from autotune.problem import Problem

if TYPE_CHECKING:
    from autotune.progress import Progress
    from autotune.records.schema import Record

LOG_EVERY_S = 10.0


@click.command()
@problem_options()
@click.option("--budget", help="Time (60s, 5m) or candidates (300); default: 60s, 45s without a GPU.")
@space_option
@click.option("--strategy", help="tpe (the default), random or exhaustive.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the search's random choices.")
@target_options
@click.option(
    "--workers",
    type=click.IntRange(1, 256),
    help="Compiling processes; default: all cores but the GPU's one.",
)
@click.option("--cold", is_flag=True, help="Time with operands that are not in the L2 cache.")
@cache_option
@json_option
def command(
    problem: Problem,
    budget: str | None,
    space_name: str,
    strategy: str | None,
    seed: int,
    ordinal: int | None,
    target: str | None,
    workers: int | None,
    cold: bool,
    root: Path | None,
    as_json: bool,
) -> None:
    """Search for the fastest kernel of a problem, verify it, compare it with cuBLAS, and store it.

    With --target, or where there is no GPU, nothing is measured: the kernel is chosen by a static estimate of
    candidates compiled for that GPU, proven right in a simulator, and stored as estimated.
    """
    from autotune.foresight import BUDGET, foresee
    from autotune.search import require_strategy
    from autotune.space import Space
    from autotune.tuner import tune

    space = Space.load(space_name)
    require_strategy("tpe" if strategy is None else strategy)
    absent, note = _absent(ordinal, target)
    if absent is not None and (strategy or cold):
        option, why = "--strategy" if strategy else "--cold", "with --target" if target else "without a GPU"
        raise UsageError(f"{option} is for measuring, and nothing is measured {why}: leave it out")
    board = Board() if sys.stderr.isatty() else Log()
    started = time.monotonic()
    try:
        with board:
            if absent is not None:
                record = foresee(
                    problem,
                    absent,
                    space=space,
                    budget=BUDGET if budget is None else budget,
                    seed=seed,
                    workers=workers,
                    root=root,
                    watch=board.watch,
                )
            else:
                record = tune(
                    problem,
                    space=space,
                    budget="60s" if budget is None else budget,
                    seed=seed,
                    strategy=strategy or "tpe",
                    ordinal=ordinal or 0,
                    workers=workers,
                    cold=cold,
                    root=root,
                    watch=board.watch,
                )
    except KeyboardInterrupt:
        click.echo("what became of each candidate so far is kept in the trials file", err=True)
        raise
    from autotune.records.files import find, record_path, to_json

    if as_json:
        click.echo(to_json(record))
    else:
        click.echo(summary(record))
        path = record_path(
            record.device, record.family, record.problem, root=root, estimated=absent is not None
        )
        click.echo(f"stored in {path} after {time.monotonic() - started:.1f} s")
    if note:
        click.echo(note, err=True)
    if absent is not None and find(absent, record.family, problem, root=root) is not None:
        click.echo("a measured record of this problem is stored too: it is the one that is served", err=True)


def _absent(ordinal: int | None, target: str | None) -> tuple[Device | None, str]:
    """Choose the GPU to foresee for, None to measure on one here; and what to tell behind the answer."""
    if target is not None:
        if ordinal is not None:
            raise UsageError("--device is a GPU here and --target one of the table: give one of them")
        return named_device(target), ""
    if ordinal is not None or has_gpu():
        return None, ""
    return named_device("h200"), "no GPU here: this is for an NVIDIA H200 (see --target)"


def summary(record: Record) -> str:
    """Say in a few lines what was chosen, how fast and how sure that is, and how it was found."""
    from autotune.space import Config

    timing, search = record.timing, record.search
    needs, launch, verified = record.resources, record.launch, record.verification
    rate = search.seen / max(search.seconds, 1e-9)
    config = [
        f"  config    {Config(record.config).id}",
        f"  needs     {needs.registers} registers, {needs.spill_bytes} bytes spilled, "
        f"{launch.shared_bytes + needs.shared_bytes} bytes of shared memory, "
        f"{launch.block[0]} threads in {launch.grid[0]} blocks",
    ]
    found = [
        f"  verified  relative error {verified.error:.2g} (bound {verified.bound:.2g}): {verified.inputs}",
        f"  search    {search.strategy}, {search.seen} of {search.legal} candidates "
        f"in {search.seconds:.1f} s ({rate:.1f} per second): {_counts(search.outcomes)}",
    ]
    if timing is None or record.gflops is None:
        head = f"{record.problem} for {record.device.name}: estimated, compiled and simulated"
        command = f"autotune tune {record.problem.cli_flags()}"
        last = f"  missing   nothing was measured: run '{command}' on a machine with this GPU"
        return "\n".join([head, *config, *found, last])
    compared = "; cuBLAS is not installed, so not compared"
    if record.cublas and record.vs_cublas:
        compared = f", {record.vs_cublas:.3f} x cuBLAS ({record.cublas.median_ms:.6g} ms)"
    low, _, high = timing.quantiles
    lines = [
        f"{record.problem} on {record.device.name}: {timing.median_ms:.6g} ms, "
        f"{record.gflops / 1000:.2f} TFLOP/s{compared}",
        *config,
        f"  timing    10-90 % of {timing.repeats} samples: {low:.6g} to {high:.6g} ms, {timing.l2} L2, "
        f"{timing.method}{', noisy' if timing.noisy else ''}",
        *found,
    ]
    ties = sum(each.tied for each in record.finalists[1:])
    if ties:
        others = len(record.finalists) - 1
        lines.append(f"  ties      {ties} of {others} other finalists cannot be told from the winner")
    return "\n".join(lines)


def _counts(outcomes: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in outcomes.items())


def _best(progress: Progress) -> str:
    best = progress.best
    if best is None:
        return "none yet"
    if best.median_ms is None:
        return f"{best.config.id}, by estimate"
    rate = progress.problem.flops / best.median_ms / 1e9
    return f"{best.median_ms:.6g} ms, {rate:.2f} TFLOP/s, {best.config.id}"


class Log:
    """Plain lines on stderr: every stage, every new best, and a sign of life."""

    def __init__(self) -> None:
        self._stage = ""
        self._best: object = None
        self._last = 0.0

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def watch(self, progress: Progress) -> None:
        """Write a line if there is something to say."""
        if progress.device is None:
            return
        now = time.monotonic()
        if progress.stage != self._stage:
            legal = "" if self._stage else f", {progress.legal} legal candidates"
            self._stage = progress.stage
            self._say(f"{progress.problem}, {progress.device.name}: {self._stage}{legal}")
        elif progress.best is not self._best or now - self._last >= LOG_EVERY_S:
            self._best = progress.best
            found = f"{_counts(progress.outcomes)}; best {_best(progress)}"
            self._say(f"{progress.seconds:6.1f} s  {found}")

    def _say(self, line: str) -> None:
        self._last = time.monotonic()
        click.echo(line, err=True)


class Board:
    """A live table on a terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._live = Live(console=Console(stderr=True), refresh_per_second=8, transient=True)
        self._stage = ""
        self._updated = 0.0

    def __enter__(self) -> Board:
        self._live.__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        self._live.__exit__(*details)

    def watch(self, progress: Progress) -> None:
        """Redraw, at most eight times a second."""
        now = time.monotonic()
        if now - self._updated < 0.125 and progress.stage == self._stage:
            return
        self._stage, self._updated = progress.stage, now
        from rich.table import Table

        table = Table.grid(padding=(0, 2))
        where = "" if progress.device is None else f", {progress.device.name}"
        table.add_row("[bold]problem", f"{progress.problem}{where}")
        table.add_row("[bold]stage", f"{progress.stage}, {progress.seconds:.0f} s of {progress.budget}")
        outcomes = _counts(progress.outcomes)
        rate = progress.seen / progress.seconds if progress.seconds > 1 else 0.0
        table.add_row("[bold]seen", f"{outcomes or '-'} of {progress.legal} legal ({rate:.1f} per second)")
        table.add_row("[bold]best", _best(progress))
        self._live.update(table)
