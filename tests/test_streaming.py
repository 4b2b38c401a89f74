from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from autotune.errors import ConfigError, DeviceError
from autotune.families import estimate as static
from autotune.space.space import Space
from autotune.values.device import named_device
from autotune.values.problem import Problem

H200 = named_device("h200")
SKINNY = Space.load("sgemm_skinny")
estimate, estimate_columns = partial(static.estimate, SKINNY), partial(static.estimate_columns, SKINNY)
MEASURED = {  # us on an H200, 2026-11-30, operands cold, launches by graph replay: the winner of each shape
    "row_across": (Problem(1, 4096, 4096), 17.9),
    "few_across": (Problem(5, 4096, 4096), 18.7),
    "rows_across": (Problem(16, 4096, 4096), 21.5),
    "many_across": (Problem(32, 4096, 4096), 32.9),
    "tall_across": (Problem(11008, 4, 4096, "tn"), 43.9),
    "row_along": (Problem(1, 4096, 4096, "nt"), 17.2),
    "rows_along": (Problem(16, 4096, 4096, "nt"), 22.3),
    "columns_along": (Problem(4096, 16, 4096), 23.1),
    "many_along": (Problem(32, 4096, 4096, "nt"), 34.1),
    "deep_along": (Problem(512, 8, 500_000, "nn", 1), 239.7),
    "odd_along": (Problem(7, 4095, 4097, "nt"), 21.5),
}


def test_every_preset_is_measured_and_says_how_fast_it_was() -> None:
    assert list(MEASURED) == list(SKINNY.presets)
    for name, (problem, us) in MEASURED.items():
        p = problem
        lines = SKINNY.path.read_text().splitlines()
        place = next(
            i for i, line in enumerate(lines) if line.startswith((f"[presets.{name}]", f"{name} = "))
        )
        said = lines[place] + lines[place - 1]
        assert f"{p.m} x {p.n} x {p.k} {p.layout}: {us:g} us" in said


@pytest.mark.parametrize("name", MEASURED)
def test_the_estimate_of_a_preset_is_near_its_time(name: str) -> None:
    problem, us = MEASURED[name]
    found = estimate(SKINNY.values(SKINNY.presets[name], problem, H200), problem, H200)
    assert 0.8 < 1e3 * found.ms / us < 1.3
    assert found.bottleneck in ("dram", "issue")


def test_no_estimate_is_far_below_that_of_the_measured_winner() -> None:
    for name, (problem, _) in MEASURED.items():
        legal = SKINNY.enumerate(problem, H200)
        ms = estimate_columns(SKINNY.columns(legal, problem, H200), problem, H200)
        own = legal.index(SKINNY.presets[name])
        assert own is not None
        assert ms[own] < 1.25 * ms.min()
        assert ms.max() > 1.2 * ms.min()


def test_columns_and_single_values_agree() -> None:
    problem = Problem(16, 4096, 4096, "nt")
    legal = SKINNY.enumerate(problem, H200)
    ms = estimate_columns(SKINNY.columns(legal, problem, H200), problem, H200)
    assert np.isfinite(ms).all()
    for index in (0, len(legal) // 2, len(legal) - 1):
        values = SKINNY.values(legal.config(index), problem, H200)
        assert estimate(values, problem, H200).ms == pytest.approx(ms[index])


def test_it_takes_longer_with_more_to_read_and_with_spills() -> None:
    config, problem = SKINNY.presets["rows_across"], Problem(16, 4096, 4096)
    values = SKINNY.values(config, problem, H200)
    whole = estimate(values, problem, H200, 128).ms
    assert estimate(values, problem, H200, 128, 4000).ms > whole
    deeper = replace(problem, k=8192)
    assert estimate(SKINNY.values(config, deeper, H200), deeper, H200, 128).ms > 1.5 * whole


def test_what_it_does_not_know() -> None:
    values = SKINNY.values(SKINNY.presets["row_across"], Problem(1, 4096, 4096), H200)
    assert static.knows(SKINNY)
    with pytest.raises(DeviceError, match="its memory bandwidth is unknown"):
        estimate(values, Problem(1, 4096, 4096), replace(H200, bandwidth_gbs=0))
    with pytest.raises(ConfigError, match="does not fit on an SM"):
        estimate(values | {"smem_bytes": 10**6}, Problem(1, 4096, 4096), H200)
