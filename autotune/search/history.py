"""Turns the trials of a study into what is known of the points of a legal list."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.search.points import Points


class History:
    """What became of the points proposed so far; `read` brings it up to date.

    Attributes:
        told: Index to the logarithm of its time in ms, in the order in which the points were proposed.
        rejected: Indices of those that have no time, in that order.
        pending: Indices of those under way, in that order.
    """

    def __init__(self, points: Points) -> None:
        self.told: dict[int, float] = {}
        self.rejected: list[int] = []
        self.pending: list[int] = []
        self._points = points
        self._trials: dict[int, Any] = {}  # index to its latest trial
        self._next = 0  # number of the first trial that was never looked at
        self._open: dict[int, int | None] = {}  # number to index of those that had not ended then

    @property
    def best(self) -> int | None:
        """The fastest point told."""
        return min(self.told, key=self.told.__getitem__, default=None)

    def read(self, study: Any, seen: NDArray[np.bool_]) -> None:
        """Take what changed since the last call.

        Args:
            study: The `optuna.Study`; nothing is known of a trial that has no parameters yet.
            seen: `[count]` bool; a point that failed and is not seen any more was given back, not rejected.
        """
        from optuna.trial import TrialState

        trials = study.get_trials(deepcopy=False)
        for number in [*self._open, *range(self._next, len(trials))]:
            index = self._open.pop(number, None)
            if index is None:
                index = self._points.index(trials[number].params)
            if index is not None:
                self._trials[index] = trials[number]
            if not trials[number].state.is_finished():
                self._open[number] = index
        self._next = len(trials)
        self.told, self.rejected, self.pending = {}, [], []
        for index, trial in self._trials.items():
            if trial.state == TrialState.COMPLETE:
                self.told[index] = trial.value
            elif trial.state == TrialState.RUNNING:
                self.pending.append(index)
            elif seen[index]:
                self.rejected.append(index)
