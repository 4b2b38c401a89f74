"""`Operand`, an array where it lies in memory, and the checks of what a kernel can take."""

from __future__ import annotations

import math
import numbers
from typing import Any, NamedTuple

from autotune.errors import UsageError
from autotune.values.problem import FLOAT_BYTES, MAX_EXTENT, Problem, Strided


class Idiom(NamedTuple):
    """How the user of an array library writes what a message advises; ``{}`` is the name of the array.

    Attributes:
        copy: A copy that is stored by rows.
        moved: A copy at an address of its own.
        float32: A copy in float32.
        assign: Writes an array ``c`` into the array.
    """

    copy: str = "{}.copy()"
    moved: str = "{}.copy()"
    float32: str = "{}.astype('float32')"
    assign: str = "{}[...] = c"

    def instead(self, name: str, made: str) -> str:
        """Return what to pass instead of an array: one made of it.

        A product that goes into a copy of ``out`` must be written back, or ``out`` stays as it was.
        """
        if name == "out":
            return f"pass c = {made.format(name)} as out, then {self.assign.format(name)}"
        return f"pass {made.format(name)}"


class Operand(NamedTuple):
    """An array of float32 where it lies.

    Attributes:
        address: Of the first element.
        shape: Extents.
        strides: Elements from one element to the next along each extent.
        ordinal: CUDA ordinal of its GPU; None in host memory.
        writable: Whether it may be written to.
        idiom: For messages.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    ordinal: int | None
    writable: bool = True
    idiom: Idiom = Idiom()

    @property
    def turned(self) -> Operand:
        """The transposed operand on the same memory."""
        return self._replace(shape=self.shape[::-1], strides=self.strides[::-1])

    @property
    def alignment(self) -> int:
        """Floats that its address is a multiple of: 4, 2 or 1."""
        return 4 if self.address % 16 == 0 else 2 if self.address % 8 == 0 else 1


def require_matrix(name: str, operand: Operand) -> None:
    """Refuse what is not a matrix.

    Raises:
        UsageError: It does not have two dimensions.
    """
    if len(operand.shape) != 2:
        raise UsageError(
            f"{name} has {len(operand.shape)} dimensions, shape {operand.shape}: pass a matrix, "
            f"such as {name}.reshape(...)"
        )


def as_stored(name: str, operand: Operand, transposed: bool) -> tuple[str, Operand]:
    """Return how the memory of a factor is laid out.

    Args:
        name: For messages.
        operand: As the user passed it.
        transposed: Whether it is transposed before it is multiplied.

    Returns:
        "n" and op(X) itself, or "t" and its transpose: the one of the two whose rows are contiguous.

    Raises:
        UsageError: It is not a matrix.
    """
    require_matrix(name, operand)
    factor = operand.turned if transposed else operand
    rows, columns = factor.shape
    along_rows, along_columns = factor.strides
    contiguous = columns == 1 or along_columns == 1
    if not contiguous and (rows == 1 or along_rows == 1):
        return "t", factor.turned
    return "n", factor


def leading(name: str, operand: Operand, shape: tuple[int, int], problem: Problem) -> int:
    """Return the elements from one row of an operand to the next.

    Raises:
        UsageError: The operand has another shape, an address that is no multiple of 4, or rows that are not
            contiguous, overlap or run backwards.
    """
    idiom = operand.idiom
    if operand.shape != shape:
        raise UsageError(f"{name} has shape {operand.shape}: this kernel takes {shape} ({problem})")
    if operand.address == 0:
        raise UsageError(f"{name} has no memory (a null pointer): it may have been freed")
    if operand.address % FLOAT_BYTES:
        remedy = idiom.instead(name, idiom.moved)
        raise UsageError(f"{name} starts at an address that is no multiple of 4 bytes: {remedy}")
    rows, columns = shape
    along_rows, along_columns = operand.strides
    remedy = idiom.instead(name, idiom.copy)
    if (rows > 1 and along_rows < 0) or (columns > 1 and along_columns < 0):
        raise UsageError(f"{name} has negative strides (a flipped view): {remedy}")
    if columns > 1 and along_columns != 1:
        if along_rows == 1 and along_columns >= rows:
            turned = "pass {0}.T to a kernel of the other layout (autotune.matmul does so by itself)"
            if name == "out":
                turned = "call autotune.matmul(b.T, a.T, out=out.T)"
            raise UsageError(f"{name} is stored by columns, not by rows: {turned.format(name)}, or {remedy}")
        raise UsageError(
            f"{name} has elements {along_columns} apart within a row, which must be contiguous: {remedy}"
        )
    if rows == 1:
        return columns
    if along_rows < columns:
        raise UsageError(
            f"{name} has rows of {columns} elements only {along_rows} apart (a broadcast or overlapping "
            f"view): {'pass an array whose rows lie apart' if name == 'out' else remedy}"
        )
    if along_rows > MAX_EXTENT:
        raise UsageError(f"{name} has rows {along_rows} elements apart: at most {MAX_EXTENT} (2^31 - 1) work")
    return along_rows


def writable(out: Operand) -> None:
    """Raise `UsageError` where an array must not be written to."""
    if not out.writable:
        raise UsageError("out is read-only: pass an array that may be written to")


def strided(problem: Problem, a: Operand, b: Operand, out: Operand) -> Problem:
    """Return the problem on these very operands: the problem itself if they are tight and well aligned.

    Raises:
        UsageError: As for `leading`, or ``out`` is read-only or overlaps a factor.
    """
    leads = (
        leading("a", a, problem.a_shape, problem),
        leading("b", b, problem.b_shape, problem),
        leading("out", out, problem.c_shape, problem),
    )
    writable(out)
    for name, operand, lead in (("a", a, leads[0]), ("b", b, leads[1])):
        if _overlap(operand, lead, out, leads[2]):
            raise UsageError(f"out overlaps {name} in memory: pass an array of its own")
    tight = (problem.lda, problem.ldb, problem.ldc)
    aligned = (a.alignment, b.alignment, out.alignment)
    if leads == tight and aligned == (4, 4, 4):
        return problem
    return Strided(
        *(problem.m, problem.n, problem.k, problem.layout, problem.beta, problem.math), *leads, *aligned
    )


def scalar(name: str, value: Any) -> float:
    """Return alpha or beta as a float.

    Raises:
        UsageError: It is not one real number on the host, or float32 has none so large.
    """
    if type(value) is float and -3e38 < value < 3e38:
        return value
    if isinstance(
        value, numbers.Real
    ):  # NumPy's scalars too, but no array: reading that would wait for the GPU
        try:
            number = float(value)
        except OverflowError:  # an integer or fraction; it may have too many digits to be shown
            raise UsageError(
                f"{name} is {kind_of(value)} beyond the range of float32: pass at most 3.4e38"
            ) from None
        if math.isfinite(number) and abs(number) > 3.4028235677973366e38:  # rounds to infinity as float32
            raise UsageError(f"{name} = {number!r} is beyond the range of float32: pass at most 3.4e38")
        return number
    raise UsageError(f"{name} is {kind_of(value)}: pass a real number, such as 1.0")


def stream_pointer(stream: Any) -> int:
    """Return the handle of a stream: an integer, or an object of CuPy, PyTorch, Numba or cuda.core.

    Raises:
        UsageError: It is none of them.
    """
    if isinstance(stream, int) and not isinstance(stream, bool) and stream >= 0:
        return stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        return int((protocol() if callable(protocol) else protocol)[1])
    for name in ("ptr", "cuda_stream", "handle"):
        handle = getattr(stream, name, None)
        handle = getattr(handle, "value", handle)  # Numba's is a ctypes pointer, whose null is None
        if isinstance(handle, int):
            return handle
        if name == "handle" and hasattr(stream, name):
            return 0
    raise UsageError(
        f"stream is {kind_of(stream)}: pass a stream of CuPy, PyTorch or Numba, or its handle as an int"
    )


def _overlap(factor: Operand, factor_lead: int, out: Operand, out_lead: int) -> bool:
    """Return whether two matrices may share an element; with equal rows they may lie side by side."""
    if factor.address >= out.address + _span(out, out_lead) or out.address >= factor.address + _span(
        factor, factor_lead
    ):
        return False
    if factor_lead != out_lead:
        return True
    between = (factor.address - out.address) // FLOAT_BYTES % out_lead
    return between < out.shape[1] or between + factor.shape[1] > out_lead


def _span(operand: Operand, lead: int) -> int:
    """Bytes from the first element to behind the last."""
    rows, columns = operand.shape
    return FLOAT_BYTES * ((rows - 1) * lead + columns)


def kind_of(value: Any) -> str:
    """Return the type of a value in words, such as "a torch.Tensor"."""
    kind = type(value)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
