"""Addresses that the operands are moved to between samples, because a time may depend on where they lie.

On an H200 the lowest 14 bits of the address of A change the time of cuBLAS: 4 % less at 1024 cubed, 4 % more
at 2048 cubed, with A 4 to 8 KiB behind such a boundary. Kernels of this package differ by less than 1 %.
"""

from __future__ import annotations

import math

from autotune.measure.cuda import Gpu
from autotune.values.problem import FLOAT_BYTES, Problem

PLACES = 5
BOUNDARY = 1 << 21  # a page of the GPU
PERIOD = 1 << 14  # bytes after which a further offset changes nothing
STEP = 512  # to multiples of which PyTorch and CuPy align
STRIDES = (7, 13, 19)  # of A, B and C in steps from place to place: offsets spread over the period


Operands = tuple[int, int, int]
"""Addresses of A, B and C."""


def offsets(place: int) -> list[int]:
    """Return how far behind a boundary A, B and C begin, bytes."""
    return [STEP * (stride * place % (PERIOD // STEP)) for stride in STRIDES]


class Places:
    """A copy of the operands of a problem that moves among `PLACES` places, the first at boundaries.

    Args:
        gpu: Where it is.
        problem: What they are operands of.
        operands: Addresses of A, B and C, which are copied.

    Raises:
        CUDA_ERRORS: The GPU lacks memory.
    """

    def __init__(self, gpu: Gpu, problem: Problem, operands: Operands) -> None:
        self._gpu = gpu
        self._operands = operands
        self._sizes = [FLOAT_BYTES * math.prod(shape) for shape in problem.arrays]
        self._memory = [gpu.allocate(size + BOUNDARY + PERIOD) for size in self._sizes]

    def moved(self, place: int) -> Operands:
        """Enqueue copying the operands to a place; return their addresses."""
        a, b, c = (
            -(-memory.ptr // BOUNDARY) * BOUNDARY + offset
            for memory, offset in zip(self._memory, offsets(place), strict=True)
        )
        for target, source, size in zip((a, b, c), self._operands, self._sizes, strict=True):
            self._gpu.copy(target, source, size)
        return a, b, c
