"""Records of kernels that could be, made without a GPU: what they say of time is made up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autotune import records
from autotune.code.render import render
from autotune.records import from_json
from autotune.records.schema import Record
from autotune.space.space import Config, Space
from autotune.values.device import Device, named_device
from autotune.values.problem import Problem

H200 = named_device("h200")
SGEMM = Space.load("sgemm")


def fitted(
    problem: Problem, preset: str = "tiny_block", device: Device = H200, space: Space = SGEMM
) -> Config:
    return space.fitted(space.presets[preset], problem, device)


def made(
    problem: Problem,
    *,
    config: Mapping[str, Any] | None = None,
    preset: str = "tiny_block",
    ms: float = 1.0,
    device: Device = H200,
    space: Space = SGEMM,
    others: Sequence[Mapping[str, Any]] = (),
    **changes: Any,
) -> Record:
    """A measured record whose code is that of today; ``others`` are the configs of its runners-up."""
    chosen = fitted(problem, preset, device, space) if config is None else space.config(config)
    source = render(space, chosen, problem, device)
    quantiles = (0.99 * ms, ms, 1.01 * ms)
    digests = [render(space, space.config(each), problem, device).code_digest for each in others]
    facts: dict[str, Any] = {
        "evidence": "measured",
        "problem": problem,
        "device": records.RecordedDevice.of(device),
        "family": space.family,
        "config": dict(chosen),
        "launch": source.launch,
        "code_digest": source.code_digest,
        "template_digest": source.template_digest,
        "space_digest": space.digest,
        "toolchain": records.Toolchain("13.0", "580.1", ("-std=c++17",)),
        "resources": records.Resources(64, 0, 0),
        "timing": records.Timing(ms, quantiles, 7, 1, "warm", "back-to-back", None, False),
        "gflops": problem.flops / ms / 1e6,
        "vs_cublas": None,
        "cublas": None,
        "verification": records.Verification(1e-7, 1e-6, "made up"),
        "search": records.Searched("tpe", "1s", 1.0, True, 1, 1, {"measured": 1}, 0),
        "runners_up": tuple(
            records.RunnerUp(dict(each), digest, ms, quantiles, True)
            for each, digest in zip(others, digests, strict=True)
        ),
        "created": "2026-11-29T12:00:00Z",
    }
    record = Record(**{**facts, **changes})
    return from_json(records.to_json(record), "made")  # numbers as they are stored


def made_estimate(problem: Problem, device: Device = H200) -> Record:
    """What a search without a GPU leaves."""
    return made(
        problem,
        device=device,
        evidence="estimated",
        timing=None,
        gflops=None,
        toolchain=records.Toolchain("13.0", None, ()),
    )
