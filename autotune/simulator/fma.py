"""Fused multiply-adds in NumPy, rounded once as on the hardware, one instruction or a run of them."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

Values = Any  # an array over lanes, or one NumPy scalar for a value that all lanes share

_CHUNK = 1 << 16  # elements worked on at once: float64 buffers of 512 KiB stay in the caches
_TIE = -(1 << 63)  # the 29 bits that float32 lacks, shifted to the top: exactly one half


def _underflow(error: str, flags: int) -> None:
    raise FloatingPointError(error)


def _round_once(total: Values, out: Values, terms: Callable[[], tuple[Values, Values]]) -> None:
    """Round a float64 sum to float32 as if the exact sum had been rounded once.

    Rounding twice differs from rounding once only if the float64 sum was inexact and lies exactly between
    two float32 values, or if the result is subnormal (there float32 keeps fewer bits). Both are rare;
    those sums are rounded to odd first, which makes the second rounding exact (Boldo and Melquiond,
    "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008).

    Args:
        total: The sum, rounded to float64.
        out: Where the float32 values go.
        terms: Returns the two terms of the sum; called in the rare cases.
    """
    dropped = _buffer("dropped", total.shape, np.uint64)
    np.left_shift(total.view(np.uint64), np.uint64(35), out=dropped)
    if dropped.view(np.int64).min() == _TIE:
        _untie(total, dropped, *terms())
    try:
        with np.errstate(under="call", over="ignore", invalid="ignore", call=_underflow):
            np.copyto(out, total, casting="same_kind")
    except FloatingPointError:
        np.copyto(out, round_to_odd(*terms(), total), casting="same_kind")


def _untie(total: Values, dropped: Values, a: Values, b: Values) -> None:
    """Round to odd, in place, where a sum lies between two float32 values."""
    flat = total.reshape(-1)
    where = np.flatnonzero(dropped.view(np.int64) == _TIE)
    a, b = (np.broadcast_to(term, total.shape).reshape(-1)[where] for term in (a, b))
    flat[where] = round_to_odd(a, b, flat[where])


def round_to_odd(a: Values, b: Values, total: Values) -> Values:
    """Return a + b (float64) rounded to odd: an inexact sum gets the neighbour whose last bit is 1."""
    part = total - a
    error = (a - (total - part)) + (b - part)
    even = (total.view(np.uint64) & np.uint64(1)) == 0
    inexact = even & (error != 0) & np.isfinite(total)
    return np.where(inexact, np.nextafter(total, np.where(error > 0, np.inf, -np.inf)), total)


def fma32(a: Values, b: Values, c: Values) -> Values:
    """Return a * b + c in float32 with one rounding, bit-equal to the hardware (NaNs aside)."""
    product = np.multiply(a, b, dtype=np.float64)  # 24 + 24 bits: exact in float64
    total = np.asarray(product + c)
    out = np.empty(total.shape, np.float32)
    _round_once(total, out, lambda: (product, c))
    return out


def fma32_directed(a: Values, b: Values, c: Values, mode: str) -> Values:
    """Return a * b + c in float32 rounded towards zero ("rz"), down ("rm") or up ("rp")."""
    product = np.multiply(a, b, dtype=np.float64)
    total, error = _two_sum(product, np.asarray(c, dtype=np.float64))
    return round_directed(total, error, mode)


def round_directed(total: Values, error: Values, mode: str) -> Values:
    """Round ``total + error`` to float32; total is float64, error below its last bit."""
    nearest = np.asarray(total).astype(np.float32)
    above = (nearest > total) | ((nearest == total) & (error < 0))
    below = (nearest < total) | ((nearest == total) & (error > 0))
    down = above & (mode == "rm") | above & (nearest > 0) & (mode == "rz")
    up = below & (mode == "rp") | below & (nearest < 0) & (mode == "rz")
    lower, upper = (np.nextafter(nearest, np.float32(bound)) for bound in (-np.inf, np.inf))
    return np.where(down, lower, np.where(up, upper, nearest))


def fma32_run(
    rows: Any, targets: Any, left: Any, right: Any, addends: Any, grid: tuple[int, int] | None, mask: Any
) -> None:
    """Execute many independent float32 FMAs: ``rows[targets] = rows[left] * rows[right] + rows[addends]``.

    Args:
        rows: Register file, ``[rows, lanes]`` float32.
        targets: Rows written: ``[count]`` int array, or a slice.
        left: Rows of the first factor; with ``grid``, the distinct ones.
        right: Rows of the second factor; with ``grid``, the distinct ones.
        addends: Rows added: ``[count]`` int array, or a slice.
        grid: (len(left), len(right)) where the FMAs are an outer product in row-major order.
        mask: ``[lanes]`` bool, None for all.
    """
    lanes = rows.shape[1]
    if grid is None:
        step = max(1, _CHUNK // lanes)
        for start in range(0, len(left), step):
            first = _gather(rows, left[start : start + step], "first")
            second = _gather(rows, right[start : start + step], "second")
            _run_part(rows, _piece(targets, start, step), first, second, _piece(addends, start, step), mask)
        return
    column, row = _gather(rows, left, "first"), _gather(rows, right, "second")
    height, width = grid
    step = max(1, _CHUNK // (lanes * width))
    for start in range(0, height, step):
        first = column[start : start + step, None]
        begin, count = start * width, step * width
        _run_part(rows, _piece(targets, begin, count), first, row, _piece(addends, begin, count), mask)


def _piece(index: Any, start: int, count: int) -> Any:
    """Cut out part of a row index that is an array or a slice of step one."""
    if isinstance(index, slice):
        return slice(index.start + start, min(index.start + start + count, index.stop))
    return index[start : start + count]


def _gather(rows: Any, index: Any, name: str) -> Any:
    """Copy rows into a float64 buffer."""
    wide = _buffer(name, (len(index), rows.shape[1]), np.float64)
    np.copyto(wide, rows[index])
    return wide


def _run_part(rows: Any, targets: Any, first: Any, second: Any, addends: Any, mask: Any) -> None:
    """Execute FMAs whose float64 products are ``first * second``, in row-major order."""
    addend = rows[addends]
    total = _buffer("total", np.broadcast_shapes(first.shape, second.shape), np.float64)
    np.multiply(first, second, out=total)
    total = total.reshape(addend.shape)
    total += addend
    in_place = mask is None and isinstance(targets, slice)
    out = rows[targets] if in_place else _buffer("out", addend.shape, np.float32)
    _round_once(total, out, lambda: (np.multiply(first, second).reshape(addend.shape), addend))
    if not in_place:
        rows[targets] = out if mask is None else np.where(mask, out, rows[targets])


_BUFFERS = threading.local()


def _buffer(name: str, shape: tuple[int, ...], dtype: Any) -> Any:
    """Return memory that is reused: fresh pages cost more than the arithmetic."""
    count = math.prod(shape)
    found = getattr(_BUFFERS, name, None)
    if found is None or len(found) < count:
        found = np.empty(count, dtype)
        setattr(_BUFFERS, name, found)
    return found[:count].reshape(shape)


def fma64(a: Values, b: Values, c: Values) -> Values:
    """Return a * b + c in float64 with one rounding (no intermediate overflow or underflow assumed).

    The product is split exactly (Dekker), the three terms are summed with one rounding to odd
    (Boldo and Melquiond, 2008). Values outside 2^-400 to 2^400 fall back to two roundings.
    """
    high = np.multiply(a, b)
    scale = np.float64(134217729.0)  # 2^27 + 1
    a_high = a * scale - (a * scale - a)
    b_high = b * scale - (b * scale - b)
    a_low, b_low = a - a_high, b - b_high
    low = ((a_high * b_high - high) + a_high * b_low + a_low * b_high) + a_low * b_low
    upper, upper_error = _two_sum(c, low)
    total, total_error = _two_sum(high, upper)
    rest = np.asarray(total_error + upper_error)
    value = total + round_to_odd(total_error, upper_error, rest)
    plain = high + c
    return np.where(np.isfinite(value) & (np.abs(high) < 2.0**900) & (np.abs(high) > 2.0**-900), value, plain)


def _two_sum(a: Values, b: Values) -> tuple[Values, Values]:
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)
