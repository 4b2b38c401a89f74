"""`tune`: search for the fastest kernel of a problem, compare it with cuBLAS, and store it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from autotune import records
from autotune.errors import DeviceError, UsageError
from autotune.measure.worker import GpuWorker
from autotune.records.schema import QUICK
from autotune.records.trials import Run, TrialLog
from autotune.search import DEFAULT, Search, strategy_name
from autotune.search.candidates import Candidates
from autotune.search.contest import Contest, Proposer
from autotune.search.queue import Queue
from autotune.space.space import Config, Space, families
from autotune.tuning.budget import Budget
from autotune.tuning.finals import FINALISTS, QUICK_FINALISTS, hold, store, sustain, sustained_s
from autotune.tuning.pipeline import Pipeline
from autotune.tuning.prediction import first_points
from autotune.tuning.progress import Progress, Watcher
from autotune.tuning.request import Request, ordinals_of
from autotune.tuning.resume import Past, Stored, firsts, logs_of
from autotune.tuning.trial import Trial
from autotune.values.device import Device
from autotune.values.problem import Problem

if TYPE_CHECKING:
    from autotune.sharing import SharedSearch


def tune(
    problem: Problem,
    *,
    space: Space | str | Path | None = None,
    budget: Budget | str | int = "60s",
    seed: int = 0,
    strategy: Any = DEFAULT,
    ordinal: int = 0,
    gpus: Sequence[int] = (),
    workers: int | None = None,
    cold: bool = False,
    resume: bool | None = None,
    storage: str | None = None,
    study: str | None = None,
    root: Path | str | None = None,
    watch: Watcher = lambda progress: None,
    began: float | None = None,
) -> records.Record:
    """Search for the fastest kernel, verify and re-time the best beside cuBLAS, and store the winner.

    A search continues what earlier ones left in its log: no candidate is measured again. Winners already
    stored, of every family that is searched, are timed with the finalists, so a short search cannot lose one.

    Args:
        problem: What to compute.
        space: Where to search: a `Space`, a family's name or the path of a .toml file; every built-in family
            that serves the problem when not given.
        budget: A `Budget`, or what it is read from: "60s", of this run, or 300 candidates, those of earlier
            runs included.
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
        space=None if space is None else Space.of(space),
        seed=seed,
        strategy=strategy,
        gpus=ordinals_of(gpus) or (ordinal,),
        workers=workers,
        cold=cold,
        resume=resume,
        storage=storage,
        study=study,
        root=root,
        watch=watch,
        began=began,
    )
    return run(problem, request)


def run(problem: Problem, request: Request) -> records.Record:
    """Do what `tune` does: search on the GPUs of the request, or estimate for its target.

    Raises:
        AutotuneError: As for `tune` and `autotune.tuning.foresight.foresee`.
    """
    if not isinstance(problem, Problem):
        raise UsageError(
            f"{problem!r:.60} is not a problem: give an autotune.Problem, such as Problem(64, 64, 64)"
        )
    if request.target is not None:
        from autotune.tuning.foresight import foresee

        return foresee(problem, request.target, request)
    progress = request.progress(problem)
    request.watch(progress)
    with Workshop(problem, request) as shop:
        return search(problem, shop, request, progress)


class Workshop:
    """A worker for each GPU, and the compile processes that they share; all start at once.

    Args:
        problem: What the workers are to measure first.
        request: Its GPUs, number of compilers, and state of L2 are what counts.

    Attributes:
        pool: Compiles.
        gpus: Workers in the order of the ordinals.
    """

    def __init__(self, problem: Problem, request: Request) -> None:
        self._ordinals = request.gpus
        with ExitStack() as opening:  # what is open closes again if something fails here
            self.gpus = [
                opening.enter_context(GpuWorker(ordinal, problem, cold=request.cold))
                for ordinal in self._ordinals
            ]
            self.pool = opening.enter_context(request.compilers())
            needed = ("jinja2",) if request.first is not None else ("optuna", "jinja2")
            for name in needed:  # half a second, while they start
                import_module(name)
            self._open = opening.pop_all()

    def __enter__(self) -> Workshop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)

    def identity(self) -> tuple[Device, str]:
        """Wait until the GPUs are known: the device that all of them are, and the driver's version.

        Raises:
            UsageError: They are not of one kind.
            DeviceError: One cannot be used.
            ToolchainError: Likewise.
        """
        (device, driver), *others = [gpu.identity() for gpu in self.gpus]
        for ordinal, (other, _) in zip(self._ordinals[1:], others, strict=True):
            if (other.slug, other.sm_count) != (device.slug, device.sm_count):
                raise UsageError(
                    f"GPU {self._ordinals[0]} is {_named(device)} and GPU {ordinal} is {_named(other)}: "
                    "one search needs GPUs of one kind"
                )
        return device, driver

    @property
    def known(self) -> bool:
        """Whether every GPU was identified, even if it cannot measure the problem."""
        return all(gpu.known for gpu in self.gpus)

    def turn_to(self, problem: Problem) -> None:
        """Have the workers measure another problem; what is pending is forgotten."""
        self.pool.drop()
        for gpu in self.gpus:
            gpu.turn_to(problem)


