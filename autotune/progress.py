"""Says how long a search may go on, what became of each candidate, and how far the search is."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from autotune import records
from autotune.compiler import Binary
from autotune.device import Device
from autotune.errors import Rejected, UsageError
from autotune.estimate import Estimate
from autotune.gpu.worker import MeasuredTrial
from autotune.problem import Problem
from autotune.render import Source
from autotune.space import Config

Outcome = MeasuredTrial | Estimate | Rejected
MOST = 1e9  # candidates or units of time: far beyond any search, and finite
_UNITS = {"s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True)
class Budget:
    """How long a search goes on: until a time has passed, or a number of candidates was evaluated."""

    seconds: float = math.inf
    evaluations: int | None = None

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Read "60s", "5m", "1h" or a number of evaluations such as "300".

        Raises:
            UsageError: It is none of these, or not positive.
        """
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh])?\s*", text)
        if match is None:
            raise UsageError(
                f"budget {text!r} is not understood: "
                "give a time such as 60s, 5m or 1h, or a number of candidates such as 300"
            )
        amount, unit = float(match[1]), match[2]
        if not 0 < amount < MOST or (unit is None and not amount.is_integer()):
            raise UsageError(
                f"budget {text!r} is out of range: give at least one candidate, or a time such as 60s"
            )
        if unit is None:
            return cls(evaluations=int(amount))
        return cls(seconds=amount * _UNITS[unit])

    def __str__(self) -> str:
        return str(self.evaluations) if self.evaluations is not None else f"{self.seconds:g}s"


@dataclass(frozen=True)
class Trial:
    """One evaluated candidate: its source, its binary if it compiled, and its time, estimate or rejection."""

    source: Source
    binary: Binary | None
    outcome: Outcome

    @property
    def config(self) -> Config:
        """The choices it was made from."""
        return self.source.config

    @property
    def median_ms(self) -> float | None:
        """Median time of one launch, ms; None when it was not measured."""
        return self.outcome.timing.median_ms if isinstance(self.outcome, MeasuredTrial) else None

    @property
    def cost(self) -> float:
        """What the best candidate has least of: the time measured, or the model's; infinite when rejected."""
        if isinstance(self.outcome, Rejected):
            return math.inf
        return self.outcome.ms if isinstance(self.outcome, Estimate) else self.outcome.timing.median_ms

    def line(self) -> dict[str, object]:
        """Write the trial for the log."""
        line: dict[str, object] = {"config": dict(self.config)}
        if isinstance(self.outcome, Rejected):
            line |= {"outcome": self.outcome.kind, "why": self.outcome.why}
        elif isinstance(self.outcome, Estimate):
            line |= {"outcome": "estimated", "estimate": self.outcome.ms}
        else:
            timing = self.outcome.timing
            line |= {
                "outcome": "measured",
                "median_ms": timing.median_ms,
                "quantiles": list(timing.quantiles),
                "repeats": timing.repeats,
                "error": self.outcome.verdict.error,
            }
        if self.binary is not None:
            line |= {
                "registers": self.binary.registers,
                "spill_bytes": self.binary.spill_bytes,
                "compile_s": round(self.binary.seconds, 3),
            }
        return line


@dataclass
class Progress:
    """What a run has done so far, handed to its watcher after every event.

    Attributes:
        problem: What is being tuned.
        budget: As asked for.
        device: Where; None until it is known.
        legal: Candidates there are.
        outcomes: Evaluated candidates by outcome: "measured", "estimated" or a rejection kind.
        examples: For each rejection kind the first candidate and why.
        best: Fastest verified candidate, or the best by estimate.
        stage: What is going on, in a few words.
        seconds: Since the search began.
    """

    problem: Problem
    budget: Budget
    device: Device | None = None
    legal: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    best: Trial | None = None
    stage: str = "starting the GPU worker"
    seconds: float = 0.0

    @property
    def seen(self) -> int:
        """Candidates evaluated."""
        return self.outcomes.total()

    def count(self, trial: Trial) -> None:
        """Take one more trial into account."""
        if isinstance(trial.outcome, Rejected):
            self.reject(trial.config, trial.outcome)
            return
        self.outcomes["estimated" if isinstance(trial.outcome, Estimate) else "measured"] += 1
        if self.best is None or trial.cost < self.best.cost:
            self.best = trial

    def reject(self, config: Config, rejected: Rejected) -> None:
        """Take one more rejected candidate into account."""
        self.outcomes[rejected.kind] += 1
        self.examples.setdefault(rejected.kind, f"{config.id}: {rejected.why}")

    def counts(self) -> str:
        """Say the outcomes in words: "120 measured, 2 compile"."""
        return ", ".join(f"{number} {kind}" for kind, number in self.outcomes.items() if number)

    def searched(self, strategy: str, seed: int) -> records.Search:
        """Say for the record what the search did."""
        return records.Search(
            strategy=strategy,
            budget=self.budget.evaluations or str(self.budget),
            seconds=self.seconds,
            complete=self.seen == self.legal,
            seen=self.seen,
            legal=self.legal,
            outcomes={kind: count for kind, count in self.outcomes.items() if count},
            seed=seed,
        )

    def nothing_usable(self) -> str:
        """Say why a run ended without one usable candidate."""
        counts = "; ".join(
            f"{count} {kind}, such as {self.examples[kind]}" for kind, count in self.outcomes.items() if count
        )
        return f"0 of {self.seen} candidates are usable" + (
            f" ({counts})" if counts else f": the budget of {self.budget} ended first; give more"
        )


Watcher = Callable[[Progress], None]
