"""A correction of the static estimate that was learned from measured trials: regression trees, summed.

A tree is a number (a leaf), or ``[feature, threshold, below, above]`` with two trees in it: ``below`` counts
where the feature is not above the threshold. The sum of all trees is the natural logarithm of measured over
estimated time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tree = float | Sequence[Any]
DEPTH = 32  # of a tree, at most
_LEAF = -1


class Correction:
    """Trees over named features.

    Args:
        trees: As described above.

    Raises:
        ValueError: A tree is malformed; the message says where.
    """

    def __init__(self, trees: Sequence[Tree]) -> None:
        self.trees = tuple(trees)
        features: dict[str, int] = {}
        nodes: list[tuple[int, float, int, int]] = []
        self._roots = np.array(
            [_flatten(tree, nodes, features, f"tree {number}", DEPTH) for number, tree in enumerate(trees)],
            np.int64,
        )
        self.features = tuple(features)
        feature, value, below, above = zip(*nodes, strict=True) if nodes else ((), (), (), ())
        self._feature, self._below, self._above = (
            np.array(part, np.int64) for part in (feature, below, above)
        )
        self._value = np.array(value)  # a threshold, or what a leaf adds

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
        table = np.empty((count, len(self.features)))
        for place, name in enumerate(self.features):
            table[:, place] = columns[name]
        flat = table.ravel()
        rows = np.arange(count)[:, None] * len(self.features)
        nodes = np.broadcast_to(self._roots, (count, len(self._roots)))
        while (inner := self._feature.take(nodes) != _LEAF).any():
            # A leaf follows itself: what is compared there does not matter.
            features = np.maximum(self._feature.take(nodes), 0)
            goes_below = flat.take(rows + features) <= self._value.take(nodes)
            following = np.where(goes_below, self._below.take(nodes), self._above.take(nodes))
            nodes = np.where(inner, following, nodes)
        return np.asarray(np.exp(self._value.take(nodes).sum(axis=1)))


def _flatten(
    tree: Any, nodes: list[tuple[int, float, int, int]], features: dict[str, int], where: str, left: int
) -> int:
    """Append a tree's nodes, and return the place of its root."""
    place = len(nodes)
    if isinstance(tree, int | float) and not isinstance(tree, bool) and np.isfinite(tree):
        nodes.append((_LEAF, float(tree), _LEAF, _LEAF))
        return place
    if not isinstance(tree, list | tuple) or len(tree) != 4 or not isinstance(tree[0], str) or not left:
        raise ValueError(f"{where} is neither a number nor [feature, threshold, below, above]")
    name, threshold, below, above = tree
    if not isinstance(threshold, int | float) or isinstance(threshold, bool) or not np.isfinite(threshold):
        raise ValueError(f"{where}: the threshold of {name} is no finite number")
    feature = features.setdefault(name, len(features))
    nodes.append((feature, float(threshold), _LEAF, _LEAF))
    lower = _flatten(below, nodes, features, where, left - 1)
    upper = _flatten(above, nodes, features, where, left - 1)
    nodes[place] = (feature, float(threshold), lower, upper)
    return place
