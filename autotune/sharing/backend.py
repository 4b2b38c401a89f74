"""What every kind of storage must do with the trials of a study, and how its failures are reported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from autotune.errors import UsageError
from autotune.outside import printable
from autotune.sharing.url import StorageUrl

KINDS = "postgresql://user@host/database, sqlite:///file or journal:file"


@dataclass(frozen=True)
class Entry:
    """A trial as the storage has it.

    Attributes:
        number: Position in the order in which the trials of the study became visible, from 0.
        running: False once it has ended.
        value: Milliseconds; None when it is running or failed.
        attributes: Its user attributes.
    """

    number: int
    running: bool
    value: float | None
    attributes: Mapping[str, Any]


class Trials(Protocol):
    """The trials of one study in one kind of storage; parameters are stored when a trial ends, or before."""

    def create(self, parameters: Mapping[str, Any], attributes: Mapping[str, Any]) -> None:
        """Add a RUNNING trial with its attributes in one step, numbered after all visible trials."""
        ...

    def changes(self) -> list[Entry]:
        """Return the trials that are new or have ended since the last call, by number."""
        ...

    def finish(
        self, number: int, value: float | None, parameters: Mapping[str, Any], attributes: Mapping[str, Any]
    ) -> bool:
        """End a trial that `changes` returned as running: COMPLETE with a value, FAIL without one.

        Returns:
            False when it had ended before, and not with these attributes.
        """
        ...


class StorageLost(Exception):
    """An operation on a storage failed on every attempt; the message says why."""


def unusable(url: StorageUrl, why: str) -> UsageError:
    """Return the error for a storage that cannot be used from the start."""
    why = url.without_secrets(why)
    return UsageError(f"storage {url.shown} cannot be used: {why}; check that it is there, or give {KINDS}")


def reason(error: BaseException, url: StorageUrl) -> str:
    """Return in one line why a storage failed, in the words of its innermost layer, without secrets."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in url.without_secrets(str(error)).splitlines() if line.strip()]
    return printable(lines[0], 300) if lines else type(error).__name__


def failures() -> tuple[type[Exception], ...]:
    """Return the exceptions of a failing storage; ValueError comes from a journal with a broken line."""
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import SQLAlchemyError

    return StorageInternalError, SQLAlchemyError, OSError, RuntimeError, ValueError
