"""Turns proposals into trials: keeps compilers and the GPU, or its model, busy until the budget is spent."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from autotune import records
from autotune.compiler import Binary, CompilePool
from autotune.device import Device
from autotune.errors import Rejected, SpaceError
from autotune.nvrtc import nvrtc_version
from autotune.problem import Problem
from autotune.progress import Outcome, Progress, Trial, Watcher
from autotune.records.trials import TrialHeader, TrialLog
from autotune.render import Launch, Source, render, template_digest
from autotune.space import Legal, Space

COMPILE_TIMEOUT_S = 30.0
GPU_QUEUE = 3  # binaries that wait for the GPU: it never idles, and proposals stay fresh
TRIAL_TIMEOUT_S = 5.0  # beyond these launches of the slowest kernel worth waiting for
LAUNCHES = 20
SLOWEST_FLOPS = 2e11  # operations per second; a kernel below counts as one that never ends ...
SLOWEST_STEP_S = 1e-7  # ... and so does one that takes longer for each k, however few its outputs
MAX_GRID = 2**31 - 1  # blocks in x
REGISTERS_UNIT = 8  # registers are allocated to threads in eights


def trial_limit(problem: Problem) -> float:
    """Return the seconds after which a candidate counts as one that never ends."""
    return TRIAL_TIMEOUT_S + LAUNCHES * (problem.flops / SLOWEST_FLOPS + problem.k * SLOWEST_STEP_S)


def trial_header(space: Space, problem: Problem, device: Device) -> TrialHeader:
    """Say what the trials of a run belong to."""
    return TrialHeader(
        family=space.family,
        problem=problem,
        device=records.RecordedDevice.of(device),
        space_digest=space.digest,
        template_digest=template_digest(space),
        nvrtc=nvrtc_version(),
    )


class Proposer(Protocol):
    """Where proposals come from; `autotune.search.Search` is one."""

    asked: int  # points proposed so far

    def ask(self) -> int | None:
        """Propose a point that was never proposed before, or None when the list is exhausted."""
        ...

    def tell(self, index: int, median_ms: float | None) -> None:
        """Take what became of a proposed point: its time in ms, None without one."""
        ...


class Judge(Protocol):
    """What gives a binary its outcome; `autotune.gpu.worker.GpuWorker` is one, and documents the methods."""

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
        self, key: int, binary: Binary, launch: Launch, best_ms: float | None, timeout_s: float
    ) -> None:
        """Take one candidate."""
        ...

    def collect(self) -> Sequence[tuple[Any, Outcome]]:
        """Return every outcome that is there."""
        ...


class Pipeline:
    """An asynchronous search: a free compiler gets the next proposal at once, and nothing waits for a batch.

    Attributes:
        trials: What became of each candidate, by its index in the legal list.
    """

    def __init__(
        self,
        space: Space,
        legal: Legal,
        search: Proposer,
        pool: CompilePool,
        gpu: Judge,
        log: TrialLog,
        progress: Progress,
        watch: Watcher,
        device: Device,
    ) -> None:
        self.trials: dict[int, Trial] = {}
        self._space = space
        self._legal = legal
        self._search = search
        self._pool = pool
        self._gpu = gpu
        self._log = log
        self._progress = progress
        self._watch = watch
        self._device = device
        self._under_way: dict[int, Source] = {}
        self._binaries: dict[int, Binary] = {}
        self._first_of: dict[tuple[str, Launch], int] = {}  # machine code and launch: the first to have both
        self._twins: dict[int, list[int]] = {}  # those that wait for the outcome of the same code and launch
        self._compile_s = _Mean()
        self._measure_s = _Mean()

    def run(self) -> None:
        """Search until the budget is spent or the list exhausted; the GPU finishes what it has begun."""
        budget, progress = self._progress.budget, self._progress
        most = min(budget.evaluations or math.inf, len(self._legal))
        started = time.monotonic()
        while True:
            progress.seconds = time.monotonic() - started
            spent = progress.seconds >= budget.seconds
            while not spent and self._search.asked < most and self._wants_more():
                self._propose()
            complete = self._search.asked >= most and not self._pool.pending
            if (spent or complete) and not self._gpu.pending:
                return
            if not spent:
                for index, binary in self._pool.collect():
                    self._compiled(int(str(index)), binary)
            for index, outcome in self._gpu.collect():
                self._measured(index, outcome)
            self._sleep(started + budget.seconds, spent)

    def _wants_more(self) -> bool:
        """Tell whether another candidate should be under way: Little's law over the two stages' times."""
        if self._pool.free <= 0 or self._gpu.pending >= GPU_QUEUE:
            return False
        if not (self._compile_s.count and self._measure_s.count):
            return True
        enough = math.ceil(self._compile_s.value / self._measure_s.value) + 2 + GPU_QUEUE
        return self._pool.pending + self._gpu.pending < enough

    def _sleep(self, end: float, spent: bool) -> None:
        """Wait for an answer, a deadline, or the end of the budget; when it is spent, for the GPU alone."""
        now = time.monotonic()
        ends = [self._gpu.next_deadline, now + 1.0]
        if not spent:
            ends += [self._pool.next_deadline, end]
        soonest = min(each for each in ends if each is not None)
        wait([*self._gpu.waitables, *([] if spent else self._pool.waitables)], max(0.0, soonest - now))

    def _propose(self) -> None:
        index = self._search.ask()
        assert index is not None, "asked no more than the list holds"
        config = self._legal.config(index)
        try:
            source = render(self._space, config, self._progress.problem, self._device)
        except SpaceError as error:  # the template fails on this config; it may render others
            self._log.append({"config": dict(config), "outcome": "compile", "why": str(error)})
            self._search.tell(index, None)
            self._progress.reject(config, Rejected("compile", str(error)))
            self._watch(self._progress)
            return
        self._under_way[index] = source
        self._pool.submit(index, source.text, source.entry, self._device.arch)

    def _compiled(self, index: int, binary: Binary | Rejected) -> None:
        if isinstance(binary, Rejected):
            self._settle(index, None, binary)
            return
        self._compile_s.add(binary.seconds)
        source = self._under_way[index]
        first = self._first_of.setdefault((binary.digest, source.launch), index)
        if first in self.trials:
            self._settle(index, binary, self.trials[first].outcome)
            return
        self._binaries[index] = binary
        if first != index:
            self._twins.setdefault(first, []).append(index)
            return
        unfit = unlaunchable(source, binary, self._device)
        if unfit is not None:
            self._measured(index, unfit)
            return
        best = self._progress.best
        best_ms = None if best is None else best.median_ms
        self._gpu.submit(index, binary, source.launch, best_ms, trial_limit(self._progress.problem))

    def _measured(self, index: int, outcome: Outcome) -> None:
        for each in [index, *self._twins.pop(index, [])]:
            self._settle(each, self._binaries.pop(each), outcome)
        self._measure_s.tick()

    def _settle(self, index: int, binary: Binary | None, outcome: Outcome) -> None:
        """Tell the log, the study and the watcher what became of a candidate."""
        trial = self.trials[index] = Trial(self._under_way.pop(index), binary, outcome)
        self._log.append(trial.line())
        self._search.tell(index, trial.median_ms)
        self._progress.count(trial)
        self._watch(self._progress)


def unlaunchable(source: Source, binary: Binary, device: Device) -> Rejected | None:
    """Say why a compiled kernel cannot start on a device; None when it can."""
    launch = source.launch
    threads, blocks = math.prod(launch.block), math.prod(launch.grid)
    if not (
        1 <= threads <= device.max_threads_per_block and 1 <= blocks <= MAX_GRID and launch.shared_bytes >= 0
    ):
        return Rejected(
            "constraint",
            f"a launch of {blocks} blocks of {threads} threads with {launch.shared_bytes} bytes of dynamic "
            f"shared memory: give 1 to {MAX_GRID} blocks of 1 to {device.max_threads_per_block} threads",
        )
    registers = -(-binary.registers // REGISTERS_UNIT) * REGISTERS_UNIT * threads
    if registers > device.registers_per_sm:
        return Rejected(
            "constraint",
            f"{threads} threads of {binary.registers} registers need {registers} registers; "
            f"an SM has {device.registers_per_sm}",
        )
    shared = launch.shared_bytes + binary.shared_bytes
    if shared > device.shared_per_block:
        return Rejected(
            "constraint",
            f"a block needs {shared} bytes of shared memory; {device.name} allows {device.shared_per_block}",
        )
    return None


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
