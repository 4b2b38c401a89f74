"""``autotune tune``: search, watch, report."""

from __future__ import annotations

import json
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autotune.cli.options import cache_option, file_option, json_option, target_options, tune_command
from autotune.cli.pages import write_problem, write_suite
from autotune.cli.shapes import shape_options, shapes_of
from autotune.cli.streams import say
from autotune.cli.tables import Table
from autotune.cli.watchers import counts, watcher
from autotune.errors import TuningError, UsageError
from autotune.values.device import Device, chosen_gpus, gpu_count, has_gpu, named_device
from autotune.values.problem import Math, Problem

if TYPE_CHECKING:
    from autotune.records import Store
    from autotune.records.schema import Record
    from autotune.tuning.campaign import Tuned

SINGLE_BUDGET, SUITE_BUDGET, ESTIMATE_BUDGET = "60s", "8m", "45s"


@click.command()
@shape_options
@click.option(
    "--budget",
    help="Time of this run (60s, 5m), with --suite of all shapes together; or candidates, those of earlier "
    "runs included (300). Default: 60s, 8m for a suite, 45s without a GPU.",
)
@click.option(
    "--space",
    "space_name",
    metavar="FAMILY|FILE",
    help="Search this family, or a .toml file that narrows or replaces one; default: every family that "
    "serves the problem.",
)
@click.option("--strategy", help="gp (the default), tpe, neighbours, random, exhaustive or optuna:CLASS.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the search's random choices.")
@target_options
@click.option(
    "--gpus", metavar="all|N|I,J", help="Share the search among GPUs of this host: all, N of them, or these."
)
@click.option(
    "--workers",
    type=click.IntRange(1, 256),
    help="Compiling processes; default: one for each core.",
)
@click.option("--cold", is_flag=True, help="Time with operands that are not in the L2 cache.")
@click.option(
    "--resume/--no-resume",
    default=None,
    help="Continue the log of earlier runs, or be told why not; or begin anew and keep it. Default: continue "
    "one of the same space, template, toolchain and device.",
)
@click.option(
    "--storage",
    metavar="URL",
    help="Share the search with other processes and hosts: postgresql://..., sqlite:///FILE, journal:FILE.",
)
@click.option("--study", metavar="NAME", help="Its name in the storage; default: made from what is searched.")
@file_option("--report", "Write an HTML page of the outcome into this file: see 'autotune report'.")
@cache_option
@json_option
def command(
    problem: Problem | None,
    suite: str | None,
    only: tuple[str, ...],
    maths: tuple[Math, ...],
    budget: str | None,
    space_name: str | None,
    strategy: str | None,
    seed: int,
    ordinal: int | None,
    gpus: str | None,
    target: str | None,
    workers: int | None,
    cold: bool,
    resume: bool | None,
    storage: str | None,
    study: str | None,
    report: Path | None,
    store: Store,
    as_json: bool,
) -> None:
    """Search for the fastest kernel of a problem, verify it, compare it with cuBLAS, and store it.

    What became of each candidate is kept as it becomes known, so a search can be stopped at any time, as by
    Ctrl-C, and goes on when it is called again. With --suite, easy shapes leave their time to hard ones.
    Math "any" tunes the problem in each math, within one budget; each winner is stored under its own name.

    With --target, or where there is no GPU, nothing is measured: the kernel is chosen by a static estimate of
    candidates compiled for that GPU, proven right in a simulator, and stored as estimated.
    """
    began = command_began()
    shapes = shapes_of(problem, suite, only, maths)
    if study is not None and storage is None:
        raise UsageError("--study names a study of a storage: give --storage too")
    with ThreadPoolExecutor(1) as asking:
        absence = asking.submit(_absent, ordinal, gpus, target)  # the driver takes as long as these imports:
        from autotune.search import DEFAULT, require_strategy
        from autotune.space.space import Space
        from autotune.tuning.budget import Budget
        from autotune.tuning.request import Request
        from autotune.tuning.tuner import run

        space = None if space_name is None else Space.load(space_name)
        strategy_ = DEFAULT if strategy is None else strategy
        require_strategy(strategy_)
        absent, ordinals, note = absence.result()
    if absent is not None:
        measuring = {"--strategy": strategy, "--cold": cold, "--storage": storage}
        instead = {"--suite": "give --m, --n and --k", "--math any": "name one math"}
        for option, given in {**measuring, "--suite": suite, "--math any": len(maths) > 1}.items():
            if given:
                why = "with --target" if target else "without a GPU"
                todo = instead.get(option, "leave it out")
                raise UsageError(f"{option} is for measuring, and nothing is measured {why}: {todo}")
    several = len(shapes) > 1 or suite is not None
    budget_ = Budget.parse(_usual_budget(suite, absent) if budget is None else budget)
    board = watcher(len({shape.problem for shape in shapes}), began + budget_.seconds)
    request = Request(
        budget=budget_,
        space=space,
        seed=seed,
        strategy=strategy_,
        gpus=tuple(ordinals),
        target=absent,
        workers=workers,
        cold=cold,
        resume=resume,
        storage=storage,
        study=study,
        root=store.root,
        watch=board.watch,
        began=began,
    )
    try:
        with board:
            if several:
                from autotune.tuning.campaign import tune_all

                found = tune_all(shapes, request, board.tell)
            else:
                record = run(shapes[0].problem, request)
    except KeyboardInterrupt:
        again = "the same command without --no-resume" if resume is False else "the same command"
        say(f"what became of each candidate so far is kept: {again} goes on from there")
        raise
    if several:
        if report is not None:
            told = [(each.shape.id, each.shape.problem, each.record or each.why) for each in found]
            write_suite(report, f"{len(found)} shapes, tuned together", told)
        _report(found, as_json, time.monotonic() - began)
        return
    from autotune.records import to_json

    path = store.path(record.device, record.family, record.problem, estimated=absent is not None)
    if as_json:
        click.echo(to_json(record))
    else:
        click.echo(summary(record, space_name))
        click.echo(f"stored in {path} after {time.monotonic() - began:.1f} s")
    if report is not None:
        write_problem(report, record, path.parent, store, summary(record, space_name))
    if note:
        click.echo(note, err=True)
    if absent is not None and store.find(absent, record.family, record.problem) is not None:
        click.echo("a measured record of this problem is stored too: it is the one that is served", err=True)


