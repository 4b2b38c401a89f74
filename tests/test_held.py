"""The choice among finalists that are alike when short: which holds the most at the power cap."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.code.compiler import Binary
from autotune.code.render import render
from autotune.errors import DeviceError, Rejected
from autotune.space.space import Config, Space
from autotune.tuning.built import Built
from autotune.tuning.finals import FINALISTS, finalists
from autotune.tuning.held import ALIKE, GAINED, LOST, OTHERS, fastest_held, reads_of, sparing, tile_of
from autotune.tuning.trial import Trial
from autotune.values.device import named_device
from autotune.values.measurement import POWER_CAP, MeasuredTrial, Sustained, Timing, Verdict
from autotune.values.problem import Problem

H200 = named_device("h200")
PROBLEM = Problem(1024, 1024, 1024)
SGEMM = Space.load("sgemm")
TILES = [(64, 128), (64, 256), (128, 128), (128, 256), (256, 128), (32, 128), (256, 64)]


def trial(ms):
    timing = Timing(ms, (ms, ms, ms), 7, 1, "warm", "back-to-back", None, False)
    return MeasuredTrial(timing, Verdict(True, 0.0, 1.0, "", "none"))


@pytest.fixture(scope="module")
def kernels():
    """A kernel of each tile; it is never launched here, so that its machine code does not matter."""
    found = {}
    for bm, bn in TILES:
        chosen = {**SGEMM.presets["wide_block"], "BM": bm, "BN": bn, "LM": 4 if bn == 64 else 2, "group_m": 1}
        source = render(SGEMM, SGEMM.config(chosen), PROBLEM, H200)
        found[bm, bn] = Built(
            source, Binary(b"", "", H200.arch, source.entry, 32, 0, 0, 0, "", "13.0.88", (), 0.0)
        )
    return found


class Gpu:
    """Runs kernels as long as it is told to."""

    def __init__(self, held, throttle=(POWER_CAP,)):
        self.held, self.throttle, self.ran = held, throttle, []

    def __call__(self, built, measured):
        tile = tile_of(built.source.config)[:2]
        self.ran.append(tile)
        ms = self.held[tile]
        return ms if isinstance(ms, Rejected) else Sustained(0.8, 9, ms, None, None, 1800.0, self.throttle)


def chosen(kernels, short, gpu):
    return fastest_held([(kernels[tile], trial(ms)) for tile, ms in short.items()], gpu)


def test_of_alike_finalists_the_one_that_holds_the_most_wins(kernels):
    gpu = Gpu({(64, 256): 1.09, (128, 128): 1.02, (128, 256): 1.05})
    place, held = chosen(kernels, {(64, 256): 1.0, (128, 128): 1.005, (128, 256): 1.01}, gpu)
    assert (place, held.mean_ms) == (1, 1.02)
    assert gpu.ran == [(64, 256), (128, 256), (128, 128)], "what reads least first"


def test_a_winner_that_loses_nothing_is_run_alone(kernels):
    for gpu in (Gpu({(64, 256): LOST - 0.001}), Gpu({(64, 256): 1.5}, throttle=("hardware thermal",))):
        assert chosen(kernels, {(64, 256): 1.0, (128, 256): 1.0}, gpu)[0] == 0
        assert gpu.ran == [(64, 256)]


def test_what_is_slower_when_short_reads_more_or_gains_little_does_not_win(kernels):
    gpu = Gpu({(64, 256): 1.09, (128, 256): 1.09 / GAINED + 0.001, (128, 128): 1.0, (64, 128): 1.0})
    short = {(64, 256): 1.0, (128, 256): 1.0, (64, 128): 1.0, (128, 128): ALIKE + 0.001}
    assert chosen(kernels, short, gpu)[0] == 0
    assert gpu.ran == [(64, 256), (128, 256)]


def test_the_fastest_of_each_tile_that_reads_less_runs_and_no_more_than_some(kernels):
    gpu = Gpu(dict.fromkeys(TILES, 1.09))
    passed = [(kernels[tile], trial(1.0 + n / 1e3)) for n, tile in enumerate([*TILES, TILES[2], TILES[3]])]
    assert fastest_held(passed, gpu)[0] == 0
    assert gpu.ran == [TILES[0], (128, 256), (256, 128), (128, 128), (64, 256)]
    assert len(gpu.ran) == 1 + OTHERS


def test_those_that_read_as_much_run_after_those_that_read_less(kernels):
    gpu = Gpu({(128, 128): 1.09, (128, 256): 1.05, (64, 256): 1.0, (256, 64): 1.0})
    passed = [
        (kernels[tile], trial(1.0)) for tile in [(128, 128), (128, 128), (64, 256), (128, 256), (128, 128)]
    ]
    assert fastest_held(passed, gpu)[0] == 3
    assert gpu.ran == [(128, 128), (128, 256), (128, 128), (128, 128)]
    gpu = Gpu({(128, 256): 1.09, (256, 128): 1.02})
    assert chosen(kernels, {(128, 256): 1.0, (256, 128): 1.005}, gpu)[0] == 1


def test_failures_leave_the_winner_what_it_is(kernels):
    failed = Rejected("crash", "it fell")
    assert chosen(kernels, {(64, 256): 1.0, (128, 256): 1.0}, Gpu({(64, 256): failed})) == (0, failed)
    place, held = chosen(
        kernels, {(64, 256): 1.0, (128, 256): 1.0}, Gpu({(64, 256): 1.09, (128, 256): failed})
    )
    assert (place, held.mean_ms) == (0, 1.09)


def test_a_gpu_that_fails_while_another_runs_leaves_what_was_found(kernels):
    def run(built, measured):
        if tile_of(built.source.config)[:2] == (128, 256):
            raise DeviceError("it fell off the bus")
        return gpu(built, measured)

    gpu = Gpu({(64, 256): 1.09})
    place, held = chosen(kernels, {(64, 256): 1.0, (128, 256): 1.0}, run)
    assert (place, held.mean_ms) == (0, 1.09)
    with pytest.raises(DeviceError, match="bus"):
        chosen(kernels, {(128, 256): 1.0}, run)


def test_a_kernel_of_another_family_is_not_compared(kernels):
    other = kernels[128, 256]
    other = Built(replace(other.source, family="other"), other.binary)
    gpu = Gpu({(64, 256): 1.09, (128, 256): 1.0})
    assert fastest_held([(kernels[64, 256], trial(1.0)), (other, trial(1.0))], gpu)[0] == 0
    assert gpu.ran == [(64, 256)]


@pytest.mark.parametrize("extents", [{}, {"BM": 64}, {"BM": "small", "BN": 64}, {"BM": 64, "BN": 0}])
def test_what_is_no_tile_is_not_compared(extents):
    assert (tile_of(Config(extents)), reads_of(Config(extents))) == ((), float("inf"))
    assert sparing({0: Config({"BM": 64, "BN": 64})}, Config(extents)) == []


class Ended:
    """What the finals ask of a pipeline."""

    def __init__(self, kernels, *tiles_and_ms):
        self.trials = {
            number: Trial(f"t{number}", "sgemm", kernels[tile].source.config, trial(ms), f"c{number}")
            for number, (tile, ms) in enumerate(tiles_and_ms)
        }

    def fastest(self):
        return sorted(self.trials, key=lambda number: self.trials[number].cost)


def test_the_fastest_of_tiles_that_read_less_are_finalists_too(kernels):
    others = [
        ((64, 256), 1.01),
        ((128, 256), 1.02),
        ((32, 128), 1.001),
        ((128, 128), 1.5),
        ((128, 256), 1.015),
    ]
    trials = [*[((64, 128), 1.0)] * FINALISTS, *others]
    first, second = finalists(Ended(kernels, *trials), [], None)
    assert first == [*range(FINALISTS), FINALISTS + 4, FINALISTS], "the fastest of 128 x 256, then 64 x 256"
    assert second == [FINALISTS + 2, FINALISTS + 1, FINALISTS + 3], "those behind them, by time"
    quick, *_ = finalists(Ended(kernels, *trials), [], None, 2)
    assert quick == [0, 1]


def test_a_tile_reads_as_many_floats_as_its_edges_are_short_of_its_area(kernels):
    assert reads_of(kernels[128, 256].source.config) == 1 / 128 + 1 / 256
    without = Space.load("sgemm_skinny").presets["row_across"]
    assert (tile_of(without), reads_of(without)) == ((), float("inf"))
