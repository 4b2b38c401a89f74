"""`audit`: a stored record proved and timed again on this machine, without a search."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from autotune import records
from autotune.code import cubins
from autotune.code.depot import Depot
from autotune.code.sources import rendered
from autotune.errors import ConfigError, Rejected, SpaceError
from autotune.measure.worker import GpuWorker
from autotune.records import compose
from autotune.records.schema import Record
from autotune.space.space import Space
from autotune.tuning.built import Built
from autotune.tuning.finals import SUSTAINED_S
from autotune.values.device import known_devices
from autotune.values.measurement import Finals, GpuFacts, MeasuredTrial
from autotune.values.problem import Problem

TOLERANCE = 0.05  # of the stored time: the same kernel differs by this from day to day
TIMEOUT_S = 300.0

State = Literal["holds", "slower", "faster", "stale", "failed"]
Workers = Callable[[Problem, bool], GpuWorker]


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

    Where it no longer holds, the finalists of its search are measured beside it, and the fastest of them all
    is what the renewed record holds.

    Args:
        record: Measured, of this machine's GPU.
        workers: Makes the worker for a problem, and for cold operands or not.
        depot: For what was compiled.
        tolerance: Share of the stored time within which it holds.

    Raises:
        SpaceError: Its family is none of the built-in ones.
        DeviceError: No usable GPU.
        ToolchainError: NVRTC is missing.
    """
    assert record.timing is not None, "only measured records are audited"
    space, before = Space.load(record.family), record.timing.median_ms
    with workers(record.problem, record.timing.l2 == "cold") as gpu:
        facts = gpu.ready()
        winner = _contestant(space, record.config, record, facts, depot)
        finals = _measured([winner], gpu)
        outcome: MeasuredTrial | Rejected = winner if isinstance(winner, Rejected) else finals.outcomes[0]
        stale = isinstance(winner, Built) and (
            records.serves(record, facts.device, record.problem, winner.source) is not None
        )
        now = outcome.timing.median_ms if isinstance(outcome, MeasuredTrial) else None
        if now is not None and not stale and abs(now - before) <= tolerance * before:
            return Finding("holds", "", before, now, record)
        others = [_contestant(space, finalist.config, record, facts, depot) for finalist in record.runners_up]
        contestants = [winner, *others]
        if others:
            finals = _measured(contestants, gpu)
        renewed = _renewed(record, contestants, finals, facts, gpu)
    if isinstance(outcome, Rejected):
        why = f"{outcome.kind}: {outcome.why}"
        told = "" if renewed is None else "; its best finalist takes its place"
        return Finding("failed", why + told, before, None, renewed)
    if stale:
        return Finding("stale", "its config renders to other code than then", before, now, renewed)
    slower = now is not None and now > before
    return Finding(
        "slower" if slower else "faster",
        f"by more than {100 * tolerance:g} %: {before:.6g} ms then, {now:.6g} ms now",
        before,
        now,
        renewed,
    )


def _contestant(
    space: Space, values: Mapping[str, int | str], record: Record, facts: GpuFacts, depot: Depot
) -> Built | Rejected:
    try:
        config = space.config(values)
        source = rendered(space, config, record.problem, facts.device, depot=depot)
    except (ConfigError, SpaceError) as error:
        return Rejected("constraint", str(error))
    binary = cubins.load_or_compile(
        source.text, source.entry, facts.device.arch, nvrtc=record.toolchain.nvrtc, depot=depot
    )
    return binary if isinstance(binary, Rejected) else Built(source, binary)


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
        (outcome, each)
        for place, each in enumerate(contestants)
        if isinstance(each, Built) and isinstance(outcome := finals.outcomes.get(place), MeasuredTrial)
    ]
    if not passed:
        return None
    passed.sort(key=lambda pair: pair[0].timing.median_ms)
    won, best = passed[0]
    listed = [(each.source, outcome) for outcome, each in passed[1:]]
    held = gpu.sustained(best.binary, best.source.launch, won.timing, SUSTAINED_S, TIMEOUT_S)
    return compose.measured(
        *(best.source, best.binary, won, finals, facts, listed, record.search),
        sustained=None if isinstance(held, Rejected) else held,
    )
