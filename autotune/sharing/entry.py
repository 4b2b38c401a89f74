"""Says what a storage keeps of a trial, and what it must be able to do with the trials of a study."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Entry:
    """What a storage has of a trial.

    Attributes:
        number: Place in the order in which the trials of its study became visible, from 0.
        trial_id: For `Trials.finish`.
        running: False once it has ended.
        value: Milliseconds; None when it is running or failed.
        attributes: Its user attributes.
    """

    number: int
    trial_id: int
    running: bool
    value: float | None
    attributes: Mapping[str, Any]


class Trials(Protocol):
    """The trials of one study in one kind of storage; parameters are stored when a trial ends, or before."""

    def create(self, parameters: Mapping[str, Any], attributes: Mapping[str, Any]) -> None:
        """Add a RUNNING trial with its attributes in one step, behind all that are visible."""
        ...

    def changes(self) -> list[Entry]:
        """List by number what is new or ended since the last call."""
        ...

    def finish(
        self, trial_id: int, value: float | None, parameters: Mapping[str, Any], attributes: Mapping[str, Any]
    ) -> bool:
        """End a RUNNING trial: COMPLETE with a value, FAIL without one.

        Returns:
            False when it had ended already, and not with these attributes.
        """
        ...
