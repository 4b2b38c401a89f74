"""`Queue` proposes candidates in an order that is known beforehand, whatever the others turn out to be."""

from __future__ import annotations

from collections.abc import Iterable


class Queue:
    """Candidates by number, each once.

    Args:
        numbers: In the order of the proposals; repeats are dropped.

    Attributes:
        asked: Candidates proposed or taken so far.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        self.asked = 0
        self._taken: set[int] = set()
        self._numbers = iter(dict.fromkeys(numbers))

    def ask(self) -> int | None:
        """Propose the next candidate whose outcome is not known; None at the end."""
        number = next((each for each in self._numbers if each not in self._taken), None)
        self.asked += number is not None
        return number

    def take(self, number: int) -> None:
        """Count a candidate as proposed, because its outcome is known already."""
        self.asked += 1
        self._taken.add(number)

    def tell(self, number: int, median_ms: float | None, outcome: str = "", why: str = "") -> None:
        """Do nothing: no outcome changes the order."""
