"""Turns a `Record` into a JSON file that people read, such a file back, and says whom it serves."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.errors import ProblemError, RecordError
from autotune.paths import cache_dir
from autotune.records import jsontext, typed
from autotune.records.schema import SCHEMA, Record, RecordedDevice, migrated
from autotune.values.device import Device
from autotune.values.problem import Problem

if TYPE_CHECKING:
    from autotune.code.render import Source

_NAME = re.compile(
    r"(?P<family>\w+?)_f32_(?P<layout>\w\w)_m(?P<m>\d{1,10})_n(?P<n>\d{1,10})_k(?P<k>\d{1,10})"
    r"_beta(?P<beta>[01])_(?P<math>\w+)\.json"
)


@dataclass(frozen=True)
class Filed:
    """A record file, and what its name says of it."""

    path: Path
    family: str
    problem: Problem


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
    path, text = _path_of(record, root), to_json(record)
    try:
        with _locked(path.parent):
            _replace(path, text)
    except OSError as error:
        raise unwritable(path, error) from None
    return path


def offer(
    record: Record,
    *,
    over: Record | None = None,
    template_digest: str | None = None,
    root: Path | None = None,
) -> Record:
    """Store a record unless a better one has been stored meanwhile; several processes may offer at once.

    Times of two sessions are compared only where there is no better way: ``over`` is what the caller found
    stored and measured again beside its own candidates, so the new record replaces it whatever it says.
    Another one, which the caller did not see, stays if it is measured on an equal device with the same state
    of L2, by templates no older than those of the new record, and is not slower.

    Args:
        record: To be stored.
        over: The record that was stored when the caller began, None for none.
        template_digest: Of the family's templates today; those of ``record`` when not given.
        root: Folder of records; `autotune.paths.cache_dir` when not given.

    Returns:
        What is stored now: ``record`` as it reads back, or the one that stayed.

    Raises:
        RecordError: As for `write`, or a later version of this package wrote the stored record.
    """
    path, text = _path_of(record, root), to_json(record)
    today = template_digest or record.template_digest
    try:
        with _locked(path.parent):
            rival = _rival(path)
            if rival is not None and rival != over and _stays(rival, record, today):
                return rival
            _replace(path, text)
    except OSError as error:
        raise unwritable(path, error) from None
    return from_json(text, path)


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
    device: Device | RecordedDevice,
    family: str,
    problem: Problem,
    *,
    root: Path | None = None,
    estimated: bool = False,
) -> Record | None:
    """Look for the record of exactly this device, family and problem; None when there is none.

    A broken file, or one whose content belongs elsewhere, is renamed to ``<name>.bad`` with a warning, and
    counts as missing.

    Raises:
        RecordError: The file is of a newer schema, or cannot be opened.
    """
    path = record_path(device, family, problem, root=root, estimated=estimated)

    def belongs(record: Record) -> Path:
        is_estimated = record.evidence == "estimated"
        return record_path(device, record.family, record.problem, root=root, estimated=is_estimated)

    return _found(path, belongs)


def look_at(file: Filed) -> Record | None:
    """Read a listed file; None when it is gone, or was broken: then it is set aside as `find` does.

    Raises:
        RecordError: The file is of a newer schema, or cannot be opened.
    """

    def belongs(record: Record) -> Path:
        return file.path.with_name(f"{record.family}_{record.problem.key}.json")

    return _found(file.path, belongs)


def _found(path: Path, belongs: Callable[[Record], Path]) -> Record | None:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable(path, error) from None
    try:
        record = _decoded(content, path)
        if belongs(record) != path:
            raise RecordError(f"{path}: its content belongs in {belongs(record)}")
    except typed.NewerSchemaError:
        raise
    except RecordError as error:
        _set_aside(path, content, error)
        return None
    return record


def filed(folder: Path) -> list[Filed]:
    """List the record files of one device's folder by their names, unread; in no certain order."""
    found = []
    with suppress(OSError):
        for name in os.listdir(folder):
            match = _NAME.fullmatch(name)
            if match is None:
                continue
            m, n, k, beta = (int(match[part]) for part in ("m", "n", "k", "beta"))
            with suppress(ProblemError):
                problem = Problem(m, n, k, match["layout"], beta, match["math"])  # type: ignore[arg-type]
                found.append(Filed(folder / name, match["family"], problem))
    return found


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
    if record.launch != source.launch:
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


def set_aside(path: Path) -> Path:
    """Rename a record file to ``<name>.bad``, in place of one of that name; return the new path.

    Raises:
        RecordError: It cannot be renamed.
    """
    bad = path.with_name(f"{path.name}.bad")
    try:
        with _locked(path.parent):
            os.replace(path, bad)
    except OSError as error:
        raise unwritable(path, error) from None
    return bad


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


def _set_aside(path: Path, content: bytes, fault: RecordError) -> None:
    """Rename a broken file to ``<name>.bad`` with a warning, unless another process has replaced it."""
    bad = path.with_name(f"{path.name}.bad")
    try:
        with _locked(path.parent):
            if path.read_bytes() != content:
                return
            os.replace(path, bad)
        done = f"renamed to {bad.name}"
    except OSError as error:
        done = f"not renamed to {bad.name} ({error.strerror})"
    warnings.warn(f"record ignored, {done}: {fault}", stacklevel=4)


def _path_of(record: Record, root: Path | None) -> Path:
    estimated = record.evidence == "estimated"
    return record_path(record.device, record.family, record.problem, root=root, estimated=estimated)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a folder, created if needed, against every other process and thread that changes its records."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # some network file systems have no locks: the last writer wins there
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _replace(path: Path, text: str) -> None:
    temporary = _write_beside(path, text)
    try:
        os.replace(temporary, path)
    except OSError:
        temporary.unlink()
        raise


def _rival(path: Path) -> Record | None:
    """Read what is stored, in a locked folder; a broken file is kept as ``<name>.bad``."""
    try:
        return _decoded(path.read_bytes(), path)
    except FileNotFoundError:
        return None
    except typed.NewerSchemaError:
        raise
    except RecordError:
        os.replace(path, path.with_name(f"{path.name}.bad"))
        return None


def _stays(stored: Record, new: Record, template_digest: str) -> bool:
    if stored.timing is None or new.timing is None or stored.timing.l2 != new.timing.l2:
        return False
    if (stored.family, stored.problem, stored.device) != (new.family, new.problem, new.device):
        return False
    current, offered = (record.template_digest == template_digest for record in (stored, new))
    return current > offered or (current == offered and stored.timing.median_ms <= new.timing.median_ms)
