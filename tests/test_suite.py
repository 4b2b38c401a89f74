from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from autotune.errors import UsageError
from autotune.values.problem import LAYOUTS, Problem
from autotune.values.suite import Shape, chosen, read_suite

ONE = '[[shape]]\nid = "S"\nm = 8\nn = 16\nk = 32\n'


def read(tmp_path, text):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return read_suite(path)


def test_the_built_in_suite_holds_every_class_of_shape():
    shapes = read_suite()
    assert len(shapes) == 24
    assert {shape.group for shape in shapes} == {"square", "irregular", "small_k", "large_k", "skinny"}
    assert {shape.problem.layout for shape in shapes} == set(LAYOUTS)
    assert len({shape.problem for shape in shapes}) == 24
    assert all(shape.why for shape in shapes)
    by_id = {shape.id: shape for shape in shapes}
    assert by_id["P05"].problem == Problem(4096, 4096, 4096)
    assert by_id["P16"].problem == Problem(512, 8, 500000, beta=1)
    assert (by_id["P11"].alpha, by_id["P11"].beta) == (1.5, 0.5)
    assert (by_id["P13"].alpha, by_id["P13"].beta) == (-1.0, 1.0)


def test_only_sizes_and_a_name_are_needed(tmp_path):
    assert read(tmp_path, ONE) == (Shape("S", Problem(8, 16, 32), 1.0, 0.0, "all", ""),)


def test_scalars_are_those_that_a_kernel_gets(tmp_path):
    (shape,) = read(tmp_path, ONE + "alpha = 0.1\nbeta = 3\n")
    assert shape.alpha == struct.unpack("f", struct.pack("f", 0.1))[0] != 0.1
    assert (shape.beta, shape.problem.beta) == (3.0, 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no shape"),
        ("shape = []", "has no shape"),
        ("shape = 3", "has no shape"),
        ("shape = [1]", "with two brackets"),
        ("[shape]\nid = 1", "has no shape"),
        ("[[shape]", "is not TOML"),
        ("[bench]\n" + ONE, "bench is unknown"),
        (ONE + "color = 3", "shape 1 (S): $: unknown key 'color'"),
        ('[[shape]]\nid = "S"\nm = 8', "shape 1 (S): $: missing key 'n', missing key 'k'"),
        (ONE.replace("8", '"8"'), "$.m: expected an int, got a string, '8'"),
        (ONE.replace("8", "true"), "$.m: expected an int, got a bool, True"),
        (ONE.replace("8", "0"), "m = 0 is out of range"),
        (ONE.replace('"S"', '" "'), "$.id: expected text that matches"),
        (ONE + 'group = ""', "$.group: expected text that matches"),
        (ONE.replace('"S"', r'"\u001b[31m"'), r"shape 1 (\x1b[31m): $.id: expected printable"),
        (ONE.replace('"S"', '"' + 300 * "x" + '"'), "$.id: expected text that matches"),
        (ONE + r'group = "\u009b2J"', "$.group: expected printable"),
        (ONE + r'why = "\u202e"', "$.why: expected printable"),
        (ONE + r'"\u001b[2J" = 1', r"shape 1 (S): $: unknown key '\x1b[2J'"),
        (r'"\u001b[2J" = 1', r"\x1b[2J is unknown"),
        (ONE + "k" * 5000 + " = 1", "$: unknown key 'kkkk"),
        (
            ONE.replace("8", "9" * 4000),
            "$.m: an integer of 13288 bits is out of range: 64 bits",
        ),
        (ONE.replace("8", "9" * 5000), "is not TOML: it holds an integer of more than 64 bits"),
        (ONE.replace("8", "0x" + "f" * 5000), "$.m: an integer of 20000 bits"),
        (ONE + "alpha = " + "9" * 4000, "$.alpha: an integer of 13288 bits"),
        (ONE + "beta = 1e-50", "beta = 1e-50 is beyond float32: give 1e-45 to 3.4e+38"),
        (ONE + "alpha = " + "[" * 100_000, "nest too deeply"),
        (ONE + "alpha = " + "[" * 300 + "]" * 300, "$.alpha: expected a number, got a list"),
        (ONE + "a." * 50_000 + "a = 1", "a key of more than 16 parts (at line 6)"),
        (ONE + 'layout = "xx"', "layout 'xx' is unknown"),
        (ONE + 'beta = "1"', "$.beta: expected a number, got a string, '1'"),
        (ONE + "beta = nan", "$.beta: expected a finite number, got nan"),
        (ONE + "alpha = 1e39", "alpha = 1e+39 is beyond float32"),
        (ONE + "alpha = 0", "alpha = 0 multiplies nothing"),
        (ONE + "why = 2026-01-31", "$.why: expected a string, got a date"),
        (ONE + 'group = "\\u001b[2J"', "$.group: expected printable characters"),
        (ONE.replace("8", "9" * 30), "$.m: "),
        (ONE + ONE, "id 'S' appears twice"),
    ],
)
def test_a_wrong_suite_is_one_clear_line(tmp_path, text, said):
    with pytest.raises(UsageError) as error:
        read(tmp_path, text)
    assert said in str(error.value)
    assert "mine.toml" in str(error.value)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 300 + len(str(tmp_path))


def test_a_file_that_is_not_there_or_not_text(tmp_path):
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_suite(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="not UTF-8"):
        read_suite(tmp_path / "bytes.toml")
    os.mkfifo(tmp_path / "fifo.toml")
    for path in (tmp_path / "fifo.toml", Path("/dev/zero")):
        with pytest.raises(UsageError, match="cannot be read: it is a pipe, socket or device"):
            read_suite(path)
    (tmp_path / "huge.toml").touch()
    os.truncate(tmp_path / "huge.toml", 3 << 30)
    with pytest.raises(UsageError, match="longer than 1 MiB"):
        read_suite(tmp_path / "huge.toml")


def test_a_suite_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "bom.toml").write_bytes(b"\xef\xbb\xbf" + ONE.encode())
    assert [shape.id for shape in read_suite(tmp_path / "bom.toml")] == ["S"]


def test_shapes_are_chosen_by_id_and_by_group():
    shapes = read_suite()
    assert chosen(shapes, ()) == shapes
    assert [shape.id for shape in chosen(shapes, ("P16", "small_k"))] == ["P13", "P14", "P16", "P24"]
    with pytest.raises(UsageError, match="'P99' is no shape and no group"):
        chosen(shapes, ("P99",))
