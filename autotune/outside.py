"""What comes from outside the package: files that are read within limits, and text that is safe to print.

`errors` imports this, and every command `errors`, so what takes time to import is imported when it is needed.
"""

from __future__ import annotations

import errno
import io
import os
import re
import stat
from pathlib import Path
from typing import Any, BinaryIO

MIB = 1 << 20
TOML_LIMIT = MIB  # bytes; the largest space file has 40 KB
KEY_PARTS = 16  # of a dotted key of TOML: reading one takes time with the square of its parts
_TOKEN = re.compile(
    r"""(?P<part>"(?:[^"\\]|\\.)*+"?|'[^']*+'?|[\w-]++)|(?P<dot>\.)|[ \t]++|(?P<other>.)"""
)  # of a line; each token is read once, so that no line takes longer than its length


def printable(text: str, most: int | None = None) -> str:
    """Return text with control characters, half characters and the like as escapes, on one line.

    A terminal obeys control characters, so nothing that a file says may reach it unescaped.

    Args:
        text: Any text whatever.
        most: Longest text to return; what is longer is cut in its middle.
    """
    if not text.isprintable():
        text = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
    if most is not None and len(text) > most:
        text = f"{text[: most // 2 - 1]}...{text[len(text) - (most - most // 2 - 2) :]}"
    return text


def shown(value: object, most: int = 80) -> str:
    """Return a value as Python writes it, safe to print and short; integers of any length too."""
    try:
        return printable(repr(value), most)
    except ValueError:  # of an integer, or a list with one: the limit is 4,300 digits
        return "an integer of more than 4,300 digits"


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file to read; a FIFO or device, which may never end, is refused.

    Raises:
        OSError: It cannot be opened, or is no regular file; ``strerror`` says why.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO would wait for a writer
    mode = os.fstat(file).st_mode
    if stat.S_ISREG(mode):
        return open(file, "rb")
    os.close(file)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "it is a pipe, socket or device: give a regular file", str(path))


def read_bytes(path: Path, limit: int) -> bytes:
    """Read a regular file of at most so many bytes.

    Raises:
        OSError: As for `open_regular`; or it is longer.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = b"" if size > limit else file.read(limit + 1)
    if max(size, len(content)) > limit:
        raise OSError(errno.EFBIG, f"it is longer than {_size(limit)}, the most that is read", str(path))
    return content


def read_text(path: Path, limit: int) -> str:
    """Read UTF-8 text of at most so many bytes, with or without a byte-order mark; decompress a name in .gz.

    Raises:
        OSError: As for `read_bytes`; or it is not UTF-8 text, or not a whole gzip file.
    """
    import zlib
    from gzip import GzipFile

    content = read_bytes(path, limit)
    if path.name.endswith(".gz"):
        try:
            content = GzipFile(fileobj=io.BytesIO(content)).read(limit + 1)
        except (EOFError, zlib.error, OSError) as error:
            raise OSError(
                errno.EILSEQ, f"not a whole gzip file ({error}): copy it again", str(path)
            ) from None
        if len(content) > limit:
            raise OSError(errno.EFBIG, f"it holds more than {_size(limit)}, the most that is read", str(path))
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        why = f"not UTF-8 text: {error.reason} at byte {error.start}"
        raise OSError(errno.EILSEQ, why, str(path)) from None


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        OSError: As for `read_text`.
        ValueError: It is not TOML, or nests too deeply; the message is one line.
    """
    return parse_toml(read_text(path, TOML_LIMIT))


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML.

    Raises:
        ValueError: It is not TOML, or nests too deeply; the message is one line.
    """
    import tomllib

    for number, line in enumerate(text.split("\n"), 1):
        if line.count(".") >= KEY_PARTS and _most_parts(line) > KEY_PARTS:
            raise ValueError(f"a key of more than {KEY_PARTS} parts (at line {number})")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(printable(str(error), 200)) from None
    except RecursionError:
        raise ValueError("its lists or tables nest too deeply") from None
    except ValueError:  # of int(), which has a limit of 4,300 digits
        raise ValueError("it holds an integer of more than 64 bits") from None


def _most_parts(line: str) -> int:
    """Count the parts of the longest dotted key of a line."""
    most = parts = 0
    behind_dot = False
    for token in _TOKEN.finditer(line):
        if token["part"]:
            parts = parts + 1 if behind_dot else 1
            most = max(most, parts)
        if token["part"] or token["dot"] or token["other"]:
            behind_dot = bool(token["dot"])
    return most


def _size(count: int) -> str:
    return f"{count // MIB} MiB" if count >= MIB else f"{count // 1024} KiB"
