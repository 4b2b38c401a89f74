"""A storage, opened from its URL, and a study in it, whose every failure is a `StorageLost`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import optuna
from optuna.exceptions import DuplicatedStudyError
from optuna.study import StudyDirection

from autotune.sharing.backend import Entry, StorageLost, failures, reason, unusable
from autotune.sharing.database import DatabaseTrials, open_database
from autotune.sharing.journal import JournalTrials, journal_path, open_journal
from autotune.sharing.url import StorageUrl

T = TypeVar("T")

RETRY_S = (0.1, 0.4, 1.0)  # pauses between attempts at an operation; then the storage counts as lost


class Storage:
    """A database or file that holds studies.

    Args:
        url: ``postgresql://...``, ``sqlite:///file``, ``journal:file``, or a file ending in .log or .journal.

    Attributes:
        url: Its URL, with what may be shown of it.
        optuna: The `optuna.storages.BaseStorage`.

    Raises:
        UsageError: It is of another kind, cannot be reached, or needs a Python package that is missing.
    """

    def __init__(self, url: str) -> None:
        path = journal_path(url)
        self.url = StorageUrl.of(url) if path is None else StorageUrl.of_journal(path)
        self._trials: type[DatabaseTrials] | type[JournalTrials]
        with _quiet():
            if path is None:
                self.optuna, self._trials = open_database(self.url), DatabaseTrials
            else:
                self.optuna, self._trials = open_journal(path, self.url), JournalTrials

    def study(self, name: str, distributions: Mapping[str, Any]) -> SharedStudy:
        """Open a study, which is created if it does not exist.

        Raises:
            UsageError: The storage does not answer.
        """
        try:
            with _quiet():
                study_id, created = retried(lambda: self._found(name), self.url)
        except StorageLost as error:
            raise unusable(self.url, str(error)) from None
        return SharedStudy(self, name, study_id, created, self._trials(self.optuna, study_id, distributions))

    def _found(self, name: str) -> tuple[int, bool]:
        """Create a study, or find it: return its id, and whether it was created."""
        try:
            return self.optuna.create_new_study([StudyDirection.MINIMIZE], name), True
        except DuplicatedStudyError:
            return self.optuna.get_study_id_from_name(name), False


class SharedStudy:
    """One study; its methods may be called from several threads, and raise `StorageLost`.

    Parameters of a trial are stored when it ends, or before.

    Attributes:
        name: Name of the study.
        url: URL of its storage, without secrets.
        created: Whether this process created it.
    """

    def __init__(
        self,
        storage: Storage,
        name: str,
        study_id: int,
        created: bool,
        trials: DatabaseTrials | JournalTrials,
    ) -> None:
        self.name = name
        self.url = storage.url.shown
        self._url = storage.url
        self.created = created
        self._storage = storage.optuna
        self._id = study_id
        self._trials = trials

    def set_attribute(self, key: str, value: Any) -> None:
        """Set an attribute of the study to a JSON value."""
        self._retried(lambda: self._storage.set_study_user_attr(self._id, key, value))

    def attributes(self) -> dict[str, Any]:
        """Return the attributes of the study."""
        return dict(self._retried(lambda: self._storage.get_study_user_attrs(self._id)))

    def create(self, parameters: Mapping[str, Any], attributes: Mapping[str, Any]) -> None:
        """Add a RUNNING trial with its attributes in one step, numbered after all visible trials.

        It may be added twice where the storage's answer was lost.
        """
        self._retried(lambda: self._trials.create(parameters, attributes))

    def changes(self) -> list[Entry]:
        """Return the trials that are new or have ended since the last call, by number."""
        return self._retried(self._trials.changes)

    def finish(
        self, number: int, value: float | None, parameters: Mapping[str, Any], attributes: Mapping[str, Any]
    ) -> bool:
        """End a trial that `changes` returned as running: COMPLETE with a value, FAIL without one.

        Returns:
            False when it had ended before, and not with these attributes.
        """
        return self._retried(lambda: self._trials.finish(number, value, parameters, attributes))

    def _retried(self, call: Callable[[], T]) -> T:
        return retried(call, self._url)


def retried(call: Callable[[], T], url: StorageUrl) -> T:
    """Call until that succeeds, and return the outcome.

    Raises:
        StorageLost: It failed on every attempt.
    """
    expected = failures()
    for pause in (*RETRY_S, None):
        try:
            return call()
        except KeyError:
            raise StorageLost("the study was deleted") from None
        except expected as error:
            why = reason(error, url)
        if pause is None:  # outside of the handler: what it handles may quote a password
            raise StorageLost(why)
        time.sleep(pause)
    raise AssertionError("the last attempt returned or raised")


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Optuna's log messages."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(verbosity)
