"""Turns what became of each step into a `Ladder`: rates, gains, and why a step is slower than the last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autotune.errors import Rejected
from autotune.report.explain import Account
from autotune.report.ladder.reasons import per_ffma, why_slower
from autotune.report.ladder.step import Step
from autotune.values.device import Device
from autotune.values.measurement import Timing
from autotune.values.problem import Problem

NOISE = 0.03  # a difference in time below this share says nothing


@dataclass(frozen=True)
class Rung:
    """What became of one step for a problem on a device.

    Attributes:
        step: The step.
        note: How the config differs from the step's own, or where it comes from; "" if that goes without
            saying.
        account: Its counts; None if it was rejected before they could be made.
        rejected: Why there is no time, or None.
        timing: None without a GPU.
        alone: Timed by itself, as it is far too slow to take turns with the others.
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
        """Say why a rung is slower than the one before it; "" if it is not."""
        before, gain = self._before(rung), self.speedup(rung)
        if before is None or before.account is None or rung.account is None or gain is None or gain >= 1:
            return ""
        if gain > 1 - NOISE:
            return f"as fast as {before.step.name}, within {NOISE:.0%}"
        return f"slower than {before.step.name}: {'; '.join(why_slower(before.account, rung.account))}"

    def plain(self) -> dict[str, Any]:
        """Give the ladder as plain values for JSON."""
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
