"""`Prepared`: a B that was scaled and split once, and how kernels take it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autotune.errors import UsageError
from autotune.values.problem import Problem, Strided

Form = tuple[str | int | None, ...]


@dataclass(frozen=True, eq=False)
class Prepared:
    """What `autotune.Kernel.prepare` returns, and calls of such kernels take in B's place.

    Attributes:
        b: B itself, which must stay as it was: calls that are out of range read it.
        memory: What it was prepared into, an array of the library of ``b``.
        address: Of that memory.
        form: What decides whether a kernel can take it: see `form_of`.
    """

    b: Any
    memory: Any
    address: int
    form: Form

    def __copy__(self) -> Prepared:
        """Return the same: what it holds is never changed."""
        return self

    def __deepcopy__(self, _: Any) -> Prepared:
        """Return the same: what it holds is never changed."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Refuse to be pickled, as an address means nothing elsewhere."""
        raise UsageError("a prepared B cannot be pickled: pickle B, and prepare it where it is used")

    def __repr__(self) -> str:
        """Return what it was prepared for, without the numbers."""
        return f"<b prepared for {_in_words(self.form)}, {self.nbytes} bytes>"

    @property
    def nbytes(self) -> int:
        """Bytes that it takes beside B."""
        return int(self.memory.nbytes)

    def require(self, form: Form) -> None:
        """Raise `UsageError` if a kernel of another form is asked to take it."""
        if form != self.form:
            raise UsageError(
                f"b was prepared for {_in_words(self.form)}; this kernel is {_in_words(form)}: prepare it "
                "by this kernel, or by one that agrees in all of these"
            )


def form_of(family: str, problem: Problem, columns: int | str | None, ordinal: int | None) -> Form:
    """Return what decides how a B is prepared.

    Args:
        family: Of the kernel.
        problem: What it computes.
        columns: Of a block of it.
        ordinal: CUDA ordinal of its GPU; None for the simulator.
    """
    return family, problem.n, problem.k, problem.layout[1], columns, ordinal


def on_prepared(problem: Problem) -> Strided:
    """Return the problem with a B that comes prepared."""
    return Strided(**(vars(problem) | {"prepared": 1}))


def _in_words(form: Form) -> str:
    family, n, k, layout, columns, ordinal = form
    where = "simulated" if ordinal is None else ordinal
    return f"{family}, n {n}, k {k}, B as in layout n{layout}, BN {columns}, GPU {where}"
