"""Tables fit the terminal: no line is too long, no number is cut, and what is left out is named."""

from __future__ import annotations

import re

import pytest

from autotune.cli.tables import PIPE_WIDTH, Table, paragraph

ROWS = [
    (
        "NVIDIA H200",
        "1760 x 7133 x 1760 nt beta",
        "0.0012345",
        "sgemm_3xtf32_wgmma",
        "a rule that says so much",
    ),
    ("NVIDIA H200", "1 x 1 x 1 nn", "123.456", "sgemm", ""),
]


def table():
    made = Table(
        ("device", "problem", "ms", "family", "because"), drop=("family", "device"), wrap=("because",),
        right=("ms",),
    )  # fmt: skip
    for row in ROWS:
        made.add_row(*row)
    return made


@pytest.mark.parametrize("width", range(20, 130))
def test_no_line_is_too_long_and_no_number_is_cut(width):
    lines = table().lines(width)
    assert all(len(line) <= max(width, 39) for line in lines), lines  # "problem 1760 x ..." is never parted
    text = "\n".join(lines)
    for row in ROWS:
        for cell in row[1:3]:
            assert cell in text


def test_prose_is_wrapped_first_then_columns_are_left_out_and_named():
    whole = table().lines(110)
    assert len(whole) == 3
    assert len(whole[0].split()) == 5
    wrapped = table().lines(90)
    assert len(wrapped) > 3
    assert "family" in wrapped[0]
    narrow = table().lines(70)
    assert "family" not in narrow[0]
    assert narrow[-1] == " not shown in 70 columns: family; --json has them"


def test_what_is_narrow_takes_the_room_that_something_wide_left():
    made = Table(("a", "small", "wide"), drop=("small", "wide"))
    made.add_row("1", "22", "w" * 40)
    assert made.lines(30)[:2] == [" a  small", " 1  22"]


def test_rows_become_names_and_values_where_nothing_else_fits():
    made = Table(("rank", "ms", "", "BM", "BN"))
    made.add_row("1", "2.5", "tied", "128", "")
    made.add_row("2", "2.6", "", "64", "32")
    assert made.lines(18) == [
        " rank 1",
        "   ms 2.5, tied,",
        "   BM 128",
        " rank 2",
        "   ms 2.6, BM 64,",
        "   BN 32",
    ]


def test_a_pipe_gets_every_column_and_prose_in_lines():
    made = Table(("name", "value", "because"), drop=("value",), wrap=("because",))
    made.add_row("n" * 100, "v" * 100, "some words " * 30)
    lines = made.lines(None)
    assert "v" * 100 in lines[1]
    made = Table(("name", "because"), wrap=("because",))
    made.add_row("n", "some words " * 30)
    assert max(map(len, made.lines(None))) <= PIPE_WIDTH


def test_numbers_stand_on_the_right_and_empty_columns_not_at_all():
    made = Table(("x", "ms", "why"), right=("ms",))
    made.add_row("a", "1.5", "")
    made.add_row("b", "10.25", "")
    assert made.lines(80) == [" x     ms", " a    1.5", " b  10.25"]


def test_control_characters_in_cells_are_escapes():
    made = Table(("x",))
    made.add_row("a\x1b[31m\nb")
    assert made.lines(80)[1] == r" a\x1b[31m\nb"


@pytest.mark.parametrize("columns", [120, 80, 60])
@pytest.mark.parametrize(
    "words",
    ["show", "cache list", "show --m 4096 --n 4096 --k 4096", "space --m 64 --n 64 --k 64 --target h200"],
)
def test_commands_fit_their_tables_to_the_terminal(monkeypatch, capsys, columns, words):
    from autotune.cli import cli

    monkeypatch.setenv("COLUMNS", str(columns))
    cli.main(words.split(), "autotune", standalone_mode=False)
    found = capsys.readouterr().out.splitlines()
    lines = [line for line in found if re.match(r" (?! )", line)]  # of tables
    assert len(lines) > 3
    assert all(len(line) <= columns for line in lines)
    assert "..." not in "".join(lines)


def test_paragraphs_fit_the_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    paragraph("some words " * 30)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 60
