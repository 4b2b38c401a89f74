from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import pytest

from autotune.measure.clocks import Reading
from autotune.measure.timing import (
    FINAL_LEAST_ROUNDS,
    FINAL_ROUNDS,
    GRAPH_LAUNCHES,
    MAX_LAUNCHES,
    SEARCH_SAMPLES,
    sustain,
    time_candidate,
    time_finalists,
)
from autotune.values.measurement import Timing


class Scripted:
    """A runnable whose samples take known times per launch: each of ``times``, then the last for ever."""

    def __init__(self, *times, overhead=0.0, log=None, kernels=1):
        self.kernels = kernels
        self.times = list(times)
        self.overhead = overhead
        self.log = log
        self.prepared = []
        self.samples = 0

    def prepare(self, launches, method):
        self.prepared.append((launches, method))

    def sample(self):
        self.samples += 1
        if self.log is not None:
            self.log.append(self)
        time = self.times.pop(0) if len(self.times) > 1 else self.times[0]
        launches, method = self.prepared[-1]
        return time + (self.overhead / launches if method == "graph" else self.overhead)


def test_a_long_kernel_is_launched_once_per_sample():
    runnable = Scripted(2.6, 2.5, 2.7, 2.6, 2.6, 2.6, 2.6)
    timing = time_candidate(runnable, None, "warm")
    assert runnable.samples == SEARCH_SAMPLES
    assert timing == Timing(
        2.6, (pytest.approx(2.56), 2.6, pytest.approx(2.64)), 7, 1, "warm", "back-to-back", None, False
    )


def test_a_slow_candidate_is_stopped_after_two_samples():
    runnable = Scripted(4.0, 3.9)
    timing = time_candidate(runnable, 3.0, "warm")
    assert runnable.samples == timing.repeats == 2
    assert timing.median_ms == pytest.approx(3.95)


def test_one_slow_sample_does_not_stop_a_candidate():
    assert time_candidate(Scripted(9.0, 2.9), 3.0, "warm").repeats == SEARCH_SAMPLES


def test_short_kernels_are_repeated_within_a_sample():
    timing = time_candidate(Scripted(0.04), None, "warm")
    assert (timing.launches, timing.method) == (4, "back-to-back")


def test_tiny_kernels_are_timed_by_graph_so_that_overhead_does_not_count():
    timing = time_candidate(Scripted(0.002, overhead=0.006), None, "cold")
    assert timing.method == "graph"
    assert timing.launches >= GRAPH_LAUNCHES
    assert timing.median_ms == pytest.approx(0.002, rel=0.2)
    assert timing.l2 == "cold"


def test_the_overhead_of_a_lone_launch_does_not_stop_a_tiny_candidate():
    assert time_candidate(Scripted(0.002, overhead=0.006), 0.0021, "warm").repeats == SEARCH_SAMPLES


@pytest.mark.parametrize("at", range(9))
@pytest.mark.parametrize("best_ms", [None, 0.05])
def test_a_pause_in_one_launch_is_not_a_slow_kernel(at, best_ms):
    """As when the process is stopped for some seconds between the events around a sample."""
    times = [0.05] * 24
    times[at] = 7000.0
    timing = time_candidate(Scripted(*times, overhead=0.01), best_ms, "warm")
    assert timing.launches >= 3  # so that the overhead of each counts little
    assert timing.repeats == SEARCH_SAMPLES
    assert timing.median_ms == pytest.approx(0.06)
    assert not timing.noisy


def test_a_time_of_zero_does_not_divide():
    assert time_candidate(Scripted(0.0), None, "warm").launches >= GRAPH_LAUNCHES


def test_a_slow_first_launch_does_not_hide_that_a_kernel_is_tiny():
    class Cold(Scripted):
        first = 0.08

        def sample(self):
            slow, self.first = self.first, 0.0
            return super().sample() + slow

    timing = time_candidate(Cold(0.002, overhead=0.006), None, "warm")
    assert timing.method == "graph"
    assert timing.median_ms == pytest.approx(0.002, rel=0.2)


def test_spread_makes_a_timing_noisy():
    assert time_candidate(Scripted(*[2.0, 2.4] * 8), None, "warm").noisy
    assert not time_candidate(Scripted(2.0, 2.01), None, "warm").noisy


def test_a_noisy_contender_is_timed_again_and_the_calmer_timing_counts():
    disturbed = Scripted(2.0, 2.0, 2.0, 2.6, 2.6, 2.6, 2.6, 2.0)
    timing = time_candidate(disturbed, 1.9, "warm")
    assert not timing.noisy
    assert timing.median_ms == pytest.approx(2.0)
    slow = time_candidate(Scripted(4.0, 4.6), 1.9, "warm")
    assert slow.repeats == 2  # no contender


