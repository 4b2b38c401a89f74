"""Executes all kernels of a multiplication's launch, one after the other, on named arrays and numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import numpy as np

from autotune.simulator import Report, run_ptx
from autotune.simulator.faults import Fault
from autotune.simulator.opcodes import is_control
from autotune.simulator.program import load_program
from autotune.values.measurement import Argument, Launch
from autotune.values.problem import FLOAT_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ACCESSES = ("ld", "ldu", "st", "atom", "red", "cp", "prefetch", "call")
_OWN = {"param", "shared", "local"}  # memory that no other kernel sees


class Options(TypedDict, total=False):
    """What `run_launch` passes on to `run_ptx`."""

    checks: bool
    counters: bool
    max_steps: int
    max_seconds: float


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
    c_unwritten: bool = False,
    **options: Unpack[Options],
) -> Report:
    """Execute a launch on NumPy arrays, which it changes in place; see `run_ptx`.

    Args:
        ptx: With all kernels of the launch.
        launch: What is launched, and how.
        values: Of each argument that a kernel takes; of a pointer the array.
        c_unwritten: C counts as never written for the first kernel that takes it.
        options: Of `run_ptx`; limits are those of each kernel.

    Returns:
        The report of the last kernel that was executed: of the product, or of the first with a fault.

    Raises:
        UsageError: As for `run_ptx`.
        UnsupportedPTX: Likewise.
    """
    c = values.get("c")
    for each in launch.kernels:
        if launch.waits and (fault := _early(ptx, each.entry)) is not None:
            return Report((fault,))
        unwritten = [c] if c_unwritten and "c" in each.arguments and isinstance(c, np.ndarray) else []
        c_unwritten &= not unwritten
        report = run_ptx(
            ptx,
            each.entry,
            each.grid,
            each.block,
            [values[name] for name in each.arguments],
            shared_bytes=each.shared_bytes,
            unwritten=unwritten,
            **options,
        )
        if report.faults:
            break
    return report


def _early(ptx: str, entry: str) -> Fault | None:
    """Return the fault of a kernel that branches or accesses memory before it waits for those before it."""
    for x in load_program(ptx, entry).kernel.instructions:
        if x.parts[:2] == ("griddepcontrol", "wait") and x.predicate is None:
            return None
        if is_control(x) or (x.parts[0] in _ACCESSES and ("global" in x.parts or _OWN.isdisjoint(x.parts))):
            break
    why = f"kernel {entry} may run beside those before it, and {x.opcode} stands before griddepcontrol.wait"
    return Fault("early-access", why, x.line or None, (0, 0, 0), (0, 0, 0))
