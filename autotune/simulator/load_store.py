"""Executes loads, stores, atomics and async copies over all lanes: checks and counts each access."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from autotune.simulator.atomics import apply_atomic
from autotune.simulator.counters import Tally
from autotune.simulator.emitter import LOCAL_WINDOW, SHARED_WINDOW, Access
from autotune.simulator.faults import FaultKind, Notes
from autotune.simulator.lanes import WARP, Lanes, Registers
from autotune.simulator.memory import GlobalMemory, Region, gather, scatter
from autotune.simulator.races import RaceDetector
from autotune.simulator.shared import WARPS, Pattern, SharedMemory, displaced
from autotune.simulator.synchronisation import AsyncCopies
from autotune.simulator.traffic import global_traffic

Values = Any  # an array over lanes, or one NumPy scalar for a value that all lanes share


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
        active, address = self._select(address, mask)
        if len(address) == 0:
            return
        if access.space == "generic":
            for space, lanes, part in self._by_window(active, address):
                _assign(rows, lanes, self._load_from(space, access, part, lanes))
        else:
            _assign(rows, active, self._load_from(access.space, access, address, active))

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

    def _load_from(self, space: str, access: Access, address: Any, active: Any) -> Any:
        if space == "shared":
            found = self._shared_pattern(access, address, active)
            if self.races is not None:
                self.races.read(self.races.touch(access, found))
            return self.shared.read(access, found)
        if space == "local":
            return gather(self._local.view, access, self._local_offsets(access, address, active), True)
        parts = self.memory.locate(access, address, active, self.lanes)
        if self.tally is not None and space == "global":
            self._count_global(access, parts, active)
        self._note_loads(access, parts, active)
        if len(parts) == 1:
            region, offsets, _ = parts[0]
            return gather(region.view, access, offsets, region.base % access.size == 0)
        values = np.zeros((len(address), access.count) if access.count > 1 else len(address), access.dtype)
        for region, offsets, chosen in parts:
            values[chosen] = gather(region.view, access, offsets, region.base % access.size == 0)
        return values

    def _note_loads(self, access: Access, parts: list[tuple[Region, Any, Any]], active: Any) -> None:
        """Check and record loads from arrays that the kernel may store to."""
        if self.races is None:
            return
        for region, offsets, chosen in parts:
            if region.tracked:
                everyone = self.lanes.index if active is None else active
                lanes = everyone if chosen is None else everyone[chosen]
                self.races.read(self.races.touch_global(access, region, offsets, lanes))

    def store(self, access: Access, address: Values, mask: Any, values: tuple[Values, ...]) -> None:
        """Execute a store of one value per element."""
        active, address = self._select(address, mask)
        if len(address) == 0:
            return
        columns = [np.broadcast_to(value, (self.lanes.count,)) for value in values]
        if active is not None:
            columns = [column[active] for column in columns]
        table = columns[0] if len(columns) == 1 else np.stack(columns, axis=1)
        if access.space == "generic":
            everyone = np.arange(self.lanes.count) if active is None else active
            for space, lanes, part in self._by_window(active, address):
                chosen = slice(None) if lanes is None else np.searchsorted(everyone, lanes)
                self._store_to(space, access, part, lanes, table[chosen])
        else:
            self._store_to(access.space, access, address, active, table)

    def _store_to(self, space: str, access: Access, address: Any, active: Any, values: Any) -> None:
        if space == "shared":
            found = self._shared_pattern(access, address, active)
            if self.races is not None:
                store = partial(self.shared.write_and_compare, access, found, values)
                self.races.write(self.races.touch(access, found), False, store=store)
            self.shared.write(access, found, values)
            return
        if space == "local":
            scatter(self._local.view, access, self._local_offsets(access, address, active), values, True)
            return
        parts = self.memory.locate(access, address, active, self.lanes)
        if self.tally is not None and space == "global":
            self._count_global(access, parts, active)
        everyone = self.lanes.index if active is None else active
        for region, offsets, chosen in parts:
            lanes = everyone if chosen is None else everyone[chosen]
            self._check_writable(access, region, offsets, lanes)
            part = values if chosen is None else values[chosen]
            execute = partial(scatter, region.view, access, offsets, part, region.base % access.size == 0)
            if self.races is None:
                execute()
            else:
                touch = self.races.touch_global(access, region, offsets, lanes)
                self.races.write_global(touch, part, execute)

    def _check_writable(self, access: Access, region: Region, offsets: Any, lanes: Any) -> None:
        if not region.writable:
            why, address = f"to {region.name}, which may only be read", region.base + int(offsets[0])
            raise self.lanes.refuse(access, "read-only", why, int(lanes[0]), address, "global")

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
        active, address = self._select(address, mask)
        old = np.zeros(self.lanes.count, access.dtype)
        if len(address) == 0:
            return old
        columns = [np.broadcast_to(value, (self.lanes.count,)) for value in values]
        everyone = self.lanes.index if active is None else active
        parts = [(access.space, active, address)]
        if access.space == "generic":
            parts = list(self._by_window(active, address))
        for space, lanes, part in parts:
            who = everyone if lanes is None else lanes
            for memory, offsets, chosen in self._atomic_targets(space, access, part, lanes):
                picked = who if chosen is None else who[chosen]
                before = apply_atomic(
                    operation, memory, offsets // access.size, [column[picked] for column in columns], wanted
                )
                if wanted:
                    old[picked] = before
        return old

    def _atomic_targets(
        self, space: str, access: Access, address: Any, active: Any
    ) -> list[tuple[Any, Any, Any]]:
        if space == "shared":
            found = self._shared_pattern(access, address, active)
            if self.races is not None:
                self.races.update(self.races.touch(access, found))
            return [(self.shared.view(access.dtype), found.offsets, None)]
        if space == "local":
            return [(self._local.view(access.dtype), self._local_offsets(access, address, active), None)]
        parts = self.memory.locate(access, address, active, self.lanes)
        if self.tally is not None:
            self._count_global(access, parts, active)
        everyone = self.lanes.index if active is None else active
        targets = []
        for region, offsets, chosen in parts:
            lanes = everyone if chosen is None else everyone[chosen]
            self._check_writable(access, region, offsets, lanes)
            if self.races is not None:
                self.races.update(self.races.touch_global(access, region, offsets, lanes))
            low = region.base % access.size
            targets.append((region.data[(access.size - low) % access.size :], offsets, chosen))
        return [
            (data[: len(data) // access.size * access.size].view(access.dtype), offsets, chosen)
            for data, offsets, chosen in targets
        ]

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
        everyone = self.lanes.index if active is None else active
        values = np.zeros((len(target), source.count) if source.count > 1 else len(target), source.dtype)
        if sizes is None or (np.ndim(sizes) == 0 and int(sizes) >= source.size):
            self._fetch(source, address, everyone, values, slice(None))
        else:
            wanted = np.broadcast_to(sizes, (self.lanes.count,))[everyone]
            whole = np.flatnonzero(wanted >= source.size)
            if len(whole):
                self._fetch(source, address[whole], everyone[whole], values, whole)
            for size in np.unique(wanted[(wanted > 0) & (wanted < source.size)]):
                some = np.flatnonzero(wanted == size)
                self._fetch_bytes(source, address[some], everyone[some], values, some, int(size))
        found = self._shared_pattern(to, target, active)
        if self.races is not None:
            self.races.write(self.races.touch(to, found), True)
        self.shared.write(to, found, values)

    def _fetch(self, access: Access, address: Any, lanes: Any, values: Any, where: Any) -> None:
        everyone = np.arange(len(values))[where]
        parts = self.memory.locate(access, address, lanes, self.lanes)
        if self.tally is not None:
            self._count_global(access, parts, lanes)
        self._note_loads(access, parts, lanes)
        for region, offsets, chosen in parts:
            rows = everyone if chosen is None else everyone[chosen]
            values[rows] = gather(region.view, access, offsets, region.base % access.size == 0)

    def _fetch_bytes(
        self, access: Access, address: Any, lanes: Any, values: Any, where: Any, size: int
    ) -> None:
        """Read less than a whole element vector; the address must still be aligned to the whole."""
        octets = values.view(np.uint8).reshape(len(values), -1)
        one = replace(access, dtype=np.dtype(np.uint8), count=1, size=1, offset=0)
        first = address + np.uint64(access.offset % 2**64)
        if int(np.bitwise_or.reduce(first)) & (access.size - 1):
            self.memory.locate(access, address, lanes, self.lanes)  # reports the misaligned lane
        for number in range(size):
            parts = self.memory.locate(one, first + np.uint64(number), lanes, self.lanes)
            self._note_loads(one, parts, lanes)
            for region, offsets, chosen in parts:
                rows = where if chosen is None else where[chosen]
                octets[rows, number] = gather(region.view, one, offsets, True)
        if self.tally is not None:
            self._count_global(access, [(None, first.view(np.int64), None)], lanes)

    def _shared_pattern(self, access: Access, address: Any, active: Any) -> Pattern:
        found = self.shared.pattern(access, address, active)
        if self.tally is not None:
            self.tally.add_shared(access, found.traffic)
        return found

    def _local_offsets(self, access: Access, address: Any, active: Any) -> Any:
        lanes = self.lanes.index if active is None else active
        offsets = displaced(address, access.offset)
        outside = (offsets < 0) | (offsets + access.size > self.local_bytes)
        crooked = offsets % access.size != 0
        if outside.any() or crooked.any():
            where = int(np.argmax(outside if outside.any() else crooked))
            offset = int(offsets[where])
            why = f"of {access.size} bytes at byte {offset} of the thread's stack"
            why += f", which has {self.local_bytes}" if outside[where] else ""
            kind: FaultKind = "out-of-bounds" if outside[where] else "misaligned"
            raise self.lanes.refuse(access, kind, why, int(lanes[where]), offset, "local")
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

    def _count_global(self, access: Access, parts: list[tuple[Any, Any, Any]], active: Any) -> None:
        """Count requests and sectors; a pattern seen before, shifted by whole sectors, is looked up."""
        assert self.tally is not None
        everyone = self.lanes.index if active is None else active
        for region, offsets, chosen in parts:
            lanes = everyone if chosen is None else everyone[chosen]
            absolute = offsets if region is None else offsets + region.base % 256
            relative = absolute - (int(absolute[0]) & ~31)
            key = (access, int(relative[0]))
            known = self._global_patterns.get(key)
            if (
                known is None
                or len(known[0]) != len(relative)
                or not (known[0] == relative).all()
                or not (known[1] == lanes).all()
            ):
                shifted = relative - (int(relative.min()) & ~31)
                known = (relative, lanes, *global_traffic(shifted, lanes))
                self._global_patterns[key] = known
            self.tally.add_global(access, known[2], known[3])


def _assign(rows: tuple[Any, ...], active: Any, values: Any) -> None:
    """Write loaded elements to register rows."""
    if len(rows) == 1:
        if rows[0] is not None:
            rows[0][slice(None) if active is None else active] = values
        return
    where = slice(None) if active is None else active
    for number, row in enumerate(rows):
        if row is not None:
            row[where] = values[:, number]
