"""Detects races and reads of what nothing wrote, in shared memory and in arrays that a kernel may store to.

Each unit of memory remembers its last writer and its readers as stamps (see `orders`). Accesses conflict if
one of them is a write, they come from two threads of one epoch or from two blocks, and they are not both
atomic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from autotune.simulator.emitter import Access
from autotune.simulator.faults import FaultKind, Notes
from autotune.simulator.lanes import WARP
from autotune.simulator.memory import ALLOCATION_ALIGN, Region, gather
from autotune.simulator.orders import (
    ATOMIC,
    BLOCK,
    BULK,
    CAS,
    EPOCH,
    EPOCHS,
    FOREIGN,
    IN_FLIGHT,
    MANY,
    NOTHING,
    WHO,
    Orders,
    Touch,
    one_block,
    warp_of,
)
from autotune.simulator.proxies import Proxies
from autotune.simulator.shared import SEVERAL, WARPS, Pattern

_STRONG = {"volatile", "relaxed", "acquire", "release"}  # atomic in PTX's words


class RaceDetector(Orders):
    """Watches the memory of one launch.

    Attributes:
        proxies: What the tensor cores read past the path of ordinary accesses; None if they do not.
    """

    proxies: Proxies | None = None

    def __init__(self, fences: bool, syncs_warps: bool, unit: int, notes: Notes) -> None:
        super().__init__(fences, syncs_warps, unit)
        self.notes = notes

    def touch(self, access: Access, found: Pattern) -> Touch:
        """Return what an instruction touches of shared memory."""
        start = (self.epochs[found.blocks] if self.epoch is None else self.epoch) << EPOCH
        stamps = start + (_flags(access) if access.kind == "atom" else 0) + found.who
        if found.foreign is not None:
            home = FOREIGN + (self.lanes.block[found.lane] << EPOCH)
            stamps = np.where(found.foreign, home + (stamps & (1 << EPOCH) - 1), stamps)
            late = self.barriers.owing[found.lane] & ~self.barriers.ahead[found.lane]
            shown = np.where(late, self.shown_before[found.blocks], self.shown[found.blocks])
            start = np.where(found.foreign, shown << EPOCH, start)
        return Touch(access, self.of_shared, found.words, found.lane, stamps, start, found)

    def touch_global(self, access: Access, region: Region, offsets: Any, lanes: Any) -> Touch:
        """Return what an instruction touches of an array."""
        width = access.size // self.unit
        epoch: Any = self.epochs[self.lanes.block[lanes]] if self.epoch is None else self.epoch
        stamps = self.home[lanes] + (epoch % EPOCHS << EPOCH) + _flags(access)
        units = (offsets + region.base % ALLOCATION_ALIGN) // self.unit
        if width > 1:
            units = (units[:, None] + np.arange(width)).reshape(-1)
            lanes, stamps = np.repeat(lanes, width), np.repeat(stamps, width)
        return Touch(access, self.of_region(region), units, lanes, stamps, None, (region, offsets))

    def read(self, touch: Touch) -> None:
        """Check and record a read."""
        self._check(touch, "reads", "wrote")
        self.publish(touch, False)
        self._record(touch, "read")

    def update(self, touch: Touch) -> None:
        """Check and record an atomic operation."""
        self._check(touch, "changes", "wrote")
        self._check(touch, "changes", "read")
        if {"release", "acq_rel"} & {*touch.access.opcode.split(".")}:
            self.fence(touch.lanes)
        self.publish(touch, True)
        self._record(touch, "wrote")

    def write(
        self,
        touch: Touch,
        in_flight: bool,
        ticket: tuple[Any, Any] | None = None,
        store: Callable[[], tuple[Any, Any]] | None = None,
    ) -> None:
        """Check and record a write to shared memory.

        Args:
            touch: What is written.
            in_flight: It is a cp.async.
            ticket: It is a bulk copy: the number of its mbarrier and the phase it belongs to.
            store: Of a store: executes it, and returns which units it changed and which its threads gave
                different values, each ``[units]`` bool. Equal values are a note.
        """
        shadow, units, found = touch.shadow, touch.units, touch.place
        if self.proxies is not None:
            self.proxies.write(touch.access, found, in_flight, ticket is not None)
        crowd = found.who >= WARPS
        if crowd.any():
            harmful = crowd if store is None else crowd & store()[1]
            where = int(np.argmax(harmful if harmful.any() else crowd))
            excuse = "" if harmful.any() else "the same value"
            self._report(touch, where, "shared-race", "several threads write one word at once", excuse)
        joins = self._check(touch, "writes", "wrote", store and (lambda: ~np.logical_or(*store())))
        self._check(touch, "writes", "read")
        if in_flight:
            touch.stamps = IN_FLIGHT + touch.lanes
            shadow.copy_groups[units] = self.copies.committed[touch.lanes]
        elif ticket is not None:
            touch.stamps = np.full(len(units), BULK + ticket[0])
            shadow.copy_groups[units] = ticket[1]
        self._record(touch, "wrote", joins)

    def write_global(self, touch: Touch, values: Any, store: Callable[[], None]) -> None:
        """Check a store to an array, execute it, and record it; lanes may store equal values to one place."""
        joins = self._check(touch, "writes", "wrote", lambda: self._holds(touch, values))
        self._check(touch, "writes", "read")
        store()
        lost, others = self._record(touch, "wrote", joins)
        self.publish(touch, True)
        if len(lost) and not _flags(touch.access):
            equal = self._holds(touch, values)[lost]
            at = int(np.argmin(equal))
            excuse = "the same value" if equal.all() else ""
            self._conflict(touch, int(lost[at]), int(others[at]), ("writes", "stores"), excuse)

    def _holds(self, touch: Touch, values: Any) -> Any:
        """Return which units hold what their lanes store there, ``[units]`` bool."""
        (region, offsets), access = touch.place, touch.access
        held = gather(region.view, access, offsets, region.base % access.size == 0)
        wanted = np.ascontiguousarray(values).reshape(len(offsets), -1).view(np.uint8)
        equal = np.ascontiguousarray(held).reshape(len(offsets), -1).view(np.uint8) == wanted
        return equal.reshape(len(touch.units), -1).all(axis=1)

    def _check(self, touch: Touch, verb: str, did: str, equal: Callable[[], Any] | None = None) -> Any:
        """Stop at a conflict with what units remember.

        Args:
            touch: What is touched now.
            verb: "reads", "writes", or "changes" by an atomic operation.
            did: What is compared with: "wrote" or "read".
            equal: Of a store: returns where it changes nothing, ``[units]``; that makes a conflict a note.

        Returns:
            Where there is a conflict that does no harm, ``[units]`` bool; None for nowhere.
        """
        before = (touch.shadow.writers if did == "wrote" else touch.shadow.readers).take(touch.units)
        unordered = touch.unordered(before)
        if not unordered.any():
            return None
        where = np.flatnonzero(unordered)
        before, now = before[where], touch.stamps[where]
        nothing, in_shared = before == NOTHING, touch.start is not None
        if verb != "writes" and nothing.any():
            why = "reads shared memory that nothing wrote" if in_shared else "that nothing wrote"
            self._report(touch, int(where[np.argmax(nothing)]), "uninitialised-read", why)
        if in_shared and did == "wrote":
            self._check_copies(touch, where, before, "overwrites" if verb == "writes" else "reads")
        if (before >= BULK).all():
            return None
        here = (before >> BLOCK == now >> BLOCK) | in_shared
        alone = WARPS if did == "wrote" else SEVERAL  # a warp may store one value where it read
        same = (before & WHO == now & WHO) & (now & WHO < alone) & one_block(before, now)
        conflict = (before < BULK) & ~(here & same) & (before & now & ATOMIC == 0)
        if conflict.any() and self.syncs_warps:
            conflict &= ~(here & self.by_warp(touch, where, before, did))
        if conflict.any() and touch.shadow.fences is not None:
            conflict &= here | ~self.by_fences(touch, where, before, did)
        if not conflict.any():
            return None
        where, before, now = where[conflict], before[conflict], now[conflict]
        harmless, excuse = np.zeros(len(where), bool), "an atomicCAS tests what was read"
        if equal is not None:
            harmless, excuse = equal()[where], "the same value"
        elif (verb, did) in (("reads", "wrote"), ("changes", "read")):
            harmless = (before | now) & CAS != 0
        at = int(np.argmin(harmless))
        self._conflict(touch, int(where[at]), int(before[at]), (verb, did), excuse if harmless.all() else "")
        joins = np.zeros(len(touch.units), bool)
        joins[where] = True
        return joins

    def _check_copies(self, touch: Touch, where: Any, before: Any, verb: str) -> None:
        bad, arrived = self.copies_in_flight(touch, where, before)
        if len(bad):
            copier = int(self.lanes.thread[before[bad[0]] - IN_FLIGHT])
            how = "may still write: no cp.async.wait_group covers it"
            how = "brought, with no barrier after its wait" if arrived[0] else how
            why = f"{verb} what an async copy of {self._name(copier, True)} {how}"
            self._report(touch, int(where[bad[0]]), "async-copy", why, other=copier)
        bad = self.bulk_in_flight(touch, where, before)
        if len(bad):
            why = f"{verb} what an async copy may still write: this thread did not wait for its mbarrier"
            self._report(touch, int(where[bad[0]]), "async-copy", why)

    def _record(self, touch: Touch, did: str, joins: Any = None) -> tuple[Any, Any]:
        """Remember an access, and with it those of its epoch that it does not replace.

        Args:
            touch: What is touched.
            did: "wrote" or "read".
            joins: Where the earlier writers are kept too, ``[units]`` bool.

        Returns:
            In global memory, the positions whose units others of the instruction touch too, and those.
        """
        shadow, units, now = touch.shadow, touch.units, touch.stamps
        writing, atomic = did == "wrote", int(now[0]) & ATOMIC and int(now[0]) < BULK
        seen, sync = (shadow.writers, shadow.write_sync) if writing else (shadow.readers, shadow.read_sync)
        if not writing or atomic or joins is not None:
            before = seen.take(units)
            kept = touch.unordered(before)
            if writing:
                kept &= (before & ATOMIC != 0) & (before < BULK) if atomic else joins
            if kept.any():
                now = np.where(kept, _joined(before, now), now)
        seen[units] = now
        if touch.start is not None and touch.place.foreign is not None:
            early = touch.place.foreign & self.barriers.ahead[touch.lanes] & (now < BULK)
            (self.early_writes if writing else self.early_reads)[units[early]] = True
        if sync is not None:
            sync[units] = self.warp_sync[touch.lanes // WARP]
        lost = left = np.flatnonzero(seen.take(units) != now) if touch.start is None else units[:0]
        others = seen[units[lost]]
        while len(left):  # of several, one was recorded: add the others
            seen[units[left]] = _joined(seen[units[left]], now[left])
            left = left[_joined(seen[units[left]], now[left]) != seen[units[left]]]
        if writing and shadow.fences is not None:
            shadow.fences[units] = self.fences[self.lanes.block[touch.lanes]]
        return lost, others

    def leave(self, block: int, line: int) -> None:
        """Refuse that a block ends where others may still access its shared memory."""
        width = self.shared.window // self.shared.unit
        for did, stamps in (("read", self.of_shared.readers), ("wrote to", self.of_shared.writers)):
            stamps = stamps[block * width : (block + 1) * width]
            found = np.flatnonzero((stamps >= FOREIGN) & (stamps < BULK))
            if len(found):
                name = self._name(int(stamps[found[0]]), True)
                why = f"the block ends with no barrier of the cluster since {name} {did} its shared memory"
                place, lane = int(found[0]) * self.shared.unit, block * self.lanes.stride
                raise self.lanes.stop("early-exit", why, line, lane, place, "shared")

    def _name(self, stamp: int, in_shared: bool) -> str:
        """Name who left a stamp."""
        who = stamp & WHO
        thread = f"thread {self.lanes.thread_place(who)}" if who < WARPS else f"warp {who - WARPS}"
        first, foreign = self.lanes.first_block, in_shared and stamp >= FOREIGN
        if in_shared and not foreign:
            several = "threads of several warps" if who >= SEVERAL else f"threads of {thread}"
            return "an atomic operation" if stamp & ATOMIC else thread if who < WARPS else several
        if stamp >= MANY or (foreign and who >= SEVERAL):
            return "another block of its cluster" if foreign else "several blocks"
        block = (stamp - FOREIGN >> EPOCH) + first if foreign else (stamp >> BLOCK) - 1
        name = f"block {self.lanes.block_place(block)}"
        here = first <= block < first + self.lanes.blocks and who < SEVERAL
        return f"{thread} of {name}" if here else name

    def _conflict(self, touch: Touch, position: int, stamp: int, what: tuple[str, str], excuse: str) -> None:
        """Stop at a unit that another access left a stamp at."""
        (verb, did), name = what, self._name(stamp, touch.start is not None)
        kind: FaultKind = "global-race"
        here = stamp >> BLOCK == int(touch.stamps[position]) >> BLOCK
        if touch.start is not None:
            apart = max(stamp, int(touch.stamps[position])) >= FOREIGN
            since = "and no barrier of the cluster lies between" if apart else "since the last barrier"
            kind, why = "shared-race", f"{verb} what {name} {did} {since}"
        elif did == "stores" or (not here and what == ("writes", "wrote")):
            why = f"where {name} stores too"
            kind = kind if here else "write-conflict"
        else:
            why = f"which {name} {did} {'since the last barrier' if here else 'too, and nothing orders them'}"
        self._report(touch, position, kind, why, excuse, stamp & WHO)

    def _report(
        self, touch: Touch, position: int, kind: FaultKind, why: str, excuse: str = "", other: int = -1
    ) -> None:
        """Stop at a unit, in shared memory with a lane of no other thread; what has an excuse is a note."""
        access, lane, unit = touch.access, int(touch.lanes[position]), int(touch.units[position])
        if touch.start is not None:
            byte, found = unit * self.shared.unit, touch.place
            if int(self.lanes.thread[lane]) == other:
                active = self.lanes.index if found.lanes is None else found.lanes
                touching = (found.offsets <= byte) & (byte < found.offsets + access.size)
                others = active[touching & (self.lanes.thread[active] != other)]
                lane = int(others[0]) if len(others) else lane
            stop = self.lanes.refuse(access, kind, why, lane, byte % self.shared.window, "shared")
        else:
            region, _ = touch.place
            byte = unit * self.unit - region.base % ALLOCATION_ALIGN
            why = f"at byte {byte} of {region.name}, {why}{f': {excuse}' if excuse else ''}"
            stop = self.lanes.refuse(access, kind, why, lane, region.base + byte, "global")
        if not excuse:
            raise stop
        self.notes.add(stop)


def _flags(access: Access) -> int:
    """Return how an instruction accesses memory, as flags of its stamps."""
    parts = access.opcode.split(".")
    strong = access.kind == "atom" or not _STRONG.isdisjoint(parts)
    return (ATOMIC if strong else 0) | (CAS if "cas" in parts else 0)


def _joined(before: Any, now: Any) -> Any:
    """Combine two stamps of which neither precedes the other."""
    flags = before & now & (ATOMIC | CAS)
    who, other, warp = before & WHO, now & WHO, warp_of(before)
    one_warp = (warp == warp_of(now)) & (warp >= 0)
    code = np.where(who == other, who, np.where(one_warp, WARPS + warp, SEVERAL))
    place = np.where(before >> BLOCK == now >> BLOCK, now >> EPOCH << EPOCH, MANY)
    return np.where(place == MANY, MANY + SEVERAL, place + code) + flags
