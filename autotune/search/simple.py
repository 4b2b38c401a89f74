"""Strategies without a model of the times: the list in order, in random order, and hill climbing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from autotune.search.points import History, Points

if TYPE_CHECKING:
    from autotune.space.space import Legal

STARTS = 10  # random points; each climb begins at the fastest of them


class Exhaustive:
    """Every point in the order of the legal list."""

    def __init__(self, legal: Legal, distributions: dict[str, Any], seed: int) -> None:
        self._order = np.arange(len(legal))
        self._next = 0

    def propose(self, study: Any, trial: Any, seen: NDArray[np.bool_]) -> int:
        """Return the next unseen point of the order."""
        while seen[self._order[self._next]]:
            self._next += 1
        return int(self._order[self._next])


class Random(Exhaustive):
    """Every point of the legal list in a random order."""

    def __init__(self, legal: Legal, distributions: dict[str, Any], seed: int) -> None:
        super().__init__(legal, distributions, seed)
        self._order = np.random.default_rng(seed).permutation(len(legal))


class Neighbours:
    """Hill climbing with restarts.

    A climb proposes, in random order, the unseen neighbours of the fastest point it has found, which differ
    from it in one parameter, and moves as soon as one is faster. It ends where no neighbour is left and no
    point of it is under way; the next climb begins at the fastest of `STARTS` new random points.
    """

    def __init__(self, legal: Legal, distributions: dict[str, Any], seed: int) -> None:
        self._points = Points(legal)
        self._history = History(self._points)
        self._rng = np.random.default_rng(seed)
        self._own: set[int] = set()  # points of this climb, with its starting points

    def propose(self, study: Any, trial: Any, seen: NDArray[np.bool_]) -> int:
        """Return an unseen neighbour of the fastest point of this climb, or a random point to start from."""
        self._history.read(study, seen)
        if not self._own:
            self._own = {*self._history.told, *self._history.pending}  # what is known from elsewhere
        told = self._history.told
        if len(self._own) >= STARTS and (mine := [index for index in self._own if index in told]):
            here = min(mine, key=lambda index: (told[index], index))
            around = self._points.neighbours(here)
            around = around[~seen[around]]
            if len(around):
                return self._chosen(int(self._rng.choice(around)))
            if not self._own.intersection(self._history.pending):
                self._own = set()
        return self._chosen(int(self._rng.choice(np.flatnonzero(~seen))))

    def _chosen(self, index: int) -> int:
        self._own.add(index)
        return index
