"""Turns the header of our trials into a JSON object that travels in the files of others, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autotune.errors import RecordError, UsageError
from autotune.records import typed
from autotune.records.trials import TrialHeader


def plain_header(header: TrialHeader) -> Any:
    """Write a header as JSON values."""
    return typed.plain(header)


def header_of(value: Any, path: Path) -> TrialHeader | None:
    """Read a header; None where there is none.

    Raises:
        UsageError: It is broken.
    """
    if value is None:
        return None
    try:
        return typed.build(TrialHeader, value, f"{path}, autotune")
    except RecordError as error:
        raise UsageError(f"{error}: leave it out, or convert the trials again") from None
