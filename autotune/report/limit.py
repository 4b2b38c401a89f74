"""Which resource limits a kernel, what that means, and which change would relieve it."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.code.banks import BankReads
from autotune.families import estimate
from autotune.families.estimate import Estimate
from autotune.model import account
from autotune.space.space import Space
from autotune.values.device import Device
from autotune.values.problem import Problem

LOST_TO_WAVES = 0.25  # share of the SMs' time without work, above which that is what limits a kernel
LOST_TO_BANKS = 0.1  # share of the issue time waited for banks, above which they limit it

RELIEF = {  # bottleneck: (what it means, the change that would relieve it), where a family does not say
    "issue": (
        "instruction issue: FFMAs and what is issued beside them fill the schedulers",
        "a larger thread tile (TM, TN) or wider copies issue fewer other instructions per FFMA",
    ),
    "banks": (
        "register banks: FFMAs whose operands lie in one bank wait for {waited:.0%} of the issue time",
        "another ffma_order or thread tile (TM, TN) changes which registers meet; with read_k = 4 an "
        "operand's floats of one k lie in one bank, which transpose_a and transpose_b = 1 avoid",
    ),
    "tensor": (
        "the tensor cores: each FP32 product is three of theirs",
        "nothing but fewer blocks in the last wave, or less issued beside them",
    ),
    "shared": (
        "shared memory: fragment reads and tile copies fill its pipe",
        "a larger or squarer thread tile (TM, TN) reads fewer floats per FFMA",
    ),
    "fetch": (
        "instruction fetch: the main loop does not fit the instruction cache",
        "a smaller BK, fewer stages, or unroll_stages = 0 shorten the loop",
    ),
    "stall": (
        "latency: the way to memory is longer than what the buffers cover",
        "more buffers (stages) cover more of it, more warps hide it",
    ),
    "l2": ("L2 bandwidth: tiles are loaded too often", "a larger block tile (BM, BN) loads less per output"),
    "dram": (
        "memory bandwidth: the operands move once and that takes the time",
        "nothing but fewer bytes: the kernel is at the roofline's slope",
    ),
    "fill": (
        "too few blocks ({blocks}): {idle} of the {sms} SMs have no work",
        "a smaller block tile, or cutting k into slices (split_k) where there are some, gives more blocks",
    ),
    "waves": (
        "wave quantisation: the {blocks} blocks keep the {sms} SMs busy for {busy:.0%} of the time",
        "a block tile that divides C into a multiple of the SMs' blocks",
    ),
    "global": (
        "global loads: every FFMA waits for operands that are not reused",
        "stage tiles in shared memory, or give each thread more outputs",
    ),
}


@dataclass(frozen=True)
class Limit:
    """What limits a kernel.

    Attributes:
        name: Key of `RELIEF`.
        because: What that means for kernels of this family.
        relief: The change that would relieve it.
    """

    name: str
    because: str
    relief: str


def wave_efficiency(blocks: int, device: Device) -> float:
    """Return the mean number of blocks of an SM over that of the busiest."""
    return blocks / (-(-blocks // device.sm_count) * device.sm_count)


def limit_of(
    space: Space,
    problem: Problem,
    device: Device,
    blocks: int,
    shared: int,
    modelled: Estimate | None,
    banks: BankReads | None = None,
) -> Limit:
    """Return what limits a kernel.

    Args:
        space: Its family.
        problem: What it computes.
        device: Where.
        blocks: Of its grid.
        shared: Bytes of shared memory of a block.
        modelled: Its estimate; None where no model knows the family.
        banks: Register reads of its main loop; None where they are not known, or limit no FFMA.
    """
    efficiency, sms = wave_efficiency(blocks, device), device.sm_count
    lost = 1 - efficiency > LOST_TO_WAVES
    if blocks < sms and lost:
        name = "fill"
    elif modelled is not None:
        name = "waves" if lost else modelled.bottleneck
    elif account.problem_intensity(problem) < account.ridge(device, problem.math):
        name = "dram"
    else:
        name = "shared" if shared else "global"
    waited = 0.0 if banks is None else banks.waited_share
    if name == "issue" and banks is not None and waited > LOST_TO_BANKS and banks.waited > banks.others:
        name = "banks"
    because, relief = {**RELIEF, **estimate.relief(space)}[name]
    because = because.format(blocks=blocks, sms=sms, idle=sms - blocks, busy=efficiency, waited=waited)
    return Limit(name, because, relief)
