"""`TrialLog`: what happens in a search, line by line in a file beside its record, and how that is read back.

A log holds a `TrialHeader`, then one JSON object a line, of schema 2:

    {"event": "begin", ...}    a run begins: its strategy, seed and budget
    {"event": "started", ...}  a candidate is launched next on a GPU
    {"event": "fault", ...}    the machine failed while a candidate was on a GPU: it has no outcome yet
    {"event": "final", ...}    a finalist was timed in turns with the others
    {"event": "gpu", ...}      which GPU it was, and the seconds of its worker's start
    {"event": "end", ...}      a run ended by itself or was interrupted: nothing was lost
    {"outcome": ..., ...}      what became of a candidate; its last such line counts

The process that launches a candidate writes that it does, and what became of it: if the run is killed, there
is one candidate for each GPU of which only the first is known. Every line says ``run`` (a token of the run),
``at`` (UTC) and ``s`` (seconds since its command began); every line about a candidate says ``id`` (family,
config's name, ``@``, digits of its code's digest) and ``config``. A line that is no JSON object is where a
writer died. Schema 1 had lines of the last kind only, without stamps.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal

from autotune.code.nvrtc import same_build
from autotune.errors import RecordError, UsageError
from autotune.outside import MIB, open_regular, read_bytes
from autotune.records import locks
from autotune.records.files import unwritable
from autotune.records.schema import Digest, RecordedDevice, Text
from autotune.values import jsontext, typed
from autotune.values.limits import Name
from autotune.values.problem import Problem

TRIALS_SCHEMA: Final = 2
_TOKEN = re.compile("[0-9a-f]{8}")
LIMIT: Final = 1024 * MIB  # of a log
HEADER_LIMIT: Final = MIB  # of its first line
Line = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class TrialHeader:
    """What every trial of a log has in common; a search resumes only from a log with an equal header.

    Attributes:
        nvrtc: Version that compiled the candidates.
        driver: Of the GPU; None without one.
        flags: What NVRTC was told, the architecture aside.
        l2: Whether operands were in the L2 cache when a candidate was timed.
    """

    schema: Literal[1, 2] = TRIALS_SCHEMA
    family: Name
    problem: Problem
    device: RecordedDevice
    space_digest: Digest
    template_digest: Digest
    nvrtc: Text
    driver: Text | None = None
    flags: tuple[Text, ...] = ()
    l2: Literal["warm", "cold"] = "warm"

    def continues(self, other: TrialHeader) -> bool:
        """Return whether trials of this header may follow those of another, whose NVRTC may be less exact."""
        return same_build(other.nvrtc, self.nvrtc) and replace(other, nvrtc=self.nvrtc) == self

    def differences(self, other: TrialHeader) -> str:
        """Return in what another header differs from this one; "" when it does not."""
        named = {"space_digest": "search space", "template_digest": "template", "nvrtc": "NVRTC"}
        told = []
        for field in fields(self):
            ours, theirs = getattr(self, field.name), getattr(other, field.name)
            if ours == theirs:
                continue
            name = named.get(field.name, field.name)
            if field.name in ("nvrtc", "driver", "l2", "schema", "family", "problem"):
                told.append(f"{name} {theirs}, not {ours}")
            elif field.name == "device":
                told.append(f"device {theirs.name} with {theirs.sm_count} SMs, not {ours.name}")
            else:
                told.append(f"another {name}")
        return ", ".join(told)


def trials_path(record_path: Path) -> Path:
    """Return the path of the log of a record: x.json to x.trials.jsonl."""
    return record_path.with_suffix(".trials.jsonl")


class Run:
    """One run of a command: its token, and the clock of its lines.

    Args:
        began: When the command began (`time.monotonic`); now when not given.
    """

    def __init__(self, began: float | None = None) -> None:
        self.token = secrets.token_hex(4)
        self.began = time.monotonic() if began is None else began

    def stamp(self) -> dict[str, Any]:
        """Return which run it is, and the time now."""
        at = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        return {"run": self.token, "at": at, "s": round(time.monotonic() - self.began, 3)}


class TrialLog:
    """An append-only file of JSON lines: a `TrialHeader`, then one object for each event or trial.

    The file is opened at the first `append`. One with the same header is continued; one with another header
    is kept as ``<stem>.old.trials.jsonl``, or ``.old2`` and so on. Several processes may append to one log.
    One that is deleted meanwhile begins anew.

    Args:
        path: As `trials_path` gives it.
        header: What the trials belong to.
        run: Stamps the lines.
        anew: Keep even a log with the same header as an old one, and begin another.
    """

    def __init__(
        self, path: Path, header: TrialHeader, run: Run | None = None, *, anew: bool = False
    ) -> None:
        self.path = path
        self.header = header
        self.run = run or Run()
        self._anew = anew
        self._file: int | None = None
        self._torn = False

    def __enter__(self) -> TrialLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            why = "done" if kind is None else "failed" if issubclass(kind, Exception) else "interrupted"
            with suppress(RecordError):  # what matters is on disk
                self.event("end", why=why)
        self.close()

    def append(self, trial: Line) -> None:
        """Add one trial, floats rounded to six digits; it has left this process when this returns.

        Raises:
            RecordError: The trial has no JSON form (a NaN, say), or the file cannot be written.
        """
        line = jsontext.compact({**typed.plain(trial), **self.run.stamp()})
        if self._file is not None and os.fstat(self._file).st_nlink == 0:  # somebody deleted it
            self.close()
        self.open()
        assert self._file is not None
        before, self._torn = "\n" if self._torn else "", True
        try:
            _append(self._file, f"{before}{line}\n")
            self._torn = False
        except OSError as error:
            raise unwritable(self.path, error) from None

    def open(self) -> None:
        """Bring the file to where other processes can `add_line`.

        Raises:
            RecordError: It cannot be written.
        """
        try:
            if self._file is None:
                self._file = self.opened()
        except OSError as error:
            raise unwritable(self.path, error) from None

    def event(self, name: str, **about: object) -> None:
        """Add a line that is no outcome; like `append`."""
        self.append({"event": name, **about})

    def past(self, *, required: bool = False) -> list[dict[str, Any]]:
        """Read the lines that earlier runs left; none where there is no log, or one of another header.

        Args:
            required: A log that cannot be continued is an error.

        Raises:
            UsageError: That is so, with what differs.
        """
        if self._anew:
            return []
        try:
            header, lines = read_log(self.path)
        except RecordError as error:
            if required and self.path.exists():
                raise UsageError(f"cannot resume: {error}") from None
            return []
        if self.header.continues(header):
            return lines
        if required:
            raise UsageError(
                f"cannot resume: {self.path} is of {self.header.differences(header)}; without --resume it is "
                f"kept as {_kept(self.path).name} and a new one begins"
            )
        return []

    def alive(self, lines: Iterable[Line]) -> set[str]:
        """Return the runs, of those that the lines are of, whose processes still go on."""
        tokens = {token for line in lines if _TOKEN.fullmatch(token := str(line.get("run")))}
        return {token for token in tokens if locks.lives(self.path, token)}

    def close(self) -> None:
        """Close the file; a later `append` opens it again."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def opened(self) -> int:
        """Open the file for appending, behind a header equal to this log's; the caller closes it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o666)
            try:
                if not stat.S_ISREG(os.fstat(file).st_mode):
                    raise OSError(errno.EINVAL, "it is a pipe, socket or device")
                locks.take(file, self.path)  # two processes that start together write one header
                if _is_still(file, self.path) and self._started(file):
                    with suppress(OSError):
                        fcntl.flock(file, fcntl.LOCK_UN)
                    locks.live(file, self.run.token)
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
            self._anew = False
            return True
        try:
            same = not self._anew and header.continues(read_header(self.path))
        except RecordError:
            same = False
        if not same:
            os.rename(self.path, _kept(self.path))
            return False
        if os.pread(file, 1, size - 1) != b"\n":  # the last writer died within a line
            _append(file, "\n")
        return True


def add_line(path: Path, header: TrialHeader, run: Run, line: Line) -> None:
    """Add a line to a log that another process of the run has begun; one that was deleted begins anew.

    Raises:
        RecordError: The line has no JSON form, or the file cannot be written.
    """
    text = jsontext.compact({**typed.plain(line), **run.stamp()}) + "\n"
    try:
        try:
            file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK)
        except FileNotFoundError:
            file = TrialLog(path, header, run).opened()
        try:
            _append(file, text)
        finally:
            os.close(file)
    except OSError as error:
        raise unwritable(path, error) from None


def read_log(path: Path) -> tuple[TrialHeader, list[dict[str, Any]]]:
    """Read a log, events included; a line that is not a JSON object is where a writer died, and is skipped.

    Raises:
        RecordError: The file cannot be opened, or its first line is not a header.
    """
    try:
        first, *others = read_bytes(path, LIMIT).split(b"\n")
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}") from None
    header, value = _header(first, path)
    lines = (_object(line) for line in others if line)
    return header, [line for line in lines if line is not None and line != value]


def read_header(path: Path) -> TrialHeader:
    """Read what the trials of a log belong to, and nothing else of it.

    Raises:
        RecordError: As for `read_log`.
    """
    try:
        with open_regular(path) as file:
            return _header(file.readline(HEADER_LIMIT), path)[0]
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}") from None


def _header(line: bytes, path: Path) -> tuple[TrialHeader, object]:
    """Read the first line of a log: the header, and the line as it stands there."""
    value = jsontext.load(line.decode("utf-8-sig", errors="replace"), f"{path}, line 1")
    typed.refuse_newer(value, TRIALS_SCHEMA, path)
    return typed.build(TrialHeader, _migrated(value), f"{path}, line 1"), value


def read_trials(path: Path) -> tuple[TrialHeader, list[dict[str, Any]]]:
    """Read what became of the candidates of a log, in the order in which it became known.

    Raises:
        RecordError: As for `read_log`.
    """
    header, lines = read_log(path)
    return header, [line for line in lines if "event" not in line]


def deaths(logs: Sequence[Iterable[Line]], alive: Collection[str] = ()) -> Counter[str]:
    """Count for each candidate, by id, the runs that died while it was on a GPU: those that have no end.

    Args:
        logs: Lines of the logs that were written together, one log a family.
        alive: Runs that still go on: see `TrialLog.alive`.
    """
    ended: set[str] = set()
    running: set[tuple[str, str]] = set()
    for line in (line for log in logs for line in log):
        run, candidate = str(line.get("run")), str(line.get("id"))
        if line.get("event") == "end":
            ended.add(run)
        elif line.get("event") == "started":
            running.add((run, candidate))
        elif "outcome" in line or line.get("event") == "fault":
            running.discard((run, candidate))
    return Counter(candidate for run, candidate in running if run not in ended and run not in alive)


def _migrated(value: object) -> object:
    """Return a header of schema 1 with what it did not say."""
    if not (isinstance(value, dict) and value.get("schema") == 1):
        return value
    return {"driver": None, "flags": [], "l2": "warm", **value}


def _kept(path: Path) -> Path:
    """Name what a log is renamed to so that none kept before is lost."""
    stem = path.name.removesuffix(".trials.jsonl")
    names = (path.with_name(f"{stem}.old{n if n > 1 else ''}.trials.jsonl") for n in count(1))
    return next(name for name in names if not name.exists())


def _object(line: bytes) -> dict[str, Any] | None:
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
