"""The tuning of many shapes within one budget, in which easy shapes leave time for hard ones.

Every shape in turn gets an equal share of what is left, and ends early when nothing improves any more. What
they leave over goes to those that were still improving when their share ended, in further rounds: their
searches go on from their logs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autotune import records
from autotune.errors import AutotuneError, DeviceError, MachineError, ToolchainError, UsageError
from autotune.tuning.budget import Budget
from autotune.tuning.progress import Progress
from autotune.tuning.request import Request
from autotune.tuning.tuner import Workshop, search
from autotune.values.problem import Problem
from autotune.values.suite import Shape

PATIENCE = 160  # candidates in a row without an improvement, after which a shape counts as done
LEAST_S = 2.0  # of searching, in any round
OVERHEAD_S = 5.0  # of a shape's start and finals, until the first have shown it
ROUNDS = 4


@dataclass(frozen=True)
class Tuned:
    """The outcome of a shape.

    Attributes:
        shape: The shape.
        record: Its winner; None where there is none.
        why: Why there is none; "" where there is.
        settled: Its search ended by itself: nothing improved any more, or nothing was left.
        seconds: Spent on it.
        paused: Seconds of them in which the process was stopped.
    """

    shape: Shape
    record: records.Record | None = None
    why: str = ""
    settled: bool = False
    seconds: float = 0.0
    paused: float = 0.0


def tune_all(
    shapes: Sequence[Shape],
    request: Request,
    told: Callable[[Tuned], None] = lambda tuned: None,
) -> list[Tuned]:
    """Tune every shape, and store the winners.

    Args:
        shapes: One or more; of those with one problem the first stands for all.
        request: What to search for each; its budget, in seconds, is for all together.
        told: Called with the outcome of a shape, after each of its rounds.

    Returns:
        One for each problem, in the order of the shapes.

    Raises:
        UsageError: There is no shape, or the budget is no time.
        DeviceError: No usable GPU.
        MachineError: The machine failed again and again; what was stored before stays.
        ToolchainError: NVRTC is missing or does not know the GPU.
    """
    began = time.monotonic() if request.began is None else request.began
    if not shapes:
        raise UsageError("the suite has no shape to tune")
    if request.budget.evaluations is not None:
        raise UsageError(
            f"budget {request.budget} is a number of candidates: give a time for all shapes, such as 8m"
        )
    found = {shape.problem: Tuned(shape) for shape in reversed(shapes)}
    order = list(dict.fromkeys(shape.problem for shape in shapes))
    end = began + request.budget.seconds
    overheads: list[float] = []
    with Workshop(order[0], request) as shop:
        try:
            shop.identity()
        except DeviceError:
            if not shop.known:  # else it cannot measure the first shape: the next one may fit
                raise
        waiting = order
        for round_ in range(ROUNDS):
            for place, problem in enumerate(waiting):
                overhead = sum(overheads) / len(overheads) if overheads else OVERHEAD_S
                share = (end - time.monotonic()) / (len(waiting) - place) - overhead
                if round_ and share < LEAST_S:
                    continue  # its winner is stored
                budget = Budget(seconds=max(LEAST_S, share), patience=PATIENCE)
                resume = request.resume if not round_ else None
                once = replace(request, budget=budget, resume=resume, began=None)
                before = found[problem].paused
                told(_tuned(shop, problem, once, found, overheads))
                end += found[problem].paused - before
            waiting = [problem for problem in order if not found[problem].settled]
    return [found[problem] for problem in order]


def _tuned(
    shop: Workshop,
    problem: Problem,
    request: Request,
    found: dict[Problem, Tuned],
    overheads: list[float],
) -> Tuned:
    """Search for one shape for one round, and keep the outcome."""
    before = found[problem]
    started = time.monotonic()
    progress: Progress | None = None
    record, why, settled = before.record, "", True
    try:
        shop.turn_to(problem)
        progress = request.progress(problem)
        request.watch(progress)
        record = search(problem, shop, request, progress)
        settled = _settled(progress, request.budget)
    except MachineError:
        raise
    except AutotuneError as error:
        if isinstance(error, DeviceError | ToolchainError) and not shop.known:  # not this shape's fault
            raise
        why = str(error)
    seconds = time.monotonic() - started
    if progress is not None and not why:
        overheads.append(seconds - progress.seconds - progress.paused)
    paused = 0.0 if progress is None else progress.paused
    tuned = Tuned(
        before.shape,
        record,
        why if record is None else "",
        settled,
        before.seconds + seconds,
        before.paused + paused,
    )
    found[problem] = tuned
    return tuned


def _settled(progress: Progress, budget: Budget) -> bool:
    """Return whether a search ended by itself."""
    return progress.seen == progress.legal or progress.stale >= (budget.patience or 0)
