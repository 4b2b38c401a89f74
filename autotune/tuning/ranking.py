"""The order in which candidates are tried where nothing is measured: by their estimate, best first."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from autotune.families.estimate import estimate_columns, knows
from autotune.search.candidates import Candidates
from autotune.space.space import Legal, Space
from autotune.values.device import Device
from autotune.values.problem import Problem


def _ranked(
    space: Space, legal: Legal, problem: Problem, device: Device, seed: int
) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.float32]]:
    """Return the legal points in their order, and of each its round and its estimate.

    The model is blind to some parameters, so many points tie. Of each such set only the point nearest to a
    preset comes in the first round, chance deciding between several; then one more of each, and so on.
    """
    cost = estimate_columns(space, space.columns(legal, problem, device), problem, device).astype(np.float32)
    best_first = np.lexsort((_chance(legal, seed), _steps(space, legal), cost))
    ranked = cost[best_first]
    begins = np.flatnonzero(np.append(True, ranked[1:] != ranked[:-1]))  # of each set of ties
    turn = np.arange(len(legal)) - np.repeat(begins, np.diff(np.append(begins, len(legal))))
    rounds = np.argsort(turn, kind="stable")
    return best_first[rounds], turn[rounds], ranked[rounds]


def ordered(candidates: Candidates, seed: int) -> Iterator[int]:
    """List the candidates of all families in one order; without estimates, those near a preset first."""
    numbers, turns, costs = [], [], []
    for family in candidates.families:
        space, legal = family.space, family.legal
        if knows(space):
            points, turn, cost = _ranked(space, legal, candidates.problem, candidates.device, seed)
        else:
            points = np.lexsort((_chance(legal, seed), _steps(space, legal)))
            turn, cost = np.zeros(len(legal), np.intp), np.zeros(len(legal), np.float32)
        numbers.append(family.begin + points)
        turns.append(turn)
        costs.append(cost)
    places = np.lexsort((np.concatenate(costs), np.concatenate(turns)))
    return (int(number) for number in np.concatenate(numbers)[places])


def _steps(space: Space, legal: Legal) -> NDArray[np.float64]:
    """Return how far each point is from the nearest preset."""
    steps: NDArray[np.float64] = np.min(
        [legal.steps(preset) for preset in space.presets.values()] or [np.zeros(len(legal))], axis=0
    )
    return steps


def _chance(legal: Legal, seed: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).permutation(len(legal))
