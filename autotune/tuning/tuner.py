"""Turns a problem into its fastest verified kernel: search, compare with cuBLAS, record the winner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from autotune import records
from autotune.code import cubins
from autotune.errors import Rejected
from autotune.records.trials import Run, TrialLog, trials_path
from autotune.search import DEFAULT, Search, require_seed, require_strategy, strategy_name
from autotune.search.candidates import Candidates
from autotune.search.contest import Contest, FamilySearch
from autotune.space.space import Space, families
from autotune.tuning.blas import blas_threads
from autotune.tuning.finals import Standing, hold
from autotune.tuning.pipeline import Pipeline, trial_header
from autotune.tuning.progress import Budget, Progress, Trial, Watcher
from autotune.tuning.resume import Past, Stored, firsts
from autotune.tuning.workshop import Workshop
from autotune.values.measurement import L2, MeasuredTrial
from autotune.values.problem import Problem


def tune(
    problem: Problem,
    *,
    space: Space | None = None,
    budget: Budget | str = "60s",
    seed: int = 0,
    strategy: Any = DEFAULT,
    ordinal: int = 0,
    gpus: Sequence[int] = (),
    workers: int | None = None,
    cold: bool = False,
    resume: bool | None = None,
    storage: str | None = None,
    study: str | None = None,
    root: Path | None = None,
    watch: Watcher = lambda progress: None,
    began: float | None = None,
) -> records.Record:
    """Search for the fastest kernel, verify and re-time the best beside cuBLAS, and store the winner.

    A search continues what earlier ones left in its log: no candidate is measured again. Winners already
    stored, of every family that is searched, are timed with the finalists, so a short search cannot lose one.

    Args:
        problem: What to compute.
        space: Where to search; every built-in family that serves the problem when not given.
        budget: A `Budget`, or its text: "60s", of this run, or "300" candidates, those of earlier runs
            included.
        seed: Of the search's random choices, 0 to 2^32 - 1.
        strategy: A name of `autotune.search.STRATEGIES`, or an `optuna.samplers.BaseSampler`.
        ordinal: CUDA ordinal of the GPU.
        gpus: CUDA ordinals of several GPUs of one kind, which share the search; ``ordinal`` alone when empty.
        workers: Compiling processes; one for each core when not given: they yield to all else.
        cold: Time with operands that are not in the L2 cache.
        resume: None: continue a log of the same space, template, toolchain and device, and keep any other as
            an old one. True: one that cannot be continued is an error. False: keep it as an old one too.
        storage: Of an Optuna study that several processes and hosts share, see `autotune.sharing.Storage`;
            the outcomes of all of them count then, in the place of the log's.
        study: Its name; made from what its processes must agree on when not given.
        root: Folder of records; `autotune.paths.cache_dir` when not given.
        watch: Told of every step.
        began: When the command began (`time.monotonic`), for the log; now when not given.

    Returns:
        The record, as stored.

    Raises:
        UsageError: The budget, strategy or space is wrong, or leaves no legal config; the storage cannot be
            used; or `resume` is True and the log is of another space, template, toolchain or device.
        DeviceError: No usable GPU, or too little memory for the operands.
        ToolchainError: NVRTC is missing or does not know the GPU.
        RecordError: The folder of records cannot be written.
        TuningError: Not one candidate was usable.
    """
    request = Request(
        budget=Budget.of(budget),
        space=space,
        seed=seed,
        strategy=strategy,
        cold=cold,
        resume=resume,
        storage=storage,
        study=study,
        root=root,
        watch=watch,
    )
    progress = request.begin(problem, began)
    with Workshop(list(gpus) or [ordinal], problem, workers=workers, cold=cold) as shop:
        return search(problem, shop, request, progress)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a search is asked for, as the arguments of `tune` say it.

    Raises:
        UsageError: The strategy or seed is wrong.
        RecordError: The folder of records cannot be written.
    """

    budget: Budget
    space: Space | None = None
    seed: int = 0
    strategy: Any = DEFAULT
    cold: bool = False
    resume: bool | None = None
    storage: str | None = None
    study: str | None = None
    root: Path | None = None
    watch: Watcher = lambda progress: None

    def __post_init__(self) -> None:
        require_strategy(self.strategy)
        require_seed(self.seed)
        records.check_writable(self.root)

    def begin(self, problem: Problem, began: float | None = None) -> Progress:
        """Begin the progress of a search, at a time (`time.monotonic`) or now, and tell the watcher."""
        progress = Progress(problem, self.budget)
        progress.began = progress.began if began is None else began
        self.watch(progress)
        return progress


