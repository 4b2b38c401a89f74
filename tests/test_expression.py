from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.errors import SpaceError
from autotune.space.expression import Expression

WORDS = {"loader": ("reg", "cp_async"), "edge": ("exact", "guarded")}
CODES = {"reg": 0, "cp_async": 1, "exact": 2, "guarded": 3}


def expression(text):
    return Expression(text, "x.toml: constraints.rule", CODES, WORDS)


def evaluate(text, **values):
    return expression(text)(values)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 + 2 * 3", 7),
        ("-a // 2", -4),
        ("a % 4 - b", -2),
        ("a // 0", 0),
        ("a % 0", 0),
        ("a // (b - 5)", 0),
        ("ceil_div(a, 2)", 4),
        ("ceil_div(a, 0)", 0),
        ("ceil_div(8, 2)", 4),
        ("min(a, b)", 5),
        ("max(a, b)", 7),
        ("1 < b < a", True),
        ("1 < b < 3", False),
        ("a == 7 and b == 5", True),
        ("a == 7 and not b == 5", False),
        ("a == 1 or b == 1", False),
        ("a if b == 5 else 0", 7),
        ("4 if a % 4 == 0 else 2 if a % 2 == 0 else 1", 1),
        ("(a > 1) + (b > 1) + (a > 100)", 2),
        ("-(a > 1)", -1),
        ("True", True),
        ("loader == 'cp_async'", True),
        ("'reg' != loader", True),
        ("loader != 'cp_async' or a == 7", True),
        ("  a  ", 7),
    ],
)
def test_one_value_and_a_column_agree(text, value):
    numbers = {"a": 7, "b": 5, "loader": 1}
    columns = {name: np.full(3, number, np.int64) for name, number in numbers.items()}
    assert evaluate(text, **numbers) == value
    assert np.broadcast_to(evaluate(text, **columns), 3).tolist() == [value] * 3


def test_a_column_is_evaluated_row_by_row():
    a = np.array([1, 2, 4, 0])
    assert evaluate("8 % a == 0 if a < 4 else 8 // a", a=a).tolist() == [1, 1, 2, 1]
    assert evaluate("ceil_div(9, a)", a=a).tolist() == [9, 5, 3, 0]
    assert evaluate("(a > 1) + (a > 3)", a=a).tolist() == [0, 1, 2, 0]


def test_names_that_occur():
    assert expression("a + min(b, 3) > (c if loader == 'reg' else 0)").names == {"a", "b", "c", "loader"}


OPERATORS = ["+", "-", "*", "//", "%", "<", "<=", "==", "!=", ">", ">=", "and", "or"]
texts = st.recursive(
    st.sampled_from(["a", "b", "0", "1", "3"]),
    lambda inner: st.one_of(
        st.builds("({} {} {})".format, inner, st.sampled_from(OPERATORS), inner),
        st.builds("({} if {} else {})".format, inner, inner, inner),
        st.builds("{}({}, {})".format, st.sampled_from(["min", "max", "ceil_div"]), inner, inner),
        st.builds("(not {})".format, inner),
        st.builds("(-{})".format, inner),
    ),
    max_leaves=8,
)


@given(texts, st.lists(st.tuples(st.integers(-9, 99), st.integers(-9, 99)), min_size=1, max_size=5))
def test_columns_agree_with_single_values(text, rows):
    column = evaluate(text, **dict(zip("ab", np.array(rows, np.int64).T, strict=True)))
    single = [int(evaluate(text, a=a, b=b)) for a, b in rows]
    assert np.broadcast_to(np.asarray(column), len(rows)).astype(int).tolist() == single


@pytest.mark.parametrize(
    "text",
    [
        "a.b",
        "().__class__",
        "open('x')",
        "abs(a)",
        "min(a)",
        "min(a, b, 3)",
        "min(*a)",
        "min(*a, *b)",
        "min(a, b=1)",
        "ceil_div(a, b)(1)",
        "lambda: 1",
        "f'{a}'",
        "[a for a in b]",
        "{a: 1}",
        "(a, b)",
        "a[0]",
        "a / b",
        "a ** b",
        "9 ** 9 ** 9",
        "a << 2",
        "a & b",
        "~a",
        "+a",
        "1.5 * a",
        "1j",
        "None",
        "b'reg'",
        "...",
        "a in (1, 2)",
        "a is b",
        "(a := 1)",
        "await a",
        "a; b",
        "a = b",
        "import os",
        "",
        "a +",
        "((a)",
        "a\nb",
        "a\0",
        str(2**63),
        "a + 99999999999999999999",
        "'reg'",
        "loader",
        "loader + 1",
        "loader < 'reg'",
        "loader == 1",
        "a == 'reg'",
        "loader == 'cp_asnyc'",
        "loader == 'exact'",
        "loader == edge",
        "'reg' == 'reg'",
        "loader == 'reg' == 'reg'",
        "loader if a else b",
        "min(loader, a)",
        "not loader",
        "loader and a",
        "(" * 500 + "a" + ")" * 500,
        "-" * 900 + "a",
        "a" + " + a" * 2000,
        "lambda: " + "-" * 900 + "a",
    ],
)
def test_what_is_not_allowed_is_refused_in_one_line(text):
    with pytest.raises(SpaceError, match=r"^x\.toml: constraints\.rule: ") as raised:
        expression(text)
    assert "\n" not in str(raised.value)


def test_a_word_that_no_parameter_has_is_told_with_the_words_there_are():
    with pytest.raises(SpaceError, match="never equal; loader is one of reg, cp_async"):
        expression("loader == 'cp_asnyc'")


def test_a_value_beyond_64_bits_is_an_error_and_not_a_wrong_answer():
    large = 2**40
    for values in ({"a": large, "b": large}, {"a": np.array([1, large]), "b": np.array([large, large])}):
        for text in ("a * b > 0", "a * a * 0", "(a * 8388607 + a * 8388607) * 2"):
            with pytest.raises(SpaceError, match="value beyond 64 bits"):
                evaluate(text, **values)
    assert evaluate("a * b", a=np.array([2**31 - 1]), b=2**31).tolist() == [(2**31 - 1) * 2**31]


def test_an_empty_column_stays_empty():
    assert evaluate("a * a // a + min(a, 1) > 0", a=np.array([], np.int64)).tolist() == []
