"""Turns requests on a pipe into verified, timed launches: the process in which candidates may hang or crash.

Messages to the parent: ``("ready", GpuFacts)`` or ``("failed", AutotuneError)`` once; per trial
``("started",)`` and ``("done", Trial, usable)``, where usable says whether this process can go on; in the
finals ``("step", index)`` before each kernel (None: setting up; behind the last finalist: cuBLAS), then
``("fault", Rejected)`` or ``("finals", trials, cuBLAS timing, kernel name)``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from autotune.device import Device, current_device
from autotune.errors import AutotuneError, DeviceError, Rejected
from autotune.gpu.worker import GpuFacts, MeasuredTrial, Trial
from autotune.problem import FLOAT_BYTES, Problem
from autotune.process import requests
from autotune.render import Launch
from autotune.timing import L2, Timing, time_candidate, time_finalists
from autotune.verify import Verdict

if TYPE_CHECKING:
    from autotune.gpu.checker import Multiply
    from autotune.gpu.cuda import EventTimer

COLD_L2_FACTOR = 3  # operands that the launches rotate through, in sizes of the L2 cache


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
    try:
        bench = _open(ordinal, problem, seed, cold)
    except AutotuneError as error:
        connection.send(("failed", error))
        return
    connection.send(("ready", bench.facts))
    for kind, *rest in messages:
        if kind == "trial":
            connection.send(("started",))
            connection.send(("done", *bench.trial(*rest)))
        else:
            entries, baseline = rest
            connection.send(bench.finals(entries, baseline, lambda index: connection.send(("step", index))))


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


def _open(ordinal: int, problem: Problem, seed: int, cold: bool) -> _Bench:
    device = current_device(ordinal)
    from autotune.gpu.cuda import CUDA_ERRORS  # CuPy is known to work only now

    try:
        return _Bench(device, ordinal, problem, seed, cold)
    except CUDA_ERRORS as error:
        raise DeviceError(f"GPU {ordinal} cannot be used: {error}") from None


class _Bench:
    """The GPU with inputs, baseline and clocks."""

    def __init__(self, device: Device, ordinal: int, problem: Problem, seed: int, cold: bool) -> None:
        from autotune.gpu.checker import Checker
        from autotune.gpu.clocks import ClockMonitor, driver_version
        from autotune.gpu.cublas import Cublas
        from autotune.gpu.cuda import Gpu, LoadedModule
        from autotune.gpu.verify_kernels import VerifyKernels, compile_kernels

        self._gpu = gpu = Gpu(ordinal)
        kernels = VerifyKernels(LoadedModule(gpu, compile_kernels(device.arch).cubin).kernel, gpu.sm_count)
        self._problem = problem
        self._checker = Checker(gpu, kernels, problem, seed)
        self._l2: L2 = "cold" if cold else "warm"
        self._copies: list[Any] = []  # memory of the further operands
        self._operands = [self._checker.operands]
        if cold:
            self._add_copies(COLD_L2_FACTOR * device.l2_bytes)
        cublas = Cublas.open(gpu)
        self._baseline: Multiply | None = cublas.multiplication(problem) if cublas else None
        self._clocks = ClockMonitor.open(gpu.pci_bus_id)
        self.facts = GpuFacts(
            device=device,
            driver=driver_version() or gpu.driver_cuda,
            cublas=cublas is not None,
            memory_free=gpu.memory_free,
            input_sets=self._checker.set_count,
            pci_bus_id=gpu.pci_bus_id,
        )

    def trial(self, cubin: bytes, entry: str, launch: Launch, best_ms: float | None) -> tuple[Trial, bool]:
        """Verify and time one candidate; also tell whether this process can go on."""
        from autotune.gpu.cuda import CUDA_ERRORS, context_lost

        try:
            return self._measured(cubin, entry, launch, best_ms), True
        except CUDA_ERRORS as error:
            why = str(error)
        # Outside the handler: the traceback would keep the module loaded.
        return Rejected("crash", why), not context_lost()

    def _measured(self, cubin: bytes, entry: str, launch: Launch, best_ms: float | None) -> Trial:
        from autotune.gpu.cuda import Multiplication

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
        from autotune.gpu.cublas import CublasError
        from autotune.gpu.cuda import CUDA_ERRORS

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
        from autotune.gpu.cublas import kernel_names
        from autotune.gpu.cuda import Multiplication

        multiplies: list[Multiply] = []
        for index, (cubin, entry, launch) in enumerate(entries):
            announce(index)
            multiplies.append(Multiplication(self._gpu, cubin, entry, launch))
        if baseline and self._baseline is not None:
            multiplies.append(self._baseline)

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
        if cublas is not None and self._baseline is not None:
            announce(len(entries))
            name = kernel_names(self._gpu, self._calls(self._baseline)[0])
        return "finals", trials, cublas, name

    def _timer(self, multiply: Multiply) -> EventTimer:
        from autotune.gpu.cuda import EventTimer

        return EventTimer(self._gpu, self._calls(multiply))

    def _calls(self, multiply: Multiply) -> list[Callable[[], None]]:
        """Return one launch for each copy of the operands, as they are timed: alpha 1, beta 0 or 1."""
        beta = float(self._problem.beta)
        return [partial(multiply, 1.0, a, b, beta, c) for a, b, c in self._operands]

    def _add_copies(self, size: int) -> None:
        """Copy the operands until they exceed ``size`` bytes together, and at least once."""
        problem = self._problem
        counts = (problem.m * problem.k, problem.k * problem.n, problem.m * problem.n)
        sizes = [FLOAT_BYTES * count for count in counts]
        total = sum(sizes)
        while total <= size or len(self._operands) < 2:
            memory = [self._gpu.allocate(size) for size in sizes]
            for target, source, length in zip(memory, self._operands[0], sizes, strict=True):
                self._gpu.copy(target.ptr, source, length)
            self._copies.append(memory)
            self._operands.append((memory[0].ptr, memory[1].ptr, memory[2].ptr))
            total += sum(sizes)
        self._gpu.synchronize()


def _outcome(verdict: Verdict | Rejected, timing: Timing | None) -> Trial:
    if isinstance(verdict, Rejected):
        return verdict
    if timing is None:
        return Rejected("correctness", f"{verdict.why} (all elements, new inputs)")
    return MeasuredTrial(timing, verdict)
