"""Turns a `Record` into a JSON file that people read, such a file back, and says whom it serves."""

from __future__ import annotations

import os
import secrets
import warnings
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.device import Device
from autotune.errors import RecordError
from autotune.paths import cache_dir
from autotune.problem import Problem
from autotune.records import jsontext, typed
from autotune.records.schema import SCHEMA, Record, RecordedDevice, migrated

if TYPE_CHECKING:
    from autotune.render import Source


def now() -> str:
    """The current time as ``created`` has it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def record_path(
    device: Device | RecordedDevice,
    family: str,
    problem: Problem,
    *,
    root: Path | None = None,
    estimated: bool = False,
) -> Path:
    """Name the file of one device, family and problem; ``root`` defaults to `cache_dir`."""
    folder = (root or cache_dir()) / device.slug
    return (folder / "estimated" if estimated else folder) / f"{family}_{problem.key}.json"


def to_json(record: Record) -> str:
    """Write a record as text; milliseconds keep six significant digits.

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
    return typed.build(Record, migrated(value), where)


def write(record: Record, *, root: Path | None = None) -> Path:
    """Store a record at its path; readers see the old file or the new one, never a part.

    Raises:
        RecordError: The record contradicts its own schema, or the folder cannot be written.
    """
    estimated = record.evidence == "estimated"
    text = to_json(record)
    path = record_path(record.device, record.family, record.problem, root=root, estimated=estimated)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = _write_beside(path, text)
        try:
            os.replace(temporary, path)
        except OSError:
            temporary.unlink()
            raise
    except OSError as error:
        raise unwritable(path, error) from None
    return path


def read(path: Path) -> Record:
    """Read one record file.

    Raises:
        RecordError: It cannot be opened, or its content is not a record.
    """
    try:
        return _decoded(path.read_bytes(), path)
    except OSError as error:
        raise _unreadable(path, error) from None


def find(
    device: Device, family: str, problem: Problem, *, root: Path | None = None, estimated: bool = False
) -> Record | None:
    """Look for the record of exactly this device, family and problem; None when there is none.

    A broken file, or one whose content belongs elsewhere, is renamed to ``<name>.bad`` with a warning, and
    counts as missing.

    Raises:
        RecordError: The file is of a newer schema, or cannot be opened.
    """
    path = record_path(device, family, problem, root=root, estimated=estimated)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable(path, error) from None
    try:
        record = _decoded(content, path)
        is_estimated = record.evidence == "estimated"
        belongs = record_path(device, record.family, record.problem, root=root, estimated=is_estimated)
        if belongs != path:
            raise RecordError(f"{path}: its content belongs in {belongs}")
    except typed.NewerSchemaError:
        raise
    except RecordError as error:
        _set_aside(path, error)
        return None
    return record


def serves(record: Record, device: Device, problem: Problem, source: Source) -> str | None:
    """Tell why a record does not serve a problem on a device; None when it does.

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
    if vars(record.launch) != vars(source.launch):
        return (
            f"the record is stale: its kernel was launched as {record.launch} then "
            f"and would be as {source.launch} now"
        )
    return None


def differences(
    record: Record,
    *,
    nvrtc: str | None,
    driver: str | None,
    template_digest: str,
    space_digest: str,
) -> list[str]:
    """List what changed since a record was made without making it stale; None is unknown and not compared."""
    found = [
        f"{name} {then} then, {now_} now"
        for name, then, now_ in (
            ("NVRTC", record.toolchain.nvrtc, nvrtc),
            ("driver", record.toolchain.driver, driver),
        )
        if then is not None and now_ is not None and then != now_
    ]
    if record.template_digest != template_digest:
        found.append("the templates changed (this config renders to the same code)")
    if record.space_digest != space_digest:
        found.append("the search space changed")
    return found


def check_writable(root: Path | None = None) -> None:
    """Make sure that a folder can take records, before a long run starts; it is created if needed.

    Raises:
        RecordError: It cannot, with the remedy.
    """
    folder = root or cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_beside(folder / "writable", "yes").unlink()
    except OSError as error:
        raise unwritable(folder, error) from None


def unwritable(path: Path, error: OSError) -> RecordError:
    """Say in one line that a path cannot be written, and what to do."""
    return RecordError(
        f"{path} cannot be written ({error.strerror}): set AUTOTUNE_CACHE_DIR to a folder that can"
    )


def _decoded(content: bytes, path: Path) -> Record:
    try:
        return from_json(content.decode(), path)
    except UnicodeDecodeError as error:
        raise RecordError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from None


def _unreadable(path: Path, error: OSError) -> RecordError:
    return RecordError(f"{path} cannot be read: {error.strerror}")


def _write_beside(path: Path, text: str) -> Path:
    """Write text to a new hidden file in the folder of ``path``, on disk when this returns."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def _set_aside(path: Path, fault: RecordError) -> None:
    bad = path.with_name(f"{path.name}.bad")
    try:
        os.replace(path, bad)
        done = f"renamed to {bad.name}"
    except OSError as error:
        done = f"not renamed to {bad.name} ({error.strerror})"
    warnings.warn(f"record ignored, {done}: {fault}", stacklevel=3)
