"""BLAS's corners, which the host decides: an empty product, and one of nothing, which only scales C."""

from __future__ import annotations

import math
from typing import Any

from autotune.code import cubins
from autotune.code.depot import Depot
from autotune.code.render import Source
from autotune.code.scale import scaling
from autotune.errors import Rejected, ToolchainError, UsageError
from autotune.kernel.libraries import Taken
from autotune.kernel.machine import Enqueue, Machine
from autotune.kernel.once import Once
from autotune.kernel.operands import first_of, lying, writable
from autotune.values.problem import Problem, Strided

_scalings: Once[tuple[Machine, Problem], Enqueue] = Once()


def scale(problem: Problem, c: int, beta: float, stream: int, machine: Machine, depot: Depot) -> None:
    """Enqueue C = beta C, which reads neither A nor B, and C only where beta is not 0.

    Args:
        problem: Of its facts only those of C count.
        c: Address of C.
        beta: Scalar of C.
        stream: Handle.
        machine: Where C is.
        depot: Where machine code is kept.

    Raises:
        ToolchainError: NVRTC is missing.
        DeviceError: The driver refuses the launch.
    """
    m, n, batch = problem.m, problem.n, problem.batch
    c_alone = Strided(m, n, 1, batch=batch, ldc=problem.ldc, stride_c=problem.stride_c)
    what = "the kernel that scales C"
    made = _scalings((machine, c_alone), lambda: loaded(scaling(c_alone), machine, depot, what))
    made(0, 0, c, 0.0, beta, stream)


def of_nothing(
    taken: Taken, out: Any, shape: tuple[int, ...], beta: float, machine: Machine, depot: Depot
) -> Any:
    """Return C = beta C, the product of operands with k = 0, or an empty C.

    Args:
        taken: The operands.
        out: As it was passed; None to make one.
        shape: Of C; an extent may be 0.
        beta: Scalar of C as it was.
        machine: Where they are.
        depot: Where machine code is kept.

    Raises:
        UsageError: ``out`` has another shape or order, or is needed.
    """
    if out is None and beta != 0.0:
        raise UsageError(f"beta = {beta} scales C as it was: pass it as out=")
    c, stream, library, ordinal = taken.out, taken.stream, taken.library, machine.ordinal
    made = None
    if c is None:
        made = library.empty("a", shape, taken.like, ordinal or 0, stream)
        c = library.view_result(made, stream)
    if c.shape != shape:
        raise UsageError(f"out has shape {c.shape}: this product is {shape}")
    if c.ordinal != ordinal:
        raise UsageError(f"out is on GPU {c.ordinal} and a on GPU {ordinal}: move them to one GPU")
    if 0 not in shape:
        *several, m, n = shape
        whole = Problem(m, n, 1, batch=math.prod(several))
        ldc, stride_c, _ = lying("out", first_of("out", c)[2] if whole.batch == 1 else c, 2, whole)
        writable(c)
        batch: dict[str, Any] = {"batch": whole.batch, "stride_c": stride_c} if whole.batch > 1 else {}
        scale(Strided(m, n, 1, ldc=ldc, **batch), c.address, beta, stream, machine, depot)
    return out if made is None else library.result(made, stream)


def loaded(source: Source, machine: Machine, depot: Depot, what: str, remedy: str = "") -> Enqueue:
    """Compile a source and load it.

    Args:
        source: The kernel.
        machine: Where it will run.
        depot: Where machine code is kept.
        what: What it is, for the message.
        remedy: Behind the message.

    Raises:
        ToolchainError: It does not compile.
        DeviceError: The driver refuses it.
    """
    binary = cubins.load_or_compile(
        source.text, source.entry, machine.device.arch, options=machine.options, depot=depot
    )
    if isinstance(binary, Rejected):
        raise ToolchainError(f"{what} does not compile ({binary.why}){remedy}")
    return machine.load(source, binary)
