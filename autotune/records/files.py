"""Record files: a `Record` as JSON that people read, such a file read back, and whom a record serves."""

from __future__ import annotations

import errno
import os
import re
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.code.nvrtc import same_build
from autotune.errors import ProblemError, RecordError
from autotune.outside import read_bytes
from autotune.paths import NO_HOME, NOWHERE
from autotune.records.schema import SCHEMA, Record, RecordedDevice, migrated
from autotune.values import jsontext, typed
from autotune.values.device import Device
from autotune.values.problem import Problem

if TYPE_CHECKING:
    from autotune.code.render import Source

MOST_BYTES = 4 << 20  # of one record; a real one has some ten thousand
LEARNED = "learned.json"  # beside the records of a device: what was learned of it
_NAME = re.compile(
    r"(?P<family>\w+?)_f32_(?P<layout>\w\w)_m(?P<m>\d{1,10})_n(?P<n>\d{1,10})_k(?P<k>\d{1,10})"
    r"(?:_batch(?P<batch>\d{1,10}))?_beta(?P<beta>[01])_(?P<math>\w+)\.json"
)


@dataclass(frozen=True)
class Filed:
    """A record file, and what its name says of it."""

    path: Path
    family: str
    problem: Problem


def now() -> str:
    """Return the current time as ``created`` has it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def path_within(
    device: Device | RecordedDevice, family: str, problem: Problem, *, estimated: bool = False
) -> Path:
    """Return the path of one device, family and problem within a folder of records."""
    name = f"{family}_{problem.key}.json"
    return Path(device.slug, "estimated", name) if estimated else Path(device.slug, name)


def to_json(record: Record) -> str:
    """Return a record as text; milliseconds keep six significant digits.

    Raises:
        RecordError: The text could not be read back (a NaN, a value of the wrong type or out of range).
    """
    text = jsontext.dump(typed.plain(record))
    from_json(text, "record to be written")
    return text


def from_json(text: str, where: Path | str) -> Record:
    """Read a record from any text whatever.

    Args:
        text: Content of the file.
        where: Its name, for the error.

    Raises:
        RecordError: One line with the file, the JSON path of the fault and what was expected there.
    """
    value = jsontext.load(text, where)
    typed.refuse_newer(value, SCHEMA, where)
    try:
        value = migrated(value)
    except RecordError as error:
        raise RecordError(f"{where}: {error}") from None
    return typed.build(Record, value, where)


def read(path: Path) -> Record:
    """Read one record file.

    Raises:
        RecordError: It cannot be opened, or its content is not a record.
    """
    content = content_of(path)
    if content is None:
        raise RecordError(f"{path} cannot be read: {os.strerror(errno.ENOENT)}")
    return decoded(content, path)


def content_of(path: Path) -> bytes | None:
    """Return the bytes of a file; None when there is none.

    Raises:
        RecordError: It cannot be read.
    """
    try:
        return read_bytes(path, MOST_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}") from None


def decoded(content: bytes, path: Path) -> Record:
    """Read a record from the bytes of a file.

    Raises:
        RecordError: As for `from_json`.
    """
    try:
        return from_json(content.decode("utf-8-sig"), path)
    except UnicodeDecodeError as error:
        raise RecordError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from None


def filed(folder: Path) -> list[Filed]:
    """List the record files of one device's folder by their names, unread; in no certain order."""
    found = []
    with suppress(OSError):
        for name in os.listdir(folder):
            match = _NAME.fullmatch(name)
            if match is None:
                continue
            m, n, k, beta, batch = (int(match[part] or 1) for part in ("m", "n", "k", "beta", "batch"))
            with suppress(ProblemError):
                problem = Problem(m, n, k, match["layout"], beta, match["math"], batch)  # type: ignore[arg-type]
                found.append(Filed(folder / name, match["family"], problem))
    return found


def serves(record: Record, device: Device, problem: Problem, source: Source) -> str | None:
    """Return why a record does not serve a problem on a device; None when it does.

    Args:
        record: As found.
        device: Where the kernel is to run.
        problem: What is to be computed.
        source: The record's config rendered today.
    """
    for field in fields(problem):
        then, now_ = getattr(record.problem, field.name), getattr(problem, field.name)
        if then != now_:
            return f"the record is for {field.name} {then}, not {now_}"
    if record.device.name != device.name:
        return f"the record is for {record.device.name}, not {device.name}"
    if record.device.compute_capability != device.compute_capability:
        return (
            f"the record is for compute capability {record.device.compute_capability}, "
            f"not {device.compute_capability} ({device.name})"
        )
    if record.device.sm_count != device.sm_count:
        return f"the record is for {record.device.sm_count} SMs, not {device.sm_count} ({device.name})"
    if record.device.mig != device.mig:
        return f"the record is for {record.device.mig or 'a whole GPU'}, not {device.mig or 'a whole GPU'}"
    if record.code_digest != source.code_digest:
        return (
            f"the record is stale: its config rendered to code {record.code_digest[:12]} then "
            f"and renders to {source.code_digest[:12]} now"
        )
    if record.launch != source.launch:
        return (
            f"the record is stale: its kernel was launched as {record.launch} then "
            f"and would be as {source.launch} now"
        )
    return None


def differences(record: Record, *, nvrtc: str | None, driver: str | None) -> list[str]:
    """List what changed since a record was made without making it stale; None is unknown and not compared.

    An older record that says NVRTC "13.0" agrees with every build of it.

    Templates and spaces are not compared: a record serves only where its config renders to the same code.
    """
    return [
        f"{name} {then} then, {now_} now"
        for name, then, now_ in (
            ("NVRTC", record.toolchain.nvrtc, nvrtc),
            ("driver", record.toolchain.driver, driver),
        )
        if then is not None and now_ is not None and not same_build(then, now_)
    ]


def unwritable(path: Path, error: OSError) -> RecordError:
    """Return an error that says in one line that a path cannot be written, and what to do."""
    if path.is_relative_to(NOWHERE):
        return RecordError(NO_HOME)
    return RecordError(
        f"{path} cannot be written ({error.strerror}): set AUTOTUNE_CACHE_DIR to a folder that can"
    )
