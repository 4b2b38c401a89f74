"""`Counts`, how many calls of PyTorch's operators went where; a `Decision` says where calls alike go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from autotune.kernel.short import Way

OURS = "autotune"
Counted = tuple[str, tuple[int, ...], str]


class Decision:
    """What is done with tensors of certain types, shapes and strides.

    Attributes:
        counted: Operator, shape, and where they go.
        way: How our kernels multiply them at multiples of 16 bytes; None where PyTorch does it.
        copied: Whether they are copied first, which PyTorch would do too, and the copies multiplied.
        ordinal: CUDA ordinal of their GPU.
        calls: So far.
    """

    __slots__ = ("calls", "copied", "counted", "ordinal", "way")

    def __init__(
        self, counted: Counted, way: Way | None = None, ordinal: int = -1, copied: bool = False
    ) -> None:
        self.counted, self.way, self.ordinal, self.copied, self.calls = counted, way, ordinal, copied, 0


class Counts:
    """How many calls went where; printing it shows a table.

    Attributes:
        decided: What was decided for good, by what of the operands decides it.
        undecided: Calls without such a decision.
    """

    def __init__(self) -> None:
        self.decided: dict[Hashable, Decision] = {}
        self.undecided: Counter[Counted] = Counter()

    @property
    def calls(self) -> Counter[Counted]:
        """By operator, shape ``(batch,) m, n, k`` and where it went: "autotune", or PyTorch and why."""
        found = self.undecided.copy()
        for decision in tuple(self.decided.values()):
            found[decision.counted] += decision.calls
        return +found

    @property
    def ours(self) -> int:
        """Calls that our kernels served."""
        return sum(number for (_, _, where), number in self.calls.items() if where == OURS)

    @property
    def total(self) -> int:
        """All calls."""
        return self.calls.total()

    def __str__(self) -> str:
        lines = [f"{self.ours} of {self.total} calls on our kernels"]
        for (operator, shape, where), number in self.calls.most_common():
            lines.append(f"{number:8}  {operator:8} {' x '.join(map(str, shape)):28} {where}")
        return "\n".join(lines)
