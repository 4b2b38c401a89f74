"""The search over several kernel families at once: faster families get more of the proposals.

First the families propose their starting points, in turn. Then a family whose best time is ``r`` times the
best of all gets ``1 / r^8`` as many proposals as the fastest family, but at least an eighth, which it reaches
at r = 1.3. A family whose list is exhausted drops out. The order depends on nothing but the measured times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from autotune.search.candidates import Candidates
from autotune.search.search import WAIT

SHARPNESS = 8.0
LEAST_SHARE = 1 / 8
PATIENCE = 8  # rejections after its starts, from which on a family without a time gets the least share


class Proposer(Protocol):
    """Where proposals come from; `autotune.search.Search` is one, and documents the methods."""

    @property
    def asked(self) -> int:
        """Points proposed or taken so far."""
        ...

    def ask(self) -> int | None:
        """Propose a point that was never proposed before; `WAIT` if there may be one later; else None."""
        ...

    def take(self, number: int, /) -> None:
        """Count a point as proposed, because its outcome is known already."""
        ...

    def tell(self, number: int, median_ms: float | None, outcome: str, why: str, /) -> None:
        """Learn the outcome of a proposed point."""
        ...


class FamilySearch(Proposer, Protocol):
    """A search of one family's legal list."""

    @property
    def best(self) -> tuple[int, float] | None:
        """Index and median_ms of the fastest point told, or None."""
        ...


class Contest:
    """Proposes candidates of several families.

    Args:
        candidates: The candidates of all families.
        searches: One for each family, in the order of `Candidates.families`.
        starts: Number of points that each family proposes before its share depends on its times.
    """

    def __init__(
        self, candidates: Candidates, searches: Sequence[FamilySearch], starts: Sequence[int] | None = None
    ) -> None:
        self._candidates = candidates
        self._searches = list(searches)
        self._starts = list(starts or [0] * len(searches))
        self._asked = [0] * len(searches)  # by family, without what was taken
        self._told = [0] * len(searches)
        self._turn = [0.0] * len(searches)  # the lowest is next
        self._open = set(range(len(searches)))

    @property
    def asked(self) -> int:
        """Number of candidates proposed so far, those taken included."""
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
        """Report the outcome of a candidate: its time in ms, or None where it was rejected."""
        place, point = self._candidates.place(number)
        self._searches[place].tell(point, median_ms, outcome, why)
        self._told[place] += 1

    def _priority(self, place: int) -> tuple[bool, float, int]:
        begun = self._asked[place] >= self._starts[place]
        return begun, self._turn[place] if begun else self._asked[place], place

    def _share(self, place: int) -> float:
        """Return how many proposals a family gets for each one of the fastest family."""
        own = self._searches[place].best
        if own is None:
            return 1.0 if self._told[place] < self._starts[place] + PATIENCE else LEAST_SHARE
        best = min(search.best[1] for search in self._searches if search.best is not None)
        share: float = (best / own[1]) ** SHARPNESS
        return max(LEAST_SHARE, share)
