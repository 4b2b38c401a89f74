"""The one way to check what a file says: plain values into frozen dataclasses by their type hints, and back.

Used for records, logs, suites and whatever else is read as JSON or TOML. A library (msgspec) was measured in
its place: importing it takes longer than reading ten records, and its errors name neither the value that is
wrong nor a key that appears twice.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from autotune.errors import AutotuneError, RecordError
from autotune.values.limits import Limit, ReadOnly

T = TypeVar("T")
V = TypeVar("V")

MAX_INTEGER = 2**63 - 1
_NOUNS: dict[type, str] = {
    bool: "a bool",
    int: "an int",
    float: "a float",
    str: "a string",
    list: "a list",
    dict: "an object",
    NoneType: "null",
}


class _FaultError(Exception):
    """One thing wrong with the JSON value at ``at``, such as ``$.config.BM``."""

    def __init__(self, at: str, why: str) -> None:
        super().__init__(f"{at}: {why}")


class NewerSchemaError(RecordError):
    """A later version wrote this file: it is not broken, so nothing renames or replaces it."""


def refuse_newer(value: object, schema: int, where: Path | str) -> None:
    """Check the ``schema`` of a parsed file before anything else in it is checked.

    Raises:
        NewerSchemaError: It is greater than ``schema``, the latest that this version reads.
    """
    found = value.get("schema") if isinstance(value, dict) else None
    if isinstance(found, int) and found > schema:
        raise NewerSchemaError(
            f"{where}: schema {reprlib.repr(found)} is newer than {schema}, the latest this version reads: "
            "update autotune-cuda, or move the file away"
        )


def build(
    kind: type[T],
    value: object,
    where: Path | str,
    *,
    error: type[AutotuneError] = RecordError,
    at: str = "$",
    defaults: bool = False,
    others: bool = False,
) -> T:
    """Make a dataclass of a parsed value, with every key, type and limit checked.

    Args:
        kind: The class; its type hints say what is expected.
        value: As the parser of JSON or TOML made it.
        where: File, and line if it has one, for the error.
        error: What to raise.
        at: Path of the value within the file.
        defaults: Keys may be missing for which the class has a default.
        others: Keys that the class does not know are left out.

    Raises:
        AutotuneError: ``error``: one line with the file, the path of the fault and what was expected there.
    """
    try:
        if isinstance(value, dict) and (defaults or others):
            value = _completed(value, kind, defaults, others)
        return cast(T, _read(value, kind, at))
    except _FaultError as fault:
        raise error(f"{where}: {fault}") from None


def plain(value: object) -> Any:
    """Turn dataclasses and mappings into dicts and tuples into lists, floats rounded as their limits say."""
    return _plain(value, None)


# --- plain to dataclass ----------------------------------------------------------------------------------


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


@cache
def _omitted(kind: Any) -> dict[str, Any]:
    """The keys that a file leaves out where they have these, their defaults."""
    hints = _hints(kind)
    return {
        field.name: field.default
        for field in fields(kind)
        if any(_bare(option)[1].omitted for option in _options(hints[field.name]))
    }


def _completed(value: dict[str, object], kind: Any, defaults: bool, others: bool) -> dict[str, object]:
    known = {field.name: field.default for field in fields(kind)}
    given = {key: item for key, item in value.items() if key in known or not others}
    absent = {} if not defaults else {key: item for key, item in known.items() if item is not MISSING}
    return absent | given


def _options(hint: Any) -> list[Any]:
    if get_origin(hint) in (Union, UnionType):
        return [option for part in get_args(hint) for option in _options(part)]
    return [hint]


def _bare(hint: Any) -> tuple[Any, Limit]:
    if get_origin(hint) is Annotated:
        bare, limit = get_args(hint)
        return bare, limit
    return hint, Limit()


def _accepts(hint: Any) -> tuple[type, ...]:
    """The types, as the parser makes them, that a hint without a union takes; an int is a number too."""
    bare, _ = _bare(hint)
    if bare is float:
        return (float, int)
    if get_origin(bare) is Literal:
        return tuple(type(choice) for choice in get_args(bare))
    if get_origin(bare) is tuple:
        return (list,)
    return (bare,) if bare in _NOUNS else (dict,)


@cache
def _takers(hint: Any) -> dict[type, tuple[Any, Limit]]:
    """Each type that a hint takes, to the option that takes it."""
    takers: dict[type, tuple[Any, Limit]] = {}
    for option in _options(hint):
        for kind in _accepts(option):
            takers.setdefault(kind, _bare(option))
    return takers


def _read(value: object, hint: Any, at: str) -> object:
    taker = _takers(hint).get(type(value))
    if taker is None:
        wanted = " or ".join(_wanted(option) for option in _options(hint))
        raise _FaultError(at, f"expected {wanted}, got {_got(value)}")
    bare, limit = taker
    if isinstance(value, dict):
        return _read_object(value, bare, at) if is_dataclass(bare) else _read_mapping(value, bare, at)
    if isinstance(value, list):
        return _read_list(value, get_args(bare), at)
    if get_origin(bare) is Literal and value not in get_args(bare):
        raise _FaultError(at, f"expected {_wanted(bare)}, got {reprlib.repr(value)}")
    _check(value, limit, at)
    return float(cast(float, value)) if bare is float else value


def _read_object(value: dict[str, object], kind: Any, at: str) -> object:
    hints = _hints(kind)
    value = _omitted(kind) | value
    missing = [f"missing key {key!r}" for key in hints if key not in value]
    unknown = [f"unknown key {reprlib.repr(key)}" for key in value if key not in hints]
    if missing or unknown:
        listed = unknown[:4] + missing
        more = len(unknown) - len(unknown[:4])
        raise _FaultError(at, ", ".join(listed) + (f" and {more} more unknown keys" if more else ""))
    parts = {key: _read(value[key], hint, f"{at}.{key}") for key, hint in hints.items()}
    try:
        return kind(**parts)
    except AutotuneError as error:  # what the class itself checks across its fields
        raise _FaultError(at, str(error)) from None


def _read_mapping(value: dict[str, object], hint: Any, at: str) -> ReadOnly[object]:
    key_hint, item_hint = get_args(hint)
    items = {}
    for key, item in value.items():
        _read(key, key_hint, f"{at}: key")
        items[key] = _read(item, item_hint, f"{at}.{key}")
    return ReadOnly(items)


def _read_list(value: list[object], hints: tuple[Any, ...], at: str) -> tuple[object, ...]:
    if hints[-1] is Ellipsis:
        hints = hints[:1] * len(value)
    elif len(value) != len(hints):
        raise _FaultError(at, f"expected a list of {len(hints)}, got one of {len(value)}")
    return tuple(
        _read(item, hint, f"{at}[{i}]") for i, (item, hint) in enumerate(zip(value, hints, strict=True))
    )


def _check(value: object, limit: Limit, at: str) -> None:
    if isinstance(value, str):
        if not value.isprintable():  # a control character could drive the reader's terminal
            raise _FaultError(at, f"expected printable characters, got {reprlib.repr(value)}")
        if limit.pattern is not None and not re.fullmatch(limit.pattern, value):
            raise _FaultError(at, f"expected text that matches {limit.pattern}, got {reprlib.repr(value)}")
    elif isinstance(value, int | float):
        if isinstance(value, float) and not math.isfinite(value):  # TOML has both
            raise _FaultError(at, f"expected a finite number, got {value}")
        if isinstance(value, int) and abs(value) > MAX_INTEGER:
            what = value if value.bit_length() < 100 else f"an integer of {value.bit_length()} bits"
            raise _FaultError(at, f"{what} is out of range: 64 bits are the limit")
        if limit.least is not None and value < limit.least:
            raise _FaultError(at, f"expected at least {limit.least}, got {value}")
        if limit.above is not None and value <= limit.above:
            raise _FaultError(at, f"expected more than {limit.above}, got {value}")


def _wanted(hint: Any) -> str:
    bare, _ = _bare(hint)
    if get_origin(bare) is Literal:
        return " or ".join(repr(choice) for choice in get_args(bare))
    return "a number" if bare is float else _NOUNS[_accepts(bare)[0]]


def _got(value: object) -> str:
    noun = _NOUNS.get(type(value), f"a {type(value).__name__}")  # TOML has times
    return noun if value is None or isinstance(value, list | dict) else f"{noun}, {reprlib.repr(value)}"


# --- dataclass to plain ----------------------------------------------------------------------------------


def _plain(value: object, decimals: int | None) -> object:
    if is_dataclass(value):
        kind = cast(type, type(value))
        hints, omitted = _hints(kind), _omitted(kind)
        held = {field.name: getattr(value, field.name) for field in fields(value)}
        return {
            name: _plain(item, _decimals(hints[name]))
            for name, item in held.items()
            if name not in omitted or item != omitted[name]
        }
    if isinstance(value, Mapping):
        return {key: _plain(item, decimals) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, decimals) for item in value]
    return _rounded(float(value), decimals) if isinstance(value, float) else value


def _decimals(hint: Any) -> int | None:
    return next(
        (limit.decimals for _, limit in map(_bare, _options(hint)) if limit.decimals is not None), None
    )


def _rounded(number: float, decimals: int | None) -> float:
    if decimals is None:
        return float(f"{number:.6g}")
    coarse = abs(number) < 10 ** (3 - decimals)  # a rate of 0.0012 must not become 0.0
    return float(f"{number:.4g}") if coarse else float(f"{number:.{decimals}f}")
