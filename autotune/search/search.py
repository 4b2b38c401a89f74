"""A search: proposes points of a legal list, one after the other, and keeps them in an Optuna study."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from autotune.errors import SpaceError, UsageError
from autotune.search.gp import Gp
from autotune.search.projection import Projected, Tpe
from autotune.search.simple import Exhaustive, Neighbours, Random

if TYPE_CHECKING:
    from autotune.space.space import Legal

WAIT: Final = -1  # from `ask` of a shared search while others measure all that is left: ask again later
DEFAULT: Final = "gp"
OPTUNA: Final = "optuna:"  # followed by the name of a class of `optuna.samplers`
OWN_ORDER: Final = ("BruteForceSampler", "GridSampler")  # fail where a trial is not what they proposed
NEEDED: Final = {"GPSampler": ("torch", "scipy"), "QMCSampler": ("scipy",)}  # imported at a proposal only


class Strategy(Protocol):
    """Chooses the next point; made from the legal list, one distribution per parameter, and a seed."""

    def propose(self, study: Any, trial: Any, seen: NDArray[np.bool_]) -> int:
        """Return the index of an unseen point; there is at least one.

        Args:
            study: The `optuna.Study` with every trial so far.
            trial: The `optuna.trial.FrozenTrial` that is being started.
            seen: `[count]` bool, true where a point was proposed before.
        """
        ...


STRATEGIES: dict[str, Callable[[Legal, dict[str, Any], int], Strategy]] = {
    "gp": Gp,
    "tpe": Tpe,
    "neighbours": Neighbours,
    "random": Random,
    "exhaustive": Exhaustive,
}


def require_strategy(strategy: Any) -> None:
    """Raise `UsageError` when a strategy is neither a known name nor a usable sampler of Optuna."""
    if isinstance(strategy, str) and strategy.startswith(OPTUNA):
        _sampler(strategy, 0)
    elif isinstance(strategy, str):
        if strategy not in STRATEGIES:
            known = ", ".join(STRATEGIES)
            raise UsageError(f"search strategy {strategy!r} is unknown: give one of {known}, or optuna:CLASS")
    else:
        from optuna.samplers import BaseSampler

        if not isinstance(strategy, BaseSampler):
            raise UsageError(
                f"search strategy {strategy!r} is neither a name nor a sampler: give one of "
                f"{', '.join(STRATEGIES)}, or an instance of optuna.samplers.BaseSampler"
            )
        _require_usable(type(strategy))


def strategy_name(strategy: Any) -> str:
    """Return the name of a strategy for a record: its own, or "optuna:" and the class of the sampler."""
    return strategy if isinstance(strategy, str) else f"{OPTUNA}{type(strategy).__name__}"


def _sampler(name: str, seed: int) -> Any:
    """Return a new sampler of the class that "optuna:CLASS" names.

    Raises:
        UsageError: There is no such class, it cannot propose points of a list, or it needs more than a seed.
    """
    import optuna

    kind = getattr(optuna.samplers, name.removeprefix(OPTUNA), None)
    try:
        if kind is not None and issubclass(kind, optuna.samplers.BaseSampler):
            _require_usable(kind)
            return kind(seed=seed)
    except (TypeError, ImportError) as error:
        why = " ".join(str(error).split())
        raise UsageError(f"search strategy {name!r} cannot be made from a seed alone: {why}") from None
    raise UsageError(f"search strategy {name!r} is unknown: give a class of optuna.samplers")


def _require_usable(kind: type) -> None:
    """Refuse a class of sampler that would fail at its first proposal.

    Raises:
        UsageError: It goes through a grid of its own, or a package that it needs is missing.
    """
    for name in (each.__name__ for each in kind.__mro__):
        if name in OWN_ORDER:
            raise UsageError(
                f"the sampler {name} of Optuna goes through a grid of its own and cannot propose points of a "
                "list: give exhaustive"
            )
        missing = [package for package in NEEDED.get(name, ()) if find_spec(package) is None]
        if missing:
            raise UsageError(
                f"the sampler {name} of Optuna needs {' and '.join(missing)}, not installed here: run "
                f"'pip install {' '.join(missing)}', or give one of {', '.join(STRATEGIES)}"
            )


def require_seed(seed: int) -> None:
    """Raise `UsageError` when a seed is not one that every random generator accepts."""
    if not isinstance(seed, int | np.integer) or not 0 <= seed < 2**32:
        raise UsageError(f"seed {seed!r} is out of range: give 0 to 2^32 - 1")


class Search:
    """Proposes points of a legal list, each once, and learns from their outcomes.

    Several points may be under way at once. The same seed and the same calls in the same order lead to the
    same proposals. Call it from one thread.

    Args:
        legal: The points that may be proposed, an `autotune.space.space.Legal`.
        seed: Seed of the strategy.
        first: Indices to propose before the strategy is asked (warm starts), in this order; repeats are
            dropped.
        strategy: A name of `STRATEGIES`; or an `optuna.samplers.BaseSampler`, or "optuna:" and the name of
            its class. A sampler is copied; it sees one categorical distribution per parameter, and its
            proposals are projected to the nearest unseen point.

    Attributes:
        study: The in-memory `optuna.Study`, for Optuna's own tools. It minimises log(median_ms); a rejected
            point is a FAIL trial, a point under way a RUNNING one. Every trial has the same distributions,
            those of `distributions`.
        asked: Number of points proposed so far.
        best: Index and median_ms of the fastest point so far, or None.

    Raises:
        UsageError: The strategy is unknown or cannot propose points of a list, or the seed is out of range.
        SpaceError: The list is empty.
        IndexError: An index of `first` is not in the list.
    """

    def __init__(
        self, legal: Legal, *, seed: int, first: Sequence[int] = (), strategy: Any = DEFAULT
    ) -> None:
        require_strategy(strategy)
        require_seed(seed)
        if not len(legal):
            raise SpaceError("the list of legal points is empty, so there is nothing to search")
        outside = [index for index in first if not 0 <= index < len(legal)]
        if outside:
            raise IndexError(f"first holds {outside[0]}, but the legal list has {len(legal)} points")
        self.best: tuple[int, float] | None = None
        self._first = deque(dict.fromkeys(int(index) for index in first))
        self._seen = np.zeros(len(legal), np.bool_)
        self._pending: dict[int, Any] = {}
        self.asked = 0
        self._legal = legal
        self._distributions = distributions(legal)
        self._foreign = "" if strategy in list(STRATEGIES) else strategy_name(strategy)
        if isinstance(strategy, str) and strategy.startswith(OPTUNA):
            strategy = _sampler(strategy, seed)
        self._strategy: Strategy = (
            STRATEGIES[strategy](legal, self._distributions, seed)
            if isinstance(strategy, str)
            else Projected(legal, self._distributions, seed, deepcopy(strategy))
        )
        self._proposed = 0  # right for a list of one point, where Optuna has nothing to ask its sampler
        sampler = self._strategy.sampler if isinstance(self._strategy, Projected) else None
        self.study = _study(self._distributions, self._propose, sampler)

    def ask(self) -> int | None:
        """Return the index of a point that was not proposed before, or None when the list is exhausted.

        Raises:
            UsageError: The Optuna sampler that was given as the strategy failed.
        """
        if self.asked == len(self._legal):
            return None
        try:
            trial = self.study.ask(self._distributions)  # calls _propose
        except Exception as error:
            if not self._foreign:
                raise
            why = " ".join(f"{type(error).__name__}: {error}".split())
            raise UsageError(
                f"search strategy {self._foreign!r} made no proposal ({why}): "
                f"give another sampler, or one of {', '.join(STRATEGIES)}"
            ) from error
        index = self._proposed
        self._seen[index] = True
        self.asked += 1
        self._pending[index] = trial
        return index

    def take(self, index: int) -> None:
        """Count an unseen point as proposed, because its outcome comes from elsewhere; `tell` it.

        Raises:
            ValueError: The point was proposed before, or is not in the list.
        """
        if not 0 <= index < len(self._legal):
            raise ValueError(f"point {index} is not in the list: give 0 to {len(self._legal) - 1}")
        if self._seen[index]:
            raise ValueError(f"point {index} was proposed before")
        self._first.appendleft(index)
        self.ask()

    def give_back(self, index: int) -> None:
        """Return a point under way without an outcome: it is proposed again, before any other.

        Raises:
            ValueError: The point is not under way.
        """
        from optuna.trial import TrialState

        if index not in self._pending:
            raise ValueError(f"point {index} is not under way, so it cannot be given back")
        self.study.tell(self._pending.pop(index), state=TrialState.FAIL)
        self._seen[index] = False
        self.asked -= 1
        self._first.appendleft(index)

    def tell(self, index: int, median_ms: float | None, outcome: str = "", why: str = "") -> None:
        """Report the outcome of a proposed point.

        Args:
            index: The point, as `ask` returned it.
            median_ms: Its time in milliseconds; None where it was rejected.
            outcome: "measured" or a rejection kind; the study keeps it with the trial.
            why: Reason of a rejection; unused here.

        Raises:
            ValueError: The point is not under way, or the time is not a positive finite number.
        """
        from optuna.trial import TrialState

        if index not in self._pending:
            raise ValueError(f"point {index} is not under way: tell each point once, after ask returned it")
        if outcome:
            self._pending[index].set_user_attr("outcome", outcome)
        if median_ms is None:
            self.study.tell(self._pending.pop(index), state=TrialState.FAIL)
            return
        if not (math.isfinite(median_ms) and median_ms > 0):
            raise ValueError(
                f"median_ms = {median_ms} of point {index} is not a time: tell None where it was rejected"
            )
        self.study.tell(self._pending.pop(index), math.log(median_ms))
        if self.best is None or median_ms < self.best[1]:
            self.best = index, median_ms

    def _propose(self, study: Any, trial: Any) -> dict[str, int | str]:
        while self._first and self._seen[self._first[0]]:  # taken meanwhile
            self._first.popleft()
        index = self._first.popleft() if self._first else self._strategy.propose(study, trial, self._seen)
        self._proposed = index
        return dict(self._legal.config(index))


def distributions(legal: Legal) -> dict[str, Any]:
    """Return the distribution of each parameter: categorical over the values that occur in the list."""
    from optuna.distributions import CategoricalDistribution

    return {
        name: CategoricalDistribution(
            [legal.choices[name][o] for o in np.flatnonzero(np.bincount(legal.ordinals[:, column]))]
        )
        for column, name in enumerate(legal.names)
    }


def _study(
    distributions: dict[str, Any], propose: Callable[[Any, Any], dict[str, int | str]], inner: Any
) -> Any:
    """Create a study whose every trial is the point that `propose` returns.

    Args:
        distributions: Of every trial, by parameter.
        propose: Called with the study and the trial that begins; returns its parameters.
        inner: A sampler whose `before_trial` is called before a trial begins; None without one.
    """
    import optuna

    class ListSampler(optuna.samplers.BaseSampler):  # type: ignore[misc]  # optuna is imported late, so untyped
        def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:
            return distributions

        def before_trial(self, study: Any, trial: Any) -> None:
            if inner is not None:
                inner.before_trial(study, trial)

        def sample_relative(
            self, study: Any, trial: Any, search_space: dict[str, Any]
        ) -> dict[str, int | str]:
            return propose(study, trial)

        def sample_independent(self, study: Any, trial: Any, name: str, distribution: Any) -> Any:
            raise KeyError(f"parameter {name!r} is not in the space")

    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        return optuna.create_study(direction="minimize", sampler=ListSampler())
    finally:
        optuna.logging.set_verbosity(verbosity)
