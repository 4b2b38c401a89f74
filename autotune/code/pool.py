"""A pool of child processes that compile, of which each can be killed and loses one candidate."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.code.awake import AwakeClock
from autotune.code.compiler import Binary, CompilerStarvedError, compile_text
from autotune.code.nvrtc import nvrtc
from autotune.code.process import Child, ChildDied, requests
from autotune.errors import MachineError, MachineFault, Rejected, ToolchainError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

NICENESS = 5  # compilers yield to the GPU's process and to the one that proposes
MAX_WORKERS = 32  # each holds about 110 MB
OWN_SHARE = 0.8  # of its limit: a compile that had less CPU time is slow because of the machine
MAX_EXTENSIONS = 9  # of the limit of such a compile
_SERVICE = "autotune.code.pool:serve"


def serve(connection: Connection, idle_s: float | None = None) -> None:
    """Answer, in a child, each (text, entry, arch, options) with its outcome, or with a ToolchainError.

    Args:
        connection: To the parent.
        idle_s: End when no request comes for so long; None: when the parent closes its end.
    """
    with contextlib.suppress(OSError):  # without memory, better no compiler than no process that keeps trials
        Path("/proc/self/oom_score_adj").write_text("1000")
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    with contextlib.suppress(ToolchainError):  # told to the first request
        nvrtc()
    for job in requests(connection, idle_s):
        try:
            connection.send(compile_text(*job))
        except CompilerStarvedError as error:
            connection.send(MachineFault(str(error)))
        except ToolchainError as error:
            connection.send(error)


@dataclass(frozen=True)
class _Job:
    key: Hashable
    request: tuple[str, str, str, tuple[str, ...]]
    again: bool = False  # the machine failed once with it


@dataclass
class _Worker:
    child: Child
    job: _Job | None = None
    deadline: float = 0.0  # of the pool's clock
    extensions: int = 0
    cpu_before: float = 0.0
    forgotten: bool = False  # the outcome of the job is not wanted any more


class CompilePool:
    """Compiles in child processes, each of which can be killed and loses only the candidate it works on.

    A child starts when it is first needed and stays warm. Where the machine fails, by killing a child, having
    no memory, or giving it no CPU time, the compile is tried once more in another. Use as a context manager.

    Args:
        workers: Processes at most.
        timeout_s: Limit of one compile, seconds from handing it to a child, whose start is included. Pauses
            do not count, and a child that has little CPU time gets a multiple of it.
        idle_s: Seconds without work after which a child ends; when None, none does.
    """

    def __init__(self, workers: int, timeout_s: float = 60.0, *, idle_s: float | None = None) -> None:
        if workers < 1:
            raise ValueError(f"a compile pool needs at least 1 worker, not {workers}")
        self.workers = workers
        self.timeout_s = timeout_s
        self._idle_s = idle_s
        self._workers: list[_Worker] = []
        self._queue: deque[_Job] = deque()
        self._finished: list[tuple[Hashable, Binary | Rejected | MachineFault]] = []
        self._clock = AwakeClock()
        self._closed = False

    def warm(self) -> None:
        """Start every process now; they load NVRTC while the caller goes on."""
        while len(self._workers) < self.workers and self._started() is not None:
            pass

    def submit(self, key: Hashable, text: str, entry: str, arch: str, options: tuple[str, ...] = ()) -> None:
        """Compile as `compile_text` does; `collect` returns the outcome with its ``key``."""
        if self._closed:
            raise ValueError("the compile pool is closed")
        self._queue.append(_Job(key, (text, entry, arch, options)))
        self._dispatch()

    @property
    def free(self) -> int:
        """Workers without work minus compiles that wait for one; negative when more wait."""
        return self.workers - len(self._busy) - len(self._queue)

    @property
    def pending(self) -> int:
        """Compiles submitted and not yet collected."""
        return sum(not worker.forgotten for worker in self._busy) + len(self._queue) + len(self._finished)

    @property
    def waitables(self) -> list[Connection]:
        """Connections of which one becomes readable when a compile ends."""
        return [worker.child.connection for worker in self._busy]

    @property
    def next_deadline(self) -> float | None:
        """Time (`time.monotonic`) at which the first running compile exceeds its limit; None if none runs."""
        first = min((worker.deadline for worker in self._busy), default=None)
        return None if first is None else self._clock.monotonic(first)

    def collect(self, timeout: float = 0) -> list[tuple[Hashable, Binary | Rejected | MachineFault]]:
        """Return every compile that has ended since the last call; kill those over the limit.

        A `MachineFault` is one that the machine failed with twice.

        Args:
            timeout: Seconds to wait for the first.

        Raises:
            ToolchainError: A child cannot load NVRTC, or NVRTC refuses the request itself.
        """
        from multiprocessing.connection import wait  # 20 ms, which who finds his kernel compiled does not pay

        end = time.monotonic() + timeout
        while True:
            self._reap()
            self._dispatch()
            remaining = end - time.monotonic()
            if self._finished or not self._busy or remaining <= 0:
                finished, self._finished = self._finished, []
                return finished
            limit = self._clock.left(min(worker.deadline for worker in self._busy))
            wait(self.waitables, min(remaining, limit))

    def drop(self) -> None:
        """Forget what was not collected; a compile that runs ends, within its limit, and is ignored."""
        self._queue.clear()
        self._finished.clear()
        for worker in self._busy:
            worker.forgotten = True

    def close(self) -> None:
        """Kill every child and forget what was not collected."""
        self._closed = True
        for worker in self._workers:
            worker.child.kill()
        self._workers, self._finished = [], []
        self._queue.clear()

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _busy(self) -> list[_Worker]:
        return [worker for worker in self._workers if worker.job]

    def _reap(self) -> None:
        """Take the outcomes that are there, and end the workers that died or ran out of time."""
        now = self._clock.now()
        for worker in self._busy:
            job, outcome = worker.job, None
            assert job is not None
            if worker.child.poll():
                try:
                    outcome = worker.child.receive()
                except ChildDied as death:
                    self._workers.remove(worker)
                    why = f"the compiler process died: {death.summary}"
                    left = death.outside or death.how == "exit code 0"  # it had been idle for too long
                    outcome = MachineFault(why) if left else Rejected("compile", why)
            elif now >= worker.deadline:
                outcome = self._overdue(worker)
            if outcome is None:
                continue
            worker.job = None
            if isinstance(outcome, ToolchainError):
                raise outcome
            if worker.forgotten:
                worker.forgotten = False
            elif isinstance(outcome, MachineFault) and not job.again:
                self._queue.append(replace(job, again=True))
            else:
                self._finished.append((job.key, outcome))

    def _overdue(self, worker: _Worker) -> Rejected | MachineFault | None:
        """End a compile that is over its limit; None where it goes on, because it had little CPU time."""
        used, paused = worker.child.cpu_seconds(), worker.child.paused()
        used = self.timeout_s if used is None else used - worker.cpu_before
        starved = paused or used < OWN_SHARE * self.timeout_s
        if starved and not paused and worker.extensions < MAX_EXTENSIONS:
            worker.extensions += 1
            worker.deadline = self._clock.now() + self.timeout_s
            return None
        worker.child.kill()
        self._workers.remove(worker)
        if starved:
            seconds = (1 + worker.extensions) * self.timeout_s
            return MachineFault(f"no binary after {seconds:g} s, of which the compiler ran {used:.1f} s")
        return Rejected("compile_timeout", f"no binary after {self.timeout_s:g} s of compiling")

    def _started(self) -> _Worker | None:
        """Start one more process; None where the system starts no more, and those that run must do.

        Raises:
            MachineError: None runs.
        """
        try:
            worker = _Worker(Child(_SERVICE, self._idle_s))
        except MachineError:
            if not self._workers:
                raise
            return None
        self._workers.append(worker)
        return worker

    def _dispatch(self) -> None:
        """Hand waiting compiles to idle workers, starting processes up to the limit."""
        while self._queue:
            idle = next((worker for worker in self._workers if not worker.job), None)
            if idle is None:
                if len(self._workers) >= self.workers:
                    return
                idle = self._started()
                if idle is None:
                    return
            try:
                idle.child.send(self._queue[0].request)
            except ChildDied:  # it died idle: no fault of this job
                self._workers.remove(idle)
                continue
            idle.job, idle.deadline = self._queue.popleft(), self._clock.now() + self.timeout_s
            idle.extensions, idle.cpu_before = 0, idle.child.cpu_seconds() or 0.0


def default_workers(spare: int = 1) -> int:
    """Choose the number of compile processes: the CPUs this process may use less `spare`, 1 to `MAX_WORKERS`.

    A container's CPU quota counts (cgroup v2 ``cpu.max``, "quota period" in microseconds).
    """
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cpus = min(cpus, int(quota) // int(period))  # "max" is no limit: ValueError
    return max(1, min(cpus - spare, MAX_WORKERS))
