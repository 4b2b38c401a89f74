"""How far a search is: the outcomes of its candidates, the best of them, and where its time went."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from autotune import records
from autotune.errors import Rejected
from autotune.tuning.budget import Budget
from autotune.tuning.trial import Trial
from autotune.values.device import Device
from autotune.values.problem import Problem

STAGES = ("start", "search", "finals")  # one after the other; the other stages are parts of them
IMPROVEMENT = 0.995  # of the best time: less is none


@dataclass
class Progress:
    """What a run has done so far, handed to its watcher after every event.

    Attributes:
        problem: What is being tuned.
        budget: As asked for.
        reserved_s: Seconds of it that are not for the search: the winner runs back to back in them.
        device: Where; None until it is known.
        legal: Candidates there are.
        partial: They are only a part of the legal ones.
        outcomes: Evaluated candidates by outcome: "measured", "estimated" or a rejection kind.
        examples: For each rejection kind the first candidate and why.
        best: Fastest verified candidate, or the best by estimate.
        stage: What is going on, in a few words.
        seconds: Since the search began, without those in which the process was stopped.
        paused: Seconds in which it was stopped, or the machine suspended.
        resumed: Candidates whose outcome came from the log of an earlier run.
        stale: Candidates since the best improved by more than half a percent.
        notes: What the user should know, one line each.
        began: When the command began (`time.monotonic`).
        stages: Seconds of each stage so far, as `records.Searched.stages_s` defines them.
    """

    problem: Problem
    budget: Budget
    reserved_s: float = 0.0
    device: Device | None = None
    legal: int = 0
    partial: bool = False
    outcomes: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    best: Trial | None = None
    stage: str = "starting the GPU worker"
    seconds: float = 0.0
    paused: float = 0.0
    resumed: int = 0
    stale: int = 0
    notes: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    stages: dict[str, float] = field(default_factory=dict)
    _improved: float = math.inf

    @property
    def seen(self) -> int:
        """Candidates evaluated."""
        return self.outcomes.total()

    @property
    def rate(self) -> float:
        """Candidates that this run evaluated per second of its search; 0 in its first second."""
        return (self.seen - self.resumed) / self.seconds if self.seconds > 1 else 0.0

    def count(self, trial: Trial) -> None:
        """Take one more trial into account."""
        self.outcomes[trial.kind] += 1
        self.stale += 1
        if isinstance(trial.outcome, Rejected):
            self.examples.setdefault(trial.kind, f"{trial.config.id}: {trial.why}")
        elif self.best is None or trial.cost < self.best.cost:
            if self.best is None or trial.cost < self._improved * IMPROVEMENT:
                self.stale, self._improved = 0, trial.cost
            self.best = trial

    def add(self, stage: str, seconds: float) -> None:
        """Add to the seconds of a stage."""
        self.stages[stage] = self.stages.get(stage, 0.0) + seconds

    def end(self, stage: str) -> None:
        """End a stage: it took the seconds since the command began that no stage before it had."""
        ended = sum(self.stages.get(each, 0.0) for each in STAGES)
        self.add(stage, time.monotonic() - self.began - ended)

    def searched(self, strategy: str, seed: int) -> records.Searched:
        """Return what the search did, for the record."""
        return records.Searched(
            strategy=strategy,
            budget=self.budget.evaluations or str(self.budget),
            seconds=self.seconds,
            complete=self.seen == self.legal and not self.partial,
            seen=self.seen,
            legal=self.legal,
            outcomes={kind: count for kind, count in self.outcomes.items() if count},
            seed=seed,
            resumed=self.resumed,
            stages_s={name: round(seconds, 3) for name, seconds in self.stages.items()},
        )

    def nothing_usable(self) -> str:
        """Return why a run ended without one usable candidate."""
        found = {kind: f", such as {example}" for kind, example in self.examples.items()}
        counts = "; ".join(
            f"{count} {kind}{found.get(kind, '')}" for kind, count in self.outcomes.items() if count
        )
        return f"0 of {self.seen} candidates are usable" + (
            f" ({counts})" if counts else f": the budget of {self.budget} ended first; give more"
        )


Watcher = Callable[[Progress], None]
