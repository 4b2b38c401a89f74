from __future__ import annotations

import csv
import dataclasses
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from autotune.errors import ConfigError, DeviceError
from autotune.families import estimate as static
from autotune.families.sgemm import predicted_registers
from autotune.model.account import roofline_ms
from autotune.space.space import Config, Space
from autotune.values.device import known_devices
from autotune.values.problem import Problem

H200 = known_devices()["h200"]
LARGE, SMALL = Problem(4096, 4096, 4096), Problem(1024, 1024, 1024)
SPACE = Space.load("sgemm")
estimate, estimate_columns = partial(static.estimate, SPACE), partial(static.estimate_columns, SPACE)


def values(preset="square_block", problem=LARGE, **changes):
    return SPACE.values(Config({**SPACE.presets[preset], **changes}), problem, H200)


def columns(rows):
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def measured(size):
    """Configs drawn at random and timed on an H200; none of them was used to fit the model."""
    path = Path(__file__).parent / "data" / "h200_random_configs.csv"
    with path.open() as file:
        rows = [row for row in csv.DictReader(file) if int(row.pop("size")) == size]
    numbers = {
        name: np.array([float(row.pop(name)) for row in rows]) for name in ("registers", "spill_bytes")
    }
    ms = np.array([float(row.pop("median_ms")) for row in rows])
    first = {name: choices[0] for name, choices in SPACE.parameters.items()}  # of what came after them
    chosen = [{k: int(v) if v.isdigit() else v for k, v in row.items()} for row in rows]
    configs = [Config({**first, **each}) for each in chosen]
    problem = Problem(size, size, size)
    table = columns([SPACE.values(config, problem, H200) for config in configs])
    return problem, table, {name: column.astype(int) for name, column in numbers.items()}, ms


def rank_correlation(a, b):
    """Spearman's, for columns almost without ties."""
    return np.corrcoef(np.argsort(np.argsort(a)), np.argsort(np.argsort(b)))[0, 1]


@pytest.mark.parametrize(("size", "least"), [(1024, 0.93), (4096, 0.85)])
def test_it_orders_measured_kernels(size, least):
    problem, table, resources, ms = measured(size)
    estimated = estimate_columns(table, problem, H200, **resources)
    assert rank_correlation(estimated, ms) > least
    assert ms[np.argsort(estimated)[:5]].min() < 1.02 * ms.min()
    assert 0.7 < np.median(estimated / ms) < 1.1


@pytest.mark.parametrize(("size", "least"), [(1024, 0.92), (4096, 0.78)])
def test_it_orders_them_before_they_are_compiled(size, least):
    problem, table, resources, ms = measured(size)
    assert rank_correlation(estimate_columns(table, problem, H200), ms) > least
    registers, _ = predicted_registers(table, H200)
    assert np.median(np.abs(registers - resources["registers"])) < 12


def test_columns_agree_with_single_configs():
    rows = [values(name, SMALL) for name in SPACE.presets]
    together = estimate_columns(columns(rows), SMALL, H200)
    assert together == pytest.approx([estimate(row, SMALL, H200).ms for row in rows], rel=1e-12)
    given = estimate_columns(columns(rows), SMALL, H200, np.full(len(rows), 96), np.full(len(rows), 16))
    assert given == pytest.approx([estimate(row, SMALL, H200, 96, 16).ms for row in rows], rel=1e-12)


def test_parts_explain_the_time():
    found = estimate(values(), LARGE, H200, registers=126)
    assert (found.registers, found.spill_bytes, found.bottleneck) == (126, 0, "issue")
    assert found.parts["occupancy"] == 0.25  # two blocks of 256 threads on 2,048
    assert found.parts["latency_factor"] == pytest.approx(4 / 4.25)
    assert found.parts["wave_efficiency"] == pytest.approx(1024 / (8 * 132))
    assert found.parts["spill_share"] == found.parts["fetch_ms"] == 0
    assert 0 < found.parts["stall_ms"] < found.parts["issue_ms"]
    times = [time for name, time in found.parts.items() if name.endswith("_ms")]
    assert max(times) < found.ms < sum(times)
    assert found.parts["issue_ms"] > roofline_ms(LARGE, H200)


def test_spills_cost_time():
    clean, spilled = (estimate(values(), LARGE, H200, 128, spills) for spills in (0, 400))
    assert spilled.ms > 1.2 * clean.ms
    assert 0 < spilled.parts["spill_share"] < 0.5


def test_one_register_too_many_costs_a_block():
    fits, over = (estimate(values(), LARGE, H200, registers) for registers in (128, 129))
    assert (fits.parts["occupancy"], over.parts["occupancy"]) == (0.25, 0.125)
    assert over.ms > fits.ms


def test_the_lanes_that_share_reads_decide_the_shared_memory_time():
    # 4 x 8 outputs: with two columns of lanes every read is shared by a pair, with eight only those of A.
    paired, unpaired = (
        estimate(values(BM=128, BN=64, TM=4, TN=8, LM=lanes), LARGE, H200, registers=96) for lanes in (16, 4)
    )
    assert paired.parts["shared_ms"] < 0.85 * unpaired.parts["shared_ms"]


def test_a_loop_beyond_the_instruction_cache_is_fetched():
    # Four warps on an SM; FFMAs of 16 KiB and 64 KiB: measured 1.8 and 3.4 clocks each.
    small = estimate(values("middle_block", SMALL, BK=8, stages=2), SMALL, H200, registers=128)
    large = estimate(values("middle_block", SMALL, BK=16, stages=4), SMALL, H200, registers=128)
    assert small.parts["fetch_ms"] == 0
    assert large.bottleneck == "fetch"
    assert large.ms > 1.3 * small.ms


