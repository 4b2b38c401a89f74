"""Where a search starts when trials of other problems and devices are kept."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotune.families.estimate import estimate
from autotune.records import Store
from autotune.records.schema import RecordedDevice
from autotune.records.trials import TrialHeader, TrialLog, trials_path
from autotune.search.candidates import points_of
from autotune.space.space import Config, Legal, Space
from autotune.tuning.transfer import LOGS, warm_starts
from autotune.values.device import Device, named_device
from autotune.values.problem import Problem

SPACE = Space.load("sgemm")
H200 = named_device("h200")
HERE, THERE = Problem(4096, 4096, 4096), Problem(1024, 1024, 1024)


def keep(
    root: Path,
    problem: Problem,
    configs: list[Config],
    times: list[float],
    device: Device = H200,
    space: Space = SPACE,
) -> Path:
    """Write a log of trials; a time of 0 stands for a crash."""
    header = TrialHeader(
        family=space.family,
        problem=problem,
        device=RecordedDevice.of(device),
        space_digest="c" * 64,
        template_digest="b" * 64,
        nvrtc="13.0",
    )
    path = trials_path(Store(root).path(device, space.family, problem))
    with TrialLog(path, header) as log:
        log.event("begin", strategy="gp")
        for config, median_ms in zip(configs, times, strict=True):
            line: dict[str, Any] = {"config": dict(config), "outcome": "crash", "why": ""}
            if median_ms:
                line = {"config": dict(config), "outcome": "measured", "median_ms": median_ms}
            log.append(line)
    return path


@pytest.fixture(scope="module")
def legal() -> Legal:
    return SPACE.enumerate(HERE, H200)


@pytest.fixture(scope="module")
def known(legal: Legal) -> list[Config]:
    """Configs that are searched at both sizes, in chance order."""
    there = SPACE.enumerate(THERE, H200)
    drawn = np.random.default_rng(0).choice(len(there), 2000, replace=False)
    configs = [there.config(int(index)) for index in drawn]
    both = [
        config for config, index in zip(configs, points_of(legal, configs), strict=True) if index is not None
    ]
    assert len(both) >= 60
    return both[:60]


def modelled(config: Config, problem: Problem, device: Device = H200) -> float:
    return estimate(SPACE, SPACE.values(config, problem, device), problem, device).ms


def test_without_trials_there_are_no_starts(tmp_path: Path, legal: Legal) -> None:
    assert warm_starts(SPACE, legal, HERE, H200, Store(tmp_path), 16) == []
    assert warm_starts(SPACE, legal, HERE, H200, Store(tmp_path / "none"), 16) == []


def test_times_are_corrected_by_the_ratio_of_the_estimates(
    tmp_path: Path, legal: Legal, known: list[Config]
) -> None:
    known = sorted(known, key=lambda config: modelled(config, THERE) / modelled(config, HERE))
    times = [1.0 + 0.01 * i for i in range(len(known))]  # the fastest there is what suits HERE least
    keep(tmp_path, THERE, known, times)
    chosen = [legal.config(index) for index in warm_starts(SPACE, legal, HERE, H200, Store(tmp_path), 8)]
    score = {
        config: time_ms * modelled(config, HERE) / modelled(config, THERE)
        for config, time_ms in zip(known, times, strict=True)
    }
    assert chosen[0] == min(known, key=score.__getitem__)
    assert chosen[0] != known[0]
    ranks = [sorted(score.values()).index(score[config]) for config in chosen if config in score]
    assert ranks == sorted(ranks)


def test_where_the_model_is_right_the_first_start_is_the_best(
    tmp_path: Path, legal: Legal, known: list[Config]
) -> None:
    keep(tmp_path, THERE, known, [modelled(config, THERE) for config in known])
    first = legal.config(warm_starts(SPACE, legal, HERE, H200, Store(tmp_path), 1)[0])
    assert first == min(known, key=lambda config: modelled(config, HERE))


def test_no_start_comes_twice_and_there_are_no_more_than_asked_for(
    tmp_path: Path, legal: Legal, known: list[Config]
) -> None:
    for size in (512, 1024, 2048, 8192, 1536, 3072):
        keep(tmp_path, Problem(size, size, size), known, [1.0 + 0.1 * i for i in range(len(known))])
    for limit in (1, 5, 16):
        starts = warm_starts(SPACE, legal, HERE, H200, Store(tmp_path), limit)
        assert len(starts) == len(set(starts)) == limit
        assert all(0 <= index < len(legal) for index in starts)


def test_the_nearest_sizes_speak_first(tmp_path: Path, legal: Legal, known: list[Config]) -> None:
    sizes = (64, 128, 256, 512, 2048, 8192)
    for size, config in zip(sizes, known, strict=False):
        keep(tmp_path, Problem(size, size, size), [config], [1.0])
    starts = warm_starts(SPACE, legal, HERE, H200, Store(tmp_path), 16)
    assert len(starts) == LOGS
    near = [known[sizes.index(size)] for size in (2048, 8192, 512, 256)]
    assert {legal.config(index) for index in starts[:2]} == set(near[:2])
    assert [legal.config(index) for index in starts[2:]] == near[2:]


def test_other_devices_come_last(tmp_path: Path, legal: Legal, known: list[Config]) -> None:
    keep(tmp_path, HERE, known[:10], [1.0] * 10, named_device("rtx4090"))
    keep(tmp_path, Problem(256, 256, 256), known[10:12], [1.0, 2.0])
    starts = [legal.config(index) for index in warm_starts(SPACE, legal, HERE, H200, Store(tmp_path), 16)]
    assert set(starts[:2]) == set(known[10:12])
    assert set(starts[2:]) <= set(known[:10])
    assert len(starts) > 2


def test_the_own_log_is_left_to_whoever_resumes_it(tmp_path: Path, legal: Legal, known: list[Config]) -> None:
    path = keep(tmp_path, HERE, known[:3], [1.0, 2.0, 3.0])
    assert warm_starts(SPACE, legal, HERE, H200, Store(tmp_path), 16) == []
    path.rename(path.with_name(path.name.replace(".trials", ".old.trials")))  # of another space or toolchain
    assert legal.config(warm_starts(SPACE, legal, HERE, H200, Store(tmp_path), 16)[0]) == known[0]


def test_a_config_that_is_not_legal_here_stands_for_one_with_its_tile(
    tmp_path: Path, known: list[Config]
) -> None:
    odd = Problem(4095, 4097, 1023)
    here = SPACE.enumerate(odd, H200)
    exact = [config for config in known if config["edge"] == "exact"][:5]
    keep(tmp_path, THERE, exact, [1.0] * len(exact))
    starts = [here.config(index) for index in warm_starts(SPACE, here, odd, H200, Store(tmp_path), 16)]
    assert starts
    tile = ("BM", "BN", "BK", "TM", "TN", "LM")
    tiles = {tuple(config[name] for name in tile) for config in exact}
    assert {tuple(config[name] for name in tile) for config in starts} <= tiles
    assert all(config["edge"] != "exact" for config in starts)


def test_rejected_and_strange_lines_are_left_out(tmp_path: Path, legal: Legal, known: list[Config]) -> None:
    path = keep(tmp_path, THERE, known[:4], [0.0, 0.0, 2.0, 0.0])
    others = [
        {"config": {**known[4], "BM": 7}, "outcome": "measured", "median_ms": 0.1},
        {"config": {"BM": 64}, "outcome": "measured", "median_ms": 0.1},
        {"config": dict(known[5]), "outcome": "measured", "median_ms": "fast"},
        {"config": dict(known[5]), "outcome": "measured", "median_ms": -1},
        {"config": dict(known[5]), "outcome": "measured", "median_ms": 10**400},
        {"config": [1], "outcome": "measured", "median_ms": 0.1},
        {"config": {**known[5], "BM": [1]}, "outcome": "measured", "median_ms": 0.1},
        {"outcome": "measured"},
    ]
    with path.open("a") as file:
        for line in others:
            file.write(json.dumps(line) + "\n")
        file.write('["measured"]\n"measured"\n{"outcome": "measured", "config"')
    starts = warm_starts(SPACE, legal, HERE, H200, Store(tmp_path), 16)
    assert [legal.config(index) for index in starts] == [known[2]]


def test_broken_logs_are_left_out(tmp_path: Path, legal: Legal, known: list[Config]) -> None:
    good = keep(tmp_path, THERE, known[:1], [1.0])
    contents = (b"", b"{", b"\xff\xfe", b"[]\n", b'{"schema": 99}\n', b'{"schema": 2}\n')
    for number, content in enumerate(contents, 1):
        good.with_name(f"sgemm_f32_nn_m{number}_n1_k1_beta0_ffma.trials.jsonl").write_bytes(content)
    good.with_name("sgemm_f32_nn_m9_n9_k9_beta0_ffma.trials.jsonl").mkdir()
    os.mkfifo(good.with_name("sgemm_f32_nn_m8_n8_k8_beta0_ffma.trials.jsonl"))
    starts = warm_starts(SPACE, legal, HERE, H200, Store(tmp_path), 16)
    assert [legal.config(index) for index in starts] == known[:1]


def test_a_family_without_an_estimate_goes_by_the_order_there(tmp_path: Path) -> None:
    space = Space.load("coalesced")
    here = space.enumerate(HERE, H200)
    configs = [here.config(index) for index in range(len(here))]
    times = [5.0 - 0.1 * i for i in range(len(configs))]
    keep(tmp_path, THERE, configs, times, space=space)
    starts = warm_starts(space, here, HERE, H200, Store(tmp_path), 3)
    assert starts[0] == len(configs) - 1


def test_a_device_whose_clock_is_unknown_goes_by_the_order_there(
    tmp_path: Path, legal: Legal, known: list[Config]
) -> None:
    device = replace(H200, clock_mhz=0)
    keep(tmp_path, THERE, known[:5], [3.0, 1.0, 2.0, 5.0, 4.0])
    assert legal.config(warm_starts(SPACE, legal, HERE, device, Store(tmp_path), 16)[0]) == known[1]


def test_twenty_long_logs_take_little_processor_time(
    tmp_path: Path, legal: Legal, known: list[Config]
) -> None:
    path = keep(tmp_path, THERE, known[:50], [1.0 + i for i in range(50)])
    header, *lines = path.read_text().splitlines()
    for number in range(20):
        size = 512 * (number + 1)
        own = json.loads(header)
        own["problem"] |= {"m": size, "n": size, "k": size}
        other = path.with_name(f"sgemm_{Problem(size, size, size).key}.trials.jsonl")
        other.write_text("\n".join([json.dumps(own), *(lines * 20)[:1000]]) + "\n")
    began = time.process_time()
    assert len(warm_starts(SPACE, legal, HERE, H200, Store(tmp_path), 16)) == 16
    assert time.process_time() - began < 1.0  # 0.16 s where nobody else wants the core
