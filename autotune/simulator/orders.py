"""What orders accesses to memory: barriers, __syncwarp(), waits for async copies, and fences between blocks.

Barriers divide the life of a block into epochs. Between blocks, a fence and then an atomic operation publish
what a block did so far to whom that word's next atomic operations belong; that the fence must be the writer's
own, or lie behind a barrier, is checked by blocks.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.simulator.emitter import Access
from autotune.simulator.lanes import WARP, Lanes
from autotune.simulator.memory import ALLOCATION_ALIGN, Region
from autotune.simulator.shared import SEVERAL, WARPS, SharedMemory
from autotune.simulator.synchronisation import AsyncCopies, Barriers, MBarriers

# A stamp: (block + 1, but 0 in shared memory) << 32 | epoch << 13 | flags and code; 0 is the host.
BLOCK, EPOCH = 32, 13
CAS, ATOMIC = 1 << 12, 1 << 11  # how it was accessed: by atomicCAS alone; by atomic operations alone
WHO = (1 << 11) - 1  # thread, or as `shared` counts on: a warp, or several warps of the block
FOREIGN = 1 << 61  # + block << 13: another block of the cluster accessed this unit of shared memory
BULK = 1 << 62  # + mbarrier: a bulk copy that reports to it wrote this unit of shared memory
IN_FLIGHT = BULK + (1 << 61)  # + lane: an async copy of that lane did
NOTHING = (1 << 63) - 1  # nothing wrote it
MANY = (BULK >> BLOCK) - 1 << BLOCK  # in place of block and epoch: several blocks
EPOCHS = 1 << BLOCK - EPOCH
_NORESERVE = 0x4000  # MAP_NORESERVE of Linux

Release = tuple[int, int, int]


@dataclass(eq=False)
class Shadow:
    """What is remembered of each unit of a memory, ``[units]`` int64.

    Attributes:
        writers, readers: Stamps of the last ones.
        write_sync, read_sync: How often their warp was synchronised by then; None without __syncwarp().
        fences: Fences that the writer's block had run; None where nothing orders blocks.
        copy_groups: In shared memory, the group of the async copy that wrote it, or its mbarrier's phase.
    """

    writers: Any
    readers: Any
    write_sync: Any = None
    read_sync: Any = None
    fences: Any = None
    copy_groups: Any = None


@dataclass(eq=False)
class Touch:
    """What one execution of an instruction touches of one memory.

    Attributes:
        units: Each unit of each lane; ``lanes`` and ``stamps`` likewise. In shared memory each is there once.
        start: In shared memory, the first stamp of this epoch; None in global memory.
        place: In shared memory the `Pattern`; else the `Region` and the byte offset of each lane.
    """

    access: Access
    shadow: Shadow
    units: Any
    lanes: Any
    stamps: Any
    start: Any
    place: Any

    def unordered(self, before: Any) -> Any:
        """Return which stamps no barrier orders before this."""
        if self.start is not None:
            return before >= self.start
        same_epoch = before >> EPOCH == self.stamps >> EPOCH
        return (before != 0) & (same_epoch | (before >> BLOCK != self.stamps >> BLOCK))


class Orders:
    """Follows what orders the accesses of one group of blocks after the other.

    Args:
        fences: Whether the kernel has fences and atomic operations that may order its blocks.
        syncs_warps: Whether the kernel calls __syncwarp().
        unit: Bytes of the smallest store to global memory.

    Attributes:
        epochs: Of each block.
        epoch: Of all of them, None while they differ.
        warp_sync: Times each warp was synchronised.
        barriers: Where lanes wait.
    """

    barriers: Barriers

    def __init__(self, fences: bool, syncs_warps: bool, unit: int) -> None:
        self.has_fences, self.syncs_warps, self.unit = fences, syncs_warps, unit
        # What a word, and what a block, knows of blocks: block + 1 -> (fences, epoch, thread) of a release.
        self._published: dict[tuple[int, int], dict[int, Release]] = {}
        self._known: dict[int, dict[int, Release]] = {}

    def begin(
        self, lanes: Lanes, shared: SharedMemory, copies: AsyncCopies, mbarriers: MBarriers | None
    ) -> None:
        """Follow another group of blocks."""
        self.lanes, self.shared, self.copies, self.mbarriers = lanes, shared, copies, mbarriers
        self.epochs = np.ones(lanes.blocks, np.int64)
        self.epoch: int | None = 1
        self.arrived = self.epochs.copy()  # epoch of each block when it last arrived at its cluster's barrier
        self.shown = self.epochs.copy()  # the first epoch of each block that other blocks must not rely on
        self.shown_before = self.epochs.copy()  # the same for who arrived at that barrier and did not wait
        self.warp_sync = np.zeros(lanes.count // WARP, np.int64)
        self.home = ((lanes.block_ids + 1) << BLOCK) + lanes.thread
        self.fences = np.zeros(lanes.blocks, np.int64)
        units = len(shared.storage) // shared.unit
        self.of_shared = self._shadow(np.zeros, units)
        self.of_shared.writers[:] = NOTHING
        self.of_shared.copy_groups = np.zeros(units, np.int64)
        # Units that another block accessed after it arrived at its cluster's barrier, which is not complete.
        self.early_writes, self.early_reads = np.zeros((2, units), bool)

    def _shadow(self, zeros: Any, units: int) -> Shadow:
        first, *more = (zeros(units, np.int64) for _ in range(4 if self.syncs_warps else 2))
        return Shadow(first, *more)

    def of_region(self, region: Region) -> Shadow:
        """Return what is remembered of an array."""
        found: Shadow | None = region.shadow
        if found is None:
            units = -(-(region.size + ALLOCATION_ALIGN) // self.unit)
            found = region.shadow = self._shadow(_untouched, units)
            found.fences = _untouched(units, np.int64) if self.has_fences else None
            if region.unwritten:
                found.writers += NOTHING
        return found

    def sync_warps(self, mask: Any) -> None:
        """Record that the active lanes' warps were synchronised."""
        synced = np.True_ if mask is None else mask.reshape(-1, WARP).any(axis=1)
        self.warp_sync += synced
        lanes = synced if mask is None else np.repeat(synced, WARP)
        np.copyto(self.copies.shown, self.copies.waited, where=lanes)

    def barrier(self, block: int | None) -> None:
        """Begin a new epoch of one block, or of all."""
        part = slice(None)
        if block is not None:
            part = slice(block * self.lanes.stride, (block + 1) * self.lanes.stride)
        self.copies.published[part] = self.copies.waited[part]
        if self.mbarriers is not None:
            self.mbarriers.publish(block)
        self.advance(block)

    def arrive(self, blocks: Any) -> None:
        """Record that threads of blocks arrive at the barrier of their cluster."""
        self.arrived[blocks] = self.epochs[blocks]

    def cluster_barrier(self, blocks: range, releases: bool) -> None:
        """Order what the blocks of a cluster did until they arrived before what they do once they waited.

        Args:
            blocks: Of the cluster.
            releases: Whether all arrived with release; else nothing is ordered.
        """
        width = self.shared.window // self.shared.unit
        units = slice(blocks.start * width, blocks.stop * width)
        self.shown_before[blocks] = self.shown[blocks]
        for seen, early in (
            (self.of_shared.writers, self.early_writes),
            (self.of_shared.readers, self.early_reads),
        ):
            stamps, ordered = seen[units], releases & ~early[units]
            stamps[(stamps >= FOREIGN) & (stamps < BULK) & ordered] = 0
            early[units] = False
        if not releases:
            return
        first = self.lanes.first_block + 1
        for block in blocks:
            self.barrier(block)
            self.shown[block] = self.arrived[block] + 1
            self.fences[block] += 1
        known = {first + b: (int(self.fences[b]), int(self.epochs[b]), WHO) for b in blocks}
        for block in blocks:
            _learn(self._known.setdefault(first + block, {}), known)

    def advance(self, block: int | None) -> None:
        """Order what a block (None: every block) did so far before what it does from now on."""
        self.epochs[slice(None) if block is None else block] += 1
        lowest = int(self.epochs.min())
        self.epoch = lowest if lowest == int(self.epochs.max()) else None

    def fence(self, lanes: Any) -> None:
        """Record a fence between blocks that lanes (None: all) run."""
        self.fences[slice(None) if lanes is None else np.unique(self.lanes.block[lanes])] += 1

    def by_warp(self, touch: Touch, where: Any, before: Any, did: str) -> Any:
        """Return where an access came from the warp that comes now, before its last __syncwarp()."""
        shadow = touch.shadow
        synced = (shadow.write_sync if did == "wrote" else shadow.read_sync)[touch.units[where]]
        warp = warp_of(before)
        own = (warp == warp_of(touch.stamps[where])) & (warp >= 0) & one_block(before, touch.stamps[where])
        return own & (synced < self.warp_sync[touch.lanes[where] // WARP])

    def by_fences(self, touch: Touch, where: Any, before: Any, did: str) -> Any:
        """Return where a fence and atomic operations order an access of another block before this one."""
        ordered = np.zeros(len(where), bool)
        theirs, mine = before >> BLOCK, touch.stamps[where] >> BLOCK
        for other, block in {*zip(theirs.tolist(), mine.tolist(), strict=True)}:
            known = self._known.get(block, {})
            here = (theirs == other) & (mine == block)
            if other == MANY >> BLOCK:
                ordered |= here & bool(known)
            elif other in known:
                fences, epoch, thread = known[other]
                here &= (before >> EPOCH & EPOCHS - 1 < epoch) | (before & WHO == thread) | (thread < 0)
                if did == "wrote":
                    here &= touch.shadow.fences[touch.units[where]] < fences
                ordered |= here
        return ordered

    def publish(self, touch: Touch, releases: bool) -> None:
        """Let atomic accesses of arrays learn what earlier ones published there, and publish in turn."""
        if not self.has_fences or touch.start is not None or not int(touch.stamps[0]) & ATOMIC:
            return
        threads: dict[tuple[int, int], int] = {}  # the one that accesses a word for its block, or -1
        for stamp, unit in zip(touch.stamps.tolist(), touch.units.tolist(), strict=True):
            place = (stamp >> BLOCK, unit)
            threads[place] = -1 if place in threads else stamp & WHO
        for (block, unit), thread in threads.items():
            word = self._published.setdefault((touch.place[0].base, unit), {})
            known = self._known.setdefault(block, {})
            _learn(known, word)
            number = block - 1 - self.lanes.first_block
            if releases and self.fences[number]:
                fences, epoch = int(self.fences[number]), int(self.epochs[number])
                _learn(word, {**known, block: (fences, epoch, thread)})

    def hand_over(self, lanes: Any, columns: Any, phases: Any) -> None:
        """Let mbarriers say when the async copies are complete that each lane has not waited for."""
        writers, groups = self.of_shared.writers, self.of_shared.copy_groups
        units = np.flatnonzero((writers >= IN_FLIGHT) & (writers < NOTHING))
        copier = writers[units] - IN_FLIGHT
        place = np.full(self.lanes.count, -1)
        place[lanes] = np.arange(len(lanes))
        mine = (place[copier] >= 0) & (groups[units] >= self.copies.waited[copier])
        units, place = units[mine], place[copier[mine]]
        writers[units], groups[units] = BULK + columns[place], phases[place]

    def copies_in_flight(self, touch: Touch, where: Any, before: Any) -> tuple[Any, Any]:
        """Return which of some units a cp.async may still write, and where its own thread knows better."""
        at = np.flatnonzero((before >= IN_FLIGHT) & (before < NOTHING))
        copier, units = before[at] - IN_FLIGHT, touch.units[where[at]]
        group = touch.shadow.copy_groups[units]
        settled = group < self.copies.published[copier]
        touch.shadow.writers[units[settled]] = 0
        at, copier, group = at[~settled], copier[~settled], group[~settled]
        who = touch.stamps[where[at]] & WHO
        arrived = group < self.copies.waited[copier]
        warp = np.where(who < SEVERAL, touch.lanes[where[at]] // WARP, -1)
        shown = (group < self.copies.shown[copier]) & (copier // WARP == warp)
        bad = ~np.where(self.lanes.thread[copier] == who, arrived, shown)
        return at[bad], arrived[bad]

    def bulk_in_flight(self, touch: Touch, where: Any, before: Any) -> Any:
        """Return which of some units a bulk copy may still write, for all that the thread has waited for."""
        at = np.flatnonzero((before >= BULK) & (before < IN_FLIGHT))
        if not len(at):
            return at
        assert self.mbarriers is not None
        units, lanes = touch.units[where[at]], touch.lanes[where[at]]
        column, phase = before[at] - BULK, touch.shadow.copy_groups[units]
        settled = self.mbarriers.published[self.lanes.block[lanes], column] > phase
        touch.shadow.writers[units[settled]] = 0
        return at[~self.mbarriers.knows(lanes, column, phase)]


def one_block(before: Any, now: Any) -> Any:
    """Return which stamps of shared memory are of one block."""
    return (np.maximum(before, now) < FOREIGN) | (before >> EPOCH == now >> EPOCH)


def warp_of(stamps: Any) -> Any:
    """Return the warp of each stamp, -1 for several."""
    who = stamps & WHO
    return np.where(who < WARPS, who // WARP, np.where(who < SEVERAL, who - WARPS, -1))


def _untouched(count: int, kind: Any) -> Any:
    """Return zeros that take memory only where they are touched, however large the array is."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    try:
        return np.frombuffer(mmap.mmap(-1, 8 * count, flags), kind)
    except OSError:
        raise MemoryError from None


def _learn(known: dict[int, Release], more: dict[int, Release]) -> None:
    """Add the later of the releases of each block."""
    for block, release in more.items():
        known[block] = max(known.get(block, release), release)
