"""Replays searches on a sweep, without a GPU: how soon a strategy comes near the optimum.

Evaluations are counted in a search with a fixed number of points under way, whose outcomes arrive in the
order of the proposals. Seconds come from a second search, simulated as `autotune.tuning.pipeline` runs one: a
free compiler gets the next proposal at once, no more candidates are under way than keep the GPU busy, and the
GPU measures them in the order in which they were compiled. Compile times are the recorded ones. So are GPU
times where the sweep has them; elsewhere a candidate takes `GPU_FIXED_S` and `LAUNCHES` launches,
`FEW_LAUNCHES` if it is `SLOW` times slower than the best before it. Nothing but the simulated clock decides
when an outcome arrives, so a replay repeats exactly.
"""

from __future__ import annotations

import heapq
import math
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.errors import Rejected
from autotune.search import Search, strategy_name
from autotune.search.demand import Demand
from autotune.sweep import Sweep

WITHIN = (10, 5, 2, 1)  # per cent of the optimum
GOAL, BY = 2, 200  # the share of seeds within so many per cent by so many evaluations
GPU_FIXED_S = 0.005  # verification, and the transfer to the GPU and back
LAUNCHES, FEW_LAUNCHES = 6, 2
SLOW = 1.25
PROPOSAL_S = 0.005  # a proposal takes so long on the simulated clock
GPU_QUEUE = 3  # as in `autotune.tuning.pipeline`
NOT_ON_GPU = ("constraint", "compile", "compile_timeout")


@dataclass(frozen=True)
class Replay:
    """How soon a strategy came near the optimum.

    Attributes:
        strategy: Its name.
        seeds: Number of searches.
        limit: Evaluations after which a search was given up.
        evaluations: Median number of evaluations to come within so many per cent of the optimum, by per
            cent; None where half the searches did not.
        share: Share of the searches within `GOAL` per cent after `BY` evaluations.
        seconds: Likewise, in simulated seconds; None for a sweep without compile times.
        proposal_ms: Mean time of one proposal here, milliseconds.
    """

    strategy: str
    seeds: int
    limit: int
    evaluations: Mapping[int, float | None]
    share: float
    seconds: Mapping[int, float | None] | None
    proposal_ms: float


def replay(
    sweep: Sweep, strategy: Any, *, seeds: int = 40, limit: int = 300, in_flight: int = 1, workers: int = 15
) -> Replay:
    """Search a sweep once for each seed from 0, each time with nothing known.

    Args:
        sweep: What is searched.
        strategy: As for `Search`.
        seeds: Number of searches.
        limit: Most evaluations of one search.
        in_flight: Points under way where evaluations are counted.
        workers: Compiling processes where seconds are simulated.

    Raises:
        UsageError: The strategy is unknown.
    """
    spent = [0.0, 0]
    counts, clocks = [], []
    for seed in range(seeds):
        search = _Timed(Search(sweep.legal, seed=seed, strategy=strategy), spent)
        counts.append(_reached(sweep, _told(sweep, search, in_flight), limit))
        if sweep.compile_s is not None:
            search = _Timed(Search(sweep.legal, seed=seed, strategy=strategy), spent)
            clocks.append(_reached(sweep, _simulated(sweep, search, workers), limit))
    early = [each[GOAL][0] <= BY for each in counts]
    return Replay(
        strategy=strategy_name(strategy),
        seeds=seeds,
        limit=limit,
        evaluations={per_cent: _median([each[per_cent][0] for each in counts]) for per_cent in WITHIN},
        share=sum(early) / len(early),
        seconds={per_cent: _median([each[per_cent][1] for each in clocks]) for per_cent in WITHIN}
        if clocks
        else None,
        proposal_ms=1e3 * spent[0] / max(1, spent[1]),
    )


class _Timed:
    """A search whose proposals are timed."""

    def __init__(self, search: Search, spent: list[float]) -> None:
        self._search = search
        self._spent = spent  # seconds, and number of proposals
        self.tell = search.tell

    def ask(self) -> int | None:
        began = time.perf_counter()
        index = self._search.ask()
        self._spent[0] += time.perf_counter() - began
        self._spent[1] += 1
        return index


