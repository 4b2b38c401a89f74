"""How long a search may go on: for a time, or for a number of candidates."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from autotune.errors import UsageError

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
