"""Executes loads, stores, atomics and async copies over all lanes: checks and counts each access."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from autotune.simulator.atomics import apply_atomic
from autotune.simulator.counters import Tally
from autotune.simulator.emitter import LOCAL_WINDOW, SHARED_WINDOW, Access
from autotune.simulator.faults import Notes
from autotune.simulator.lanes import WARP, Lanes, Registers
from autotune.simulator.memory import GlobalMemory, Region, gather, scatter
from autotune.simulator.races import RaceDetector
from autotune.simulator.shared import WARPS, Pattern, SharedMemory, displaced
from autotune.simulator.synchronisation import AsyncCopies
from autotune.simulator.traffic import global_traffic

Values = Any  # an array over lanes, or one NumPy scalar for a value that all lanes share


@dataclass(eq=False)
class Part:
    """What an access does in one memory.

    Attributes:
        memory: What it touches of shared memory, or an array; None for the stacks.
        view: Returns the memory as elements of a type.
        offsets: Where each lane's bytes begin there.
        lanes: The lanes; a slice for all.
        aligned: Whether the memory begins at a multiple of the access size.
    """

    memory: Pattern | Region | None
    view: Callable[[Any], Any]
    offsets: Any
    lanes: Any
    aligned: bool


class LoadStore(Registers):
    """What the generated code calls: loads, stores, atomics and async copies of one group of threads.

    Attributes:
        lanes: The group's geometry.
        memory: Global memory.
        shared: Shared memory of the group's blocks.
        async_copies: Groups of cp.async.
        races: None without checks.
        notes: What no fault is.
        tally: None without counters.
    """

    lanes: Lanes
    shared: SharedMemory
    async_copies: AsyncCopies
    races: RaceDetector | None
    special: dict[str, Any]
    alive: Any

    def __init__(
        self,
        memory: GlobalMemory,
        parameters: dict[str, bytes],
        local_bytes: int,
        checks: bool,
        tally: Tally | None,
    ) -> None:
        self.memory, self.checks, self.tally, self.notes = memory, checks, tally, Notes()
        self.local_bytes = local_bytes
        self._parameters = parameters
        self._values: dict[tuple[str, int, Any], Any] = {}
        self._global_patterns: dict[tuple[Access, int], tuple[Any, Any, int, int]] = {}

    def allocate_local(self, lanes: int) -> None:
        """Allocate the stacks of all threads."""
        self._local_stride = -(-self.local_bytes // 16) * 16
        self._local = np.zeros(lanes * self._local_stride, np.uint8)

    def parameter(self, name: str, offset: int, dtype: Any) -> Any:
        """Read a kernel parameter."""
        key = (name, offset, dtype)
        if key not in self._values:
            self._values[key] = np.frombuffer(self._parameters[name], dtype, 1, offset)[0]
        return self._values[key]

    def predicated(self, index: int, mask: Any) -> None:
        """Count the threads that execute a predicated instruction."""
        if self.tally is not None:
            self.tally.predicated[index] += int(np.count_nonzero(np.broadcast_to(mask, (self.lanes.count,))))

    def sync_warp(self, mask: Any) -> None:
        """Execute __syncwarp()."""
        if self.races is not None:
            self.races.sync_warps(mask)

    def fence(self, mask: Any) -> None:
        """Execute a fence between blocks."""
        if self.races is not None:
            self.races.fence(mask)

    def _select(self, address: Values, mask: Any) -> tuple[Any, Any]:
        """Return (active lanes or None for all, their addresses)."""
        if np.ndim(address) == 0:
            address = np.broadcast_to(address, (self.lanes.count,))
        if mask is None:
            return None, address
        active = np.flatnonzero(mask)
        return active, address[active]

    def load(self, access: Access, address: Values, mask: Any, rows: tuple[Any, ...]) -> None:
        """Execute a load into register rows (None for elements that are dropped)."""
        for part in self._parts(access, *self._select(address, mask)):
            self._watch(access, part)
            values = self._read(access, part)
            for number, row in enumerate(rows):
                if row is not None:
                    row[part.lanes] = values if len(rows) == 1 else values[:, number]

    def load_matrices(
        self, access: Access, address: Values, mask: Any, rows: tuple[Any, ...], transposed: bool
    ) -> None:
        """Execute ldmatrix: lanes 8 q to 8 q + 7 of a warp give where the rows of matrix q begin.

        Register q of lane l holds elements 2 (l % 4) and the next of row l / 4; transposed, of column l / 4.
        """
        active, address = self._select(address, mask)
        lanes = self.lanes.index if active is None else active
        broken = np.bincount(lanes // WARP, minlength=1) % WARP != 0
        if broken.any():
            lane = int(np.argmax(broken)) * WARP
            message = f"{access.opcode} needs all lanes of its warp"
            raise self.lanes.stop("divergent-warp", message, access.line, lane)
        giving = lanes % WARP < 8 * len(rows)
        found = self._shared_pattern(access, address[giving], lanes[giving])
        if self.races is not None:  # what a lane gives the place of, all lanes read
            found.who = np.maximum(found.who, WARPS + self.lanes.thread[found.lane] // WARP)
            self.races.read(self.races.touch(access, found))
        halves = np.ascontiguousarray(self.shared.read(access, found)).view(np.uint16)
        halves = halves.reshape(-1, len(rows), 8, 8)
        words = np.ascontiguousarray(halves.swapaxes(2, 3) if transposed else halves).view(np.uint32)
        for row, values in zip(rows, words.reshape(-1, len(rows), WARP).swapaxes(0, 1), strict=True):
            row[lanes] = values.reshape(-1)

    def store(self, access: Access, address: Values, mask: Any, values: tuple[Values, ...]) -> None:
        """Execute a store of one value per element."""
        columns = [np.broadcast_to(value, (self.lanes.count,)) for value in values]
        for part in self._parts(access, *self._select(address, mask)):
            table = [column[part.lanes] for column in columns]
            chosen = table[0] if len(table) == 1 else np.stack(table, axis=1)
            self._write(access, part, chosen)

    def _write(self, access: Access, part: Part, values: Any) -> None:
        """Execute a store into one memory."""
        found = part.memory
        if isinstance(found, Pattern):
            if self.races is not None:
                store = partial(self.shared.write_and_compare, access, found, values)
                self.races.write(self.races.touch(access, found), False, store=store)
            self.shared.write(access, found, values)
            return
        execute = partial(scatter, part.view, access, part.offsets, values, part.aligned)
        if found is None or self.races is None:
            execute()
        else:
            touch = self.races.touch_global(access, found, part.offsets, self._numbers(part.lanes))
            self.races.write_global(touch, values, execute)

    def atomic(
        self,
        access: Access,
        address: Values,
        mask: Any,
        operation: str,
        values: tuple[Values, ...],
        wanted: bool,
    ) -> Any:
        """Execute an atomic operation, lane after lane; return the old values (``[lanes]``) if wanted."""
        old = np.zeros(self.lanes.count, access.dtype)
        columns = [np.broadcast_to(value, (self.lanes.count,)) for value in values]
        for part in self._parts(access, *self._select(address, mask)):
            self._watch(access, part)
            memory = part.view(access.dtype)
            if isinstance(part.memory, Region):
                first = -part.memory.base % access.size
                octets = part.memory.data[first:]
                memory = octets[: len(octets) // access.size * access.size].view(access.dtype)
            picked = [column[part.lanes] for column in columns]
            before = apply_atomic(operation, memory, part.offsets // access.size, picked, wanted)
            if wanted:
                old[part.lanes] = before
        return old

    def copy_async(
        self, to: Access, source: Access, shared: Values, address: Values, sizes: Values | None, mask: Any
    ) -> None:
        """Execute a cp.async: bytes beyond the source size become zero.

        The bytes are written immediately; the race checks report a use before the wait.
        """
        active, target = self._select(shared, mask)
        if len(target) == 0:
            return
        _, address = self._select(address, mask)
        lanes, those = self._numbers(active), slice(None) if active is None else active
        values = np.zeros((self.lanes.count, source.count), source.dtype)
        wanted = np.broadcast_to(source.size if sizes is None else sizes, (self.lanes.count,))[those]
        whole = wanted >= source.size
        full = (active, address) if whole.all() else (lanes[whole], address[whole])
        for part in self._parts(source, *full):
            self._watch(source, part)
            values[part.lanes] = self._read(source, part).reshape(-1, source.count)
        for size in np.unique(wanted[(wanted > 0) & ~whole]):
            some = wanted == size
            self._fetch_bytes(source, address[some], lanes[some], values, int(size))
        found = self._shared_pattern(to, target, active)
        if self.races is not None:
            self.races.write(self.races.touch(to, found), True)
        self.shared.write(to, found, values[those] if source.count > 1 else values[those, 0])

    def _fetch_bytes(self, access: Access, address: Any, lanes: Any, values: Any, size: int) -> None:
        """Read less than a whole element vector; the address must still be aligned to the whole."""
        octets = values.view(np.uint8).reshape(len(values), -1)
        one = replace(access, dtype=np.dtype(np.uint8), count=1, size=1, offset=0)
        first = address + np.uint64(access.offset % 2**64)
        if int(np.bitwise_or.reduce(first)) & (access.size - 1):
            self.memory.locate(access, address, lanes, self.lanes)  # reports the misaligned lane
        for number in range(size):
            for part in self._parts(one, lanes, first + np.uint64(number), counts=False):
                self._watch(one, part)
                octets[part.lanes, number] = self._read(one, part)
        if self.tally is not None:
            self._count_global(access, first.view(np.int64), lanes)

    # ---- memories

    def _parts(self, access: Access, active: Any, address: Any, counts: bool = True) -> Iterator[Part]:
        """Check an access, count it, and split it by the memories that it reaches."""
        if len(address) == 0:
            return
        parts = [(access.space, active, address)]
        if access.space == "generic":
            parts = self._by_window(active, address)
        for space, among, part in parts:
            lanes = slice(None) if among is None else among
            if space == "shared":
                found = self._shared_pattern(access, part, among)
                yield Part(found, self.shared.view, found.offsets, lanes, True)
            elif space == "local":
                yield Part(None, self._local.view, self._local_offsets(access, part, among), lanes, True)
            else:
                located = self.memory.locate(access, part, among, self.lanes)
                for region, offsets, chosen in located:
                    those = lanes if chosen is None else self._numbers(lanes)[chosen]
                    if self.tally is not None and counts and space == "global":
                        self._count_global(access, offsets + region.base % 256, self._numbers(those))
                    if access.kind in ("st", "atom") and not region.writable:
                        lane, place = int(self._numbers(those)[0]), region.base + int(offsets[0])
                        why = f"to {region.name}, which may only be read"
                        raise self.lanes.refuse(access, "read-only", why, lane, place, "global")
                    yield Part(region, region.view, offsets, those, region.base % access.size == 0)

    def _numbers(self, lanes: Any) -> Any:
        """Return lanes by their numbers."""
        return self.lanes.index if lanes is None or isinstance(lanes, slice) else lanes

    def _watch(self, access: Access, part: Part) -> None:
        """Check and record a load, of what the kernel may store to, or an atomic operation."""
        if self.races is None or part.memory is None:
            return
        if isinstance(part.memory, Pattern):
            touch = self.races.touch(access, part.memory)
        elif part.memory.tracked or access.kind == "atom":
            touch = self.races.touch_global(access, part.memory, part.offsets, self._numbers(part.lanes))
        else:
            return
        if access.kind == "atom":
            self.races.update(touch)
        else:
            self.races.read(touch)

    def _read(self, access: Access, part: Part) -> Any:
        if isinstance(part.memory, Pattern):
            return self.shared.read(access, part.memory)
        return gather(part.view, access, part.offsets, part.aligned)

    def _shared_pattern(self, access: Access, address: Any, active: Any) -> Pattern:
        found = self.shared.pattern(access, address, active)
        if found.others is not None:
            self._check_present(access, found)
        if self.tally is not None:
            self.tally.add_shared(access, found.traffic)
        return found

    def _check_present(self, access: Access, found: Pattern) -> None:
        """Refuse an access to shared memory of a block that has ended."""
        ended = found.others[~self.alive.reshape(self.lanes.blocks, -1)[found.others].any(axis=1)]
        if len(ended):
            where = int(np.argmax(found.offsets // self.shared.window == ended[0]))
            lane = where if found.lanes is None else int(found.lanes[where])
            block = self.lanes.block_place(int(ended[0]) + self.lanes.first_block)
            why = f"in shared memory of block {block}, which has ended"
            place = int(found.offsets[where]) % self.shared.window
            raise self.lanes.refuse(access, "early-exit", why, lane, place, "shared")

    def _local_offsets(self, access: Access, address: Any, active: Any) -> Any:
        lanes = self.lanes.index if active is None else active
        offsets = displaced(address, access.offset)
        self.lanes.check_offsets(access, offsets, self.local_bytes, lanes, "local")
        return offsets + lanes * self._local_stride

    def _by_window(self, active: Any, address: Any) -> list[tuple[str, Any, Any]]:
        """Split generic addresses into (space, lanes, addresses within the space)."""
        windows = address >> np.uint64(56)
        spaces = {0: ("global", 0), 1: ("shared", SHARED_WINDOW), 2: ("local", LOCAL_WINDOW)}
        first = int(windows[0])
        if (windows == windows[0]).all() and first in spaces:
            name, start = spaces[first]
            return [(name, active, address - np.uint64(start))]
        lanes = self.lanes.index if active is None else active
        parts = []
        for window in np.unique(windows):
            name, start = spaces.get(int(window), ("global", 0))
            chosen = windows == window
            parts.append((name, lanes[chosen], address[chosen] - np.uint64(start)))
        return parts

    def _count_global(self, access: Access, address: Any, lanes: Any) -> None:
        """Count requests and sectors; a pattern seen before, shifted by whole sectors, is looked up."""
        assert self.tally is not None
        relative = address - (int(address[0]) & ~31)
        key = (access, int(relative[0]))
        known = self._global_patterns.get(key)
        if (
            known is None
            or len(known[0]) != len(relative)
            or not (known[0] == relative).all()
            or not (known[1] == lanes).all()
        ):
            shifted = relative - (int(relative.min()) & ~31)
            known = self._global_patterns[key] = (relative, lanes, *global_traffic(shifted, lanes))
        self.tally.add_global(access, known[2], known[3])
