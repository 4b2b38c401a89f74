"""Turns a problem into its fastest verified kernel: search, compare with cuBLAS, record the winner."""

from __future__ import annotations

import heapq
from pathlib import Path

from autotune import records
from autotune.compiler import CompilePool, default_workers
from autotune.errors import Rejected, TuningError
from autotune.gpu.worker import Finals, GpuFacts, GpuWorker, MeasuredTrial
from autotune.pipeline import COMPILE_TIMEOUT_S, Pipeline, trial_header, trial_limit
from autotune.problem import Problem
from autotune.progress import Budget, Progress, Trial, Watcher
from autotune.records.trials import TrialLog, trials_path
from autotune.render import Launch
from autotune.search import Search, require_seed, require_strategy
from autotune.space import Space
from autotune.timing import tied

FINALS_TIMEOUT_S = 30.0
FINALISTS = 8


def tune(
    problem: Problem,
    *,
    space: Space | None = None,
    budget: Budget | str = "60s",
    seed: int = 0,
    strategy: str = "tpe",
    ordinal: int = 0,
    workers: int | None = None,
    cold: bool = False,
    root: Path | None = None,
    watch: Watcher = lambda progress: None,
) -> records.Record:
    """Search for the fastest kernel, verify and re-time the best beside cuBLAS, and store the winner.

    A winner already stored is measured again with the others, so a short search cannot lose it.

    Args:
        problem: What to compute.
        space: Where to search; the built-in ``sgemm`` when not given.
        budget: A `Budget`, or its text: "60s" or "300".
        seed: Of the search's random choices, 0 to 2^32 - 1.
        strategy: "tpe", "random" or "exhaustive".
        ordinal: CUDA ordinal of the GPU.
        workers: Compiling processes; all cores but one when not given.
        cold: Time with operands that are not in the L2 cache.
        root: Folder of records; `autotune.paths.cache_dir` when not given.
        watch: Told of every step.

    Returns:
        The record, as stored.

    Raises:
        UsageError: The budget, strategy or space is wrong, or leaves no legal config.
        DeviceError: No usable GPU, or too little memory for the operands.
        ToolchainError: NVRTC is missing or does not know the GPU.
        RecordError: The folder of records cannot be written.
        TuningError: Not one candidate was usable.
    """
    budget = budget if isinstance(budget, Budget) else Budget.parse(budget)
    space = space or Space.load("sgemm")
    require_strategy(strategy)
    require_seed(seed)
    records.check_writable(root)
    progress = Progress(problem, budget)
    watch(progress)
    with (
        CompilePool(workers or default_workers(), COMPILE_TIMEOUT_S) as pool,
        GpuWorker(ordinal, problem, cold=cold) as gpu,
    ):
        pool.warm()
        facts = gpu.ready()
        device = progress.device = facts.device
        legal = space.enumerate(problem, device)
        progress.legal, progress.stage = len(legal), "searching"
        watch(progress)

        stored = records.find(device, space.family, problem, root=root)
        defended = None if stored is None else legal.index(stored.config)
        first = [*([] if defended is None else [defended]), *space.starts(legal)]
        search = Search(legal, seed=seed, first=first, strategy=strategy)
        path = records.record_path(device, space.family, problem, root=root)
        with TrialLog(trials_path(path), trial_header(space, problem, device)) as log:
            pipeline = Pipeline(space, legal, search, pool, gpu, log, progress, watch, device)
            pipeline.run()

        progress.stage = "checking the finalists in full and timing them beside cuBLAS"
        watch(progress)
        chosen = _finalists(pipeline.trials, defended, progress)
        finals = gpu.finals(
            [
                (trial.config, trial.binary, trial.source.launch)
                for trial in chosen
                if trial.binary is not None
            ],
            FINALS_TIMEOUT_S + trial_limit(problem),
        )
    record = _record(space, chosen, finals, facts, progress.searched(strategy, seed))
    records.write(record, root=root)
    progress.stage = "done"
    watch(progress)
    return record


def _finalists(trials: dict[int, Trial], defended: int | None, progress: Progress) -> list[Trial]:
    """Choose the fastest candidates of distinct machine code, and the stored winner if it is not among them.

    Raises:
        TuningError: Nothing was measured.
    """
    measured = [(trial.median_ms, index) for index, trial in trials.items() if trial.median_ms is not None]
    if not measured:
        raise TuningError(progress.nothing_usable())
    chosen: dict[tuple[str, Launch], int] = {}
    for _, index in heapq.nsmallest(4 * FINALISTS, measured):
        binary = trials[index].binary
        if binary is not None and len(chosen) < FINALISTS:
            chosen.setdefault((binary.digest, trials[index].source.launch), index)
    indices = list(chosen.values())
    if defended in trials and defended not in indices and trials[defended].median_ms is not None:
        indices.append(defended)
    return [trials[index] for index in indices]


def _record(
    space: Space, chosen: list[Trial], finals: Finals, facts: GpuFacts, search: records.Search
) -> records.Record:
    """Make the record of the fastest finalist.

    Raises:
        TuningError: No finalist passed the full verification.
    """
    passed: list[tuple[MeasuredTrial, Trial]] = []
    failed: list[str] = []
    for trial in chosen:
        outcome = finals.outcomes[trial.config]
        if isinstance(outcome, Rejected):
            failed.append(f"{trial.config.id}: {outcome.kind}, {outcome.why}")
        else:
            passed.append((outcome, trial))
    if not passed:
        raise TuningError(f"no finalist passed the full verification: {'; '.join(failed)}")
    passed.sort(key=lambda pair: pair[0].timing.median_ms)
    won, trial = passed[0]
    timing, source, binary, cublas = won.timing, trial.source, trial.binary, finals.cublas
    assert binary is not None, "a candidate without machine code is no finalist"
    return records.Record(
        evidence="measured",
        problem=source.problem,
        device=records.RecordedDevice.of(facts.device),
        family=source.family,
        config=source.config,
        launch=records.Launch(**vars(source.launch)),
        code_digest=source.code_digest,
        template_digest=source.template_digest,
        space_digest=space.digest,
        toolchain=records.Toolchain(nvrtc=binary.nvrtc, driver=facts.driver, flags=binary.options),
        resources=records.Resources(binary.registers, binary.spill_bytes, binary.shared_bytes),
        timing=records.Timing(**vars(timing)),
        gflops=source.problem.flops / timing.median_ms / 1e6,
        vs_cublas=None if cublas is None else cublas.median_ms / timing.median_ms,
        cublas=None if cublas is None else records.Cublas(cublas.median_ms, finals.cublas_kernel),
        verification=records.Verification(won.verdict.error, won.verdict.bound, won.verdict.inputs),
        search=search,
        finalists=tuple(
            records.Finalist(
                config=each.config,
                median_ms=outcome.timing.median_ms,
                quantiles=outcome.timing.quantiles,
                tied=tied(outcome.timing, timing),
            )
            for outcome, each in passed
        ),
        created=records.now(),
    )