def _usual_budget(suite: str | None, absent: Device | None) -> str:
    if absent is not None:
        return ESTIMATE_BUDGET
    return SINGLE_BUDGET if suite is None else SUITE_BUDGET


def _report(found: list[Tuned], as_json: bool, seconds: float) -> None:
    """Print the outcomes of the shapes of a suite.

    Raises:
        TuningError: There is no winner at all.
    """
    from autotune.values import typed

    winners = [tuned for tuned in found if tuned.record is not None]
    if as_json:
        told = [
            {
                "id": tuned.shape.id,
                "problem": typed.plain(tuned.shape.problem),
                "record": typed.plain(tuned.record) if tuned.record else None,
                "why": tuned.why,
                "settled": tuned.settled,
                "seconds": round(tuned.seconds, 1),
            }
            for tuned in found
        ]
        click.echo(json.dumps(told, indent=2))
    else:
        table = Table(
            ("shape", "problem", "ms", "TFLOP/s", "vs cuBLAS", "family", "candidates", "seconds", "", "why"),
            drop=("candidates", "seconds", "family", "TFLOP/s", ""),
            wrap=("why",),
            right=("ms", "TFLOP/s", "vs cuBLAS", "seconds"),
        )
        for tuned in found:
            table.add_row(tuned.shape.id, str(tuned.shape.problem), *_cells(tuned))
        table.echo()
        ratios = [tuned.record.vs_cublas for tuned in winners if tuned.record and tuned.record.vs_cublas]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None
        compared = f", {mean:.3f} x cuBLAS (geometric mean of {len(ratios)})" if mean else ""
        click.echo(f"{len(winners)} of {len(found)} shapes stored in {seconds:.0f} s{compared}")
    if not winners:
        raise TuningError(f"none of {len(found)} shapes has a winner; the first: {found[0].why}")


def _cells(tuned: Tuned) -> list[str]:
    record = tuned.record
    if record is None or record.timing is None or record.gflops is None:
        return ["-", "-", "-", "-", "-", f"{tuned.seconds:.1f}", "", tuned.why]
    marks = [word for word, holds in (("noisy", record.timing.noisy), ("settled", tuned.settled)) if holds]
    return [
        f"{record.timing.median_ms:.5g}",
        f"{record.gflops / 1000:.2f}",
        "-" if record.vs_cublas is None else f"{record.vs_cublas:.3f}",
        record.family,
        record.search.extent,
        f"{tuned.seconds:.1f}",
        ", ".join(marks),
        "",
    ]


