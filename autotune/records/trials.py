"""Turns the trials of a search into lines of a log beside its record, and such a log back into trials."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal

from autotune.errors import RecordError
from autotune.problem import Problem
from autotune.records import jsontext, typed
from autotune.records.files import unwritable
from autotune.records.schema import Digest, Name, RecordedDevice, Text

TRIALS_SCHEMA: Final = 1


@dataclass(frozen=True, kw_only=True)
class TrialHeader:
    """What every trial of a log has in common; a search resumes only from a log with an equal header."""

    schema: Literal[1] = TRIALS_SCHEMA
    family: Name
    problem: Problem
    device: RecordedDevice
    space_digest: Digest
    template_digest: Digest
    nvrtc: Text


def trials_path(record_path: Path) -> Path:
    """Name the log of a record: x.json to x.trials.jsonl."""
    return record_path.with_suffix(".trials.jsonl")


class TrialLog:
    """An append-only file of JSON lines: a `TrialHeader`, then one object for each trial.

    The file is opened at the first `append`. One with the same header is continued; one with another header
    is kept as ``<stem>.old.trials.jsonl``, or ``.old2`` and so on. Several processes may append to one log.

    Args:
        path: As `trials_path` gives it.
        header: What the trials belong to.
    """

    def __init__(self, path: Path, header: TrialHeader) -> None:
        self.path = path
        self.header = header
        self._file: int | None = None

    def __enter__(self) -> TrialLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def append(self, trial: Mapping[str, Any]) -> None:
        """Add one trial, floats rounded to six digits; it has left this process when this returns.

        Raises:
            RecordError: The trial has no JSON form (a NaN, say), or the file cannot be written.
        """
        line = jsontext.compact(typed.plain(trial))
        try:
            if self._file is None:
                self._file = self._opened()
            _append(self._file, line + "\n")
        except OSError as error:
            raise unwritable(self.path, error) from None

    def close(self) -> None:
        """Close the file; a later `append` opens it again."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _opened(self) -> int:
        """Open the file for appending, behind a header equal to this log's."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                with suppress(OSError):  # some network file systems have no locks
                    fcntl.flock(file, fcntl.LOCK_EX)  # two processes that start together write one header
                if _is_still(file, self.path) and self._started(file):
                    with suppress(OSError):
                        fcntl.flock(file, fcntl.LOCK_UN)
                    return file
            except BaseException:
                os.close(file)
                raise
            os.close(file)

    def _started(self, file: int) -> bool:
        """Bring an open, locked file to where trials can follow; False when it was moved out of the way."""
        header = typed.build(TrialHeader, typed.plain(self.header), "header of the trial log")
        size = os.fstat(file).st_size
        if size == 0:
            _append(file, jsontext.compact(typed.plain(header)) + "\n")
            return True
        try:
            same = read_trials(self.path)[0] == header
        except RecordError:
            same = False
        if not same:
            _set_aside(self.path)
            return False
        if os.pread(file, 1, size - 1) != b"\n":  # the last writer died within a line
            _append(file, "\n")
        return True


def read_trials(path: Path) -> tuple[TrialHeader, list[dict[str, Any]]]:
    """Read a log; a line that is not a JSON object is where a writer died, and is skipped.

    Raises:
        RecordError: The file cannot be opened, or its first line is not a header.
    """
    try:
        first, *others = path.read_bytes().split(b"\n")
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}") from None
    value = jsontext.load(first.decode(errors="replace"), f"{path}, line 1")
    typed.refuse_newer(value, TRIALS_SCHEMA, path)
    header = typed.build(TrialHeader, value, f"{path}, line 1")
    trials = (_trial(line) for line in others)
    return header, [trial for trial in trials if trial is not None and trial != value]


def _set_aside(path: Path) -> None:
    """Rename a locked log so that none kept before is lost."""
    stem = path.name.removesuffix(".trials.jsonl")
    for number in count(1):
        kept = path.with_name(f"{stem}.old{number if number > 1 else ''}.trials.jsonl")
        if not kept.exists():
            os.rename(path, kept)
            return


def _trial(line: bytes) -> dict[str, Any] | None:
    try:
        value = jsontext.load(line.decode(), "trial")
    except (RecordError, UnicodeDecodeError):
        return None
    return value if isinstance(value, dict) else None


def _append(file: int, text: str) -> None:
    content = text.encode()
    if os.write(file, content) < len(content):  # one write: lines of several processes do not mix
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _is_still(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False
