"""Turns proposals into trials: keeps compilers and GPUs, or their model, busy until the budget is spent."""

from __future__ import annotations

import heapq
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from autotune.code.compiler import Binary, CompilePool
from autotune.code.render import Source
from autotune.errors import DeviceError, Rejected, SpaceError, ToolchainError
from autotune.records.trials import TrialLog
from autotune.search import WAIT
from autotune.search.candidates import Candidates
from autotune.tuning.interrupt import Interrupts
from autotune.tuning.limits import trial_limit, unlaunchable
from autotune.tuning.progress import Progress, Watcher
from autotune.tuning.trial import Built, LogEntry, Outcome, Trial
from autotune.values.measurement import Launch

GPU_QUEUE = 3  # binaries that wait for a GPU: it never idles, and proposals stay fresh
COMPILE_QUEUE = 2  # texts that wait for a compiler: it does not wait for the next proposal and its rendering
GPU_ROOM = 2  # of them in the hands of its worker, and in the log as started
KEPT = 16  # fastest candidates whose text and machine code are kept; those of the others are forgotten
ASK_AGAIN_S = 0.25  # while others measure all that is left
LOOK_S = 0.2  # how long an interrupt waits at most


class Proposer(Protocol):
    """Where proposals come from; `autotune.search.Search` is one, with the documentation."""

    @property
    def asked(self) -> int:
        """Candidates proposed or taken so far."""
        ...

    def ask(self) -> int | None:
        """Propose a candidate that was never proposed before; `WAIT` if there may be one later; else None."""
        ...

    def take(self, number: int, /) -> None:
        """Count a candidate as proposed, because its outcome is known already."""
        ...

    def tell(self, number: int, median_ms: float | None, outcome: str, why: str, /) -> None:
        """Learn the outcome of a proposed candidate."""
        ...


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

    def collect(self) -> Sequence[tuple[Any, Outcome]]:
        """Return every outcome that is there."""
        ...


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
        trials: What became of each candidate, by its number, those of earlier runs included.
        working: Positions of the judges that did not fail.
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
        self._judges = list(judges)  # they write to the logs themselves
        self.working = list(range(len(self._judges)))
        self._given = [0] * len(self._judges)
        self._at: dict[int, int] = {}  # candidates in the hands of a judge
        self._logs = logs
        self._progress = progress
        self._watch = watch
        self._device = candidates.device
        self._under_way: dict[int, Source] = {}
        self._built: dict[int, Built] = {}  # compiled, and without an outcome
        self._ready: deque[int] = deque()  # built, and not yet given to a judge
        self._first_of: dict[str, int] = {}  # code: the first candidate to have it
        self._twins: dict[int, list[int]] = {}  # those that wait for the outcome of the same code
        self._kept: dict[int, Built] = {}  # of the fastest
        self._compile_s = _Mean()
        self._measure_s = _Mean()
        self._ask_again = 0.0
        self._exhausted = False

    def recall(self, trials: Mapping[int, Trial]) -> None:
        """Take what became of candidates in an earlier run; they are not proposed again.

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
        """Search until the budget is spent or the list exhausted; the GPUs finish what they have begun."""
        progress, budget = self._progress, self._progress.budget
        most = min(budget.evaluations or math.inf, len(self._candidates))
        started = time.monotonic()
        for log in self._logs:
            log.open()  # judges write there
        with Interrupts() as interrupts:
            while True:
                interrupts.check()
                progress.seconds = time.monotonic() - started
                spent = progress.seconds >= budget.seconds or progress.stale >= (budget.patience or math.inf)
                if spent:
                    self._ready.clear()
                else:
                    for index, binary in self._pool.collect():
                        self._compiled(int(str(index)), binary)
                for gpu in list(self.working):
                    for index, outcome in self._collected(gpu):
                        self._measured(index, outcome)
                self._feed()
                complete = (self._search.asked >= most or self._exhausted) and not self._pool.pending
                if (spent or complete) and not self._ready and not self._on_gpu:
                    return
                if not spent and self._search.asked < most and self._wants_more():
                    self._propose()
                else:
                    self._sleep(started + budget.seconds, spent)

    def fastest(self) -> list[int]:
        """List candidates with a time or an estimate, best first, one of each code."""
        timed = ((index, trial) for index, trial in self.trials.items() if trial.cost < math.inf)
        ranked = sorted((trial.cost, trial.same_as is not None, index) for index, trial in timed)
        first: dict[str, int] = {}
        for _, _, index in ranked:
            first.setdefault(self.trials[index].code or f"unknown code of {index}", index)
        return list(first.values())

    def build(self, indices: Iterable[int]) -> dict[int, Built]:
        """Return candidates with text and machine code, compiling those that are not kept.

        One that no longer compiles is left out.
        """
        wanted = list(indices)
        missing = [index for index in wanted if index not in self._kept]
        if missing:
            self._pool.drop()
            sources = {index: self._candidates.source(index) for index in missing}
            for index, source in sources.items():
                self._pool.submit(index, source.text, source.entry, self._device.arch)
            while self._pool.pending:
                for key, binary in self._pool.collect(LOOK_S):
                    if isinstance(binary, Binary):
                        self._kept[int(str(key))] = Built(sources[int(str(key))], binary)
        return {index: self._kept[index] for index in wanted if index in self._kept}

    @property
    def _on_gpu(self) -> int:
        return sum(self._judges[gpu].pending for gpu in self.working)

    def _wants_more(self) -> bool:
        """Tell whether another candidate should be under way: Little's law over the two stages' times."""
        if self._exhausted or time.monotonic() < self._ask_again:
            return False
        queue = GPU_QUEUE * len(self.working)
        behind = len(self._ready) + self._on_gpu
        if self._pool.free <= -COMPILE_QUEUE or behind >= queue:
            return False
        if not (self._compile_s.count and self._measure_s.count):
            return True
        enough = math.ceil(self._compile_s.value / self._measure_s.value) + 2 + queue
        return self._pool.pending + behind < enough

    def _sleep(self, end: float, spent: bool) -> None:
        """Wait for an answer, a deadline, or the end of the budget; when it is spent, for the GPUs alone."""
        now = time.monotonic()
        judges = [self._judges[gpu] for gpu in self.working]
        ends = [now + LOOK_S, *(judge.next_deadline for judge in judges)]
        if not spent:
            ends += [self._pool.next_deadline, end]
        soonest = min(each for each in ends if each is not None)
        waitables = [each for judge in judges for each in judge.waitables]
        wait([*waitables, *([] if spent else self._pool.waitables)], max(0.0, soonest - now))

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

    def _compiled(self, index: int, binary: Binary | Rejected) -> None:
        source = self._under_way.pop(index)
        if isinstance(binary, Rejected):
            self._settle(index, Trial.of(source, None, binary))
            return
        self._compile_s.add(binary.seconds)
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

    def _collected(self, gpu: int) -> Sequence[tuple[Any, Outcome]]:
        """Return the outcomes of one judge; if it fails, the others take over what it had.

        Raises:
            DeviceError: It was the last.
            ToolchainError: Likewise.
        """
        try:
            return self._judges[gpu].collect()
        except (DeviceError, ToolchainError) as error:
            if len(self.working) == 1:
                raise
            self.working.remove(gpu)
            self._progress.notes.append(f"going on without GPU {gpu} of {len(self._judges)}: {error}")
            had = [index for index, at in self._at.items() if at == gpu]
            self._ready.extendleft(reversed(had))
            return []

    def _feed(self) -> None:
        """Give the judges the candidates that they have room for, the least busy one first."""
        while self._ready:
            gpu = min(self.working, key=lambda n: (self._judges[n].pending, self._given[n]))
            judge = self._judges[gpu]
            if judge.pending >= GPU_ROOM:
                return
            self._given[gpu] += 1
            index = self._ready.popleft()
            self._at[index] = gpu
            built, best, log = self._built[index], self._progress.best, self._log(index)
            pending = Trial.of(built.source, built.binary, Rejected("crash", "no outcome yet"))
            note = LogEntry(log.path, log.run, pending, gpu)
            best_ms = None if best is None else best.median_ms
            limit = trial_limit(self._candidates.problem)
            judge.submit(index, built.binary, built.source.launch, best_ms, limit, note)

    def _measured(self, index: int, outcome: Outcome) -> None:
        """Take what a judge says, which has told the log."""
        self._judged(index, outcome, noted=True)
        self._measure_s.tick()
        self._progress.stages.setdefault("first", time.monotonic() - self._progress.began)

    def _judged(self, index: int, outcome: Outcome, *, noted: bool) -> None:
        """Give an outcome to a candidate and to those with the same code."""
        first = self._built.pop(index)
        self._at.pop(index, None)
        trial = Trial.of(first.source, first.binary, outcome)
        self._settle(index, trial, noted=noted)
        self._keep(index, first)
        for twin in self._twins.pop(index, []):
            built = self._built.pop(twin)
            self._settle(twin, Trial.of(built.source, built.binary, outcome, trial.id))

    def _keep(self, index: int, built: Built) -> None:
        """Keep the text and machine code of the fastest."""
        self._kept[index] = built
        if len(self._kept) > KEPT:
            costs = ((self.trials[each].cost, each) for each in self._kept)
            del self._kept[heapq.nlargest(1, costs)[0][1]]

    def _settle(self, index: int, trial: Trial, *, noted: bool = False) -> None:
        """Tell the log (unless it is noted there), the study and the watcher what became of a candidate."""
        if not noted:
            self._log(index).append(trial.line())
        self.trials[index] = trial
        self._search.tell(index, trial.median_ms, trial.kind, trial.why)
        self._progress.count(trial)
        self._watch(self._progress)

    def _log(self, index: int) -> TrialLog:
        return self._logs[self._candidates.place(index)[0]]


class _Mean:
    """A running mean of values, or of the time between ticks; old values fade."""

    def __init__(self) -> None:
        self.count = 0
        self.value = 0.0
        self._last: float | None = None

    def add(self, value: float) -> None:
        self.count += 1
        self.value += (value - self.value) / min(self.count, 30)

    def tick(self) -> None:
        now = time.monotonic()
        if self._last is not None:
            self.add(now - self._last)
        self._last = now
