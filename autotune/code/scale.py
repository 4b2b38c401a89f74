"""The kernel that scales C and reads neither A nor B."""

from __future__ import annotations

from pathlib import Path

from autotune.code.render import Source
from autotune.values.measurement import KernelLaunch, Launch
from autotune.values.problem import Problem

THREADS = 256  # as in scale.cu
MOST_BLOCKS = 1056  # eight for each of 132 SMs


def scaling(problem: Problem) -> Source:
    """Return the kernel that computes C = beta C, on beta and C alone.

    Args:
        problem: Of its facts only those of C count.
    """
    facts = {name: getattr(problem, name) for name in ("batch", "m", "n", "ldc", "stride_c")}
    blocks = min(-(-problem.batch * problem.m * problem.n // THREADS), MOST_BLOCKS)
    launch = Launch((KernelLaunch("scale", (blocks, 1, 1), (THREADS, 1, 1), 0, ("beta", "c")),))
    return Source.of_file(Path(__file__).with_name("scale.cu"), facts, problem, launch)
