"""The finals of a search: its fastest candidates checked in full, timed in turns, and the winner stored."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autotune import records
from autotune.code import cubins
from autotune.errors import DeviceError, Rejected, TuningError
from autotune.measure.worker import GpuWorker
from autotune.records import Store, compose
from autotune.records.trials import TrialLog
from autotune.search.candidates import Candidates
from autotune.tuning.budget import Budget
from autotune.tuning.built import Built
from autotune.tuning.held import OTHERS, SUSTAINED_S, fastest_held, runs_on, sparing
from autotune.tuning.limits import trial_limit
from autotune.tuning.pipeline import Pipeline
from autotune.tuning.progress import Progress
from autotune.tuning.trial import Trial
from autotune.values.measurement import Finals, GpuFacts, MeasuredTrial, Sustained

TIMEOUT_S = 30.0
FINALISTS = 8
QUICK_FINALISTS = 2  # of a quick search, whose caller waits: each costs a full check and a tenth of a second
NAMED = 3  # of those that failed, where none passed
MORE = 4  # times as many follow, where all before failed their full check
SUSTAINED_SHARE = 0.125  # of a budget, which the winner's run back to back may take at most
NEAR = 1.03  # times the best trial: finalists too, where they read less, and so may win at the power cap
GIVEN_UP = 1.005  # what the choice among finalists that cannot be told apart may cost


@dataclass(frozen=True)
class Standing:
    """What came out of the finals.

    Attributes:
        candidates: That the numbers are of.
        finals: As the worker reports them, by number.
        built: Finalists by number.
        order: Those that passed, the winner first, then by time.
        facts: Of the GPU.
        sustained: What the winner did back to back; None where it was not run so.
    """

    candidates: Candidates
    finals: Finals
    built: Mapping[int, Built]
    order: list[int]
    facts: GpuFacts
    sustained: Sustained | None = None

    @property
    def winner(self) -> int:
        """The number of the winner."""
        return self.order[0]

    def passed(self, number: int) -> MeasuredTrial:
        """Return the measurement of one that passed."""
        outcome = self.finals.outcomes[number]
        assert isinstance(outcome, MeasuredTrial)
        return outcome

    def record(self, number: int, search: records.Searched) -> records.Record:
        """Make the record of one that passed, with the others of its family."""
        family, built = self.candidates.family(number), self.built[number]
        own = [each for each in self.order if self.candidates.family(each) is family and each != number]
        others = [(self.built[each].source, self.passed(each)) for each in own]
        return compose.measured(
            *(built.source, built.binary, self.passed(number), self.finals, self.facts, others, search),
            sustained=self.sustained if number == self.winner else None,
        )


def hold(
    pipeline: Pipeline,
    candidates: Candidates,
    defended: Collection[int],
    gpu: GpuWorker,
    logs: Sequence[TrialLog],
    progress: Progress,
    most: int = FINALISTS,
) -> Standing:
    """Check the finalists in full and time them in turns; if none passes, those behind them.

    Args:
        pipeline: After its run.
        candidates: Of all families.
        defended: Numbers of stored winners, which are finalists however slow.
        gpu: Where.
        logs: One for each family.
        progress: Of the run.
        most: Finalists at a time, beside the stored winners.

    Raises:
        TuningError: Nothing was measured, or nothing passed.
        DeviceError: The GPU cannot measure the problem.
    """
    if not pipeline.trials:
        gpu.ready()  # raises what kept it from measuring, if that is why
    failed: list[str] = []
    for chosen in finalists(pipeline, defended, progress, most):
        built: dict[int, Built] = {}
        for number, each in pipeline.build(chosen).items():
            if each.code not in {other.code for other in built.values()}:
                built[number] = each
        if not built:
            continue
        entries = [(number, each.binary, each.source.launch) for number, each in built.items()]
        finals = gpu.finals(entries, TIMEOUT_S + trial_limit(candidates.problem))
        for number, outcome in finals.outcomes.items():
            log = logs[candidates.place(number)[0]]
            trial = Trial.of(built[number].source, built[number].binary, outcome)
            log.append(trial.line() | ({"event": "final"} if isinstance(outcome, MeasuredTrial) else {}))
            if isinstance(outcome, Rejected):
                failed.append(f"{trial.label}: {outcome.kind}, {outcome.why}")
        order = ranked(finals, built, defended)
        if order:
            return Standing(candidates, finals, built, order, gpu.ready())
    more = f"; and {len(failed) - NAMED} more, see the log" if len(failed) > NAMED else ""
    raise TuningError(f"no finalist passed the full verification: {'; '.join(failed[:NAMED])}{more}")


def sustained_s(budget: Budget) -> float:
    """Return for how many seconds of a budget the winner is run back to back; 0 where it is too short."""
    return SUSTAINED_S if SUSTAINED_SHARE * budget.seconds >= SUSTAINED_S else 0.0


def sustain(standing: Standing, gpu: GpuWorker, progress: Progress) -> Standing:
    """Run the winner back to back, for the energy of its launches, and choose anew where the power cap does.

    Where a stored winner was run so, the one that takes its place is too, whatever the budget. That it or the
    GPU fails is a note.
    """
    run = runs_on(gpu, TIMEOUT_S + trial_limit(standing.candidates.problem))
    passed = [(standing.built[number], standing.passed(number)) for number in standing.order]
    try:
        place, found = fastest_held(passed, run)
    except DeviceError as error:  # what was found is not lost for that
        progress.notes.append(f"the energy of a launch is not known: {error}")
        return standing
    if isinstance(found, Rejected):
        progress.notes.append(f"the energy of a launch is not known: {found.kind}, {found.why}")
        return standing
    winner = standing.order[place]
    others = sorted(set(standing.order) - {winner}, key=lambda each: standing.passed(each).timing.median_ms)
    return replace(standing, order=[winner, *others], sustained=found)


def finalists(
    pipeline: Pipeline, defended: Collection[int], progress: Progress, most: int = FINALISTS
) -> Iterator[list[int]]:
    """Yield the fastest of distinct code with the stored winners, then, on request, those behind them.

    With the first go the fastest of a few block tiles that read less, unless the search is a quick one.

    Raises:
        TuningError: Nothing was measured.
    """
    order, trials = pipeline.fastest(), pipeline.trials
    if not order:
        raise TuningError(progress.nothing_usable())
    first = order[:most]
    if most == FINALISTS:
        first += _sparing(order, first, trials)
    codes = {trials[number].code for number in first}
    first += [
        number
        for number in defended
        if number in trials and trials[number].median_ms is not None and trials[number].code not in codes
    ]
    yield first
    rest = [number for number in order if number not in first]
    for begin in range(0, min(len(rest), MORE * most), most):
        yield rest[begin : begin + most]


def _sparing(order: list[int], first: list[int], trials: Mapping[int, Trial]) -> list[int]:
    best = trials[order[0]]
    near = {
        number: trials[number].config
        for number in order
        if trials[number].cost <= NEAR * best.cost and trials[number].family == best.family
    }
    return [number for number in sparing(near, best.config) if number not in first][:OTHERS]


def ranked(finals: Finals, built: Mapping[int, Built], defended: Collection[int]) -> list[int]:
    """Order those that passed: by time, but the winner is chosen among those within 0.5 % of the fastest.

    Of them a stored winner comes first, so that a repeated search keeps it; then the one with the fewest
    registers, the least shared memory, and the first id in the alphabet.
    """
    passed = {
        number: outcome.timing
        for number, outcome in finals.outcomes.items()
        if isinstance(outcome, MeasuredTrial)
    }
    order = sorted(passed, key=lambda number: passed[number].median_ms)
    if not order:
        return []
    best = passed[order[0]]

    def preference(number: int) -> tuple[bool, int, int, str]:
        source, binary = built[number].source, built[number].binary
        shared = binary.shared_bytes + source.launch.shared_bytes
        return number not in defended, binary.registers, shared, source.config.id

    alike = [
        number
        for number in order
        if passed[number].median_ms <= GIVEN_UP * best.median_ms and passed[number].ties(best)
    ]
    winner = min(alike, key=preference)
    return [winner, *(number for number in order if number != winner)]


def store(
    standing: Standing,
    stored: Mapping[int, records.Record],
    pipeline: Pipeline,
    search: records.Searched,
    kept: Store,
) -> records.Record:
    """Store the winner, and bring the stored winners that it met up to date."""
    candidates = standing.candidates
    record = standing.record(standing.winner, search)
    for number in standing.order:  # compiling the text again need not give the machine code that was measured
        built = standing.built[number]
        cubins.put(built.source.text, built.binary, candidates.device.arch, depot=kept.depot)
    over = None
    for number, old in stored.items():
        outcome = standing.finals.outcomes.get(number)
        trial = pipeline.trials.get(number)
        wrong = [each for each in (outcome, trial and trial.outcome) if isinstance(each, Rejected)]
        if old.family == record.family:
            over = old if outcome is not None or wrong else None
        elif any(each.kind == "correctness" for each in wrong):
            path = kept.path(candidates.device, old.family, candidates.problem)
            if path.exists():  # else it came with the package
                kept.set_aside(path)
        elif isinstance(outcome, MeasuredTrial) and _faster(old, record):
            # The fastest record of any family is served: a time of another day must not decide.
            kept.offer(standing.record(number, search), over=old)
    return kept.offer(record, over=over)


def _faster(old: records.Record, record: records.Record) -> bool:
    return (
        old.timing is not None
        and record.timing is not None
        and old.timing.median_ms <= record.timing.median_ms
    )
