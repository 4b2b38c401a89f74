"""Locks on files and folders: waited for with a word, and not for ever; and the sign that a run is alive."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

TELL_S = 2.0  # of waiting, before a word is said
WAIT_S = 60.0  # of waiting at most
_PAUSE_S = 0.02
_RUNS = 1 << 40  # byte of a log at which the locks of runs begin: beyond the end of every log
_FLOCK = "hhqqi4x"  # struct flock of fcntl(2) with 64-bit offsets


def take(descriptor: int, path: Path) -> None:
    """Hold an open file or folder against every other process and thread until it is closed.

    Some network file systems have no locks: there the last writer wins.

    Raises:
        OSError: Another process holds it for longer than `WAIT_S`.
    """
    began, told = time.monotonic(), False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            waited = time.monotonic() - began
        except OSError:
            return
        if waited > WAIT_S:
            raise OSError(errno.ETIMEDOUT, f"another process has locked it for {WAIT_S:.0f} s: end that one")
        if waited > TELL_S and not told:
            told = True
            warnings.warn(f"waiting for another process that has locked {path}", stacklevel=4)
        time.sleep(_PAUSE_S)


@contextmanager
def held(path: Path, limit_s: float) -> Iterator[bool]:
    """Hold a file that is there while somebody holds it; yield False if others hold it for too long.

    Where a file system has no locks, everybody holds it.

    Raises:
        OSError: It cannot be created.
    """
    end = time.monotonic() + limit_s
    while (file := _tried(path)) is None and time.monotonic() < end:
        time.sleep(_PAUSE_S)
    try:
        yield file is not None
    finally:
        if file is not None:
            path.unlink(missing_ok=True)
            with suppress(OSError):  # a process that was forked meanwhile has the file open too
                fcntl.flock(file, fcntl.LOCK_UN)
            os.close(file)


def _tried(path: Path) -> int | None:
    """Open and lock a file; None if somebody else holds it, or had it until now."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o666)
    try:
        with suppress(OSError):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
                return None
        if os.path.samestat(os.fstat(file), path.stat()):
            return file
    except FileNotFoundError:  # whoever held it has ended, and a file of this name is another one
        pass
    os.close(file)
    return None


def live(descriptor: int, token: str) -> None:
    """Lock a run's own byte of a log until the file is closed, or the process is gone however it ended."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _request(fcntl.F_WRLCK, _byte(token), 1))
    except OSError:  # no such locks here: then a run without an end counts as dead
        return


def lives(path: Path, token: str | None = None) -> bool:
    """Return whether a run, or any at all, is alive that writes a log."""
    begin, length = (_byte(token), 1) if token is not None else (_RUNS, 1 << 32)
    try:
        file = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        answer = fcntl.fcntl(file, fcntl.F_OFD_GETLK, _request(fcntl.F_WRLCK, begin, length))
    except OSError:
        return False
    finally:
        os.close(file)
    return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)


def _byte(token: str) -> int:
    return _RUNS + int(token, 16)


def _request(kind: int, begin: int, length: int) -> bytes:
    return struct.pack(_FLOCK, kind, os.SEEK_SET, begin, length, 0)
