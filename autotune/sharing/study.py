"""Turns a URL into a storage, and a name in it into one study whose every failure is a `StorageLost`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from autotune.sharing.database import DatabaseTrials, open_database
from autotune.sharing.entry import Entry, Trials
from autotune.sharing.failure import StorageLost, failures, reason, unusable
from autotune.sharing.journal import JournalTrials, journal_path, open_journal

T = TypeVar("T")

RETRY_S = (0.1, 0.4, 1.0)  # pauses before a failed operation is tried again; then the storage counts as lost


class Storage:
    """Where studies are kept.

    Args:
        url: ``postgresql://...``, ``sqlite:///file``, ``journal:file``, or a file ending in .log or .journal.

    Attributes:
        url: Without its password.
        optuna: The `optuna.storages.BaseStorage`.

    Raises:
        UsageError: It is of another kind, cannot be reached, or lacks its Python package.
    """

    def __init__(self, url: str) -> None:
        path = journal_path(url)
        self._trials: type[DatabaseTrials] | type[JournalTrials]
        with _quiet():
            if path is None:
                self.url, self.optuna = open_database(url)
                self._trials = DatabaseTrials
            else:
                self.url, self.optuna = f"journal:{path}", open_journal(path)
                self._trials = JournalTrials

    def study(self, name: str, distributions: Mapping[str, Any]) -> SharedStudy:
        """Open a study, which is created if it is not there.

        Raises:
            UsageError: The storage does not answer.
        """
        try:
            with _quiet():
                study_id, created = retried(lambda: self._found(name))
        except StorageLost as error:
            raise unusable(self.url, str(error)) from None
        return SharedStudy(self, name, study_id, created, self._trials(self.optuna, study_id, distributions))

    def _found(self, name: str) -> tuple[int, bool]:
        """Create a study, or find it: its id, and whether it was created."""
        from optuna.exceptions import DuplicatedStudyError
        from optuna.study import StudyDirection

        try:
            return self.optuna.create_new_study([StudyDirection.MINIMIZE], name), True
        except DuplicatedStudyError:
            return self.optuna.get_study_id_from_name(name), False


class SharedStudy:
    """One study; its methods may be called from several threads, and raise `StorageLost`.

    Attributes:
        name: Of the study.
        url: Of its storage, without a password.
        created: Whether this process created it.
    """

    def __init__(self, storage: Storage, name: str, study_id: int, created: bool, trials: Trials) -> None:
        self.name = name
        self.url = storage.url
        self.created = created
        self._storage = storage.optuna
        self._id = study_id
        self._trials = trials

    def optuna(self) -> Any:
        """Return the `optuna.Study`, for Optuna's own tools."""
        import optuna

        return optuna.load_study(study_name=self.name, storage=self._storage)

    def set_attribute(self, key: str, value: Any) -> None:
        """Set an attribute of the study to a JSON value."""
        retried(lambda: self._storage.set_study_user_attr(self._id, key, value))

    def attributes(self) -> dict[str, Any]:
        """Read the attributes of the study."""
        return dict(retried(lambda: self._storage.get_study_user_attrs(self._id)))

    def create(self, parameters: Mapping[str, Any], attributes: Mapping[str, Any]) -> None:
        """Add a RUNNING trial; it may be there twice when an answer was lost on the way."""
        retried(lambda: self._trials.create(parameters, attributes))

    def changes(self) -> list[Entry]:
        """List by number what is new or ended since the last call."""
        return retried(self._trials.changes)

    def finish(
        self, trial_id: int, value: float | None, parameters: Mapping[str, Any], attributes: Mapping[str, Any]
    ) -> bool:
        """End a RUNNING trial: False when it had ended already, and not with these attributes."""
        return retried(lambda: self._trials.finish(trial_id, value, parameters, attributes))


def retried(call: Callable[[], T]) -> T:
    """Call until it succeeds.

    Raises:
        StorageLost: It failed too often.
    """
    expected = failures()
    for pause in (*RETRY_S, None):
        try:
            return call()
        except KeyError:
            raise StorageLost("the study was deleted") from None
        except expected as error:
            if pause is None:
                raise StorageLost(reason(error)) from None
            time.sleep(pause)
    raise AssertionError("the last attempt returned or raised")


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Optuna from telling what it does."""
    import optuna

    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(verbosity)
