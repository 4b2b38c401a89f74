"""The kernels of verify.cu (random operands, float64 references, comparison), called on addresses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from autotune.code.compiler import Binary, compile_text
from autotune.errors import Rejected, ToolchainError
from autotune.values.problem import FLOAT_BYTES

THREADS = 256  # constants of verify.cu
WARPS = 8
TILE = 64
DEPTH = 16
COMPARED_WORDS = 4  # what `compare` writes, 64 bits each: packed worst ratio, three sums of squares

_BLOCKS_PER_SM = 8
_WARPS_PER_SM = 64
_MOST_LAYERS = 65535  # of a grid
_LEAST_SLICE = 256  # columns, or k indices, worth a block of their own
_ENTRIES = (
    "fill_normal",
    "reference",
    "project",
    "row_squares",
    "compare",
    "compare_projection",
    "checksum",
    "fill_guards",
    "count_changed",
)


class Matrix(NamedTuple):
    """A float32 matrix in device memory, or a batch of them ``step`` apart; strides in elements."""

    address: int
    rows: int
    cols: int
    row_stride: int
    col_stride: int
    batch: int = 1
    step: int = 0

    def at(self, number: int, row: int = 0) -> Matrix:
        """Return one matrix of the batch, from a row on."""
        elements = number * self.step + row * self.row_stride
        return self._replace(address=self.address + FLOAT_BYTES * elements, rows=self.rows - row, batch=1)


class Place(NamedTuple):
    """Elements of C at rows x cols: int32 lists and float64 `[row_count, col_count]` references."""

    rows: int
    row_count: int
    cols: int
    col_count: int
    expected: int
    limit: int


@dataclass(frozen=True)
class Worst:
    """The largest ratio of an error to its limit, and the index of that element."""

    ratio: float
    index: int

    @classmethod
    def unpack(cls, word: int) -> Worst:
        """Read what ``packed_ratio`` of verify.cu wrote."""
        return cls(float(np.array(word >> 32, np.uint32).view(np.float32)), word & 0xFFFFFFFF)


def split(extent: int, parts: int) -> tuple[int, int]:
    """Cut a sum of ``extent`` terms into at most ``parts`` slices worth a block each.

    Returns:
        (slices, terms of one slice, a multiple of `DEPTH`).
    """
    parts = max(1, min(parts, -(-extent // _LEAST_SLICE)))
    terms = -(-extent // parts)
    terms = -(-terms // DEPTH) * DEPTH
    return -(-extent // terms), terms


def compile_kernels(arch: str) -> Binary:
    """Compile verify.cu.

    Raises:
        ToolchainError: NVRTC is missing or cannot compile for this architecture.
    """
    binary = compile_text(Path(__file__).with_name("verify.cu").read_text(), "reference", arch)
    if isinstance(binary, Rejected):
        raise ToolchainError(f"verify.cu does not compile for {arch}: {binary.why}")
    return binary


class VerifyKernels:
    """Every method enqueues one kernel.

    Args:
        kernel: Returns ``launch(grid, block, *arguments)`` for the name of a kernel.
        sm_count: Streaming multiprocessors to fill.
    """

    def __init__(self, kernel: Callable[[str], Callable[..., None]], sm_count: int) -> None:
        self._launch = {name: kernel(name) for name in _ENTRIES}
        self._sm_count = sm_count

    def fill_normal(self, address: int, count: int, seed: int) -> None:
        """Fill float32 memory with N(0, 1)."""
        self._run(
            "fill_normal", self._blocks(count // 2 + 1), np.uint64(address), np.int64(count), np.uint64(seed)
        )

    def reference(self, a: Matrix, b: Matrix, c0: int, place: Place, alpha: float, beta: float) -> None:
        """Add alpha op(A) op(B) + beta C0 and its magnitude to the zeroed references of a place.

        Args:
            a: op(A), `[m, k]`.
            b: op(B), `[k, n]`.
            c0: `[m, n]` row-major; 0 when beta is 0.
            place: Where.
            alpha: Scalar.
            beta: Scalar.
        """
        tiles = -(-place.row_count // TILE) * -(-place.col_count // TILE)
        slices, terms = split(a.cols, -(-4 * self._sm_count // tiles))
        self._run(
            "reference",
            (tiles, slices),
            *(np.uint64(a.address), np.int64(a.row_stride), np.int64(a.col_stride)),
            *(np.uint64(b.address), np.int64(b.row_stride), np.int64(b.col_stride)),
            *(np.uint64(c0), np.int64(b.cols)),
            *(
                np.uint64(place.rows),
                np.int32(place.row_count),
                np.uint64(place.cols),
                np.int32(place.col_count),
            ),
            *(np.int32(a.cols), np.int32(terms), np.float64(alpha), np.float64(beta)),
            *(np.uint64(place.expected), np.uint64(place.limit)),
        )

    def project(self, matrix: Matrix, weights: int, sums: int, weights_step: int = 0) -> None:
        """Add matrix x weights to zeroed sums, `[batch, rows]` float64.

        Args:
            matrix: One, or a batch.
            weights: `[cols]` float64.
            sums: Where to add.
            weights_step: From the weights of one matrix to those of the next; 0: all have the same.
        """
        self._row_sums("project", matrix, weights, sums, weights_step)

    def row_squares(self, matrix: Matrix, weights: int, sums: int) -> None:
        """Add the squared norms of the rows of matrix x diag(weights) to zeroed sums; weights 0: ones."""
        self._row_sums("row_squares", matrix, weights, sums, 0)

    def compare(self, c: Matrix, place: Place, found: int) -> None:
        """Compare C at a place: `COMPARED_WORDS` zeroed words at ``found``."""
        self._run(
            "compare",
            self._blocks(place.row_count * place.col_count),
            *(np.uint64(c.address), np.int64(c.row_stride)),
            *(
                np.uint64(place.rows),
                np.int32(place.row_count),
                np.uint64(place.cols),
                np.int32(place.col_count),
            ),
            *(np.uint64(place.expected), np.uint64(place.limit), np.uint64(found), np.uint64(found + 8)),
        )

    def compare_projection(self, sums: int, expected: int, limit: int, count: int, found: int) -> None:
        """Compare two float64 vectors: one zeroed word at ``found``."""
        self._run(
            "compare_projection",
            self._blocks(count),
            *(np.uint64(sums), np.uint64(expected), np.uint64(limit), np.int64(count), np.uint64(found)),
        )

    def checksum(self, base: int, spans: int, count: int, found: int) -> None:
        """Sum up ``count`` spans of memory, one zeroed word each at ``found``."""
        self._run(
            "checksum",
            (_BLOCKS_PER_SM * self._sm_count, count),
            *(np.uint64(base), np.uint64(spans), np.uint64(found)),
        )

    def fill_guards(self, base: int, spans: int, count: int) -> None:
        """Fill ``count`` spans of memory with the guard pattern, which differs from word to word."""
        self._run("fill_guards", (self._sm_count, count), np.uint64(base), np.uint64(spans))

    def count_changed(self, base: int, spans: int, count: int, found: int) -> None:
        """Count the words of ``count`` spans that no longer hold the guard pattern, one zeroed word each."""
        self._run(
            "count_changed", (self._sm_count, count), np.uint64(base), np.uint64(spans), np.uint64(found)
        )

    def _row_sums(self, name: str, matrix: Matrix, weights: int, sums: int, weights_step: int) -> None:
        slices, _ = split(matrix.cols, -(-_WARPS_PER_SM * self._sm_count // (matrix.batch * matrix.rows)))
        extents = (matrix.rows, matrix.cols, matrix.row_stride, matrix.col_stride, matrix.step)
        for first in range(0, matrix.batch, _MOST_LAYERS):
            self._run(
                name,
                (-(-matrix.rows // WARPS), slices, min(_MOST_LAYERS, matrix.batch - first)),
                np.uint64(matrix.at(first).address),
                *(np.int64(number) for number in extents),
                *(np.uint64(weights and weights + 8 * first * weights_step), np.int64(weights_step)),
                np.uint64(sums + 8 * first * matrix.rows),
            )

    def _blocks(self, threads: int) -> tuple[int, ...]:
        return (max(1, min(-(-threads // THREADS), _BLOCKS_PER_SM * self._sm_count)),)

    def _run(self, name: str, grid: tuple[int, ...], *arguments: np.generic) -> None:
        self._launch[name](grid, (THREADS,), *arguments)
