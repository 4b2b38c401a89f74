"""The loop of a search: it keeps compilers and GPUs busy with proposals until the budget is spent."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import wait
from typing import Any

from autotune.code.awake import AwakeClock
from autotune.code.compiler import Binary
from autotune.code.pool import CompilePool
from autotune.code.render import Source
from autotune.errors import MachineError, MachineFault, Rejected, SpaceError
from autotune.records.trials import TrialLog
from autotune.search import WAIT
from autotune.search.candidates import Candidates
from autotune.search.contest import Proposer
from autotune.search.demand import Demand
from autotune.tuning.built import Built, Kept
from autotune.tuning.interrupt import Interrupts
from autotune.tuning.judges import Judge, Judges
from autotune.tuning.limits import trial_limit, unlaunchable
from autotune.tuning.progress import Progress, Watcher
from autotune.tuning.trial import LogEntry, Outcome, Trial

GPU_QUEUE = 3  # binaries that wait for a GPU: it never idles, and proposals stay fresh
COMPILE_QUEUE = 2  # texts that wait for a compiler: it does not wait for the next proposal and its rendering
ASK_AGAIN_S = 0.25  # while others measure all that is left
MAX_FAULTS = 5  # of the machine in a row, each after a second try, that end the search
LOOK_S = 0.2  # how long an interrupt waits at most


class Pipeline:
    """An asynchronous search: a free compiler gets the next proposal at once, and nothing waits for a batch.

    Args:
        candidates: What may be proposed.
        search: Where proposals come from.
        pool: Compiles.
        judges: What gives outcomes, such as one worker for each GPU.
        logs: One for each family of the candidates.
        progress: Told of everything.
        watch: Told of progress.

    Attributes:
        trials: Outcomes by the candidates' numbers, those of earlier runs included.
    """

    def __init__(
        self,
        candidates: Candidates,
        search: Proposer,
        pool: CompilePool,
        judges: Sequence[Judge],
        logs: Sequence[TrialLog],
        progress: Progress,
        watch: Watcher,
    ) -> None:
        self.trials: dict[int, Trial] = {}
        self._candidates = candidates
        self._search = search
        self._pool = pool
        self._judges = Judges(judges)  # they write to the logs themselves
        self._logs = logs
        self._progress = progress
        self._watch = watch
        self._device = candidates.device
        self._under_way: dict[int, Source] = {}
        self._built: dict[int, Built] = {}  # compiled, and without an outcome
        self._ready: deque[int] = deque()  # built, and not yet given to a judge
        self._first_of: dict[str, int] = {}  # code: the first candidate to have it
        self._twins: dict[int, list[int]] = {}  # those that wait for the outcome of the same code
        self._kept = Kept(candidates, pool)
        self._demand = Demand()
        self._clock = AwakeClock()
        self._faults: Counter[str] = Counter()  # of the machine, in a row
        self._ask_again = 0.0
        self._exhausted = False

    def recall(self, trials: Mapping[int, Trial]) -> None:
        """Take the outcomes of candidates from an earlier run; they are not proposed again.

        Args:
            trials: By number.
        """
        for index, trial in trials.items():
            self.trials[index] = trial
            if trial.code is not None:
                self._first_of.setdefault(trial.code, index)
            self._search.take(index)
            self._search.tell(index, trial.median_ms, trial.kind, trial.why)
            self._progress.count(trial)
        self._progress.resumed += len(trials)
        self._progress.stale = 0

    def adopt(self, trials: Mapping[int, Trial]) -> None:
        """Take what other processes found, which the search knows already.

        Args:
            trials: By number.
        """
        for index, trial in trials.items():
            self.trials[index] = trial
            self._progress.count(trial)
        self._progress.resumed += len(trials)

    def run(self) -> None:
        """Search until the budget is spent or the list exhausted; the GPUs finish what they have begun.

        Time in which this process was stopped, or the machine suspended, is not of the budget.
        """
        progress, budget = self._progress, self._progress.budget
        most = min(budget.evaluations or math.inf, len(self._candidates))
        budget_s = budget.seconds - progress.reserved_s
        started = time.monotonic()
        self._clock = AwakeClock()
        for log in self._logs:
            log.open()  # judges write there
        with Interrupts() as interrupts:
            while True:
                interrupts.check()
                progress.seconds = self._clock.now()
                progress.paused = time.monotonic() - started - progress.seconds
                spent = progress.seconds >= budget_s or progress.stale >= (budget.patience or math.inf)
                if spent:
                    self._ready.clear()
                else:
                    for index, binary in self._pool.collect():
                        self._compiled(int(str(index)), binary)
                outcomes, lost = self._judges.collect(progress.notes)
                for index, outcome in outcomes:
                    self._measured(index, outcome)
                self._ready.extendleft(reversed(lost))
                self._feed()
                complete = (self._search.asked >= most or self._exhausted) and not self._pool.pending
                if (spent or complete) and not self._ready and not self._judges.pending:
                    return
                if not spent and self._search.asked < most and self._wants_more():
                    self._propose()
                else:
                    self._sleep(budget_s, spent)

    def fastest(self) -> list[int]:
        """List candidates with a time or an estimate, best first, one of each code."""
        timed = ((index, trial) for index, trial in self.trials.items() if trial.cost < math.inf)
        ranked = sorted((trial.cost, trial.same_as is not None, index) for index, trial in timed)
        first: dict[str, int] = {}
        for _, _, index in ranked:
            first.setdefault(self.trials[index].code or f"unknown code of {index}", index)
        return list(first.values())

    def build(self, indices: Iterable[int]) -> dict[int, Built]:
        """Return candidates with text and machine code: see `Kept.build`."""
        return self._kept.build(indices)

    @property
    def working(self) -> int:
        """Position of the first judge that did not fail."""
        return self._judges.working[0]

    def _wants_more(self) -> bool:
        """Return whether another candidate should be under way."""
        if self._exhausted or time.monotonic() < self._ask_again:
            return False
        queue = GPU_QUEUE * len(self._judges.working)
        behind = len(self._ready) + self._judges.pending
        if self._pool.free <= -COMPILE_QUEUE or behind >= queue:
            return False
        return self._pool.pending + behind < self._demand.enough(queue)

    def _sleep(self, budget_s: float, spent: bool) -> None:
        """Wait for an answer, a deadline, or the end of the budget; when it is spent, for the GPUs alone."""
        now, end = time.monotonic(), self._clock.monotonic(budget_s)
        ends = [now + LOOK_S, *self._judges.deadlines]
        connections = self._judges.waitables
        if not spent:
            ends += [end] if self._pool.next_deadline is None else [end, self._pool.next_deadline]
            connections += self._pool.waitables
        wait(connections, max(0.0, min(ends) - now))

    def _propose(self) -> None:
        index = self._timed("propose", self._search.ask)
        if index is None or index == WAIT:
            self._exhausted = index is None
            self._ask_again = time.monotonic() + ASK_AGAIN_S
            return
        config = self._candidates.config(index)
        try:
            source = self._timed("render", lambda: self._candidates.source(index))
        except SpaceError as error:  # the template fails on this config; it may render others
            family = self._candidates.family(index).name
            self._settle(
                index, Trial(f"{family}:{config.id}", family, config, Rejected("compile", str(error)))
            )
            return
        self._under_way[index] = source
        self._pool.submit(index, source.text, source.entry, self._device.arch)

    def _timed(self, stage: str, call: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = call()
        self._progress.add(stage, time.perf_counter() - began)
        return result

    def _compiled(self, index: int, binary: Binary | Rejected | MachineFault) -> None:
        source = self._under_way.pop(index)
        if isinstance(binary, MachineFault):
            self._failed("compiles", binary)
            return
        self._faults["compiles"] = 0
        if isinstance(binary, Rejected):
            self._settle(index, Trial.of(source, None, binary))
            return
        self._demand.compile_s.add(binary.seconds)
        self._progress.add("compile", binary.seconds)
        built = Built(source, binary)
        first = self._first_of.setdefault(built.code, index)
        if first in self.trials:
            known = self.trials[first]
            self._settle(index, Trial.of(source, binary, known.outcome, known.id))
            return
        self._built[index] = built
        if first != index:
            self._twins.setdefault(first, []).append(index)
            return
        unfit = unlaunchable(source, binary, self._device)
        if unfit is not None:
            self._judged(index, unfit, noted=False)
        else:
            self._ready.append(index)

    def _feed(self) -> None:
        """Hand ready candidates to the judges that have room for them."""
        best, limit = self._progress.best, trial_limit(self._candidates.problem)
        best_ms = None if best is None else best.median_ms
        while self._ready and (gpu := self._judges.free()) is not None:
            index = self._ready.popleft()
            built, log = self._built[index], self._log(index)
            pending = Trial.of(built.source, built.binary, Rejected("crash", "no outcome yet"))
            entry = LogEntry(log.path, log.header, log.run, pending, gpu)
            self._judges.submit(gpu, index, built.binary, built.source.launch, best_ms, limit, entry)

    def _failed(self, what: str, fault: MachineFault) -> None:
        """Leave a candidate to a later run, because the machine failed with it.

        Raises:
            MachineError: It did so again and again.
        """
        self._faults[what] += 1
        if self._faults[what] >= MAX_FAULTS:
            raise MachineError(
                f"the machine failed in {MAX_FAULTS} {what} in a row, not the candidates: {fault.why}. "
                "Free memory, or stop what disturbs it, and call again: what was measured is kept"
            )
        left = "left for a later run, because the machine failed"
        if not any(note.startswith(left) for note in self._progress.notes):
            self._progress.notes.append(f"{left}: a candidate or more, the first because {fault.why}")

    def _measured(self, index: int, outcome: Outcome | MachineFault) -> None:
        """Take the outcome from a judge, which has written it into the log."""
        if isinstance(outcome, MachineFault):
            built = self._built.pop(index)
            del self._first_of[built.code]
            twins = self._twins.pop(index, [])
            if twins:  # the first of them goes in its place
                self._first_of[built.code], *self._twins[twins[0]] = twins
                self._ready.append(twins[0])
            self._failed("measurements", outcome)
            return
        self._faults["measurements"] = 0
        self._judged(index, outcome, noted=True)
        self._demand.measured(self._clock.now())
        self._progress.stages.setdefault("first_outcome", time.monotonic() - self._progress.began)

    def _judged(self, index: int, outcome: Outcome, *, noted: bool) -> None:
        """Settle a candidate and those with the same code, for which its outcome counts too."""
        first = self._built.pop(index)
        trial = Trial.of(first.source, first.binary, outcome)
        self._settle(index, trial, noted=noted)
        self._kept.add(index, first, trial.cost)
        for twin in self._twins.pop(index, []):
            built = self._built.pop(twin)
            self._settle(twin, Trial.of(built.source, built.binary, outcome, trial.id))

    def _settle(self, index: int, trial: Trial, *, noted: bool = False) -> None:
        """Report an outcome to the log (unless it stands there), the search and the watcher."""
        if not noted:
            self._log(index).append(trial.line())
        self.trials[index] = trial
        self._search.tell(index, trial.median_ms, trial.kind, trial.why)
        self._progress.count(trial)
        self._watch(self._progress)

    def _log(self, index: int) -> TrialLog:
        return self._logs[self._candidates.place(index)[0]]
