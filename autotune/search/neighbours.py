"""Turns the times told so far into a step downhill: a neighbour of a fast point, or a new start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from autotune.search.history import History
from autotune.search.points import Points

if TYPE_CHECKING:
    from autotune.space.space import Legal

STARTS = 10  # random points of which each climb begins at the fastest


class Neighbours:
    """Hill climbing with restarts.

    A climb stands at the fastest point it has found. It proposes unseen neighbours of that, which differ in
    one parameter, in random order, and moves as soon as one is faster. Where none is left, nor under way, it
    ends, and another begins at the fastest of some new random points.
    """

    def __init__(self, legal: Legal, distributions: dict[str, Any], seed: int) -> None:
        self._points = Points(legal)
        self._history = History(self._points)
        self._rng = np.random.default_rng(seed)
        self._own: set[int] = set()  # points of this climb, its starts included

    def propose(self, study: Any, trial: Any, seen: NDArray[np.bool_]) -> int:
        """Choose a neighbour, or a start."""
        self._history.read(study, seen)
        if not self._own:
            self._own = {*self._history.told, *self._history.pending}  # where others began
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
