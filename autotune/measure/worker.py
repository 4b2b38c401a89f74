"""A GPU used by a child process that is killed and replaced when a kernel hangs it or breaks its context.

Only the kernel at fault is lost: it is rejected, and the others are measured by the next process.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn, Protocol

from autotune.code.awake import AwakeClock
from autotune.code.compiler import Binary
from autotune.code.process import Child, ChildDied
from autotune.errors import AutotuneError, DeviceError, MachineFault, Rejected
from autotune.measure.comparison import KERNEL, Baseline, BenchFacts, Compared, Comparison, Library
from autotune.values.device import Device
from autotune.values.measurement import Finals, GpuFacts, Launch, Sustained, Timing, Trial, Tried
from autotune.values.problem import Problem

START_SECONDS = 120.0
SETUP_SECONDS = 300.0  # of a complete float64 reference, on a GPU whose float64 is slow
IN_PIPE = 2  # the next candidate is there when the GPU becomes free
MAX_LOST_STARTS = 3
LAST_WORDS_SECONDS = 1.0  # to find that a killed child said no more
RETRY_SECONDS = 1.0  # before a start that follows a failed one, longer each time
# Libraries compute in FP32 proper, whatever the user's environment asks for ...
ENVIRONMENT = {"NVIDIA_TF32_OVERRIDE": "0", "CUBLAS_EMULATE_SINGLE_PRECISION": "0"}
TF32_ENVIRONMENT = {**ENVIRONMENT, "NVIDIA_TF32_OVERRIDE": None}  # ... or each handle says what in


class LogEntry(Protocol):
    """A candidate's place in the log, written by the process that launches it."""

    def started(self) -> None:
        """Write that the candidate is launched next."""
        ...

    def ended(self, outcome: Tried) -> None:
        """Write its outcome, or why it has none."""
        ...


@dataclass(frozen=True)
class _Job:
    key: Hashable
    cubin: bytes
    launch: Launch
    best_ms: float | None
    timeout_s: float
    log_entry: LogEntry | None
    again: bool = False  # the machine failed once with it


@dataclass(frozen=True)
class _Blame:
    """Who was running when a child ended or failed, as it named them; None for its own work."""

    who: Any
    why: Rejected | MachineFault


