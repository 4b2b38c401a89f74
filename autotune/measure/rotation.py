"""Copies of the operands that launches take turns with, so that none finds its own in the L2 cache."""

from __future__ import annotations

import math
from typing import Any

from autotune.measure.cuda import Gpu
from autotune.measure.places import PERIOD, Operands, offsets
from autotune.values.problem import FLOAT_BYTES, Problem

COLD_L2_FACTOR = 3  # operands that the launches rotate through, in sizes of the L2 cache


class Rotation:
    """The operands and copies of them that together exceed `COLD_L2_FACTOR` times the L2 cache.

    Args:
        gpu: Where they are.
        problem: What they are operands of.
        operands: A, B and C.
        l2_bytes: Size of the L2 cache.

    Attributes:
        operands: Those given, then the copies: one at least.

    Raises:
        CUDA_ERRORS: The GPU lacks memory.
    """

    def __init__(self, gpu: Gpu, problem: Problem, operands: Operands, l2_bytes: int) -> None:
        self._memory: list[Any] = []
        self.operands = [operands]
        sizes = [FLOAT_BYTES * math.prod(shape) for shape in problem.arrays]
        while len(self.operands) < 2 or len(self.operands) * sum(sizes) <= COLD_L2_FACTOR * l2_bytes:
            memory = [gpu.allocate(size + PERIOD) for size in sizes]
            a, b, c = (
                each.ptr + offset for each, offset in zip(memory, offsets(len(self.operands)), strict=True)
            )
            for target, source, size in zip((a, b, c), operands, sizes, strict=True):
                gpu.copy(target, source, size)
            self._memory.append(memory)
            self.operands.append((a, b, c))
        gpu.synchronize()
