from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest

from autotune.errors import RecordError
from autotune.values import typed
from autotune.values.limits import Limit, ReadOnly


@dataclass(frozen=True)
class Inner:
    count: Annotated[int, Limit(least=1)]


@dataclass(frozen=True)
class Outer:
    inner: Inner | None
    kind: Literal["a", 1]
    share: Annotated[float, Limit(above=0, decimals=2)] | None
    names: tuple[Annotated[str, Limit(pattern="[a-z]+")], ...]
    table: Mapping[str, tuple[int, float]]


PLAIN: dict[str, Any] = {
    "inner": {"count": 2},
    "kind": "a",
    "share": 12.345678,
    "names": ["x", "y"],
    "table": {"row": [1, 2.123456789]},
}


def test_there_and_back() -> None:
    outer = typed.build(Outer, PLAIN, "x")
    assert outer == Outer(Inner(2), "a", 12.345678, ("x", "y"), ReadOnly({"row": (1, 2.123456789)}))
    assert typed.plain(outer) == {**PLAIN, "share": 12.35, "table": {"row": [1, 2.12346]}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inner": {"count": 0}}, "x: $.inner.count: expected at least 1, got 0"),
        ({"inner": {"count": True}}, "x: $.inner.count: expected an int, got a bool, True"),
        ({"inner": 1}, "x: $.inner: expected an object or null, got an int, 1"),
        ({"kind": True}, "x: $.kind: expected 'a' or 1, got a bool, True"),  # although True == 1
        ({"share": "1"}, "x: $.share: expected a number or null, got a string, '1'"),
        ({"names": ["x", "Y"]}, "x: $.names[1]: expected text that matches [a-z]+, got 'Y'"),
        ({"names": ["x\n"]}, r"x: $.names[0]: expected printable characters, got 'x\n'"),
        ({"table": {"row": [1]}}, "x: $.table.row: expected a list of 2, got one of 1"),
        ({"more": 1}, "x: $: unknown key 'more'"),
    ],
)
def test_the_message_names_file_path_and_expectation(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError) as caught:
        typed.build(Outer, {**PLAIN, **change}, "x")
    assert str(caught.value) == message


def test_many_unknown_keys_stay_one_short_line() -> None:
    with pytest.raises(RecordError) as caught:
        typed.build(Inner, {"k" * 500 + str(i): i for i in range(1000)}, "x")
    assert len(str(caught.value)) < 300
    assert str(caught.value).endswith("missing key 'count' and 996 more unknown keys")


def test_an_int_is_a_number_and_becomes_a_float() -> None:
    share = typed.build(Outer, {**PLAIN, "share": 2}, "x").share
    assert type(share) is float


@pytest.mark.parametrize(
    ("number", "written"), [(1234.5678, 1234.57), (9.87654, 9.877), (0.00123456, 0.001235), (0.0, 0.0)]
)
def test_decimals_never_cost_all_digits(number: float, written: float) -> None:
    outer = Outer(None, 1, number, (), {})
    assert typed.plain(outer)["share"] == written


def test_read_only_is_a_value() -> None:
    items = {"b": 1, "a": 2}
    frozen = ReadOnly(items)
    items["b"] = 3
    assert frozen == {"a": 2, "b": 1}
    assert list(frozen) == ["b", "a"]
    assert hash(frozen) == hash(ReadOnly({"a": 2, "b": 1}))
    assert not hasattr(frozen, "__setitem__")
