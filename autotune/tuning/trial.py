"""A trial, which is one evaluated candidate, and how it is written into the log and read from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotune.code.compiler import Binary
from autotune.code.render import Source
from autotune.errors import REJECTION_KINDS, MachineFault, RecordError, Rejected, RejectionKind
from autotune.families.estimate import Estimate
from autotune.records.trials import Run, TrialHeader, add_line
from autotune.space.space import Config
from autotune.tuning.built import Built
from autotune.values import typed
from autotune.values.limits import Count, Milliseconds, Name, Quantiles, Size
from autotune.values.measurement import L2, MeasuredTrial, Method, Timing, Verdict

Outcome = MeasuredTrial | Estimate | Rejected


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
        """Return the trial of a candidate that was rendered, without its text and machine code."""
        name, family, config = trial_id(source), source.family, source.config
        if binary is None:
            return cls(name, family, config, outcome)
        built = Built(source, binary)
        needs = binary.registers, binary.spill_bytes, round(binary.seconds, 3)
        return cls(name, family, config, outcome, built.code, *needs, same_as)

    @classmethod
    def told(cls, family: str, config: Config, median_ms: float | None, kind: str, why: str) -> Trial:
        """Return a trial of which another process told the outcome."""
        outcome: Outcome
        if median_ms is None:
            outcome = Rejected(next((each for each in REJECTION_KINDS if each == kind), "crash"), why)
        else:
            timing = Timing(median_ms, (median_ms,) * 3, 1, 1, "warm", "back-to-back", None, False)
            outcome = MeasuredTrial(timing, Verdict(True, 0.0, 0.0, "", "of another process"))
        return cls(f"{family}:{config.id}", family, config, outcome)

    @property
    def label(self) -> str:
        """Its family and the digits of its code, for lines in which a config's name is too long."""
        _, at, digits = self.id.rpartition("@")
        return f"{self.family}@{digits}" if at else self.family

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
        """The outcome in one word: "measured", "estimated" or the kind of rejection."""
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
                "quantiles": list(timing.quantiles_ms),
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
        kind: type[_MeasuredLine | _EstimatedLine | _RejectedLine]
        if line.get("outcome") == "measured":
            kind = _MeasuredLine
        elif line.get("outcome") == "estimated":
            kind = _EstimatedLine
        elif line.get("outcome") in REJECTION_KINDS:
            kind = _RejectedLine
        else:
            return None
        try:
            told = typed.build(kind, dict(line), "trial", defaults=True, others=True)
        except RecordError:
            return None
        outcome: Outcome
        if isinstance(told, _MeasuredLine):
            timing = Timing(
                median_ms=told.median_ms,
                quantiles_ms=told.quantiles,
                repeats=told.repeats,
                launches=told.launches,
                l2=l2,
                method=told.method,
                clocks=None,
                noisy=told.noisy,
            )
            verdict = Verdict(True, told.error, told.bound, "", "of an earlier run")
            outcome = MeasuredTrial(timing, verdict, told.gpu_s)
        elif isinstance(told, _EstimatedLine):
            outcome = Estimate(told.estimate, told.registers, told.spill_bytes, {})
        else:
            outcome = Rejected(told.outcome, told.why)
        about = (told.code, told.registers, told.spill_bytes, told.compile_s, told.same_as)
        return cls(told.id, family, Config(told.config), outcome, *about)


@dataclass(frozen=True, kw_only=True)
class _Line:
    """What the log says of every candidate."""

    id: str
    config: Mapping[Name, int | str]
    code: str | None = None
    registers: int | None = None
    spill_bytes: int | None = None
    compile_s: float | None = None
    same_as: str | None = None


@dataclass(frozen=True, kw_only=True)
class _MeasuredLine(_Line):
    median_ms: Milliseconds
    quantiles: Quantiles
    repeats: Size
    launches: Size
    method: Method
    noisy: bool
    error: float
    bound: float
    gpu_s: float


@dataclass(frozen=True, kw_only=True)
class _EstimatedLine(_Line):
    estimate: Milliseconds
    registers: Size
    spill_bytes: Count


@dataclass(frozen=True, kw_only=True)
class _RejectedLine(_Line):
    outcome: RejectionKind
    why: str


@dataclass(frozen=True)
class LogEntry:
    """What the process that launches a candidate writes into the log, before and after.

    Attributes:
        log: The log's file.
        header: Of the log, should it be gone.
        run: Stamps the lines.
        trial: The candidate; its outcome is not known yet.
        gpu: Which of the run's GPUs.
    """

    log: Path
    header: TrialHeader
    run: Run
    trial: Trial
    gpu: int

    def started(self) -> None:
        """Write that the candidate is launched next.

        Raises:
            RecordError: The log cannot be written.
        """
        name, config, code = self.trial.id, dict(self.trial.config), self.trial.code
        line = {"event": "started", "id": name, "config": config, "code": code, "gpu": self.gpu}
        add_line(self.log, self.header, self.run, line)

    def ended(self, outcome: Outcome | MachineFault) -> None:
        """Write the outcome, or that there is none because the machine failed.

        Raises:
            RecordError: The log cannot be written.
        """
        if isinstance(outcome, MachineFault):
            name, config = self.trial.id, dict(self.trial.config)
            line: dict[str, object] = {"event": "fault", "id": name, "config": config, "why": outcome.why}
        else:
            line = replace(self.trial, outcome=outcome).line()
        add_line(self.log, self.header, self.run, line)


def trial_id(source: Source) -> str:
    """Name a candidate in the log: family, config, and digits of its code's digest."""
    return f"{source.family}:{source.config.id}@{source.code_digest[:8]}"
