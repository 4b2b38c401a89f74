"""What finds the outcomes of compiled candidates: the GPUs of a search, or a model in their place."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

from autotune.code.compiler import Binary
from autotune.errors import DeviceError, MachineFault, ToolchainError
from autotune.tuning.trial import LogEntry, Outcome
from autotune.values.measurement import Launch

ROOM = 2  # candidates in the hands of a judge, one of them in the log as started


class Judge(Protocol):
    """What finds the outcome of a binary; `autotune.measure.worker.GpuWorker` is one, documented there."""

    @property
    def pending(self) -> int:
        """Candidates submitted and not yet collected."""
        ...

    @property
    def waitables(self) -> Sequence[Connection]:
        """Connections of which one becomes readable when `collect` has something to do."""
        ...

    @property
    def next_deadline(self) -> float | None:
        """Time (`time.monotonic`) at which `collect` has something to do in any case, or None."""
        ...

    def submit(
        self,
        key: int,
        binary: Binary,
        launch: Launch,
        best_ms: float | None,
        timeout_s: float,
        entry: LogEntry,
        /,
    ) -> None:
        """Take one candidate; whoever launches it writes its log entry, before and after."""
        ...

    def collect(self) -> Sequence[tuple[Any, Outcome | MachineFault]]:
        """Return every outcome that is there."""
        ...


class Judges:
    """The judges of a search: the least busy one is next, and the others take over from one that fails.

    Args:
        judges: One or more, such as a worker for each GPU.

    Attributes:
        working: Positions of those that did not fail.
    """

    def __init__(self, judges: Sequence[Judge]) -> None:
        self._judges = list(judges)
        self._given = [0] * len(self._judges)
        self._at: dict[int, int] = {}  # candidate: who has it
        self.working = list(range(len(self._judges)))

    @property
    def pending(self) -> int:
        """Candidates submitted and not yet collected."""
        return sum(judge.pending for judge in self._now)

    @property
    def waitables(self) -> list[Connection]:
        """Connections of which one becomes readable when `collect` has something to do."""
        return [connection for judge in self._now for connection in judge.waitables]

    @property
    def deadlines(self) -> list[float]:
        """Times (`time.monotonic`) at which `collect` has something to do in any case."""
        return [deadline for judge in self._now if (deadline := judge.next_deadline) is not None]

    def free(self) -> int | None:
        """Return the position of the least busy judge; None if it has no room either."""
        least = min(self.working, key=lambda place: (self._judges[place].pending, self._given[place]))
        return least if self._judges[least].pending < ROOM else None

    def submit(self, place: int, key: int, *candidate: Any) -> None:
        """Hand a candidate to the judge at a position."""
        self._given[place] += 1
        self._at[key] = place
        self._judges[place].submit(key, *candidate)

    def collect(self, notes: list[str]) -> tuple[list[tuple[int, Outcome | MachineFault]], list[int]]:
        """Return every outcome that is there, and the candidates that judges had which failed now.

        Args:
            notes: Gets a line for each judge that failed.

        Raises:
            DeviceError: The last one failed.
            ToolchainError: Likewise.
        """
        outcomes: list[tuple[int, Outcome | MachineFault]] = []
        lost: list[int] = []
        for place in list(self.working):
            try:
                outcomes += self._judges[place].collect()
            except (DeviceError, ToolchainError) as error:
                if len(self.working) == 1:
                    raise
                self.working.remove(place)
                notes.append(f"going on without GPU {place} of {len(self._judges)}: {error}")
                lost += [key for key, at in self._at.items() if at == place]
        for key in (*lost, *(key for key, _ in outcomes)):
            self._at.pop(key, None)
        return outcomes, lost

    @property
    def _now(self) -> list[Judge]:
        return [self._judges[place] for place in self.working]
