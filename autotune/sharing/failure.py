"""Turns what a storage raised into one line for its user."""

from __future__ import annotations

from autotune.errors import UsageError

KINDS = "postgresql://user@host/database, sqlite:///file or journal:file"


class StorageLost(Exception):
    """A storage did not do what it was asked to, tried again and again; the message says why."""


def unusable(url: str, why: str) -> UsageError:
    """Say that a storage cannot be used from the start."""
    return UsageError(f"storage {url} cannot be used: {why}; check that it is there, or give {KINDS}")


def reason(error: BaseException) -> str:
    """Say in one line why a storage failed, in the words of its innermost layer."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def failures() -> tuple[type[Exception], ...]:
    """List what a storage raises when it fails; ValueError comes from a journal with a broken line."""
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import SQLAlchemyError

    return StorageInternalError, SQLAlchemyError, OSError, RuntimeError, ValueError
