"""Where a search should start, learned from the trials that were kept of other problems.

What is fast at one size need not be at another: over one space the times at 4096 and at 1024 cubed are hardly
correlated on an H200. The ratio of the static estimates corrects that: a config that took t there should take
``t * estimate here / estimate there``. Where the family has no estimate, or the device no known clock, only
the order of the times there counts.

The logs nearest in size give their best in turn, those of this device first. A config that is not legal here
stands for the legal one nearest to it with the same tile; one that differs in no more than one parameter from
a better one of its log is left out, because a search looks at neighbours anyway.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from autotune.errors import AutotuneError, RecordError
from autotune.families.estimate import estimate_columns
from autotune.outside import read_bytes
from autotune.records import Store
from autotune.records.trials import LIMIT, TrialHeader, read_header, trials_path
from autotune.space.space import Legal, Space
from autotune.values.device import Device, known_devices
from autotune.values.problem import Problem

LOGS = 4  # of this device that give starts, the nearest
OTHER_LOGS = 2  # of other devices, behind them
LAYOUT_STEPS, BETA_STEPS = 3.0, 0.5  # how far another layout or beta is, in doublings of a size
NEAR = 1  # parameters that differ between two starts of one log, at most, where the slower is left out


def warm_starts(
    space: Space, legal: Legal, problem: Problem, device: Device, store: Store, limit: int
) -> list[int]:
    """Return where to start, the most promising first.

    Args:
        space: The family.
        legal: Its points for the problem and device.
        problem: What is searched for.
        device: Where.
        store: Of the logs.
        limit: Starts at most.

    Returns:
        Indices of the list, none twice; none where no trials are kept. A log that cannot be read is left out.
    """
    own = trials_path(store.path(device, space.family, problem))
    logs = [log for log in _logs(space.family, store.root) if log.path != own]
    here = [log for log in logs if log.header.device.slug == device.slug]
    elsewhere = [log for log in logs if log.header.device.slug != device.slug]
    near = _Near(legal, space.adapts)
    chosen: list[int] = []
    for some, most in ((here, LOGS), (elsewhere, OTHER_LOGS)):
        rankings: list[list[int]] = []
        for log in sorted(some, key=lambda log: (_distance(log.header.problem, problem), str(log.path))):
            if len(rankings) < most and (ranking := _ranking(log, space, near, problem, device, limit)):
                rankings.append(ranking)
        chosen += [index for index in chain(*zip_longest(*rankings)) if index is not None]
    return list(dict.fromkeys(chosen))[:limit]


@dataclass(frozen=True)
class _Log:
    path: Path
    header: TrialHeader


def _logs(family: str, root: Path) -> Iterator[_Log]:
    """Find the logs of a family, of every device, whose header can be read."""
    for path in sorted(root.glob(f"*/{family}_f32_*.trials.jsonl")):
        try:
            header = read_header(path)
        except RecordError:
            continue
        if header.family == family:
            yield _Log(path, header)


def _distance(there: Problem, here: Problem) -> float:
    """Return how far a problem is from another, in doublings of its sizes."""
    sizes = sum(abs(math.log2(getattr(there, name) / getattr(here, name))) for name in ("m", "n", "k"))
    return sizes + LAYOUT_STEPS * (there.layout != here.layout) + BETA_STEPS * (there.beta != here.beta)


def _ranking(log: _Log, space: Space, near: _Near, problem: Problem, device: Device, limit: int) -> list[int]:
    """Return the points for which a log speaks, best first."""
    legal = near.legal
    rows, times = _measured(log.path, legal)
    if not len(rows):
        return []
    there = _device_of(log, device)
    if there is not None:
        points = replace(legal, ordinals=rows)  # legal there, perhaps not here
        try:
            now = _estimates(space, points, problem, device)
            then = _estimates(space, points, log.header.problem, there)
            known = np.isfinite(now) & np.isfinite(then) & (then > 0)
            times = np.where(known, times * now / np.where(known, then, 1.0), math.inf)
        except AutotuneError:
            pass
    chosen: list[int] = []
    for place in np.argsort(times, kind="stable"):
        index = near.find(rows[place])
        if index is None or len(chosen) == limit:
            continue
        apart = (legal.ordinals[chosen] != legal.ordinals[index]).sum(axis=1)
        if not len(apart) or apart.min() > NEAR:
            chosen.append(index)
    return chosen


def _estimates(space: Space, points: Legal, problem: Problem, device: Device) -> NDArray[np.float64]:
    with np.errstate(all="ignore"):  # a config that is not legal may have no tile, or no step along k
        return np.asarray(estimate_columns(space, space.columns(points, problem, device), problem, device))


def _measured(path: Path, legal: Legal) -> tuple[NDArray[np.int16], NDArray[np.float64]]:
    """Read the configs of a log that were measured, each with its last time, where the space has all values.

    Returns:
        `[configs, parameters]` ordinals, and `[configs]` milliseconds.
    """
    places = [{value: i for i, value in enumerate(legal.choices[name])} for name in legal.names]
    latest: dict[tuple[int, ...], float] = {}
    try:
        lines = read_bytes(path, LIMIT).split(b"\n")
    except OSError:
        lines = []
    for line in lines:
        if b'"measured"' not in line:
            continue
        try:
            trial = json.loads(line)
            config, time = trial["config"], float(trial["median_ms"])
            row = tuple(place[config[name]] for place, name in zip(places, legal.names, strict=True))
            if trial["outcome"] == "measured" and 0 < time < math.inf:
                latest[row] = time
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue
    rows = np.array(list(latest), np.int16).reshape(-1, len(legal.names))
    return rows, np.array(list(latest.values()))


class _Near:
    """Finds configs in a legal list, or the points with the same tile that are nearest to them."""

    def __init__(self, legal: Legal, adapts: Collection[str]) -> None:
        self.legal = legal
        self._tile = [i for i, name in enumerate(legal.names) if name not in adapts]
        self._weights = np.random.default_rng(0).integers(-(2**62), 2**62, len(self._tile))
        hashes = np.zeros(len(legal), np.int64)  # they wrap around, alike here and in `find`
        for i, weight in zip(self._tile, self._weights, strict=True):
            hashes += legal.ordinals[:, i] * weight
        self._order = np.argsort(hashes, kind="stable")
        self._hashes = hashes[self._order]

    def find(self, row: NDArray[np.int16]) -> int | None:
        """Find a config by its ordinals, else what differs least from it in what adapts alone, else None."""
        wanted = (row[self._tile].astype(np.int64) * self._weights).sum()
        begin, end = (np.searchsorted(self._hashes, wanted, side) for side in ("left", "right"))
        alike = self._order[begin:end]
        if not len(alike):
            return None
        config = {name: self.legal.choices[name][row[i]] for i, name in enumerate(self.legal.names)}
        steps = replace(self.legal, ordinals=self.legal.ordinals[alike]).steps(config)
        return int(alike[steps.argmin()])


def _device_of(log: _Log, device: Device) -> Device | None:
    """Return the device of a log with all its facts; None where they are not known."""
    if log.header.device.slug == device.slug:
        return device
    return next((each for each in known_devices().values() if each.slug == log.header.device.slug), None)