class GpuWorker:
    """One GPU that checks and times candidates, finalists and libraries in a child. Use as a context manager.

    The child starts at once; nothing waits for it before `identity`, `ready` or `collect`. A candidate with
    which the machine fails, because something kills or stops the child or takes the GPU's memory, is tried
    once more in another child.

    Args:
        ordinal: CUDA ordinal of the GPU.
        problem: What every candidate computes; None where nothing but comparisons is asked for.
        seed: Of inputs and samples; random when None.
        cold: Time candidates with operands that are not in the L2 cache.
        tf32: Let cuBLAS compute in TF32 where a comparison asks for it.
        service: What the child runs.

    Attributes:
        seed: The seed in use.
        busy_s: Seconds that children spent on candidates.
    """

    def __init__(
        self,
        ordinal: int,
        problem: Problem | None,
        *,
        seed: int | None = None,
        cold: bool = False,
        tf32: bool = False,
        service: str = "autotune.measure.service:serve",
    ) -> None:
        self.seed = secrets.randbits(48) if seed is None else seed
        self._service = service
        self._environment = TF32_ENVIRONMENT if tf32 else ENVIRONMENT
        self._arguments: tuple[Any, ...] = (ordinal, problem, self.seed, cold)
        self._queue: deque[_Job] = deque()
        self._piped: deque[_Job] = deque()  # in the child's pipe; the first may have been started
        self._finished: list[tuple[Hashable, Tried]] = []
        self._lost_starts = 0
        self._was_ready = False
        self._given_up: AutotuneError | None = None
        self._identity: tuple[Device, str] | None = None
        self.busy_s = 0.0
        self._facts: GpuFacts | None = None
        self._bench_facts: BenchFacts | None = None
        self._clock = AwakeClock()
        self._deadline: float | None = None  # of that clock
        self._child: Child
        self._start()

    # ------------------------------------------------------------------------------------------ trials

    def identity(self, timeout: float = START_SECONDS) -> tuple[Device, str]:
        """Wait until the worker knows its GPU, long before it is ready: the device, and the driver's version.

        Raises:
            DeviceError: There is no usable GPU, or the worker does not start.
            ToolchainError: CuPy or NVRTC is missing or does not serve this GPU.
        """
        self._wait_until(lambda: self._identity is not None, timeout)
        assert self._identity is not None
        return self._identity

    @property
    def known(self) -> bool:
        """Whether the GPU was identified, even if the worker cannot measure."""
        return self._identity is not None

    def ready(self, timeout: float = START_SECONDS) -> GpuFacts:
        """Wait until the worker can measure.

        Raises:
            DeviceError: There is no usable GPU, it lacks memory, or the worker does not start.
            ToolchainError: CuPy or NVRTC is missing or does not serve this GPU.
        """
        self._wait_until(lambda: self._facts is not None, timeout)
        assert self._facts is not None
        return self._facts

    @property
    def waitables(self) -> list[Connection]:
        """Connections of which one becomes readable when `collect` has something to do."""
        return [self._child.connection]

    @property
    def next_deadline(self) -> float | None:
        """Time (`time.monotonic`) at which the start or the running candidate is over its limit, or None."""
        return None if self._deadline is None else self._clock.monotonic(self._deadline)

    @property
    def pending(self) -> int:
        """Candidates submitted and not yet collected."""
        return len(self._queue) + len(self._piped) + len(self._finished)

    def submit(
        self,
        key: Hashable,
        binary: Binary,
        launch: Launch,
        best_ms: float | None,
        timeout_s: float,
        entry: LogEntry | None = None,
    ) -> None:
        """Have one candidate verified and timed; `collect` returns the outcome with its ``key``.

        Args:
            key: Stays in this process.
            binary: The compiled candidate.
            launch: How to start it.
            best_ms: Fastest median so far: a clearly slower candidate is timed briefly.
            timeout_s: Limit from when the worker begins with it.
            entry: Written by the child, which gets a copy; by this process if the child cannot.
        """
        self._queue.append(_Job(key, binary.cubin, launch, best_ms, timeout_s, entry))
        self._advance()

    def collect(self, timeout: float = 0) -> list[tuple[Any, Tried]]:
        """Return every outcome that is there; replace a worker that died or ran out of time.

        A `MachineFault` is one that the machine failed with twice.

        Args:
            timeout: Seconds to wait for the first.

        Raises:
            DeviceError: The worker cannot be started again.
            ToolchainError: Likewise.
        """
        end = time.monotonic() + timeout
        while True:
            self._advance()
            remaining = end - time.monotonic()
            if self._finished or not self.pending or remaining <= 0:
                finished, self._finished = self._finished, []
                return finished
            self._wait(remaining)

    def turn_to(self, problem: Problem) -> None:
        """Have the worker measure candidates of another problem from now on; wait for `ready` again.

        What is pending is forgotten.
        """
        ordinal, before, *others = self._arguments
        self._arguments = (ordinal, problem, *others)
        idle = not self._piped
        self._lost_starts, self._given_up = 0, None
        self._forget()
        if idle and problem == before and self._child.alive():
            return
        if idle and self._facts is not None:
            self._facts = None
            with contextlib.suppress(ChildDied):
                self._child.send(("problem", problem))
                self._deadline = self._clock.now() + START_SECONDS
                return
        self._restart()

    def close(self) -> None:
        """Kill the worker and forget what was not collected."""
        self._child.kill()
        self._forget()

    def __enter__(self) -> GpuWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------ contests

    def finals(self, entries: Sequence[tuple[Hashable, Binary, Launch]], timeout_s: float) -> Finals:
        """Check finalists in full on new inputs, then time them and cuBLAS in turns.

        One that kills the worker, or is silent for ``timeout_s`` seconds, is rejected and the rest repeated.

        Raises:
            ValueError: Candidates are pending.
            DeviceError: The worker fails without a finalist's fault.
        """
        lost: dict[Any, Trial] = {}  # by position, and cuBLAS by its name
        while True:
            left = {
                number: (binary.cubin, launch)
                for number, (_, binary, launch) in enumerate(entries)
                if number not in lost
            }
            answer = self._answer("finals", left, "cublas" not in lost, timeout_s=timeout_s) if left else None
            if isinstance(answer, _Blame):
                assert isinstance(answer.why, Rejected)
                lost[answer.who] = answer.why
                continue
            finals: Finals = answer or Finals({}, None, None)
            outcomes = {**lost, **finals.outcomes}
            return replace(finals, outcomes={key: outcomes[n] for n, (key, *_) in enumerate(entries)})

    def sustained(
        self, binary: Binary, launch: Launch, timing: Timing, seconds: float, timeout_s: float
    ) -> Sustained | Rejected:
        """Run a finalist that was timed back to back for some seconds, of which the second half counts.

        Returns:
            What was seen; its rejection, if it kills the worker or is silent for ``timeout_s`` seconds.

        Raises:
            ValueError: Candidates are pending.
            DeviceError: The worker fails without its fault.
        """
        candidate = binary.cubin, launch
        answer = self._answer("sustained", candidate, timing, seconds, timeout_s=timeout_s)
        if isinstance(answer, _Blame):
            assert isinstance(answer.why, Rejected)
            return answer.why
        found: Sustained = answer
        return found

    def compare(self, comparison: Comparison) -> Compared:
        """Check a kernel and the libraries in full on the same operands, then time them in turns.

        Whoever kills the worker, or is silent for too long, is rejected: the kernel's fault ends the
        comparison, without a library at fault it is repeated.

        Raises:
            ValueError: Candidates are pending.
            DeviceError: The operands do not fit, or the worker fails without anybody's fault.
            ToolchainError: The worker cannot be started again.
        """
        lost: dict[Library, Baseline | Rejected] = {}
        while True:
            left = tuple(name for name in comparison.libraries if name not in lost)
            asked = replace(comparison, libraries=left)
            answer = self._answer("comparison", asked, timeout_s=comparison.timeout_s)
            if not isinstance(answer, _Blame):
                compared: Compared = answer
                return replace(compared, libraries={**lost, **compared.libraries})
            assert isinstance(answer.why, Rejected)
            if answer.who == KERNEL:
                return Compared(answer.why, lost)
            lost[answer.who] = answer.why

    def bench_facts(self) -> BenchFacts:
        """Return the versions of the libraries, and the speed of a copy, measured once.

        Raises:
            DeviceError: There is no usable GPU, or the worker does not start.
            ToolchainError: CuPy or NVRTC is missing or does not serve this GPU.
        """
        if self._bench_facts is None:
            self._bench_facts = self._answer("facts", timeout_s=SETUP_SECONDS)
        return self._bench_facts

    def _answer(self, kind: str, *about: Any, timeout_s: float) -> Any:
        """Have the child do what it does in steps; if it fails, start a new one.

        Returns:
            Its answer, or a `_Blame` with the rejection of whoever ran last.

        Raises:
            ValueError: Candidates are pending.
            DeviceError: The child refuses, or it or the machine fails again and again.
        """
        if self.pending:
            raise ValueError(f"{self.pending} candidates are pending: collect them first")
        failed = 0
        while True:
            self.ready()
            answer = self._steps((kind, *about), timeout_s)
            if not isinstance(answer, _Blame):
                return answer
            self._restart()
            machine = isinstance(answer.why, MachineFault)
            if answer.who is not None and not machine:
                return answer
            failed += 1
            if failed >= MAX_LOST_STARTS:
                when = f"{failed} times, which is no kernel's fault" if machine else "before a kernel ran"
                raise DeviceError(f"the GPU worker failed {when}: {answer.why.why}")

    def _steps(self, request: tuple[Any, ...], timeout_s: float) -> Any:
        """Send a request and follow its steps to the answer."""
        who: Any = None
        try:
            self._child.send(request)
            while True:
                limit = SETUP_SECONDS if who is None else timeout_s
                if not self._heard(limit):
                    why = f"no sign of life for {limit:g} s"
                    paused = self._child.paused()
                    return _Blame(who, MachineFault(f"{why}: paused") if paused else Rejected("timeout", why))
                kind, told = self._child.receive()
                if kind == "step":
                    who, self._lost_starts = told, 0
                elif kind == "fault":
                    return _Blame(who, told)
                elif kind == "answer":
                    return told
                else:
                    raise told
        except ChildDied as death:
            return _Blame(who, _cause(death))

    def _heard(self, seconds: float) -> bool:
        """Wait for the next message, by the clock that pauses do not advance."""
        deadline = self._clock.now() + seconds
        while not self._child.poll(self._clock.left(deadline)):
            if self._clock.now() >= deadline:
                return False
        return True

    # ------------------------------------------------------------------------------------------ the child

    def _wait_until(self, known: Callable[[], bool], timeout: float) -> None:
        end = self._clock.now() + timeout
        while not known():
            self._advance()
            remaining = end - self._clock.now()
            if not known() and remaining <= 0:
                raise DeviceError(f"the GPU worker is not ready after {timeout:g} s")
            if not known():
                self._wait(remaining)

    def _wait(self, seconds: float) -> None:
        """Wait for a message, but not beyond the deadline."""
        if self._deadline is not None:
            seconds = min(seconds, self._clock.left(self._deadline))
        wait(self.waitables, max(0.0, seconds))

    def _start(self) -> None:
        self._facts = None
        self._child = Child(self._service, *self._arguments, env=self._environment)
        self._deadline = self._clock.now() + START_SECONDS

    def _restart(self) -> None:
        self._child.kill()
        self._start()

    def _forget(self) -> None:
        self._queue.clear()
        self._piped.clear()
        self._finished.clear()

    def _advance(self) -> None:
        """Take every message that is there, enforce the deadline, and keep the pipe filled."""
        if self._given_up is not None:
            raise self._given_up
        while self._child.poll():
            try:
                message = self._child.receive()
            except ChildDied as death:
                self._lose(_cause(death))
                continue
            self._take(*message)
        if self._deadline is not None and self._clock.now() >= self._deadline:
            self._expire()
        self._fill_pipe()

    def _expire(self) -> None:
        """End a child that is over its limit; blame the candidate that ran, unless it was done after all.

        Nor is it to blame where something stopped the child for a while.
        """
        late, child = (self._piped[0] if self._piped else None), self._child
        limit = START_SECONDS if self._facts is None or late is None else late.timeout_s
        paused = child.paused()
        child.stop()
        with contextlib.suppress(ChildDied):
            while self._child is child and child.poll(LAST_WORDS_SECONDS):
                self._take(*child.receive())
        if self._child is not child:
            return
        if late is None or (self._piped and self._piped[0] is late):
            why = f"no result after {limit:g} s"
            self._lose(MachineFault(f"{why}: paused") if paused else Rejected("timeout", why))
        else:
            self._replace()

    def _take(self, kind: str, *rest: Any) -> None:
        """Act on one message of the child."""
        if kind == "identified":
            self._identity = rest[0], rest[1]
        elif kind == "ready":
            self._facts, self._deadline, self._was_ready = rest[0], None, True
            self._identity = rest[0].device, rest[0].driver
        elif kind == "failed":
            self._retry(rest[0])
        elif kind == "started":
            self._deadline = self._clock.now() + self._piped[0].timeout_s
        else:
            outcome, usable, seconds = rest
            self.busy_s += seconds
            self._deadline, self._lost_starts = None, 0
            self._settle(self._piped.popleft(), outcome)
            if not usable:
                self._replace()

    def _settle(self, job: _Job, outcome: Tried) -> None:
        """Take the outcome of a candidate, or put it behind the others where the machine failed first."""
        if isinstance(outcome, MachineFault) and not job.again:
            self._queue.append(replace(job, again=True))
        else:
            self._finished.append((job.key, outcome))

    def _lose(self, cause: Rejected | MachineFault) -> None:
        """Blame the candidate that was running, if one was, and start a new child for the others."""
        if self._facts is not None and self._deadline is not None:
            job = self._piped.popleft()
            if job.log_entry is not None:
                job.log_entry.ended(cause)
            self._settle(job, cause)
        else:
            self._lost_starts += 1
            if self._lost_starts >= MAX_LOST_STARTS:
                tries = f"{self._lost_starts} times before it could measure"
                self._give_up(DeviceError(f"the GPU worker failed {tries}: {cause.why}"))
        self._replace()

    def _retry(self, error: AutotuneError) -> None:
        """Raise the error of a failed start, unless a worker was ready before: then start again.

        The GPU works, but what the killed process held may not be free yet.
        """
        self._lost_starts += 1
        self._child.kill()
        if not self._was_ready or self._lost_starts >= MAX_LOST_STARTS:
            self._give_up(error)
        time.sleep(RETRY_SECONDS * self._lost_starts)
        self._replace()

    def _give_up(self, error: AutotuneError) -> NoReturn:
        """Raise what ends this worker, now and in every later call, until it turns to another problem."""
        self._child.kill()
        self._given_up = error
        raise error

    def _replace(self) -> None:
        """Start a new child; what lay in the old one's pipe goes back to the front of the queue."""
        self._queue.extendleft(reversed(self._piped))
        self._piped.clear()
        self._restart()

    def _fill_pipe(self) -> None:
        while self._facts is not None and self._queue and len(self._piped) < IN_PIPE:
            job = self._queue[0]
            try:
                self._child.connection.send(("trial", job.log_entry, job.cubin, job.launch, job.best_ms))
            except OSError:  # it died: the next `_advance` reads what it said before, and how it ended
                return
            self._piped.append(self._queue.popleft())


def _cause(death: ChildDied) -> Rejected | MachineFault:
    why = f"the GPU worker died: {death.summary}"
    return MachineFault(why) if death.outside else Rejected("crash", why)
