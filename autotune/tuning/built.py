"""Candidates that compiled; of the fastest, text and machine code are kept."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from autotune.code.compiler import Binary
from autotune.code.pool import CompilePool
from autotune.code.render import Source
from autotune.errors import MachineError, MachineFault
from autotune.search.candidates import Candidates

KEPT = 16  # candidates; what is known of the others does not grow with their machine code
LOOK_S = 0.2  # how long an interrupt waits at most


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


class Kept:
    """Text and machine code of the fastest candidates, and of those that were asked for.

    Args:
        candidates: That the numbers are of.
        pool: Compiles those that are not kept.
    """

    def __init__(self, candidates: Candidates, pool: CompilePool) -> None:
        self._candidates = candidates
        self._pool = pool
        self._built: dict[int, Built] = {}
        self._costs: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._built)

    def add(self, number: int, built: Built, cost: float) -> None:
        """Keep a candidate, in place of the slowest of those kept if there are enough."""
        self._built[number], self._costs[number] = built, cost
        if len(self._costs) > KEPT:
            slowest = max(self._costs, key=lambda each: (self._costs[each], each))
            del self._built[slowest], self._costs[slowest]

    def build(self, indices: Iterable[int]) -> dict[int, Built]:
        """Return candidates with text and machine code, compiling those that are not kept.

        One that no longer compiles is left out.

        Raises:
            MachineError: The machine failed twice with one.
        """
        wanted = list(indices)
        missing = [index for index in wanted if index not in self._built]
        if missing:
            self._pool.drop()
            sources = {index: self._candidates.source(index) for index in missing}
            for index, source in sources.items():
                self._pool.submit(index, source.text, source.entry, self._candidates.device.arch)
            while self._pool.pending:
                for key, binary in self._pool.collect(LOOK_S):
                    if isinstance(binary, MachineFault):
                        raise MachineError(
                            f"the machine failed twice while it compiled a finalist: {binary.why}. "
                            "Free memory, or stop what disturbs it, and call again: what was measured is kept"
                        )
                    if isinstance(binary, Binary):
                        self._built[int(str(key))] = Built(sources[int(str(key))], binary)
        return {index: self._built[index] for index in wanted if index in self._built}
