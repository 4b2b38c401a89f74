"""`audit`: a stored record proved and timed again on this machine, without a search."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar

from autotune import records
from autotune.code import cubins
from autotune.code.compiler import Binary
from autotune.code.depot import Depot
from autotune.code.pool import default_workers
from autotune.code.render import Source
from autotune.code.single import ALONE_TIMEOUT_S
from autotune.code.sources import rendered
from autotune.errors import ConfigError, MachineError, MachineFault, Rejected, SpaceError
from autotune.measure.worker import GpuWorker
from autotune.records import compose
from autotune.records.schema import Record
from autotune.space.space import Space
from autotune.tuning.built import Built
from autotune.tuning.held import fastest_held, runs_on
from autotune.tuning.meter import Meter
from autotune.values.device import Device, known_devices
from autotune.values.measurement import Finals, GpuFacts, MeasuredTrial
from autotune.values.problem import Problem

TOLERANCE = 0.05  # of the stored time and speed over cuBLAS: the same kernel differs by this from day to day
TIMEOUT_S = 300.0

State = Literal["holds", "slower", "faster", "stale", "failed"]
Workers = Callable[[Problem, bool], AbstractContextManager[GpuWorker]]
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Finding:
    """What became of one record.

    Attributes:
        state: "holds"; "slower" or "faster" than it says; "stale", rendering to other code than then; or
            "failed".
        why: In words; "" where it holds.
        before_ms: What it says.
        now_ms: What its config takes today; None if it failed.
        renewed: The record as it should be; the stored one where it holds, None where nothing is usable.
    """

    state: State
    why: str
    before_ms: float
    now_ms: float | None
    renewed: Record | None


class OneWorker:
    """Lends `audit` one worker for record after record; where L2 is to be in another state it is replaced.

    Args:
        ordinal: CUDA ordinal of the GPU.
        service: What the worker's child runs.
    """

    def __init__(self, ordinal: int, service: str = "autotune.measure.service:serve") -> None:
        self._ordinal = ordinal
        self._service = service
        self._worker: GpuWorker | None = None
        self._cold = False

    @contextmanager
    def __call__(self, problem: Problem, cold: bool) -> Iterator[GpuWorker]:
        """Lend the worker, once it measures a problem with operands in L2 or not."""
        if self._worker is not None and cold == self._cold:
            self._worker.turn_to(problem)
        else:
            self.close()
            self._worker = GpuWorker(self._ordinal, problem, cold=cold, service=self._service)
            self._cold = cold
        yield self._worker

    def close(self) -> None:
        """End the worker's process."""
        if self._worker is not None:
            self._worker.close()

    def __enter__(self) -> OneWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def staleness(record: Record, depot: Depot) -> str | None:
    """Tell, without a GPU, why a record no longer describes what its config renders to; None if it does.

    Raises:
        SpaceError: Its family is none of the built-in ones.
    """
    space = Space.load(record.family)
    same = (each for each in known_devices().values() if records.RecordedDevice.of(each) == record.device)
    device = next(same, None)
    if device is None:
        return None  # its limits are not known here
    try:
        source = rendered(space, space.config(record.config), record.problem, device, depot=depot)
    except ConfigError as error:
        return f"the record is stale: {error}"
    return records.serves(record, device, record.problem, source)


def audit(record: Record, workers: Workers, depot: Depot, *, tolerance: float = TOLERANCE) -> Finding:
    """Render, compile, verify in full and time a record's config beside cuBLAS.

    Where its time or its speed over cuBLAS does not hold, the finalists of its search are measured beside it,
    and the fastest of them all is what the renewed record holds.

    Args:
        record: Measured, of this machine's GPU.
        workers: Lend the worker for a problem, and for cold operands or not, such as `OneWorker`.
        depot: For what was compiled.
        tolerance: Share of the stored figures within which it holds.

    Raises:
        SpaceError: Its family is none of the built-in ones.
        DeviceError: No usable GPU.
        ToolchainError: NVRTC is missing.
    """
    assert record.timing is not None, "only measured records are audited"
    space, before = Space.load(record.family), record.timing.median_ms
    with workers(record.problem, record.timing.l2 == "cold") as gpu:
        facts = gpu.ready()
        contestants = _built(space, [record.config], record, facts.device, depot)
        winner = contestants[0]
        stale = isinstance(winner, Built) and (
            records.serves(record, facts.device, record.problem, winner.source) is not None
        )
        others = [each.config for each in record.runners_up]
        if stale or isinstance(winner, Rejected):
            contestants += _built(space, others, record, facts.device, depot)
        finals = _measured(contestants, gpu)
        outcome: MeasuredTrial | Rejected = winner if isinstance(winner, Rejected) else finals.outcomes[0]
        now = outcome.timing.median_ms if isinstance(outcome, MeasuredTrial) else None
        figures = [("ms", before, now), ("x cuBLAS", record.vs_cublas, now and finals.vs_cublas(now))]
        moved = [
            (unit, then, found)
            for unit, then, found in figures
            if then is not None and found is not None and abs(found - then) > tolerance * then
        ]
        if now is not None and not stale and not moved:
            return Finding("holds", "", before, now, record)
        if others and len(contestants) == 1:
            contestants += _built(space, others, record, facts.device, depot)
            finals = _measured(contestants, gpu)
        renewed = _renewed(record, contestants, finals, facts, gpu)
    if isinstance(outcome, Rejected):
        why = f"{outcome.kind}: {outcome.why}"
        told = "" if renewed is None else "; its best finalist takes its place"
        return Finding("failed", why + told, before, None, renewed)
    if stale:
        return Finding("stale", "its config renders to other code than then", before, now, renewed)
    unit, then, found = moved[0]
    return Finding(
        "slower" if (found > then) == (unit == "ms") else "faster",
        f"by more than {100 * tolerance:g} %: {then:.6g} {unit} then, {found:.6g} {unit} now",
        before,
        now,
        renewed,
    )


