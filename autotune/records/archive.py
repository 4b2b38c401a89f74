"""Archives: records in one file that can be handed on, read back as checked records."""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from autotune.errors import RecordError, UsageError
from autotune.outside import open_regular
from autotune.paths import replacing
from autotune.records.files import MOST_BYTES, from_json, path_within, to_json
from autotune.records.schema import Record
from autotune.values import jsontext, typed

MOST_RECORDS = 100_000
MOST_UNPACKED = 1 << 30  # bytes of all that a compressed archive holds
_BROKEN = (
    OSError,
    EOFError,
    tarfile.TarError,
    zlib.error,
    ValueError,
    LookupError,
    OverflowError,
    MemoryError,
)
KINDS = (".tar.gz", ".tgz", ".jsonl")


def write_archive(found: Iterable[Record], path: Path) -> int:
    """Write records into one file; the same records give the same bytes.

    Args:
        found: The records.
        path: ``*.tar.gz`` holds the files as they lie in a folder of records; ``*.jsonl`` one record a line.

    Returns:
        How many were written.

    Raises:
        UsageError: The name says neither.
        RecordError: The file cannot be written.
    """
    kind = _kind(path)
    entries = sorted(
        (path_within(each.device, each.family, each.problem, estimated=_estimated(each)), each)
        for each in found
    )
    try:
        with replacing(path) as file:
            if kind == ".jsonl":
                for _, record in entries:
                    file.write(jsontext.compact(typed.plain(record)).encode() + b"\n")
            else:
                _write_tar(file, [(name.as_posix(), to_json(record).encode()) for name, record in entries])
    except OSError as error:
        raise RecordError(f"{path} cannot be written ({error.strerror})") from None
    return len(entries)


def read_archive(path: Path) -> Iterator[Record | RecordError]:
    """Yield each record of an archive, or what is wrong with it; nothing is unpacked.

    Raises:
        UsageError: The name is of no archive.
        RecordError: The file cannot be read at all, or holds too much.
    """
    kind = _kind(path)
    try:
        with open_regular(path) as file:
            texts = _lines(file) if kind == ".jsonl" else _members(file)
            for number, (where, content) in enumerate(texts):
                if number >= MOST_RECORDS:
                    raise RecordError(f"{path}: more than {MOST_RECORDS} records")
                try:
                    yield _read(content, f"{path}, {where}")
                except RecordError as error:
                    yield error
    except _BROKEN as error:
        raise RecordError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except RecursionError:
        raise RecordError(f"{path} cannot be read: its names are chained too deeply") from None


def _read(content: bytes | None, where: str) -> Record:
    if content is None:
        raise RecordError(f"{where}: larger than {MOST_BYTES} bytes: not a record")
    try:
        return from_json(content.decode("utf-8-sig"), where)
    except UnicodeDecodeError as error:
        raise RecordError(f"{where}: not UTF-8 text: {error.reason} at byte {error.start}") from None


def _write_tar(file: IO[bytes], entries: list[tuple[str, bytes]]) -> None:
    with (
        gzip.GzipFile(fileobj=file, mode="wb", filename="", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for name, content in entries:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def _members(file: IO[bytes]) -> Iterator[tuple[str, bytes | None]]:
    with _Bounded(fileobj=file, mode="rb") as packed:
        with tarfile.open(fileobj=packed, mode="r:") as archive:
            for member in archive:
                if not member.isfile() or not member.name.endswith(".json"):
                    continue
                where = json.dumps(member.name)
                opened = archive.extractfile(member) if member.size <= MOST_BYTES else None
                yield where, opened.read() if opened is not None else None
        while packed.read(MOST_BYTES):  # the checksum is at the end
            pass


class _Bounded(gzip.GzipFile):
    """A compressed file that refuses to be unpacked without end, or in one piece that is no record."""

    def read(self, size: int | None = -1) -> bytes:
        if size is None or not 0 <= size <= MOST_BYTES + (1 << 16):
            raise OSError(errno.EFBIG, f"a part of it is longer than {MOST_BYTES >> 20} MiB")
        self._check(self.tell() + size)
        return super().read(size)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._check(offset)
        return super().seek(offset, whence)

    def _check(self, place: int) -> None:
        if place > MOST_UNPACKED:
            raise OSError(errno.EFBIG, f"it holds more than {MOST_UNPACKED >> 30} GiB")


def _lines(file: IO[bytes]) -> Iterator[tuple[str, bytes | None]]:
    number = 0
    while line := file.readline(MOST_BYTES + 1):
        number += 1
        if len(line) > MOST_BYTES:
            yield f"line {number}", None
            return
        if line.strip():
            yield f"line {number}", line


def _estimated(record: Record) -> bool:
    return record.evidence == "estimated"


def _kind(path: Path) -> str:
    for kind in KINDS:
        if path.name.endswith(kind) and not path.name.endswith(
            ".trials.jsonl"
        ):  # a log, not to be overwritten
            return kind
    raise UsageError(f"{path.name!r} is no archive of records: give a name that ends in {', '.join(KINDS)}")
