"""Turns a study that several processes share into proposals that no other process has or had."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from autotune.search import WAIT, Search
from autotune.sharing.entry import Entry
from autotune.sharing.failure import StorageLost
from autotune.sharing.pulse import Pulse
from autotune.sharing.study import SharedStudy

if TYPE_CHECKING:
    from autotune.space.space import Legal

WHY_CHARACTERS = 500


@dataclass(frozen=True)
class Told:
    """What became of a point.

    Attributes:
        index: In the legal list.
        process: Who evaluated it, as host:pid:word.
        outcome: "measured", or a rejection kind.
        median_ms: Milliseconds; None unless measured.
        why: Of a rejection.
    """

    index: int
    process: str
    outcome: str
    median_ms: float | None
    why: str = ""


@dataclass(frozen=True)
class Share:
    """What one process contributed to a study; times in milliseconds."""

    process: str
    measured: int
    rejected: int
    best_ms: float | None


@dataclass(frozen=True)
class _Open:
    """A RUNNING trial."""

    trial_id: int
    index: int
    process: str


class SharedSearch:
    """Proposes points that nobody else has, and learns from everybody; call it from one thread.

    Args:
        study: With everybody's trials.
        legal: The points.
        local: Where proposals come from: a search of these points that was not asked yet.
        process: Name of this process.
        pulse: Its signs of life.
        say: Told in one line when the storage goes away or comes back.

    Attributes:
        process: Name of this process in the study.
        asked: Number of points given to the caller, and taken from it.
        alone: Whether the storage is lost at present.

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
        self._open: dict[int, _Open] = {}  # RUNNING trials by number
        self._wanting: dict[int, set[int]] = {}  # their numbers by point
        self._others: set[int] = set()  # points that other processes have under way
        self._given: dict[int, int | None] = {}  # points the caller has: trial id, None if there is none
        self._known: set[int] = set()  # points the caller will tell although others have or had them
        self._finished: set[int] = set()  # points that the local search was told
        self._outcomes: dict[int, Told] = {}  # as the study has them
        self._unsent: dict[int, tuple[Told, int | None]] = {}  # what it does not have yet, with the trial id
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
    def study(self) -> Any:
        """The shared `optuna.Study`, which minimises median_ms."""
        return self._shared.optuna()

    @property
    def best(self) -> tuple[int, float] | None:
        """Index and median_ms of the fastest point of all processes, or None."""
        return self._local.best

    @property
    def complete(self) -> bool:
        """Whether every legal point has an outcome."""
        return len(self.outcomes()) == len(self._legal)

    def outcomes(self) -> dict[int, Told]:
        """List by index what became of the points of all processes, as far as this one has heard."""
        return {index: told for index, (told, _) in self._unsent.items()} | self._outcomes

    def fastest(self, count: int) -> list[Told]:
        """List the fastest points of all processes, the fastest first."""
        outcomes = self.outcomes()
        timed = [(told.median_ms, index) for index, told in outcomes.items() if told.median_ms is not None]
        return [outcomes[index] for _, index in sorted(timed)[:count]]

    def shares(self) -> list[Share]:
        """Say what each process contributed, in the order of their names."""
        by_process: dict[str, list[Told]] = {}
        for told in self.outcomes().values():
            by_process.setdefault(told.process, []).append(told)
        shares = []
        for process, tolds in sorted(by_process.items()):
            times = [told.median_ms for told in tolds if told.median_ms is not None]
            shares.append(Share(process, len(times), len(tolds) - len(times), min(times, default=None)))
        return shares

    def ask(self) -> int | None:
        """Propose a point that nobody else has.

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
        """Report what became of a point, to everybody.

        Args:
            index: As `ask` returned it.
            median_ms: Its time in milliseconds; None where it was rejected.
            outcome: "measured" or a rejection kind; "measured" or "rejected" when not given.
            why: Of a rejection.

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
        told = Told(index, self.process, outcome, median_ms, why[:WHY_CHARACTERS])
        self._unsent[index] = told, self._given.pop(index)
        try:
            if self._reached():
                self._send()
        except StorageLost as error:
            self._go_alone(error)

    def close(self) -> None:
        """Give back what was not told, hear the last of the others, and leave the study; once."""
        if self._closed:
            return
        self._closed = True
        self._pulse.stop()
        try:
            if not self.alone:
                self._sync()
                self._send()
                for trial_id in self._given.values():
                    if trial_id is not None:
                        self._leave(trial_id, "abandoned")
                self._pulse.end()
        except StorageLost as error:
            self._go_alone(error)
        if self.alone and self._unsent:
            self._say(f"{len(self._unsent)} outcomes did not get into {self._shared.url}: it is still lost")

    # ------------------------------------------------------------------------------------------- claiming

    def _proposed(self) -> int | None:
        """Propose points until one is ours; when the storage is lost, whatever nobody was seen to have."""
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
        """Add a trial for a point: its id if it came first, else None."""
        self._shared.create(self._legal.config(index), {"index": index, "process": self.process})
        self._sync()
        wanting = self._wanting[index]
        first = None if index in self._outcomes else min(wanting, default=None)
        # Where the answer to a creation was lost there are two of ours, and the earlier one counts.
        ours = {number: self._open[number].trial_id for number in wanting if self._is_ours(number)}
        won = None if first is None else ours.pop(first, None)
        try:
            for trial_id in ours.values():
                self._leave(trial_id, "duplicate")
        except StorageLost as error:  # what was decided stands
            self._go_alone(error)
        return won

    def _yield(self, index: int) -> None:
        """Leave a point that was asked for to the process that has it."""
        del self._given[index]
        if index in self._outcomes:
            self._others.add(index)
            self._learn(self._outcomes[index])
        elif self._wanting[index]:
            self._others.add(index)
        else:  # one that took us for dead ended our trial
            self._local.give_back(index)

    def _free(self, index: int) -> bool:
        """Tell whether no other process has or had a point."""
        return index not in self._outcomes and all(map(self._is_ours, self._wanting.get(index, ())))

    def _is_ours(self, number: int) -> bool:
        return self._open[number].process == self.process

    def _leave(self, trial_id: int, why: str) -> None:
        self._shared.finish(trial_id, None, {}, {"left": why, "by": self.process})

    def _send(self) -> None:
        """Store the outcomes that the study does not have; where another has the point, his will do."""
        for index, (told, trial_id) in list(self._unsent.items()):
            stored = index in self._outcomes
            if not stored and trial_id is not None:
                stored = self._store(told, trial_id)
                if not stored:  # one that took us for dead ended our trial
                    self._unsent[index] = told, None
                    self._sync()
            if not stored and self._free(index) and (trial_id := self._claim(index)) is not None:
                self._unsent[index] = told, trial_id
                stored = self._store(told, trial_id)
            if stored:
                del self._unsent[index]

    def _store(self, told: Told, trial_id: int) -> bool:
        attributes = {"outcome": told.outcome, **({"why": told.why} if told.why else {})}
        config = self._legal.config(told.index)
        stored = self._shared.finish(trial_id, told.median_ms, config, attributes)
        if stored:
            self._outcomes[told.index] = told
        return stored

    # ------------------------------------------------------------------------------------------- learning

    def _refresh(self) -> None:
        """Read what changed, take back what dead processes had, and set right what is ours."""
        self._sync()
        dead = self._pulse.dead
        if abandoned := [trial for trial in self._open.values() if trial.process in dead]:
            for trial in abandoned:
                self._leave(trial.trial_id, "abandoned")
            self._sync()
        for index, trial_id in list(self._given.items()):
            if trial_id is None and self._free(index):
                self._given[index] = self._claim(index)
        self._send()

    def _sync(self) -> None:
        for entry in self._shared.changes():
            index = entry.attributes.get("index")
            if isinstance(index, int) and 0 <= index < len(self._legal):
                self._note(entry, index, str(entry.attributes.get("process")))

    def _note(self, entry: Entry, index: int, process: str) -> None:
        """Take over the state of one trial."""
        wanting = self._wanting.setdefault(index, set())
        if entry.running:
            self._pulse.heard(process)
            self._open[entry.number] = _Open(entry.trial_id, index, process)
            wanting.add(entry.number)
            if not (index in self._given or index in self._others or index in self._finished):
                self._local.take(index)
                self._others.add(index)
            return
        self._open.pop(entry.number, None)
        wanting.discard(entry.number)
        left = "left" in entry.attributes  # with an outcome too, if its process died between the two
        if entry.value is not None or ("outcome" in entry.attributes and not left):
            outcome = str(entry.attributes.get("outcome", "measured"))
            why = str(entry.attributes.get("why", ""))
            told = self._outcomes.setdefault(index, Told(index, process, outcome, entry.value, why))
            if index not in self._given:
                self._learn(told)
        elif index in self._given and self._given[index] == entry.trial_id:
            self._given[index] = None  # one that took us for dead ended our trial
        elif index in self._others and not wanting:
            self._others.discard(index)
            self._local.give_back(index)

    def _learn(self, told: Told) -> None:
        """Tell the local search what became of a point, once."""
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
        """Tell whether the storage answers; when it is back, bring it up to date first."""
        if self.alone and self._pulse.answers:
            try:
                self._refresh()
                ours = {*self._given.values()}
                for trial in list(self._open.values()):
                    if trial.process == self.process and trial.trial_id not in ours:
                        self._leave(trial.trial_id, "duplicate")
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
