"""`matmul`: multiply two arrays by the best kernel for them, which is kept for the life of the process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autotune.errors import UsageError
from autotune.kernel.best import (
    QUICK,
    SIMULATOR,
    Policy,
    Tune,
    asked_tune,
    fastest,
    load,
    machine_of,
    require_policy,
    search_missing,
)
from autotune.kernel.corners import of_nothing
from autotune.kernel.dynamo import left_out
from autotune.kernel.factors import Factors, factors_of
from autotune.kernel.kernel import Kernel, raise_fault
from autotune.kernel.libraries import take
from autotune.kernel.machine import Machine
from autotune.kernel.once import Once
from autotune.kernel.operands import scalar
from autotune.kernel.short import OF_LIBRARIES, Short, Way, remember
from autotune.records import Store
from autotune.values.problem import Problem, asked_maths

_kernels: Once[tuple[Problem, str, Machine, Policy, Tune], Kernel] = Once()

_short: dict[type, Short] = {}
_PLACES = (1 << 60, 2 << 60, 3 << 60)  # addresses as far apart as operands can be long


@left_out
def matmul(
    a: Any,
    b: Any,
    out: Any = None,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    alpha: float = 1.0,
    beta: float = 0.0,
    stream: Any = None,
    math: str = "ffma",
    policy: Policy = "any",
    tune: Tune | None = None,
    device: str | None = None,
) -> Any:
    """Enqueue C = alpha op(A) op(B) + beta C and return C; the first call for a shape loads its kernel.

    A transposed view, such as ``a.T``, is read as it lies. Arrays are those of `Kernel.__call__`, on one GPU;
    the kernel of each problem is the one that `best_kernel` returns, and is kept for the life of the process.

    Args:
        a: A, `[m, k]` float32, `[k, m]` with ``transpose_a``; or a batch of them, `[batch, m, k]`.
        b: B, `[k, n]` float32, `[n, k]` with ``transpose_b``; or a batch. A single matrix is multiplied by
            each of the other's batch.
        out: C, `[m, n]` or `[batch, m, n]` float32; a new array of the library of ``a`` when not given.
        transpose_a: Multiply by the transpose of ``a``, in a batch of each matrix.
        transpose_b: The same of ``b``.
        alpha: Scalar of the product; at 0, as where k is 0, C = beta C, and neither A nor B is read.
        beta: Scalar of C as it was; 0 never reads C.
        stream: A stream, or its handle; the current one of the arrays' library when not given.
        math: As for `best_kernel`.
        policy: As for `best_kernel`.
        tune: As for `best_kernel`, at the first call for a problem.
        device: "simulator" or "simulator:NAME" for NumPy arrays; else the GPU is the arrays'.

    Raises:
        UsageError: The operands do not fit each other, or as for `Kernel.__call__`; nothing was written.
        DeviceError: No usable GPU.
        RecordMissing: The policy is "exact" and no record serves.

    >>> import numpy
    >>> a, b = numpy.ones((8, 4), "f"), numpy.ones((8, 6), "f")
    >>> matmul(a.T, b, alpha=0.5, device="simulator")[0]
    array([4., 4., 4., 4., 4., 4.], dtype=float32)
    """
    words = (transpose_a, transpose_b, beta == 0.0, math, policy, tune)
    try:
        if device is None:
            short = _short.get(type(a))
            if short is not None:
                product = short(a, b, out, words, alpha, beta, stream)
                if product is not None:
                    return product
        return _matmul(a, b, out, words, alpha, beta, stream, device)
    except Exception as error:
        raise_fault(error)
        raise


def _matmul(
    a: Any,
    b: Any,
    out: Any,
    words: tuple[Any, ...],
    alpha: float,
    beta: float,
    stream: Any,
    device: str | None,
) -> Any:
    transpose_a, transpose_b, _, math, policy, tune = words
    if device is not None and (not isinstance(device, str) or device.partition(":")[0] != SIMULATOR):
        raise UsageError(f"device {device!r}: matmul runs where its arrays are; give 'simulator', or nothing")
    asked_maths(math)
    require_policy(policy)
    alpha, beta = scalar("alpha", alpha), scalar("beta", beta)
    machine = None if device is None else machine_of(device)
    taken = take(a, b, out, stream, host=True) if machine else take(a, b, out, stream)
    found = factors_of(taken.a, taken.b, taken.out, transpose_a, transpose_b)
    if taken.a.ordinal != taken.b.ordinal:
        raise UsageError(
            f"a is on GPU {taken.a.ordinal} and b on GPU {taken.b.ordinal}: move them to one GPU"
        )
    where = machine or machine_of(taken.a.ordinal)
    if 0 in (*found.shape, found.k):
        return of_nothing(taken, out, found.shape, beta, where, Store().depot)
    kernel, captured = _kernel(found, beta, math, where, policy, tune, taken.stream)
    c = None if taken.out is None else found.of_c(taken.out)
    product = kernel.run(taken._replace(a=found.a, b=found.b, out=c), out, alpha, beta, found.shape)
    if alpha != 0.0 and type(taken.library) in OF_LIBRARIES and not captured:
        c = c or found.new_c(taken.library.view_result(product, taken.stream))
        way = Way.of(kernel.launcher(found.a, found.b, c), found.a, found.b, c, found.shape)
        remember(_short, taken.library, (a, b, product), words, out is not None, way)
    return product


def way_of(
    a: Any, b: Any, out: Any, *, beta: float, math: str, tune: Tune | None
) -> tuple[Kernel, Way] | None:
    """Return the kernel that `matmul` runs on arrays that lie like these, and how, at multiples of 16 bytes.

    None where it runs none, or another one later.

    Raises:
        UsageError: As for `matmul`.
    """
    taken = take(a, b, out, None)
    found = factors_of(taken.a, taken.b, taken.out, False, False)
    if 0 in (*found.shape, found.k):
        return None
    kernel, captured = _kernel(found, beta, math, machine_of(taken.a.ordinal), "any", tune, taken.stream)
    if captured:
        return None
    c = found.of_c(taken.out) if taken.out else found.new_c(taken.a)
    left, right, c = (
        each._replace(address=place) for each, place in zip((found.a, found.b, c), _PLACES, strict=True)
    )
    way = Way.of(kernel.launcher(left, right, c), left, right, c, found.shape)
    assert way is not None, "these addresses are multiples of 16"
    return kernel, way


def _kernel(
    found: Factors, beta: float, math: str, machine: Machine, policy: Policy, tune: Tune | None, stream: int
) -> tuple[Kernel, bool]:
    """Return the kernel for some factors, and whether a capture makes it one that serves this call alone."""
    problem = Problem(
        *(found.m, found.n, found.k),
        layout=found.layout,  # type: ignore[arg-type]
        beta=0 if beta == 0 else 1,
        batch=found.batch,
    )
    how = asked_tune(tune, machine)
    key = (problem, math, machine, policy, how)
    captured = how == QUICK and key not in _kernels.made and machine.capturing(stream)
    if captured:  # this call takes what is predicted, and the next one may tune
        key = (problem, math, machine, policy, False)
    return _kernels(key, lambda: _loaded(*key, stream)), captured


def _loaded(problem: Problem, math: str, machine: Machine, policy: Policy, tune: Tune, stream: int) -> Kernel:
    store, problems = Store(), [replace(problem, math=each) for each in asked_maths(math)]
    if tune:
        search_missing(problems, machine, store, tune=tune, stream=stream)
    return load(fastest(problems, machine, policy, None, store), machine, store, policy=policy)
