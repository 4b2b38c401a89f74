"""Turns arrivals and transferred bytes at mbarriers, which lie in shared memory, into completed phases."""

from __future__ import annotations

from typing import Any

import numpy as np

from autotune.simulator.lanes import Lanes

SLOT_BYTES = 8


class MBarriers:
    """The mbarriers of one group of blocks; each shared-memory word of 8 bytes may be one.

    A phase completes when all its arrivals and all its expected bytes are in; then the next one begins.

    Attributes:
        observed: For each mbarrier (column) the number of phases that each lane has seen complete.
        published: The same for each block at its last barrier: what all its threads may rely on.
        carried: What the lanes that arrived at an mbarrier had seen: who waits for it may rely on that too,
            ``[blocks, mbarriers, mbarriers]``.
    """

    def __init__(self, lanes: Lanes, storage_bytes: int) -> None:
        slots = storage_bytes // SLOT_BYTES
        self.lanes = lanes
        self._expected = np.zeros(slots, np.int64)  # arrivals of a phase; 0: no mbarrier here
        self._pending = np.zeros(slots, np.int64)
        self._bytes = np.zeros(slots, np.int64)
        self._phase = np.zeros(slots, np.int64)
        self._column = np.zeros(slots, np.int64)
        self._columns: dict[int, int] = {}  # offset within the block -> column
        self.observed = np.zeros((lanes.count, 0), np.int64)
        self.published = np.zeros((lanes.blocks, 0), np.int64)
        self.carried = np.zeros((lanes.blocks, 0, 0), np.int64)

    def exists(self, slots: Any) -> Any:
        """Tell which slots hold an mbarrier."""
        return self._expected[slots] > 0

    def initialise(self, slots: Any, counts: Any, slots_per_block: int) -> None:
        """Make mbarriers that expect a number of arrivals per phase."""
        for offset in np.unique(slots % slots_per_block).tolist():
            if offset not in self._columns:
                self._columns[offset] = len(self._columns)
                self.observed = np.pad(self.observed, ((0, 0), (0, 1)))
                self.published = np.pad(self.published, ((0, 0), (0, 1)))
                self.carried = np.pad(self.carried, ((0, 0), (0, 1), (0, 1)))
            column = self._columns[offset]
            here = slots % slots_per_block == offset
            self._column[slots[here]] = column
            for block in np.unique(slots[here] // slots_per_block).tolist():
                self.observed[self.lanes.block == block, column] = 0
                self.published[block, column] = 0
                self.carried[block, column] = 0
        self._expected[slots] = self._pending[slots] = counts
        self._bytes[slots] = self._phase[slots] = 0

    def arrive(self, slots: Any, counts: Any, lanes: Any) -> tuple[Any, list[int]]:
        """Count arrivals, lane after lane.

        Returns:
            (phase each lane arrived at, slots of which a phase completed).
        """
        tokens = np.zeros(len(slots), np.int64)
        place = (self.lanes.block[lanes], self._column[slots])
        np.maximum.at(self.carried, place, self.observed[lanes])
        completed: list[int] = []
        for lane, slot in enumerate(slots.tolist()):
            tokens[lane] = self._phase[slot]
            self._pending[slot] -= int(counts[lane])
            completed += self._complete(slot)
        return tokens, completed

    def expect(self, slots: Any, sizes: Any) -> None:
        """Add bytes that the current phase has to wait for."""
        np.add.at(self._bytes, slots, sizes)

    def transfer(self, slot: int, size: int) -> list[int]:
        """Note bytes that have come in; return the slot if that completed a phase."""
        self._bytes[slot] -= size
        return self._complete(slot)

    def _complete(self, slot: int) -> list[int]:
        if self._pending[slot] > 0 or self._bytes[slot] != 0:
            return []
        self._pending[slot] = self._expected[slot]
        self._phase[slot] += 1
        return [slot]

    def is_complete(self, slots: Any, parity: Any) -> Any:
        """Tell whether the phase with a parity (0 or 1) is complete, which the next one's beginning shows."""
        return self._phase[slots] & 1 != parity & 1

    def observe(self, slots: Any, lanes: Any) -> None:
        """Note that lanes saw the current phases begin."""
        column = self._column[slots]
        self.observed[lanes] = np.maximum(self.observed[lanes], self.carried[self.lanes.block[lanes], column])
        self.observed[lanes, column] = np.maximum(self.observed[lanes, column], self._phase[slots])

    def publish(self, block: int | None) -> None:
        """Let every thread of a block (None: of all blocks) know what one of them has seen."""
        stride = self.lanes.stride
        blocks = range(self.lanes.blocks) if block is None else (block,)
        for number in blocks:
            seen = self.observed[number * stride : (number + 1) * stride]
            np.maximum(self.published[number], seen.max(axis=0), out=self.published[number])

    def ticket(self, slot: int) -> tuple[int, int]:
        """Return (column, phase) that a transfer towards this mbarrier belongs to."""
        return int(self._column[slot]), int(self._phase[slot])

    def knows(self, lanes: Any, columns: Any, phases: Any) -> Any:
        """Tell whether lanes may rely on the completion of a phase."""
        if not self.observed.shape[1]:
            return np.zeros(len(lanes), bool)
        seen = np.maximum(self.observed[lanes, columns], self.published[self.lanes.block[lanes], columns])
        return seen > phases