def test_disturbed_finals_are_repeated_once():
    class Passing(Clocks):
        rounds = 0

        def stop(self):
            self.rounds += 1
            return {**super().stop(), "other_processes": 1 if self.rounds == 1 else 0}

    class Staying(Passing):
        def stop(self):
            return {**super().stop(), "other_processes": 1}

    passing, staying, calm = Passing(), Staying(), Clocks()
    (timing,) = time_finalists([Scripted(2.0)], "warm", passing)
    assert (timing.noisy, passing.rounds) == (False, 2)
    (timing,) = time_finalists([Scripted(2.0)], "warm", staying)
    assert (timing.noisy, staying.rounds, timing.clocks["other_processes"]) == (True, 2, 1)
    log = []
    time_finalists([Scripted(2.0, log=log)], "warm", calm, now=lambda: 0.0)
    assert len(log) == FINAL_ROUNDS + 3  # two to calibrate, one before the rounds


def test_rounds_are_spread_over_the_places_of_the_operands():
    log, seen = [], []

    def moved(ms):
        seen.append(ms)
        return [Scripted(ms, log=log), Scripted(2.0, log=log)]

    places = [partial(moved, ms) for ms in (1.0, 1.3, 1.2, 1.1, 1.4)]
    first, second = time_finalists([Scripted(1.0), Scripted(2.0)], "warm", now=lambda: 0.0, elsewhere=places)
    assert seen == [1.0, 1.3, 1.2, 1.1, 1.4]
    assert (first.median_ms, first.quantiles_ms[0], first.quantiles_ms[2]) == (1.2, 1.0, 1.4)
    assert (first.repeats, second.repeats) == (FINAL_ROUNDS, FINAL_ROUNDS)
    assert not first.noisy, "what differs from place to place is no noise"
    assert len(log) == 2 * (FINAL_ROUNDS + len(places))


def test_a_timing_that_spreads_at_one_place_is_noisy_there():
    places = [lambda: [Scripted(1.0)], lambda: [Scripted(*[2.0, 2.4] * 20)], lambda: [Scripted(3.0)]]
    (timing,) = time_finalists([Scripted(1.0)], "warm", now=lambda: 0.0, elsewhere=places)
    assert timing.noisy
    assert timing.repeats == 3 * -(-FINAL_ROUNDS // 3)


def test_long_launches_stay_where_they_are():
    log = []
    (timing,) = time_finalists(
        [Scripted(60.0, log=log)], "warm", now=lambda: 0.0, elsewhere=[lambda: [Scripted(1.0)]]
    )
    assert (timing.median_ms, timing.repeats) == (60.0, FINAL_ROUNDS)


def test_finalists_run_in_rotated_rounds():
    log = []
    a, b, c = (Scripted(time, log=log) for time in (1.0, 2.0, 3.0))
    timings = time_finalists([a, b, c], "warm", now=lambda: 0.0)
    assert [timing.median_ms for timing in timings] == [1.0, 2.0, 3.0]
    assert {timing.repeats for timing in timings} == {FINAL_ROUNDS}
    assert log[-3 * FINAL_ROUNDS :][:9] == [a, b, c, b, c, a, c, a, b]


def test_finals_end_by_time_but_not_before_the_least_rounds():
    ticks = iter(range(0, 1000, 10))
    (timing,) = time_finalists([Scripted(50.0)], "warm", now=lambda: next(ticks))
    assert timing.repeats == FINAL_LEAST_ROUNDS


@pytest.mark.parametrize(("time", "launches"), [(0.1, 10), (2.6, 3), (12.0, 1), (160.0, 1)])
def test_a_final_sample_lasts_a_millisecond_or_three_launches(time, launches):
    (timing,) = time_finalists([Scripted(time)], "warm")
    assert timing.launches == launches


def test_several_small_kernels_are_timed_by_graph_where_one_of_that_length_is_not():
    methods = [time_candidate(Scripted(0.1, kernels=kernels), None, "warm").method for kernels in (1, 3, 4)]
    assert methods == ["back-to-back", "back-to-back", "graph"]


def test_finalists_are_timed_as_graphs_unless_launches_are_asked_for():
    tiny, large = Scripted(0.005), Scripted(1.0)
    assert [timing.method for timing in time_finalists([large, tiny], "warm")] == ["graph", "graph"]
    assert large.prepared[-1] == (3, "graph")
    (timing,) = time_finalists([Scripted(2.0)], "warm", method="back-to-back")
    assert (timing.method, timing.launches) == ("back-to-back", 3)


def test_whoever_runs_is_announced_before():
    log, announced = [], []
    contestants = [Scripted(1.0, log=log), Scripted(2.0, log=log)]
    time_finalists(contestants, "warm", announce=lambda index: announced.append((index, len(log))))
    current = {ran: index for index, ran in announced}  # samples run so far -> last announced
    who = -1
    for ran, runnable in enumerate(log):
        who = current.get(ran, who)
        assert runnable is contestants[who]


class Clocks:
    def __init__(self, *throttle):
        self.throttle = throttle
        self.started = False

    def start(self):
        self.started = True

    def stop(self):
        assert self.started
        return {"sm_mhz_min": 1900, "sm_mhz_max": 1980, "throttle": self.throttle}


def test_throttling_is_recorded_and_makes_a_timing_noisy():
    (calm,) = time_finalists([Scripted(2.0)], "warm", Clocks())
    (capped,) = time_finalists([Scripted(2.0)], "warm", Clocks("power cap"))
    (hot,) = time_finalists([Scripted(2.0)], "warm", Clocks("power cap", "hardware thermal"))
    assert not calm.noisy
    assert not capped.noisy
    assert capped.clocks is not None
    assert capped.clocks["throttle"] == ("power cap",)
    assert calm.clocks == {"sm_mhz_min": 1900, "sm_mhz_max": 1980, "throttle": ()}
    assert hot.noisy


def timing(low, median, high):
    return Timing(median, (low, median, high), 25, 1, "warm", "back-to-back", None, False)


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (timing(1.0, 1.0, 1.0), True),
        (timing(1.009, 1.009, 1.01), True),  # within 1 %
        (timing(1.015, 1.02, 1.03), False),  # beyond, and no overlap
        (timing(1.004, 1.02, 1.03), True),  # beyond, but overlapping
        (timing(0.9, 1.04, 1.2), False),  # overlapping by noise alone
    ],
)
def test_ties(other, expected):
    assert other.ties(timing(0.995, 1.0, 1.005)) is expected


