"""`best_kernel`: find the best kernel there is for a problem, and search for one only when asked to."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from autotune import records
from autotune.code import single
from autotune.code.compiler import Binary
from autotune.errors import DeviceError, RecordMissing, ToolchainError, UsageError
from autotune.kernel.choices import Choice, Choices
from autotune.kernel.cuda import cuda_machine, current_ordinal, driver_version
from autotune.kernel.kernel import CheckedKernel, Kernel, compiled, raise_fault
from autotune.kernel.machine import Machine
from autotune.kernel.simulated import DEFAULT_TARGET, simulated_machine
from autotune.paths import NO_HOME, NOWHERE
from autotune.records import Store
from autotune.space.space import Space, families
from autotune.values.device import Device, whole_number
from autotune.values.problem import MATHS, Problem, asked_maths

if TYPE_CHECKING:
    from autotune.tuning.budget import Budget

Policy = Literal["any", "exact"]
Tune = bool | Literal["quick"]
QUICK: Literal["quick"] = "quick"
TUNE_VARIABLE = "AUTOTUNE_TUNE"
SIMULATOR = "simulator"
DOUBT = 1.15  # times what is predicted of tensor cores, which errs so much: FP32 lanes are the safe choice

_told: dict[str, object] = {}


def best_kernel(
    m: int,
    n: int,
    k: int,
    layout: str = "nn",
    *,
    beta: int = 0,
    math: str = "ffma",
    batch: int = 1,
    check_finite: bool = False,
    device: int | str | None = None,
    policy: Policy = "any",
    tune: Tune | None = None,
    budget: Budget | str | int = "60s",
    space: Space | str | Path | None = None,
    root: Path | str | None = None,
) -> Kernel:
    """Return the best kernel for a problem: the record of this very problem on this device, or a substitute.

    The substitute is what a model expects to be fastest, corrected by what was measured on GPUs of this name;
    `Kernel.served` is "exact" or "predicted". A kernel that does not compile here is passed over with a
    warning.

    Args:
        m: Rows of C.
        n: Columns of C.
        k: Length of each dot product.
        layout: "nn", "nt", "tn" or "tt": see `Problem`.
        beta: 1 for a kernel that reads C.
        math: Arithmetic: see `Problem`. "any" takes the fastest by the times that were measured for this very
            problem; one that was not must be predicted to beat it. `Kernel.problem` says which it is.
        batch: Products that one call computes: A, B and C are arrays `[batch, ...]` of such matrices.
        check_finite: Where the math is not "ffma": look at the operands before each call, and leave those
            with an infinity or NaN to the FP32 kernel, as `CheckedKernel` does.
        device: CUDA ordinal of a GPU; CuPy's current one when not given. "simulator" runs the kernel on NumPy
            arrays on the CPU, as an H200 would; "simulator:a100" as another GPU of the table.
        policy: "any" allows substitutes; "exact" only a record of this very problem and device.
        tune: True: search now if there is no such record; with math "any", for each math that has none.
            "quick": then compile the few points that the model expects to be fastest and time them in a child
            process, within seconds; what is predicted serves while a stream is captured, and where that
            fails. None: what the environment variable ``AUTOTUNE_TUNE`` says, "quick" or nothing.
        budget: Of a search that is not quick, as for `autotune.tune`; with math "any" a time for all
            searches together.
        space: The family to look at: a `Space`, a built-in family's name, or the path of a space file of your
            own; all built-in ones when not given.
        root: Folder of records; `autotune.paths.cache_dir` when not given.

    Raises:
        ProblemError: The problem is out of range.
        UsageError: The policy, device or ``tune`` is unknown, or no kernel family computes the problem.
        SpaceError: The space cannot be loaded, or nothing in it is legal for the problem.
        DeviceError: No usable GPU.
        RecordMissing: The policy is "exact" and no record serves; the message names the command to run.
        ToolchainError: Nothing could be compiled.

    >>> import numpy
    >>> kernel = best_kernel(33, 17, 20, device="simulator")
    >>> kernel.served
    'predicted'
    >>> kernel(numpy.ones((33, 20), "f"), numpy.ones((20, 17), "f"))[0, :3]
    array([20., 20., 20.], dtype=float32)
    """
    machine, store, spaces = machine_of(device), Store(root), None if space is None else [Space.of(space)]
    words: dict[str, Any] = {"layout": layout, "beta": beta, "batch": batch}
    problems = [Problem(m, n, k, math=each, **words) for each in asked_maths(math)]
    tune = asked_tune(tune, machine)
    if tune:
        search_missing(problems, machine, store, tune=tune, budget=budget, spaces=spaces)
    problem = fastest(problems, machine, policy, spaces, store)
    strict = None
    if check_finite and problem.math != MATHS[0]:
        strict = best_kernel(
            *(m, n, k, layout),
            beta=beta,
            batch=batch,
            device=device,
            policy=policy,
            tune=tune,
            budget=budget,
            root=root,
        )
    try:
        return load(problem, machine, store, policy=policy, spaces=spaces, strict=strict)
    except Exception as error:
        raise_fault(error)
        raise


def require_policy(policy: object) -> None:
    """Raise `UsageError` when a policy is none of `Policy`."""
    if not (isinstance(policy, str) and policy in get_args(Policy)):
        raise UsageError(f"policy {policy!r:.80} is unknown: give one of {', '.join(get_args(Policy))}")


def load(
    problem: Problem,
    machine: Machine,
    store: Store,
    *,
    policy: Policy = "any",
    spaces: Sequence[Space] | None = None,
    strict: Kernel | None = None,
) -> Kernel:
    """Load the first choice that compiles, once it is known where to run.

    Args:
        problem: The multiplication to compute.
        machine: The GPU, or the simulator of one.
        store: Where records are looked up.
        policy: As for `best_kernel`.
        spaces: The families to look at; all built-in ones when not given.
        strict: The FP32 kernel for operands that are not finite; a `CheckedKernel` is loaded then.

    Raises:
        RecordMissing: The policy is "exact" and no record serves.
        ToolchainError: Nothing could be compiled.
        DeviceError: Nothing could be loaded.
    """
    require_policy(policy)
    choices = Choices(problem, machine.device, store, spaces=spaces, begin=single.begin)
    failed: Exception | None = None
    for choice in choices.exact() if policy == "exact" else choices.all():
        outcome = compiled(choice, machine, store.depot)
        if isinstance(outcome, Binary):
            try:
                if strict is None:
                    kernel = Kernel(choice, outcome, machine, store.depot)
                else:
                    kernel = CheckedKernel(choice, outcome, machine, store.depot, strict=strict)
            except DeviceError as error:
                failed, why = error, str(error)
            else:
                for line in (*_differences(choice, outcome, machine), choice.note):
                    if line:
                        _tell(line)
                if store.root == NOWHERE:
                    _tell(f"compiled kernels are not kept: {NO_HOME}")
                return kernel
        else:
            why = f"it does not compile: {outcome.why}"
            failed = failed or ToolchainError(f"no kernel for {problem}: {choice.place} fails: {outcome.why}")
        _tell(f"{choice.place}, {choice.config.id}, is passed over: {why}")
    if failed is not None:
        raise failed
    raise RecordMissing(f"{choices.missing()}: run '{choices.command}', or pass tune=True or policy='any'")


def asked_tune(tune: object, machine: Machine) -> Tune:
    """Return how to search where there is no record: as the caller says, else as the environment does.

    Raises:
        UsageError: Either says what is unknown, or the caller asks for a search in the simulator.
    """
    if tune is not None:
        if not (isinstance(tune, bool | np.bool_) or (isinstance(tune, str) and tune == QUICK)):
            raise UsageError(f"tune {tune!r:.60} is unknown: give True, False, 'quick', or None")
        if tune and machine.ordinal is None:
            raise UsageError(
                f"nothing is tuned in the simulator: leave out tune={tune!r}, or run 'autotune tune'"
            )
        return QUICK if isinstance(tune, str) else bool(tune)
    told = os.environ.get(TUNE_VARIABLE, "")
    if told not in ("", QUICK):
        raise UsageError(f"{TUNE_VARIABLE}={told!r:.60} is unknown: set it to quick, or unset it")
    return QUICK if told and machine.ordinal is not None else False


def search_missing(
    problems: Sequence[Problem],
    machine: Machine,
    store: Store,
    *,
    tune: Tune = True,
    budget: Budget | str | int = "60s",
    spaces: Sequence[Space] | None = None,
    stream: int | None = None,
) -> None:
    """Search on a GPU for those problems that have no exact record, as `best_kernel` does.

    Args:
        problems: In one math each.
        machine: The GPU.
        store: Of the records.
        tune: How.
        budget: Of a search that is not quick.
        spaces: The family to look at; all built-in ones when not given.
        stream: What is quick waits for no stream that is captured; None for the current ones.
    """
    assert machine.ordinal is not None, "nothing is tuned in the simulator"

    def lacks(problem: Problem) -> bool:
        return next(Choices(problem, machine.device, store, spaces=spaces).exact(), None) is None

    able = problems if len(problems) == 1 else _able(problems, machine.device, spaces)
    lacking = [each for each in able if lacks(each)]
    if not lacking:
        return
    space = spaces[0] if spaces else None
    if tune == QUICK:
        if machine.capturing(stream):
            return
        from autotune.tuning.quick import tune_first

        for problem in lacking:
            why = tune_first(
                problem,
                machine.device,
                machine.ordinal,
                store,
                lacks=partial(lacks, problem),
                space=space,
                share=1 / len(lacking),
            )
            if why:
                _tell(f"tune='quick' measured nothing, and what is predicted is served: {why}", QUICK)
        return
    from autotune.tuning.budget import Budget
    from autotune.tuning.campaign import tune_all
    from autotune.tuning.request import Request
    from autotune.tuning.tuner import run
    from autotune.values.suite import Shape

    request = Request(
        budget=Budget.of(budget),
        space=space,
        gpus=(machine.ordinal,),
        root=store.root,
    )
    if len(problems) == 1:
        run(lacking[0], request)
    else:
        tune_all([Shape.of(problem) for problem in lacking], request)


def _able(problems: Sequence[Problem], device: Device, spaces: Sequence[Space] | None) -> list[Problem]:
    """Return those problems for whose math there is a family."""
    if spaces is None:
        return [problem for problem in problems if families(problem, device)]
    maths = {space.math for space in spaces}
    return [problem for problem in problems if problem.math in maths]


def fastest(
    problems: Sequence[Problem],
    machine: Machine,
    policy: Policy,
    spaces: Sequence[Space] | None,
    store: Store,
) -> Problem:
    """Return the problem whose math is served fastest."""
    if len(problems) == 1:
        return problems[0]
    able = _choices(problems, machine.device, spaces, store)
    times = {problem: choices.first_ms(exact=True) for problem, choices in able.items()}
    best = min(times, key=lambda each: times[each], default=problems[0])
    if policy == "any" and max(times.values(), default=0.0) == inf:
        # A time that was measured and one that was predicted tell nothing of each other: what has no record
        # meets the fastest that has one, as predicted.
        rivals = [each for each in able if each == best or times[each] == inf]
        best = min(rivals, key=lambda each: _expected_ms(able[each]))
    return best


def expected(
    problems: Sequence[Problem], device: Device, spaces: Sequence[Space] | None, store: Store
) -> Problem:
    """Return the problem whose math is predicted to be the fastest, whatever was measured."""
    able = _choices(problems, device, spaces, store)
    return min(able, key=lambda each: _expected_ms(able[each]), default=problems[0])


def _expected_ms(choices: Choices) -> float:
    """Return the time that counts where one math is predicted to be faster than another."""
    return choices.first_ms(exact=False) * (1.0 if choices.problem.math == MATHS[0] else DOUBT)


def _choices(
    problems: Sequence[Problem], device: Device, spaces: Sequence[Space] | None, store: Store
) -> dict[Problem, Choices]:
    """Return what could serve each problem for whose math there is a family."""
    return {
        problem: Choices(problem, device, store, spaces=spaces, begin=single.begin)
        for problem in _able(problems, device, spaces)
    }


def machine_of(device: int | str | None) -> Machine:
    """Return the machine that a ``device=`` names.

    Raises:
        UsageError: It names none.
        DeviceError: It is not a usable GPU of this process.
    """
    if device is None:
        return cuda_machine(current_ordinal())
    if isinstance(device, str):
        name, _, target = device.partition(":")
        if name == SIMULATOR:
            return simulated_machine(target or DEFAULT_TARGET)
    else:
        with suppress(UsageError):
            return cuda_machine(whole_number(device))
    raise UsageError(
        f"device {device!r:.60} is none: give the CUDA ordinal of a GPU, or 'simulator' or 'simulator:NAME'"
    )


def _differences(choice: Choice, binary: Binary, machine: Machine) -> Iterator[str]:
    """Yield what changed since an exact record was made without making it stale."""
    if choice.record is None or choice.served != "exact" or machine.ordinal is None:
        return
    changed = records.differences(
        choice.record,
        nvrtc=binary.nvrtc,
        driver=driver_version(),
    )
    digest = choice.record.machine_code_digest if choice.is_winner else None
    if not changed and digest is not None and digest != binary.digest:
        changed = ["NVRTC made other machine code of the same text"]
    for change in changed:  # the same words for every record, so that they are said once
        yield f"records were measured under other circumstances: {change}; 'autotune cache verify' times anew"


def _tell(message: str, kind: str = "") -> None:
    """Warn, once in a process for each message, or for each kind."""
    mark = object()
    first = _told.setdefault(kind or message, mark) is mark  # one step: no lock is held where a process forks
    if first:
        warnings.warn(message, stacklevel=4)
