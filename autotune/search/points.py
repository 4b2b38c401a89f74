"""Turns a legal list into what a search asks of it: coordinates, neighbours, and the point of a config."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from autotune.space.space import Legal

SAME_ORDER = 0.98  # correlation from which a number's divisibility says no more than its size


class Points:
    """The points of a legal list, in coordinates that a distance makes sense in.

    A number stands at its logarithm, scaled to 0 to 1 over the list. Where its divisibility by powers of two
    is another matter than its size (96 of 64, 96, 128), that is a coordinate of its own: alignment and whole
    tiles depend on it. Two different words are 1 apart. Parameters with one value have no coordinate.

    Attributes:
        legal: The list.
        scale_of: `[coordinates]`, which length scale each coordinate has: one for a word or number, one for a
            divisibility.
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
        """Give `[indices, coordinates]`."""
        rows = self.legal.ordinals[np.asarray(indices, np.intp)]
        if not self._tables:
            return np.zeros((len(rows), 0), np.float32)
        return np.concatenate(
            [table[rows[:, i]] for i, table in zip(self._varying, self._tables, strict=True)], axis=1
        )

    def neighbours(self, index: int) -> NDArray[np.intp]:
        """List the points that differ from one in exactly one parameter."""
        row, own = self.legal.ordinals[index], self._codes[index : index + 1]
        codes = [
            own - keys[row[i] : row[i] + 1] + keys[ordinals[ordinals != row[i]]]
            for i, keys, ordinals in zip(self._varying, self._keys, self._occurs, strict=True)
        ]
        return self._found(np.concatenate(codes)) if codes else np.zeros(0, np.intp)

    def index(self, config: Mapping[str, Any]) -> int | None:
        """Find a config: like `Legal.index`, but in microseconds."""
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


def _coordinates(choices: Sequence[Any], ordinals: NDArray[np.intp]) -> list[NDArray[np.float64]]:
    """Give the coordinates of a parameter's choices, those of one length scale together: `[choices, k]` each.

    Args:
        choices: All values of the parameter.
        ordinals: Those that occur, at least two.
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
    return np.asarray((values - values.min()) / np.ptp(values))
