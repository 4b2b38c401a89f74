"""`Problem`: a matrix multiplication or a batch of them, its layout and arithmetic, how much work it is."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from autotune.errors import ProblemError
from autotune.values.limits import Limit

Layout = Literal["nn", "nt", "tn", "tt"]
Math = Literal["ffma", "3xtf32", "3xfp16"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
MATHS: tuple[Math, ...] = get_args(Math)
ANY = "any"  # asks for the fastest of `MATHS`; no problem and no record has it
MAX_EXTENT = 2**31 - 1
MAX_STRIDE = 2**62
FLOAT_BYTES = 4
MAX_ALIGN = 4  # floats: no access is wider


@dataclass(frozen=True)
class Problem:
    """C[m, n] = alpha op(A)[m, k] op(B)[k, n] + beta C, float32, row-major, leading dimensions contiguous.

    alpha and beta are run-time scalars; only whether beta may be non-zero belongs to the problem. In a batch
    so many A, B and C of these shapes follow each other in memory.

    Attributes:
        m: Rows of C, 1 to 2^31 - 1.
        n: Columns of C, 1 to 2^31 - 1.
        k: Length of each dot product, 1 to 2^31 - 1.
        layout: "n" means stored as used, "t" stored transposed; first letter A, second B.
            "nn": A `[m, k]`, B `[k, n]`; "tn": A `[k, m]`; "nt": B `[n, k]`.
        beta: 0 never reads C (it may hold NaN); 1 reads C and accepts any beta.
        math: "ffma": FP32 fused multiply-adds on the CUDA cores; "3xtf32": three TF32 products for each of
            FP32 on the tensor cores, summed in FP32; "3xfp16": three FP16 products of scaled operands,
            likewise (docs/tensor-cores.md).
        batch: Products of these shapes, computed by one launch; 1 to 2^31 - 1.

    Raises:
        ProblemError: A value is out of range.
    """

    m: int
    n: int
    k: int
    layout: Layout = "nn"
    beta: int = 0
    math: Math = "ffma"
    batch: Annotated[int, Limit(omitted=True)] = 1

    def __post_init__(self) -> None:
        for name in ("m", "n", "k", "batch"):
            extent = _integer(name, getattr(self, name))
            object.__setattr__(self, name, extent)
            if not 1 <= extent <= MAX_EXTENT:
                raise ProblemError(f"{name} = {extent} is out of range: give 1 to {MAX_EXTENT} (2^31 - 1)")
        if self.layout not in LAYOUTS:
            raise ProblemError(f"layout {self.layout!r} is unknown: give one of {', '.join(LAYOUTS)}")
        object.__setattr__(self, "beta", _integer("beta", self.beta))
        if self.beta not in (0, 1):
            raise ProblemError(
                f"beta = {self.beta} is unknown: give 0 (C is never read) or 1 (C is read and scaled)"
            )
        if self.math == ANY:
            raise ProblemError(f"math {ANY!r} is no single problem: give one of {', '.join(MATHS)}")
        if self.math not in MATHS:
            raise ProblemError(f"math {self.math!r} is unknown: give one of {', '.join(MATHS)}")

    @property
    def a_shape(self) -> tuple[int, int]:
        """Shape of one A as stored."""
        return (self.m, self.k) if self.layout[0] == "n" else (self.k, self.m)

    @property
    def b_shape(self) -> tuple[int, int]:
        """Shape of one B as stored."""
        return (self.k, self.n) if self.layout[1] == "n" else (self.n, self.k)

    @property
    def c_shape(self) -> tuple[int, int]:
        """Shape of one C."""
        return (self.m, self.n)

    @property
    def arrays(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Shapes of A, B and C as arrays: those of one product, behind the extent of a batch of several."""
        several = () if self.batch == 1 else (self.batch,)
        return ((*several, *self.a_shape), (*several, *self.b_shape), (*several, *self.c_shape))

    @property
    def lda(self) -> int:
        """Leading dimension of A in elements."""
        return self.a_shape[1]

    @property
    def ldb(self) -> int:
        """Leading dimension of B in elements."""
        return self.b_shape[1]

    @property
    def ldc(self) -> int:
        """Leading dimension of C in elements."""
        return self.n

    @property
    def stride_a(self) -> int:
        """Elements from the A of one product to that of the next."""
        return self.m * self.k

    @property
    def stride_b(self) -> int:
        """The same of B."""
        return self.k * self.n

    @property
    def stride_c(self) -> int:
        """The same of C."""
        return self.m * self.n

    @property
    def align_a(self) -> int:
        """Floats that the address of A is a multiple of, at least: 1, 2 or 4."""
        return MAX_ALIGN

    @property
    def align_b(self) -> int:
        """The same of B."""
        return MAX_ALIGN

    @property
    def align_c(self) -> int:
        """The same of C."""
        return MAX_ALIGN

    @property
    def prepared(self) -> int:
        """1 where B comes as `autotune.Kernel.prepare` returns it."""
        return 0

    @property
    def flops(self) -> int:
        """Floating-point operations, 2 m n k a product: one multiplication and one addition per term."""
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def operand_bytes(self) -> int:
        """Bytes of A, B and C together, of all products."""
        return FLOAT_BYTES * self.batch * (self.m * self.k + self.k * self.n + self.m * self.n)

    @property
    def c_bytes(self) -> int:
        """Bytes of C, of all products."""
        return FLOAT_BYTES * self.batch * self.m * self.n

    @property
    def key(self) -> str:
        """The problem as part of a file name, such as ``f32_nn_m4096_n4096_k4096_beta0_ffma``."""
        batch = "" if self.batch == 1 else f"_batch{self.batch}"
        return f"f32_{self.layout}_m{self.m}_n{self.n}_k{self.k}{batch}_beta{self.beta}_{self.math}"

    def __str__(self) -> str:
        words = (self.layout, "beta" if self.beta else "", "" if self.math == "ffma" else self.math)
        return f"{self.extents} {' '.join(filter(None, words))}"

    @property
    def extents(self) -> str:
        """The sizes in words, such as "64 x 64 x 64", or "8 x (64 x 64 x 64)" of a batch."""
        sizes = f"{self.m} x {self.n} x {self.k}"
        return sizes if self.batch == 1 else f"{self.batch} x ({sizes})"

    def cli_flags(self) -> str:
        """Return the flags that name this problem on the command line."""
        flags = f"--m {self.m} --n {self.n} --k {self.k}"
        if self.batch != 1:
            flags += f" --batch {self.batch}"
        if self.layout != "nn":
            flags += f" --layout {self.layout}"
        if self.beta:
            flags += " --beta 1"
        if self.math != "ffma":
            flags += f" --math {self.math}"
        return flags


