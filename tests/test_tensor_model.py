"""The estimate of kernels on tensor cores, beside times of an H200."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.families import sgemm_3xtf32_wgmma
from autotune.families.estimate import estimate, estimate_columns
from autotune.kernel.choices import Choices
from autotune.records import Store
from autotune.space.space import Space
from autotune.values.device import named_device
from autotune.values.problem import Problem

H200 = named_device("h200")
CUBE = Problem(4096, 4096, 4096, math="3xtf32")
WARPS, WARPGROUPS = Space.load("sgemm_3xtf32"), Space.load("sgemm_3xtf32_wgmma")
MEASURED = [  # at 4096 cubed: BM, BN, stages, splits; ms; registers
    (128, 128, 5, 3, 1.233, 224), (128, 64, 3, 2, 1.322, 210), (128, 128, 4, 3, 1.339, 222),
    (128, 128, 5, 2, 1.389, 218), (128, 128, 4, 2, 1.393, 224), (128, 128, 3, 2, 1.564, 224),
    (64, 64, 3, 2, 1.592, 142), (64, 64, 4, 3, 1.781, 141), (64, 128, 4, 2, 1.795, 144),
    (64, 128, 4, 3, 2.036, 144), (64, 128, 3, 2, 2.428, 144),
]  # fmt: skip

FEW_ROWS = [  # problem; ms of the best of five configs; of the fastest in FP32
    ((1, 4096, 4096, "nn"), 0.0227, 0.0175), ((1, 4096, 4096, "nt"), 0.0270, 0.0177),
    ((4096, 1, 4096, "nn"), 0.0292, 0.0197), ((3, 4096, 4096, "nn"), 0.0255, 0.0195),
    ((4, 4096, 4096, "nt"), 0.0262, 0.0191), ((8, 4096, 4096, "nn"), 0.0255, 0.0207),
    ((8, 11008, 4096, "nt"), 0.0569, 0.0487), ((6, 1024, 1024, "nn"), 0.0053, 0.0031),
    ((2, 20000, 512, "nt"), 0.0141, 0.0100), ((512, 8, 50000, "nn"), 0.0453, 0.0302),
]  # fmt: skip


def ranks(values: list[float]) -> list[int]:
    return [sorted(values).index(value) for value in values]


def test_the_order_is_nearly_the_measured_one() -> None:
    base = WARPGROUPS.presets["two_warpgroups"]
    found = []
    for BM, BN, stages, splits, _, registers in MEASURED:
        config = WARPGROUPS.config({**base, "BM": BM, "BN": BN, "stages": stages, "splits": splits})
        found.append(estimate(WARPGROUPS, WARPGROUPS.values(config, CUBE, H200), CUBE, H200, registers).ms)
    measured = [row[4] for row in MEASURED]
    assert np.corrcoef(ranks(found), ranks(measured))[0, 1] > 0.8
    np.testing.assert_allclose(found, measured, rtol=0.3)
    assert int(np.argmin(found)) == 0


def test_warpgroups_beat_warps_and_warps_beat_fp32() -> None:
    times = []
    for space in (WARPGROUPS, WARPS):
        legal = space.enumerate(CUBE, H200)
        times.append(estimate_columns(space, space.columns(legal, CUBE, H200), CUBE, H200).min())
    fp32 = 1e-6 * CUBE.flops / H200.peak_gflops
    assert 1e-6 * CUBE.flops / H200.peak("3xtf32") < times[0] < 0.8 * times[1] < 0.9 * fp32


@pytest.mark.parametrize(("shape", "measured", "fp32"), FEW_ROWS, ids=str)
def test_few_rows_are_left_to_fp32(shape, measured, fp32, tmp_path) -> None:
    problems = [Problem(*shape, math=math) for math in ("ffma", "3xtf32")]
    ours, tensor = (Choices(each, H200, Store(tmp_path)).first_ms(exact=False) for each in problems)
    assert tensor == pytest.approx(measured, rel=0.3)
    assert ours < tensor


@pytest.mark.parametrize("space", [WARPS, WARPGROUPS])
def test_columns_say_what_single_configs_do(space: Space) -> None:
    legal = space.enumerate(CUBE, H200)
    columns = estimate_columns(space, space.columns(legal, CUBE, H200), CUBE, H200)
    for index in range(0, len(legal), len(legal) // 7):
        single = estimate(space, space.values(legal.config(index), CUBE, H200), CUBE, H200)
        assert columns[index] == pytest.approx(single.ms)
        assert single.bottleneck in ("tensor", "issue", "stall", "l2")


def test_predicted_registers_are_near_the_compilers() -> None:
    for BM, BN, stages, splits, _, registers in MEASURED:
        config = WARPGROUPS.config(
            {**WARPGROUPS.presets["two_warpgroups"], "BM": BM, "BN": BN, "stages": stages, "splits": splits}
        )
        parts = sgemm_3xtf32_wgmma.parts(WARPGROUPS.values(config, CUBE, H200), CUBE, H200, None, 0)
        assert abs(int(parts["registers"]) - registers) < 16
