"""The process in which kernels may hang or crash: it checks and times what its parent sends.

Messages to the parent: ``("identified", Device, driver)``, then ``("ready", GpuFacts)``, once more for each
further problem, or ``("failed", AutotuneError)``, after which this process ends. A candidate is answered by
``("started",)`` and ``("done", Tried, usable, seconds)``, where usable says whether this process can go on.
Finals, a comparison and the facts of a bench are answered by ``("step", who)`` before anything that may not
return (None: this process's own work), and at the end ``("answer", ...)``, ``("refused", AutotuneError)`` or
``("fault", Rejected or MachineFault)``, after which this process is not used again.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from autotune.code.process import requests
from autotune.errors import AutotuneError, DeviceError, RecordError
from autotune.measure.clocks import driver_version
from autotune.values.device import current_device
from autotune.values.measurement import Launch, MeasuredTrial, Tried
from autotune.values.problem import Problem

if TYPE_CHECKING:
    from autotune.measure.site import Site

Announce = Callable[[Any], None]


def serve(connection: Connection, ordinal: int, problem: Problem | None, seed: int, cold: bool) -> None:
    """Do what the parent asks for until it closes the pipe.

    Args:
        connection: To the parent.
        ordinal: CUDA ordinal of the GPU.
        problem: What every candidate computes; None where nothing but comparisons will be asked for.
        seed: Of inputs and samples.
        cold: Time candidates with operands that are not in the L2 cache.
    """
    messages = received(connection)
    try:
        device = current_device(ordinal)
        driver = driver_version() or _driver_cuda()
        connection.send(("identified", device, driver))
        with _errors_of(ordinal):
            from autotune.measure.site import Site

            site = Site(device, driver, ordinal)
        while True:
            with _errors_of(ordinal):
                bench = _Bench(site, problem, seed, cold)
            connection.send(("ready", bench.facts))
            problem = attend(connection, messages, bench)
            if problem is None:
                return
            del bench  # its memory is for the next problem
            gc.collect()
    except AutotuneError as error:
        connection.send(("failed", error))


class Bench(Protocol):
    """Where candidates, finalists and libraries are checked and timed."""

    def trial(self, cubin: bytes, launch: Launch, best_ms: float | None) -> tuple[Tried, bool]:
        """Verify and time one candidate; also return whether this process can go on."""
        ...

    def answer(self, kind: str, about: list[Any], announce: Announce) -> tuple[str, Any]:
        """Do what is asked for, and return the message that ends it.

        Args:
            kind: "finals", "sustained", "comparison" or "facts".
            about: What the parent sent with it.
            announce: Told who is about to run.
        """
        ...


def attend(connection: Connection, messages: Iterator[Any], bench: Bench) -> Problem | None:
    """Do what the messages of the parent ask for, as long as this process can.

    Returns:
        The problem that comes next; None at the end.
    """
    for kind, *about in messages:
        if kind == "problem":
            problem: Problem = about[0]
            return problem
        if kind != "trial":
            connection.send(bench.answer(kind, about, lambda who: connection.send(("step", who))))
            continue
        entry, *candidate = about
        connection.send(("started",))
        try:
            if entry is not None:
                entry.started()
            began = time.perf_counter()
            outcome, usable = bench.trial(*candidate)
            seconds = time.perf_counter() - began
            if isinstance(outcome, MeasuredTrial):
                outcome = replace(outcome, seconds=seconds)
            if entry is not None:
                entry.ended(outcome)
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


class _Bench:
    """The GPU: candidates and finalists on the operands of its problem, each comparison on its own."""

    def __init__(self, site: Site, problem: Problem | None, seed: int, cold: bool) -> None:
        from autotune.measure.stand import Stand

        self._site = site
        self._stand = None if problem is None else Stand(site, problem, seed, cold)
        self.facts = site.facts(0) if self._stand is None else self._stand.facts

    def trial(self, cubin: bytes, launch: Launch, best_ms: float | None) -> tuple[Tried, bool]:
        assert self._stand is not None, "candidates need a problem"
        return self._stand.trial(cubin, launch, best_ms)

    def answer(self, kind: str, about: list[Any], announce: Announce) -> tuple[str, Any]:
        from autotune.measure.cublas import CublasError
        from autotune.measure.cuda import CUDA_ERRORS
        from autotune.measure.site import CudaFault

        expected: tuple[type[Exception], ...] = (*CUDA_ERRORS, CublasError)
        try:
            return "answer", self._answered(kind, about, announce)
        except AutotuneError as error:
            return "refused", error
        except expected as error:
            fault = CudaFault.of(error)
        # Outside the handler: the traceback would keep memory allocated.
        return "fault", self._site.fault(fault, self.facts.memory_free)

    def _answered(self, kind: str, about: list[Any], announce: Announce) -> Any:
        from autotune.measure.stand import Stand

        announce(None)
        if kind == "facts":
            return self._site.bench_facts()
        if kind == "finals":
            assert self._stand is not None, "finals need a problem"
            candidates, baseline = about
            return self._stand.finals(candidates, baseline, announce)
        if kind == "sustained":
            assert self._stand is not None, "candidates need a problem"
            candidate, timing, seconds = about
            return self._stand.sustained(candidate, timing, seconds, announce)
        (asked,) = about
        stand = Stand(self._site, asked.problem, asked.seed, asked.cold, (asked.alpha, asked.beta))
        return stand.compare(asked, announce)


def _driver_cuda() -> str:
    """Return the newest CUDA version that the driver serves, such as "CUDA 13.0"."""
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
