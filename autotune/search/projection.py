"""Strategies that ask an Optuna sampler, which knows no constraints, and take the nearest unseen legal point.

The sampler sees one categorical distribution for each parameter. Its raw proposal is projected to the nearest
legal point that was not proposed before. The trial holds the projected point from its start, so that a
sampler which reads running trials, as TPE's constant liar does, keeps later proposals away from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from autotune.space.space import Legal

MISMATCH_COST = 0.5  # added to the scaled ordinal distance for each parameter that differs


class Projected:
    """Any Optuna sampler, its proposals projected to the legal list.

    Args:
        legal: The points.
        distributions: Of each parameter, as `autotune.search.distributions` returns them.
        seed: For choosing between legal points that are equally near; the sampler has its own.
        sampler: An `optuna.samplers.BaseSampler`.
    """

    def __init__(self, legal: Legal, distributions: dict[str, Any], seed: int, sampler: Any) -> None:
        self.sampler = sampler
        self._legal = legal
        self._space = {name: each for name, each in distributions.items() if not each.single()}
        self._rng = np.random.default_rng(seed)
        self._projection = Projection(legal)

    def propose(self, study: Any, trial: Any, seen: NDArray[np.bool_]) -> int:
        """Return the unseen point nearest to the sampler's proposal."""
        relative = self.sampler.infer_relative_search_space(study, trial)
        joint = {name: each for name, each in relative.items() if name in self._space}
        raw = self.sampler.sample_relative(study, trial, joint) if joint else {}
        alone = {
            name: self.sampler.sample_independent(study, trial, name, each)
            for name, each in self._space.items()
            if name not in raw
        }
        return self._projected({**raw, **alone}, seen)

    def _projected(self, raw: dict[str, Any], seen: NDArray[np.bool_]) -> int:
        choices = self._legal.choices
        target = [choices[name].index(raw[name]) if name in raw else 0 for name in self._legal.names]
        return int(self._rng.choice(self._projection.nearest(target, seen)))


class Tpe(Projected):
    """Optuna's multivariate TPE (Bergstra et al. 2011), its proposals projected to the legal list."""

    def __init__(self, legal: Legal, distributions: dict[str, Any], seed: int) -> None:
        import optuna

        super().__init__(legal, distributions, seed, optuna.samplers.TPESampler(seed=seed))

    def propose(self, study: Any, trial: Any, seen: NDArray[np.bool_]) -> int:
        """Return the unseen point nearest to TPE's proposal; until 10 trials are complete, a random one."""
        raw = self.sampler.sample_relative(study, trial, self._space)
        return self._projected(raw, seen) if raw else int(self._rng.choice(np.flatnonzero(~seen)))


class Projection:
    """Finds the unseen legal points nearest to any combination of values.

    The distance is a sum over the parameters that differ: the difference of their ordinals, divided by the
    number of choices less one, plus `MISMATCH_COST`.
    """

    def __init__(self, legal: Legal) -> None:
        self._legal = legal
        self._distance = np.empty(len(legal), np.float32)
        self._part = np.empty(len(legal), np.float32)

    def nearest(self, target: Sequence[int], seen: NDArray[np.bool_]) -> NDArray[np.intp]:
        """Return the unseen points at the smallest distance, in list order.

        Args:
            target: One ordinal per parameter, in the order of `legal.names`.
            seen: `[count]` bool, true for points to leave out; at least one is false.
        """
        distance = self._distance
        distance.fill(0)
        costs = []
        for choices, ordinal in zip(self._legal.choices.values(), target, strict=True):
            gap = np.abs(np.arange(len(choices)) - ordinal)
            cost = gap / max(1, len(choices) - 1) + MISMATCH_COST * (gap > 0)
            costs.append(cost.astype(np.float32))
        for table, codes in self._legal.tables(costs):
            np.take(table, codes, out=self._part, mode="clip")  # mode "raise" would buffer the output
            distance += self._part
        np.putmask(distance, seen, np.inf)
        return np.flatnonzero(distance <= distance.min() + 1e-5)  # sums in another order differ by rounding