# -- for seconds ---------------------------------------------------------------------------------------------


class Heating:
    """Runnables of one GPU that slow down when each has run for a while, and what reads its power."""

    def __init__(self):
        self.now = 1000.0
        self.readings = []

    @contextmanager
    def watch(self):
        self.readings = []
        yield self.readings

    def runnable(self, ms, watts):
        return Hot(self, ms, watts)


class Hot:
    kernels = 1

    def __init__(self, gpu, ms, watts):
        self.gpu, self.ms, self.watts, self.ran = gpu, ms, watts, 0.0

    def prepare(self, launches, method):
        self.launches, self.method, self.ran = launches, method, 0.0

    def start(self):
        return self.sample

    def sample(self):
        ms = self.ms * (1.0 if self.ran < 1.0 else 1.25)
        seconds = self.launches * ms / 1e3
        self.ran += seconds
        self.gpu.now += seconds
        mhz = 1980 if self.ran < 1.0 else 1600
        self.gpu.readings.append(Reading(self.gpu.now, mhz, 0x4 * (mhz < 1980), self.watts, None))
        return ms


def test_what_is_sustained_is_the_second_half_of_each():
    gpu, said = Heating(), []
    one, other = gpu.runnable(2.0, 700.0), gpu.runnable(0.001, 400.0)
    found = sustain([one, other], [2.0, 0.001], 3.0, "graph", gpu, said.append, lambda: gpu.now)
    assert (one.launches, one.method, other.launches) == (10, "graph", MAX_LAUNCHES)
    assert [each.mean_ms for each in found] == pytest.approx([2.5, 0.00125]), "not the cool first half"
    assert [each.watts for each in found] == pytest.approx([700, 400])
    assert {(each.power_by, each.sm_mhz, each.throttle) for each in found} == {
        ("power readings", 1600.0, ("power cap",))
    }
    assert said == sorted(said), "one after the other"
    assert set(said) == {0, 1}
    assert found[0].launches * 2.5e-3 == pytest.approx(1.5, abs=0.05)
    assert found[0].joules == pytest.approx(1.75)
    assert found[0].gflops_per_watt(5_000_000_000) == pytest.approx(2000 / 700)


def test_a_kernel_that_takes_longer_than_half_the_time_is_run_until_one_sample_counts():
    gpu = Heating()
    (found,) = sustain([gpu.runnable(4000.0, 700.0)], [4000.0], 1.0, "graph", gpu, now=lambda: gpu.now)
    assert (found.launches, found.mean_ms) == (2, 5000.0), "the second was enqueued before the first was done"


def test_the_next_sample_is_enqueued_before_one_is_waited_for():
    class Queue(Scripted):
        queued, seen = 0, ()

        def start(self):
            self.queued += 1

            def wait():
                self.seen += (self.queued,)
                self.queued -= 1
                gpu.now += 0.02
                return 2.0

            return wait

    gpu, runnable = Heating(), Queue(2.0)
    (found,) = sustain([runnable], [2.0], 1.0, "graph", None, now=lambda: gpu.now)
    assert (set(runnable.seen[:-1]), runnable.seen[-1], runnable.queued) == ({2}, 1, 0)
    assert (found.mean_ms, found.power_by) == (2.0, None)


def test_without_nvml_there_is_still_a_speed():
    gpu = Heating()
    (found,) = sustain([gpu.runnable(2.0, 700.0)], [2.0], 1.0, "back-to-back", None, now=lambda: gpu.now)
    assert (found.watts, found.sm_mhz, found.throttle, found.joules) == (None, None, (), None)
    assert found.gflops_per_watt(1) is None
