"""Times of a ladder's steps, kept in the folder of records, so that a page shows them without a GPU."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from autotune.errors import RecordError
from autotune.outside import MIB, read_bytes
from autotune.paths import write_file
from autotune.records import RecordedDevice, Store, now
from autotune.records.schema import Digest, Instant, identity_of
from autotune.report.ladder import Ladder, Rung
from autotune.values import jsontext, typed
from autotune.values.limits import Name
from autotune.values.measurement import Timing
from autotune.values.problem import Problem

FOLDER = "ladders"  # of a folder of records


@dataclass(frozen=True)
class KeptStep:
    """The time of one step.

    Attributes:
        name: Of the step.
        code_digest: Of its rendered text without comments.
        timing: Of its launches.
        alone: It took no turns with the others.
    """

    name: Name
    code_digest: Digest
    timing: Timing
    alone: bool


@dataclass(frozen=True)
class KeptSteps:
    """The steps of one climb that were right.

    Attributes:
        schema: Of this file.
        problem: What they compute.
        device: Where they ran.
        created: When, UTC.
        cublas: Time of cuBLAS in turns with them; None where it is absent.
        steps: In the order of the ladder.
    """

    schema: Literal[1]
    problem: Problem
    device: RecordedDevice
    created: Instant
    cublas: Timing | None
    steps: tuple[KeptStep, ...]


def keep(ladder: Ladder, store: Store) -> str:
    """Keep the times of a ladder that was climbed, in place of those of an earlier climb.

    Returns:
        Why they are not kept, in one line; "" where they are.
    """
    steps = [
        KeptStep(rung.step.name, rung.account.source.code_digest, rung.timing, rung.alone)
        for rung in ladder.rungs
        if rung.account is not None and rung.timing is not None
    ]
    device = RecordedDevice.of(ladder.device)
    kept = KeptSteps(1, ladder.problem, device, now(), ladder.cublas, tuple(steps))
    path = _path(store.root, ladder)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, f"{jsontext.compact(typed.plain(kept))}\n", own=True)
    except OSError as error:
        return f"the times of the steps are not kept: {path} cannot be written ({error.strerror})"
    return ""


def recalled(ladder: Ladder, store: Store) -> Ladder:
    """Return a counted ladder with the times that were kept of steps whose code is still the same."""
    for folder in store.folders:
        path = _path(folder, ladder)
        with suppress(OSError, RecordError, UnicodeDecodeError):
            kept = typed.build(KeptSteps, jsontext.load(read_bytes(path, MIB).decode(), path), path)
            if kept.problem == ladder.problem and identity_of(kept.device) == identity_of(ladder.device):
                steps = {(each.name, each.code_digest): each for each in kept.steps}
                rungs = tuple(_timed(rung, steps) for rung in ladder.rungs)
                return replace(ladder, rungs=rungs, cublas=kept.cublas)
    return ladder


def _timed(rung: Rung, steps: dict[tuple[str, str], KeptStep]) -> Rung:
    code = "" if rung.account is None else rung.account.source.code_digest
    kept = steps.get((rung.step.name, code))
    return rung if kept is None else replace(rung, timing=kept.timing, alone=kept.alone)


def _path(folder: Path, ladder: Ladder) -> Path:
    return folder / FOLDER / f"{ladder.device.slug}_{ladder.problem.key}.json"
