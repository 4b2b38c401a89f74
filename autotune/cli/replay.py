"""``autotune replay``: compare search strategies on a sweep, without a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autotune.cli.options import json_option
from autotune.errors import Rejected, UsageError

if TYPE_CHECKING:
    from autotune.sweep import Sweep
    from autotune.sweep.replay import Replay

MOST_SEEDS = 10_000


@click.command()
@click.argument("file", metavar="SWEEP", type=click.Path(path_type=Path))
@click.option(
    "--strategy",
    "strategies",
    default="gp,tpe,neighbours,random",
    show_default=True,
    help="Strategies, separated by commas; optuna:CLASS is a sampler of Optuna (optuna:NSGAIISampler).",
)
@click.option(
    "--seeds", type=click.IntRange(1, MOST_SEEDS), default=40, show_default=True, help="Searches of each."
)
@click.option(
    "--in-flight",
    type=click.IntRange(1, 1024),
    default=1,
    show_default=True,
    help="Points under way where evaluations are counted.",
)
@click.option(
    "--workers",
    type=click.IntRange(1, 1024),
    default=15,
    show_default=True,
    help="Compiling processes where seconds are simulated.",
)
@click.option(
    "--limit",
    type=click.IntRange(1, 1_000_000),
    default=300,
    show_default=True,
    help="Evaluations after which a search is given up.",
)
@json_option
def command(
    file: Path, strategies: str, seeds: int, in_flight: int, workers: int, limit: int, as_json: bool
) -> None:
    """Search a SWEEP of measured configs as if each were measured now, once for each strategy and seed.

    SWEEP is a .csv or .csv.gz with a column for each parameter and median_ms, a .trials.jsonl log, T4
    results, or a cache file of Kernel Tuner. The table shows the evaluations until a search is within
    10, 5, 2 and 1 % of the optimum, and the seconds of an asynchronous search with recorded compile times.
    """
    from autotune.search import require_strategy
    from autotune.sweep import read_sweep
    from autotune.sweep.replay import replay

    names = [name.strip() for name in strategies.split(",") if name.strip()]
    if not names:
        raise UsageError("--strategy names none: give one or more, separated by commas")
    for name in names:
        require_strategy(name)
    sweep = read_sweep(file)
    found = []
    for name in names:
        click.echo(f"{sweep.name}: {name}, {seeds} seeds", err=True)
        found.append(replay(sweep, name, seeds=seeds, limit=limit, in_flight=in_flight, workers=workers))
    if as_json:
        click.echo(json.dumps(_plain(sweep, found, in_flight, workers), indent=2))
    else:
        _write_table(sweep, found, in_flight, workers)


def _plain(sweep: Sweep, found: list[Replay], in_flight: int, workers: int) -> dict[str, Any]:
    from autotune.sweep.replay import BY, GOAL

    return {
        "sweep": sweep.name,
        "configs": len(sweep),
        "rejected": _rejected(sweep),
        "best_ms": sweep.best_ms,
        "seeds": found[0].seeds,
        "limit": found[0].limit,
        "in_flight": in_flight,
        "workers": workers,
        "compile_times": _source(sweep.compile_s, "none"),
        "gpu_times": _source(sweep.gpu_s, "modelled"),
        "strategies": [
            {
                "strategy": each.strategy,
                "evaluations": {f"{per_cent}%": count for per_cent, count in each.evaluations.items()},
                f"within_{GOAL}%_by_{BY}": each.share,
                "seconds": None
                if each.seconds is None
                else {
                    f"{per_cent}%": None if clock is None else round(clock, 3)
                    for per_cent, clock in each.seconds.items()
                },
                "proposal_ms": round(each.proposal_ms, 3),
            }
            for each in found
        ],
    }


def _write_table(sweep: Sweep, found: list[Replay], in_flight: int, workers: int) -> None:
    from autotune.cli.tables import Table
    from autotune.sweep.replay import BY, FEW_LAUNCHES, GOAL, GPU_FIXED_S, LAUNCHES, WITHIN

    best = sweep.best_ms
    near = int((sweep.time_ms <= best * (1 + GOAL / 100)).sum())
    click.echo(
        f"{sweep.name}: {len(sweep):,} configs, {_rejected(sweep):,} of them rejected; "
        f"best {best:.6g} ms, {near} within {GOAL} % of it"
    )
    ways = "one at a time" if in_flight == 1 else f"{in_flight} under way"
    click.echo(f"evaluations to within 10, 5, 2, 1 %: median of {found[0].seeds} seeds, {ways}")
    if sweep.compile_s is None:
        click.echo("seconds: not simulated, the sweep has no compile times (a column compile_s)")
    else:
        gpu = (
            "recorded GPU times"
            if sweep.gpu_s is not None
            else f"{GPU_FIXED_S * 1e3:g} ms and {LAUNCHES} launches ({FEW_LAUNCHES} of slow ones) on the GPU"
        )
        click.echo(f"seconds: {workers} compilers, one GPU, asynchronous; recorded compile times, {gpu}")
    columns = [f"{per_cent} %" for per_cent in WITHIN]
    seconds = [] if sweep.compile_s is None else [f"s to {name}" for name in columns]
    click.echo()
    counted = [f"to {name}" for name in columns]
    share = f"{GOAL} % by {BY}"
    table = Table(
        ("strategy", *counted, share, *seconds, "ms a proposal"),
        drop=("ms a proposal", *seconds, share, *counted[:2]),
    )
    for each in found:
        counts = [f">{each.limit}" if count is None else f"{count:g}" for count in each.evaluations.values()]
        clocks = ["-" if clock is None else f"{clock:.2f}" for clock in (each.seconds or {}).values()]
        table.add_row(each.strategy, *counts, f"{each.share:.1%}", *clocks, f"{each.proposal_ms:.1f}")
    table.echo()


def _rejected(sweep: Sweep) -> int:
    return sum(isinstance(point.outcome, Rejected) for point in sweep.points)


def _source(times: Any, otherwise: str) -> str:
    return otherwise if times is None else "recorded"
