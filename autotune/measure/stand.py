"""One problem's operands on the GPU, and everything that is checked and timed on them."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from autotune.errors import MachineFault, Rejected
from autotune.measure.checker import Checker, Multiply
from autotune.measure.comparison import KERNEL, Baseline, Compared, Comparison, Library
from autotune.measure.cublas import CublasError, kernel_names
from autotune.measure.cuda import CUDA_ERRORS, EventTimer, Multiplication, context_lost, out_of_memory
from autotune.measure.places import PLACES, Operands, Places
from autotune.measure.rotation import Rotation
from autotune.measure.site import CudaFault, Site
from autotune.measure.timing import fastest, sustain, time_candidate, time_finalists, timed_beta
from autotune.values.measurement import (
    L2,
    Finals,
    Launch,
    MeasuredTrial,
    Method,
    Sustained,
    Timing,
    Trial,
    Tried,
    Verdict,
)
from autotune.values.problem import Problem

TF32_ERROR = 2.0**-8  # relative: more is wrong in TF32 too, whose operands are off by up to 2^-10 each
CUBLAS = "cublas"
_EXPECTED: tuple[type[Exception], ...] = (*CUDA_ERRORS, CublasError)

W = TypeVar("W", bound=Hashable)
Announce = Callable[[Any], None]
Candidate = tuple[bytes, Launch]
"""Machine code, and how it is launched."""


class Stand:
    """Operands of one problem between guard zones, with their references.

    Args:
        site: Where they are.
        problem: What is computed.
        seed: Of operands and samples.
        cold: Time with operands that are not in the L2 cache.
        scalars: alpha and beta to check and time with; when None, drawn for each check, and 1 and 0 or 1 in
            timings.

    Raises:
        DeviceError: The GPU lacks memory.
        CUDA_ERRORS: Likewise, for the copies of the operands that ``cold`` needs.
    """

    def __init__(
        self,
        site: Site,
        problem: Problem,
        seed: int,
        cold: bool,
        scalars: tuple[float, float] | None = None,
    ) -> None:
        began = time.perf_counter()
        self._site = site
        self._gpu = gpu = site.gpu
        self._problem = problem
        self._alpha, beta = (1.0, float(problem.beta)) if scalars is None else scalars
        self._beta = timed_beta(beta)
        self._checker = Checker(gpu, site.kernels, problem, seed, scalars)
        self._checker.restore()
        self._l2: L2 = "cold" if cold else "warm"
        self._operands: list[Operands] = [self._checker.operands]
        if cold:
            self._rotation = Rotation(gpu, problem, self._checker.operands, site.device.l2_bytes)
            self._operands = self._rotation.operands
        gpu.synchronize()
        self.facts = site.facts(self._checker.set_count, inputs=time.perf_counter() - began)

    def trial(self, cubin: bytes, launch: Launch, best_ms: float | None) -> tuple[Tried, bool]:
        """Verify and time one candidate; also return whether this process can go on."""
        try:
            return self._measured(cubin, launch, best_ms), True
        except CUDA_ERRORS as error:
            fault = CudaFault.of(error)
        # Outside the handler: the traceback would keep the module loaded.
        usable = not context_lost()
        outcome = self._site.fault(fault, self.facts.memory_free)
        return outcome, usable and not isinstance(outcome, MachineFault)

    def _measured(self, cubin: bytes, launch: Launch, best_ms: float | None) -> Trial:
        multiply = Multiplication(self._gpu, cubin, launch)
        verdict = self._checker.check(multiply)
        if isinstance(verdict, Rejected):
            return verdict
        if not verdict.ok:
            return Rejected("correctness", verdict.why)
        timing = time_candidate(self._timer(multiply), best_ms, self._l2)
        return self._checker.check_timed(multiply) or MeasuredTrial(timing, verdict)

    def finals(self, candidates: Mapping[int, Candidate], baseline: bool, announce: Announce) -> Finals:
        """Check finalists and cuBLAS in full, then time those that are right in turns.

        Args:
            candidates: By number.
            baseline: Whether cuBLAS takes part.
            announce: Told who is about to run: a number, "cublas", or None for this process's own work.

        Raises:
            CUDA_ERRORS: Whoever was announced last cannot be launched, or failed.
            CublasError: Likewise.
        """
        library = self._site.cublas if baseline else None
        entrants: dict[Hashable, Multiply] = {}
        for number, candidate in candidates.items():
            announce(number)
            entrants[number] = Multiplication(self._gpu, *candidate)
        if library is not None:
            entrants[CUBLAS] = library.multiplication(self._problem)
        verdicts, timings = self._contest(entrants, announce, "graph")
        outcomes = {number: _trial(verdicts[number], timings.get(number)) for number in candidates}
        cublas = timings.get(CUBLAS)
        if library is None or cublas is None:
            return Finals(outcomes, None, None)
        announce(CUBLAS)
        return Finals(outcomes, cublas, self._kernels(entrants[CUBLAS]), library.version)

    def sustained(
        self, candidate: Candidate, timing: Timing, seconds: float, announce: Announce
    ) -> Sustained:
        """Run one that was right and timed back to back for some seconds.

        Args:
            candidate: The one.
            timing: Of it.
            seconds: For how long; the second half counts.
            announce: Told that it runs, by `KERNEL`.

        Raises:
            CUDA_ERRORS: It cannot be launched, or failed.
        """
        announce(KERNEL)
        timer = self._timer(Multiplication(self._gpu, *candidate))
        (found,) = sustain(
            *([timer], [timing.median_ms], seconds, timing.method),
            *(self._site.clocks, lambda turn: announce(KERNEL)),
        )
        return found

    def compare(self, comparison: Comparison, announce: Announce) -> Compared:
        """Check a kernel and the libraries in full, then time those that are right in turns.

        Args:
            comparison: Of this stand's problem, operands and scalars.
            announce: Told who is about to run: "kernel", a library's name, or None for own work.

        Raises:
            CUDA_ERRORS: Whoever was announced last cannot be launched, or failed.
            CublasError: Likewise.
        """
        problem, asked = comparison.problem, comparison.libraries
        announce(KERNEL)
        entrants: dict[str, Multiply] = {
            KERNEL: Multiplication(self._gpu, comparison.cubin, comparison.launch)
        }
        counts: dict[str, int] = {}
        if "cublas" in asked and (cublas := self._site.cublas) is not None:
            entrants["cublas"], counts["cublas"] = cublas.multiplication(problem), 1
        if "cublaslt" in asked and (lt := self._site.cublaslt) is not None:
            announce("cublaslt")
            best, counts["cublaslt"] = self._fastest(lt.multiplications(problem), announce)
            if best is not None:
                entrants["cublaslt"] = best
        if "cublas_tf32" in asked and (tf32 := self._site.cublas_tf32) is not None:
            entrants["cublas_tf32"], counts["cublas_tf32"] = tf32.multiplication(problem), 1
        verdicts, timings = self._contest(entrants, announce, comparison.method)
        sustained = self._sustained(entrants, timings, comparison, announce)
        libraries: dict[Library, Baseline | Rejected] = {}
        for name in asked:
            if name in timings:
                announce(name)
                kernel, error = self._kernels(entrants[name]), _error(verdicts[name])
                libraries[name] = Baseline(timings[name], kernel, counts[name], error)
            elif name in verdicts:
                libraries[name] = _rejected(verdicts[name])
            elif name in counts:
                libraries[name] = Rejected("crash", f"none of {counts[name]} algorithms can run")
        return Compared(_trial(verdicts[KERNEL], timings.get(KERNEL)), libraries, sustained)

    def _sustained(
        self,
        entrants: Mapping[str, Multiply],
        timings: Mapping[str, Timing],
        comparison: Comparison,
        announce: Announce,
    ) -> dict[str, Sustained]:
        """Run those that were timed for as long as is asked, one after the other."""
        if not comparison.sustained_s or KERNEL not in timings:
            return {}
        names = list(timings)
        found = sustain(
            [self._timer(entrants[name]) for name in names],
            [timings[name].median_ms for name in names],
            comparison.sustained_s,
            comparison.method,
            self._site.clocks,
            lambda turn: announce(names[turn]),
        )
        return dict(zip(names, found, strict=True))

    def _contest(
        self, entrants: Mapping[W, Multiply], announce: Announce, method: Method
    ) -> tuple[dict[W, Verdict | Rejected], dict[W, Timing]]:
        """Check all in full, then time those that are right in turns."""
        names = list(entrants)
        found = self._checker.check_in_full(
            list(entrants.values()), lambda index: announce(None if index is None else names[index])
        )
        verdicts = {
            name: _in_tf32(verdict) if name == "cublas_tf32" else verdict
            for name, verdict in zip(names, found, strict=True)
        }
        right = [name for name, verdict in verdicts.items() if isinstance(verdict, Verdict) and verdict.ok]
        if not right:
            return verdicts, {}
        self._checker.restore()
        timings = time_finalists(
            [self._timer(entrants[name]) for name in right],
            self._l2,
            self._site.clocks,
            lambda turn: announce(right[turn]),
            method=method,
            elsewhere=self._elsewhere([entrants[name] for name in right]),
        )
        return verdicts, dict(zip(right, timings, strict=True))

    def _elsewhere(self, entrants: Sequence[Multiply]) -> list[Callable[[], list[EventTimer]]]:
        """Return what moves the operands to each place in turn; nothing where they rotate, or lack memory."""
        if self._l2 == "cold":
            return []
        try:
            places = Places(self._gpu, self._problem, self._checker.operands)
        except CUDA_ERRORS as error:
            if out_of_memory(error):
                return []
            raise

        def moved(place: int) -> list[EventTimer]:
            operands = [places.moved(place)]
            return [self._timer(each, operands) for each in entrants]

        return [partial(moved, place) for place in range(PLACES)]

    def _fastest(self, algorithms: Sequence[Multiply], announce: Announce) -> tuple[Multiply | None, int]:
        """Choose the fastest algorithm of cuBLASLt; return it with the number of those that run."""
        able: set[int] = set()

        def measure(multiply: Multiply, best_ms: float | None) -> float | None:
            announce("cublaslt")
            try:
                self._calls(multiply)[0]()
                self._gpu.synchronize()
                median_ms = time_candidate(self._timer(multiply), best_ms, self._l2).median_ms
            except _EXPECTED:
                if context_lost():
                    raise
                return None
            able.add(id(multiply))
            return median_ms

        best = fastest(algorithms, measure)
        return best, len(able) if best is not None else len(algorithms)

    def _kernels(self, multiply: Multiply) -> str | None:
        """Return the names of the kernels that a library launches."""
        return kernel_names(self._gpu, self._calls(multiply)[0])

    def _timer(self, multiply: Multiply, operands: Sequence[Operands] = ()) -> EventTimer:
        return EventTimer(self._gpu, self._calls(multiply, operands), getattr(multiply, "kernels", 1))

    def _calls(self, multiply: Multiply, operands: Sequence[Operands] = ()) -> list[Callable[[], None]]:
        """Return one launch for each copy of the operands, as timed: of the stand's own if not given."""
        copies = operands or self._operands
        return [partial(multiply, self._alpha, a, b, self._beta, c) for a, b, c in copies]


def _trial(verdict: Verdict | Rejected, timing: Timing | None) -> Trial:
    if isinstance(verdict, Verdict) and timing is not None:
        return MeasuredTrial(timing, verdict)
    return _rejected(verdict)


def _rejected(verdict: Verdict | Rejected) -> Rejected:
    if isinstance(verdict, Rejected):
        return verdict
    return Rejected("correctness", f"{verdict.why} (all elements, new inputs)")


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
