"""Optuna studies in a journal file, which processes on several hosts may append to.

A trial is one line with all its parameters, appended under a lock that works on network file systems too; the
order of the lines is the order of the trials. A process that is killed may leave its lock, which is removed
after 5 s, and the beginning of a line, which the next process that gets the lock cuts off.
"""

from __future__ import annotations

import os
import random
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState, create_trial

from autotune.sharing.backend import Entry, reason, unusable
from autotune.sharing.url import StorageUrl

START = b'{"op_code"'  # of every journal
BLOCK = 4096
STALE_S = 5.0  # age at which a lock is stale: it is held only during one write
PAUSE_S = 0.001, 0.05  # longest pause between two attempts to get the lock: the first, and later ones


def journal_path(url: str) -> Path | None:
    """Return the journal file that a URL names, or None when it names no journal."""
    if url.startswith("journal:"):
        return Path(os.path.expanduser(url.removeprefix("journal:").removeprefix("//")))
    if "://" not in url and url.endswith((".log", ".journal")):
        return Path(os.path.expanduser(url))
    return None


def open_journal(path: Path, url: StorageUrl) -> Any:
    """Open a journal, which is created if it does not exist.

    Returns:
        An `optuna.storages.JournalStorage`.

    Raises:
        UsageError: The file is something else, damaged, or cannot be written.
    """
    try:
        with path.open("ab+") as file:
            file.seek(0)
            if file.read(len(START)) not in (b"", START):
                raise unusable(url, "the file is no journal of Optuna")
        return JournalStorage(JournalFileBackend(str(path), lock_obj=Lock(path)))
    except OSError as error:
        raise unusable(url, error.strerror or reason(error, url)) from None
    except (ValueError, KeyError) as error:
        raise unusable(url, f"the file is damaged ({error})") from None


class Lock:
    """The lock of a journal: a symbolic link beside it, the same as that of Optuna's own lock.

    A lock older than `STALE_S` belongs to a dead process and is removed. Acquiring the lock also makes sure
    that the journal is still the file that was opened and ends in a whole line.

    Args:
        path: The journal, which exists.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._there = path.stat()
        self._link = f"{path}.lock"
        self._own: _Link | None = None

    def acquire(self) -> bool:
        """Wait for the lock.

        Raises:
            OSError: The journal was removed or replaced, or its folder cannot be written.
        """
        seen: _Link | None = None
        since, pause = 0.0, PAUSE_S[0]
        while not self._linked():
            found = _link(self._link)
            if found != seen:
                seen, since = found, time.monotonic()
            elif found is not None and time.monotonic() - since > STALE_S:
                self._take_away(found)
            time.sleep(random.uniform(0, pause))
            pause = min(2 * pause, PAUSE_S[1])
        try:
            mend(self._path, self._there)
        except BaseException:
            self.release()
            raise
        return True

    def release(self) -> None:
        """Remove the lock, unless another process has removed it as stale."""
        if self._own is not None and _link(self._link) == self._own:
            with suppress(FileNotFoundError):
                os.unlink(self._link)
        self._own = None

    def _linked(self) -> bool:
        try:
            os.symlink(self._path, self._link)
        except FileExistsError:
            return False
        self._own = _link(self._link)
        return True

    def _take_away(self, stale: _Link) -> None:
        """Remove a stale lock, but not the lock of a process that got it meanwhile."""
        aside = f"{self._link}.{secrets.token_hex(4)}"
        with suppress(FileNotFoundError):  # another process may remove it too
            os.rename(self._link, aside)
            if _link(aside) == stale:
                os.unlink(aside)
            else:  # another process removed the stale lock, and this one is held
                os.rename(aside, self._link)


_Link = tuple[int, int]


def _link(path: str) -> _Link | None:
    """Return what identifies a link, also when it is renamed: inode and time; None if there is none."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def mend(path: Path, there: os.stat_result) -> None:
    """Cut off a last line that has no newline.

    Raises:
        OSError: The file was removed, or replaced by another.
    """
    with path.open("r+b") as file:
        if not os.path.samestat(os.fstat(file.fileno()), there):
            raise FileNotFoundError(f"{path} was replaced by another file")
        end = size = file.seek(0, os.SEEK_END)
        step = 1  # usually the last byte is a newline
        while end:
            begin = max(0, end - step)
            file.seek(begin)
            newline = file.read(end - begin).rfind(b"\n")
            if newline >= 0:
                end = begin + newline + 1
                break
            end, step = begin, BLOCK
        if end < size:
            file.truncate(end)


class JournalTrials:
    """The trials of one study in a journal.

    Args:
        storage: As `open_journal` returns it.
        study_id: The study's id in the storage.
        distributions: Distribution of each parameter.
    """

    def __init__(self, storage: Any, study_id: int, distributions: Mapping[str, Any]) -> None:
        self._storage = storage
        self._study_id = study_id
        self._distributions = dict(distributions)
        self._read = 0
        self._running: list[int] = []  # numbers

    def create(self, parameters: Mapping[str, Any], attributes: Mapping[str, Any]) -> None:
        """Add a RUNNING trial with its parameters."""
        trial = create_trial(
            state=TrialState.RUNNING,
            params=dict(parameters),
            distributions=self._distributions,
            user_attrs=dict(attributes),
        )
        self._storage.create_new_trial(self._study_id, trial)

    def changes(self) -> list[Entry]:
        """Return the trials that are new or have ended since the last call, by number."""
        trials = self._storage.get_all_trials(self._study_id, deepcopy=False)
        looked_at = [*(trials[number] for number in self._running), *trials[self._read :]]
        self._running = [each.number for each in looked_at if not each.state.is_finished()]
        changed = [each for each in looked_at if each.number >= self._read or each.state.is_finished()]
        self._read = len(trials)
        return [
            Entry(each.number, not each.state.is_finished(), each.value, each.user_attrs) for each in changed
        ]

    def finish(
        self, number: int, value: float | None, parameters: Mapping[str, Any], attributes: Mapping[str, Any]
    ) -> bool:
        """End a RUNNING trial, its state last; False when it had ended before in another way."""
        trial_id = self._storage.get_trial_id_from_study_id_trial_number(self._study_id, number)
        state, values = (TrialState.FAIL, None) if value is None else (TrialState.COMPLETE, [value])
        try:
            for key, attribute in attributes.items():
                self._storage.set_trial_user_attr(trial_id, key, attribute)
            self._storage.set_trial_state_values(trial_id, state, values)
        except UpdateFinishedTrialError:
            trial = self._storage.get_trial(trial_id)
            left = "left" in trial.user_attrs  # by another process, after the outcome was written
            same = trial.state == state and attributes.items() <= trial.user_attrs.items()
            return bool(same and left == ("left" in attributes))
        return True
