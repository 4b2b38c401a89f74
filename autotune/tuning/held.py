"""Which of alike finalists stays the fastest at the power cap, when launches follow each other for long."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from autotune.errors import DeviceError, Rejected
from autotune.model.account import global_loads
from autotune.space.space import Config
from autotune.values.measurement import POWER_CAP, MeasuredTrial, Sustained

if TYPE_CHECKING:
    from autotune.measure.worker import GpuWorker
    from autotune.tuning.built import Built

SUSTAINED_S = 0.8  # of one, back to back; NVML's counter of energy moves each tenth of a second
ALIKE = 1.01  # times the time of the winner: what being faster for long may cost when short
LOST = 1.01  # times its short time: a winner that the power cap slows down by less is kept
GAINED = 1.01  # what another must be faster by, for long
OTHERS = 4  # of them that are run for long

K = TypeVar("K", bound=Hashable)
Tile = tuple[object, ...]


def tile_of(config: Config) -> Tile:
    """Return the block tile of a config and what it turns first; () where it chooses no such tile."""
    extents = (config.get("BM"), config.get("BN"))
    if not all(isinstance(extent, int) and extent > 0 for extent in extents):
        return ()
    return (*extents, *(config.get(name, 0) for name in ("turn_a", "turn_b")))


def reads_of(config: Config) -> float:
    """Return how many floats of its operands a block reads for each FFMA; infinite without a tile."""
    return global_loads(1, int(config["BM"]), int(config["BN"])) if tile_of(config) else math.inf


def sparing(configs: Mapping[K, Config], best: Config) -> list[K]:
    """Choose the first of each tile that reads less than the best config's, those that read least first.

    Args:
        configs: Of one family, by key, in order of preference.
        best: The config to compare with, of the same family.
    """
    found: dict[Tile, K] = {}
    most = reads_of(best) if tile_of(best) else 0.0  # where there is no tile nothing is known to read less
    for key, config in configs.items():
        if reads_of(config) < most:
            found.setdefault(tile_of(config), key)
    return sorted(found.values(), key=lambda key: reads_of(configs[key]))


def runs_on(gpu: GpuWorker, timeout_s: float) -> Callable[[Built, MeasuredTrial], Sustained | Rejected]:
    """Return what runs a finalist back to back on a GPU for `SUSTAINED_S`, each within ``timeout_s``."""

    def run(built: Built, trial: MeasuredTrial) -> Sustained | Rejected:
        return gpu.sustained(built.binary, built.source.launch, trial.timing, SUSTAINED_S, timeout_s)

    return run


def fastest_held(
    passed: Sequence[tuple[Built, MeasuredTrial]],
    run: Callable[[Built, MeasuredTrial], Sustained | Rejected],
) -> tuple[int, Sustained | Rejected]:
    """Run the winner back to back; where the power cap slows it down, also what is alike and reads no more.

    A larger block tile reads L2 less often, so that the same FFMAs take less power: at 4096 cubed on an H200
    64 x 256 is 1 % faster than 256 x 128 when short, and 7 % slower after half a second. Configs that read as
    much differ by 1.5 % then, so they follow those that read less.

    Args:
        passed: Finalists that passed, the winner first, then by time.
        run: Runs one back to back, see `runs_on`.

    Returns:
        The place of the winner or of one of its family that holds 1 % more, and what it did; the winner's
        failure where it failed. That another fails, or the GPU while another runs, leaves what was found.

    Raises:
        DeviceError: The GPU failed while the winner ran.
    """
    first = run(*passed[0])
    if isinstance(first, Rejected) or POWER_CAP not in first.throttle:
        return 0, first
    short_ms = passed[0][1].timing.median_ms
    if first.mean_ms <= LOST * short_ms:
        return 0, first
    alike = {
        place: built.source.config
        for place, (built, trial) in enumerate(passed)
        if trial.timing.median_ms <= ALIKE * short_ms and built.source.family == passed[0][0].source.family
    }
    best, held = 0, first
    as_sparing = [
        place for place in alike if place and reads_of(alike[place]) == reads_of(alike[0]) < math.inf
    ]
    for place in (sparing(alike, alike[0]) + as_sparing)[:OTHERS]:
        try:
            found = run(*passed[place])
        except DeviceError:
            break
        if isinstance(found, Sustained) and GAINED * found.mean_ms < held.mean_ms:
            best, held = place, found
    return best, held
