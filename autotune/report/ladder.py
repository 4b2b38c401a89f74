"""The ladder from the naive kernel to the tuned one: each step counted anywhere, and timed on a GPU.

A step is one change (`autotune.report.steps`); a rung is what that change did for one problem on one device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotune.code.pool import default_workers
from autotune.errors import ConfigError, MachineError, MachineFault, Rejected, SpaceError, UsageError
from autotune.measure.worker import GpuWorker
from autotune.records import Store
from autotune.report.explain import Account, explain
from autotune.report.steps import Step, fitted_step, steps
from autotune.simulator import SimulationFault, UnsupportedPTX
from autotune.tuning.limits import trial_limit
from autotune.tuning.meter import Meter
from autotune.values.device import Device
from autotune.values.measurement import MeasuredTrial, Timing
from autotune.values.problem import Problem

NOISE = 0.03  # a difference in time below this share says nothing
WORSE = 1.05  # a count that grew by this factor is worth naming
FINALS_TIMEOUT_S = 30.0
ALONE_MS = 100.0  # a launch longer than this, and than `ALONE_FACTOR` times the fastest, takes no turns
ALONE_FACTOR = 3.0
_FFMA = "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum"

Teller = Callable[[str], None]


@dataclass(frozen=True)
class Rung:
    """The outcome of one step for a problem on a device.

    Attributes:
        step: The step.
        note: How the config differs from the step's own, or where it comes from; "" if that goes without
            saying.
        account: Its counts; None if it was rejected before they could be made.
        rejected: Why there is no time, or None.
        timing: None without a GPU.
        alone: Timed by itself, because it is far too slow to take turns with the others.
    """

    step: Step
    note: str = ""
    account: Account | None = None
    rejected: Rejected | None = None
    timing: Timing | None = None
    alone: bool = False

    @property
    def global_loads(self) -> float | None:
        """Floats loaded per output: for a block's tile with shared memory, else by each thread for itself."""
        return None if self.account is None else self.account.global_loads

    @property
    def shared_reads(self) -> float | None:
        """Floats read from shared memory per output; 0 for a kernel that has none."""
        return None if self.account is None else self.account.shared_reads or 0.0


@dataclass(frozen=True)
class Ladder:
    """The rungs of one problem on one device.

    Attributes:
        problem: What every step computes.
        device: Where.
        rungs: In the order of the steps.
        measured: Whether the steps ran.
        cublas: Time of cuBLAS in the same run; None where it is absent.
    """

    problem: Problem
    device: Device
    rungs: tuple[Rung, ...]
    measured: bool = False
    cublas: Timing | None = None

    def gflops(self, rung: Rung) -> float | None:
        """Rate of a rung, 2mnk over its time."""
        return None if rung.timing is None else self.problem.flops / rung.timing.median_ms / 1e6

    def vs_cublas(self, rung: Rung) -> float | None:
        """Time of cuBLAS over that of a rung."""
        if rung.timing is None or self.cublas is None:
            return None
        return self.cublas.median_ms / rung.timing.median_ms

    def speedup(self, rung: Rung) -> float | None:
        """Time of the last timed rung before over that of this one."""
        before = self._before(rung)
        if before is None or before.timing is None or rung.timing is None:
            return None
        return before.timing.median_ms / rung.timing.median_ms

    def slower(self, rung: Rung) -> str:
        """Return why a rung is slower than the one before it; "" if it is not."""
        before, gain = self._before(rung), self.speedup(rung)
        if before is None or before.account is None or rung.account is None or gain is None or gain >= 1:
            return ""
        if gain > 1 - NOISE:
            return f"as fast as {before.step.name}, within {NOISE:.0%}"
        return f"slower than {before.step.name}: {'; '.join(why_slower(before.account, rung.account))}"

    def plain(self) -> dict[str, Any]:
        """Return the ladder as plain values for JSON."""
        return {
            "problem": self.problem.key,
            "device": self.device.name,
            "evidence": "measured" if self.measured else "counted",
            "cublas_ms": None if self.cublas is None else self.cublas.median_ms,
            "steps": [self._plain(rung) for rung in self.rungs],
        }

    def _plain(self, rung: Rung) -> dict[str, Any]:
        found = rung.account
        return {
            "name": rung.step.name,
            "family": rung.step.family if found is None else found.source.family,
            "config": None if found is None else dict(found.source.config),
            "changed": rung.step.changed,
            "note": rung.note,
            "median_ms": None if rung.timing is None else rung.timing.median_ms,
            "timed_alone": rung.alone,
            "gflops": self.gflops(rung),
            "vs_cublas": self.vs_cublas(rung),
            "speedup": self.speedup(rung),
            "slower": self.slower(rung),
            "registers": None if found is None else found.binary.registers,
            "spill_bytes": None if found is None else found.binary.spill_bytes,
            "occupancy": None if found is None else found.occupancy.fraction,
            "global_loads_per_output": rung.global_loads,
            "shared_reads_per_output": rung.shared_reads,
            "per_ffma": None if found is None else per_ffma(found),
            "rejected": None if rung.rejected is None else vars(rung.rejected),
        }

    def _before(self, rung: Rung) -> Rung | None:
        timed = [each for each in self.rungs[: self.rungs.index(rung)] if each.timing is not None]
        return timed[-1] if timed else None


