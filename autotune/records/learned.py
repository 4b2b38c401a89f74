"""`learned.json`: what measured trials taught about a GPU, beside its records; written by `autotune learn`.

For each family: tiles that were fast for some problem, and a correction of the static estimate, with what it
was fitted on and how far it is from the best on problems that it was not fitted on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from autotune.code.depot import Depot
from autotune.code.render import template_digest
from autotune.code.sources import rendered
from autotune.errors import ConfigError, RecordError, SpaceError
from autotune.model.correction import Correction
from autotune.outside import read_text
from autotune.paths import write_file
from autotune.records.files import LEARNED
from autotune.records.schema import Config, Digest, RecordedDevice, Text
from autotune.records.store import Store
from autotune.space.space import Space
from autotune.space.statements import Value
from autotune.values import jsontext, typed
from autotune.values.device import Device
from autotune.values.limits import Count, Limit, Name
from autotune.values.problem import Problem

SCHEMA = 1
LIMIT = 8 << 20  # bytes
Ratio = Annotated[float, Limit(least=0, decimals=3)]


@dataclass(frozen=True)
class Regret:
    """Time of the point that comes first over that of the best measured one, of problems not fitted on.

    Attributes:
        mean: Geometric mean.
        p90: Ninth decile.
        worst: Largest.
    """

    mean: Ratio
    p90: Ratio
    worst: Ratio


@dataclass(frozen=True)
class Probe:
    """A kernel among those that were measured, by which to tell whether the family's code is what it was.

    Attributes:
        problem: What it computes.
        config: Its choices.
        code_digest: Of its text without comments, as in a record.
    """

    problem: Problem
    config: Config
    code_digest: Digest


@dataclass(frozen=True)
class FittedOn:
    """What a family's correction was fitted on, and what it is worth.

    Attributes:
        problems: How many.
        trials: Of all of them.
        space_digest: `Space.digest` of the family then.
        template_digest: Of its template then.
        probes: Some of the kernels.
        estimate: Held-out regret of the static estimate.
        corrected: Held-out regret of the corrected estimate.
    """

    problems: Count
    trials: Count
    space_digest: Digest
    template_digest: Digest
    probes: tuple[Probe, ...]
    estimate: Regret
    corrected: Regret


@dataclass(frozen=True)
class Tiles:
    """Combinations of parameters' values that were fast for some problem.

    Attributes:
        parameters: Their names.
        values: The combinations, values in the order of the names.
    """

    parameters: tuple[Name, ...]
    values: tuple[tuple[int | str, ...], ...]

    def __post_init__(self) -> None:
        if any(len(row) != len(self.parameters) for row in self.values):
            raise RecordError(f"every tile must have {len(self.parameters)} values")


@dataclass(frozen=True)
class _Family:
    fitted_on: FittedOn
    tiles: Tiles


@dataclass(frozen=True)
class _File:
    schema: Count
    device: RecordedDevice
    created: Text
    families: Mapping[Name, _Family]


@dataclass(frozen=True)
class LearnedFamily:
    """What was learned of one family.

    Attributes:
        fitted_on: The trials.
        tiles: That are worth a look, each with the same parameters.
        correction: Of the static estimate.
    """

    fitted_on: FittedOn
    tiles: tuple[Mapping[str, Value], ...]
    correction: Correction


@dataclass(frozen=True)
class Learned:
    """What was learned of one GPU.

    Attributes:
        device: The GPU.
        created: When.
        families: By name.
    """

    device: RecordedDevice
    created: str
    families: Mapping[str, LearnedFamily]


def holds(fitted_on: FittedOn, space: Space, device: Device, depot: Depot) -> bool:
    """Return whether a family's kernels are still those that were measured.

    They are where space and template have the same digests, or where the probes render to the same code:
    tidying makes nothing unlearned.
    """
    if (fitted_on.space_digest, fitted_on.template_digest) == (space.digest, template_digest(space)):
        return True
    try:
        return all(
            rendered(space, probe.config, probe.problem, device, depot=depot).code_digest == probe.code_digest
            for probe in fitted_on.probes
        )
    except (ConfigError, SpaceError):
        return False


def learned_path(store: Store, device: Device) -> Path | None:
    """Return the file of a device, the user's own before the shipped one; None where there is none."""
    return next(iter(store.beside(device, LEARNED)), None)


def other_learned_path(store: Store) -> Path | None:
    """Return a file of any device: its tiles are worth a look elsewhere too."""
    return next((path for folder in store.folders for path in sorted(folder.glob(f"*/{LEARNED}"))), None)


def read_learned(path: Path) -> Learned:
    """Read a file; one that has not changed is read once in a process.

    Raises:
        RecordError: It cannot be read, or its content is not as `write_learned` writes it.
    """
    try:
        found = path.stat()
        return _read(path, found.st_mtime_ns, found.st_size)
    except OSError as error:
        raise RecordError(f"{path}: cannot be read ({error.strerror})") from None


def write_learned(path: Path, learned: Learned) -> None:
    """Write a file.

    Raises:
        RecordError: It cannot be written.
    """
    families: dict[str, Any] = {}
    trees: dict[str, str] = {}
    for name, family in learned.families.items():
        names = tuple(family.tiles[0]) if family.tiles else ()
        rows = tuple(tuple(tile[each] for each in names) for tile in family.tiles)
        families[name] = typed.plain(_Family(family.fitted_on, Tiles(names, rows)))
        families[name]["trees"] = [f"trees of {name}"]
        trees[f'["trees of {name}"]'] = ",\n".join(map(jsontext.compact, family.correction.trees))
    plain = {
        "schema": SCHEMA,
        "device": typed.plain(learned.device),
        "created": learned.created,
        "families": families,
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = jsontext.dump(plain)
        for place, lines in trees.items():  # one tree a line
            text = text.replace(place, f"[\n{lines}\n]")
        write_file(path, text)
    except OSError as error:
        raise RecordError(f"{path}: cannot be written ({error.strerror})") from None


@cache
def _read(path: Path, _modified: int, _size: int) -> Learned:
    plain: Any = jsontext.load(read_text(path, LIMIT), path)
    typed.refuse_newer(plain, SCHEMA, path)
    trees: dict[str, Any] = {}
    families = plain.get("families") if isinstance(plain, dict) else None
    for name, family in families.items() if isinstance(families, dict) else ():
        if isinstance(family, dict):
            trees[name] = family.pop("trees", None)
    file = typed.build(_File, plain, path)
    known = {}
    for name, family in file.families.items():
        try:
            if not isinstance(trees[name], list):
                raise ValueError("trees must be a list")
            correction = Correction(trees[name])
        except ValueError as error:
            raise RecordError(f"{path}: $.families.{name}.trees: {error}") from None
        tiles = tuple(dict(zip(family.tiles.parameters, row, strict=True)) for row in family.tiles.values)
        known[name] = LearnedFamily(family.fitted_on, tiles, correction)
    return Learned(file.device, file.created, known)