def command_began() -> float:
    """Return when this process was started (`time.monotonic`); now if the system does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[19])  # "starttime" of proc(5), field 22: since the machine was started
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        age = 0.0
    return time.monotonic() - max(0.0, age)


def _absent(
    ordinal: int | None, gpus: str | None, target: str | None
) -> tuple[Device | None, list[int], str]:
    """Choose the GPU to foresee for, or None and the ordinals of those here; and what to tell at the end."""
    if target is not None:
        if ordinal is not None or gpus is not None:
            option = "--device" if gpus is None else "--gpus"
            raise UsageError(f"{option} is a GPU here and --target one of the table: give one of them")
        return named_device(target), [], ""
    if gpus is not None:
        if ordinal is not None:
            raise UsageError("--device names one GPU and --gpus several: give one of them")
        return None, chosen_gpus(gpus, gpu_count()), ""
    if ordinal is not None or has_gpu():
        return None, [ordinal or 0], ""
    return named_device("h200"), [], "no GPU here: this is for an NVIDIA H200 (see --target)"


def summary(record: Record, space: str | None = None) -> str:
    """Return in a few lines what was chosen, how fast and how sure that is, and how it was found.

    Args:
        record: What there is.
        space: What `--space` said.
    """
    from autotune.space.space import Config
    from autotune.tuning.progress import STAGES

    timing, search = record.timing, record.search
    needs, launch, verified = record.resources, record.launch, record.verification
    rate = (search.seen - search.resumed) / max(search.seconds, 1e-9)
    earlier = f", {search.resumed} of them before" if search.resumed else ""
    config = [
        f"  config    {Config(record.config).id}",
        f"  needs     {needs.registers} registers, {needs.spill_bytes} bytes spilled, "
        f"{launch.shared_bytes + needs.static_shared_bytes} bytes of shared memory, "
        f"{math.prod(launch.block)} threads in {math.prod(launch.grid)} blocks",
    ]
    besides = [f"{each.entry} before it, in {math.prod(each.grid)} blocks" for each in launch.kernels[:-1]]
    if launch.workspace_bytes:
        besides.append(f"{launch.workspace_bytes / 2**20:.3g} MiB of workspace")
    if besides:
        config.append(f"  besides   {', '.join(besides)}")
    found = [
        f"  verified  relative error {verified.error:.2g} (bound {verified.bound:.2g}): {verified.inputs}",
        f"  search    {search.strategy}, {search.extent} candidates{earlier} "
        f"in {search.seconds:.1f} s ({rate:.1f} per second): {counts(search.outcomes)}",
    ]
    stages = [f"{search.stages_s[name]:.1f} {name}" for name in STAGES if name in search.stages_s]
    if stages:
        found.append(f"  seconds   {', '.join(stages)}")
    if timing is None or record.gflops is None:
        head = f"{record.problem} for {record.device.name}: estimated, compiled and simulated"
        command = tune_command(record.problem, space)
        last = f"  missing   nothing was measured: run '{command}' on a machine with this GPU"
        return "\n".join([head, *config, *found, last])
    compared = "; cuBLAS is not installed, so not compared"
    if record.cublas and record.vs_cublas:
        compared = f", {record.vs_cublas:.3f} x cuBLAS ({record.cublas.median_ms:.6g} ms)"
    low, _, high = timing.quantiles_ms
    lines = [
        f"{record.problem} on {record.device.name}: {timing.median_ms:.6g} ms, "
        f"{record.gflops / 1000:.2f} TFLOP/s{compared}",
        *config,
        f"  timing    10-90 % of {timing.repeats} samples: {low:.6g} to {high:.6g} ms, {timing.l2} L2, "
        f"{timing.method}{', noisy' if timing.noisy else ''}",
        *([f"  sustained {record.sustained.words(record.problem.flops)}"] if record.sustained else []),
        *found,
    ]
    ties = sum(each.tied for each in record.runners_up)
    if ties:
        others = len(record.runners_up)
        lines.append(f"  ties      {ties} of {others} other finalists cannot be told from the winner")
    return "\n".join(lines)
