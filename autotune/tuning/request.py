"""What a search is asked for: everything but the problem that `tune` or the command was told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Any

from autotune.code.pool import CompilePool, default_workers
from autotune.errors import UsageError
from autotune.records import Store
from autotune.search import DEFAULT, require_seed, require_strategy
from autotune.space.space import Space
from autotune.tuning.budget import Budget
from autotune.tuning.limits import COMPILE_TIMEOUT_S
from autotune.tuning.progress import Progress, Watcher
from autotune.values.device import Device, whole_number
from autotune.values.lazy import cached_property
from autotune.values.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Request:
    """A search as it was asked for; `autotune.tuning.tuner.tune` documents what each attribute means.

    Attributes:
        target: A GPU that is not here: its kernel is chosen by estimate, and nothing is measured.
        first: Measure no more than so many points, those that the model expects to be fastest; None for a
            search of the whole list.

    Raises:
        UsageError: The strategy, seed, GPUs or number of compilers is wrong, or a study has no storage.
        RecordError: The folder of records cannot be written.
    """

    budget: Budget
    space: Space | None = None
    seed: int = 0
    strategy: Any = DEFAULT
    gpus: Sequence[int] = (0,)
    target: Device | None = None
    first: int | None = None
    workers: int | None = None
    cold: bool = False
    resume: bool | None = None
    storage: str | None = field(default=None, repr=False)  # it may hold a password
    study: str | None = None
    root: Path | str | None = None
    watch: Watcher = lambda progress: None
    began: float | None = None

    def __post_init__(self) -> None:
        require_strategy(self.strategy)
        require_seed(self.seed)
        object.__setattr__(self, "seed", int(self.seed))
        object.__setattr__(self, "gpus", ordinals_of(self.gpus))
        if self.target is None and (not self.gpus or len(set(self.gpus)) < len(self.gpus)):
            raise UsageError(f"gpus {list(self.gpus)}: name one GPU or several, each once")
        if self.workers is not None and not (isinstance(self.workers, Integral) and self.workers >= 1):
            raise UsageError(
                f"workers {self.workers!r:.60}: give the number of compiling processes, 1 or more"
            )
        if self.study is not None and self.storage is None:
            raise UsageError(f"study {self.study!r:.60} is of a storage: give the storage too")
        self.store.check_writable()

    @cached_property
    def store(self) -> Store:
        """Where records are looked up and kept."""
        return Store(self.root)

    def progress(self, problem: Problem) -> Progress:
        """Return the progress of a search that begins now, or began with its command."""
        progress = Progress(problem, self.budget, partial=self.first is not None)
        if self.began is not None:
            progress.began = self.began
        return progress

    def compilers(self) -> CompilePool:
        """Start the compile processes, one for each core unless asked otherwise."""
        pool = CompilePool(self.workers or default_workers(spare=0), COMPILE_TIMEOUT_S)
        pool.warm()
        return pool


def ordinals_of(gpus: Sequence[int]) -> tuple[int, ...]:
    """Return CUDA ordinals, which may be NumPy's integers, as a tuple.

    Raises:
        UsageError: One is no integer, or this is not a list.
    """
    try:
        return tuple(whole_number(gpu) for gpu in gpus)
    except TypeError:
        raise UsageError(f"gpus {gpus!r:.60}: give a list of CUDA ordinals, such as [0, 1]") from None
