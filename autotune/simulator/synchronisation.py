"""Barriers, mbarriers and groups of cp.async: which lanes wait, and what each may rely on afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from autotune.simulator.faults import UnsupportedPTX
from autotune.simulator.lanes import Lanes

BARRIERS = 16  # per block, as in hardware
OF_CLUSTER = BARRIERS  # stands for the barrier of a cluster
SLOT_BYTES = 8  # of an mbarrier
MOST_MBARRIERS = 256  # of a block: what threads know of each other's grows with the square


class Barriers:
    """The barriers of all blocks, and the lanes that wait at them.

    Attributes:
        waiting: Lanes that wait, ``[lanes]`` bool.
        condition: What each waiting lane brought to a reducing barrier, ``[lanes]`` bool.
        ahead: Lanes that arrived at their cluster's barrier, which is not complete, ``[lanes]`` bool.
        owing: Lanes that arrived there and did not wait yet, ``[lanes]`` bool.
    """

    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        self.waiting = np.zeros(lanes.count, bool)
        self.condition = np.zeros(lanes.count, bool)
        self._number = np.zeros(lanes.count, np.int64)
        self._expected = np.zeros(lanes.count, np.int64)
        self._arrived = np.zeros((lanes.blocks, BARRIERS), np.int64)  # threads that did not stay to wait
        self.ahead = np.zeros(lanes.count, bool)
        self.owing = np.zeros(lanes.count, bool)
        self._relaxed = np.zeros(lanes.blocks // lanes.cluster, bool)  # some lane arrived without release

    def wait(self, chosen: Any, number: Any, expected: Any) -> None:
        """Let the chosen lanes wait at a barrier.

        Args:
            chosen: ``[lanes]`` bool.
            number: Barrier of each lane, ``[lanes]``.
            expected: Threads it needs, ``[lanes]``; 0 for all living threads of the block.
        """
        self._number[chosen] = number[chosen]
        self._expected[chosen] = expected[chosen]
        self.waiting |= chosen

    def arrive(self, chosen: Any, number: Any, expected: Any) -> None:
        """Count the chosen lanes without making them wait (bar.arrive)."""
        self._expected[chosen] = expected[chosen]
        np.add.at(self._arrived, (self.lanes.block[chosen], number[chosen].astype(np.int64)), 1)

    def arrive_at_cluster(self, chosen: Any, relaxed: bool) -> Any:
        """Count the chosen lanes at their cluster's barrier; return those that owe a wait."""
        twice = chosen & self.owing
        self.ahead |= chosen
        self.owing |= chosen
        if relaxed:
            self._relaxed[np.unique(self.lanes.block[chosen] // self.lanes.cluster)] = True
        return twice

    def wait_for_cluster(self, chosen: Any) -> Any:
        """Let the chosen lanes wait for their cluster's barrier; return those that did not arrive there."""
        never = chosen & ~self.owing
        self.owing &= ~chosen
        self._number[chosen] = OF_CLUSTER
        self.waiting |= chosen & self.ahead
        return never

    def complete_clusters(self, alive: Any) -> Iterator[tuple[range, bool]]:
        """Release the complete barriers of clusters.

        Yields:
            (its blocks, whether all arrived with release).
        """
        if not self.ahead.any():
            return
        size = self.lanes.cluster
        lanes = size * self.lanes.stride
        some = self.ahead.reshape(-1, lanes).any(axis=1)
        missing = (alive & ~self.ahead).reshape(-1, lanes).any(axis=1)
        for cluster in np.flatnonzero(some & ~missing).tolist():
            part = slice(cluster * lanes, (cluster + 1) * lanes)
            self.ahead[part] = False
            self.waiting[part] &= self._number[part] != OF_CLUSTER
            yield range(cluster * size, (cluster + 1) * size), not self._relaxed[cluster]
            self._relaxed[cluster] = False

    def complete(self, alive: Any) -> Iterator[tuple[int, Any, bool]]:
        """Release complete barriers.

        Yields:
            (block, its lanes that go on ``[stride]`` bool, whether the barrier was one for the whole block).
        """
        stride = self.lanes.stride
        waiting = (self.waiting & alive & (self._number != OF_CLUSTER)).reshape(-1, stride)
        for block in np.flatnonzero(waiting.any(axis=1)).tolist():
            part = slice(block * stride, (block + 1) * stride)
            here, living = waiting[block], alive[part]
            for number in np.unique(self._number[part][here]).tolist():
                at = here & (self._number[part] == number)
                expected = int(self._expected[part][at].max())
                if expected == 0 and not (at == living).all():
                    continue
                if expected and int(at.sum()) + int(self._arrived[block, number]) < expected:
                    continue
                self.waiting[part][at] = False
                self._arrived[block, number] = 0
                yield block, at, expected == 0


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
        self.new = np.zeros(slots, bool)  # since the last barrier of the cluster
        self._columns: dict[int, int] = {}  # offset within the block -> column
        self.observed = np.zeros((lanes.count, 0), np.int64)
        self.published = np.zeros((lanes.blocks, 0), np.int64)
        self.carried = np.zeros((lanes.blocks, 0, 0), np.int64)

    def exists(self, slots: Any) -> Any:
        """Return which slots hold an mbarrier."""
        return self._expected[slots] > 0

    def initialise(self, slots: Any, counts: Any, slots_per_block: int) -> None:
        """Create mbarriers that expect a number of arrivals per phase.

        Raises:
            UnsupportedPTX: A block has more than `MOST_MBARRIERS`.
        """
        offsets = np.unique(slots % slots_per_block).tolist()
        new = [offset for offset in offsets if offset not in self._columns]
        before, more = len(self._columns), (0, len(new))
        if before + len(new) > MOST_MBARRIERS:
            raise UnsupportedPTX(
                f"the simulator supports {MOST_MBARRIERS} mbarriers per block; this has more"
            )
        self._columns.update({offset: before + number for number, offset in enumerate(new)})
        self.observed = np.pad(self.observed, ((0, 0), more))
        self.published = np.pad(self.published, ((0, 0), more))
        self.carried = np.pad(self.carried, ((0, 0), more, more))
        for offset in offsets:
            column = self._columns[offset]
            here = slots % slots_per_block == offset
            self._column[slots[here]] = column
            for block in np.unique(slots[here] // slots_per_block).tolist():
                self.observed[self.lanes.block == block, column] = 0
                self.published[block, column] = 0
                self.carried[block, column] = 0
        self.new[slots] = True
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
        """Record bytes that have arrived; return the slot if that completed a phase."""
        self._bytes[slot] -= size
        return self._complete(slot)

    def _complete(self, slot: int) -> list[int]:
        if self._pending[slot] > 0 or self._bytes[slot] != 0:
            return []
        self._pending[slot] = self._expected[slot]
        self._phase[slot] += 1
        return [slot]

    def is_complete(self, slots: Any, parity: Any) -> Any:
        """Return whether the phase of a parity (0 or 1) is complete: whether the next one has begun."""
        return self._phase[slots] & 1 != parity & 1

    def observe(self, slots: Any, lanes: Any) -> None:
        """Record that lanes saw the current phases begin."""
        column = self._column[slots]
        self.observed[lanes] = np.maximum(self.observed[lanes], self.carried[self.lanes.block[lanes], column])
        self.observed[lanes, column] = np.maximum(self.observed[lanes, column], self._phase[slots])

    def publish(self, block: int | None) -> None:
        """Share what any thread of a block (None: of each block) has seen with all its threads."""
        stride = self.lanes.stride
        blocks = range(self.lanes.blocks) if block is None else (block,)
        for number in blocks:
            seen = self.observed[number * stride : (number + 1) * stride]
            np.maximum(self.published[number], seen.max(axis=0), out=self.published[number])

    def tickets(self, slots: Any) -> tuple[Any, Any]:
        """Return (columns, phases) that transfers towards these mbarriers belong to."""
        return self._column[slots], self._phase[slots]

    def knows(self, lanes: Any, columns: Any, phases: Any) -> Any:
        """Return whether lanes may rely on the completion of a phase."""
        seen = np.maximum(self.observed[lanes, columns], self.published[self.lanes.block[lanes], columns])
        return seen > phases


class AsyncCopies:
    """The groups of cp.async of every lane.

    Attributes:
        committed: Groups each lane has committed, ``[lanes]`` int64: the number of the group being filled.
        waited: Groups each lane knows to be complete, ``[lanes]`` int64.
        published: The same at the block's last barrier: what the other threads may rely on.
        shown: The same at the warp's last __syncwarp(): what the other threads of the warp may rely on.
    """

    def __init__(self, lanes: int) -> None:
        self.committed = np.zeros(lanes, np.int64)
        self.waited = np.zeros(lanes, np.int64)
        self.published = np.zeros(lanes, np.int64)
        self.shown = np.zeros(lanes, np.int64)

    def commit(self, mask: Any) -> None:
        """Close the group that each active lane is filling."""
        self.committed += 1 if mask is None else mask

    def wait(self, pending: int | None, mask: Any) -> None:
        """Wait until at most ``pending`` groups of each active lane are incomplete; None: until none is."""
        if pending is None:
            self.commit(mask)
            pending = 0
        complete = np.maximum(self.waited, self.committed - pending)
        np.copyto(self.waited, complete, where=True if mask is None else mask)
