"""The default strategy: Bayesian optimisation with a Gaussian process over the legal list.

Each proposal adds the outcomes since the last one to the Gaussian process; only once in a while are the
length scales fitted and the process built again (`REFIT`, `LONGEST`). Of a long list not every point is
scored: a random part, drawn again at each fit, the neighbours of the fastest points, and from the best of
these a climb over legal neighbours. So a proposal costs the same whether the list has 3,000 points or a
million.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from autotune.search.points import History, Points
from autotune.search.surrogate import Posterior, Scales

if TYPE_CHECKING:
    from autotune.space.space import Legal

STARTS = 8  # initial points, far from each other ...
OWN_STARTS = 4  # ... of which at least this many are proposed even where outcomes are known from elsewhere
DRAWS = 200  # random points for each initial point: the one farthest from all proposed so far is taken
LEAST_TOLD = 4  # measured times that the model needs
CANDIDATES = 3000  # points scored for a proposal, beside neighbours: the whole list, or a random sample
BEST = 5  # fastest points whose neighbours are scored
CLIMB = 4  # steps
REFIT, LONGEST = 8, 32  # least and most new points between fits of the length scales; else a fifth of all
FITTED = 150  # most points that the scales are fitted to: the fastest, and a random sample of the others
KEPT = 256  # most measured points that the model holds after a fit, chosen likewise ...
KEPT_REJECTED = 128  # ... and most rejected points, a random sample
BOUND = 2.0  # standard deviations of the lower confidence bound
WORST = 3.0  # value of a slow point; values are standardised
TAIL = (
    0.5  # log times beyond the median are compressed on a scale of this times its distance from the best ...
)
LEAST_TAIL = 0.05  # ... or of this times TAIL, where that distance is less


class Gp:
    """Bayesian optimisation with a Gaussian process over the legal list.

    Proposals maximise expected improvement and the lower confidence bound alternately, each multiplied by the
    probability that the point is not rejected. Rejected points teach that probability alone, not the times. A
    point under way counts as if its expected time had been measured.
    """

    def __init__(self, legal: Legal, distributions: dict[str, Any], seed: int) -> None:
        self._points = Points(legal)
        self._history = History(self._points)
        self._scales = Scales(self._points.scale_of, self._points.scales)
        self._posterior: Posterior | None = None
        self._rng = np.random.default_rng(seed)
        self._fitted = 0  # points with an outcome at the last fit
        self._starts = 0
        self._turn = 0
        self._left_out: set[int] = set()  # points with an outcome that the model does not hold

    def propose(self, study: Any, trial: Any, seen: NDArray[np.bool_]) -> int:
        """Return the unseen point with the highest acquisition value."""
        history = self._history
        history.read(study, seen)
        known = len(history.told) + len(history.rejected)
        enough = known >= STARTS or known + len(history.pending) >= 2 * STARTS
        if self._starts < OWN_STARTS or not enough or len(history.told) < LEAST_TOLD:
            self._starts += 1
            return self._start(seen)
        posterior, best = self._updated()
        self._turn += 1
        merits = _merits(*posterior.at_candidates(), best, self._turn)
        merits[seen[posterior.candidates]] = -math.inf
        place = int(merits.argmax())
        if merits[place] == -math.inf:
            return int(self._rng.choice(np.flatnonzero(~seen)))
        index, merit = int(posterior.candidates[place]), merits[place]
        if len(posterior.candidates) < len(self._points):
            index = self._climbed(index, merit, posterior, best, seen)
        return index

    def _start(self, seen: NDArray[np.bool_]) -> int:
        """Draw unseen points and return the one farthest from all that were proposed."""
        unseen = np.flatnonzero(~seen)
        drawn = self._rng.choice(unseen, min(DRAWS, len(unseen)), replace=False)
        history = self._history
        before = [*history.told, *history.rejected, *history.pending][-DRAWS:]
        if not before:
            return int(drawn[0])
        apart = self._points.coordinates(drawn)[:, None] - self._points.coordinates(before)
        return int(drawn[np.abs(apart).sum(2).min(1).argmax()])

    def _updated(self) -> tuple[Posterior, float]:
        """Bring the model up to date; return it, and the value of the fastest point."""
        history, value_of = self._history, self._values()
        known = len(value_of) + len(history.rejected)
        posterior = self._posterior
        if posterior is None or known >= self._fitted + min(max(REFIT, self._fitted // 5), LONGEST):
            posterior = self._posterior = self._fit(value_of)
            self._fitted = known
        there = {*posterior.points, *self._left_out}
        fresh = [i for i in [*value_of, *history.rejected, *history.pending] if i not in there]
        posterior.add_points(fresh, self._points.coordinates(fresh))
        if len(posterior.candidates) < len(self._points):
            around = self._points.neighbours(min(value_of, key=value_of.__getitem__))
            around = np.setdiff1d(around, posterior.candidates)
            posterior.add_candidates(around, self._points.coordinates(around))
        rejected = set(history.rejected)
        values = [value_of.get(index, math.nan) for index in posterior.points]
        usable = [0.0 if i in rejected else 1.0 if i in value_of else math.nan for i in posterior.points]
        posterior.learn(np.array(values), np.array(usable))
        return posterior, min(value_of.values())

    def _values(self) -> dict[int, float]:
        """Return the value of each measured point: its log time, the slow tail compressed, standardised."""
        history = self._history
        logs = np.array(list(history.told.values()))
        middle = np.median(logs)
        tail = TAIL * max(middle - logs.min(), LEAST_TAIL)
        values = np.minimum(logs, middle) + tail * np.log1p(np.maximum(logs - middle, 0) / tail)
        values = (values - values.mean()) / (values.std() + 1e-9)
        return dict(zip(history.told, values.tolist(), strict=True))

    def _fit(self, value_of: Mapping[int, float]) -> Posterior:
        """Fit the length scales, and build the model from the points to keep and new candidates."""
        points, rejected = self._points, self._history.rejected
        told, values = np.array(list(value_of)), np.array(list(value_of.values()))
        chosen = self._chosen(values, FITTED)
        self._scales.fit(points.coordinates(told[chosen]), values[chosen])
        posterior = Posterior(self._scales)
        candidates = np.arange(len(points))
        if len(points) > CANDIDATES:
            drawn = self._rng.choice(len(points), CANDIDATES, replace=False)
            best = told[np.argsort(values, kind="stable")[:BEST]]
            candidates = np.unique(np.concatenate([drawn, *map(points.neighbours, best)]))
        posterior.add_candidates(candidates, points.coordinates(candidates))
        kept = told[self._chosen(values, KEPT)].tolist()
        if len(rejected) > KEPT_REJECTED:
            kept += self._rng.choice(rejected, KEPT_REJECTED, replace=False).tolist()
        else:
            kept += rejected
        posterior.add_points(kept, points.coordinates(kept))
        self._left_out = {*told.tolist(), *rejected}.difference(kept)
        return posterior

    def _chosen(self, values: NDArray[np.float64], most: int) -> NDArray[np.intp]:
        """Return at most so many positions in values: half of them the lowest, the others drawn at random."""
        if len(values) <= most:
            return np.arange(len(values))
        order = np.argsort(values, kind="stable")
        others = self._rng.choice(order[most // 2 :], most - most // 2, replace=False)
        return np.concatenate([order[: most // 2], others])

    def _climbed(
        self, index: int, merit: float, posterior: Posterior, best: float, seen: NDArray[np.bool_]
    ) -> int:
        """Move from a point to its best unseen neighbour, as long as that one is better."""
        for _ in range(CLIMB):
            around = self._points.neighbours(index)
            around = around[~seen[around]]
            if not len(around):
                break
            merits = _merits(*posterior.at(self._points.coordinates(around)), best, self._turn)
            place = int(merits.argmax())
            if merits[place] <= merit:
                break
            index, merit = int(around[place]), merits[place]
        return index


def _merits(
    mean: NDArray[np.float64],
    deviation: NDArray[np.float64],
    likely: NDArray[np.float64],
    best: float,
    turn: int,
) -> NDArray[np.float64]:
    """Return the acquisition value of each point, which the next proposal maximises.

    On odd turns that is the expected improvement over the best value, on even turns how far the lower
    confidence bound lies below `WORST`; both are multiplied by the probability that the point has a time.
    """
    if turn % 2:
        z = (best - mean) / deviation
        below = 0.5 * _erfc(z * -math.sqrt(0.5)).astype(float)
        gain = deviation * (z * below + np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi))
    else:
        gain = np.maximum(WORST + BOUND * deviation - mean, 0.0)
    return np.asarray(likely * gain)


_erfc: Any = np.frompyfunc(math.erfc, 1, 1)