def _reached(sweep: Sweep, told: Iterator[tuple[int, float]], limit: int) -> dict[int, tuple[float, float]]:
    """Return the evaluations and seconds after which a search first came so near; infinite where it did not.

    Args:
        sweep: What is searched.
        told: Yields each evaluated point and the clock.
        limit: Most evaluations.
    """
    reached = dict.fromkeys(WITHIN, (math.inf, math.inf))
    for count in range(1, limit + 1):
        index, clock = next(told, (None, 0.0))
        if index is None:
            break
        for per_cent in WITHIN:
            if reached[per_cent][0] == math.inf and sweep.time_ms[index] <= sweep.best_ms * (
                1 + per_cent / 100
            ):
                reached[per_cent] = count, clock
        if reached[WITHIN[-1]][0] < math.inf:
            break
    return reached


def _told(sweep: Sweep, search: _Timed, in_flight: int) -> Iterator[tuple[int, float]]:
    """Search with a fixed number of points under way."""
    under_way: deque[int] = deque()
    while True:
        while len(under_way) < in_flight and (index := search.ask()) is not None:
            under_way.append(index)
        if not under_way:
            return
        index = under_way.popleft()
        search.tell(index, _time(sweep, index))
        yield index, 0.0


def _simulated(sweep: Sweep, search: _Timed, workers: int) -> Iterator[tuple[int, float]]:
    """Search as the pipeline does, on a simulated clock: yield each evaluated point, and the time."""
    assert sweep.compile_s is not None, "a sweep without compile times has no clock"
    clock, proposer_free, best = 0.0, 0.0, math.inf
    events: list[tuple[float, int, bool, int]] = []  # when, order, whether it was compiled, point
    ready: deque[int] = deque()
    compiling, on_gpu, order, exhausted = 0, 0, 0, False
    demand = Demand()
    while True:
        while not exhausted and compiling < workers and len(ready) + on_gpu < GPU_QUEUE:
            if compiling + len(ready) + on_gpu >= demand.enough(GPU_QUEUE):
                break
            index = search.ask()
            if index is None:
                exhausted = True
                break
            proposer_free = max(proposer_free, clock) + PROPOSAL_S
            compiling, order = compiling + 1, order + 1
            heapq.heappush(events, (proposer_free + sweep.compile_s[index], order, True, index))
        if not events:
            return
        clock, _, compiled, index = heapq.heappop(events)
        outcome = sweep.points[index].outcome
        if compiled:
            compiling -= 1
            demand.compile_s.add(float(sweep.compile_s[index]))
        else:
            on_gpu -= 1
        if not compiled or (isinstance(outcome, Rejected) and outcome.kind in NOT_ON_GPU):
            search.tell(index, _time(sweep, index))
            best = min(best, _time(sweep, index) or math.inf)
            yield index, clock
        else:
            ready.append(index)
        if ready and not on_gpu:
            index = ready.popleft()
            seconds = _gpu_seconds(sweep, index, best)
            demand.outcome_s.add(seconds)
            on_gpu, order = 1, order + 1
            heapq.heappush(events, (clock + seconds, order, False, index))


def _gpu_seconds(sweep: Sweep, index: int, best: float) -> float:
    if sweep.gpu_s is not None:
        return float(sweep.gpu_s[index])
    median_ms = _time(sweep, index)
    if median_ms is None:
        return GPU_FIXED_S
    return GPU_FIXED_S + (FEW_LAUNCHES if median_ms > SLOW * best else LAUNCHES) * median_ms / 1e3


def _time(sweep: Sweep, index: int) -> float | None:
    outcome = sweep.points[index].outcome
    return None if isinstance(outcome, Rejected) else outcome


def _median(values: Sequence[float]) -> float | None:
    middle = statistics.median(values)
    return None if math.isinf(middle) else middle
