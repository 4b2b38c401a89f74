"""Turns a problem and a device into its `Ladder`: counted anywhere, verified and timed on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from autotune.code.compiler import default_workers
from autotune.errors import ConfigError, Rejected, SpaceError, UsageError
from autotune.measure.worker import GpuWorker
from autotune.report.explain import explain
from autotune.report.ladder.rung import Ladder, Rung
from autotune.report.ladder.step import Step, fitted_step, steps
from autotune.simulator import SimulationFault, UnsupportedPTX
from autotune.tuning.pipeline import trial_limit
from autotune.values.device import Device
from autotune.values.measurement import MeasuredTrial
from autotune.values.problem import Problem

FINALS_TIMEOUT_S = 30.0
ALONE_MS = 100.0  # a launch longer than this, and than `ALONE_FACTOR` times the fastest, takes no turns
ALONE_FACTOR = 3.0

Teller = Callable[[str], None]


def describe(
    problem: Problem, device: Device, *, root: Path | None = None, tell: Teller = lambda line: None
) -> Ladder:
    """Count every step for a device that need not be here; nothing is timed.

    Args:
        problem: What to compute.
        device: For which GPU.
        root: Folder of records; `autotune.paths.cache_dir` when not given.
        tell: Told what begins.

    Raises:
        DeviceError: The device's clock or bandwidth is unknown.
        ToolchainError: NVRTC is missing or does not know the device.
    """
    chosen = steps(problem.math)
    tell(f"compiling {len(chosen)} steps for {device.name} and counting what they do")
    with ThreadPoolExecutor(default_workers()) as pool:  # compilers and disassemblers run beside each other
        rungs = tuple(pool.map(lambda step: _rung(step, problem, device, root), chosen))
    return Ladder(problem, device, rungs)


def climb(
    problem: Problem, *, ordinal: int = 0, root: Path | None = None, tell: Teller = lambda line: None
) -> Ladder:
    """Verify every step on a GPU, then time those that are right in turns with cuBLAS, in one run.

    A step much slower than the others is timed by itself. One that fails is a rung that says why.

    Args:
        problem: What to compute.
        ordinal: CUDA ordinal of the GPU.
        root: Folder of records.
        tell: Told of every step.

    Raises:
        DeviceError: No usable GPU, or too little memory for the operands.
        ToolchainError: NVRTC or CuPy is missing or does not serve the GPU.
    """
    with GpuWorker(ordinal, problem) as gpu:
        device = gpu.ready().device
        counted = describe(problem, device, root=root, tell=tell)
        return measure(counted, gpu, tell)


def measure(counted: Ladder, gpu: GpuWorker, tell: Teller = lambda line: None) -> Ladder:
    """Give a ladder its times: a trial of each step, which verifies it first, then turns of the fast ones."""
    limit = trial_limit(counted.problem)
    by_name = {rung.step.name: rung for rung in counted.rungs}
    runnable = {
        name: rung.account
        for name, rung in by_name.items()
        if rung.account is not None and rung.rejected is None
    }
    for name, found in runnable.items():
        gpu.submit(name, found.binary, found.source.launch, None, limit)
    medians: dict[str, float] = {}
    while gpu.pending:
        for name, outcome in gpu.collect(1.0):
            by_name[name] = _with_outcome(by_name[name], outcome, alone=True)
            if isinstance(outcome, MeasuredTrial):
                medians[name] = outcome.timing.median_ms
                tell(f"{name}: right, {outcome.timing.median_ms:.4g} ms")
            else:
                tell(f"{name}: {outcome.kind}, {outcome.why}")

    turns = _taking_turns(medians)
    tell("checking every element, and timing in turns with cuBLAS")
    finals = gpu.finals(
        [(name, runnable[name].binary, runnable[name].source.launch) for name in turns],
        FINALS_TIMEOUT_S + limit,
    )
    for name, outcome in finals.outcomes.items():
        by_name[name] = _with_outcome(by_name[name], outcome, alone=False)
    rungs = tuple(by_name[rung.step.name] for rung in counted.rungs)
    return replace(counted, rungs=rungs, measured=True, cublas=finals.cublas)


def _taking_turns(medians: Mapping[str, float]) -> list[str]:
    limit = max(ALONE_MS, ALONE_FACTOR * min(medians.values(), default=0.0))
    return [name for name, median in medians.items() if median <= limit]


def _with_outcome(rung: Rung, outcome: MeasuredTrial | Rejected, alone: bool) -> Rung:
    if isinstance(outcome, Rejected):
        return replace(rung, rejected=outcome, timing=None, alone=False)
    return replace(rung, timing=outcome.timing, alone=alone)


def _rung(step: Step, problem: Problem, device: Device, root: Path | None) -> Rung:
    problem = replace(problem, math=step.math)
    try:
        space, config, note = fitted_step(step, problem, device, root)
        found = explain(space, config, problem, device, title=step.name)
    except (ConfigError, SpaceError, UsageError) as error:
        return Rung(step, rejected=Rejected("constraint", str(error)))
    except (SimulationFault, UnsupportedPTX) as error:
        return Rung(step, rejected=Rejected("correctness", f"in the simulator: {error}"))
    return Rung(step, note, found)
