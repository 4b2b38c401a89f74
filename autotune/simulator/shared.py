"""Shared memory of a group of blocks: checks addresses once, and recognises those that repeat."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autotune.simulator.emitter import Access
from autotune.simulator.lanes import RANK_BITS, Lanes
from autotune.simulator.memory import WIDE, gather, scatter
from autotune.simulator.traffic import shared_traffic

WARPS, SEVERAL = 1024, 1056  # beyond every thread of a block: its warps, and several warps
PATTERNS_PER_ACCESS = 8  # buffers of a pipeline take turns; any more are computed again


@dataclass(eq=False)
class Pattern:
    """One set of addresses that an instruction used, and everything that follows from it alone.

    Kernels repeat the same shared addresses in every iteration, so bounds, alignment, the words touched
    and the wavefronts are worked out once.

    Attributes:
        address: Address of each active lane as the register held it, ``[active]``.
        lanes: The active lanes, None for all.
        offsets: Byte offset of each active lane in the storage of all blocks, ``[active]`` int64.
        words: The distinct units of memory touched, ``[words]`` int64.
        who: Which thread touches each of them, `WARPS` + the only warp, or `SEVERAL`, ``[words]`` int64.
        lane: One lane that touches each of them, ``[words]`` int64.
        blocks: Block of each unit, ``[words]`` int64.
        traffic: Requests, wavefronts, conflict-free wavefronts.
        low, high: The least and the greatest address within a block's window.
        mapped: Whether some addresses name the block of a cluster that they belong to.
        others: Blocks of which other blocks' lanes touch something, ``[blocks]``; None if they touch nothing.
        foreign: Which units other blocks' lanes touch, ``[words]`` bool; None for none.
    """

    address: Any
    lanes: Any
    offsets: Any
    index: Any = None
    words: Any = None
    who: Any = None
    lane: Any = None
    blocks: Any = None
    traffic: tuple[int, int, int] = (0, 0, 0)
    low: int = 0
    high: int = 0
    mapped: bool = False
    others: Any = None
    foreign: Any = None


class SharedMemory:
    """The shared memory of all blocks of one group.

    Attributes:
        window: Bytes of one block.
        unit: Bytes of the smallest access; races are told apart at this size.
    """

    def __init__(self, lanes: Lanes, size: int, unit: int, checks: bool, counters: bool) -> None:
        self.lanes, self.unit, self.size = lanes, unit, size
        self.window = max(32, -(-size // 32) * 32)
        self.storage = np.zeros(lanes.blocks * self.window, np.uint8)
        self.views: dict[Any, Any] = {}
        self.base = lanes.block * self.window
        self.checks, self.counters = checks, counters
        self.patterns: dict[Access, OrderedDict[int, Pattern]] = {}
        units = len(self.storage) // unit if checks else 0
        self._position = np.zeros(units, np.int64)
        self._shared_by = np.zeros(units, np.int8)

    def clear(self, lanes: Lanes) -> None:
        """Fill with garbage for another group of blocks of the same shape, as the hardware leaves it."""
        self.lanes = lanes
        self.storage.view(np.uint32)[:] = np.uint32(0x7FB5A5A5)  # a NaN: garbage must not pass as data

    def view(self, dtype: Any) -> Any:
        """See the storage as elements."""
        found = self.views.get(dtype)
        if found is None:
            found = self.views[dtype] = self.storage.view(dtype)
        return found

    def pattern(self, access: Access, address: Any, lanes: Any) -> Pattern:
        """Look up, or work out, what an instruction's addresses mean.

        Args:
            access: The instruction.
            address: Address of each active lane without the constant offset, ``[active]``, not empty.
            lanes: The active lanes, None for all.

        Raises:
            SimulationFault: An address is out of bounds or misaligned.
        """
        known = self.patterns.get(access)
        if known is None:
            known = self.patterns[access] = OrderedDict()
        first = int(address[0])
        found = known.get(first)
        if (
            found is not None
            and len(found.address) == len(address)
            and _same(found.lanes, lanes)
            and (found.address == address).all()
        ):
            return found
        found = self._moved(access, known, address, lanes) or self._work_out(access, address, lanes)
        known[first] = found
        if len(known) > PATTERNS_PER_ACCESS:
            known.popitem(last=False)
        return found

    def _moved(
        self, access: Access, known: OrderedDict[int, Pattern], address: Any, lanes: Any
    ) -> Pattern | None:
        """Return what follows from the last pattern if this one is as far from it in all lanes, in bounds.

        A shift by whole words changes no wavefront: it turns the banks by as many.
        """
        last = next(reversed(known.values()), None)
        if last is None or last.mapped or len(last.address) != len(address) or not _same(last.lanes, lanes):
            return None
        shift = int(address[0]) - int(last.address[0])
        moved = last.address + address.dtype.type(shift % (1 << address.dtype.itemsize * 8))
        low, high = last.low + shift, last.high + shift
        fits = shift % max(access.size, 4) == 0 and low >= 0 and high + access.size <= self.size
        if not fits or not (moved == address).all():
            return None
        words = None if last.words is None else last.words + shift // self.unit
        return replace(
            last,
            address=moved,
            offsets=last.offsets + shift,
            index=last.index + shift // access.size,
            words=words,
            low=low,
            high=high,
        )

    def _work_out(self, access: Access, address: Any, lanes: Any) -> Pattern:
        who = np.arange(self.lanes.count) if lanes is None else lanes
        home = block = self.lanes.block[who]
        local = displaced(address, access.offset)
        rank, mapped = (local >> RANK_BITS) - 1, bool((local >> RANK_BITS > 0).any())
        if mapped:
            named = (rank >= 0) & (rank < self.lanes.cluster)
            block = np.where(named, home - home % self.lanes.cluster + rank, home)
            local = np.where(named, local & (1 << RANK_BITS) - 1, local)
        self.lanes.check_offsets(access, local, self.size, who, "shared")
        offsets = local + block * self.window
        found = Pattern(address.copy(), lanes, offsets, offsets // access.size, mapped=mapped)
        found.low, found.high = int(local.min()), int(local.max())
        if (block != home).any():
            found.others = np.unique(block[block != home])
        if self.checks:
            self._words(access, found, who)
        if self.counters:
            found.traffic = shared_traffic(local, who, access.size, access.kind == "ld")
        return found

    def _words(self, access: Access, found: Pattern, who: Any) -> None:
        """Find the distinct units and who touches each."""
        width = max(1, access.size // self.unit)
        units = ((found.offsets // self.unit)[:, None] + np.arange(width)).reshape(-1)
        lane = np.repeat(who, width)
        order = np.arange(len(units))
        self._position[units] = order
        last = self._position[units]  # the last lane that touches the same unit
        found.words = units[last == order]
        found.lane = lane[last == order]
        who_code = self.lanes.thread[found.lane]
        if len(found.words) < len(units):
            shared = last != order
            self._shared_by[found.words] = 0
            other_thread = shared & (lane[last] != lane)
            self._shared_by[units[other_thread]] = 1
            self._shared_by[units[other_thread & (lane[last] // 32 != lane // 32)]] = 2
            degree = self._shared_by[found.words]
            many = np.where(degree == 1, WARPS + who_code // 32, SEVERAL)
            who_code = np.where(degree == 0, who_code, many)
        found.who = who_code
        found.blocks = found.words // (self.window // self.unit)
        if found.others is not None:
            away = units // (self.window // self.unit) != self.lanes.block[lane]
            found.foreign = np.isin(found.words, units[away])

    def read(self, access: Access, found: Pattern) -> Any:
        """Read each active lane's elements: ``[active]``, or ``[active, count]`` for a vector."""
        if access.size > 16:
            return gather(self.view, access, found.offsets, True)
        if access.count == 1:
            return self.view(access.dtype).take(found.index, mode="clip")
        wide = self.view(WIDE[access.size]).take(found.index, mode="clip")
        return wide.view(access.dtype).reshape(-1, access.count)

    def write(self, access: Access, found: Pattern, values: Any) -> None:
        """Write each active lane's elements."""
        if access.count == 1:
            self.view(access.dtype)[found.index] = values
        else:
            scatter(self.view, access, found.offsets, values, True)

    def write_and_compare(self, access: Access, found: Pattern, values: Any) -> tuple[Any, Any]:
        """Write as `write` does; return which units changed, and which got several values, ``[words]``."""
        units = self.storage.reshape(-1, self.unit)
        before = units[found.words]
        self.write(access, found, values)
        held = np.ascontiguousarray(self.read(access, found)).view(np.uint8)
        wanted = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        lost = (held.reshape(-1) != wanted).reshape(-1, self.unit)
        every = ((found.offsets // self.unit)[:, None] + np.arange(access.size // self.unit)).reshape(-1)
        several = np.isin(found.words, every[lost.any(axis=1)])
        return (units[found.words] != before).any(axis=1), several


def displaced(address: Any, offset: int) -> Any:
    """Add the constant part of an address, wrapping around at the width of the register; int64."""
    kind = address.dtype.type
    return (address + kind(offset % (1 << address.dtype.itemsize * 8))).astype(np.int64)


def _same(a: Any, b: Any) -> bool:
    """Compare two sets of active lanes of one length; None stands for all."""
    return a is b or (a is not None and b is not None and bool((a == b).all()))
