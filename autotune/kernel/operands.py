"""`Operand`, an array where it lies in memory, and the checks of what a kernel can take."""

from __future__ import annotations

import math
import numbers
from typing import Any, NamedTuple

from autotune.errors import UsageError
from autotune.values.problem import FLOAT_BYTES, MAX_EXTENT, Problem, Strided, apart


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

    def alignment(self, stride: int = 0) -> int:
        """Return the floats that its address, and all so many floats further, are multiples of: 4, 2 or 1."""
        places = self.address | FLOAT_BYTES * stride
        return 4 if places % 16 == 0 else 2 if places % 8 == 0 else 1


def first_of(name: str, operand: Operand) -> tuple[int, int, Operand]:
    """Return how many matrices an operand holds, the elements from one to the next, and the first of them.

    Raises:
        UsageError: It is neither a matrix nor a batch of them.
    """
    if len(operand.shape) == 3:
        extent, stride = operand.shape[0], operand.strides[0]
        return extent, stride, operand._replace(shape=operand.shape[1:], strides=operand.strides[1:])
    if len(operand.shape) != 2:
        raise UsageError(
            f"{name} has {len(operand.shape)} dimensions, shape {operand.shape}: pass a matrix, or a batch "
            f"of them with three, such as {name}.reshape(...)"
        )
    return 1, 0, operand


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of an array whose elements lie side by side, the last extent's first."""
    strides, inner = [], 1
    for extent in reversed(shape):
        strides.append(inner)
        inner *= extent
    return tuple(reversed(strides))


def as_stored(name: str, operand: Operand, transposed: bool) -> tuple[str, Operand]:
    """Return how the memory of a factor is laid out.

    Args:
        name: For messages.
        operand: A matrix, as the user passed it.
        transposed: Whether it is transposed before it is multiplied.

    Returns:
        "n" and op(X) itself, or "t" and its transpose: the one of the two whose rows are contiguous.
    """
    factor = operand.turned if transposed else operand
    rows, columns = factor.shape
    along_rows, along_columns = factor.strides
    contiguous = columns == 1 or along_columns == 1
    if not contiguous and (rows == 1 or along_rows == 1):
        return "t", factor.turned
    return "n", factor


def leading(name: str, operand: Operand, shape: tuple[int, ...], problem: Problem) -> int:
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
    *_, rows, columns = shape
    *_, along_rows, along_columns = operand.strides
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


def lying(name: str, operand: Operand, place: int, problem: Problem) -> tuple[int, int, Operand]:
    """Return the elements from one row to the next, those from one product to the next, and the first matrix.

    Args:
        name: For messages.
        operand: A matrix or, for a batch, several; a single A or B is that of all products.
        place: 0 for A, 1 for B, 2 for C.
        problem: What they are operands of.

    Raises:
        UsageError: As for `leading`; or the batch is another one.
    """
    whole = problem.arrays[place]
    shared = place < 2 and operand.shape in (whole[1:], (1, *whole[1:]))
    if problem.batch == 1 or (operand.shape != whole and not shared):
        return leading(name, operand, whole, problem), 0, operand
    _, stride, first = first_of(name, operand)
    if stride < 0 and not shared:
        remedy = operand.idiom.instead(name, operand.idiom.copy)
        raise UsageError(f"{name} has negative strides (a flipped view): {remedy}")
    lead = leading(name, first, first.shape, problem)
    if place == 2 and not apart(problem.m, problem.n, problem.batch, lead, stride):
        raise UsageError(
            f"out has matrices of {first.shape} only {stride} elements apart, so that they overlap: pass an "
            "array whose matrices lie apart"
        )
    return lead, 0 if shared else stride, first


def strided(problem: Problem, a: Operand, b: Operand, out: Operand) -> Problem:
    """Return the problem on these very operands: the problem itself if they are tight and well aligned.

    Raises:
        UsageError: As for `lying`, or ``out`` is read-only, or overlaps a factor or itself.
    """
    found = [
        lying(name, each, i, problem) for i, (name, each) in enumerate([("a", a), ("b", b), ("out", out)])
    ]
    leads, strides, firsts = zip(*found, strict=True)
    writable(out)
    for name, i in (("a", 0), ("b", 1)):
        if _overlap(firsts[i], leads[i], strides[i], firsts[2], leads[2], strides[2], problem.batch):
            raise UsageError(f"out overlaps {name} in memory: pass an array of its own")
    tight = (problem.lda, problem.ldb, problem.ldc)
    follow = (problem.stride_a, problem.stride_b, problem.stride_c)
    aligned = tuple(first.alignment(stride) for first, stride in zip(firsts, strides, strict=True))
    if leads == tight and aligned == (4, 4, 4) and (problem.batch == 1 or strides == follow):
        return problem
    words: dict[str, Any] = dict(zip(("lda", "ldb", "ldc"), leads, strict=True))
    words |= zip(("align_a", "align_b", "align_c"), aligned, strict=True)
    if problem.batch > 1:
        words |= zip(("stride_a", "stride_b", "stride_c"), strides, strict=True)
    return Strided(**vars(problem), **words)


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


def _overlap(
    factor: Operand,
    factor_lead: int,
    factor_stride: int,
    out: Operand,
    out_lead: int,
    out_stride: int,
    batch: int,
) -> bool:
    """Return whether a factor and C may share an element; in rows of one length they may lie side by side."""
    factor_end = factor.address + _span(factor, factor_lead, factor_stride, batch)
    if factor.address >= out.address + _span(out, out_lead, out_stride, batch) or out.address >= factor_end:
        return False
    if factor_lead != out_lead:
        return True
    between = (factor.address - out.address) // FLOAT_BYTES % out_lead
    width = _width(factor, factor_lead, factor_stride, batch)
    return between < _width(out, out_lead, out_stride, batch) or between + width > out_lead


def _width(first: Operand, lead: int, stride: int, batch: int) -> int:
    """Columns from the first to the last of a batch, in rows of which all of its matrices have a part."""
    columns = first.shape[1]
    if batch == 1 or stride % lead == 0:  # one below the other
        return columns
    return min(lead, (batch - 1) * stride + columns)


def _span(first: Operand, lead: int, stride: int, batch: int) -> int:
    """Bytes from the first element of a batch to behind the last."""
    rows, columns = first.shape
    return FLOAT_BYTES * ((batch - 1) * stride + (rows - 1) * lead + columns)


def kind_of(value: Any) -> str:
    """Return the type of a value in words, such as "a torch.Tensor"."""
    kind = type(value)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
