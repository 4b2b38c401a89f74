"""Tuning for a GPU that is not here: the kernel that should be fastest, estimated and not measured.

Every legal config gets a static estimate; the most promising are compiled for the GPU, and estimated anew
with their real registers and spills; the best of them are executed in the simulator. No time is known in the
end, only an order: `autotune.tuning.tuner` measures. Families that the model does not know are left out;
where it knows none, presets come first and their order is the estimate.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import zip_longest
from multiprocessing.connection import Connection

from autotune import records
from autotune.code.compiler import Binary
from autotune.code.sources import rendered
from autotune.errors import ConfigError, DeviceError, Rejected, SpaceError, TuningError
from autotune.families.estimate import Estimate, estimate, knows
from autotune.measure.proof import prove
from autotune.records import Store, compose
from autotune.records.trials import Run, TrialLog
from autotune.search.candidates import Candidates
from autotune.search.queue import Queue
from autotune.space.space import Space, families
from autotune.tuning.built import Built
from autotune.tuning.pipeline import Pipeline
from autotune.tuning.progress import Progress, Watcher
from autotune.tuning.ranking import ordered
from autotune.tuning.request import Request
from autotune.tuning.resume import Past, logs_of, trial_header
from autotune.tuning.trial import LogEntry, Outcome, Trial
from autotune.values.device import Device
from autotune.values.measurement import Launch, Verdict
from autotune.values.problem import Problem

STRATEGY = "estimate"
ATTEMPTS = 5  # candidates that are simulated at most ...
PROOFS = 3  # ... until so many proved right


def foresee(problem: Problem, device: Device, request: Request) -> records.Record:
    """Choose a kernel by estimate, prove it right in the simulator, and store it as estimated.

    It continues what earlier runs left in the log: no candidate is compiled again but the best.

    Args:
        problem: What to compute.
        device: The GPU to choose for; none is used.
        request: Its budget is of the compiling, the simulator takes some ten seconds more; its seed breaks
            ties of the estimate and draws the operands of the proof.

    Returns:
        The record, as stored; it holds no time. A stored one of candidates that were not looked at, as where
        the space is a part of its family, stays where its estimate is better.

    Raises:
        DeviceError: The operands do not fit into its memory.
        UsageError: The space is wrong, or leaves no legal config; or the log was to be continued and cannot.
        ToolchainError: NVRTC is missing or does not know the device.
        RecordError: The log or record cannot be written.
        UnsupportedPTX: The simulator does not know an instruction of the kernel.
        TuningError: Not one candidate was usable.
    """
    space, seed, store, watch = request.space, request.seed, request.store, request.watch
    if why := device.shortage(problem):
        raise DeviceError(why)
    spaces = families(problem, device) if space is None else [space]
    for each in spaces:
        trial_header(each, problem, device)  # without NVRTC there is nothing to begin
    candidates = Candidates(spaces, problem, device)
    unknown = [family.name for family in candidates.families if not knows(family.space)]
    if unknown and len(unknown) < len(candidates.families):
        candidates = Candidates([each for each in spaces if each.family not in unknown], problem, device)
    progress = request.progress(problem)
    progress.device, progress.legal = device, len(candidates)
    progress.stage = "compiling in the order of the estimate"
    if unknown:
        order_is = (
            "left out" if unknown[0] not in {f.name for f in candidates.families} else "its presets first"
        )
        progress.notes.append(f"the model does not know {', '.join(unknown)}: {order_is}")
    first = [*_stored(candidates, store)]
    presets = (family.numbers(family.space.starts(family.legal)) for family in candidates.families)
    first += [number for turn in zip_longest(*presets) for number in turn if number is not None]
    watch(progress)
    logs = logs_of(candidates, None, request, Run(progress.began))
    with ExitStack() as opened:
        for log in logs:
            opened.enter_context(log)
        pool = opened.enter_context(request.compilers())
        past = Past.read(candidates, logs, required=request.resume is True)
        queue, model = Queue([*first, *ordered(candidates, seed)]), _Model(candidates, len(past.trials))
        pipeline = Pipeline(candidates, queue, pool, [model], logs, progress, watch)
        for log in logs:
            log.event("begin", strategy=STRATEGY, seed=seed, budget=str(request.budget))
        pipeline.recall({number: model.anew(number, trial) for number, trial in past.trials.items()})
        progress.end("start")
        pipeline.run()
        progress.end("search")
        progress.stage = "proving the best in the simulator"
        watch(progress)
        built, verdict = _proven(pipeline, candidates, seed, logs, progress, watch)
    progress.end("finals")
    record = compose.estimated(built.source, built.binary, device, verdict, progress.searched(STRATEGY, seed))
    better = _better(record, candidates, store)
    if better is None:
        store.write(record)
    else:
        record = better
        progress.notes.append(
            "the stored estimate, of a candidate that was not looked at now, is better: it stays"
        )
    progress.stage = "done"
    watch(progress)
    return record


def _stored(candidates: Candidates, store: Store) -> list[int]:
    """Number the winners of earlier searches, measured or estimated."""
    numbers: list[int] = []
    for family in candidates.families:
        for estimated in (False, True):
            record = store.find(candidates.device, family.name, candidates.problem, estimated=estimated)
            numbers += family.numbers([None if record is None else family.legal.index(record.config)])
    return numbers


def _better(record: records.Record, candidates: Candidates, store: Store) -> records.Record | None:
    """Return what is stored if it is no candidate here, could still be made, and has a better estimate."""
    device, problem = candidates.device, candidates.problem
    stored = store.find(device, record.family, problem, estimated=True)
    family = next(each for each in candidates.families if each.name == record.family)
    if stored is None or family.legal.index(stored.config) is not None:
        return None

    def cost(each: records.Record) -> float:
        values = whole.values(whole.config(each.config), problem, device)
        needs = each.resources
        return estimate(whole, values, problem, device, needs.registers, needs.spill_bytes).ms

    try:
        whole = Space.load(record.family)
        source = rendered(whole, whole.config(stored.config), problem, device, depot=store.depot)
        if records.serves(stored, device, problem, source) is None and cost(stored) < cost(record):
            return stored
    except (ConfigError, SpaceError):  # a family of the user's own, or one that changed
        pass
    return None


class _Model:
    """Takes the place of a pipeline's GPUs: the outcome of a binary is its estimate, at once."""

    waitables: tuple[Connection, ...] = ()

    def __init__(self, candidates: Candidates, before: int) -> None:
        self._candidates = candidates
        self._known = {family.name: knows(family.space) for family in candidates.families}
        self._finished: list[tuple[int, Outcome]] = []
        self._submitted = before

    def anew(self, number: int, trial: Trial) -> Trial:
        """Return a trial of an earlier run with today's estimate of its registers and spills."""
        outcome = trial.outcome
        if not (isinstance(outcome, Estimate) and self._known[trial.family]):
            return trial
        return replace(trial, outcome=self._estimated(number, outcome.registers, outcome.spill_bytes))

    def _estimated(self, number: int, registers: int, spill_bytes: int) -> Estimate | Rejected:
        problem, device = self._candidates.problem, self._candidates.device
        space = self._candidates.family(number).space
        if not self._known[space.family]:  # the order is the estimate
            return Estimate(float(self._submitted), registers, spill_bytes, {})
        values = space.values(self._candidates.config(number), problem, device)
        try:
            return estimate(space, values, problem, device, registers, spill_bytes)
        except ConfigError as error:  # not one block fits on an SM
            return Rejected("constraint", str(error))

    @property
    def pending(self) -> int:
        return len(self._finished)

    @property
    def next_deadline(self) -> float | None:
        return 0.0 if self._finished else None

    def submit(
        self,
        key: int,
        binary: Binary,
        launch: Launch,
        best_ms: float | None,
        timeout_s: float,
        entry: LogEntry,
    ) -> None:
        self._submitted += 1
        outcome = self._estimated(key, binary.registers, binary.spill_bytes)
        entry.ended(outcome)
        self._finished.append((key, outcome))

    def collect(self) -> list[tuple[int, Outcome]]:
        finished, self._finished = self._finished, []
        return finished


