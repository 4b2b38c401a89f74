from __future__ import annotations

import numpy as np
import pytest

from autotune.model.occupancy import block_limits, occupancy
from autotune.values.device import known_devices

ADA = known_devices()["rtx6000ada"]
H200 = known_devices()["h200"]
T4 = known_devices()["t4"]


def test_the_tutorial_kernel_on_an_rtx_6000_ada():
    # 127 registers, 256 threads, 8 KiB of shared memory, and a carve-out of 64 KiB chosen by the driver.
    found = occupancy(ADA, registers=127, threads=256, shared_bytes=8192, carve_out=65536)
    assert found.limits == {"registers": 2, "shared": 7, "warps": 6, "blocks": 24}
    assert (found.blocks, found.warps, found.max_warps, found.limited_by) == (2, 16, 48, ("registers",))
    assert found.fraction == pytest.approx(1 / 3)


@pytest.mark.parametrize(("registers", "blocks"), [(121, 2), (128, 2), (129, 1), (168, 1), (255, 1)])
def test_registers_are_given_in_eights(registers, blocks):
    assert occupancy(H200, registers, threads=256, shared_bytes=0).blocks == blocks


@pytest.mark.parametrize(
    ("registers", "warps"),
    [(104, 16), (112, 16), (120, 16), (96, 20), (88, 20), (136, 12), (144, 12), (176, 8)],
)
def test_a_scheduler_has_a_quarter_of_the_registers(registers, warps):
    # 104 registers for 19.7 warps of the SM, but for 4.9 of each quarter: four.
    assert occupancy(H200, registers, threads=32, shared_bytes=0).limits["registers"] == warps


def test_a_kibibyte_per_block_is_reserved_from_compute_capability_8_0():
    assert occupancy(T4, registers=32, threads=32, shared_bytes=16384).limits["shared"] == 4
    assert occupancy(H200, registers=32, threads=32, shared_bytes=56 * 1024).limits["shared"] == 4
    assert occupancy(H200, registers=32, threads=32, shared_bytes=57 * 1024).limits["shared"] == 3
    assert occupancy(H200, registers=32, threads=32, shared_bytes=H200.shared_per_block).blocks == 1


def test_threads_and_blocks_limit_too():
    assert occupancy(ADA, registers=32, threads=1024, shared_bytes=0).limited_by == ("warps",)
    small = occupancy(ADA, registers=16, threads=32, shared_bytes=0)
    assert (small.blocks, small.limited_by, small.fraction) == (24, ("blocks",), 0.5)
    assert occupancy(H200, registers=32, threads=1024, shared_bytes=0).limited_by == ("registers", "warps")
    assert occupancy(H200, registers=32, threads=33, shared_bytes=0).warps == 2 * 32


def test_a_block_that_does_not_fit():
    found = occupancy(H200, registers=255, threads=1024, shared_bytes=0)
    assert (found.blocks, found.limited_by, found.fraction) == (0, ("registers",), 0)
    with pytest.raises(ValueError, match="does not fit on an SM: registers allow none"):
        found.waves(100)


def test_waves_of_a_grid():
    found = occupancy(H200, registers=128, threads=256, shared_bytes=0)
    assert found.waves(264) == 1
    assert found.waves(1024) == pytest.approx(3.879, abs=1e-3)


def test_columns_agree_with_single_configs():
    registers, threads, shared = np.array([32, 96, 127, 255]), np.array([64, 96, 256, 512]), 4096
    limits = block_limits(H200, registers, threads, shared)
    for i in range(len(registers)):
        single = occupancy(H200, int(registers[i]), int(threads[i]), shared)
        assert {name: np.broadcast_to(column, 4)[i] for name, column in limits.items()} == single.limits
