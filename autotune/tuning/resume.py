"""What earlier runs left, their logs and records, and where a search begins because of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autotune import records
from autotune.code.compiler import OPTIONS
from autotune.code.nvrtc import nvrtc_version
from autotune.code.render import template_digest
from autotune.errors import Rejected
from autotune.records import Store
from autotune.records.schema import RecordedDevice
from autotune.records.trials import Line, Run, TrialHeader, TrialLog, deaths, trials_path
from autotune.search.candidates import Candidates, config_of, points_of
from autotune.space.space import Config, Space
from autotune.tuning.prediction import prediction
from autotune.tuning.request import Request
from autotune.tuning.transfer import warm_starts
from autotune.tuning.trial import Trial
from autotune.values.device import Device
from autotune.values.measurement import L2
from autotune.values.problem import Problem

DEATHS = 2  # of a run, with a candidate on the GPU, that count as the candidate's fault
WARM_STARTS = 16
PREDICTED = 8  # points that the model expects to be fastest, at most, that a search begins with


def trial_header(
    space: Space, problem: Problem, device: Device, driver: str | None = None, l2: L2 = "warm"
) -> TrialHeader:
    """Return what the trials of a run belong to, which is what the search of it must agree in to go on."""
    return TrialHeader(
        family=space.family,
        problem=problem,
        device=RecordedDevice.of(device),
        space_digest=space.digest,
        template_digest=template_digest(space),
        nvrtc=nvrtc_version(),
        driver=driver,
        flags=OPTIONS,
        l2=l2,
    )


def logs_of(candidates: Candidates, driver: str | None, request: Request, run: Run) -> list[TrialLog]:
    """Name the log of each family, beside its record; nothing is opened yet."""
    l2: L2 = "cold" if request.cold else "warm"
    estimated = request.target is not None
    logs = []
    for family in candidates.families:
        header = trial_header(family.space, candidates.problem, candidates.device, driver, l2)
        path = request.store.path(candidates.device, family.name, candidates.problem, estimated=estimated)
        logs.append(TrialLog(trials_path(path), header, run, anew=request.resume is False))
    return logs


@dataclass(frozen=True)
class Past:
    """What earlier runs found.

    Attributes:
        trials: What became of candidates, by number.
        lost: Of each family the points that were on a GPU when a run ended, without an outcome.
    """

    trials: Mapping[int, Trial]
    lost: Sequence[list[int]]

    @classmethod
    def read(cls, candidates: Candidates, logs: Sequence[TrialLog], *, required: bool = False) -> Past:
        """Read the logs; a candidate that two runs died with gets its outcome.

        Args:
            candidates: Of all families.
            logs: One for each family.
            required: A log that cannot be continued is an error.

        Raises:
            UsageError: That is so.
        """
        lines = [log.past(required=required) for log in logs]
        alive = set().union(*(log.alive(own) for log, own in zip(logs, lines, strict=True)))
        died = deaths(lines, alive)
        trials: dict[int, Trial] = {}
        lost: list[list[int]] = []
        for family, log, own in zip(candidates.families, logs, lines, strict=True):
            found: dict[Config, Trial | None] = {}
            started: dict[Config, Line] = {}
            for line in own:
                config = config_of(line)
                if config is None or line.get("event") == "final":
                    continue
                if "outcome" in line:
                    found[config] = Trial.read(line, family.name, log.header.l2) or found.get(config)
                elif line.get("event") == "started":
                    started[config] = line
                    found.setdefault(config)
            for config, launch in started.items():
                name, code = str(launch.get("id")), launch.get("code")
                if found[config] is None and died[name] >= DEATHS:
                    why = f"{died[name]} runs were killed or died while it was on the GPU"
                    found[config] = guilty = Trial(name, family.name, config, Rejected("crash", why), code)
                    log.append(guilty.line())
            for config, launch in started.items():
                if found[config] is None and str(launch.get("run")) in alive:
                    del found[config]  # another process is measuring it now
            points = points_of(family.legal, list(found))
            known = list(zip(points, found.values(), strict=True))
            trials |= {family.begin + point: trial for point, trial in known if point is not None and trial}
            lost.append([point for point, trial in known if point is not None and trial is None])
        return cls(trials, lost)


@dataclass(frozen=True)
class Stored:
    """Winners of earlier searches that are among the candidates.

    Attributes:
        points: Place of a family to the index of its winner.
        records: Number of a winner to its record.
    """

    points: Mapping[int, int]
    records: Mapping[int, records.Record]

    @classmethod
    def find(cls, candidates: Candidates, store: Store) -> Stored:
        """Look for the record of each family."""
        points: dict[int, int] = {}
        found: dict[int, records.Record] = {}
        for place, family in enumerate(candidates.families):
            record = store.find(candidates.device, family.name, candidates.problem)
            point = None if record is None else family.legal.index(record.config)
            if record is not None and point is not None:
                points[place] = point
                found[family.begin + point] = record
        return cls(points, found)


def firsts(candidates: Candidates, stored: Stored, past: Past, store: Store) -> list[list[int]]:
    """List for each family the points that its search begins with.

    They are its stored winner, what earlier runs lost, what the model expects to be fastest where it learned
    from this GPU, what was fast at other sizes, and the presets.
    """
    spaces = [family.space for family in candidates.families]
    expected = prediction(candidates.problem, candidates.device, spaces, store)
    found = []
    for place, family in enumerate(candidates.families):
        first = [stored.points[place]] if place in stored.points else []
        first += past.lost[place]
        if not expected.note:
            own = [point.config for point, _ in expected.points if point.space is family.space]
            points = [family.legal.index(config) for config in own[:PREDICTED]]
            first += [point for point in points if point is not None]
        first += warm_starts(
            family.space, family.legal, candidates.problem, candidates.device, store, WARM_STARTS
        )
        found.append(first + family.space.starts(family.legal))
    return found