def _named(device: Device) -> str:
    return f"{device.name}{f' {device.mig}' if device.mig else ''} with {device.sm_count} SMs"


def search(problem: Problem, shop: Workshop, request: Request, progress: Progress) -> records.Record:
    """Do what `tune` does with workers that measure the problem and compilers that run already.

    NumPy's BLAS gets one thread: a search proposes from matrices so small, on cores so busy compiling, that
    its threads wait for each other far longer than they work: 188 ms per proposal on two busy cores, against
    16 ms with one thread.

    Raises:
        AutotuneError: As for `tune`.
    """
    from threadpoolctl import threadpool_limits

    watch, kept = request.watch, request.store
    with threadpool_limits(1, user_api="blas"), ExitStack() as opened:
        device, driver = shop.identity()
        progress.device, progress.stage = device, "listing the candidates"
        watch(progress)
        if why := device.shortage(problem):
            raise DeviceError(why)
        spaces = families(problem, device) if request.space is None else [request.space]
        order: list[tuple[Space, Config]] = []
        if request.first is None:
            candidates = Candidates(spaces, problem, device)
        else:
            order = first_points(problem, device, spaces, kept, request.first)
            own = [[config for space, config in order if space is each] for each in spaces]
            candidates = Candidates(spaces, problem, device, own)
        progress.legal = len(candidates)
        progress.notes += [f"left out: {why}" for why in candidates.without]

        logs = logs_of(candidates, driver, request, Run(progress.began))
        for log in logs:
            opened.enter_context(log)
        stored = Stored.find(candidates, kept)
        past = Past.read(candidates, logs, required=request.resume is True)
        searches: Sequence[Search | SharedSearch] = []
        proposer: Proposer
        if request.first is None:
            begins = firsts(candidates, stored, past, kept)
            searches = _searches(candidates, begins, logs, request, progress, opened)
            starts = [
                len(set(family.numbers(first)) - set(past.trials))
                for family, first in zip(candidates.families, begins, strict=True)
            ]
            proposer = Contest(candidates, searches, starts)
        else:
            proposer = Queue(candidates.number(space, config) for space, config in order)
        pipeline = Pipeline(candidates, proposer, shop.pool, shop.gpus, logs, progress, watch)
        strategy = strategy_name(request.strategy) if request.first is None else QUICK
        for log in logs:
            log.event("begin", strategy=strategy, seed=request.seed, budget=str(request.budget))
        pipeline.recall(past.trials)
        progress.stage = "searching"
        progress.reserved_s = 0.0 if request.first is not None else sustained_s(request.budget)
        progress.end("start")
        watch(progress)
        busy = [gpu.busy_s for gpu in shop.gpus]
        pipeline.run()
        progress.add("gpu", sum(gpu.busy_s for gpu in shop.gpus) - sum(busy))
        pipeline.adopt(_others(candidates, searches, pipeline))
        progress.end("search")

        progress.stage = "checking the finalists in full and timing them beside cuBLAS"
        watch(progress)
        gpu = shop.gpus[pipeline.working]
        most = FINALISTS if request.first is None else QUICK_FINALISTS
        standing = hold(pipeline, candidates, list(stored.records), gpu, logs, progress, most)
        if progress.reserved_s or any(record.sustained for record in stored.records.values()):
            progress.stage = "running the winner back to back, for its energy"
            watch(progress)
            standing = sustain(standing, gpu, progress)
        facts = standing.facts
        for log in logs:
            log.event("gpu", uuid=facts.uuid, pci_bus_id=facts.pci_bus_id, start_s=dict(facts.start_s))
    progress.end("finals")
    record = store(standing, stored.records, pipeline, progress.searched(strategy, request.seed), kept)
    progress.stage = "done"
    watch(progress)
    return record


def _searches(
    candidates: Candidates,
    begins: Sequence[list[int]],
    logs: Sequence[TrialLog],
    request: Request,
    progress: Progress,
    opened: ExitStack,
) -> Sequence[Search | SharedSearch]:
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


def _others(
    candidates: Candidates, searches: Sequence[Search | SharedSearch], pipeline: Pipeline
) -> dict[int, Trial]:
    """Leave a shared study, and list what its other processes measured."""
    found = {}
    for family, study in zip(candidates.families, searches, strict=False):  # a quick search has none
        if isinstance(study, Search):
            continue
        study.close()  # nobody waits for what was under way here
        for point, told in study.outcomes().items():
            number = family.begin + point
            if number not in pipeline.trials:
                config = family.legal.config(point)
                found[number] = Trial.told(family.name, config, told.median_ms, told.outcome, told.why)
    return found
