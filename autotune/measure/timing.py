"""How candidates and finalists are timed on the GPU: samples, launches, repeats and turns.

A sample is the time of several launches between two CUDA events, divided by their number; a timing is the
median of samples. During a search each candidate is timed briefly and alone; launches of a few microseconds
are replayed as a CUDA graph, because the host needs several for each launch. The finalists are then timed in
turns, so that a change of clocks or temperature affects all of them alike, and all as graphs: a host that
compiles meanwhile may need 50 us for one call of cuBLAS.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar

import numpy as np

from autotune.measure.clocks import Reading, power_of
from autotune.values.measurement import L2, POWER_CAP, Clocks, Method, Sustained, Timing

GRAPH_BELOW_MS = 0.03  # for each kernel; a lone launch reads up to 10 us too much, so this holds below 20 us
REPEAT_BELOW_MS = 0.2  # a short first launch may read several times too much: its process has just started
GRAPH_LAUNCHES = 20
MAX_LAUNCHES = 1000
SEARCH_SAMPLES = 7
SEARCH_SAMPLE_MS = 0.15  # 100 times the resolution of events, 0.5 us, and some margin
SLOW_FACTOR = 1.25
FINAL_SAMPLE_MS = 1.0
FINAL_LAUNCHES = 3
FINAL_SAMPLE_LIMIT_MS = 20.0
FINAL_ROUNDS = 25
FINAL_LEAST_ROUNDS = 9
FINAL_SECONDS = 1.5
LONG_MS = 50.0  # launches beyond it are not repeated elsewhere
SUSTAINED_SAMPLE_MS = 20.0
NOISY_SPREAD = 0.05
NEAR = 1.05  # of several ways to do the same, those this close to the fastest are timed again

T = TypeVar("T")


class Runnable(Protocol):
    """What can be timed.

    Attributes:
        kernels: That one launch starts, each of which costs the host some microseconds.
    """

    kernels: int

    def prepare(self, launches: int, method: Method) -> None:
        """Make a sample consist of this many launches, issued this way."""

    def start(self) -> Callable[[], float]:
        """Enqueue one sample; return what waits for it and gives milliseconds per launch."""

    def sample(self) -> float:
        """Run one sample; return milliseconds per launch."""


class ClockSource(Protocol):
    """What reports SM clocks and throttling."""

    def start(self) -> None:
        """Read for the first time."""

    def stop(self) -> Clocks:
        """Read again; return what was seen between."""


class PowerSource(Protocol):
    """What reads power and clocks while a block runs."""

    def watch(self) -> AbstractContextManager[Sequence[Reading]]:
        """Return what fills with readings until it is left."""


def time_candidate(runnable: Runnable, best_ms: float | None, l2: L2) -> Timing:
    """Time one candidate of a search in `SEARCH_SAMPLES` samples, or in two when it is clearly slow.

    A contender whose samples spread is timed once more, and the calmer timing counts.

    Args:
        runnable: It must have run at least once.
        best_ms: Median of the fastest candidate so far. One whose first two samples both exceed it by
            `SLOW_FACTOR` is timed no further.
        l2: State of the L2 cache, for the record.
    """
    launches, method, _, lone = _calibrate(runnable, SEARCH_SAMPLE_MS)
    samples = lone[-2:] if launches == 1 else []
    runnable.prepare(launches, method)
    while len(samples) < SEARCH_SAMPLES:
        if best_ms is not None and len(samples) == 2 and min(samples) > SLOW_FACTOR * best_ms:
            return _timing([samples], launches, l2, method, None)
        samples.append(runnable.sample())
    timing = _timing([samples], launches, l2, method, None)
    if not timing.noisy:
        return timing
    again = [runnable.sample() for _ in range(SEARCH_SAMPLES)]
    return min(timing, _timing([again], launches, l2, method, None), key=_spread)


def time_finalists(
    runnables: Sequence[Runnable],
    l2: L2,
    clocks: ClockSource | None = None,
    announce: Callable[[int], None] = lambda index: None,
    now: Callable[[], float] = time.monotonic,
    method: Method = "graph",
    elsewhere: Sequence[Callable[[], Sequence[Runnable]]] = (),
) -> list[Timing]:
    """Time all in rounds, each running one sample of everyone in rotated order.

    There are at most `FINAL_ROUNDS` rounds within `FINAL_SECONDS`, and no fewer than `FINAL_LEAST_ROUNDS`. If
    a timing is noisy, because something disturbed the GPU, all are timed once more; the calmer rounds count.
    What differs from place to place is no noise.

    Args:
        runnables: Each must have run at least once.
        l2: State of the L2 cache, for the record.
        clocks: Read before and after.
        announce: Told the index of the runnable about to run.
        now: Seconds, for the time limit.
        method: How launches are issued, for all.
        elsewhere: Each moves the operands to a place of its own, and returns all runnables there: rounds are
            spread over these places, unless a launch takes longer than `LONG_MS`.

    Returns:
        Timings in the order of ``runnables``.
    """
    count = len(runnables)
    launches = []  # of a sample of each
    for index, runnable in enumerate(runnables):
        announce(index)
        wanted, _, per_launch, _ = _calibrate(runnable, FINAL_SAMPLE_MS)
        affordable = max(1, int(FINAL_SAMPLE_LIMIT_MS / per_launch))
        launches.append(max(wanted, min(FINAL_LAUNCHES, affordable)))
        if per_launch > LONG_MS:
            elsewhere = ()
    elsewhere = elsewhere or [lambda: runnables]
    most, least = (-(-each // len(elsewhere)) for each in (FINAL_ROUNDS, FINAL_LEAST_ROUNDS))

    def rounds() -> list[Timing]:
        if clocks is not None:
            clocks.start()
        samples: list[list[list[float]]] = [[] for _ in runnables]  # of each, at each place
        for moved in elsewhere:
            here = moved()
            for index, runnable in enumerate(here):
                announce(index)
                runnable.prepare(launches[index], method)
                runnable.sample()
                samples[index].append([])
            end = now() + FINAL_SECONDS / len(elsewhere)
            for turn in range(most):
                if turn >= least and now() > end:
                    break
                for step in range(count):
                    index = (turn + step) % count
                    announce(index)
                    samples[index][-1].append(here[index].sample())
        seen = clocks.stop() if clocks is not None else None
        return [_timing(own, each, l2, method, seen) for own, each in zip(samples, launches, strict=True)]

    timings = rounds()
    if any(timing.noisy for timing in timings):
        timings = min(
            timings, rounds(), key=lambda each: (sum(t.noisy for t in each), sum(map(_spread, each)))
        )
    return timings


def sustain(
    runnables: Sequence[Runnable],
    medians_ms: Sequence[float],
    seconds: float,
    method: Method,
    power: PowerSource | None = None,
    announce: Callable[[int], None] = lambda index: None,
    now: Callable[[], float] = time.monotonic,
) -> list[Sustained]:
    """Run each back to back for some seconds, one after the other; what counts is the second half of each.

    Samples of some `SUSTAINED_SAMPLE_MS` follow each other, the next one enqueued before the host waits for
    one: the GPU never idles.

    Args:
        runnables: Each must have been timed.
        medians_ms: Of these timings, per launch.
        seconds: For each.
        method: How launches are issued.
        power: Read meanwhile.
        announce: Told the index of the runnable about to run.
        now: Seconds, as `Reading.at` has them.

    Returns:
        One for each, in their order.
    """
    found = []
    for index, (runnable, median_ms) in enumerate(zip(runnables, medians_ms, strict=True)):
        launches = min(max(1, round(SUSTAINED_SAMPLE_MS / median_ms)), MAX_LAUNCHES)
        announce(index)
        runnable.prepare(launches, method)
        samples: list[float] = []
        with nullcontext([]) if power is None else power.watch() as readings:
            middle, late = now() + seconds / 2, False
            waits = [runnable.start()]
            while waits:
                if not samples or now() < middle + seconds / 2:
                    waits.append(runnable.start())
                announce(index)
                ms = waits.pop(0)()
                if late:
                    samples.append(ms)
                late = now() >= middle
        mean_ms = sum(samples) / len(samples)
        watts, power_by, sm_mhz, throttle = power_of([each for each in readings if each.at >= middle])
        joules = None if watts is None else watts * mean_ms / 1e3
        counted = launches * len(samples)
        found.append(Sustained(seconds, counted, mean_ms, joules, power_by, sm_mhz, throttle))
    return found


def fastest(entrants: Sequence[T], measure: Callable[[T, float | None], float | None]) -> T | None:
    """Choose the fastest: time each briefly, then those near the best again; None when none can run.

    Args:
        entrants: What to choose from.
        measure: Given one and the best time so far, returns its time, or None where it cannot run.
    """
    times: list[tuple[float, T]] = []
    for entrant in entrants:
        best = min((time for time, _ in times), default=None)
        time = measure(entrant, best)
        if time is not None:
            times.append((time, entrant))
    if not times:
        return None
    limit = NEAR * min(time for time, _ in times)
    near = [(time, entrant) for time, entrant in times if time <= limit]
    if len(near) > 1:
        again = [(measure(entrant, None), time, entrant) for time, entrant in near]
        near = [(time if second is None else second, entrant) for second, time, entrant in again]
    return min(near, key=lambda pair: pair[0])[1]


def timed_beta(beta: float) -> float:
    """Choose the scalar of C for launches that feed on their own results: the same, or its reciprocal.

    C stays finite with |beta| <= 1. A kernel cannot tell the two apart: both are read at run time, and
    neither is 0.
    """
    return beta if abs(beta) <= 1 else 1 / beta


def _calibrate(runnable: Runnable, sample_ms: float) -> tuple[int, Method, float, list[float]]:
    """Choose (launches, method) for samples of ``sample_ms``, and estimate milliseconds per launch.

    A long first launch is repeated too: if the process was paused meanwhile, it reads as a slow kernel.

    Returns:
        (launches of a sample, method, milliseconds per launch, what two or three lone launches took).
    """
    method: Method = "back-to-back"
    runnable.prepare(1, method)
    lone = [runnable.sample(), runnable.sample()]
    if min(lone) < REPEAT_BELOW_MS:
        lone.append(runnable.sample())
    estimate = min(lone)
    if estimate < GRAPH_BELOW_MS * runnable.kernels:
        method = "graph"
        runnable.prepare(GRAPH_LAUNCHES, method)
        runnable.sample()  # the first replay also uploads the graph
        estimate = runnable.sample()
    estimate = max(estimate, 1e-6)
    launches = min(math.ceil(sample_ms / estimate), MAX_LAUNCHES)
    return (max(launches, GRAPH_LAUNCHES) if method == "graph" else launches), method, estimate, lone


def _timing(
    places: list[list[float]], launches: int, l2: L2, method: Method, clocks: Clocks | None
) -> Timing:
    """Return the timing of samples that were taken at one place or several."""
    samples = [sample for own in places for sample in own]
    low, median, high = (float(value) for value in np.quantile(samples, (0.1, 0.5, 0.9)))
    moved = [sample - np.median(own) for own in places for sample in own]
    least, most = np.quantile(moved, (0.1, 0.9))
    reasons = () if clocks is None else clocks["throttle"]
    throttled = isinstance(reasons, tuple) and any(reason != POWER_CAP for reason in reasons)
    shared = clocks is not None and clocks.get("other_processes", 0) != 0
    return Timing(
        median_ms=median,
        quantiles_ms=(low, median, high),
        repeats=len(samples),
        launches=launches,
        l2=l2,
        method=method,
        clocks=clocks,
        noisy=bool(most - least > NOISY_SPREAD * median) or throttled or shared,
    )


def _spread(timing: Timing) -> float:
    return (timing.quantiles_ms[2] - timing.quantiles_ms[0]) / max(timing.median_ms, 1e-9)
