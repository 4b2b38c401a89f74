"""PTX arithmetic that NumPy lacks: clamped shifts, bit fields, conversions with saturation."""

from __future__ import annotations

from typing import Any

import numpy as np

from autotune.simulator.lanes import RANK_BITS

Values = Any  # an array over lanes, or one NumPy scalar for a value that all lanes share


def flush(value: Values) -> Values:
    """Replace float32 subnormals by zero of the same sign (.ftz)."""
    value = np.asarray(value)
    if value.dtype != np.float32:
        return value
    return np.where(np.abs(value) < np.float32(2.0**-126), np.copysign(np.float32(0), value), value)


def saturate(value: Values) -> Values:
    """Clamp to 0..1; NaN becomes 0 (.sat)."""
    return np.fmax(np.fmin(value, value.dtype.type(1)), value.dtype.type(0))


def approximate(value: Values, name: str) -> Values:
    """Return a function of NumPy in the type of the value, more exact than the hardware's."""
    return getattr(np, name)(np.asarray(value, dtype=np.float64)).astype(value.dtype)


def inverse_sqrt(value: Values) -> Values:
    """Return 1 / sqrt(value)."""
    return np.divide(1.0, np.sqrt(np.asarray(value, dtype=np.float64))).astype(value.dtype)


# ---- integers ---------------------------------------------------------------------------------------


def integer_divide(a: Values, b: Values) -> Values:
    """Divide towards zero; division by zero yields all ones, as the hardware does."""
    a, b = np.asarray(a), np.asarray(b)
    zero = b == 0
    divisor = np.where(zero, b.dtype.type(1), b)
    quotient = a // divisor
    if a.dtype.kind == "i":
        quotient = quotient + ((quotient < 0) & (quotient * divisor != a)).astype(a.dtype)
    return np.where(zero, np.invert(np.zeros((), a.dtype)), quotient).astype(a.dtype)


def integer_remainder(a: Values, b: Values) -> Values:
    """Return a - b * (a / b), with the sign of a."""
    a, b = np.asarray(a), np.asarray(b)
    return np.where(b == 0, a, a - integer_divide(a, b) * b).astype(a.dtype)


def multiply_high(a: Values, b: Values) -> Values:
    """Return the upper half of the double-width product."""
    a, b = np.asarray(a), np.asarray(b)
    bits, kind = a.dtype.itemsize * 8, a.dtype.kind
    if bits < 64:
        wide = np.dtype(f"{kind}{bits // 4}")
        return (np.multiply(a, b, dtype=wide) >> wide.type(bits)).astype(a.dtype)
    mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    x, y = a.astype(np.uint64), b.astype(np.uint64)
    x_low, x_high, y_low, y_high = x & mask, x >> half, y & mask, y >> half
    middle = x_high * y_low + ((x_low * y_low) >> half)
    cross = x_low * y_high + (middle & mask)
    high = x_high * y_high + (middle >> half) + (cross >> half)
    if kind == "i":
        zero = np.uint64(0)
        high = high - np.where(a < 0, y, zero) - np.where(b < 0, x, zero)
    return high.astype(a.dtype)


def multiply24(a: Values, b: Values, part: str) -> Values:
    """Multiply the lower 24 bits of each: the lower 32 of the 48 bits ("lo"), or the upper ("hi")."""
    a, b = (np.asarray(each) << each.dtype.type(8) >> each.dtype.type(8) for each in (a, b))
    product = np.multiply(a, b, dtype=np.dtype(f"{a.dtype.kind}8"))
    return (product >> product.dtype.type(16 if part == "hi" else 0)).astype(a.dtype)


def dot_product(a: Values, b: Values, c: Values, pieces: int, part: str = "lo") -> Values:
    """Return c plus products of a's halves, or bytes, with as many bytes of b, its lower or upper ones."""
    a, b, total = np.asarray(a), np.asarray(b), np.asarray(c)
    width, first = 32 // pieces, 2 if part == "hi" else 0
    for piece in range(pieces):  # shifted up and down again, it keeps its sign
        one = a << a.dtype.type(32 - width * (piece + 1)) >> a.dtype.type(32 - width)
        other = b << b.dtype.type(24 - 8 * (first + piece)) >> b.dtype.type(24)
        total = total + np.multiply(one, other).astype(total.dtype)
    return total


