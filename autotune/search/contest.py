"""Turns one search per family into one search over all of them, which asks where the fastest are found.

First every family proposes the points it starts with, in turn. Then proposals are shared: a family whose
best takes ``r`` times the best of all gets ``1 / r^8`` of the fastest one's share, and at least an eighth,
which it reaches at r = 1.3. One whose list is exhausted drops out. The order depends on the times told alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from autotune.search import WAIT
from autotune.search.candidates import Candidates

SHARPNESS = 8.0
LEAST_SHARE = 1 / 8
PATIENCE = 8  # rejected candidates beyond its starts after which a family counts as one that finds nothing


class FamilySearch(Protocol):
    """A search of one family's legal list; `autotune.search.Search` is one, and documents the methods."""

    @property
    def asked(self) -> int:
        """Points proposed or taken so far."""
        ...

    @property
    def best(self) -> tuple[int, float] | None:
        """Index and median_ms of the fastest point told, or None."""
        ...

    def ask(self) -> int | None:
        """Propose a point."""
        ...

    def take(self, index: int) -> None:
        """Count a point as proposed."""
        ...

    def tell(self, index: int, median_ms: float | None, outcome: str = "", why: str = "") -> None:
        """Take what became of a point."""
        ...


class Contest:
    """Proposes candidates of several families.

    Args:
        candidates: The list that numbers are of.
        searches: One of each family, in the order of `Candidates.families`.
        starts: How many points each proposes before its share depends on its times.
    """

    def __init__(
        self, candidates: Candidates, searches: Sequence[FamilySearch], starts: Sequence[int] | None = None
    ) -> None:
        self._candidates = candidates
        self._searches = list(searches)
        self._starts = list(starts or [0] * len(searches))
        self._asked = [0] * len(searches)  # without what was taken
        self._told = [0] * len(searches)
        self._turn = [0.0] * len(searches)  # the lowest is next
        self._open = set(range(len(searches)))

    @property
    def asked(self) -> int:
        """Candidates proposed so far, those taken included."""
        return sum(search.asked for search in self._searches)

    def ask(self) -> int | None:
        """Propose a candidate that was never proposed before.

        Returns:
            Its number; `WAIT` when other processes measure all that is left; None when all are exhausted.
        """
        waits = False
        for place in sorted(self._open, key=self._priority):
            point = self._searches[place].ask()
            if point is None:
                self._open.discard(place)
            elif point == WAIT:
                waits = True
            else:
                if self._asked[place] >= self._starts[place]:
                    self._turn[place] += 1 / self._share(place)
                self._asked[place] += 1
                return self._candidates.families[place].begin + point
        return WAIT if waits else None

    def take(self, number: int) -> None:
        """Count a candidate as proposed, because its outcome is known; `tell` it."""
        place, point = self._candidates.place(number)
        self._searches[place].take(point)

    def tell(self, number: int, median_ms: float | None, outcome: str = "", why: str = "") -> None:
        """Take what became of a candidate: its time in ms, None without one."""
        place, point = self._candidates.place(number)
        self._searches[place].tell(point, median_ms, outcome, why)
        self._told[place] += 1

    def _priority(self, place: int) -> tuple[bool, float, int]:
        begun = self._asked[place] >= self._starts[place]
        return begun, self._turn[place] if begun else self._asked[place], place

    def _share(self, place: int) -> float:
        """Compute the part of the fastest family's proposals that a family gets."""
        own = self._searches[place].best
        if own is None:
            return 1.0 if self._told[place] < self._starts[place] + PATIENCE else LEAST_SHARE
        best = min(search.best[1] for search in self._searches if search.best is not None)
        share: float = (best / own[1]) ** SHARPNESS
        return max(LEAST_SHARE, share)
