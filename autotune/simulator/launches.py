"""Executes all kernels of a multiplication's launch, one after the other, on named arrays and numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from autotune.simulator import MAX_SECONDS, MAX_STEPS, Report, run_ptx
from autotune.values.measurement import Argument, Launch
from autotune.values.problem import FLOAT_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray


def workspace_of(launch: Launch) -> dict[Argument, NDArray[np.float32]]:
    """Return a workspace for `run_launch`, NaN where anything may be; empty where a launch needs none."""
    if not launch.workspace_bytes:
        return {}
    workspace = np.zeros(launch.workspace_bytes // FLOAT_BYTES, np.float32)
    workspace[launch.zeroed_bytes // FLOAT_BYTES :] = np.nan
    return {"workspace": workspace}


def run_launch(
    ptx: str,
    launch: Launch,
    values: Mapping[Argument, NDArray[Any] | int | float | np.generic],
    *,
    checks: bool = True,
    counters: bool = False,
    max_steps: int = MAX_STEPS,
    max_seconds: float = MAX_SECONDS,
    c_unwritten: bool = False,
) -> Report:
    """Execute a launch on NumPy arrays, which it changes in place; see `run_ptx`.

    Args:
        ptx: With all kernels of the launch.
        launch: What is launched, and how.
        values: Of each argument that a kernel takes; of a pointer the array.
        checks: Look for races and the like.
        counters: Count instructions and memory traffic.
        max_steps: Limit of basic blocks of each kernel.
        max_seconds: Limit of CPU time of each kernel.
        c_unwritten: C counts as never written for the first kernel that takes it.

    Returns:
        The report of the last kernel that was executed: of the product, or of the first with a fault.

    Raises:
        UsageError: As for `run_ptx`.
        UnsupportedPTX: Likewise.
    """
    c = values.get("c")
    for each in launch.kernels:
        unwritten = [c] if c_unwritten and "c" in each.arguments and isinstance(c, np.ndarray) else []
        c_unwritten &= not unwritten
        report = run_ptx(
            ptx,
            each.entry,
            each.grid,
            each.block,
            [values[name] for name in each.arguments],
            shared_bytes=each.shared_bytes,
            checks=checks,
            counters=counters,
            max_steps=max_steps,
            max_seconds=max_seconds,
            unwritten=unwritten,
        )
        if report.faults:
            break
    return report