def funnel(low: Values, high: Values, amount: Values, side: str, mode: str) -> Values:
    """Return the upper 32 bits of (high, low) shifted left ("l"), or the lower 32 shifted right ("r")."""
    pair = (np.asarray(high).astype(np.uint64) << np.uint64(32)) | np.asarray(low).astype(np.uint64)
    count = amount & np.uint32(31) if mode == "wrap" else np.minimum(amount, np.uint32(32))
    count = np.asarray(count).astype(np.uint64)
    return (pair << count >> np.uint64(32) if side == "l" else pair >> count).astype(np.uint32)


def _field(kind: Any, length: Values) -> Values:
    """Return as many ones, from the lowest bit on, as an unsigned type has room for."""
    return ~np.left_shift(~kind.type(0), np.minimum(length, kind.itemsize * 8).astype(kind))


def extract_bits(value: Values, start: Values, length: Values) -> Values:
    """Return the bit field (bfe): zero- or sign-extended by the type."""
    value = np.asarray(value)
    bits, kind = value.dtype.itemsize * 8, np.dtype(f"u{value.dtype.itemsize}")
    start, length = (np.asarray(each & np.uint32(255)).astype(np.int64) for each in (start, length))
    field = np.right_shift(value, np.minimum(start, bits).astype(value.dtype)).view(kind)
    mask = _field(kind, length)
    field = field & mask
    if value.dtype.kind == "i":
        last = np.clip(start + length - 1, 0, bits - 1)
        sign = value.view(kind) >> last.astype(kind) & kind.type(1)
        field = np.where((sign != 0) & (length > 0), field | ~mask, field)
    return field.view(value.dtype)


def insert_bits(source: Values, target: Values, start: Values, length: Values) -> Values:
    """Return the target with a bit field replaced by the low bits of the source (bfi)."""
    kind = np.asarray(target).dtype
    start, length = (
        np.minimum(each & np.uint32(255), kind.itemsize * 8).astype(kind) for each in (start, length)
    )
    mask = np.left_shift(_field(kind, length), start)
    return (target & ~mask) | (np.left_shift(source, start) & mask)


def count_bits(value: Values) -> Values:
    """Count the ones."""
    value = np.asarray(value)
    if hasattr(np, "bitwise_count"):
        return np.bitwise_count(value.view(f"u{value.dtype.itemsize}")).astype(np.uint32)
    octets = np.ascontiguousarray(value).reshape(-1).view(np.uint8).reshape(*value.shape, -1)
    return np.unpackbits(octets, axis=-1).sum(-1).astype(np.uint32)


def leading_zeros(value: Values) -> Values:
    """Count the zeros above the highest one."""
    value = np.asarray(value)
    bits = value.dtype.itemsize * 8
    unsigned = value.view(f"u{bits // 8}")
    shift = 1
    while shift < bits:  # smear the highest one downwards
        unsigned = unsigned | (unsigned >> unsigned.dtype.type(shift))
        shift *= 2
    return np.uint32(bits) - count_bits(unsigned)


def find_bit(value: Values, shifted: bool) -> Values:
    """Return the position of the highest one (bfind), of the highest non-sign bit for signed types."""
    value = np.asarray(value)
    bits = value.dtype.itemsize * 8
    unsigned = (np.where(value < 0, ~value, value) if value.dtype.kind == "i" else value).view(
        f"u{bits // 8}"
    )
    zeros = leading_zeros(unsigned)
    position = zeros if shifted else np.uint32(bits - 1) - zeros
    return np.where(unsigned == 0, np.uint32(0xFFFFFFFF), position)


