"""Turns requests on a pipe into verified, timed launches: the process in which candidates may hang or crash.

Messages to the parent: ``("identified", Device, driver)`` and ``("ready", GpuFacts)``, or
``("failed", AutotuneError)``, once; per trial ``("started",)`` and ``("done", Trial, usable, seconds)``,
where usable says whether this process can go on; in the finals ``("step", index)`` before each kernel (None:
setting up; behind the last finalist: cuBLAS), then ``("fault", Rejected)`` or ``("finals", trials, cuBLAS
timing, name of its kernel, version)``.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, partial
from itertools import pairwise
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from autotune.code.process import requests
from autotune.errors import AutotuneError, DeviceError, RecordError, Rejected
from autotune.measure.clocks import ClockMonitor, device_uuid, driver_version
from autotune.measure.timing import time_candidate, time_finalists
from autotune.values.device import Device, current_device
from autotune.values.measurement import L2, GpuFacts, Launch, MeasuredTrial, Timing, Trial, Verdict
from autotune.values.problem import Problem

if TYPE_CHECKING:
    from autotune.measure.checker import Multiply
    from autotune.measure.cublas import Cublas
    from autotune.measure.cuda import EventTimer


def serve(connection: Connection, ordinal: int, problem: Problem, seed: int, cold: bool) -> None:
    """Measure what the parent sends until it closes the pipe.

    Args:
        connection: To the parent.
        ordinal: CUDA ordinal of the GPU.
        problem: What every candidate computes.
        seed: Of inputs and samples.
        cold: Time with operands that are not in the L2 cache.
    """
    messages = received(connection)
    next_problem: Problem | None = problem
    try:
        device = current_device(ordinal)
        driver = driver_version() or _driver_cuda()
        connection.send(("identified", device, driver))
        with _errors_of(ordinal):
            site = _Site(device, driver, ordinal)
        while next_problem is not None:
            with _errors_of(ordinal):
                bench = _Bench(site, next_problem, seed, cold)
            connection.send(("ready", bench.facts))
            next_problem = attend(connection, messages, bench)
            del bench  # its memory is for the next problem
            gc.collect()
    except AutotuneError as error:
        connection.send(("failed", error))


class Bench(Protocol):
    """What has a candidate's outcome measured."""

    def trial(self, cubin: bytes, entry: str, launch: Launch, best_ms: float | None) -> tuple[Trial, bool]:
        """Verify and time one candidate; also tell whether this process can go on."""
        ...

    def finals(
        self,
        entries: Sequence[tuple[bytes, str, Launch]],
        baseline: bool,
        announce: Callable[[int | None], None],
    ) -> tuple[Any, ...]:
        """Check finalists and the baseline in full, and time them in turns: the message of the answer."""
        ...


def attend(connection: Connection, messages: Iterator[Any], bench: Bench) -> Problem | None:
    """Do what the messages of the parent ask for, as long as this process can.

    Returns:
        The problem that comes next; None at the end.
    """
    for kind, *rest in messages:
        if kind == "problem":
            problem: Problem = rest[0]
            return problem
        if kind == "finals":
            entries, baseline = rest
            connection.send(bench.finals(entries, baseline, lambda index: connection.send(("step", index))))
            continue
        note, *candidate = rest
        connection.send(("started",))
        try:
            if note is not None:
                note.started()
            began = time.perf_counter()
            outcome, usable = bench.trial(*candidate)
            seconds = time.perf_counter() - began
            if isinstance(outcome, MeasuredTrial):
                outcome = replace(outcome, seconds=seconds)
            if note is not None:
                note.ended(outcome)
        except RecordError as error:  # the log cannot be written: no fault of the candidate
            connection.send(("failed", error))
            break
        connection.send(("done", outcome, usable, seconds))
        if not usable:  # what lies in the pipe is for the next process
            break
    return None


def received(connection: Connection) -> Iterator[Any]:
    """Yield messages that a thread takes from the pipe at once: no `send` of the parent waits long."""
    end = object()
    queue: SimpleQueue[Any] = SimpleQueue()

    def drain() -> None:
        for message in requests(connection):
            queue.put(message)
        queue.put(end)

    threading.Thread(target=drain, daemon=True).start()
    return iter(queue.get, end)


def _driver_cuda() -> str:
    """Name the newest CUDA version that the driver serves, such as "CUDA 13.0"."""
    from cupy.cuda import runtime

    version = runtime.driverGetVersion()
    return f"CUDA {version // 1000}.{version % 1000 // 10}"


@contextlib.contextmanager
def _errors_of(ordinal: int) -> Iterator[None]:
    """Turn what CUDA says of a start into one line."""
    from autotune.measure.cuda import CUDA_ERRORS  # CuPy is known to work only now

    try:
        yield
    except CUDA_ERRORS as error:
        raise DeviceError(f"GPU {ordinal} cannot be used: {error}") from None


class _Site:
    """The GPU with what every problem needs: the checker's kernels, clocks, and cuBLAS when it is asked for.

    Attributes:
        start_s: Seconds of each part of the start, until somebody takes them.
    """

    def __init__(self, device: Device, driver: str, ordinal: int) -> None:
        from cupy.cuda import runtime

        from autotune.measure.cuda import Gpu, LoadedModule
        from autotune.measure.verify_kernels import VerifyKernels, compile_kernels

        steps = {"begin": time.perf_counter()}
        compiled = ThreadPoolExecutor(1).submit(compile_kernels, device.arch)  # while the context is made
        self.device = device
        self.driver = driver
        self.address: str = runtime.deviceGetPCIBusId(ordinal)
        self.uuid = device_uuid(ordinal)
        self.clocks = ClockMonitor.open(self.address, self.uuid)
        steps["clocks"] = time.perf_counter()
        self.gpu = Gpu(ordinal)
        steps["context"] = time.perf_counter()
        module = LoadedModule(self.gpu, compiled.result().cubin)
        self.kernels = VerifyKernels(module.kernel, self.gpu.sm_count)
        steps["verify_kernels"] = time.perf_counter()
        self.start_s = {name: round(end - begin, 3) for (_, begin), (name, end) in pairwise(steps.items())}

    @cached_property
    def cublas(self) -> Cublas | None:
        """Loaded in the first finals: a search begins sooner without it."""
        from autotune.measure.cublas import Cublas

        return Cublas.open(self.gpu)


