"""Detects races and reads of what nothing wrote in global memory, within blocks and between them.

Of every array that the kernel may store to, each unit remembers its last writer and its readers as stamps:
block, barrier epoch of the block (see `races`) and who in the block. Accesses conflict if one of them is a
write, they come from two threads of one epoch or from two blocks, and they are not both atomic. Between
blocks, a fence and then an atomic operation publish what a block did so far to whom that word's next atomic
operations belong; that the fence must be the writer's own, or lie behind a barrier, is checked by blocks.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.simulator.emitter import Access
from autotune.simulator.faults import FaultKind, Notes
from autotune.simulator.lanes import WARP, Lanes
from autotune.simulator.memory import ALLOCATION_ALIGN, Region, gather
from autotune.simulator.races import RaceDetector

# A stamp: (block + 1) << 32 | epoch << 13 | flags and code; 0 is the host, -1 nobody.
_BLOCK, _EPOCH = 32, 13
_MANY = 0x7FFFFFFF << _BLOCK  # in place of block and epoch: several blocks
_EPOCHS = 1 << _BLOCK - _EPOCH
_CAS, _ATOMIC = 1 << 12, 1 << 11  # how it was accessed: by atomicCAS alone; by atomic operations alone
_WHO = (1 << 11) - 1  # thread, or a warp or several warps of the block:
_WARPS, _SEVERAL = 1024, 1056
_NOBODY = -1
_NORESERVE = 0x4000  # MAP_NORESERVE of Linux


_STRONG = {"volatile", "relaxed", "acquire", "release"}  # atomic in PTX's words
Release = tuple[int, int, int]


@dataclass
class Touch:
    """What one execution of an instruction touches of an array.

    Attributes:
        offsets: Byte offset of each lane, ``[lanes]``.
        units: Each unit of each lane, ``[units]``; ``lanes`` and ``stamps`` likewise.
        joins: Units whose earlier writers are remembered too; None for none.
    """

    access: Access
    region: Region
    offsets: Any
    units: Any
    lanes: Any
    stamps: Any
    joins: Any = None


class GlobalRaces:
    """Watches global memory during one launch.

    Args:
        ordered: Whether the kernel has fences and atomic operations that may order its blocks.
        syncs_warps: Whether the kernel calls __syncwarp().
        unit: Bytes of the smallest store.
        notes: Where to put what is no fault.
    """

    def __init__(self, ordered: bool, syncs_warps: bool, unit: int, notes: Notes) -> None:
        self.ordered, self.syncs_warps, self.unit, self.notes = ordered, syncs_warps, unit, notes
        # What a word, and what a block, knows of blocks: block + 1 -> (fences, epoch, thread) of a release.
        self._published: dict[tuple[int, int], dict[int, Release]] = {}
        self._known: dict[int, dict[int, Release]] = {}

    def begin(self, lanes: Lanes, races: RaceDetector) -> None:
        """Watch another group of blocks."""
        self.lanes, self.races = lanes, races
        self._home = ((lanes.block_ids + 1) << _BLOCK) + lanes.thread
        self._fences = np.zeros(lanes.blocks, np.int64)

    def fence(self, lanes: Any) -> None:
        """Record a fence between blocks that lanes (None: all) run."""
        self._fences[slice(None) if lanes is None else np.unique(self.lanes.block[lanes])] += 1

    def read(self, access: Access, region: Region, offsets: Any, lanes: Any) -> None:
        """Check and record a load."""
        strong = not _STRONG.isdisjoint(access.opcode.split("."))
        touch = self._touch(access, region, offsets, lanes, _ATOMIC if strong else 0)
        self._check(touch, "reads", "wrote")
        if strong:
            self._order(touch, False)
        self._record(touch, region.readers, region.read_sync)

    def write(self, access: Access, region: Region, offsets: Any, lanes: Any, values: Any) -> Touch:
        """Check a store that is about to happen; `settle` takes what this returns."""
        strong = not _STRONG.isdisjoint(access.opcode.split("."))
        touch = self._touch(access, region, offsets, lanes, _ATOMIC if strong else 0)
        touch.joins = self._check(touch, "writes", "wrote", values)
        self._check(touch, "writes", "read")
        return touch

    def settle(self, touch: Touch, values: Any) -> None:
        """Record a store that has happened; stop if its lanes stored different values to one place."""
        region, strong = touch.region, int(touch.stamps[0]) & _ATOMIC
        lost, others = self._record(touch, region.writers, region.write_sync)
        if strong:
            self._order(touch, True)
        elif len(lost):
            equal = self._holds(touch, values)[lost]
            at = int(np.argmin(equal))
            other = int(others[at])
            apart = other >> _BLOCK != int(touch.stamps[lost[at]]) >> _BLOCK
            kind: FaultKind = "write-conflict" if apart else "global-race"
            excuse = "the same value" if equal.all() else ""
            self._report(touch, int(lost[at]), kind, f"where {self._name(other)} stores too", excuse)

    def update(self, access: Access, region: Region, offsets: Any, lanes: Any) -> None:
        """Check and record an atomic operation."""
        parts = access.opcode.split(".")
        touch = self._touch(access, region, offsets, lanes, _ATOMIC | (_CAS if "cas" in parts else 0))
        self._check(touch, "changes", "wrote")
        self._check(touch, "changes", "read")
        if "release" in parts or "acq_rel" in parts:
            self.fence(lanes)
        self._order(touch, True)
        self._record(touch, region.writers, region.write_sync)

    def _touch(self, access: Access, region: Region, offsets: Any, lanes: Any, flags: int) -> Touch:
        races, width = self.races, access.size // self.unit
        self._allocate(region)
        epoch: Any = races.epochs[self.lanes.block[lanes]] if races.epoch is None else races.epoch
        stamps = self._home[lanes] + (epoch % _EPOCHS << _EPOCH) + flags
        units = (offsets + region.base % ALLOCATION_ALIGN) // self.unit
        if width > 1:
            units = (units[:, None] + np.arange(width)).reshape(-1)
            lanes, stamps = np.repeat(lanes, width), np.repeat(stamps, width)
        return Touch(access, region, offsets, units, lanes, stamps)

    def _allocate(self, region: Region) -> None:
        if region.writers is not None:
            return
        units = -(-(region.size + ALLOCATION_ALIGN) // self.unit)
        region.writers, region.readers = _zeros(units), _zeros(units)
        if region.unwritten:
            region.writers -= 1
        if self.ordered:
            region.fences = _zeros(units)
        if self.syncs_warps:
            region.write_sync, region.read_sync = _zeros(units), _zeros(units)

    def _check(self, touch: Touch, verb: str, did: str, values: Any = None) -> Any:
        """Stop at a conflict with what units remember; return the units with one that does no harm."""
        region = touch.region
        before = (region.writers if did == "wrote" else region.readers).take(touch.units)
        where = np.flatnonzero(before)
        if not len(where):
            return None
        before, now = before[where], touch.stamps[where]
        nobody = before == _NOBODY
        if verb != "writes" and nobody.any():
            position = int(where[np.argmax(nobody)])
            self._report(touch, position, "uninitialised-read", "that nothing wrote", "")
        here = before >> _BLOCK == now >> _BLOCK
        same = (before & _WHO == now & _WHO) & (now & _WHO < _WARPS)
        earlier = before >> _EPOCH < now >> _EPOCH
        conflict = ~(nobody | (here & (same | earlier)) | (before & now & _ATOMIC != 0))
        if conflict.any() and self.syncs_warps:
            conflict &= ~(here & self._ordered_by_warp(touch, where, before, did))
        if conflict.any() and self.ordered:
            conflict &= here | ~self._ordered_by_fences(touch, where, before, now, did)
        if not conflict.any():
            return None
        where, before, now, here = (each[conflict] for each in (where, before, now, here))
        harmless, excuse = np.zeros(len(where), bool), "an atomicCAS tests what was read"
        if values is not None:
            harmless, excuse = self._holds(touch, values)[where], "the same value"
        elif (verb, did) in (("reads", "wrote"), ("changes", "read")):
            harmless = (before | now) & _CAS != 0
        at = int(np.argmin(harmless))
        apart = verb == "writes" and did == "wrote" and not here[at]
        kind: FaultKind = "write-conflict" if apart else "global-race"
        who = self._name(int(before[at]))
        why = f"which {who} {did} {'since the last barrier' if here[at] else 'too, and nothing orders them'}"
        why = f"where {who} stores too" if apart else why
        self._report(touch, int(where[at]), kind, why, excuse if harmless.all() else "")
        return where

    def _ordered_by_warp(self, touch: Touch, where: Any, before: Any, did: str) -> Any:
        """Return where the other access came from the same warp, before its last __syncwarp()."""
        region, who = touch.region, before & _WHO
        synced = (region.write_sync if did == "wrote" else region.read_sync)[touch.units[where]]
        lanes = touch.lanes[where]
        warp = np.where(who < _WARPS, who // WARP, who - _WARPS)
        return (warp == self.lanes.thread[lanes] // WARP) & (synced < self.races.warp_sync[lanes // WARP])

    def _ordered_by_fences(self, touch: Touch, where: Any, before: Any, now: Any, did: str) -> Any:
        """Return where a fence and atomic operations order an access of another block before this one."""
        ordered = np.zeros(len(where), bool)
        theirs, mine = before >> _BLOCK, now >> _BLOCK
        for other, block in {*zip(theirs.tolist(), mine.tolist(), strict=True)}:
            known = self._known.get(block, {})
            here = (theirs == other) & (mine == block)
            if other == _MANY >> _BLOCK:
                ordered |= here & bool(known)
            elif other in known:
                fences, epoch, thread = known[other]
                here &= (before >> _EPOCH & _EPOCHS - 1 < epoch) | (before & _WHO == thread) | (thread < 0)
                if did == "wrote":
                    here &= touch.region.fences[touch.units[where]] < fences
                ordered |= here
        return ordered

    def _order(self, touch: Touch, releases: bool) -> None:
        """Let strong accesses learn what earlier ones published at their words, and publish in turn."""
        if not self.ordered:
            return
        threads: dict[tuple[int, int], int] = {}  # the one that accesses a word for its block, or -1
        for stamp, unit in zip(touch.stamps.tolist(), touch.units.tolist(), strict=True):
            place = (stamp >> _BLOCK, unit)
            threads[place] = -1 if place in threads else stamp & _WHO
        for (block, unit), thread in threads.items():
            word = self._published.setdefault((touch.region.base, unit), {})
            known = self._known.setdefault(block, {})
            _learn(known, word)
            number = block - 1 - self.lanes.first_block
            if releases and self._fences[number]:
                fences, epoch = int(self._fences[number]), int(self.races.epochs[number])
                _learn(word, {**known, block: (fences, epoch, thread)})

    def _record(self, touch: Touch, seen: Any, sync: Any) -> tuple[Any, Any]:
        """Record stamps; return the positions whose units others of the instruction touch too, and those."""
        units, now = touch.units, touch.stamps
        before = seen.take(units)
        live = (before > 0) & ((before >> _EPOCH == now >> _EPOCH) | (before >> _BLOCK != now >> _BLOCK))
        if seen is touch.region.writers and not int(now[0]) & _ATOMIC:  # writers of equal values are added
            joins = np.zeros(len(units), bool)
            if touch.joins is not None:
                joins[touch.joins] = True
            live &= joins
        if live.any():
            now = np.where(live, _joined(before, now), now)
        seen[units] = now
        lost = left = np.flatnonzero(seen.take(units) != now)
        others = seen[units[lost]]
        while len(left):  # of several, one was recorded: add the others
            seen[units[left]] = _joined(seen[units[left]], now[left])
            left = left[_joined(seen[units[left]], now[left]) != seen[units[left]]]
        if sync is not None:
            sync[units] = self.races.warp_sync[touch.lanes // WARP]
        if self.ordered and seen is touch.region.writers:
            touch.region.fences[units] = self._fences[self.lanes.block[touch.lanes]]
        return lost, others

    def _holds(self, touch: Touch, values: Any) -> Any:
        """Return which units hold what their lanes store there, ``[units]`` bool."""
        region, access = touch.region, touch.access
        held = gather(region.view, access, touch.offsets, region.base % access.size == 0)
        count = len(touch.offsets)
        wanted = np.ascontiguousarray(values).reshape(count, -1).view(np.uint8)
        equal = np.ascontiguousarray(held).reshape(count, -1).view(np.uint8) == wanted
        return equal.reshape(len(touch.units), -1).all(axis=1)

    def _name(self, stamp: int) -> str:
        """Name who left a stamp."""
        if stamp >= _MANY:
            return "several blocks"
        block, who = (stamp >> _BLOCK) - 1, stamp & _WHO
        name = f"block {self.lanes.block_place(block)}"
        first = self.lanes.first_block
        if not first <= block < first + self.lanes.blocks or who >= _SEVERAL:
            return name
        thread = f"thread {self.lanes.thread_place(who)}" if who < _WARPS else f"warp {who - _WARPS}"
        return f"{thread} of {name}"

    def _report(self, touch: Touch, position: int, kind: FaultKind, why: str, excuse: str) -> None:
        """Stop at a unit; where there is an excuse, note it."""
        access, region = touch.access, touch.region
        byte = int(touch.units[position]) * self.unit - region.base % ALLOCATION_ALIGN
        message = f"{access.opcode} at byte {byte} of {region.name}, {why}"
        lane, address = int(touch.lanes[position]), region.base + byte
        if excuse:
            message += f": {excuse}"
        stop = self.lanes.stop(kind, message, access.line, lane, address, "global")
        if not excuse:
            raise stop
        self.notes.add(stop)


def _zeros(count: int) -> Any:
    """Return zeros that take memory only where they are touched, however large the array is."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    try:
        return np.frombuffer(mmap.mmap(-1, 8 * count, flags), np.int64)
    except OSError:
        raise MemoryError from None


def _learn(known: dict[int, Release], more: dict[int, Release]) -> None:
    """Add the later of the releases of each block."""
    for block, release in more.items():
        known[block] = max(known.get(block, release), release)


def _joined(before: Any, now: Any) -> Any:
    """Combine two stamps of which neither precedes the other."""
    flags = before & now & (_ATOMIC | _CAS)
    who, other = before & _WHO, now & _WHO
    warp, other_warp = (np.where(each < _WARPS, each // WARP, each - _WARPS) for each in (who, other))
    one_warp = (warp == other_warp) & (who < _SEVERAL) & (other < _SEVERAL)
    code = np.where(who == other, who, np.where(one_warp, _WARPS + warp, _SEVERAL))
    place = np.where(before >> _BLOCK == now >> _BLOCK, now >> _EPOCH << _EPOCH, _MANY)
    return np.where(place == _MANY, _MANY + _SEVERAL, place + code) + flags
