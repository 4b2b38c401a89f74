"""Turns a problem into the kernel that should be fastest on a GPU that is not here: estimated, not measured.

Every legal config gets a static estimate; the most promising are compiled for the GPU, and estimated anew
with their real registers and spills; the best of them are executed in the simulator. No time is known in the
end, only an order: `autotune.tuner` measures.
"""

from __future__ import annotations

from collections.abc import Iterable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from autotune import records
from autotune.compiler import Binary, CompilePool, default_workers
from autotune.device import Device
from autotune.errors import ConfigError, Rejected, TuningError
from autotune.estimate import Estimate, estimate, estimate_columns
from autotune.pipeline import COMPILE_TIMEOUT_S, Pipeline, trial_header
from autotune.problem import Problem
from autotune.progress import Budget, Outcome, Progress, Trial, Watcher
from autotune.proof import prove
from autotune.records.trials import TrialLog, trials_path
from autotune.render import Launch
from autotune.search import require_seed
from autotune.space import Legal, Space
from autotune.verify import Verdict

BUDGET = "45s"
STRATEGY = "estimate"
ATTEMPTS = 5  # candidates that are simulated at most ...
PROOFS = 3  # ... until so many proved right


def foresee(
    problem: Problem,
    device: Device,
    *,
    space: Space | None = None,
    budget: Budget | str = BUDGET,
    seed: int = 0,
    workers: int | None = None,
    root: Path | None = None,
    watch: Watcher = lambda progress: None,
) -> records.Record:
    """Choose a kernel by estimate, prove it right in the simulator, and store it as estimated.

    Args:
        problem: What to compute.
        device: The GPU to choose for; none is used.
        space: Where to choose; the built-in ``sgemm`` when not given.
        budget: Of the compiling, a `Budget` or its text; the simulator takes some ten seconds more.
        seed: Breaks ties of the estimate, and draws the operands of the proof.
        workers: Compiling processes; one for each core when not given.
        root: Folder of records; `autotune.paths.cache_dir` when not given.
        watch: Told of every step.

    Returns:
        The record, as stored; it holds no time.

    Raises:
        UsageError: The budget or space is wrong, leaves no legal config, or is of a family without estimate.
        ToolchainError: NVRTC is missing or does not know the device.
        RecordError: The folder of records cannot be written.
        UnsupportedPTX: The simulator does not know an instruction of the kernel.
        TuningError: Not one candidate was usable.
    """
    budget = budget if isinstance(budget, Budget) else Budget.parse(budget)
    space = space or Space.load("sgemm")
    require_seed(seed)
    records.check_writable(root)
    header = trial_header(space, problem, device)  # without NVRTC there is nothing to begin
    legal = space.enumerate(problem, device)
    progress = Progress(problem, budget, device, len(legal), stage="compiling in the order of the estimate")
    ordered = order(space, legal, problem, device, seed)
    known = (records.find(device, space.family, problem, root=root, estimated=each) for each in (False, True))
    stored = [index for each in known if each is not None and (index := legal.index(each.config)) is not None]
    watch(progress)
    path = records.record_path(device, space.family, problem, root=root, estimated=True)
    with TrialLog(trials_path(path), header) as log:
        with CompilePool(workers or default_workers(spare=0), COMPILE_TIMEOUT_S) as pool:
            pool.warm()
            queue = _Queue([*stored, *space.starts(legal), *ordered])
            model = _Model(space, legal, problem, device)
            pipeline = Pipeline(space, legal, queue, pool, model, log, progress, watch, device)
            pipeline.run()
        progress.stage = "proving the best in the simulator"
        watch(progress)
        chosen, verdict = _proven(pipeline.trials, space, device, seed, log, progress, watch)
    record = _record(space, device, chosen, verdict, progress.searched(STRATEGY, seed))
    records.write(record, root=root)
    progress.stage = "done"
    watch(progress)
    return record


