"""A correction of the static estimate that was learned from measured trials: regression trees, summed.

A tree is a number (a leaf), or ``[feature, threshold, below, above]`` with two trees in it: ``below`` counts
where the feature is not above the threshold. The sum of all trees is the natural logarithm of measured over
estimated time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tree = float | Sequence[Any]
DEPTH = 32  # of a tree, at most
TOGETHER = 40  # trees that are followed side by side: their nodes stay in a core's own cache


class Correction:
    """Trees over named features.

    Args:
        trees: As described above.

    Raises:
        ValueError: A tree is malformed; the message says where.
    """

    def __init__(self, trees: Sequence[Tree]) -> None:
        self.trees = tuple(trees)
        try:
            self.features, self._feature, self._next, self._value = _flattened(trees)
        except (OverflowError, TypeError, ValueError):
            for number, tree in enumerate(trees):
                _check(tree, f"tree {number}", DEPTH)
            raise
        self._roots = np.arange(len(trees))
        self._inner = self._next[:, 0] != np.arange(len(self._value))  # a leaf follows itself

    def factors(self, columns: Mapping[str, Any], count: int) -> NDArray[np.float64]:
        """Return what the estimates of configs are to be multiplied by.

        Args:
            columns: Each feature to a column `[count]`, or to one value that all share.
            count: Configs.

        Returns:
            `[count]` float64.

        Raises:
            KeyError: A feature is missing.
        """
        total = np.zeros(count)
        if not count:
            return total
        table = np.empty((len(self.features), count))
        for place, name in enumerate(self.features):
            table[place] = columns[name]
        alike = (table == table[:, :1]).all(axis=1)
        roots, following = self._decided(np.where(alike, table[:, 0], np.nan))
        flat, row, rows = table.ravel(), self._feature * count, np.arange(count)
        for begin in range(0, len(roots), TOGETHER):
            nodes = np.repeat(roots[begin : begin + TOGETHER, None], count, axis=1)
            while self._inner.take(nodes).any():
                goes_below = flat.take(row.take(nodes) + rows) <= self._value.take(nodes)
                nodes = following.take(2 * nodes + goes_below)
            total += self._value.take(nodes).sum(axis=0)
        return np.asarray(np.exp(total))

    def _decided(self, shared: NDArray[np.float64]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Pass over the nodes that all configs leave alike.

        Args:
            shared: Value of each feature that all configs share; NaN for one that they do not.

        Returns:
            Root of each tree; and `[nodes, 2]`, flat, what follows each node.
        """
        places = np.arange(len(self._feature))
        values = shared.take(self._feature) if len(shared) else np.full(len(places), np.nan)
        alike = self._inner & ~np.isnan(values)
        passed = np.where(alike, self._next[places, (values <= self._value).astype(np.intp)], places)
        while alike[passed].any():
            passed = passed[passed]
        return passed[self._roots], passed[self._next].ravel()


def _flattened(
    trees: Sequence[Tree],
) -> tuple[tuple[str, ...], NDArray[np.intp], NDArray[np.intp], NDArray[np.float64]]:
    """Make arrays of trees, all of them a level at a time: node by node it takes five times as long.

    Returns:
        Names of the features. Of each node, roots first: its feature; `[nodes, 2]`, what follows where the
        feature is above the threshold and where it is not; the threshold, or what a leaf adds.

    Raises:
        OverflowError, TypeError, ValueError: A tree is malformed.
    """
    features: dict[str, int] = {}
    parts: list[tuple[NDArray[Any], ...]] = []
    level: list[Any] = list(trees)
    begin = 0
    while level or not parts:
        inner = np.array([type(tree) is list for tree in level], bool)
        parting = [tree for tree in level if type(tree) is list]
        names = [name for name, _, _, _ in parting]
        numbers = [tree[1] if type(tree) is list else tree for tree in level]
        value = np.array(numbers, np.float64)
        kinds = {*map(type, numbers)} <= {float, int} and {*map(type, names)} <= {str}
        if not (kinds and np.isfinite(value).all()) or len(parts) > DEPTH:
            raise ValueError("a tree is malformed")
        feature = np.zeros(len(level), np.intp)
        feature[inner] = [features.setdefault(name, len(features)) for name in names]
        own = np.arange(begin, begin + len(level))
        begin += len(level)
        below = np.where(inner, begin + 2 * (inner.cumsum() - 1), own)
        parts.append((feature, np.array([below + inner, below]).T, value))
        level = [branch for _, _, *branches in parting for branch in branches]
    feature, following, value = (np.concatenate(part) for part in zip(*parts, strict=True))
    return tuple(features), feature, following, value


def _check(tree: Any, where: str, left: int) -> None:
    """Raise `ValueError` where a tree is malformed."""
    if isinstance(tree, list):
        if len(tree) == 4 and isinstance(tree[0], str) and left:
            if not _is_number(tree[1]):
                raise ValueError(f"{where}: the threshold of {tree[0]} is no finite number")
            for branch in tree[2:]:
                _check(branch, where, left - 1)
            return
    elif _is_number(tree):
        return
    raise ValueError(f"{where} is neither a number nor [feature, threshold, below, above]")


def _is_number(value: Any) -> bool:
    return type(value) in (float, int) and abs(value) < math.inf