@dataclass(frozen=True)
class Strided(Problem):
    """A problem on operands that lie otherwise: longer rows, other batches, less alignment; never recorded.

    Attributes:
        lda: Elements from one stored row of A to the next; no fewer than a row has. None: as many.
        ldb: The same of B.
        ldc: The same of C.
        stride_a: Elements from the A of one product to that of the next; 0: all have the same. None: as many
            as its rows take.
        stride_b: The same of B.
        stride_c: The same of C, not 0. The C of two products share no element: they follow each other, or the
            rows of all lie side by side.
        align_a: Floats that the address of A is a multiple of, of each product: 1, 2 or 4.
        align_b: The same of B.
        align_c: The same of C.

    Raises:
        ProblemError: A value is out of range.
    """

    lda: int | None = None  # type: ignore[assignment]  # filled in below
    ldb: int | None = None  # type: ignore[assignment]
    ldc: int | None = None  # type: ignore[assignment]
    stride_a: int | None = None  # type: ignore[assignment]
    stride_b: int | None = None  # type: ignore[assignment]
    stride_c: int | None = None  # type: ignore[assignment]
    align_a: int = MAX_ALIGN
    align_b: int = MAX_ALIGN
    align_c: int = MAX_ALIGN
    prepared: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, row in (("lda", self.a_shape[1]), ("ldb", self.b_shape[1]), ("ldc", self.n)):
            stride = self._given(name, row)
            if not row <= stride <= MAX_EXTENT:
                raise ProblemError(
                    f"{name} = {stride} is out of range: a row has {row} floats; give {row} to {MAX_EXTENT}"
                )
        for name, rows, lead in (
            ("stride_a", self.a_shape[0], "lda"),
            ("stride_b", self.b_shape[0], "ldb"),
            ("stride_c", self.m, "ldc"),
        ):
            stride = self._given(name, rows * getattr(self, lead))
            if not 0 <= stride <= MAX_STRIDE:
                raise ProblemError(f"{name} = {stride} is out of range: give 0 to {MAX_STRIDE} (2^62)")
        if not apart(self.m, self.n, self.batch, self.ldc, self.stride_c):  # type: ignore[arg-type]
            raise ProblemError(
                f"stride_c = {self.stride_c} with ldc = {self.ldc} lets the C of two products overlap: "
                f"give {(self.m - 1) * int(self.ldc or 0) + self.n} or more"
            )
        for name in ("align_a", "align_b", "align_c"):
            align = _integer(name, getattr(self, name))
            object.__setattr__(self, name, align)
            if align not in (1, 2, 4):
                raise ProblemError(f"{name} = {align} is no alignment: give 1, 2 or 4 floats")

    def __str__(self) -> str:
        strides = f"lda {self.lda}, ldb {self.ldb}, ldc {self.ldc}"
        if self.batch > 1:
            strides += f", products {self.stride_a}, {self.stride_b}, {self.stride_c} apart"
        aligned = f"{self.align_a}, {self.align_b}, {self.align_c}"
        return f"{super().__str__()} ({strides}, aligned to {aligned} floats)"

    def _given(self, name: str, default: int) -> int:
        """Fill in a field that was left out; return its value."""
        given = getattr(self, name)
        value = default if given is None else _integer(name, given)
        object.__setattr__(self, name, value)
        return value


def apart(rows: int, columns: int, batch: int, lead: int, stride: int) -> bool:
    """Return whether matrices of a batch share no element: they follow each other, or lie side by side."""
    follow = stride >= (rows - 1) * lead + columns
    side_by_side = stride >= columns and lead >= (batch - 1) * stride + columns
    return batch == 1 or follow or side_by_side


def asked_maths(asked: str) -> tuple[Math, ...]:
    """Return the maths that a word stands for: itself, or all for "any".

    Raises:
        ProblemError: It is none.
    """
    found = MATHS if asked == ANY else tuple(math for math in MATHS if math == asked)
    if not found:
        raise ProblemError(f"math {asked!r} is unknown: give one of {', '.join(MATHS)}, {ANY}")
    return found


def _integer(name: str, value: object) -> int:
    """Accept what is an integer, NumPy's too, but no truth value and no float."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)  # type: ignore[arg-type]  # refused by index itself
        except TypeError:
            pass
    raise ProblemError(f"{name} must be an integer, not {value!r}")