def reverse_bits(value: Values) -> Values:
    """Mirror the bits."""
    value = np.asarray(value)
    bits = value.dtype.itemsize * 8
    kind = value.dtype.type
    step, mask = bits // 2, (1 << bits) - 1
    while step:
        mask ^= (mask << step) & ((1 << bits) - 1)
        value = ((value >> kind(step)) & kind(mask)) | ((value & kind(mask)) << kind(step))
        step //= 2
    return value


def permute_bytes(a: Values, b: Values, selector: Values) -> Values:
    """Pick four bytes of (b, a) by the nibbles of the selector (prmt); bit 3 repeats the byte's sign."""
    pair = (np.asarray(b).astype(np.uint64) << np.uint64(32)) | np.asarray(a).astype(np.uint64)
    selector = np.asarray(selector).astype(np.uint64)
    total: Values = np.uint64(0)
    for position in range(4):
        nibble = (selector >> np.uint64(4 * position)) & np.uint64(15)
        byte = (pair >> ((nibble & np.uint64(7)) * np.uint64(8))) & np.uint64(255)
        sign = np.where(byte >= 128, np.uint64(255), np.uint64(0))
        total = total | (np.where(nibble >= 8, sign, byte) << np.uint64(8 * position))
    return total.astype(np.uint32)


def logic3(a: Values, b: Values, c: Values, table: int) -> Values:
    """Apply the 8-entry truth table to each bit of a, b, c (lop3)."""
    total: Values = np.uint32(0)
    for case in range(8):
        if table >> case & 1:
            term = (a if case & 4 else ~a) & (b if case & 2 else ~b) & (c if case & 1 else ~c)
            total = total | term
    return total


# ---- conversions ------------------------------------------------------------------------------------

_ROUND = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def round_whole(value: Values, mode: str) -> Values:
    """Round to a whole number."""
    return _ROUND[mode](value)


def float_to_integer(value: Values, mode: str, dtype: Any) -> Values:
    """Round and clamp to an integer type; NaN becomes 0."""
    limits = np.iinfo(dtype)
    rounded = _ROUND[mode](np.asarray(value, dtype=np.float64))
    above, below = rounded >= float(limits.max) + 1, rounded < float(limits.min)
    if limits.bits < 64:
        above = rounded > limits.max
    inside = np.where(above | below | np.isnan(rounded), 0.0, rounded).astype(dtype)
    return np.where(above, dtype(limits.max), np.where(below, dtype(limits.min), inside))


def saturate_integer(value: Values, dtype: Any) -> Values:
    """Clamp an integer to the range of another integer type."""
    value = np.asarray(value)
    target, source = np.iinfo(dtype), np.iinfo(value.dtype)
    return np.clip(value, max(target.min, source.min), min(target.max, source.max)).astype(dtype)


def round_tf32(value: Values, mode: str) -> Values:
    """Round float32 to the 10 stored mantissa bits of TF32 ("rna": ties away); returns the bits as uint32."""
    value = np.asarray(value)
    bits = value.view(np.uint32)
    even = np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))
    half = np.uint32(0x1000) if mode == "rna" else even
    return np.where(np.isfinite(value), (bits + half) & np.uint32(0xFFFFE000), bits)


def pack_halves(high: Values, low: Values) -> Values:
    """Round two float32 values to float16; returns the bits of both as uint32."""
    high, low = (np.asarray(each).astype(np.float16).view(np.uint16) for each in (high, low))
    return high.astype(np.uint32) << np.uint32(16) | low


def of_block(address: Values, rank: Values) -> Values:
    """Return where the block of a rank in its cluster has what lies at an address of shared memory (mapa)."""
    kind = address.dtype.type
    ranks = kind(255 << RANK_BITS)
    return address & ~ranks | np.minimum(rank + np.uint32(1), 255).astype(kind) << kind(RANK_BITS)


def in_space(address: Values, space: str) -> Values:
    """Return where a generic address lies in a memory space (isspacep)."""
    window = np.asarray(address) >> np.uint64(56)
    return window == {"global": 0, "shared": 1, "local": 2}.get(space, 255)
