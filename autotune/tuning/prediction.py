"""Which points of all families serve a problem that nobody measured: the model's first, kept on disk.

The candidates are the tiles that were learned to be worth a look, those of the stored winners nearest to the
problem, of this GPU or another, and those of the presets; a family of which no tiles were learned is looked
at whole. They are ordered by the static estimate, corrected where the GPU was learned.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from autotune.code.depot import depot_key
from autotune.code.render import template_digest
from autotune.errors import ConfigError, RecordError, SpaceError
from autotune.model.correction import Correction
from autotune.outside import read_bytes
from autotune.records import Filed, Record, Store
from autotune.records.files import MOST_BYTES
from autotune.records.learned import (
    Learned,
    LearnedFamily,
    holds,
    learned_path,
    other_learned_path,
    read_learned,
)
from autotune.search.prediction import Predicted, predicted
from autotune.space.space import Config, Space
from autotune.tuning.held import reads_of
from autotune.values.device import Device
from autotune.values.problem import Problem
from autotune.values.typed import NewerSchemaError

MOST = 16  # points that are kept of a problem
ALIKE = 2  # of them, those with one block tile and its depth; more only where nothing else is left
LOOKED_AT = 120  # points of a family, from which they are chosen
LONG_MS = 0.2  # from here on the power cap counts: what reads least is first of those expected within 1 %
WITHIN = 1.01
NEAR = 4  # stored winners whose tiles are looked at
_KIND = ("BM", "BN", "BK", "warps_k")
_OTHER_LAYOUT = 1.0  # as far as one extent larger by e
_OTHER_BETA = 0.25
_PLAIN = "kernels without a record are chosen by the static estimate alone"
_PREDICTING = (
    *("families", "model", "space", "search/prediction.py", "tuning/prediction.py", "tuning/held.py"),
    *("code/render.py", "code/templates.py", "code/sandbox.py", "values"),
)


@dataclass(frozen=True)
class Prediction:
    """What the model makes of a problem.

    Attributes:
        points: Of all families, the fastest first, each with the stored winner whose config it is, if any. Of
            long kernels that are expected within 1 % of the fastest the one that reads least comes before it.
        note: What the user should know of how it was made, one line; "" for nothing.
    """

    points: tuple[tuple[Predicted, Record | None], ...]
    note: str = ""


def prediction(
    problem: Problem,
    device: Device,
    spaces: Sequence[Space],
    store: Store,
    begin: Callable[[], None] = lambda: None,
) -> Prediction:
    """Predict the fastest points of some families for a problem, or return what was predicted before.

    Args:
        problem: What is computed.
        device: Where.
        spaces: The families.
        store: Of the records; what is predicted is kept beside them.
        begin: Called before anything is predicted anew, which takes some 100 ms in a new process.
    """
    near = _nearest(problem, device, spaces, store)
    path = learned_path(store, device) or other_learned_path(store)
    key = _key(problem, device, spaces, [*(file.path for file in near), *([path] if path else [])])
    content = store.depot.get(key)
    if content is None:
        begin()
        content = json.dumps(
            _predicted(problem, device, spaces, store, near, *_learned(path, device))
        ).encode()
        store.depot.put(key, content)
    found = json.loads(content)
    by_family = {space.family: space for space in spaces}
    points = []
    for family, config, ms, estimate_ms, place in found["points"]:
        record = None if place is None else _looked_at(store, near[place])
        points.append((Predicted(by_family[family], Config(config), ms, estimate_ms), record))
    return Prediction(tuple(points), found["note"])


def first_points(
    problem: Problem, device: Device, spaces: Sequence[Space], store: Store, most: int
) -> list[tuple[Space, Config]]:
    """List the points that are worth measuring first: what is predicted; where nothing is, the presets."""
    found = [
        (point.space, point.config) for point, _ in prediction(problem, device, spaces, store).points[:most]
    ]
    return found or _presets(problem, device, spaces)[:most]


def _presets(problem: Problem, device: Device, spaces: Sequence[Space]) -> list[tuple[Space, Config]]:
    found: dict[tuple[str, Config], tuple[Space, Config]] = {}
    for space in spaces:
        for preset in space.presets.values():
            with suppress(ConfigError, SpaceError):  # it does not fit, or has a value that is not searched
                config = space.fitted(preset, problem, device)
                space.points([config])
                found.setdefault((space.family, config), (space, config))
    return list(found.values())


def distance(one: Problem, other: Problem) -> float:
    """Return how far two problems are apart: the sum of the logarithms of their extents' ratios."""
    extents = sum(
        abs(math.log(ours / theirs))
        for ours, theirs in ((one.m, other.m), (one.n, other.n), (one.k, other.k), (one.batch, other.batch))
    )
    return extents + _OTHER_LAYOUT * (one.layout != other.layout) + _OTHER_BETA * (one.beta != other.beta)


def _nearest(problem: Problem, device: Device, spaces: Sequence[Space], store: Store) -> list[Filed]:
    """List the winners nearest to the problem: of this device, then of others; by their names alone."""
    families = {space.family for space in spaces}
    alike = [
        file
        for file in store.filed()
        if file.family in families and file.problem.math == problem.math and file.problem != problem
    ]
    alike.sort(key=lambda file: (file.path.parent.name != device.slug, distance(file.problem, problem)))
    return alike[:NEAR]


def _looked_at(store: Store, file: Filed) -> Record | None:
    try:
        record = store.look_at(file)
    except RecordError:  # unreadable, as `autotune cache list` reports
        return None
    return record if record is not None and record.evidence == "measured" else None


