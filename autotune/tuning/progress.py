"""Says how long a search may go on, what became of each candidate, and how far the search is."""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autotune import records
from autotune.code.compiler import Binary
from autotune.code.render import Source
from autotune.errors import REJECTION_KINDS, Rejected, UsageError
from autotune.families.estimate import Estimate
from autotune.records.trials import Run, add_line
from autotune.space.space import Config
from autotune.values.device import Device
from autotune.values.measurement import L2, MeasuredTrial, Timing, Verdict
from autotune.values.problem import Problem

Outcome = MeasuredTrial | Estimate | Rejected
STAGES = ("start", "search", "finals")  # one after the other; the other stages are parts of them
IMPROVEMENT = 0.995  # of the best time: less is none
MOST = 1e9  # candidates or units of time: far beyond any search, and finite
_UNITS = {"s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True)
class Budget:
    """How long a search goes on: until a time has passed, or a number of candidates was evaluated.

    Attributes:
        seconds: Of one run.
        evaluations: Candidates, those of earlier runs included.
        patience: Candidates in a row that improved the best by no more than half a percent.
    """

    seconds: float = math.inf
    evaluations: int | None = None
    patience: int | None = None

    @classmethod
    def of(cls, budget: Budget | str) -> Budget:
        """Read a budget that may be its text.

        Raises:
            UsageError: As for `parse`.
        """
        return budget if isinstance(budget, Budget) else cls.parse(budget)

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
class Built:
    """A candidate that compiled."""

    source: Source
    binary: Binary

    @property
    def code(self) -> str:
        """Digits that tell machine code and launch apart: two candidates that share them are one kernel."""
        launch = repr(self.source.launch).encode()
        return hashlib.sha256(self.binary.digest.encode() + launch).hexdigest()[:24]


@dataclass(frozen=True)
class Trial:
    """One evaluated candidate, without its text and machine code: thousands of them must fit.

    Attributes:
        id: Family, config and code in one word.
        family: Its family.
        config: The choices it was made from.
        outcome: Its time, its estimate, or why it was rejected.
        code: `Built.code`; None if it did not compile.
        registers: Of one thread; None if it did not compile.
        spill_bytes: Likewise.
        compile_s: Seconds of compiling; None if there were none.
        same_as: Id of the candidate with the same code whose outcome this is; None if it ran itself.
    """

    id: str
    family: str
    config: Config
    outcome: Outcome
    code: str | None = None
    registers: int | None = None
    spill_bytes: int | None = None
    compile_s: float | None = None
    same_as: str | None = None

    @classmethod
    def of(cls, source: Source, binary: Binary | None, outcome: Outcome, same_as: str | None = None) -> Trial:
        """Take what is kept of a candidate that was rendered."""
        name, family, config = trial_id(source), source.family, source.config
        if binary is None:
            return cls(name, family, config, outcome)
        built = Built(source, binary)
        needs = binary.registers, binary.spill_bytes, round(binary.seconds, 3)
        return cls(name, family, config, outcome, built.code, *needs, same_as)

    @classmethod
    def told(cls, family: str, config: Config, median_ms: float | None, kind: str, why: str) -> Trial:
        """Take what another process says of a candidate."""
        outcome: Outcome
        if median_ms is None:
            outcome = Rejected(next((each for each in REJECTION_KINDS if each == kind), "crash"), why)
        else:
            timing = Timing(median_ms, (median_ms,) * 3, 1, 1, "warm", "back-to-back", None, False)
            outcome = MeasuredTrial(timing, Verdict(True, 0.0, 0.0, "", "of another process"))
        return cls(f"{family}:{config.id}", family, config, outcome)

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

    @property
    def kind(self) -> str:
        """What became of it in one word: "measured", "estimated" or the kind of rejection."""
        if isinstance(self.outcome, Rejected):
            return self.outcome.kind
        return "estimated" if isinstance(self.outcome, Estimate) else "measured"

    @property
    def why(self) -> str:
        """Why it was rejected; "" if it was not."""
        return self.outcome.why if isinstance(self.outcome, Rejected) else ""

    def line(self) -> dict[str, object]:
        """Write the trial for the log."""
        line: dict[str, object] = {"id": self.id, "config": dict(self.config), "outcome": self.kind}
        if isinstance(self.outcome, Rejected):
            line |= {"why": self.outcome.why}
        elif isinstance(self.outcome, Estimate):
            line |= {"estimate": self.outcome.ms}
        else:
            timing, verdict = self.outcome.timing, self.outcome.verdict
            line |= {
                "median_ms": timing.median_ms,
                "quantiles": list(timing.quantiles),
                "repeats": timing.repeats,
                "launches": timing.launches,
                "method": timing.method,
                "noisy": timing.noisy,
                "error": verdict.error,
                "bound": verdict.bound,
                "gpu_s": round(self.outcome.seconds, 4),
            }
        known = ("code", "registers", "spill_bytes", "compile_s", "same_as")
        return line | {name: value for name in known if (value := getattr(self, name)) is not None}

    @classmethod
    def read(cls, line: Mapping[str, Any], family: str, l2: L2) -> Trial | None:
        """Read a line of a log written by `line`; None for one that is something else."""
        try:
            outcome: Outcome
            if line["outcome"] == "measured":
                low, middle, high = (float(value) for value in line["quantiles"])
                timing = Timing(
                    median_ms=float(line["median_ms"]),
                    quantiles=(low, middle, high),
                    repeats=int(line["repeats"]),
                    launches=int(line["launches"]),
                    l2=l2,
                    method=line["method"],
                    clocks=None,
                    noisy=bool(line["noisy"]),
                )
                if not 0 < timing.median_ms < math.inf:
                    return None
                verdict = Verdict(True, float(line["error"]), float(line["bound"]), "", "of an earlier run")
                outcome = MeasuredTrial(timing, verdict, float(line["gpu_s"]))
            elif line["outcome"] in REJECTION_KINDS:
                outcome = Rejected(line["outcome"], str(line["why"]))
            else:
                return None
            parts = (line.get(name) for name in ("code", "registers", "spill_bytes", "compile_s", "same_as"))
            return cls(str(line["id"]), family, Config(line["config"]), outcome, *parts)
        except (AttributeError, KeyError, TypeError, ValueError):
            return None


@dataclass(frozen=True)
class Note:
    """What the process that launches a candidate writes into the log, before and after.

    Attributes:
        log: The log's file.
        run: Stamps the lines.
        trial: The candidate; its outcome is not known yet.
        gpu: Which of the run's GPUs.
    """

    log: Path
    run: Run
    trial: Trial
    gpu: int

    def started(self) -> None:
        """Say that the candidate is launched next.

        Raises:
            RecordError: The log cannot be written.
        """
        name, config, code = self.trial.id, dict(self.trial.config), self.trial.code
        line = {"event": "started", "id": name, "config": config, "code": code, "gpu": self.gpu}
        add_line(self.log, self.run, line)

    def ended(self, outcome: Outcome) -> None:
        """Say what became of it.

        Raises:
            RecordError: The log cannot be written.
        """
        add_line(self.log, self.run, replace(self.trial, outcome=outcome).line())


def trial_id(source: Source) -> str:
    """Name a candidate in the log: family, config, and digits of its code's digest."""
    return f"{source.family}:{source.config.id}@{source.code_digest[:8]}"


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
        resumed: Candidates whose outcome came from the log of an earlier run.
        stale: Candidates since the best improved by more than half a percent.
        notes: What the user should know, one line each.
        began: When the command began (`time.monotonic`).
        stages: Seconds of each stage so far, as `records.Search.stages` defines them.
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
        """Give a stage the seconds since the command began that no stage before it had."""
        ended = sum(self.stages.get(each, 0.0) for each in STAGES)
        self.add(stage, time.monotonic() - self.began - ended)

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
            resumed=self.resumed,
            stages={name: round(seconds, 3) for name, seconds in self.stages.items()},
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
