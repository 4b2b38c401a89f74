"""Occupancy and bottlenecks against Nsight Compute's, for presets that ran at 4096 cubed on an H200.

``tests/data/h200_occupancy.json``: NVRTC 13.0, driver 580.159, ``ncu --clock-control none``. Its limit by
shared memory is of the carve-out that the driver chose for the launch; ours is of the largest one, which the
driver takes if more blocks would fit. The resident blocks are the same.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autotune.families.estimate import estimate
from autotune.model.occupancy import occupancy
from autotune.space.space import Space
from autotune.values.device import named_device
from autotune.values.problem import Problem

H200 = named_device("h200")
SGEMM = Space.load("sgemm")
FIRST = {name: values[0] for name, values in SGEMM.parameters.items()}  # of parameters newer than the figures
LARGE = Problem(4096, 4096, 4096)
FIGURES = json.loads((Path(__file__).with_name("data") / "h200_occupancy.json").read_text())
CARVE_OUTS = [kib << 10 for kib in (8, 16, 32, 64, 100, 132, 164, 196, 228)]  # of compute capability 9.0
KERNELS = pytest.mark.parametrize("name", FIGURES)


@KERNELS
def test_residency_is_the_hardwares(name):
    hardware = FIGURES[name]
    held = occupancy(H200, hardware["registers"], hardware["threads"], hardware["shared_bytes"])
    for resource in ("registers", "warps", "blocks"):
        assert held.limits[resource] == hardware["limits"][resource]
    assert 100 * held.fraction == hardware["occupancy_percent"]
    assert held.waves(hardware["grid"]) == pytest.approx(hardware["waves"], abs=0.005)


@KERNELS
def test_the_limit_by_shared_memory_is_that_of_some_carve_out(name):
    hardware = FIGURES[name]
    numbers = hardware["registers"], hardware["threads"], hardware["shared_bytes"]
    possible = {occupancy(H200, *numbers, carve_out=size).limits["shared"] for size in CARVE_OUTS}
    assert hardware["limits"]["shared"] in possible
    assert occupancy(H200, *numbers).blocks == min(hardware["limits"].values())


@KERNELS
def test_the_named_bottleneck_is_what_the_hardware_is_busy_with(name):
    """Issue: warps wait to be selected. Shared memory: its pipe is busier than the schedulers."""
    hardware = FIGURES[name]
    values = SGEMM.values(SGEMM.config({**FIRST, **hardware["config"]}), LARGE, H200)
    named = estimate(SGEMM, values, LARGE, H200, hardware["registers"]).bottleneck
    if hardware["shared_pipe_percent"] > hardware["issue_active_percent"]:
        assert named == "shared"
    else:
        assert named == "issue"
        assert max(hardware["stalls"], key=lambda stall: hardware["stalls"][stall]) in (
            "not_selected",
            "selected",
        )
