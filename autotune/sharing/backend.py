"""A trial as every kind of storage returns it, and how a storage's failures are reported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from optuna.exceptions import StorageInternalError
from sqlalchemy.exc import SQLAlchemyError

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
    return StorageInternalError, SQLAlchemyError, OSError, RuntimeError, ValueError
