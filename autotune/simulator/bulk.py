"""Executes mbarrier instructions and bulk copies (cp.async.bulk)."""

from __future__ import annotations

from typing import Any

import numpy as np

from autotune.simulator.emitter import Access
from autotune.simulator.load_store import Part, Values
from autotune.simulator.printing import Printing
from autotune.simulator.shared import Pattern
from autotune.simulator.synchronisation import SLOT_BYTES, MBarriers

GRANULE = 16  # bytes: addresses and sizes of bulk copies are multiples of it


class BulkCopies(Printing):
    """What the generated code calls for mbarriers and cp.async.bulk.

    Attributes:
        mbarriers: None if the kernel uses none.
        yielded: Lanes that asked for a phase which was not complete; they may go on when one completes.
        completions: Phases completed so far.
    """

    mbarriers: MBarriers | None
    yielded: Any
    completions: int

    def _slots(self, access: Access, address: Values, mask: Any, must_exist: bool = True) -> tuple[Any, Any]:
        """Return (active lanes, their mbarriers' slots)."""
        assert self.mbarriers is not None
        active, address = self._select(address, mask)
        lanes = self.lanes.index if active is None else active
        if len(lanes) == 0:
            return lanes, np.zeros(0, np.int64)
        found = self.shared.pattern(access, address, active)
        slots = found.offsets // SLOT_BYTES
        missing = ~self.mbarriers.exists(slots)
        if found.others is not None:
            self._check_present(access, found)
            away = found.offsets // self.shared.window != self.lanes.block[lanes]
            missing |= away & self.mbarriers.new[slots]
        if must_exist and missing.any():
            where = int(np.argmax(missing))
            late = self.mbarriers.exists(slots[where])
            why = "initialised since the barrier of its cluster" if late else "not initialised"
            message = f"{access.opcode} of an mbarrier that was {why}"
            place = int(slots[where]) * SLOT_BYTES % self.shared.window
            raise self.lanes.stop(
                "uninitialised-read", message, access.line, int(lanes[where]), place, "shared"
            )
        return lanes, slots

    def _spread(self, value: Values, lanes: Any) -> Any:
        return np.broadcast_to(value, (self.lanes.count,))[lanes].astype(np.int64)

    def mbarrier_init(self, access: Access, address: Values, mask: Any, counts: Values) -> None:
        """Execute mbarrier.init."""
        assert self.mbarriers is not None
        lanes, slots = self._slots(access, address, mask, must_exist=False)
        if len(lanes):
            self.mbarriers.initialise(slots, self._spread(counts, lanes), self.shared.window // SLOT_BYTES)

    def mbarrier_expect(self, access: Access, address: Values, mask: Any, sizes: Values) -> None:
        """Execute mbarrier.expect_tx."""
        assert self.mbarriers is not None
        lanes, slots = self._slots(access, address, mask)
        self.mbarriers.expect(slots, self._spread(sizes, lanes))

    def mbarrier_arrive(
        self, access: Access, address: Values, mask: Any, counts: Values, sizes: Values = 0
    ) -> Any:
        """Execute mbarrier.arrive, with or without expect_tx.

        Returns:
            The phase of each lane as its token, ``[lanes]`` uint64.
        """
        assert self.mbarriers is not None
        tokens = np.zeros(self.lanes.count, np.uint64)
        lanes, slots = self._slots(access, address, mask)
        self.mbarriers.expect(slots, self._spread(sizes, lanes))
        tokens[lanes], completed = self.mbarriers.arrive(slots, self._spread(counts, lanes), lanes)
        self._completed(completed)
        return tokens

    def copies_arrive(self, access: Access, address: Values, mask: Any, noinc: str | None) -> None:
        """Execute cp.async.mbarrier.arrive: a phase of the mbarrier waits for what each lane copies so far.

        Without .noinc it raises the arrivals of the phase by the one that it makes.
        """
        assert self.mbarriers is not None
        lanes, slots = self._slots(access, address, mask)
        if self.races is not None:
            self.races.hand_over(lanes, *self.mbarriers.tickets(slots))
        if noinc:
            _, completed = self.mbarriers.arrive(slots, np.ones(len(slots), np.int64), lanes)
            self._completed(completed)

    def mbarrier_wait(self, access: Access, address: Values, mask: Any, parity: Values) -> Any:
        """Execute mbarrier.try_wait or test_wait: return whether the phase is complete, ``[lanes]`` bool."""
        assert self.mbarriers is not None
        passed = np.zeros(self.lanes.count, bool)
        lanes, slots = self._slots(access, address, mask)
        passed[lanes] = self.mbarriers.is_complete(slots, self._spread(parity, lanes))
        through = passed[lanes]
        self.mbarriers.observe(slots[through], lanes[through])
        self.yielded[lanes[~through]] = True
        return passed

    def _completed(self, slots: list[int]) -> None:
        """Let the lanes go on that wait for a phase; what came before is ordered before what follows."""
        if slots:
            self.completions += len(slots)
            self.yielded[:] = False
            if self.races is not None:
                for block in {slot * SLOT_BYTES // self.shared.window for slot in slots}:
                    self.races.advance(block)

    def store_async(
        self,
        to: Access,
        barrier: Access,
        addresses: tuple[Values, Values],
        mask: Any,
        values: tuple[Values, ...],
    ) -> None:
        """Execute st.async: a store to a block of the cluster, whose bytes an mbarrier there expects.

        Args:
            to: The store.
            barrier: Its mbarrier.
            addresses: Where each lane stores, and its mbarrier's.
            mask: Active lanes.
            values: One per element.
        """
        assert self.mbarriers is not None
        lanes, slots = self._slots(barrier, addresses[1], mask)
        if len(lanes) == 0:
            return
        active, target = self._select(addresses[0], mask)
        found = self._shared_pattern(to, target, active)
        apart = found.offsets // self.shared.window != slots * SLOT_BYTES // self.shared.window
        if apart.any():
            lane = int(lanes[np.argmax(apart)])
            message = f"{to.opcode} to one block counted by an mbarrier of another"
            raise self.lanes.stop("out-of-bounds", message, to.line, lane)
        if self.races is not None:
            reports = np.zeros(self.lanes.count, np.int64)
            reports[lanes] = slots
            self.races.write(self.races.touch(to, found), False, self.mbarriers.tickets(reports[found.lane]))
        columns = [np.broadcast_to(value, (self.lanes.count,))[lanes] for value in values]
        self.shared.write(to, found, columns[0] if len(columns) == 1 else np.stack(columns, axis=1))
        for slot, count in zip(*np.unique(slots, return_counts=True), strict=True):
            self._completed(self.mbarriers.transfer(int(slot), int(count) * to.size))

    def bulk_copy(
        self,
        to: Access,
        source: Access,
        barrier: Access,
        operands: tuple[Values, Values, Values, Values],
        mask: Any,
    ) -> None:
        """Execute cp.async.bulk from global to shared memory.

        Args:
            to: Its shared side.
            source: Its global side.
            barrier: Its mbarrier.
            operands: Shared address, global address, bytes and mbarrier of each lane.
            mask: Active lanes.
        """
        assert self.mbarriers is not None
        shared, address, size, mbarrier = operands
        lanes, slots = self._slots(barrier, mbarrier, mask)
        sizes = self._spread(size, lanes)
        for number, lane in enumerate(lanes.tolist()):
            self._copy_one(
                (to, source),
                np.broadcast_to(shared, (self.lanes.count,))[lane : lane + 1],
                np.broadcast_to(address, (self.lanes.count,))[lane : lane + 1],
                int(sizes[number]),
                int(slots[number]),
                lane,
            )

    def _copy_one(
        self, accesses: tuple[Access, Access], shared: Any, address: Any, size: int, slot: int, lane: int
    ) -> None:
        assert self.mbarriers is not None
        to, source = accesses
        who = np.array([lane])
        if size % GRANULE or size == 0:
            message = f"{to.opcode} of {size} bytes, no multiple of {GRANULE}"
            raise self.lanes.stop("misaligned", message, to.line, lane)
        for last in (0, size - GRANULE):  # the first and the last granule lie in bounds: so do those between
            self.shared.pattern(to, shared + shared.dtype.type(last), who)
            ((region, offsets, _),) = self.memory.locate(source, address + np.uint64(last), who, self.lanes)
        stop = int(offsets[0]) + GRANULE
        pieces = np.arange(stop - size, stop, GRANULE)
        self._watch(source, Part(region, region.view, pieces, np.repeat(who, len(pieces)), False))
        place = int(self.shared.pattern(to, shared, who).offsets[0])
        if self.races is not None:
            unit = self.shared.unit
            words = np.arange(place // unit, (place + size) // unit)
            found = Pattern(shared, who, np.array([place]))
            found.words, found.lane = words, np.full(len(words), lane)
            found.who, found.blocks = self.lanes.thread[found.lane], self.lanes.block[found.lane]
            self.races.write(self.races.touch(to, found), False, self.mbarriers.tickets(slot))
        self.shared.storage[place : place + size] = region.data[stop - size : stop]
        self._completed(self.mbarriers.transfer(slot, size))
