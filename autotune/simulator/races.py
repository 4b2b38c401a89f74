"""Detects races, uninitialised reads and async copies used too early in shared memory.

Barriers divide the life of a block into epochs. Each unit of shared memory remembers who wrote it last and
who read it, as ``epoch * codes + code``: the code is a thread, a warp (several threads of it), "several
warps" or "atomics". Two accesses conflict if they fall into one epoch, come from different threads, and one
of them is a write.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from autotune.simulator.emitter import Access
from autotune.simulator.faults import FaultKind, Notes, Stop
from autotune.simulator.lanes import WARP, Lanes
from autotune.simulator.proxies import Proxies
from autotune.simulator.shared import Pattern, SharedMemory
from autotune.simulator.synchronisation import AsyncCopies, MBarriers

NOTHING = 1 << 62  # nothing wrote this unit
IN_FLIGHT = 1 << 61  # + lane: an async copy of that lane wrote it
BULK = 1 << 60  # + mbarrier: a bulk copy that reports to it wrote this unit


class RaceDetector:
    """Watches the shared memory of one group of blocks."""

    def __init__(
        self,
        lanes: Lanes,
        shared: SharedMemory,
        copies: AsyncCopies,
        mbarriers: MBarriers | None,
        notes: Notes,
    ) -> None:
        units = len(shared.storage) // shared.unit
        self.lanes, self.shared, self.copies, self.mbarriers = lanes, shared, copies, mbarriers
        self.notes = notes
        self.writers = np.full(units, NOTHING, np.int64)
        self.readers = np.full(units, -1, np.int64)
        self.copy_groups = np.zeros(units, np.int64)
        self.epochs = np.ones(lanes.blocks, np.int64)
        self.epoch: int | None = 1  # None while the blocks are in different epochs
        self.warp_sync = np.zeros(lanes.count // WARP, np.int64)  # times each warp was synchronised
        self.write_sync: Any = None
        self.read_sync: Any = None
        self.proxies: Proxies | None = None

    def use_proxies(self) -> None:
        """Watch what the tensor cores read past the path of ordinary accesses."""
        self.proxies = Proxies(self.lanes, self.shared, self.copies, self.notes)

    def use_warp_sync(self) -> None:
        """Take __syncwarp() into account: it orders the accesses of one warp."""
        if self.write_sync is None:
            self.write_sync = np.zeros(len(self.writers), np.int64)
            self.read_sync = np.zeros(len(self.writers), np.int64)

    def sync_warps(self, mask: Any) -> None:
        """Record that the active lanes' warps were synchronised."""
        if mask is None:
            self.warp_sync += 1
            np.copyto(self.copies.shown, self.copies.waited)
        else:
            synced = mask.reshape(-1, WARP).any(axis=1)
            self.warp_sync += synced
            np.copyto(self.copies.shown, self.copies.waited, where=np.repeat(synced, WARP))

    def barrier(self, block: int | None) -> None:
        """Begin a new epoch of one block, or of all."""
        if block is None:
            np.copyto(self.copies.published, self.copies.waited)
        else:
            part = slice(block * self.lanes.stride, (block + 1) * self.lanes.stride)
            self.copies.published[part] = self.copies.waited[part]
        if self.mbarriers is not None:
            self.mbarriers.publish(block)
        self.advance(block)

    def advance(self, block: int | None) -> None:
        """Order what a block (None: every block) did so far before what it does from now on."""
        if block is None:
            self.epochs += 1
        else:
            self.epochs[block] += 1
        lowest = int(self.epochs.min())
        self.epoch = lowest if lowest == int(self.epochs.max()) else None

    def hand_over(self, lanes: Any, columns: Any, phases: Any) -> None:
        """Let mbarriers say when the async copies are complete that each lane has not waited for."""
        units = np.flatnonzero((self.writers >= IN_FLIGHT) & (self.writers < NOTHING))
        copier = self.writers[units] - IN_FLIGHT
        place = np.full(self.lanes.count, -1)
        place[lanes] = np.arange(len(lanes))
        mine = (place[copier] >= 0) & (self.copy_groups[units] >= self.copies.waited[copier])
        units, place = units[mine], place[copier[mine]]
        self.writers[units], self.copy_groups[units] = BULK + columns[place], phases[place]

    def _start(self, found: Pattern) -> Any:
        """First stamp of the current epoch of each unit's block."""
        if self.epoch is not None:
            return self.epoch * self.shared.codes
        return self.epochs[found.blocks] * self.shared.codes

    def read(self, access: Access, found: Pattern) -> None:
        """Check and record a read."""
        start = self._start(found)
        writers = self.writers.take(found.words)
        if (writers >= start).any():
            self._examine(access, found, writers, start, False)
        before = self.readers.take(found.words)
        now = start + found.who
        repeated = (before >= start) & (before != now)
        if repeated.any():
            now = np.where(repeated, self._merge(before - start, found.who) + start, now)
        self.readers[found.words] = now
        if self.read_sync is not None:
            self.read_sync[found.words] = self.warp_sync[found.lane // WARP]

    def write(
        self,
        access: Access,
        found: Pattern,
        in_flight: bool,
        ticket: tuple[int, int] | None = None,
        store: Callable[[], tuple[Any, Any]] | None = None,
    ) -> None:
        """Check and record a write.

        Args:
            access: The instruction.
            found: Its addresses.
            in_flight: It is a cp.async.
            ticket: It is a bulk copy: the number of its mbarrier and the phase it belongs to.
            store: Of a store: executes it, and returns which units it changed and which its threads gave
                different values, each ``[words]`` bool. Equal values are a note.
        """
        start, now = self._start(found), found.who
        if self.proxies is not None:
            self.proxies.write(access, found, in_flight, ticket is not None)
        crowd = found.who >= self.lanes.stride
        if crowd.any():
            harmful = crowd if store is None else crowd & store()[1]
            where = int(np.argmax(harmful if harmful.any() else crowd))
            stop = self._stop(access, found, where, "shared-race", "several threads write one word at once")
            self._stop_or_note(stop, harmful)
        writers = self.writers.take(found.words)
        if (writers >= start).any():
            joins = self._examine(access, found, writers, start, True, store)
            if joins is not None:
                now = np.where(joins, self._merge(writers - start, now), now)
        readers = self.readers.take(found.words)
        clash = (readers >= start) & (readers - start != found.who)
        if clash.any() and self.read_sync is not None:
            clash &= ~self._ordered_by_warp(found, readers - start, self.read_sync)
        if clash.any():
            where = int(np.argmax(clash))
            code = int((readers - start)[where])
            why = f"writes what {self._name(code)} read since the last barrier"
            raise self._stop(access, found, where, "shared-race", why)
        if in_flight:
            self.writers[found.words] = IN_FLIGHT + found.lane
            self.copy_groups[found.words] = self.copies.committed[found.lane]
        elif ticket is not None:
            self.writers[found.words] = BULK + ticket[0]
            self.copy_groups[found.words] = ticket[1]
        else:
            self.writers[found.words] = start + now
        if self.write_sync is not None:
            self.write_sync[found.words] = self.warp_sync[found.lane // WARP]

    def update(self, access: Access, found: Pattern) -> None:
        """Check and record an atomic operation; atomics do not conflict with each other."""
        start, cas = self._start(found), "cas" in access.opcode.split(".")
        atomic, tests = start + self.shared.atomic, start + self.shared.cas
        writers = self.writers.take(found.words)
        before = (writers == atomic) | (writers == tests)
        if ((writers >= start) & ~before).any():
            self._examine(access, found, np.where(before, -1, writers), start, False)
        readers = self.readers.take(found.words)
        clash = (readers >= start) & (readers - start != found.who)
        if clash.any():
            where = int(np.argmax(clash))
            name = self._name(int((readers - start)[where]))
            why = f"changes what {name} read since the last barrier"
            stop = self._stop(access, found, where, "shared-race", why)
            self._stop_or_note(stop, np.array(not cas))
        self.writers[found.words] = np.where(writers == atomic, atomic, tests if cas else atomic)

    def _merge(self, before: Any, now: Any) -> Any:
        """Combine two reader codes of one epoch: a thread, a warp, or several warps."""
        stride = self.lanes.stride
        warp_before = np.where(before < stride, before // WARP, before - stride)
        warp_now = np.where(now < stride, now // WARP, now - stride)
        several = self.shared.several
        one_warp = (before < several) & (now < several) & (warp_before == warp_now)
        return np.where(one_warp, stride + warp_now, several)

    def _ordered_by_warp(self, found: Pattern, codes: Any, synced: Any) -> Any:
        """Return where the other access came from the same warp, before its last __syncwarp()."""
        stride = self.lanes.stride
        warp = np.where(
            codes < stride, codes // WARP, np.where(codes < self.shared.several, codes - stride, -1)
        )
        mine = self.lanes.thread[found.lane] // WARP
        own = np.where(found.who < self.shared.several, mine, -2)
        return (warp == own) & (synced[found.words] < self.warp_sync[found.lane // WARP])

    def _examine(
        self,
        access: Access,
        found: Pattern,
        writers: Any,
        start: Any,
        writing: bool,
        store: Callable[[], tuple[Any, Any]] | None = None,
    ) -> Any:
        """Check units whose last write may not lie in an earlier epoch; return where that does no harm."""
        nothing = writers == NOTHING
        if not writing and nothing.any():
            where, why = int(np.argmax(nothing)), "reads shared memory that nothing wrote"
            raise self._stop(access, found, where, "uninitialised-read", why)
        flying = (writers >= IN_FLIGHT) & ~nothing
        if flying.any():
            self._examine_copies(access, found, writers, flying, writing)
        bulk = (writers >= BULK) & (writers < IN_FLIGHT)
        if bulk.any():
            self._examine_bulk(access, found, writers, bulk, writing)
        plain = (writers >= start) & (writers < BULK)
        clash = plain & ((writers - start != found.who) | (found.who >= self.lanes.stride))
        if clash.any() and self.write_sync is not None:
            clash &= ~self._ordered_by_warp(found, writers - start, self.write_sync)
        if not clash.any():
            return None
        # Equal values do no harm; neither does a plain read of what atomicCAS will test.
        harmful = clash & (np.logical_or(*store()) if store else writers - start != self.shared.cas)
        where = int(np.argmax(harmful if harmful.any() else clash))
        code = int((writers - start)[where])
        why = f"{'writes' if writing else 'reads'} what {self._name(code)} wrote since the last barrier"
        stop = self._stop(access, found, where, "shared-race", why, not_thread=code)
        self._stop_or_note(stop, harmful)
        return clash

    def _examine_copies(
        self, access: Access, found: Pattern, writers: Any, flying: Any, writing: bool
    ) -> None:
        copier = np.where(flying, writers - IN_FLIGHT, 0)
        group = self.copy_groups[found.words]
        own = self.lanes.thread[copier] == found.who
        arrived = group < self.copies.waited[copier]
        settled = group < self.copies.published[copier]
        shown = (group < self.copies.shown[copier]) & (copier // WARP == self._one_warp(found))
        bad = flying & ~np.where(own, arrived, settled | shown)
        if bad.any():
            where = int(np.argmax(bad))
            thread = self._name(int(self.lanes.thread[copier[where]]))
            verb = "overwrites" if writing else "reads"
            waited = "brought, with no barrier after its wait"
            unwaited = "may still write: no cp.async.wait_group covers it"
            why = f"{verb} what an async copy of {thread} {waited if arrived[where] else unwaited}"
            other = int(self.lanes.thread[copier[where]])
            raise self._stop(access, found, where, "async-copy", why, not_thread=other)
        self.writers[found.words[flying & settled]] = 0

    def _one_warp(self, found: Pattern) -> Any:
        """Return the warp (counted over all blocks) that touches each unit, -1 for several."""
        return np.where(found.who < self.shared.several, found.lane // WARP, -1)

    def _examine_bulk(self, access: Access, found: Pattern, writers: Any, bulk: Any, writing: bool) -> None:
        assert self.mbarriers is not None
        column = np.where(bulk, writers - BULK, 0)
        phase = self.copy_groups[found.words]
        known = self.mbarriers.knows(found.lane, column, phase)
        if (bulk & ~known).any():
            verb = "overwrites" if writing else "reads"
            why = f"{verb} what an async copy may still write: this thread did not wait for its mbarrier"
            raise self._stop(access, found, int(np.argmax(bulk & ~known)), "async-copy", why)
        settled = self.mbarriers.published[found.blocks, column] > phase
        self.writers[found.words[bulk & settled]] = 0

    def _name(self, code: int) -> str:
        if code < self.lanes.stride:
            return f"thread {self.lanes.thread_place(code)}"
        if code < self.shared.several:
            return f"threads of warp {code - self.lanes.stride}"
        return "an atomic operation" if code > self.shared.several else "threads of several warps"

    def _stop_or_note(self, stop: Stop, harmful: Any) -> None:
        if harmful.any():
            raise stop
        self.notes.add(stop)

    def _stop(
        self,
        access: Access,
        found: Pattern,
        where: int,
        kind: FaultKind,
        why: str,
        not_thread: int | None = None,
    ) -> Stop:
        """Report the unit at a position of the pattern, with a lane that touches it."""
        unit = int(found.words[where]) * self.shared.unit
        lane = int(found.lane[where])
        if not_thread is not None and int(self.lanes.thread[lane]) == not_thread:
            active = np.arange(self.lanes.count) if found.lanes is None else found.lanes
            touching = (found.offsets <= unit) & (unit < found.offsets + access.size)
            others = active[touching & (self.lanes.thread[active] != not_thread)]
            lane = int(others[0]) if len(others) else lane
        address = unit % self.shared.window
        return self.lanes.refuse(access, kind, why, lane, address, "shared")
