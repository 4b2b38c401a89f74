"""A CUDA simulator: executes PTX on NumPy arrays, reports faults, and counts instructions and memory traffic.

It executes the PTX that NVRTC generates (sm_75 to sm_121), not the SASS assembled from it: it models no
register allocation, no caches and no cycles. One basic block is one Python function over all lanes; at most
8192 threads, or 256 MiB of their registers and shared memory, run at once (but always one whole block).

Limits:
    - Named barriers of part of a block and mbarriers count as ordering all of it, and a fence of one thread
      as one of its block, so some races escape. Volatile and relaxed accesses count as atomic.
    - Lanes run in lock step, lowest basic block first. A loop that waits for another thread's store to
      memory never ends; waiting at barriers, mbarriers and warp-wide instructions works.
    - A thread that has ended counts as present at later barriers, as on the hardware since Volta.
    - FMA, +, -, *, / and sqrt round once, as IEEE 754 and PTX say. exp2, log2, sin, cos, tanh, rsqrt and
      approximate division are more exact than the hardware's; so are sums of the tensor cores (`warp`).
    - wgmma is supported for TF32 and FP16 (sums in FP32) with the 128-byte swizzle; a missing wgmma.fence is
      found only in part.
    - A launch may use 60 s of CPU time, and a group of threads may execute a million basic blocks; whatever
      takes longer ends with a fault, "time-limit" or "endless-loop". Both limits are arguments.
    - Launches that CUDA refuses are refused: threads, extents, and shared memory beyond what GPUs of the
      PTX's architecture have. Registers are not known, so a block that needs too many of them is not refused.
    - The blocks of a cluster (along x alone) run together. What a thread does between arriving at their
      barrier and waiting there counts as before it, unless a barrier of its block lies between. Of another
      block's mbarriers, those that st.async completes are supported.
    - Not supported: tensor maps (cp.async.bulk.tensor), bulk stores, copies to other blocks, textures,
      float16 FMA, recursion, calls through pointers. They are refused with their name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

from autotune.errors import UsageError
from autotune.simulator.arguments import (
    check_launch,
    has_variable,
    launch_extents,
    place_arguments,
    set_variables,
    whole,
)
from autotune.simulator.counters import Counters
from autotune.simulator.faults import Fault, FaultKind, SimulationFault, UnsupportedPTX
from autotune.simulator.machine import MAX_SECONDS, MAX_STEPS, Machine
from autotune.simulator.program import load_program

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "MAX_SECONDS",
    "MAX_STEPS",
    "Counters",
    "Fault",
    "FaultKind",
    "Report",
    "SimulationFault",
    "UnsupportedPTX",
    "run_ptx",
    "simulate",
]

Extent = int | Sequence[int]


@dataclass(frozen=True)
class Report:
    """The outcome of a simulated launch, besides the arrays it changed.

    Attributes:
        faults: Empty, or the fault that stopped the kernel.
        notes: What CUDA C++ leaves undefined though the hardware does what was simulated: warps of a block
            that wait at different ``__syncthreads``, threads or blocks that store equal values to one place,
            an atomicCAS that tests what was read plainly, a warp operation that names threads which ended.
        output: What ``printf`` printed, thread after thread; at most 1 MiB, as much as CUDA keeps.
        counters: None unless they were asked for.
    """

    faults: tuple[Fault, ...]
    notes: tuple[Fault, ...] = ()
    output: str = ""
    counters: Counters | None = None

    def raise_if_faulty(self) -> Report:
        """Return this report.

        Raises:
            SimulationFault: There is a fault.
        """
        if self.faults:
            raise SimulationFault(self.faults[0])
        return self


def run_ptx(
    ptx: str,
    entry: str,
    grid: Extent,
    block: Extent,
    args: Sequence[NDArray[Any] | int | float | np.generic],
    *,
    shared_bytes: int = 0,
    checks: bool = True,
    counters: bool = False,
    max_steps: int = MAX_STEPS,
    max_seconds: float = MAX_SECONDS,
    constants: Mapping[str, NDArray[Any]] | None = None,
    unwritten: Sequence[NDArray[Any]] = (),
) -> Report:
    """Execute one kernel of a PTX text on NumPy arrays, which it changes in place.

    Args:
        ptx: As NVRTC returns it; with line information, faults name CUDA source lines.
        entry: Kernel name.
        grid: Blocks in x, y, z; an integer is x, and what is left out is 1.
        block: Threads of a block in x, y, z, likewise.
        args: In the order of the kernel's parameters: a C-contiguous array for a pointer (only the bytes
            of that array are in bounds; a view keeps the alignment it has in its base), a number for a
            scalar, bytes or a NumPy structured scalar for a struct.
        shared_bytes: Dynamic shared memory of one block.
        checks: Look for races, uninitialised reads, unwaited async copies and blocks that write to one
            place. Accesses out of bounds, misaligned ones and divergent barriers are always found.
        counters: Count instructions and memory traffic.
        max_steps: Basic blocks that a group of threads may execute before the kernel counts as endless.
        max_seconds: CPU time, seconds, that the launch may take; ``math.inf`` for no limit.
        constants: Bytes of ``__constant__`` and ``__device__`` variables before the launch, by their names.
        unwritten: Those of the arrays in ``args`` that count as never written: with checks, a load from them
            before a store is a fault.

    Returns:
        The report; a fault ends the execution and leaves the arrays as they are then.

    Raises:
        UsageError: The arguments or the launch do not fit the kernel, CUDA or this machine's memory.
        UnsupportedPTX: The text is malformed, or holds something that the simulator does not support.
    """
    for name, text in (("ptx", ptx), ("entry", entry)):
        if not isinstance(text, str):
            raise UsageError(f"{name} is of type {type(text).__name__}: give a str")
    steps, seconds = whole("max_steps", max_steps, 1), _seconds(max_seconds)
    shape, threads = launch_extents(grid, block)
    try:
        program = load_program(ptx, entry)
        kernel = program.kernel
        total = check_launch(kernel, shape, threads, shared_bytes)
        memory, parameters = place_arguments(kernel, args, program.stored, unwritten)
        set_variables(kernel, memory, constants or {})
        machine = Machine(
            program, shape, threads, memory, parameters, total, checks, counters, steps, seconds
        )
        faults: tuple[Fault, ...] = ()
        try:
            machine.run()
        except SimulationFault as stop:
            faults = (stop.fault,)
    except MemoryError:
        raise UsageError(
            f"the simulation of kernel {entry} does not fit into this machine's memory: give smaller arrays, "
            "or checks=False"
        ) from None
    counted = machine.tally.counters() if machine.tally is not None else None
    return Report(faults, machine.notes.all(), machine.output, counted)


def _seconds(value: Any) -> float:
    seconds: float = value
    if not isinstance(value, Real) or not seconds > 0:
        raise UsageError(f"max_seconds = {value!r:.80} is not a positive number")
    return seconds


def simulate(
    source: str,
    grid: Extent,
    block: Extent,
    args: Sequence[NDArray[Any] | int | float | np.generic],
    *,
    arch: str = "sm_90",
    entry: str | None = None,
    options: Sequence[str] = (),
    shared_bytes: int = 0,
    checks: bool = True,
    counters: bool = True,
    max_steps: int = MAX_STEPS,
    max_seconds: float = MAX_SECONDS,
    constants: Mapping[str, NDArray[Any]] | None = None,
    unwritten: Sequence[NDArray[Any]] = (),
) -> Report:
    """Compile CUDA C++ and execute it on the CPU; see `run_ptx`. A text is compiled once in each process.

    A text may hold host code, which is left out, and include what it includes for nvcc.

    Args:
        source: CUDA C++ text.
        grid: Blocks in x, y, z; an integer is x, and what is left out is 1.
        block: Threads of a block in x, y, z, likewise.
        args: In the order of the kernel's parameters.
        arch: Architecture to compile for.
        entry: The kernel as C++ names it, such as "sgemm<64, 8>" for an instance of a template; None where
            the text has only one.
        options: Words for NVRTC, such as "-DN=64" or "-I/path". Headers found nowhere count as empty.
        shared_bytes: Dynamic shared memory of one block.
        checks: Look for races and the like.
        counters: Count instructions and memory traffic.
        max_steps: Limit of basic blocks, see `run_ptx`.
        max_seconds: Limit of CPU time of the launch, see `run_ptx`.
        constants: Arrays for ``__constant__`` and ``__device__`` variables, by their names, see `run_ptx`.
        unwritten: Arrays that count as never written, see `run_ptx`.

    Raises:
        UsageError: The text does not compile within 30 s, or has not exactly one kernel where no entry is
            named; or as for `run_ptx`.
        ToolchainError: NVRTC is missing or does not know the architecture.
    """
    from autotune.code.published import compiled

    launch_extents(grid, block)
    for name, text in (("source", source), ("arch", arch)):
        if not isinstance(text, str):
            raise UsageError(f"{name} is of type {type(text).__name__}: give a str")
    if not all(isinstance(option, str) for option in options) or isinstance(options, str):
        raise UsageError("options are words for NVRTC: give a list of str")
    ptx, name = compiled(source, entry, arch, tuple(options))
    unused = {each for each in constants or {} if not has_variable(ptx, each) and each in source}
    return run_ptx(
        ptx,
        name,
        grid,
        block,
        args,
        shared_bytes=shared_bytes,
        checks=checks,
        counters=counters,
        max_steps=max_steps,
        max_seconds=max_seconds,
        constants={each: value for each, value in (constants or {}).items() if each not in unused},
        unwritten=unwritten,
    )
