"""Compiling CUDA text by NVRTC, in this process or in a pool of child processes that can be killed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import threading
import time
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path

from autotune.code.nvrtc import nvrtc as nvrtc
from autotune.code.nvrtc import nvrtc_version as nvrtc_version
from autotune.code.process import AwakeClock, Child, ChildDied, NoInterpreterError, requests
from autotune.errors import MachineError, MachineFault, Rejected, ToolchainError

OPTIONS = ("-std=c++17", "-default-device", "-Xptxas=-v")
_NO_CACHE = "--no-cache"  # a hit in NVRTC's own cache, in use where there is a driver, leaves the log empty
_CACHE_SINCE = (12, 9)
_SERVICE = "autotune.code.compiler:serve"
MAX_WORKERS = 32  # each holds about 110 MB
ALONE_TIMEOUT_S = 120.0  # of one compile outside a search: the slowest kernels of ours take some seconds
IDLE_S = 20.0  # after which the compiler of such compiles ends
NICENESS = 5  # compilers yield to the GPU's process and to the one that proposes
OWN_SHARE = 0.8  # of its limit: a compile that had less CPU time is slow because of the machine
MAX_EXTENSIONS = 9  # of the limit of such a compile
_OUT_OF_MEMORY = 1  # nvrtcResult
_CANDIDATE_FAULTS = (6, 11)  # nvrtcResult: compilation, internal error
_STARVED = re.compile(r"(?i)out of memory|memory allocation fail")  # as ptxas says it
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_ARCHITECTURE = re.compile(r"^// architecture (sm_\d+[af])\b", re.MULTILINE)
_ERROR = re.compile(r"^(?!.*\b(?:warning|note) #)\S.*?\b(?:error|fatal)\b[ #\w-]*: .*$", re.MULTILINE)


class CompilerStarvedError(ToolchainError):
    """NVRTC had not enough memory."""


@dataclass(frozen=True)
class Binary:
    """One compile: machine code, the PTX it was assembled from, and what it needs.

    Attributes:
        cubin: ELF image for ``arch``.
        ptx: PTX of the same compile.
        arch: Architecture compiled for, such as "sm_90".
        entry: ``extern "C"`` name of the kernel.
        registers: 32-bit registers per thread.
        spill_bytes: Bytes of spill stores plus spill loads in the code of one thread.
        stack_bytes: Stack frame of one thread.
        shared_bytes: Static shared memory of one block.
        log: What the compiler said, without its timings.
        nvrtc: Full version that compiled it, such as "13.0.88".
        options: Everything NVRTC was told.
        seconds: Compile time, wall clock; not part of equality.
    """

    cubin: bytes = field(repr=False)
    ptx: str = field(repr=False)
    arch: str
    entry: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    log: str = field(repr=False)
    nvrtc: str
    options: tuple[str, ...]
    seconds: float = field(compare=False)

    @property
    def digest(self) -> str:
        """SHA-256 of the cubin, hexadecimal."""
        return hashlib.sha256(self.cubin).hexdigest()


def stated_arch(text: str, arch: str) -> str:
    """Return what a text is compiled for on ``arch``: itself, or its variant that the text states."""
    stated = _ARCHITECTURE.search(text)
    return stated[1] if stated and stated[1][:-1] == arch else arch


def compile_text(text: str, entry: str, arch: str, options: tuple[str, ...] = ()) -> Binary | Rejected:
    """Compile CUDA text for one architecture; the same input gives an equal result.

    A text with instructions that one architecture alone has, such as wgmma, says so in a line of its own,
    ``// architecture sm_90a``: for "sm_90" it is then compiled with them.

    Args:
        text: CUDA C++ that declares ``entry`` as ``extern "C" __global__``.
        entry: Name of the kernel.
        arch: Such as "sm_90", see `Nvrtc.resolve`.
        options: Added to `OPTIONS`.

    Returns:
        The binary, or ``Rejected("compile", first error)``.

    Raises:
        ToolchainError: NVRTC is missing or refuses the architecture or an option; the text lacks the entry.
        CompilerStarvedError: NVRTC had not enough memory.
    """
    library = nvrtc()
    target = library.resolve(stated_arch(text, arch))
    uncached = (_NO_CACHE,) if library.version >= _CACHE_SINCE else ()
    given = (f"--gpu-architecture={target}", *OPTIONS, *uncached, *options)
    start = time.perf_counter()
    code, log, cubin, ptx = library.compile(text, given)
    seconds = time.perf_counter() - start
    if code == _OUT_OF_MEMORY or (code and _STARVED.search(_first_error(log))):
        raise CompilerStarvedError(
            f"NVRTC had not enough memory: {_first_error(log) or library.error_name(code)}"
        )
    if code in _CANDIDATE_FAULTS:
        return Rejected("compile", _first_error(log) or library.error_name(code))
    if code:
        raise ToolchainError(f"NVRTC reports {library.error_name(code)} for {' '.join(given)}: {log.strip()}")
    resources = _resources(log, entry)
    if resources is None:
        others = ", ".join(re.findall(r"Compiling entry function '(.+?)' for", log)) or "none"
        raise ToolchainError(
            f'the text has no kernel {entry} (it has {others}): declare it extern "C" __global__'
        )
    return Binary(cubin, ptx, target, entry, *resources, log, library.build_of(ptx), given, seconds)


def compile_bounded(
    text: str, entry: str, arch: str, options: tuple[str, ...] = (), *, timeout_s: float | None = None
) -> Binary | Rejected:
    """Compile as `compile_text` does, in a child that is ended after a time, `ALONE_TIMEOUT_S` if not given.

    A text can keep a compiler busy for ever, and a thread cannot be stopped. Where no child can be started,
    as in a program that embeds Python, this process compiles.

    Raises:
        ToolchainError: As for `compile_text`; or the machine failed twice, such as by killing the compiler.
    """
    with _alone:
        try:
            outcome = _alone.compile(timeout_s or ALONE_TIMEOUT_S, text, entry, arch, options)
        except NoInterpreterError:
            return compile_text(text, entry, arch, options)
    if isinstance(outcome, MachineFault):
        raise ToolchainError(f"kernel {entry} cannot be compiled now: {outcome.why}")
    return outcome


def _resources(log: str, entry: str) -> tuple[int, int, int, int] | None:
    """Read (registers, spill, stack, static shared bytes) of one kernel from the output of ``ptxas -v``.

    The log may hold several kernels, and device functions that were not inlined ("Function properties for",
    without a line of registers) before or after the registers of the kernel.
    """
    kernel = function = ""
    frames: dict[str, tuple[int, int]] = {}
    used: dict[str, tuple[int, int]] = {}
    for line in log.splitlines():
        if match := re.search(r"Compiling entry function '(.+?)' for", line):
            kernel = function = match[1]
        elif match := re.search(r"Function properties for (\S+)", line):
            function = match[1]
        elif match := _FRAME.search(line):
            frames[function] = (int(match[2]) + int(match[3]), int(match[1]))
        elif match := re.search(r"Used (\d+) registers", line):
            shared = re.search(r"(\d+) bytes smem", line)
            used[kernel] = (int(match[1]), int(shared[1]) if shared else 0)
    if entry not in used or entry not in frames:
        return None
    registers, shared_bytes = used[entry]
    spill_bytes, stack_bytes = frames[entry]
    return registers, spill_bytes, stack_bytes, shared_bytes


def _first_error(log: str) -> str:
    """Find the first error line, with the number of errors; "" if the log has none."""
    errors = _ERROR.findall(log)
    if len(errors) < 2:
        return errors[0] if errors else ""
    return f"{errors[0]} ({len(errors)} errors)"


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


class _Alone:
    """The compiler of `compile_bounded`: one child, for one compile at a time, of one process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._pool: CompilePool | None = None
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """Leave the child, and a lock that another thread may have held, to the process that forked."""
        self._lock, self._pool = threading.RLock(), None

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def compile(
        self, timeout_s: float, text: str, entry: str, arch: str, options: tuple[str, ...]
    ) -> Binary | Rejected | MachineFault:
        self._pool = pool = self._pool or CompilePool(1, idle_s=IDLE_S)
        pool.timeout_s = timeout_s
        try:
            pool.submit(entry, text, entry, arch, options)
            while not (ended := pool.collect(1.0)):
                pass
        except BaseException:  # an interrupt too: the next compile must not wait for this one
            pool.close()
            self._pool = None
            raise
        return ended[0][1]


_alone = _Alone()


def default_workers(spare: int = 1) -> int:
    """Choose the number of compile processes: the CPUs this process may use less `spare`, 1 to `MAX_WORKERS`.

    A container's CPU quota counts (cgroup v2 ``cpu.max``, "quota period" in microseconds).
    """
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cpus = min(cpus, int(quota) // int(period))  # "max" is no limit: ValueError
    return max(1, min(cpus - spare, MAX_WORKERS))