def describe(
    problem: Problem,
    device: Device,
    *,
    root: Path | str | None = None,
    tell: Teller = lambda line: None,
    meter: Meter | None = None,
) -> Ladder:
    """Compile every step for a device that need not be present, and count what it does; nothing is timed.

    Args:
        problem: What to compute.
        device: For which GPU.
        root: Folder of records; `autotune.paths.cache_dir` when not given.
        tell: Called with a line of progress.
        meter: Counts the steps.

    Raises:
        DeviceError: The device's clock or bandwidth is unknown.
        ToolchainError: NVRTC is missing or does not know the device.
    """
    chosen, store, meter = steps(problem.math), Store(root), meter or Meter()
    tell(f"compiling {len(chosen)} steps for {device.name} and counting what they do")
    with ThreadPoolExecutor(default_workers()) as pool:  # compilers and disassemblers run beside each other
        meter.begin("compiling and counting", len(chosen))
        rungs = []
        for rung in pool.map(lambda step: _rung(step, problem, device, store), chosen):
            rungs.append(rung)
            meter.step()
    return Ladder(problem, device, tuple(rungs))


def climb(
    problem: Problem,
    *,
    ordinal: int = 0,
    root: Path | str | None = None,
    tell: Teller = lambda line: None,
    meter: Meter | None = None,
) -> Ladder:
    """Verify every step on a GPU, then time those that are right in turns with cuBLAS, in one run.

    A step much slower than the others is timed by itself. One that fails is a rung that says why.

    Args:
        problem: What to compute.
        ordinal: CUDA ordinal of the GPU.
        root: Folder of records.
        tell: Told of every step.
        meter: Counts the steps.

    Raises:
        DeviceError: No usable GPU, or too little memory for the operands.
        ToolchainError: NVRTC or CuPy is missing or does not serve the GPU.
    """
    with GpuWorker(ordinal, problem) as gpu:
        device = gpu.ready().device
        counted = describe(problem, device, root=root, tell=tell, meter=meter)
        return measure(counted, gpu, tell, meter)


def measure(
    counted: Ladder, gpu: GpuWorker, tell: Teller = lambda line: None, meter: Meter | None = None
) -> Ladder:
    """Time the steps of a ladder: verify and time each by itself, then the fast ones in turns with cuBLAS.

    Args:
        counted: The ladder as `describe` returned it.
        gpu: The worker that runs the kernels.
        tell: Told of every step.
        meter: Counts the steps.

    Raises:
        MachineError: The worker was killed, or others took the GPU's memory, twice with one step.
    """
    limit, meter = trial_limit(counted.problem), meter or Meter()
    by_name = {rung.step.name: rung for rung in counted.rungs}
    runnable = {
        name: rung.account
        for name, rung in by_name.items()
        if rung.account is not None and rung.rejected is None
    }
    for name, found in runnable.items():
        gpu.submit(name, found.binary, found.source.launch, None, limit)
    medians: dict[str, float] = {}
    meter.begin("verifying and timing each alone", len(runnable))
    while gpu.pending:
        for name, outcome in gpu.collect(1.0):
            if isinstance(outcome, MachineFault):
                raise MachineError(
                    f"the machine failed twice with step {name}, which is not its fault: {outcome.why}"
                )
            by_name[name] = _with_outcome(by_name[name], outcome, alone=True)
            if isinstance(outcome, MeasuredTrial):
                ms = medians[name] = outcome.timing.median_ms
                rate = counted.problem.flops / ms / 1e9
                meter.better(rate, f"{rate:.2f} TFLOP/s, {name}")
                tell(f"{name}: right, {ms:.4g} ms")
            else:
                tell(f"{name}: {outcome.kind}, {outcome.why}")
            meter.step()

    turns = _taking_turns(medians)
    tell("checking every element, and timing in turns with cuBLAS")
    meter.begin("timing in turns with cuBLAS")
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


