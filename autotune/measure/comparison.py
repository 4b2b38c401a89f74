"""A kernel compared with NVIDIA's libraries on the same operands: what is asked, and the answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from autotune.errors import Rejected
from autotune.values.device import Device
from autotune.values.measurement import Launch, Method, Sustained, Timing, Trial
from autotune.values.problem import Math, Problem

Library = Literal["cublas", "cublaslt", "cublas_tf32"]
LIBRARIES: tuple[Library, ...] = ("cublas", "cublaslt")  # in FP32
KERNEL = "kernel"  # what is compared with them
NAMES: dict[Library, str] = {
    "cublas": "cuBLAS",
    "cublaslt": "best cuBLASLt",
    "cublas_tf32": "cuBLAS TF32",
}


def libraries_for(math: Math) -> tuple[Library, ...]:
    """Return what kernels are compared with: those on tensor cores with cuBLAS in TF32 too."""
    return LIBRARIES if math == "ffma" else (*LIBRARIES, "cublas_tf32")


@dataclass(frozen=True)
class BenchFacts:
    """The GPU and the libraries of a bench.

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
class Comparison:
    """One kernel against the libraries, all on the same operands.

    Attributes:
        problem: What is computed.
        alpha: Scalar of the product.
        beta: Scalar of C.
        cubin: The kernel.
        launch: How to start it.
        seed: Of the operands.
        cold: Time with operands that are not in the L2 cache.
        timeout_s: Limit of one step: a check, or a sample of a timing.
        libraries: Those to compare with.
        method: How all are launched.
        sustained_s: Then run each that is right back to back for so many seconds, one after the other; 0: no.
    """

    problem: Problem
    alpha: float
    beta: float
    cubin: bytes
    launch: Launch
    seed: int
    cold: bool
    timeout_s: float
    libraries: tuple[Library, ...] = LIBRARIES
    method: Method = "graph"
    sustained_s: float = 0.0


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
class Compared:
    """The outcome of a comparison.

    Attributes:
        kernel: The kernel's timing and verdict, or why it has none.
        libraries: By name; one that is not installed is left out.
        sustained: Of the kernel, by `KERNEL`, and of the libraries that were right; empty where not asked.
    """

    kernel: Trial
    libraries: Mapping[Library, Baseline | Rejected]
    sustained: Mapping[str, Sustained] = field(default_factory=dict)
