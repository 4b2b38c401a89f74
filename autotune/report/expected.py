"""What would serve a problem that nobody measured, and why: all of it expected by a model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from autotune.errors import ConfigError, DeviceError, RecordMissing
from autotune.families.estimate import Estimate, estimate
from autotune.kernel.choices import Choice, Choices
from autotune.model.account import roofline_ms
from autotune.records.learned import FittedOn, learned_path, read_learned
from autotune.report.limit import Limit, limit_of

MOST = 5  # choices that are compared


@dataclass(frozen=True)
class Expected:
    """What a model makes of a problem. Times in ms; None where there is no model, or no clock to know.

    Attributes:
        choices: The first is what would serve; the next ones follow in the model's order.
        missing: Why there is nothing that was measured, one line.
        command: What would measure it.
        learned: By family, what its estimates were corrected by; a family that is missing has the plain one.
        modelled: The static estimate of the first choice, its registers predicted too.
        limit: What limits the first choice.
        roofline_ms: Below this no kernel of the problem's math gets.
    """

    choices: tuple[Choice, ...]
    missing: str
    command: str
    learned: Mapping[str, FittedOn]
    modelled: Estimate | None
    limit: Limit | None
    roofline_ms: float | None

    @property
    def first(self) -> Choice:
        """What would serve."""
        return self.choices[0]

    def predicted_ms(self, choice: Choice) -> float | None:
        """Return the time that is expected of a choice; None where only its place in the order is known."""
        learned = choice.point is not None and choice.space.family in self.learned
        return choice.point.ms if learned and choice.point else None

    def gflops(self, ms: float) -> float:
        """Return 2mnk over a time, 10^9 operations per second."""
        return self.first.source.problem.flops / ms / 1e6

    @property
    def blocks(self) -> int:
        """Blocks of the first choice's grid."""
        return math.prod(self.first.source.launch.grid)

    def plain(self, device_name: str) -> dict[str, Any]:
        """Return it as plain values for JSON; nothing in it is called a median."""
        ms, fitted_on = self.predicted_ms(self.first), self.learned.get(self.first.space.family)
        return {
            "evidence": "predicted",
            "problem": asdict(self.first.source.problem),
            "device": device_name,
            "served": self.first.served,
            **self._plain(self.first),
            "predicted_gflops": None if ms is None else self.gflops(ms),
            "roofline_ms": self.roofline_ms,
            "blocks": self.blocks,
            "bottleneck": None if self.limit is None else self.limit.name,
            "because": None if self.limit is None else self.limit.because,
            "relief": None if self.limit is None else self.limit.relief,
            "estimate_parts": {} if self.modelled is None else self.modelled.parts,
            "next": [self._plain(choice) for choice in self.choices[1:]],
            "learned": None
            if fitted_on is None
            else {
                "problems": fitted_on.problems,
                "trials": fitted_on.trials,
                "held_out_regret": asdict(fitted_on.corrected),
            },
            "note": self.first.note,
            "missing": self.missing,
            "command": self.command,
        }

    def _plain(self, choice: Choice) -> dict[str, Any]:
        return {
            "family": choice.space.family,
            "config": dict(choice.config),
            "origin": choice.place,
            "predicted_ms": self.predicted_ms(choice),
            "estimate_ms": None if choice.point is None else choice.point.estimate_ms,
        }


def expected(choices: Choices) -> Expected:
    """Return what would serve if there were no record of this very problem, and why.

    Raises:
        UsageError: Nothing would: no family computes the problem on the device.
        RecordMissing: Nothing but a record would.
    """
    found: dict[Any, Choice] = {}
    for choice in choices.substitutes():
        found.setdefault((choice.space.family, choice.config), choice)
        if len(found) == MOST:
            break
    if not found:
        next(choices.all())  # or it says what is missing
        raise RecordMissing(f"{choices.missing()}, and nothing else serves it: run '{choices.command}'")
    first = next(iter(found.values()))
    problem, device, space = choices.problem, choices.device, first.space
    modelled: Estimate | None = None
    limit: Limit | None = None
    floor: float | None = None
    with suppress(ConfigError, DeviceError):  # of a family without a model, of a device without a clock
        values = space.values(first.config, problem, device)
        modelled = estimate(space, values, problem, device) if first.point else None
        launch = first.source.launch
        floor = roofline_ms(problem, device)
        limit = limit_of(space, problem, device, math.prod(launch.grid), launch.shared_bytes, modelled)
    return Expected(
        tuple(found.values()),
        choices.missing(),
        choices.command,
        {} if first.note else _fitted_on(choices),
        modelled,
        limit,
        floor,
    )


def _fitted_on(choices: Choices) -> dict[str, FittedOn]:
    path = learned_path(choices.store, choices.device)
    if path is None:
        return {}
    return {name: family.fitted_on for name, family in read_learned(path).families.items()}
