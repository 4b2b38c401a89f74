from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.errors import RecordError
from autotune.values import jsontext

WORDS = st.text(max_size=30)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | WORDS,
    lambda inner: st.lists(inner, max_size=30) | st.dictionaries(WORDS, inner, max_size=12),
    max_leaves=40,
)


@settings(max_examples=50, deadline=None)
@given(VALUES)
def test_layout_changes_no_value(value: object) -> None:
    text = jsontext.dump(value)
    assert json.loads(text) == value
    assert jsontext.load(text, "x") == value


def test_short_lists_stay_on_one_line_and_long_ones_are_filled() -> None:
    value = {"quantiles": [1.5, 2.5, 3.5], "long": list(range(100, 200)), "nested": [{"a": [1] * 40}]}
    lines = jsontext.dump(value).splitlines()
    assert lines[0] == "{"
    assert lines[1] == '  "quantiles": [1.5, 2.5, 3.5],'
    assert lines[2] == '  "long": ['
    assert lines[3].startswith("    100, 101, 102, ")
    assert len(lines) < 20
    assert max(map(len, lines)) <= jsontext.WIDTH


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [-float("inf")], {"a": object()}, {1j}])
def test_what_json_lacks_is_never_written(value: object) -> None:
    with pytest.raises(RecordError, match="cannot be written as JSON"):
        jsontext.dump(value)
    with pytest.raises(RecordError, match="cannot be written as JSON"):
        jsontext.compact(value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not JSON: Expecting value at line 1, column 1"),
        ('{"a": 1,\n "b" 2}', "not JSON: Expecting ':' delimiter at line 2, column 6"),
        ('{"a', "not JSON: Unterminated string starting at line 1, column 2"),
        ("NaN", "NaN is not a number"),
        ("[-Infinity]", "-Infinity is not a number"),
        ("1e999", "the number '1e999' is out of range"),
        ("9" * 5000, "an integer of 5000 characters is out of range"),
        ('{"a": 1, "b": 2, "a": 3}', "key 'a' appears twice in one object"),
        ("[" * 100_000, "nest too deeply"),
        ('{"a":' * 100_000, "nest too deeply"),
    ],
)
def test_refusals_name_the_file_and_the_fault(text: str, why: str) -> None:
    with pytest.raises(RecordError) as caught:
        jsontext.load(text, "some/x.json")
    assert str(caught.value).startswith("some/x.json: ")
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)
