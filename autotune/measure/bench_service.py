"""Turns contests on a pipe into checked, interleaved timings: the process in which kernels may hang or crash.

Messages to the parent: ``("ready", BenchFacts)`` or ``("failed", AutotuneError)`` once; for each `Contest`
``("step", who)`` before anything that may not return, then ``("done", Contested)``; or, where the operands do
not fit, ``("refused", DeviceError)``; or ``("fault", Rejected)``, after which this process is not used again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, TypeVar

from autotune.errors import AutotuneError, DeviceError, Rejected
from autotune.measure.bench_worker import KERNEL, SETUP, Baseline, BenchFacts, Contest, Contested, Library
from autotune.measure.service import received
from autotune.measure.timing import time_candidate, time_finalists
from autotune.values.device import Device, current_device
from autotune.values.measurement import L2, MeasuredTrial, Timing, Trial, Verdict

if TYPE_CHECKING:
    from autotune.measure.checker import Checker, Multiply
    from autotune.measure.cuda import EventTimer, Gpu

COPY_BYTES = 1 << 30  # far beyond any L2 cache
NEAR = 1.05  # algorithms this close to the fastest are timed again
TF32_ERROR = 2.0**-8  # relative: more is wrong in TF32 too, whose operands are off by up to 2^-10 each

T = TypeVar("T")
Announce = Callable[[str], None]


def serve(connection: Connection, ordinal: int) -> None:
    """Run the contests that the parent sends until it closes the pipe."""
    contests = received(connection)
    try:
        bench = _open(ordinal)
    except AutotuneError as error:
        connection.send(("failed", error))
        return
    connection.send(("ready", bench.facts))
    for contest in contests:
        connection.send(bench.run(contest, lambda who: connection.send(("step", who))))


def fastest(entrants: Sequence[T], measure: Callable[[T, float | None], float | None]) -> T | None:
    """Choose the fastest: time each briefly, then those near the best again; None when none can run.

    Args:
        entrants: What to choose from.
        measure: Given one and the best time so far, returns its time, or None where it cannot run.
    """
    times: list[tuple[float, T]] = []
    for entrant in entrants:
        best = min((time for time, _ in times), default=None)
        time = measure(entrant, best)
        if time is not None:
            times.append((time, entrant))
    if not times:
        return None
    limit = NEAR * min(time for time, _ in times)
    near = [(time, entrant) for time, entrant in times if time <= limit]
    if len(near) > 1:
        again = [(measure(entrant, None), time, entrant) for time, entrant in near]
        near = [(time if second is None else second, entrant) for second, time, entrant in again]
    return min(near, key=lambda pair: pair[0])[1]


def timed_beta(beta: float) -> float:
    """Choose the scalar of C for launches that feed on their own results: the same, or its reciprocal.

    C stays finite with |beta| <= 1. A kernel cannot tell the two apart: both are read at run time, and
    neither is 0.
    """
    return beta if abs(beta) <= 1 else 1 / beta


def _open(ordinal: int) -> _Bench:
    device = current_device(ordinal)
    from autotune.measure.cuda import CUDA_ERRORS  # CuPy is known to work only now

    try:
        return _Bench(device, ordinal)
    except CUDA_ERRORS as error:
        raise DeviceError(f"GPU {ordinal} cannot be used: {error}") from None


class _Bench:
    """The GPU with the libraries and clocks."""

    def __init__(self, device: Device, ordinal: int) -> None:
        from cupy.cuda import runtime

        from autotune.measure.clocks import ClockMonitor, device_uuid, driver_version
        from autotune.measure.cublas import TF32_MATH, Cublas
        from autotune.measure.cublaslt import CublasLt
        from autotune.measure.cuda import Gpu, LoadedModule
        from autotune.measure.verify_kernels import VerifyKernels, compile_kernels

        # The monitor first: it must not take what this process does for another's work.
        self._clocks = ClockMonitor.open(runtime.deviceGetPCIBusId(ordinal), device_uuid(ordinal))
        self._gpu = gpu = Gpu(ordinal)
        module = LoadedModule(gpu, compile_kernels(device.arch).cubin)
        self._kernels = VerifyKernels(module.kernel, gpu.sm_count)
        self._cublas, self._lt = Cublas.open(gpu), CublasLt.open(gpu)
        self._tf32 = None if os.environ.get("NVIDIA_TF32_OVERRIDE") else Cublas.open(gpu, TF32_MATH)
        self.facts = BenchFacts(
            device=device,
            driver=driver_version() or gpu.driver_cuda,
            cublas=(self._cublas.version or "unknown") if self._cublas else None,
            cublaslt=(self._lt.version or "unknown") if self._lt else None,
            copy_gbs=_copy_gbs(gpu),
        )

    def run(self, contest: Contest, announce: Announce) -> tuple[str, Any]:
        """Run one contest; return the message that ends it."""
        from autotune.measure.cublas import CublasError
        from autotune.measure.cuda import CUDA_ERRORS

        expected: tuple[type[Exception], ...] = (*CUDA_ERRORS, CublasError)
        try:
            return "done", self._run(contest, announce)
        except DeviceError as error:
            return "refused", error
        except expected as error:
            why = str(error)
        return "fault", Rejected("crash", why)

    def _run(self, contest: Contest, announce: Announce) -> Contested:
        from autotune.measure.checker import Checker
        from autotune.measure.cuda import Multiplication

        announce(SETUP)
        problem = contest.problem
        scalars = contest.alpha, contest.beta
        checker = Checker(self._gpu, self._kernels, problem, contest.seed, scalars)
        checker.restore()
        course = _Course(self._gpu, contest, checker, self.facts.device.l2_bytes)
        announce(KERNEL)
        entrants: dict[str, Multiply] = {
            KERNEL: Multiplication(self._gpu, contest.cubin, contest.entry, contest.launch)
        }
        counts: dict[str, int] = {}
        if "cublas" in contest.libraries and self._cublas is not None:
            entrants["cublas"], counts["cublas"] = self._cublas.multiplication(problem), 1
        if "cublaslt" in contest.libraries and self._lt is not None:
            announce("cublaslt")
            best, counts["cublaslt"] = course.fastest(self._lt.multiplications(problem), announce)
            if best is not None:
                entrants["cublaslt"] = best
        if "cublas_tf32" in contest.libraries and self._tf32 is not None:
            entrants["cublas_tf32"], counts["cublas_tf32"] = self._tf32.multiplication(problem), 1
        names = list(entrants)

        def announce_index(index: int | None) -> None:
            announce(SETUP if index is None else names[index])

        verdicts = checker.check_in_full(list(entrants.values()), announce_index)
        checked = dict(zip(names, verdicts, strict=True))
        if "cublas_tf32" in checked:
            checked["cublas_tf32"] = _in_tf32(checked["cublas_tf32"])
        right = {name: entrants[name] for name in names if _right(checked[name])}
        checker.restore()
        timings = course.timed(right, self._clocks, announce)
        libraries: dict[Library, Baseline | Rejected] = {}
        for name in contest.libraries:
            if name in timings:
                announce(name)
                kernel, error = course.kernels(right[name]), _error(checked[name])
                libraries[name] = Baseline(timings[name], kernel, counts[name], error)
            elif name in checked:
                libraries[name] = _rejected(checked[name])
            elif name in counts:
                libraries[name] = Rejected("crash", f"none of {counts[name]} algorithms can run")
        return Contested(_trial(checked[KERNEL], timings.get(KERNEL)), libraries)


class _Course:
    """Where the entrants of one contest run: on the same operands, with the same scalars."""

    def __init__(self, gpu: Gpu, contest: Contest, checker: Checker, l2_bytes: int) -> None:
        from autotune.measure.rotation import Rotation

        self._gpu = gpu
        self._alpha, self._beta = contest.alpha, timed_beta(contest.beta)
        self._l2: L2 = "cold" if contest.cold else "warm"
        self._method = contest.method
        self._operands = [checker.operands]
        if contest.cold:
            self._rotation = Rotation(gpu, contest.problem, checker.operands, l2_bytes)
            self._operands = self._rotation.operands

    def fastest(self, algorithms: Sequence[Multiply], announce: Announce) -> tuple[Multiply | None, int]:
        """Choose the fastest algorithm of cuBLASLt; return it with the number of those that run."""
        from autotune.measure.cublas import CublasError
        from autotune.measure.cuda import CUDA_ERRORS, context_lost

        expected: tuple[type[Exception], ...] = (*CUDA_ERRORS, CublasError)
        able: set[int] = set()

        def measure(multiply: Multiply, best_ms: float | None) -> float | None:
            announce("cublaslt")
            try:
                self._calls(multiply)[0]()
                self._gpu.synchronize()
                median_ms = time_candidate(self._timer(multiply), best_ms, self._l2).median_ms
            except expected:
                if context_lost():
                    raise
                return None
            able.add(id(multiply))
            return median_ms

        best = fastest(algorithms, measure)
        return best, len(able) if best is not None else len(algorithms)

    def timed(self, entrants: dict[str, Multiply], clocks: Any, announce: Announce) -> dict[str, Timing]:
        """Time all in turns, launched as the contest says."""
        names = list(entrants)
        if not names:
            return {}
        timings = time_finalists(
            [self._timer(multiply) for multiply in entrants.values()],
            self._l2,
            clocks,
            lambda index: announce(names[index]),
            method=self._method,
        )
        return dict(zip(names, timings, strict=True))

    def kernels(self, multiply: Multiply) -> str | None:
        """Name what a library launches."""
        from autotune.measure.cublas import kernel_names

        return kernel_names(self._gpu, self._calls(multiply)[0])

    def _timer(self, multiply: Multiply) -> EventTimer:
        from autotune.measure.cuda import EventTimer

        return EventTimer(self._gpu, self._calls(multiply))

    def _calls(self, multiply: Multiply) -> list[Callable[[], None]]:
        """Return one launch for each copy of the operands."""
        return [partial(multiply, self._alpha, a, b, self._beta, c) for a, b, c in self._operands]


def _copy_gbs(gpu: Gpu) -> float:
    """Measure the bytes per second, read and written, of copying device memory, in GB/s."""
    from autotune.measure.cuda import EventTimer

    size = min(COPY_BYTES, gpu.memory_free // 4)
    source, target = gpu.allocate(size), gpu.allocate(size)
    gpu.fill(source.ptr, 0xA5, size)
    timer = EventTimer(gpu, [partial(gpu.copy, target.ptr, source.ptr, size)])
    timings = [time_candidate(timer, None, "cold") for _ in range(2)]
    return 2 * size / min(timing.median_ms for timing in timings) / 1e6


def _right(verdict: Verdict | Rejected) -> bool:
    return isinstance(verdict, Verdict) and verdict.ok


def _error(verdict: Verdict | Rejected) -> float | None:
    return verdict.error if isinstance(verdict, Verdict) else None


def _in_tf32(verdict: Verdict | Rejected) -> Verdict | Rejected:
    """Judge what was checked as FP32 by what TF32 can do: it must be off, but not by more than that."""
    if isinstance(verdict, Rejected):
        return verdict
    if verdict.ok:
        return Rejected("correctness", f"relative error {verdict.error:.3g}: it did not compute in TF32")
    ok = verdict.error <= TF32_ERROR
    return replace(verdict, ok=ok, bound=TF32_ERROR, why="" if ok else verdict.why)


def _rejected(verdict: Verdict | Rejected) -> Rejected:
    return verdict if isinstance(verdict, Rejected) else Rejected("correctness", verdict.why)


def _trial(verdict: Verdict | Rejected, timing: Timing | None) -> Trial:
    if isinstance(verdict, Verdict) and timing is not None:
        return MeasuredTrial(timing, verdict)
    return _rejected(verdict)
