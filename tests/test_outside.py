"""Files from outside, read within limits, and text that a terminal does not obey."""

from __future__ import annotations

import gzip
import os
import socket
import time
from pathlib import Path

import pytest

from autotune.errors import AutotuneError, RecordMissing, SpaceError
from autotune.outside import MIB, parse_toml, printable, read_bytes, read_text, read_toml, shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a b", "a b"),
        ("Größe µs 中文", "Größe µs 中文"),
        ("\x1b[31mred\x07", r"\x1b[31mred\x07"),
        ("two\nlines\r\ttab\0", r"two\nlines\r\ttab\x00"),
        ("\x9b31m", r"\x9b31m"),
        ("abc\u202etxt.exe\u2028", r"abc\u202etxt.exe\u2028"),
        ("\udcff.csv", r"\udcff.csv"),
        ("\x7f", r"\x7f"),
    ],
)
def test_a_terminal_obeys_nothing_in_a_text(text: str, shown: str) -> None:
    assert printable(text) == shown
    for kind in (AutotuneError, SpaceError, RecordMissing):
        assert str(kind(text)) == shown


def test_a_long_text_is_cut_in_its_middle() -> None:
    assert printable("a" * 100 + "z", 20) == "aaaaaaaaa...aaaaaaaz"
    assert printable("a" * 20, 20) == "a" * 20
    assert len(printable("\n" * 50, 21)) == 21


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        began = time.monotonic()
        for path in (tmp_path / "fifo", Path("/dev/zero"), Path("/dev/tty"), tmp_path / "socket", tmp_path):
            with pytest.raises(OSError, match=r".") as failure:
                read_bytes(path, MIB)
            assert failure.value.strerror
    assert time.monotonic() - began < 60  # a FIFO without a writer would be waited for


def test_a_file_has_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"abcd")
    assert read_bytes(path, 4) == b"abcd"
    with pytest.raises(OSError, match="longer than"):
        read_bytes(path, 3)
    os.truncate(path, 3 << 30)  # sparse
    with pytest.raises(OSError, match="longer than 1 MiB"):
        read_bytes(path, MIB)
    bomb = tmp_path / "x.gz"
    bomb.write_bytes(gzip.compress(bytes(4 * MIB)))
    with pytest.raises(OSError, match="holds more than 1 MiB"):
        read_text(bomb, MIB)


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(b"\xef\xbb\xbfa = 1\r\n")
    assert read_toml(path) == {"a": 1}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a = " + "[" * 100_000, "nest too deeply"),
        ("a = " + "{a=" * 100_000, "nest too deeply"),
        ("a = " + "1" * 5000, "integer of more than 64 bits"),
        ("a = 0x" + "f" * 5000 + "\nb = ]", "Invalid value"),
        (".".join("a" * 50_000) + " = 1", "a key of more than 16 parts"),
        ("[" + ".".join('"a"' * 1) + " . '=b'" * 50_000 + "]", "a key of more than 16 parts"),
        (".".join([r'"\""'] * 20_000) + " = 1", "a key of more than 16 parts"),
        ("a" * 100_000 + " = ]", "Invalid value"),
        ('a = "' + r"\"" * 50_000 + " = ]", "."),
        ("\n\nx = {" + "a." * 50_000 + "a = 1}", r"a key of more than 16 parts \(at line 3\)"),
        ('a = "\x1b"', "Illegal character"),
    ],
)
def test_hostile_toml_is_one_line_at_once(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as failure:
        parse_toml(text)
    assert str(failure.value).isprintable()
    assert len(str(failure.value)) < 300


def test_long_texts_with_dots_are_no_keys() -> None:
    words = "one. two, three: " * 40
    assert parse_toml(f'why = "{words}"\nx = [{"1.5, " * 1000}]\ny.z = 1.25')["why"] == words


def test_what_only_looks_like_a_long_key_is_none() -> None:
    words = "a. b c. " * 40
    assert parse_toml(f"# {words}\nx = '{words}'\ny = [{'1.5, ' * 40}]\n")["y"] == [1.5] * 40


def test_any_value_is_shown_in_short() -> None:
    assert shown("a\x1b") == r"'a\x1b'"
    assert len(shown("a" * 500)) == 80
    for value in (10**5000, [10**5000], {"a": -(10**5000)}):
        assert shown(value) == "an integer of more than 4,300 digits"
