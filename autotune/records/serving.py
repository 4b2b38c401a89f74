"""Turns a problem and a device into the stored winners that serve it, each with its source rendered today."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune import records
from autotune.code.render import Source
from autotune.code.sources import rendered
from autotune.errors import ConfigError, RecordError
from autotune.records.schema import Record
from autotune.space.space import Space, families
from autotune.values.device import Device
from autotune.values.problem import Problem


@dataclass(frozen=True)
class Winner:
    """A record that serves, and what it serves with.

    Attributes:
        record: As stored.
        source: Its config rendered today, with the code digest of the record.
        space: The family it is of.
    """

    record: Record
    source: Source
    space: Space

    @property
    def median_ms(self) -> float:
        """Its time when it was recorded, milliseconds."""
        assert self.record.timing is not None, "only measured records serve"
        return self.record.timing.median_ms


@dataclass(frozen=True)
class Lookup:
    """What the stored records say of one problem on one device.

    Attributes:
        winners: Those that serve, the fastest first; one for each family at most.
        refused: One line for each record that exists and does not serve.
        estimated: Whether there is an estimated record, which never serves.
    """

    winners: tuple[Winner, ...]
    refused: tuple[str, ...]
    estimated: bool

    def why(self, problem: Problem, device: Device) -> str:
        """Say in one line why nothing serves."""
        told = "; ".join(self.refused) or f"no record of {problem} on {device.name}"
        return told + (" (there is an estimated one, which is never served)" if self.estimated else "")


def look_up(
    problem: Problem, device: Device, *, spaces: Sequence[Space] | None = None, root: Path | None = None
) -> Lookup:
    """Find every measured record that serves a problem on a device exactly, the fastest first.

    Args:
        problem: What is to be computed.
        device: Where.
        spaces: The families to look at; when not given, all built-in ones that serve the problem.
        root: Folder of records; `autotune.paths.cache_dir` when not given.
    """
    winners: list[Winner] = []
    refused: list[str] = []
    estimated = False
    for space in families(problem, device) if spaces is None else spaces:
        try:
            record = records.find(device, space.family, problem, root=root)
            estimated |= records.find(device, space.family, problem, root=root, estimated=True) is not None
        except RecordError as error:  # of a newer schema, or unreadable: another family may still serve
            refused.append(str(error))
            continue
        if record is None:
            continue
        try:
            source = rendered(space, record.config, problem, device, root=root)
        except ConfigError as error:
            refused.append(f"the {space.family} record of {problem} on {device.name} is stale: {error}")
            continue
        why = records.serves(record, device, problem, source)
        if why is None:
            winners.append(Winner(record, source, space))
        else:
            refused.append(f"{space.family}, {problem} on {device.name}: {why}")
    winners.sort(key=lambda winner: winner.median_ms)
    return Lookup(tuple(winners), tuple(refused), estimated)
