"""How long a search may go on: for a time, or for a number of candidates."""

from __future__ import annotations

import math
import operator
import re
from contextlib import suppress
from dataclasses import dataclass

from autotune.errors import UsageError
from autotune.outside import shown

MOST = 1e9  # candidates or units of time: far beyond any search, and finite
_UNITS = {"s": 1, "m": 60, "h": 3600}
_MOST = "give less than a billion candidates, seconds, minutes or hours"
_WAYS = "give a time such as 60s, 5m or 1h, or a number of candidates such as 300"


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

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "seconds", float(self.seconds))
            wrong = not self.seconds > 0
            for name in ("evaluations", "patience"):
                if (count := getattr(self, name)) is not None:
                    object.__setattr__(self, name, operator.index(count))
                    wrong = wrong or count < 1
        except (TypeError, ValueError):
            wrong = True
        if wrong:
            raise UsageError(f"{self!r:.99} is out of range: give positive seconds and numbers of candidates")

    @classmethod
    def of(cls, budget: Budget | str | int) -> Budget:
        """Return a budget as it is, or read what `parse` reads; an integer is a number of candidates.

        Raises:
            UsageError: As for `parse`.
        """
        if isinstance(budget, Budget):
            return budget
        if not isinstance(budget, str | bool):
            with suppress(TypeError):
                count = operator.index(budget)
                if count > MOST:
                    raise UsageError(f"budget {shown(count, 60)} is out of range: {_MOST}")
                budget = shown(count)
        if not isinstance(budget, str):
            raise UsageError(f"budget {budget!r:.60} is not understood: {_WAYS}")
        return cls.parse(budget)

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Read "60s", "5m", "1h" or a number of evaluations such as "300".

        Raises:
            UsageError: It is none of these, or not positive.
        """
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh])?\s*", text)
        if match is None:
            raise UsageError(f"budget {text!r:.60} is not understood: {_WAYS}")
        amount, unit = float(match[1]), match[2]
        if amount >= MOST:
            raise UsageError(f"budget {shown(text, 60)} is out of range: {_MOST}")
        if unit is None and not amount.is_integer():
            raise UsageError(f"budget {text!r:.60} is no whole number of candidates: {_WAYS}")
        if not amount:
            raise UsageError(
                f"budget {text!r:.60} is out of range: give at least one candidate, or a time such as 60s"
            )
        if unit is None:
            return cls(evaluations=int(amount))
        return cls(seconds=amount * _UNITS[unit])

    def __str__(self) -> str:
        return str(self.evaluations) if self.evaluations is not None else f"{self.seconds:g}s"