def compile_ahead(stored: Iterable[Record], device: Device, depot: Depot, meter: Meter) -> None:
    """Compile what `audit` will need of records of a device, all side by side, before anything is timed.

    Args:
        stored: The records; of what does not compile `audit` tells.
        device: Of this machine.
        depot: Where machine code is kept.
        meter: Counts kernels.

    Raises:
        ToolchainError: NVRTC is missing.
    """
    if not depot.limit_bytes:
        return  # it would be compiled again
    wanted = {}
    for record in stored:
        for source in _needed(record, device, depot):
            wanted[source.text] = source.text, source.entry, record.toolchain.nvrtc
    meter.begin("compiling", len(wanted))
    for _ in _all_compiled(wanted, device, depot):
        meter.step()


def _needed(record: Record, device: Device, depot: Depot) -> Iterator[Source]:
    """Yield a record's kernel and, where it is not that of then, those of the finalists."""
    try:
        space = Space.load(record.family)
    except SpaceError:
        return
    winner = _source(space, record.config, record, device, depot)
    if isinstance(winner, Source):
        yield winner
        if records.serves(record, device, record.problem, winner) is None:
            return
    for finalist in record.runners_up:
        source = _source(space, finalist.config, record, device, depot)
        if isinstance(source, Source):
            yield source


def _source(
    space: Space, values: Mapping[str, int | str], record: Record, device: Device, depot: Depot
) -> Source | Rejected:
    try:
        return rendered(space, space.config(values), record.problem, device, depot=depot)
    except (ConfigError, SpaceError) as error:
        return Rejected("constraint", str(error))


def _built(
    space: Space, configs: Sequence[Mapping[str, int | str]], record: Record, device: Device, depot: Depot
) -> list[Built | Rejected]:
    """Render and compile configs of a record's family; those that it rejects keep their place."""
    sources = [_source(space, values, record, device, depot) for values in configs]
    built: dict[int, Built | Rejected] = {
        place: source for place, source in enumerate(sources) if isinstance(source, Rejected)
    }
    wanted = {
        place: (source.text, source.entry, record.toolchain.nvrtc)
        for place, source in enumerate(sources)
        if isinstance(source, Source)
    }
    for place, binary in _all_compiled(wanted, device, depot):
        source = sources[place]
        assert isinstance(source, Source)
        if isinstance(binary, MachineFault):
            raise MachineError(f"kernel {source.entry} cannot be compiled now: {binary.why}")
        built[place] = Built(source, binary) if isinstance(binary, Binary) else binary
    return [built[place] for place in range(len(configs))]


def _all_compiled(
    wanted: Mapping[K, tuple[str, str, str | None]], device: Device, depot: Depot
) -> Iterator[tuple[K, Binary | Rejected | MachineFault]]:
    return cubins.load_or_compile_all(
        wanted, device.arch, depot=depot, workers=default_workers(spare=0), timeout_s=ALONE_TIMEOUT_S
    )


def _measured(contestants: Sequence[Built | Rejected], gpu: GpuWorker) -> Finals:
    """Verify and time the contestants that compiled; the keys are their places."""
    entries = [
        (place, each.binary, each.source.launch)
        for place, each in enumerate(contestants)
        if isinstance(each, Built)
    ]
    return gpu.finals(entries, TIMEOUT_S) if entries else Finals({}, None, None)


def _renewed(
    record: Record,
    contestants: Sequence[Built | Rejected],
    finals: Finals,
    facts: GpuFacts,
    gpu: GpuWorker,
) -> Record | None:
    """Write the record of what is measured now; how it was found stays as it was. None if nothing passed."""
    passed = [
        (each, outcome)
        for place, each in enumerate(contestants)
        if isinstance(each, Built) and isinstance(outcome := finals.outcomes.get(place), MeasuredTrial)
    ]
    if not passed:
        return None
    passed.sort(key=lambda pair: pair[1].timing.median_ms)
    place, held = fastest_held(passed, runs_on(gpu, TIMEOUT_S))
    best, won = passed.pop(place)
    listed = [(each.source, outcome) for each, outcome in passed]
    return compose.measured(
        *(best.source, best.binary, won, finals, facts, listed, record.search),
        sustained=None if isinstance(held, Rejected) else held,
    )