def _rung(step: Step, problem: Problem, device: Device, store: Store) -> Rung:
    problem = replace(problem, math=step.math)
    try:
        fit = fitted_step(step, problem, device, store)
        chosen = fit.space, fit.config, problem, device
        found = explain(*chosen, title=step.name, record=fit.record, depot=store.depot)
    except (ConfigError, SpaceError, UsageError) as error:
        return Rung(step, rejected=Rejected("constraint", str(error)))
    except (SimulationFault, UnsupportedPTX) as error:
        return Rung(step, rejected=Rejected("correctness", f"in the simulator: {error}"))
    return Rung(step, fit.note, found)


def per_ffma(found: Account) -> dict[str, float]:
    """Return what a kernel does for each FFMA of a warp, counted in the simulator on a miniature.

    Returns:
        "load_accesses": global loads plus wavefronts of shared reads; "load_sectors": 32-byte sectors that
        global loads and cp.async touch; "instructions": of the main loop's machine code, where it can be
        disassembled. Empty for a kernel on tensor cores.
    """
    if found.problem.math != "ffma":
        return {}
    ffmas = sum(metrics.get(_FFMA, 0) for metrics in found.lines.values()) / 32 or 1.0
    traffic = found.traffic
    loads = [traffic[name] for name in ("global ld", "global copy") if name in traffic]
    shared = traffic["shared ld"].units if "shared ld" in traffic else 0
    counts = {
        "load_accesses": (sum(each.requests for each in loads) + shared) / ffmas,
        "load_sectors": sum(each.units for each in loads) / ffmas,
    }
    if found.loop is not None and found.loop.share("FFMA"):
        counts["instructions"] = 1 / found.loop.share("FFMA")
    return counts


def why_slower(before: Account, now: Account) -> Sequence[str]:
    """Return what got worse from one kernel to the next, by their counts, the gravest first; never empty."""
    was, is_ = per_ffma(before), per_ffma(now)
    reasons = []
    if now.binary.spill_bytes > before.binary.spill_bytes:
        reasons.append(f"{now.binary.spill_bytes} bytes of registers spill to memory")
    if now.wave_efficiency * WORSE < before.wave_efficiency:
        blocks, sms = math.prod(now.source.launch.grid), now.device.sm_count
        reasons.append(
            f"{blocks} blocks keep {now.wave_efficiency:.0%} of the {sms} SMs busy, "
            f"{before.wave_efficiency:.0%} before"
        )
    for name, what in (
        ("load_sectors", "global loads touch {now:.2f} sectors per FFMA of a warp, {before:.2f} before"),
        (
            "load_accesses",
            "the load-store unit serves {now:.2f} accesses per FFMA of a warp, {before:.2f} before",
        ),
        ("instructions", "the main loop issues {now:.2f} instructions per FFMA, {before:.2f} before"),
    ):
        if name in was and name in is_ and is_[name] > WORSE * was[name]:
            reasons.append(what.format(now=is_[name], before=was[name]))
    if now.occupancy.fraction * WORSE < before.occupancy.fraction:
        reasons.append(
            f"occupancy fell from {before.occupancy.fraction:.0%} to {now.occupancy.fraction:.0%} "
            f"({' and '.join(now.occupancy.limited_by)}), so fewer warps hide latency"
        )
    if now.shared_reads is not None and before.shared_reads is None:
        reasons.append(
            "copies to shared memory and barriers come on top, where the cache already gave the reuse"
        )
    if not reasons:
        reasons.append("no count says why: profile it")
    return reasons
