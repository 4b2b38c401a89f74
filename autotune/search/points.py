"""The points of a legal list as a strategy sees them: coordinates, neighbours, and the outcomes so far."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from autotune.space.space import Legal

SAME_ORDER = 0.98  # correlation with its size from which on a number's divisibility is left out


class Points:
    """The points of a legal list, with coordinates whose distance means something.

    The coordinate of a number is its logarithm, scaled to 0 to 1 over the list. Where its divisibility by
    powers of two does not just follow its size (96 among 64, 96, 128), that is a second coordinate: alignment
    and whole tiles depend on it. Two different words are 1 apart. A parameter with one value has no
    coordinate.

    Attributes:
        legal: The list.
        scale_of: `[coordinates]` intp, the length scale of each coordinate: a parameter has one, its
            divisibility another.
        scales: Number of length scales.
    """

    def __init__(self, legal: Legal) -> None:
        self.legal = legal
        random = np.random.default_rng(0)
        columns = [legal.ordinals[:, i] for i in range(len(legal.names))]
        occurs = [
            np.flatnonzero(np.bincount(column, minlength=len(legal.choices[name])))
            for name, column in zip(legal.names, columns, strict=True)
        ]
        self._varying = [i for i, ordinals in enumerate(occurs) if len(ordinals) > 1]
        self._occurs = [occurs[i] for i in self._varying]
        self._fixed = {
            name: legal.choices[name][ordinals[0]]
            for name, ordinals in zip(legal.names, occurs, strict=True)
            if len(ordinals) == 1
        }
        self._tables: list[NDArray[np.float32]] = []  # of each varying parameter `[ordinals, coordinates]`
        scale_of: list[int] = []
        self.scales = 0
        for i, ordinals in zip(self._varying, self._occurs, strict=True):
            parts = _coordinates(legal.choices[legal.names[i]], ordinals)
            self._tables.append(np.concatenate(parts, axis=1).astype(np.float32))
            for part in parts:
                scale_of += [self.scales] * part.shape[1]
                self.scales += 1
        self.scale_of = np.array(scale_of, np.intp)
        # A point's code is the sum of random numbers, one for each of its values (Zobrist hashing): the code
        # of a neighbour takes one subtraction and one addition, and a sorted list of codes finds its index.
        self._keys = [
            random.integers(0, 2**64, len(legal.choices[legal.names[i]]), dtype=np.uint64)
            for i in self._varying
        ]
        self._codes = np.zeros(len(legal), np.uint64)
        for i, keys in zip(self._varying, self._keys, strict=True):
            self._codes += keys[columns[i]]
        self._order = np.argsort(self._codes, kind="stable")
        self._sorted = self._codes[self._order]

    def __len__(self) -> int:
        return len(self.legal)

    def coordinates(self, indices: Sequence[int] | NDArray[np.intp]) -> NDArray[np.float32]:
        """Return the coordinates of points, `[indices, coordinates]` float32."""
        rows = self.legal.ordinals[np.asarray(indices, np.intp)]
        if not self._tables:
            return np.zeros((len(rows), 0), np.float32)
        return np.concatenate(
            [table[rows[:, i]] for i, table in zip(self._varying, self._tables, strict=True)], axis=1
        )

    def neighbours(self, index: int) -> NDArray[np.intp]:
        """Return the points that differ from one point in exactly one parameter."""
        row, own = self.legal.ordinals[index], self._codes[index : index + 1]
        codes = [
            own - keys[row[i] : row[i] + 1] + keys[ordinals[ordinals != row[i]]]
            for i, keys, ordinals in zip(self._varying, self._keys, self._occurs, strict=True)
        ]
        return self._found(np.concatenate(codes)) if codes else np.zeros(0, np.intp)

    def index(self, config: Mapping[str, Any]) -> int | None:
        """Return the index of a config, as `Legal.index` but in microseconds; None if it is not legal."""
        if any(config.get(name) != value for name, value in self._fixed.items()):
            return None
        code = np.zeros(1, np.uint64)
        for i, keys in zip(self._varying, self._keys, strict=True):
            name = self.legal.names[i]
            try:
                code += keys[self.legal.choices[name].index(config[name])]
            except (KeyError, ValueError):
                return None
        found = self._found(code)
        return int(found[0]) if len(found) else None

    def _found(self, codes: NDArray[np.uint64]) -> NDArray[np.intp]:
        places = np.minimum(np.searchsorted(self._sorted, codes), len(self._sorted) - 1)
        found: NDArray[np.intp] = self._order[places[self._sorted[places] == codes]]
        return found


class History:
    """The outcomes of the points proposed so far; `read` brings them up to date.

    Attributes:
        told: Logarithm of the time in ms by index, in the order in which the points were proposed.
        rejected: Indices of rejected points, in that order.
        pending: Indices of points under way, in that order.
    """

    def __init__(self, points: Points) -> None:
        self.told: dict[int, float] = {}
        self.rejected: list[int] = []
        self.pending: list[int] = []
        self._points = points
        self._trials: dict[int, Any] = {}  # index to its latest trial
        self._next = 0  # number of the first trial that was not read yet
        self._open: dict[int, int | None] = {}  # number to index of the trials that had not ended when read

    def read(self, study: Any, seen: NDArray[np.bool_]) -> None:
        """Read what changed since the last call.

        Args:
            study: The `optuna.Study`; a trial without parameters, which has just begun, is skipped.
            seen: `[count]` bool; a point that failed and is no longer seen was given back, not rejected.
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


def _coordinates(choices: Sequence[Any], ordinals: NDArray[np.intp]) -> list[NDArray[np.float64]]:
    """Return the coordinates of a parameter's choices: an array `[choices, coordinates]` per length scale.

    Args:
        choices: All values of the parameter.
        ordinals: Which of them occur, at least two.
    """
    if any(isinstance(choices[ordinal], str) for ordinal in ordinals):
        words = np.zeros((len(choices), len(ordinals)))
        words[ordinals, np.arange(len(ordinals))] = math.sqrt(0.5)
        return [words]
    values = np.zeros(len(choices))
    values[ordinals] = [float(choices[ordinal]) for ordinal in ordinals]
    least = values[ordinals].min()
    size = np.zeros(len(choices))
    size[ordinals] = _scaled(np.log2(values[ordinals] + (0 if least > 0 else 1 - least)))
    parts = [size[:, None]]
    if len(ordinals) > 2 and least > 0 and all(isinstance(choices[ordinal], int) for ordinal in ordinals):
        twos = np.array([(choices[ordinal] & -choices[ordinal]).bit_length() for ordinal in ordinals], float)
        if np.ptp(twos) and abs(np.corrcoef(twos, size[ordinals])[0, 1]) < SAME_ORDER:
            divisible = np.zeros((len(choices), 1))
            divisible[ordinals, 0] = _scaled(twos)
            parts.append(divisible)
    return parts


def _scaled(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Scale values to 0 to 1."""
    return np.asarray((values - values.min()) / np.ptp(values))
