"""Turns a legal list into an order that no time told changes: all points, as listed or shuffled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from autotune.space.space import Legal


class Exhaustive:
    """Every point in the order of the legal list."""

    def __init__(self, legal: Legal, distributions: dict[str, Any], seed: int) -> None:
        self._order = np.arange(len(legal))
        self._next = 0

    def propose(self, study: Any, trial: Any, seen: NDArray[np.bool_]) -> int:
        """Take the next point of the order that is not seen yet."""
        while seen[self._order[self._next]]:
            self._next += 1
        return int(self._order[self._next])


class Random(Exhaustive):
    """Every point in a random order: uniform over the legal list, without repetition."""

    def __init__(self, legal: Legal, distributions: dict[str, Any], seed: int) -> None:
        super().__init__(legal, distributions, seed)
        self._order = np.random.default_rng(seed).permutation(len(legal))
