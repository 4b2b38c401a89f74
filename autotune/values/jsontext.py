"""JSON that people read: plain values as text on few lines, and any text as plain values or one error."""

from __future__ import annotations

import json
import math
import reprlib
from pathlib import Path

from autotune.errors import RecordError

WIDTH = 100  # columns; a list or object that fits stays on one line


def load(text: str, where: Path | str) -> object:
    """Parse JSON, refusing what JSON does not have (NaN, Infinity) and what would be misread.

    Args:
        text: Any text whatever.
        where: File to name in the error.

    Raises:
        RecordError: The text is not JSON, repeats a key, nests too deeply, or holds a number out of range.
    """
    try:
        return json.loads(
            text,
            parse_int=_integer,
            parse_float=_finite,
            parse_constant=_no_constant,
            object_pairs_hook=_distinct,
        )
    except json.JSONDecodeError as error:
        why = f"not JSON: {error.msg.removesuffix(' at')} at line {error.lineno}, column {error.colno}"
    except RecursionError:
        why = "not a record: lists or objects nest too deeply"
    except ValueError as error:
        why = str(error)
    raise RecordError(f"{where}: {why}") from None


def dump(value: object) -> str:
    """Write plain values over as few lines as read well, with a newline at the end.

    Raises:
        RecordError: A value has no JSON form: NaN, infinity, or a foreign type such as a NumPy integer.
    """
    return _laid_out(value, "", 0) + "\n"


def compact(value: object) -> str:
    """Write plain values on one line, without a newline.

    Raises:
        RecordError: As for `dump`.
    """
    try:
        return json.dumps(value, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise RecordError(f"cannot be written as JSON: {error}") from None


def _integer(digits: str) -> int:
    if len(digits) > 20:  # also keeps int() away from its limit of 4300 digits
        raise ValueError(f"an integer of {len(digits)} characters is out of range: 64 bits are the limit")
    return int(digits)


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"the number {reprlib.repr(digits)} is out of range")
    return number


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number in JSON")


def _distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
    items = dict(pairs)
    if len(items) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {reprlib.repr(twice)} appears twice in one object")
    return items


def _laid_out(value: object, indent: str, used: int) -> str:
    """Write a value; ``used`` columns of its first line are taken by the indent, its key and a comma."""
    flat = compact(value)
    if not isinstance(value, dict | list) or (indent and used + len(flat) <= WIDTH):
        return flat
    deeper = indent + "  "
    if isinstance(value, dict):
        keys = [f"{compact(key)}: " for key in value]
        items = list(value.values())
        opening, closing = "{", "}"
    else:
        keys, items = [""] * len(value), value
        opening, closing = "[", "]"
    if any(isinstance(item, dict | list) for item in items) or not indent:
        lines = [
            key + _laid_out(item, deeper, len(deeper) + len(key) + 1)
            for key, item in zip(keys, items, strict=True)
        ]
    else:
        lines = _filled(
            [key + compact(item) for key, item in zip(keys, items, strict=True)], WIDTH - len(deeper)
        )
    return f"{opening}\n" + ",\n".join(deeper + line for line in lines) + f"\n{indent}{closing}"


def _filled(items: list[str], room: int) -> list[str]:
    """Put as many short items on each line as fit, as words in a paragraph."""
    lines = [items[0]]
    for item in items[1:]:
        if len(lines[-1]) + len(item) + 3 <= room:
            lines[-1] += f", {item}"
        else:
            lines.append(item)
    return lines