def order(space: Space, legal: Legal, problem: Problem, device: Device, seed: int = 0) -> list[int]:
    """List all legal points, most promising first by the estimate that needs no compiling.

    The model is blind to some parameters, so many points tie. Of each such set only the point nearest to a
    preset comes in the first round, chance deciding between several; then one more of each, and so on.

    Raises:
        ConfigError: The model needs a name that the family lacks.
    """
    cost = estimate_columns(space.columns(legal, problem, device), problem, device).astype(np.float32)
    steps = np.min(
        [legal.steps(preset) for preset in space.presets.values()] or [np.zeros(len(legal))], axis=0
    )
    chance = np.random.default_rng(seed).permutation(len(legal))
    best_first = np.lexsort((chance, steps, cost))
    ranked = cost[best_first]
    begins = np.flatnonzero(np.append(True, ranked[1:] != ranked[:-1]))  # of each set of ties
    turn = np.arange(len(legal)) - np.repeat(begins, np.diff(np.append(begins, len(legal))))
    return [int(index) for index in best_first[np.argsort(turn, kind="stable")]]


class _Queue:
    """Proposes points in a given order."""

    def __init__(self, points: Iterable[int]) -> None:
        self.asked = 0
        self._points = iter(dict.fromkeys(points))

    def ask(self) -> int | None:
        point = next(self._points, None)
        self.asked += point is not None
        return point

    def tell(self, index: int, median_ms: float | None) -> None:
        return


class _Model:
    """Stands where a pipeline has its GPU, and gives a binary its estimate at once."""

    waitables: tuple[Connection, ...] = ()
    next_deadline = None

    def __init__(self, space: Space, legal: Legal, problem: Problem, device: Device) -> None:
        self._space = space
        self._legal = legal
        self._problem = problem
        self._device = device
        self._finished: list[tuple[int, Outcome]] = []

    @property
    def pending(self) -> int:
        return len(self._finished)

    def submit(
        self, key: int, binary: Binary, launch: Launch, best_ms: float | None, timeout_s: float
    ) -> None:
        values = self._space.values(self._legal.config(key), self._problem, self._device)
        outcome: Outcome
        try:
            outcome = estimate(values, self._problem, self._device, binary.registers, binary.spill_bytes)
        except ConfigError as error:  # not one block fits on an SM
            outcome = Rejected("constraint", str(error))
        self._finished.append((key, outcome))

    def collect(self) -> list[tuple[int, Outcome]]:
        finished, self._finished = self._finished, []
        return finished


def _proven(
    trials: dict[int, Trial],
    space: Space,
    device: Device,
    seed: int,
    log: TrialLog,
    progress: Progress,
    watch: Watcher,
) -> tuple[Trial, Verdict]:
    """Simulate the best estimates of distinct machine code; return the best that proved right.

    Raises:
        TuningError: There is none.
    """
    ranked = sorted((each for each in trials.values() if isinstance(each.outcome, Estimate)), key=_cost)
    distinct: dict[str, Trial] = {}
    for trial in ranked:
        assert trial.binary is not None, "an estimate is made of a binary"
        distinct.setdefault(trial.binary.digest, trial)
    proven: list[tuple[Trial, Verdict]] = []
    for trial in list(distinct.values())[:ATTEMPTS]:
        verdict = prove(space, trial.config, progress.problem, device, seed)
        if isinstance(verdict, Verdict):
            proven.append((trial, verdict))
            log.append(trial.line() | {"outcome": "proven", "error": verdict.error, "inputs": verdict.inputs})
        else:
            progress.outcomes["estimated"] -= 1
            rejected = Trial(trial.source, trial.binary, verdict)
            progress.count(rejected)
            log.append(rejected.line())
        progress.best = proven[0][0] if proven else None
        watch(progress)
        if len(proven) == PROOFS:
            break
    if not proven:
        raise TuningError(progress.nothing_usable())
    return proven[0]


def _cost(trial: Trial) -> float:
    return trial.cost


def _record(
    space: Space, device: Device, chosen: Trial, verdict: Verdict, search: records.Search
) -> records.Record:
    source, binary = chosen.source, chosen.binary
    assert binary is not None, "an estimate is made of a binary"
    return records.Record(
        evidence="estimated",
        problem=source.problem,
        device=records.RecordedDevice.of(device),
        family=source.family,
        config=source.config,
        launch=records.Launch(**vars(source.launch)),
        code_digest=source.code_digest,
        template_digest=source.template_digest,
        space_digest=space.digest,
        toolchain=records.Toolchain(nvrtc=binary.nvrtc, driver=None, flags=binary.options),
        resources=records.Resources(binary.registers, binary.spill_bytes, binary.shared_bytes),
        timing=None,
        gflops=None,
        vs_cublas=None,
        cublas=None,
        verification=records.Verification(verdict.error, verdict.bound, verdict.inputs),
        search=search,
        finalists=(),
        created=records.now(),
    )
