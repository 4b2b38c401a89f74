"""The limits of one candidate: of compiling, of running, and of what its launch may ask of a GPU."""

from __future__ import annotations

import math

from autotune.code.compiler import Binary
from autotune.code.render import Source
from autotune.errors import Rejected
from autotune.values.device import Device
from autotune.values.problem import Problem

COMPILE_TIMEOUT_S = 30.0
TRIAL_TIMEOUT_S = 5.0  # beyond these launches of the slowest kernel worth waiting for
LAUNCHES = 20
SLOWEST_FLOPS = 2e11  # operations per second; a kernel below counts as one that never ends ...
SLOWEST_STEP_S = 1e-7  # ... and so does one that takes longer for each k, however few its outputs
MAX_GRID = (2**31 - 1, 65535, 65535)  # blocks in x, y, z
REGISTERS_UNIT = 8  # registers are allocated to threads in eights


def trial_limit(problem: Problem) -> float:
    """Return the seconds after which a candidate counts as one that never ends."""
    return TRIAL_TIMEOUT_S + LAUNCHES * (problem.flops / SLOWEST_FLOPS + problem.k * SLOWEST_STEP_S)


def unlaunchable(source: Source, binary: Binary, device: Device) -> Rejected | None:
    """Return why a compiled kernel cannot start on a device; None when it can."""
    for each in source.launch.kernels:
        threads, blocks = math.prod(each.block), math.prod(each.grid)
        if not (
            1 <= threads <= device.max_threads_per_block
            and all(1 <= extent <= most for extent, most in zip(each.grid, MAX_GRID, strict=True))
            and each.shared_bytes >= 0
        ):
            return Rejected(
                "constraint",
                f"a launch of {blocks} blocks of {threads} threads with {each.shared_bytes} bytes of dynamic "
                f"shared memory: give 1 to {MAX_GRID[0]} blocks in x, to {MAX_GRID[1]} in y and z, "
                f"of 1 to {device.max_threads_per_block} threads",
            )
    registers = -(-binary.registers // REGISTERS_UNIT) * REGISTERS_UNIT * threads
    if registers > device.registers_per_sm:
        return Rejected(
            "constraint",
            f"{threads} threads of {binary.registers} registers need {registers} registers; "
            f"an SM has {device.registers_per_sm}",
        )
    shared = source.launch.shared_bytes + binary.shared_bytes
    if shared > device.shared_per_block:
        return Rejected(
            "constraint",
            f"a block needs {shared} bytes of shared memory; {device.name} allows {device.shared_per_block}",
        )
    return None
