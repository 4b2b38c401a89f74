"""``autotune learn``: teach the model from measured trials which kernels serve shapes that nobody tuned."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from autotune.cli.options import cache_option, json_option, target_options
from autotune.cli.watchers import meter, watcher
from autotune.errors import UsageError
from autotune.values.device import chosen_gpus, current_device, gpu_count, named_device
from autotune.values.suite import MOST_RANDOM, random_shapes

if TYPE_CHECKING:
    from autotune.records import Store
    from autotune.records.learned import Learned


@click.command()
@click.option("--budget", default="10m", show_default=True, help="Time of gathering trials: 90s, 10m, 1h.")
@click.option(
    "--shapes",
    "number",
    type=click.IntRange(1, MOST_RANDOM),
    default=64,
    show_default=True,
    help="Random shapes to gather trials of.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the draw.")
@click.option("--batches", is_flag=True, help="Make the random shapes batches.")
@target_options
@click.option("--gpus", metavar="all|N|I,J", help="Measure on GPUs of this host: all, N of them, or these.")
@click.option("--fit-only", is_flag=True, help="Measure nothing; learn from the trials that there are.")
@cache_option
@json_option
def command(
    budget: str,
    number: int,
    seed: int,
    batches: bool,
    ordinal: int | None,
    gpus: str | None,
    target: str | None,
    fit_only: bool,
    store: Store,
    as_json: bool,
) -> None:
    """Learn from measured trials of random shapes how far the static estimate is off on this GPU.

    Kernels for shapes without a record, and the first candidates of a search, are chosen by what is learned.
    Trials are kept as they become known: the same command goes on after an interrupt. The logs of `tune`
    count too. Fitting needs LightGBM, the extra "learn".
    """
    began = time.monotonic()
    if target is not None and not fit_only:
        raise UsageError(
            "--target names a GPU that is not here, and nothing is measured there: add --fit-only"
        )
    if ordinal is not None and (gpus or target) is not None:
        raise UsageError("--device, --gpus and --target each name a GPU: give one of them")
    from autotune.families import family_of
    from autotune.records.files import LEARNED
    from autotune.records.learned import write_learned
    from autotune.space.space import built_in
    from autotune.tuning.learn import LOGS, TABLE, fitter, learn, trials, write_table

    ordinals = [ordinal or 0] if gpus is None else chosen_gpus(gpus, gpu_count())
    device = named_device(target) if target is not None else current_device(ordinals[0])
    fitter()  # before anything is measured
    spaces = [space for space in built_in() if family_of(space) is not None]
    if not fit_only:
        from autotune.tuning.budget import Budget
        from autotune.tuning.campaign import tune_all
        from autotune.tuning.request import Request

        gathering = Budget.parse(budget)
        with watcher(number, began + gathering.seconds) as board:
            request = Request(
                budget=gathering,
                seed=seed,
                gpus=tuple(ordinals),
                root=store.root / LOGS,
                watch=board.watch,
                began=began,
            )
            tune_all(random_shapes(number, seed, batches=batches), request, board.tell)
    with meter() as line:
        line.begin("reading trials")
        found = trials(device, spaces, store)
        line.begin("fitting families", len(spaces))
        learned = learn(device, spaces, found, store.depot, line.step)
    path = store.home(device) / LEARNED
    write_table(path.with_name(TABLE), found, spaces)
    write_learned(path, learned)
    if as_json:
        told = {name: asdict(family.fitted_on) for name, family in learned.families.items()}
        click.echo(json.dumps(told, indent=2, default=dict))
    else:
        click.echo(summary(learned))
        click.echo(f"stored in {path} after {time.monotonic() - began:.0f} s")


def summary(learned: Learned) -> str:
    """Return a line for each family: what was learned, and what it is worth."""
    lines = [f"{learned.device.name}: time of the first choice over the best measured, of shapes held out"]
    for name, family in learned.families.items():
        on, before, after = family.fitted_on, family.fitted_on.estimate, family.fitted_on.corrected
        lines.append(
            f"{name}: {on.trials} trials of {on.problems} shapes; by the estimate {before.mean:.3f} "
            f"(ninth decile {before.p90:.2f}, worst {before.worst:.2f}), corrected {after.mean:.3f} "
            f"({after.p90:.2f}, {after.worst:.2f})"
        )
    return "\n".join(lines)