def _proven(
    pipeline: Pipeline,
    candidates: Candidates,
    seed: int,
    logs: Sequence[TrialLog],
    progress: Progress,
    watch: Watcher,
) -> tuple[Built, Verdict]:
    """Simulate the best estimates of distinct machine code; return the best that proved right.

    Raises:
        TuningError: There is none.
    """
    proven: list[tuple[int, Built, Verdict]] = []
    failed: list[str] = []
    attempts = pipeline.build(pipeline.fastest()[:ATTEMPTS])
    for number, built in attempts.items():
        log, space = logs[candidates.place(number)[0]], candidates.family(number).space
        trial, config = pipeline.trials[number], built.source.config
        verdict = prove(space, config, progress.problem, candidates.device, seed)
        if isinstance(verdict, Verdict):
            proven.append((number, built, verdict))
            log.append(trial.line() | {"outcome": "proven", "error": verdict.error, "inputs": verdict.inputs})
        else:
            progress.outcomes["estimated"] -= 1
            rejected = replace(trial, outcome=verdict)
            progress.count(rejected)
            log.append(rejected.line())
            failed.append(f"{rejected.id} ({verdict.kind}: {verdict.why})")
        progress.best = pipeline.trials[proven[0][0]] if proven else None
        watch(progress)
        if len(proven) == PROOFS:
            break
    if failed and not proven:
        raise TuningError(
            f"none of the {len(failed)} best estimates proved right in the simulator: {'; '.join(failed)}"
        )
    if not proven:
        raise TuningError(progress.nothing_usable())
    _, best, verdict = proven[0]
    return best, verdict