def test_a_single_buffer_stalls():
    staged = values("register_staged", fragment_pipeline=0, unroll_stages=0)
    single = values("register_staged", fragment_pipeline=0, unroll_stages=0, stages=1)
    assert estimate(staged, LARGE, H200, 168).ms < estimate(single, LARGE, H200, 168).ms
    assert estimate(single, LARGE, H200, 168).bottleneck == "stall"


def test_idle_processors_cost_time():
    wide, narrow = (estimate(values(name, SMALL), SMALL, H200) for name in ("wide_block", "middle_block"))
    assert wide.parts["wave_efficiency"] == pytest.approx(32 / 132)
    assert wide.ms > 2 * narrow.ms


def test_no_time_is_below_that_of_device_memory():
    problem = Problem(32, 65536, 32)
    row = SPACE.values(
        Config({**SPACE.presets["tiny_block"], "stages": 1, "fragment_pipeline": 0}), problem, H200
    )
    slow_memory = dataclasses.replace(H200, bandwidth_gbs=100)
    found = estimate(row, problem, slow_memory, registers=64)
    assert (found.bottleneck, found.ms) == ("dram", found.parts["dram_ms"])
    assert found.ms == pytest.approx(4 * (32 * 32 + 2 * 32 * 65536) / 100e6)
    assert (
        estimate(row, problem, dataclasses.replace(H200, bandwidth_gbs=0), registers=64).parts["dram_ms"] == 0
    )


@pytest.mark.parametrize(
    ("problem", "more"), [(Problem(4800, 32, 7904, "nt"), 2), (Problem(4800, 32, 512, "nt"), 1)]
)
def test_rows_of_32_bytes_are_moved_twice_where_l2_does_not_hold_them(problem, more):
    times = [
        estimate(values("tiny_block", problem, BK=BK, edge="shifted"), problem, H200, 64).parts["dram_ms"]
        for BK in (8, 16)
    ]
    both = problem.m * problem.k + problem.k * problem.n + problem.m * problem.n
    a = problem.m * problem.k
    assert times[0] / times[1] == pytest.approx((both + (more - 1) * a) / both)
    turned = Problem(problem.m, problem.n, problem.k, "tn")
    assert estimate(values("tiny_block", turned, BK=8, edge="shifted"), turned, H200, 64).parts[
        "dram_ms"
    ] == pytest.approx(times[1])


def test_half_the_lanes_take_twice_the_time_for_ffmas():
    a100 = known_devices()["a100"]
    found = estimate(SPACE.values(SPACE.presets["square_block"], LARGE, a100), LARGE, a100, registers=126)
    assert found.ms > roofline_ms(LARGE, a100)
    assert found.parts["issue_ms"] < 1.15 * roofline_ms(LARGE, a100)  # there the other instructions ride free


def test_prediction_of_registers_and_spills():
    free = predicted_registers(values(min_blocks=1), H200)
    assert 120 <= free[0] <= 150
    assert free[1] == 0
    capped = predicted_registers(values("two_warps", min_blocks=3, BM=128, BN=128), H200)
    assert capped[0] == 168
    assert capped[1] > 0
    found = estimate(values("two_warps"), LARGE, H200)
    assert (found.registers, found.spill_bytes) == tuple(predicted_registers(values("two_warps"), H200))


def test_a_block_that_does_not_fit():
    row = values("wide_block")
    with pytest.raises(ConfigError, match=r"block of 512 threads with 255 registers each .* fewer stages$"):
        estimate(row, LARGE, H200, registers=255)
    together = estimate_columns(columns([row, row]), LARGE, H200, np.array([126, 255]))
    assert np.isfinite(together).tolist() == [True, False]


def test_what_the_model_needs():
    naive = Space.load("naive")
    with pytest.raises(ConfigError, match=r"no estimate: there is no model for naive$"):
        static.estimate(naive, {}, LARGE, H200)
    with pytest.raises(DeviceError, match="no estimate for NVIDIA H200: its clock is unknown"):
        estimate(values(), LARGE, dataclasses.replace(H200, clock_mhz=0))


def test_every_legal_point_of_every_device_has_an_estimate():
    problem = Problem(1000, 777, 96, layout="tn", beta=1)
    for device in known_devices().values():
        legal = SPACE.enumerate(problem, device)
        picks = np.linspace(0, len(legal) - 1, 40).astype(int)
        rows = [SPACE.values(legal.config(index), problem, device) for index in picks]
        ms = estimate_columns(columns(rows), problem, device)
        assert np.isfinite(ms).all(), device.name
        assert (ms > 0.5 * roofline_ms(problem, device)).all()


def test_parts_of_k_fill_the_gpu():
    """64 x 64 x 64000: one tile; 64 parts took 21 us on an H200, 32 took 34 us."""
    problem = Problem(64, 64, 64000, "nt")
    config = {**SPACE.presets["deep_block"]}
    times = {
        parts: estimate(SPACE.values(Config({**config, "split_k": parts}), problem, H200), problem, H200).ms
        for parts in (1, 8, 32, 64)
    }
    assert times[1] > 5 * times[8] > 10 * times[32] > 10 * times[64]


def test_warps_that_take_turns_hide_latency():
    """256 cubed: four took 3.15 us on an H200, two 3.41, one 7.04."""
    problem = Problem(256, 256, 256)
    one, two, four = (
        estimate(
            SPACE.values(Config({**SPACE.presets["turning_tiny"], "warps_k": turns}), problem, H200),
            problem,
            H200,
            registers=64,
        ).ms
        for turns in (1, 2, 4)
    )
    assert one > two > four
