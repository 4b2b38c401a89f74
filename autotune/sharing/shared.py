"""One process's part in a shared search: it proposes points that no other process has or had."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from autotune.errors import REJECTION_KINDS
from autotune.outside import printable
from autotune.search import WAIT, Search
from autotune.sharing.backend import Entry, StorageLost
from autotune.sharing.pulse import Pulse
from autotune.sharing.study import SharedStudy

if TYPE_CHECKING:
    from autotune.space.space import Legal

WHY_CHARACTERS = 500
REJECTED = (*REJECTION_KINDS, "rejected")  # the last by a caller that names no kind


@dataclass(frozen=True)
class Told:
    """The outcome of a point.

    Attributes:
        index: In the legal list.
        outcome: "measured", or a rejection kind.
        median_ms: Milliseconds; None unless measured.
        why: Reason of a rejection.
    """

    index: int
    outcome: str
    median_ms: float | None
    why: str = ""


class SharedSearch:
    """Proposes points that no other process has, and learns from all outcomes; call it from one thread.

    Args:
        study: The study that all processes share.
        legal: The points.
        local: A new search over these points, from which proposals come.
        process: Name of this process.
        pulse: Its signs of life.
        say: Called with one line when the storage is lost or back.

    Attributes:
        process: Name of this process in the study.
        asked: Number of points proposed to the caller or taken from it.
        alone: Whether the storage is lost.

    Raises:
        StorageLost: The study cannot be read.
    """

    def __init__(
        self,
        study: SharedStudy,
        legal: Legal,
        local: Search,
        process: str,
        pulse: Pulse,
        say: Callable[[str], None] = warnings.warn,
    ) -> None:
        self.process = process
        self.asked = 0
        self.alone = False
        self._shared = study
        self._legal = legal
        self._local = local
        self._pulse = pulse
        self._say = say
        self._open: dict[int, str] = {}  # RUNNING trials: number to process
        self._wanting: dict[int, set[int]] = {}  # their numbers by point
        self._others: set[int] = set()  # points that other processes have under way
        self._given: dict[int, int | None] = {}  # points the caller has: number of their trial, if any
        self._known: set[int] = set()  # points the caller will tell although others have or had them
        self._finished: set[int] = set()  # points whose outcome the local search knows
        self._outcomes: dict[int, Told] = {}  # as the study has them
        self._unsent: dict[int, tuple[Told, int | None]] = {}  # those it lacks, and the number of their trial
        self._closed = False
        pulse.start()
        try:
            self._refresh()
        except BaseException:
            pulse.stop()
            raise

    def __enter__(self) -> SharedSearch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def best(self) -> tuple[int, float] | None:
        """Index and median_ms of the fastest point of all processes, or None."""
        return self._local.best

    def outcomes(self) -> dict[int, Told]:
        """Return by index the outcomes of all processes that this one knows of."""
        return {index: told for index, (told, _) in self._unsent.items()} | self._outcomes

    def ask(self) -> int | None:
        """Propose a point that no other process has.

        Returns:
            Its index; `WAIT` while others have all that is left; None when every point has an outcome or is
            with the caller.
        """
        index = self._proposed()
        if index is not None and index != WAIT:
            self.asked += 1
        return index

    def take(self, index: int) -> None:
        """Count a point as proposed, because its outcome is known to the caller; `tell` it.

        Raises:
            ValueError: The caller has it already.
        """
        if index in self._given:
            raise ValueError(f"point {index} was proposed before")
        self.asked += 1
        if index in self._others or index in self._finished:
            self._known.add(index)
        else:
            self._local.take(index)
            self._given[index] = None

    def tell(self, index: int, median_ms: float | None, outcome: str = "", why: str = "") -> None:
        """Report the outcome of a point to all processes.

        Args:
            index: As `ask` returned it.
            median_ms: Its time in milliseconds; None where it was rejected.
            outcome: "measured" or a rejection kind; "measured" or "rejected" when not given.
            why: Reason of a rejection.

        Raises:
            ValueError: The point is not with the caller, or the time is not a positive finite number.
        """
        if index in self._known:
            self._known.discard(index)
            return
        if index not in self._given:
            raise ValueError(f"point {index} is not under way: tell each point once, after ask returned it")
        outcome = outcome or ("rejected" if median_ms is None else "measured")
        self._local.tell(index, median_ms, outcome, why)
        self._finished.add(index)
        told = Told(index, outcome, median_ms, why[:WHY_CHARACTERS])
        self._unsent[index] = told, self._given.pop(index)
        try:
            if self._reached():
                self._send()
        except StorageLost as error:
            self._go_alone(error)

    def close(self) -> None:
        """Return points without an outcome, read the last outcomes, and leave the study; once."""
        if self._closed:
            return
        self._closed = True
        self._pulse.stop()
        try:
            if not self.alone:
                self._sync()
                self._send()
                for number in self._given.values():
                    if number is not None:
                        self._leave(number, "abandoned")
                self._pulse.end()
        except StorageLost as error:
            self._go_alone(error)
        if self.alone and self._unsent:
            self._say(f"{len(self._unsent)} outcomes were not stored in {self._shared.url}: it is still lost")

    # ------------------------------------------------------------------------------------------- claiming

    def _proposed(self) -> int | None:
        """Propose points until one is ours; without the storage, a point that no other was seen to have."""
        while self._reached():
            index = None
            try:
                self._refresh()
                index = self._local.ask()
                if index is None:
                    return WAIT if self._others else None
                self._given[index] = None
                self._given[index] = self._claim(index)
            except StorageLost as error:
                self._go_alone(error)
                if index is not None:
                    return index
            else:
                if self._given[index] is not None:
                    return index
                self._yield(index)
        index = self._local.ask()
        if index is not None:
            self._given[index] = None
        return index

    def _claim(self, index: int) -> int | None:
        """Add a trial for a point: return its number if it came first, else None."""
        self._shared.create(self._legal.config(index), {"index": index, "process": self.process})
        self._sync()
        wanting = self._wanting[index]
        first = None if index in self._outcomes else min(wanting, default=None)
        # Where the answer to a creation was lost there are two of ours, and the earlier one counts.
        ours = {number for number in wanting if self._is_ours(number)}
        won = first if first in ours else None
        try:
            for number in ours - {won}:
                self._leave(number, "duplicate")
        except StorageLost as error:  # the claim stands all the same
            self._go_alone(error)
        return won

    def _yield(self, index: int) -> None:
        """Leave a point that we asked for to the process that has it."""
        del self._given[index]
        if index in self._outcomes:
            self._others.add(index)
            self._learn(self._outcomes[index])
        elif self._wanting[index]:
            self._others.add(index)
        else:  # a process that took us for dead ended our trial
            self._local.give_back(index)

    def _free(self, index: int) -> bool:
        """Return whether no other process has or had a point."""
        return index not in self._outcomes and all(map(self._is_ours, self._wanting.get(index, ())))

    def _is_ours(self, number: int) -> bool:
        return self._open[number] == self.process

    def _leave(self, number: int, why: str) -> None:
        self._shared.finish(number, None, {}, {"left": why, "by": self.process})

    def _send(self) -> None:
        """Store the outcomes that the study lacks, unless another process stored one of the same point."""
        for index, (told, number) in list(self._unsent.items()):
            stored = index in self._outcomes
            if not stored and number is not None:
                stored = self._store(told, number)
                if not stored:  # a process that took us for dead ended our trial
                    self._unsent[index] = told, None
                    self._sync()
            if not stored and self._free(index) and (number := self._claim(index)) is not None:
                self._unsent[index] = told, number
                stored = self._store(told, number)
            if stored:
                del self._unsent[index]

    def _store(self, told: Told, number: int) -> bool:
        attributes = {"outcome": told.outcome, **({"why": told.why} if told.why else {})}
        config = self._legal.config(told.index)
        stored = self._shared.finish(number, told.median_ms, config, attributes)
        if stored:
            self._outcomes[told.index] = told
        return stored

    # ------------------------------------------------------------------------------------------- learning

    def _refresh(self) -> None:
        """Read what changed, free the points of dead processes, and store what the study lacks of ours."""
        self._sync()
        dead = self._pulse.dead
        if abandoned := [number for number, process in self._open.items() if process in dead]:
            for number in abandoned:
                self._leave(number, "abandoned")
            self._sync()
        for index, own in list(self._given.items()):
            if own is None and self._free(index):
                self._given[index] = self._claim(index)
        self._send()

    def _sync(self) -> None:
        for entry in self._shared.changes():
            index = entry.attributes.get("index")
            if type(index) is int and 0 <= index < len(self._legal):  # True is an int too, but no index
                self._note(entry, index, str(entry.attributes.get("process")))

    def _note(self, entry: Entry, index: int, process: str) -> None:
        """Record the state of one trial."""
        wanting = self._wanting.setdefault(index, set())
        if entry.running:
            self._pulse.heard(process)
            self._open[entry.number] = process
            wanting.add(entry.number)
            if not (index in self._given or index in self._others or index in self._finished):
                self._local.take(index)
                self._others.add(index)
            return
        self._open.pop(entry.number, None)
        wanting.discard(entry.number)
        if (outcome := _outcome(entry)) is not None:
            why = printable(str(entry.attributes.get("why", "")), WHY_CHARACTERS)
            median_ms = entry.value if outcome == "measured" else None
            told = self._outcomes.setdefault(index, Told(index, outcome, median_ms, why))
            if index not in self._given:
                self._learn(told)
        elif index in self._given and self._given[index] == entry.number:
            self._given[index] = None  # a process that took us for dead ended our trial
        elif index in self._others and not wanting:
            self._others.discard(index)
            self._local.give_back(index)

    def _learn(self, told: Told) -> None:
        """Report the outcome of a point to the local search, once."""
        if told.index in self._finished:
            return
        if told.index in self._others:
            self._others.discard(told.index)
        else:
            self._local.take(told.index)
        self._local.tell(told.index, told.median_ms, told.outcome, told.why)
        self._finished.add(told.index)

    # ------------------------------------------------------------------------------- losing the storage

    def _reached(self) -> bool:
        """Return whether the storage answers; when it is back, bring it up to date first."""
        if self.alone and self._pulse.answers:
            try:
                self._refresh()
                ours = {*self._given.values()}
                for number in list(self._open):
                    if self._is_ours(number) and number not in ours:
                        self._leave(number, "duplicate")
            except StorageLost:
                self._pulse.answers = False
            else:
                self.alone = False
                self._say(f"storage {self._shared.url} is back: the search is shared again")
        return not self.alone

    def _go_alone(self, error: StorageLost) -> None:
        if not self.alone:
            self.alone = True
            self._say(
                f"storage {self._shared.url} is lost ({error}): the search goes on alone, "
                "and stores its outcomes when the storage is back"
            )
        self._pulse.answers = False


def _outcome(entry: Entry) -> str | None:
    """Return the outcome of a trial that has ended, or None where it has none that can be used.

    Whoever can write to the storage may have written anything: a time that is none, an unknown word. The
    point is then measured again.
    """
    if entry.value is not None:
        return "measured" if math.isfinite(entry.value) and entry.value > 0 else None
    if "left" in entry.attributes:  # beside an outcome, where its process died before the trial ended
        return None
    outcome = entry.attributes.get("outcome")
    return outcome if outcome in REJECTED else None
