"""What the factors of `matmul` are: how each is stored, which batch they make, and which problem that is."""

from __future__ import annotations

from typing import NamedTuple

from autotune.errors import UsageError
from autotune.kernel.operands import Operand, as_stored, first_of, row_major
from autotune.values.problem import MAX_EXTENT


class Factors(NamedTuple):
    """Two factors, as a kernel takes them.

    Attributes:
        layout: How they are stored, see `autotune.Problem`.
        a: A, of one product or of a batch.
        b: B, likewise.
        m: Rows of C.
        n: Columns of C.
        k: Length of each dot product.
        batch: Products.
        shape: Of C as the user sees it.
    """

    layout: str
    a: Operand
    b: Operand
    m: int
    n: int
    k: int
    batch: int
    shape: tuple[int, ...]

    def of_c(self, c: Operand) -> Operand:
        """Return C, which has the user's shape, in the shape that the kernel takes.

        Raises:
            UsageError: It has another shape.
        """
        if len(self.shape) == 2 or self.batch == self.shape[0] > 1:
            return c  # the kernel looks at it
        if c.shape != self.shape:
            raise UsageError(f"out has shape {c.shape}: this product is {self.shape}")
        rows, stride = self.m // c.shape[0], c.strides[0]
        lead = stride if rows == 1 else c.strides[1]
        return c._replace(shape=(self.m, self.n), strides=(lead, c.strides[2]))

    def new_c(self, c: Operand) -> Operand:
        """Return a C that was just allocated in the shape that the kernel takes."""
        shape = (self.m, self.n) if self.batch == 1 else (self.batch, self.m, self.n)
        return c._replace(shape=shape, strides=row_major(shape))


def factors_of(a: Operand, b: Operand, out: Operand | None, transpose_a: bool, transpose_b: bool) -> Factors:
    """Return what two operands multiply to.

    Args:
        a: `[m, k]`, or `[batch, m, k]`.
        b: `[k, n]`, or `[batch, k, n]`; one matrix is multiplied by those of a batch.
        out: C, if it is given.
        transpose_a: Multiply by the transpose of each matrix of ``a``.
        transpose_b: Multiply by the transpose of each matrix of ``b``.

    Raises:
        UsageError: They have other dimensions, or do not fit each other.
    """
    batch_a, stride_a, first_a = first_of("a", a)
    batch_b, stride_b, first_b = first_of("b", b)
    layout_a, left = as_stored("a", first_a, transpose_a)
    layout_b, right = as_stored("b", first_b, transpose_b)
    m, k = left.shape if layout_a == "n" else left.shape[::-1]
    depth, n = right.shape if layout_b == "n" else right.shape[::-1]
    if k != depth:
        raise UsageError(
            f"a gives {m} x {k} and b gives {depth} x {n}: the inner extents must agree "
            f"(shapes {a.shape} and {b.shape}, transpose_a={transpose_a}, transpose_b={transpose_b})"
        )
    if batch_a != batch_b and 1 not in (batch_a, batch_b):
        raise UsageError(
            f"a is a batch of {batch_a} and b of {batch_b}: they must agree, or one be a single matrix "
            f"(shapes {a.shape} and {b.shape})"
        )
    batch = batch_b if batch_a == 1 else batch_a
    shape = (m, n) if len(a.shape) == len(b.shape) == 2 else (batch, m, n)
    rows = _as_rows(left, batch, stride_a) if batch > 1 and batch_b == 1 and layout_a == "n" else None
    evenly = out is None or (
        out.shape == shape and _as_rows(first_of("out", out)[2], batch, out.strides[0]) is not None
    )
    if rows is not None and evenly and batch * m <= MAX_EXTENT:
        left, m, batch = rows, batch * m, 1  # the rows of all A follow each other: they are one
    if batch > 1:
        left = _batched(left, batch_a, stride_a)
        right = _batched(right, batch_b, stride_b)
    return Factors(layout_a + layout_b, left, right, m, n, k, batch, shape)


def _as_rows(first: Operand, batch: int, stride: int) -> Operand | None:
    """Return the rows of a batch as those of one matrix; None where they do not lie evenly apart."""
    rows, columns = first.shape
    lead = stride if rows == 1 else first.strides[0]
    if stride != rows * lead or lead < columns:
        return None
    return first._replace(shape=(batch * rows, columns), strides=(lead, first.strides[1]))


def _batched(first: Operand, batch: int, stride: int) -> Operand:
    if batch == 1:
        return first
    return first._replace(shape=(batch, *first.shape), strides=(stride, *first.strides))
