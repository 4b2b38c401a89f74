"""Turns contests, a kernel against cuBLAS on one problem, into timings, by a process that may be lost to one.

A kernel that hangs or breaks the CUDA context loses its contest; the next one runs in a new process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from autotune.code.process import Child, ChildDied
from autotune.errors import AutotuneError, DeviceError, Rejected
from autotune.measure.worker import ENVIRONMENT, MAX_LOST_STARTS, SETUP_SECONDS, START_SECONDS
from autotune.values.device import Device
from autotune.values.measurement import Launch, Method, Timing, Trial
from autotune.values.problem import Math, Problem

Library = Literal["cublas", "cublaslt", "cublas_tf32"]
LIBRARIES: tuple[Library, ...] = ("cublas", "cublaslt")  # in FP32
KERNEL, SETUP = "kernel", "setup"  # what else the child announces
TF32_ENVIRONMENT = {**ENVIRONMENT, "NVIDIA_TF32_OVERRIDE": None}  # each handle says what it computes in


def libraries_for(math: Math) -> tuple[Library, ...]:
    """Name what kernels are compared with: those on tensor cores with cuBLAS in TF32 too."""
    return LIBRARIES if math == "ffma" else (*LIBRARIES, "cublas_tf32")


@dataclass(frozen=True)
class BenchFacts:
    """What the child reports when it is ready.

    Attributes:
        device: The GPU.
        driver: Version of the driver, such as "580.95.05".
        cublas: Version of cuBLAS; None where there is none.
        cublaslt: Version of cuBLASLt; None where there is none.
        copy_gbs: Bytes read and written per second by a copy within device memory, measured, GB/s.
    """

    device: Device
    driver: str
    cublas: str | None
    cublaslt: str | None
    copy_gbs: float


@dataclass(frozen=True)
class Contest:
    """One kernel against the libraries, all on the same operands.

    Attributes:
        problem: What is computed.
        alpha: Scalar of the product.
        beta: Scalar of C.
        cubin: The kernel.
        entry: Its name.
        launch: How to start it.
        seed: Of the operands.
        cold: Time with operands that are not in the L2 cache.
        timeout_s: Limit of one step: a check, or a sample of a timing.
        libraries: Those to compare with.
        method: How all are launched.
    """

    problem: Problem
    alpha: float
    beta: float
    cubin: bytes
    entry: str
    launch: Launch
    seed: int
    cold: bool
    timeout_s: float
    libraries: tuple[Library, ...] = LIBRARIES
    method: Method = "graph"


@dataclass(frozen=True)
class Baseline:
    """A library that was right, and how long it takes; "cublas_tf32" is as right as TF32 can be.

    Attributes:
        timing: In turns with the others.
        kernel: What it launched; None where the driver does not tell.
        algorithms: Algorithms of which this is the fastest; 1 where the library chose.
        error: Relative error in the Frobenius norm, as `Verdict.error`; None where it is not known.
    """

    timing: Timing
    kernel: str | None
    algorithms: int = 1
    error: float | None = None


@dataclass(frozen=True)
class Contested:
    """What became of a contest.

    Attributes:
        kernel: The kernel's timing and verdict, or why it has none.
        libraries: By name; one that is not installed is left out.
    """

    kernel: Trial
    libraries: Mapping[Library, Baseline | Rejected]


class BenchWorker:
    """One GPU that runs contests in a child process. Use as a context manager.

    Args:
        ordinal: CUDA ordinal of the GPU.
        service: What the child runs.
        tf32: Let cuBLAS compute in TF32 where a contest asks for it.
    """

    def __init__(
        self, ordinal: int, *, service: str = "autotune.measure.bench_service:serve", tf32: bool = False
    ) -> None:
        self._ordinal = ordinal
        self._service = service
        self._environment: Mapping[str, str | None] = TF32_ENVIRONMENT if tf32 else ENVIRONMENT
        self._lost_starts = 0
        self._dead: AutotuneError | None = None
        self._facts: BenchFacts | None = None
        self._start()

    def ready(self) -> BenchFacts:
        """Wait until the child can run a contest.

        Raises:
            DeviceError: There is no usable GPU, or the child does not start.
            ToolchainError: CuPy or NVRTC is missing or does not serve this GPU.
        """
        while (facts := self._facts) is None:
            if self._dead is not None:
                raise self._dead
            answer = self._answer(START_SECONDS)
            if isinstance(answer, Rejected):
                self._lost_starts += 1
                if self._lost_starts >= MAX_LOST_STARTS:
                    self._dead = DeviceError(
                        f"the GPU worker failed {self._lost_starts} times before it was ready: {answer.why}"
                    )
                else:
                    self._restart()
            elif answer[0] == "ready":
                self._facts, self._lost_starts = answer[1], 0
            else:
                self._dead = answer[1]
        return facts

    def run(self, contest: Contest) -> Contested:
        """Check the kernel and the libraries in full on the same operands, then time them in turns.

        Raises:
            DeviceError: The operands do not fit, or the child fails before anything ran.
            ToolchainError: The child cannot be started again.
        """
        lost: dict[Library, Baseline | Rejected] = {}
        while True:
            self.ready()
            left = tuple(name for name in contest.libraries if name not in lost)
            outcome = self._round(replace(contest, libraries=left))
            if isinstance(outcome, Contested):
                return Contested(outcome.kernel, {**lost, **outcome.libraries})
            at_fault, rejection = outcome
            if at_fault == KERNEL:
                return Contested(rejection, lost)
            if at_fault not in left:
                raise DeviceError(f"the GPU worker failed before a kernel ran: {rejection.why}")
            lost[at_fault] = rejection

    def close(self) -> None:
        """Kill the child."""
        self._child.kill()

    def __enter__(self) -> BenchWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _round(self, contest: Contest) -> Contested | tuple[Any, Rejected]:
        """Run a contest once; on a failure say who was running, and start a new child.

        Raises:
            DeviceError: The child refuses the contest.
        """
        running, limit = SETUP, SETUP_SECONDS
        try:
            self._child.send(contest)
        except ChildDied as death:
            self._restart()
            return running, Rejected("crash", f"the GPU worker died: {death.summary}")
        while True:
            answer = self._answer(limit)
            if isinstance(answer, Rejected):
                self._restart()
                return running, answer
            kind, said = answer
            if kind == "step":
                running = said
                limit = SETUP_SECONDS if running == SETUP else contest.timeout_s
            elif kind == "fault":
                self._restart()
                return running, said
            elif kind == "refused":
                raise said
            else:
                contested: Contested = said
                return contested

    def _answer(self, limit: float) -> tuple[str, Any] | Rejected:
        """Take the next message of the child, or say that it died or was silent for too long."""
        try:
            if not self._child.poll(limit):
                return Rejected("timeout", f"no sign of life for {limit:g} s")
            kind, said = self._child.receive()
        except ChildDied as death:
            return Rejected("crash", f"the GPU worker died: {death.summary}")
        return kind, said

    def _start(self) -> None:
        self._facts = None
        self._child = Child(self._service, self._ordinal, env=self._environment)

    def _restart(self) -> None:
        self._child.kill()
        self._start()