def _config_of(store: Store, file: Filed) -> Config | None:
    """Return the config of a record; all the rest, a hundred values, is checked where it is chosen."""
    try:
        value = json.loads(read_bytes(file.path, MOST_BYTES))
        config = Config(value["config"])
        if value["evidence"] == "measured" and {*map(type, config.values())} <= {int, str}:
            return config
    except (OSError, ValueError, RecursionError, LookupError, TypeError):
        _looked_at(store, file)  # which says what is wrong
    return None


def _predicted(
    problem: Problem,
    device: Device,
    spaces: Sequence[Space],
    store: Store,
    near: Sequence[Filed],
    learned: Learned | None,
    note: str,
) -> dict[str, Any]:
    """Return what `prediction` keeps: points, each with the place of its winner in ``near``, and a note.

    With a note no family is corrected: corrected times and plain ones cannot be compared.
    """
    winners = [_config_of(store, file) for file in near]
    points: list[tuple[Predicted, int | None]] = []
    for space in spaces:
        family = None if learned is None else learned.families.get(space.family)
        own: dict[Config, int] = {}
        for place, (file, winner) in enumerate(zip(near, winners, strict=True)):
            if winner is not None and file.family == space.family:
                with suppress(ConfigError):  # of a space that has other parameters, or values
                    own.setdefault(space.config(winner), place)
        tiles = None
        if family is not None and family.tiles and family.tiles[0].keys() <= space.parameters.keys():
            names = tuple(family.tiles[0])
            more = [*own, *space.presets.values()]
            tiles = [*family.tiles, *({name: config[name] for name in names} for config in more)]
        try:
            correction = None if family is None or note else _correction(family, space, device, store)
            how: Any = {"correction": correction, "most": LOOKED_AT}
            found = predicted(space, problem, device, tiles=tiles, **how)
            if tiles is not None and not found:  # a space of one's own may search none of them
                found = predicted(space, problem, device, **how)
        except RecordError as error:
            why = f"{error}: {_PLAIN}; run 'autotune learn' again"
            return _predicted(problem, device, spaces, store, near, learned, why)
        points += [(each, own.get(each.config)) for each in found]
    points.sort(key=lambda entry: entry[0].ms)
    if points and (best_ms := points[0][0].ms) >= LONG_MS:
        first = points[0][0].space
        near_best = [entry for entry in points if entry[0].ms <= WITHIN * best_ms and entry[0].space is first]
        least = min(near_best, key=lambda entry: reads_of(entry[0].config))
        points.sort(key=lambda entry: entry is not least)
    kept = [
        (each.space.family, dict(each.config), each.ms, each.estimate_ms, place)
        for each, place in _unlike(points)
    ]
    return {"points": kept, "note": note}


def _unlike(points: Sequence[tuple[Predicted, int | None]]) -> list[tuple[Predicted, int | None]]:
    """Choose some of the points, the fastest first, so that who measures them tries more than one idea.

    What the model has wrong it has wrong for all points that are alike.
    """
    seen: Counter[tuple[Any, ...]] = Counter()
    chosen: list[int] = []
    left: list[int] = []
    for place, (point, _) in enumerate(points):
        kind = (point.space.family, *(point.config.get(name) for name in _KIND))
        seen[kind] += 1
        (chosen if seen[kind] <= ALIKE else left).append(place)
    return [points[place] for place in sorted([*chosen, *left][:MOST])]


def _learned(path: Path | None, device: Device) -> tuple[Learned | None, str]:
    """Read what was learned of this GPU, or of another, whose tiles are worth a look; and what to note."""
    unknown = f"nothing was learned of {device.name}: {_PLAIN}; run 'autotune learn' on it"
    if path is None:
        return None, unknown
    try:
        learned = read_learned(path)
    except RecordError as error:
        remedy = "" if isinstance(error, NewerSchemaError) else "; move that file away"
        return None, f"{error}: {_PLAIN}{remedy}"
    if (learned.device.slug, learned.device.sm_count) != (device.slug, device.sm_count):
        return learned, unknown
    return learned, ""


def _correction(family: LearnedFamily, space: Space, device: Device, store: Store) -> Correction:
    """Return the correction that was learned from kernels like these.

    Raises:
        RecordError: They have changed.
    """
    parts = [_code_digest(), space.content_digest, template_digest(space), repr((family.fitted_on, device))]
    key = depot_key("holds", parts)
    known = store.depot.get(key)  # else kernels are rendered to find out, which takes 100 ms
    if known is None:
        known = str(holds(family.fitted_on, space, device, store.depot)).encode()
        store.depot.put(key, known)
    if known != b"True":
        raise RecordError(f"{space.family} has changed since it was learned")
    return family.correction


def _key(problem: Problem, device: Device, spaces: Sequence[Space], files: Sequence[Path]) -> str:
    parts = [_code_digest(), repr(problem), repr(device)]
    parts += [f"{space.family} {space.content_digest} {template_digest(space)}" for space in spaces]
    for path in files:
        with suppress(OSError):  # who reads it says why
            found = path.stat()
            parts.append(f"{path} {found.st_mtime_ns} {found.st_size}")
    return depot_key("choice", parts)


def model_digest(store: Store, device: Device) -> str:
    """Hash what predicts for a device: the code, and what was learned of it or of another."""
    path = learned_path(store, device) or other_learned_path(store)
    learned = b""
    with suppress(OSError):
        learned = b"" if path is None else path.read_bytes()
    return hashlib.sha256(_code_digest().encode() + learned).hexdigest()


@cache
def _code_digest() -> str:
    """Hash the code that predicts: a development tree may change without a new version."""
    here = Path(__file__).parents[1]
    files = [file for name in _PREDICTING for file in (sorted((here / name).glob("*.py")) or [here / name])]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()
