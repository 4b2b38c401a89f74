from __future__ import annotations

import dataclasses

import pytest

from autotune.errors import DeviceError
from autotune.model.account import (
    global_loads,
    problem_intensity,
    ridge,
    roofline_ms,
    shared_reads,
    tile_intensity,
    traffic_bytes,
)
from autotune.values.device import known_devices
from autotune.values.problem import Problem

H200 = known_devices()["h200"]


@pytest.mark.parametrize(
    ("BM", "BN", "loads", "intensity"),
    [(1, 1, 8192, 0.25), (32, 32, 256, 8), (64, 64, 128, 16), (128, 64, 96, 21.333), (128, 128, 64, 32)],
)
def test_a_larger_block_tile_loads_less(BM, BN, loads, intensity):
    assert global_loads(4096, BM, BN) == loads
    assert tile_intensity(BM, BN) == pytest.approx(intensity, abs=1e-3)
    # The two say the same: 2k FLOP per output over 4 bytes per element.
    assert 2 * 4096 / (4 * global_loads(4096, BM, BN)) == pytest.approx(tile_intensity(BM, BN))


def test_bytes_loaded_by_tiles_of_64():
    assert 4 * 4096**2 * global_loads(4096, 64, 64) == pytest.approx(8.59e9, rel=1e-3)


@pytest.mark.parametrize(
    ("TM", "TN", "reads"), [(1, 1, 8192), (8, 1, 4608), (1, 8, 4608), (8, 8, 1024), (16, 8, 768)]
)
def test_a_larger_thread_tile_reads_less(TM, TN, reads):
    assert shared_reads(4096, TM, TN) == reads


def test_intensity_of_a_problem():
    assert problem_intensity(Problem(4096, 4096, 4096)) == pytest.approx(4096 / 6)
    assert problem_intensity(Problem(1, 4096, 4096)) == pytest.approx(0.5, abs=1e-3)


def test_the_peak_of_three_tf32_products_is_a_third_of_tf32s():
    peak = H200.peak("3xtf32")
    assert peak == pytest.approx(989.4e3 / 2 * 1980 / 1830 / 3, rel=0.01)  # 989.4 TFLOP/s sparse at 1830 MHz
    assert ridge(H200, "3xtf32") == pytest.approx(peak / H200.bandwidth_gbs)
    assert roofline_ms(Problem(4096, 4096, 4096, math="3xtf32"), H200) == pytest.approx(2**37 / peak * 1e-6)
    old = dataclasses.replace(H200, compute_capability="7.5")
    with pytest.raises(DeviceError, match="the peak of 3xtf32 on NVIDIA H200 is unknown"):
        ridge(old, "3xtf32")


def test_ridge():
    assert ridge(H200) == pytest.approx(13.9, abs=0.05)
    assert ridge(known_devices()["rtx5080"]) == pytest.approx(58.6, abs=0.1)


def test_roofline_of_compute_and_of_memory():
    assert roofline_ms(Problem(4096, 4096, 4096), H200) == pytest.approx(2.0546, abs=1e-3)  # 2^37 / 66.9e12
    assert roofline_ms(Problem(1, 4096, 4096), H200) == pytest.approx(0.01399, abs=1e-4)  # 67 MB / 4.8 TB/s


def test_beta_moves_c_twice():
    without, with_beta = Problem(256, 128, 64), Problem(256, 128, 64, beta=1)
    assert traffic_bytes(without) == 4 * (256 * 64 + 64 * 128 + 256 * 128)
    assert traffic_bytes(with_beta) - traffic_bytes(without) == 4 * 256 * 128


@pytest.mark.parametrize("unknown", ["clock_mhz", "bandwidth_gbs"])
def test_a_device_of_unknown_speed_has_no_roofline(unknown):
    device = dataclasses.replace(H200, **{unknown: 0})
    with pytest.raises(DeviceError, match="speed of NVIDIA H200 is unknown"):
        roofline_ms(Problem(64, 64, 64), device)
    with pytest.raises(DeviceError, match="speed of NVIDIA H200 is unknown"):
        ridge(device)
