"""Turns a problem into the best `Kernel` that there is for it, without ever searching unless asked to."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, get_args

from autotune import records
from autotune.code import cubins
from autotune.code.compiler import Binary
from autotune.errors import DeviceError, RecordMissing, Rejected, ToolchainError, UsageError
from autotune.kernel.checked import CheckedKernel
from autotune.kernel.choices import Choice, Choices
from autotune.kernel.cuda import cuda_machine, current_ordinal, driver_version
from autotune.kernel.kernel import Kernel, Machine
from autotune.kernel.simulated import DEFAULT_TARGET, simulated_machine
from autotune.space.space import Space, families
from autotune.values.problem import ANY, MATHS, Math, Problem
from autotune.values.suite import Shape

Policy = Literal["any", "exact"]
SIMULATOR = "simulator"

_told: set[str] = set()
_telling = threading.Lock()


def best_kernel(
    m: int,
    n: int,
    k: int,
    layout: str = "nn",
    *,
    beta: int = 0,
    math: str = "ffma",
    check_finite: bool = False,
    device: int | str | None = None,
    policy: Policy = "any",
    tune: bool = False,
    budget: str = "60s",
    space: Space | None = None,
    root: Path | None = None,
) -> Kernel:
    """Find the best kernel for a problem: the record of this very problem on this device, or what comes next.

    What comes next: the record of the nearest size, one of another GPU of the same compute capability, a
    preset; `Kernel.served` says which. A record that does not compile here is passed over with a warning.

    Args:
        m: Rows of C.
        n: Columns of C.
        k: Length of each dot product.
        layout: "nn", "nt", "tn" or "tt": see `Problem`.
        beta: 1 for a kernel that reads C.
        math: Arithmetic: see `Problem`. "any" takes what is served fastest, of all: by its time where it was
            measured for this very problem, else by the static estimate; `Kernel.problem` says which it is.
        check_finite: Where the math is "3xtf32": look at the operands before each call, and leave those with
            an infinity or NaN to the FP32 kernel, as `CheckedKernel` does.
        device: CUDA ordinal of a GPU; CuPy's current one when not given. "simulator" runs the kernel on NumPy
            arrays on the CPU, as an H200 would; "simulator:a100" as another GPU of the table.
        policy: "any" takes what comes next; "exact" only a record of this very problem and device.
        tune: Search now if there is no such record; with math "any", for each math that has none.
        budget: Of that search, or of those searches together: a time then.
        space: The family to look at, such as one of your own; all built-in ones when not given.
        root: Folder of records; `autotune.paths.cache_dir` when not given.

    Raises:
        ProblemError: The problem is out of range.
        UsageError: The policy or device is none, or no kernel family computes the problem.
        DeviceError: No usable GPU.
        RecordMissing: The policy is "exact" and no record serves; the message names the command to run.
        ToolchainError: Nothing could be compiled.

    >>> import numpy
    >>> kernel = best_kernel(33, 17, 20, device="simulator")
    >>> kernel.served
    'nearest'
    >>> kernel(numpy.ones((33, 20), "f"), numpy.ones((20, 17), "f"))[0, :3]
    array([20., 20., 20.], dtype=float32)
    """
    if math == ANY:
        problems = [Problem(m, n, k, layout, beta, each) for each in MATHS]  # type: ignore[arg-type]
        math = _fastest(problems, machine_of(device), policy, tune, budget, space, root)
        tune = False
    problem = Problem(m, n, k, layout, beta, math)  # type: ignore[arg-type]  # Problem checks the words
    if check_finite and problem.math != "ffma":
        wanted = {"device": device, "policy": policy, "tune": tune, "budget": budget, "root": root}
        emulating = best_kernel(m, n, k, layout, beta=beta, math=math, space=space, **wanted)  # type: ignore[arg-type]
        return CheckedKernel(emulating, best_kernel(m, n, k, layout, beta=beta, **wanted))  # type: ignore[arg-type]
    spaces = None if space is None else [space]
    machine = machine_of(device)
    if tune:
        if machine.ordinal is None:
            raise UsageError("nothing is tuned in the simulator: leave out tune=True, or run 'autotune tune'")
        choices = Choices(problem, machine.device, spaces=spaces, root=root)
        if next(choices.exact(), None) is None:
            from autotune.tuning.tuner import tune as search

            search(problem, space=space, budget=budget, ordinal=machine.ordinal, root=root)
    return load(problem, machine, policy=policy, spaces=spaces, root=root)


def require_policy(policy: object) -> None:
    """Raise `UsageError` when a policy is none of `Policy`."""
    if not (isinstance(policy, str) and policy in get_args(Policy)):
        raise UsageError(f"policy {policy!r:.80} is unknown: give one of {', '.join(get_args(Policy))}")


def load(
    problem: Problem,
    machine: Machine,
    *,
    policy: Policy = "any",
    spaces: Sequence[Space] | None = None,
    root: Path | None = None,
) -> Kernel:
    """Load the first choice that compiles: what `best_kernel` does once it knows where to run.

    Args:
        problem: What is to be computed.
        machine: Where.
        policy: As for `best_kernel`.
        spaces: The families to look at; all built-in ones when not given.
        root: Folder of records.

    Raises:
        RecordMissing: The policy is "exact" and no record serves.
        ToolchainError: Nothing could be compiled.
        DeviceError: Nothing could be loaded.
    """
    require_policy(policy)
    choices = Choices(problem, machine.device, spaces=spaces, root=root)
    failed: Exception | None = None
    for choice in choices.exact() if policy == "exact" else choices.all():
        outcome = _compiled(choice, machine, root)
        if isinstance(outcome, Binary):
            try:
                kernel = Kernel(choice, outcome, machine, machine.device, root)
            except DeviceError as error:
                failed, why = error, str(error)
            else:
                for line in _differences(choice, outcome, machine):
                    _tell(line)
                return kernel
        else:
            why = f"it does not compile: {outcome.why}"
            failed = failed or ToolchainError(f"no kernel for {problem}: {choice.place} fails: {outcome.why}")
        _tell(f"{choice.place}, {choice.config.id}, is passed over: {why}")
    if failed is not None:
        raise failed
    command = f"autotune tune {problem.cli_flags()}"
    raise RecordMissing(f"{choices.missing()}: run '{command}', or pass tune=True or policy='any'")


def _fastest(
    problems: Sequence[Problem],
    machine: Machine,
    policy: Policy,
    tune: bool,
    budget: str,
    space: Space | None,
    root: Path | None,
) -> Math:
    """Choose the math that is served fastest, after a search for each that has no record, where asked to."""
    spaces = None if space is None else [space]
    if space is None:
        able = [problem for problem in problems if families(problem, machine.device)]
    else:
        able = [problem for problem in problems if problem.math == (space.math or MATHS[0])]
    found = {problem: Choices(problem, machine.device, spaces=spaces, root=root) for problem in able}
    lacking = [problem for problem, choices in found.items() if next(choices.exact(), None) is None]
    if tune and lacking and machine.ordinal is not None:
        from autotune.tuning.campaign import tune_all
        from autotune.tuning.progress import Budget
        from autotune.tuning.tuner import Request

        request = Request(budget=Budget.of(budget), space=space, root=root)
        tune_all([Shape.of(problem) for problem in lacking], request, gpus=[machine.ordinal])
        found = {problem: Choices(problem, machine.device, spaces=spaces, root=root) for problem in able}
    times: dict[Math, float] = {}
    for problem, choices in found.items():
        with suppress(UsageError):  # a family serves the problem, and none of its configs is legal
            first = next(choices.exact() if policy == "exact" else choices.all(), None)
            if first is not None:
                times[problem.math] = choices.expected_ms(first)
    return min(times, key=lambda each: times[each], default=problems[0].math)


def machine_of(device: int | str | None) -> Machine:
    """Find the machine that a ``device=`` names.

    Raises:
        UsageError: It names none.
        DeviceError: It is no usable GPU of this process.
    """
    if device is None:
        return cuda_machine(current_ordinal())
    if isinstance(device, int) and not isinstance(device, bool):
        return cuda_machine(device)
    if isinstance(device, str):
        name, _, target = device.partition(":")
        if name == SIMULATOR:
            return simulated_machine(target or DEFAULT_TARGET)
    raise UsageError(
        f"device {device!r} is none: give the CUDA ordinal of a GPU, or 'simulator' or 'simulator:NAME'"
    )


def _compiled(choice: Choice, machine: Machine, root: Path | None) -> Binary | Rejected:
    measured_with = choice.record.toolchain.nvrtc if choice.record and choice.served == "exact" else None
    source = choice.source
    return cubins.load_or_compile(
        source.text,
        source.entry,
        machine.device.arch,
        nvrtc=measured_with,
        options=machine.options,
        root=root,
    )


def _differences(choice: Choice, binary: Binary, machine: Machine) -> Iterator[str]:
    """Say what changed since an exact record was made without making it stale."""
    if choice.record is None or choice.served != "exact" or machine.ordinal is None:
        return
    changed = records.differences(
        choice.record,
        nvrtc=binary.nvrtc,
        driver=driver_version(),
        template_digest=choice.source.template_digest,
        space_digest=choice.source.space_digest,
    )
    for change in changed:  # the same words for every record, so that they are said once
        yield f"records were measured under other circumstances: {change}; 'autotune cache verify' times anew"


def _tell(message: str) -> None:
    """Warn, once in a process."""
    with _telling:
        if message in _told:
            return
        _told.add(message)
    warnings.warn(message, stacklevel=4)
