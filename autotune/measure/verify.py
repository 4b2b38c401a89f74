"""The rules by which C is right or wrong against its float64 reference, and their derivation.

Notation: u = 2^-24, the unit roundoff of float32; E = C - reference. C passes when all of these hold:

1. ``||E||_F <= f u sqrt(k) max(||reference||_F, ||limit||_F / sqrt(k + 1))`` over the compared elements,
   where ``limit = |alpha| |A||B| + |beta| |C0|``, and f = 4 for fused multiply-adds;
2. ``|E[i, j]| <= f u sqrt(k) limit[i, j]`` for every compared element;
3. for a random x, ``|(E x)[i]|`` stays below `projection_limit` in every row i, which covers all of C for one
   more read of it, and sees small errors that all elements share.

Rounding errors of a dot product behave as a random walk, hence sqrt(k) (Higham and Mary, SIAM J. Sci. Comput.
41(5), 2019). Summing in sequence gives about ``||E|| = 0.3 u sqrt(k) ||reference||`` for N(0,1) operands, a
thirteenth of rule 1. At k = 1 the factor 4 covers the four roundings of alpha * (a * b) + beta * c0. Inputs
rounded to TF32 give 3e-4 (the limit is 1.5e-5 at k = 4096), a skipped k index gives 1 / sqrt(k). No
comparison is true for NaN, so it never passes.

The second norm of rule 1 is for a C of few elements, whose terms may cancel to almost nothing while their
rounding errors do not. An element is a sum of k + 1 terms, whose magnitudes add up to its limit. Over random
signs its root mean square is the 2-norm of the terms: by Cauchy-Schwarz no less than limit / sqrt(k + 1), and
for N(0,1) operands 1.1 to 1.6 times that. So the second norm counts only where ``||reference||_F`` lies that
far below what is to be expected: in few draws at one element, in none at some dozens.

For "3xtf32" f = 4 + 14 / sqrt(k): there a product itself has an error of up to 14 u, which adds to that of
its sum. Let x = hi + lo, hi of 11 bits. Where hi is rounded, |lo| <= 2^-11 |x|, of which the tensor cores cut
off at most 2 u |x|; where hi is cut off, which happens to one operand at most, |lo| <= 2^-10 |x|, rounded by
at most 4 u |x|. The product of the low parts is left out: 8 u.

"3xfp16" has the same f. There x is scaled by a power of two and split into hi and lo of 11 bits, rounded:
2 u for each factor, 4 u for the product of the low parts, and 1 u for what FP16's range cannot hold, beyond
which 3xTF32 computes the product.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.values.measurement import Verdict
from autotune.values.problem import Math, Problem

UNIT_ROUNDOFF = 2.0**-24
BOUND_FACTOR = 4.0
PRODUCT_ERROR: dict[Math, float] = {
    "ffma": 0.0,
    "3xtf32": 14.0,
    "3xfp16": 14.0,
}  # of one product, in u, beyond its rounding
SCALAR_STEPS = 16  # alpha and beta are odd multiples of 1/16: exact in float32, never 0 or 1


@dataclass(frozen=True)
class Deviation:
    """A set of elements of C against their reference.

    Attributes:
        error_squares: Sum of (C - reference)^2.
        reference_squares: Sum of reference^2.
        limit_squares: Sum of (|alpha| |A||B| + |beta| |C0|)^2.
        worst: Largest |C - reference| / (|alpha| |A||B| + |beta| |C0|); infinite for NaN.
        row: Where the worst element lies.
        col: Where the worst element lies.
        value: The worst element of C.
    """

    error_squares: float
    reference_squares: float
    limit_squares: float
    worst: float
    row: int
    col: int
    value: float
    product: int | None = None

    @property
    def place(self) -> str:
        """The element, such as C[3, 5]; in a batch behind the number of the product."""
        return f"C[{'' if self.product is None else f'{self.product}, '}{self.row}, {self.col}]"


@dataclass(frozen=True)
class Projection:
    """C x against its reference, over all rows.

    Attributes:
        worst: Largest |(E x)[i]| / `projection_limit`; infinite for NaN.
        row: The row where it is.
        product: Whose row; None where there is only one.
    """

    worst: float
    row: int
    product: int | None = None

    @property
    def place(self) -> str:
        """The row, such as "row 3 of C"."""
        return f"row {self.row} of C{'' if self.product is None else f'[{self.product}]'}"


def bound_factor(k: int, arithmetic: Math = "ffma") -> float:
    """Return f of the rules for dot products of length k."""
    return BOUND_FACTOR + PRODUCT_ERROR[arithmetic] / math.sqrt(k)


def error_bound(k: int, arithmetic: Math = "ffma") -> float:
    """Return f u sqrt(k), the bound of rules 1 and 2 for dot products of length k."""
    return bound_factor(k, arithmetic) * UNIT_ROUNDOFF * math.sqrt(k)


def draw_scalars(problem: Problem, random: np.random.Generator) -> tuple[float, float]:
    """Draw alpha and beta to check with, beta 0 where C is not read.

    Both are exact in float32, 9/16 to 23/16 in magnitude, and no number that a kernel might assume.
    """
    odd = 2 * random.integers(4, 12, 2) + 1
    alpha, beta = random.choice((-1.0, 1.0), 2) * odd / SCALAR_STEPS
    return float(alpha), float(beta) if problem.beta else 0.0


def projection_vector(n: int, seed: int) -> NDArray[np.float64]:
    """Draw x, `[n]` float64: random signs times 0.75 to 1.25, so that no element of C is overlooked."""
    random = np.random.default_rng(seed)
    return random.choice((-1.0, 1.0), n) * random.uniform(0.75, 1.25, n)


def projection_limit(
    alpha: float,
    a_norms: NDArray[np.float64],
    b_norm: NDArray[np.float64] | float,
    beta: float,
    c0_norms: NDArray[np.float64] | float,
    factor: float = BOUND_FACTOR,
) -> NDArray[np.float64]:
    """Return the largest |(E x)[i]| that rule 3 allows.

    The limit is ``f u (|alpha| ||A_i||_2 ||B diag(x)||_F + |beta| ||C0_i x||_2)``, for N(0,1) operands
    about f u |alpha| k ||x||. One rounding has a standard deviation of 0.42 u times its value, so summing in
    sequence gives (E x)[i] one of 0.3 u |alpha| k ||x||: 13 times less than the limit. At k = 1 it is 6.7
    times less (two roundings), with C0 at least 5.5 times (four). One wrong element shows when it is off by
    more than the limit over 0.75: at m = n = k = 4096 and alpha = 0.75 by 0.07, where elements are about 48.

    Args:
        alpha: Scalar of the product.
        a_norms: `[m]`, 2-norms of the rows of op(A).
        b_norm: Frobenius norm of op(B) with its columns scaled by x; in a batch for each row.
        beta: Scalar of C0.
        c0_norms: `[m]`, 2-norms of the rows of C0 scaled by x; 0 when there is no C0.
        factor: f, see `bound_factor`.
    """
    limit = factor * UNIT_ROUNDOFF * (abs(alpha) * a_norms * b_norm + abs(beta) * c0_norms)
    return np.asarray(limit, np.float64)


def judge(
    k: int,
    deviations: Sequence[Deviation],
    projection: Projection | None,
    inputs: str,
    arithmetic: Math = "ffma",
) -> Verdict:
    """Apply the rules.

    Args:
        k: Length of the dot products.
        deviations: The compared sets of elements.
        projection: None where rule 3 is not applied: every element must be compared then.
        inputs: What was checked, for the verdict.
        arithmetic: The problem's math.
    """
    bound = error_bound(k, arithmetic)
    squares = sum(part.error_squares for part in deviations)
    norm_squares = max(
        sum(part.reference_squares for part in deviations),
        sum(part.limit_squares for part in deviations) / (k + 1),
    )
    error = math.sqrt(squares / norm_squares) if norm_squares else (math.inf if squares else 0.0)
    worst = max(deviations, key=lambda part: part.worst)
    where = worst.place
    if not worst.worst <= bound:
        why = (
            f"{where} is {worst.value}"
            if not math.isfinite(worst.value)
            else f"{where} = {worst.value:.7g} is off by {worst.worst:.2g} |A||B|, allowed {bound:.2g} |A||B|"
        )
    elif not error <= bound:
        why = "too inexact"
    elif projection is not None and not projection.worst <= 1:
        why = f"{projection.place} is wrong: its projection is off by {projection.worst:.3g} limits"
    else:
        return Verdict(True, error, bound, "", inputs)
    return Verdict(False, error, bound, f"{why}; relative error {error:.3g}, bound {bound:.3g}", inputs)


def verify_numpy(
    problem: Problem,
    a: NDArray[np.float32],
    b: NDArray[np.float32],
    c0: NDArray[np.float32] | None,
    c: NDArray[np.float32],
    alpha: float,
    beta: float,
    inputs: str = "given arrays, complete",
) -> Verdict:
    """Check all of C on the host.

    Args:
        problem: Sizes and layout.
        a: As stored, see `Problem.arrays`.
        b: As stored, likewise.
        c0: C before the call; None when beta is 0.
        c: C after the call.
        alpha: Scalar of the product.
        beta: Scalar of C0.
        inputs: What was checked, for the verdict.
    """
    op_a = np.asarray(a if problem.layout[0] == "n" else a.swapaxes(-1, -2), np.float64)
    op_b = np.asarray(b if problem.layout[1] == "n" else b.swapaxes(-1, -2), np.float64)
    reference = alpha * (op_a @ op_b)
    limit = abs(alpha) * (np.abs(op_a) @ np.abs(op_b))
    if c0 is not None and beta != 0:
        reference += beta * c0.astype(np.float64)
        limit += abs(beta) * np.abs(c0.astype(np.float64))
    return judge(problem.k, [_deviation(c, reference, limit)], None, inputs, problem.math)


def _deviation(c: NDArray[Any], reference: NDArray[np.float64], limit: NDArray[np.float64]) -> Deviation:
    """Compare arrays on the host as the kernel ``compare`` of verify.cu does on the GPU."""
    error = np.abs(c.astype(np.float64) - reference)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(error <= 0, 0.0, error / limit)
    ratio[np.isnan(ratio)] = np.inf
    place = np.unravel_index(int(ratio.argmax()), ratio.shape)
    *product, row, col = map(int, place)
    return Deviation(
        error_squares=float(np.square(error).sum()),
        reference_squares=float(np.square(reference).sum()),
        limit_squares=float(np.square(limit).sum()),
        worst=float(ratio[place]),
        row=row,
        col=col,
        value=float(c[place]),
        product=product[0] if product else None,
    )
