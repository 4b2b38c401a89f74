"""Candidates: the legal configs of all spaces that a search looks at, as one numbered list."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autotune.code.render import Source, render, require_template
from autotune.errors import SpaceError
from autotune.search.points import Points
from autotune.space.space import Config, Legal, Space, unserved
from autotune.space.statements import Value
from autotune.values.device import Device
from autotune.values.problem import Problem


@dataclass(frozen=True)
class Family:
    """One space's share of the list.

    Attributes:
        space: Where its configs come from.
        legal: Its legal points.
        begin: Number of its first candidate; the others follow in the order of ``legal``.
    """

    space: Space
    legal: Legal = field(repr=False)
    begin: int

    @property
    def name(self) -> str:
        """The family's name."""
        return self.space.family

    def numbers(self, points: Iterable[int | None]) -> list[int]:
        """Return the numbers of candidates, given indices of the legal list; None is left out."""
        return [self.begin + point for point in points if point is not None]


class Candidates:
    """Every legal config of several families, numbered from 0; the families keep their order.

    Args:
        spaces: The families.
        problem: What every candidate computes.
        device: Where.
        only: For each space the legal configs that are candidates, in place of all: then none is listed.

    Attributes:
        problem: What every candidate computes.
        device: Where.
        families: Those with at least one legal config.
        without: Why each other space is not among them.

    Raises:
        SpaceError: No space has a legal config, or none was given, or one computes another math.
    """

    def __init__(
        self,
        spaces: Sequence[Space],
        problem: Problem,
        device: Device,
        only: Sequence[Sequence[Config]] | None = None,
    ) -> None:
        self.problem = problem
        self.device = device
        self.without: list[str] = []
        found: list[Family] = []
        count = 0
        for place, space in enumerate(spaces):
            space.require_math(problem)  # its record would say what it is not
            if only is not None and not only[place]:
                continue
            try:
                legal = space.enumerate(problem, device) if only is None else space.points(only[place])
            except SpaceError as error:
                if len(spaces) == 1:
                    raise
                self.without.append(str(error))
                continue
            if not space.is_built_in:
                require_template(space, legal.config(0), problem, device)
            found.append(Family(space, legal, count))
            count += len(legal)
        if not found:
            raise SpaceError("; ".join(self.without) or unserved(problem, device))
        self.families = tuple(found)
        self._begins = [family.begin for family in found]
        self._count = count

    def __len__(self) -> int:
        return self._count

    def family(self, number: int) -> Family:
        """Return the family of a candidate."""
        return self.families[self.place(number)[0]]

    def place(self, number: int) -> tuple[int, int]:
        """Return the position of a candidate's family, and its index in the family's legal list."""
        position = bisect_right(self._begins, number) - 1
        return position, number - self._begins[position]

    def config(self, number: int) -> Config:
        """Return the choices of a candidate."""
        position, point = self.place(number)
        return self.families[position].legal.config(point)

    def number(self, space: Space, config: Mapping[str, Value]) -> int:
        """Return the number of a candidate, which there must be."""
        family = next(each for each in self.families if each.space is space)
        (number,) = family.numbers([family.legal.index(config)])
        return number

    def source(self, number: int) -> Source:
        """Render a candidate.

        Raises:
            SpaceError: Its template fails on it.
        """
        position, point = self.place(number)
        family = self.families[position]
        return render(family.space, family.legal.config(point), self.problem, self.device)


def config_of(line: Mapping[str, Any]) -> Config | None:
    """Read the config of a line of a trial log; None where it has none, or one that no space could have."""
    values = line.get("config")
    if not isinstance(values, dict) or not all(isinstance(value, int | str) for value in values.values()):
        return None
    return Config(values)


def points_of(legal: Legal, configs: Sequence[Mapping[str, Value]]) -> list[int | None]:
    """Find many configs in a legal list at once; None for one that is not in it.

    `Legal.index` looks at every point for each config: 5 ms in a list of 232,000. This sorts the list once.
    """
    if not configs:
        return []
    points = Points(legal)
    return [points.index(config) for config in configs]