def search(problem: Problem, shop: Workshop, request: Request, progress: Progress) -> records.Record:
    """Do what `tune` does with workers that measure the problem and compilers that run already.

    Raises:
        AutotuneError: As for `tune`.
    """
    watch, root = request.watch, request.root
    with blas_threads(1), ExitStack() as opened:
        device, driver = shop.identity()
        progress.device, progress.stage = device, "listing the candidates"
        watch(progress)
        spaces = families(problem, device) if request.space is None else [request.space]
        candidates = Candidates(spaces, problem, device)
        progress.legal = len(candidates)
        progress.notes += [f"left out: {why}" for why in candidates.without]

        logs = [opened.enter_context(each) for each in _logs(candidates, driver, request, progress)]
        stored = Stored.find(candidates, root)
        past = Past.read(candidates, logs, required=request.resume is True)
        begins = firsts(candidates, stored, past, root)
        searches = _searches(candidates, begins, logs, request, progress, opened)
        starts = [
            len(set(family.numbers(first)) - set(past.trials))
            for family, first in zip(candidates.families, begins, strict=True)
        ]
        contest = Contest(candidates, searches, starts)
        pipeline = Pipeline(candidates, contest, shop.pool, shop.gpus, logs, progress, watch)
        strategy = strategy_name(request.strategy)
        for log in logs:
            log.event("begin", strategy=strategy, seed=request.seed, budget=str(request.budget))
        pipeline.recall(past.trials)
        progress.stage = "searching"
        progress.end("start")
        watch(progress)
        busy = [gpu.busy_s for gpu in shop.gpus]
        pipeline.run()
        progress.add("gpu", sum(gpu.busy_s for gpu in shop.gpus) - sum(busy))
        for shared in (each for each in searches if isinstance(each, _Shared)):
            shared.close()  # nobody waits for what was under way here
        pipeline.adopt(_others(candidates, searches, pipeline))
        progress.end("search")

        progress.stage = "checking the finalists in full and timing them beside cuBLAS"
        watch(progress)
        gpu = shop.gpus[pipeline.working[0]]
        standing = hold(pipeline, candidates, list(stored.records), gpu, logs, progress)
        facts = standing.facts
        for log in logs:
            log.event("gpu", uuid=facts.uuid, pci_bus_id=facts.pci_bus_id, start_s=dict(facts.start_s))
    progress.end("finals")
    record = _store(standing, stored, pipeline, progress.searched(strategy, request.seed), root)
    progress.stage = "done"
    watch(progress)
    return record


@runtime_checkable
class _Shared(Protocol):
    """A search that knows what others found; `autotune.sharing.SharedSearch` is one."""

    def outcomes(self) -> Mapping[int, Any]:
        """List by point what became of it."""
        ...

    def close(self) -> None:
        """Give back what was not told."""
        ...


def _logs(candidates: Candidates, driver: str, request: Request, progress: Progress) -> list[TrialLog]:
    """Name the log of each family; nothing is opened yet."""
    run = Run(progress.began)
    l2: L2 = "cold" if request.cold else "warm"
    logs = []
    for family in candidates.families:
        header = trial_header(family.space, candidates.problem, candidates.device, driver, l2)
        path = records.record_path(candidates.device, family.name, candidates.problem, root=request.root)
        logs.append(TrialLog(trials_path(path), header, run, anew=request.resume is False))
    return logs


def _searches(
    candidates: Candidates,
    begins: Sequence[list[int]],
    logs: Sequence[TrialLog],
    request: Request,
    progress: Progress,
    opened: ExitStack,
) -> list[FamilySearch]:
    """Open a search of each family: of this process alone, or one that a storage's processes share."""
    seed, strategy = request.seed, request.strategy
    if request.storage is None:
        return [
            Search(family.legal, seed=seed, first=first, strategy=strategy)
            for family, first in zip(candidates.families, begins, strict=True)
        ]
    from autotune.sharing import Storage, open_search

    storage = Storage(request.storage)
    say = progress.notes.append
    return [
        opened.enter_context(
            open_search(
                storage,
                request.study,
                family.legal,
                log.header,
                seed=seed,
                first=first,
                strategy=strategy,
                say=say,
            )
        )
        for family, first, log in zip(candidates.families, begins, logs, strict=True)
    ]


def _others(candidates: Candidates, searches: Sequence[FamilySearch], pipeline: Pipeline) -> dict[int, Trial]:
    """List what other processes of a shared study measured."""
    found = {}
    for family, search_ in zip(candidates.families, searches, strict=True):
        for point, told in (search_.outcomes() if isinstance(search_, _Shared) else {}).items():
            number = family.begin + point
            if number not in pipeline.trials:
                config = family.legal.config(point)
                found[number] = Trial.told(family.name, config, told.median_ms, told.outcome, told.why)
    return found


def _store(
    standing: Standing, stored: Stored, pipeline: Pipeline, search: records.Search, root: Path | None
) -> records.Record:
    """Store the winner, and bring the stored winners that it met up to date."""
    candidates = standing.candidates
    record = standing.record(standing.winner, search)
    for number in standing.order:  # compiling the text again need not give the machine code that was measured
        built = standing.built[number]
        cubins.put(built.source.text, built.binary, candidates.device.arch, root=root)
    over = None
    for number, old in stored.records.items():
        outcome = standing.finals.outcomes.get(number)
        trial = pipeline.trials.get(number)
        wrong = [each for each in (outcome, trial and trial.outcome) if isinstance(each, Rejected)]
        if old.family == record.family:
            over = old if outcome is not None or wrong else None
        elif any(each.kind == "correctness" for each in wrong):
            records.set_aside(
                records.record_path(candidates.device, old.family, candidates.problem, root=root)
            )
        elif isinstance(outcome, MeasuredTrial) and _faster(old, record):
            # The fastest record of any family is served: a time of another day must not decide.
            records.offer(standing.record(number, search), over=old, root=root)
    return records.offer(record, over=over, root=root)


def _faster(old: records.Record, record: records.Record) -> bool:
    return (
        old.timing is not None
        and record.timing is not None
        and old.timing.median_ms <= record.timing.median_ms
    )
