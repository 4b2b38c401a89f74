"""The random rows and columns of C that are compared element by element with a candidate's result."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LINES = 48
MAX_ELEMENTS = 1 << 23  # of one sample: 128 MiB of references


@dataclass(frozen=True)
class Sample:
    """The elements of the C of one product at ``rows`` x ``cols``, each `[count]` int32, ascending."""

    rows: NDArray[np.int32]
    cols: NDArray[np.int32]
    product: int = 0

    @property
    def count(self) -> int:
        """Elements."""
        return len(self.rows) * len(self.cols)


def draw_samples(m: int, n: int, random: np.random.Generator, batch: int = 1) -> tuple[Sample, Sample]:
    """Draw some whole rows and some whole columns of C, the first and the last always among them.

    In a batch each of the two is of a product that is drawn.

    There are `LINES` of each, fewer where they would exceed `MAX_ELEMENTS`; a line that alone exceeds it is
    compared at evenly spaced places.
    """
    products = [int(random.integers(batch)) if batch > 1 else 0 for _ in range(2)]
    rows = Sample(_lines(m, n, random), _places(n), products[0])
    cols = Sample(_places(m), _lines(n, m, random), products[1])
    return rows, cols


def _lines(extent: int, length: int, random: np.random.Generator) -> NDArray[np.int32]:
    count = max(2, min(LINES, MAX_ELEMENTS // length))
    if extent <= count:
        return np.arange(extent, dtype=np.int32)
    inner = 1 + random.choice(extent - 2, count - 2, replace=False)
    return np.sort(np.concatenate(([0], inner, [extent - 1]))).astype(np.int32)


def _places(extent: int) -> NDArray[np.int32]:
    if extent <= MAX_ELEMENTS:
        return np.arange(extent, dtype=np.int32)
    return np.linspace(0, extent - 1, MAX_ELEMENTS).astype(np.int32)