class _Bench:
    """One problem's inputs and baseline on the GPU."""

    def __init__(self, site: _Site, problem: Problem, seed: int, cold: bool) -> None:
        from autotune.measure.checker import Checker
        from autotune.measure.rotation import Rotation

        began = time.perf_counter()
        self._site = site
        self._gpu = gpu = site.gpu
        self._clocks = site.clocks
        self._problem = problem
        self._checker = Checker(gpu, site.kernels, problem, seed)
        self._l2: L2 = "cold" if cold else "warm"
        self._operands = [self._checker.operands]
        if cold:
            self._rotation = Rotation(gpu, problem, self._checker.operands, site.device.l2_bytes)
            self._operands = self._rotation.operands
        gpu.synchronize()
        start_s, site.start_s = {**site.start_s, "inputs": round(time.perf_counter() - began, 3)}, {}
        self.facts = GpuFacts(
            device=site.device,
            driver=site.driver,
            memory_free=gpu.memory_free,
            input_sets=self._checker.set_count,
            pci_bus_id=site.address,
            uuid=site.uuid,
            start_s=start_s,
        )

    def trial(self, cubin: bytes, entry: str, launch: Launch, best_ms: float | None) -> tuple[Trial, bool]:
        """Verify and time one candidate; also tell whether this process can go on."""
        from autotune.measure.cuda import CUDA_ERRORS, context_lost

        try:
            return self._measured(cubin, entry, launch, best_ms), True
        except CUDA_ERRORS as error:
            why = str(error)
        # Outside the handler: the traceback would keep the module loaded.
        return Rejected("crash", why), not context_lost()

    def _measured(self, cubin: bytes, entry: str, launch: Launch, best_ms: float | None) -> Trial:
        from autotune.measure.cuda import Multiplication

        multiply = Multiplication(self._gpu, cubin, entry, launch)
        verdict = self._checker.check(multiply)
        if isinstance(verdict, Rejected):
            return verdict
        if not verdict.ok:
            return Rejected("correctness", verdict.why)
        timing = time_candidate(self._timer(multiply), best_ms, self._l2)
        return self._checker.check_timed(multiply) or MeasuredTrial(timing, verdict)

    def finals(
        self,
        entries: Sequence[tuple[bytes, str, Launch]],
        baseline: bool,
        announce: Callable[[int | None], None],
    ) -> tuple[Any, ...]:
        """Check finalists and cuBLAS in full, then time those that are right in turns."""
        from autotune.measure.cublas import CublasError
        from autotune.measure.cuda import CUDA_ERRORS

        expected: tuple[type[Exception], ...] = (*CUDA_ERRORS, CublasError)
        try:
            return self._finals(entries, baseline, announce)
        except expected as error:
            return "fault", Rejected("crash", str(error))

    def _finals(
        self,
        entries: Sequence[tuple[bytes, str, Launch]],
        baseline: bool,
        announce: Callable[[int | None], None],
    ) -> tuple[Any, ...]:
        from autotune.measure.cublas import kernel_names
        from autotune.measure.cuda import Multiplication

        library = self._site.cublas if baseline else None
        compared = None if library is None else library.multiplication(self._problem)
        multiplies: list[Multiply] = []
        for index, (cubin, entry, launch) in enumerate(entries):
            announce(index)
            multiplies.append(Multiplication(self._gpu, cubin, entry, launch))
        if compared is not None:
            multiplies.append(compared)

        verdicts = self._checker.check_in_full(multiplies, announce)
        right = [i for i, verdict in enumerate(verdicts) if isinstance(verdict, Verdict) and verdict.ok]
        timings: dict[int, Timing] = {}
        if right:
            timers = [self._timer(multiplies[i]) for i in right]
            measured = time_finalists(timers, self._l2, self._clocks, lambda turn: announce(right[turn]))
            timings = dict(zip(right, measured, strict=True))
        trials = [
            _outcome(verdict, timings.get(index)) for index, verdict in enumerate(verdicts[: len(entries)])
        ]
        cublas = timings.get(len(entries))
        name = None
        if cublas is not None and compared is not None:
            announce(len(entries))
            name = kernel_names(self._gpu, self._calls(compared)[0])
        return "finals", trials, cublas, name, library.version if cublas and library else None

    def _timer(self, multiply: Multiply) -> EventTimer:
        from autotune.measure.cuda import EventTimer

        return EventTimer(self._gpu, self._calls(multiply))

    def _calls(self, multiply: Multiply) -> list[Callable[[], None]]:
        """Return one launch for each copy of the operands, as they are timed: alpha 1, beta 0 or 1."""
        beta = float(self._problem.beta)
        return [partial(multiply, 1.0, a, b, beta, c) for a, b, c in self._operands]


def _outcome(verdict: Verdict | Rejected, timing: Timing | None) -> Trial:
    if isinstance(verdict, Rejected):
        return verdict
    if timing is None:
        return Rejected("correctness", f"{verdict.why} (all elements, new inputs)")
    return MeasuredTrial(timing, verdict)
