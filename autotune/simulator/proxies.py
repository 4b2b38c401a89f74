"""The order of writes to shared memory, proxy fences and the tensor cores' reads: what is missing is a fault.

The tensor cores read shared memory past the path of ordinary accesses (in the PTX ISA's words, through the
async proxy) and while the kernel goes on. So who writes what they read must run fence.proxy.async between the
write (cp.async: its wait) and the barrier; and nobody may write it before wgmma.wait_group covers the read.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from autotune.simulator.emitter import Access
from autotune.simulator.faults import Notes, SimulationFault
from autotune.simulator.lanes import Lanes
from autotune.simulator.shared import Pattern, SharedMemory
from autotune.simulator.synchronisation import AsyncCopies

_PLAIN = -1  # not written by a cp.async


class Proxies:
    """Watches the shared memory of one group of blocks whose kernel has wgmma."""

    def __init__(self, lanes: Lanes, shared: SharedMemory, copies: AsyncCopies, notes: Notes) -> None:
        units = len(shared.storage) // shared.unit
        self.lanes, self.shared, self.copies, self.notes = lanes, shared, copies, notes
        self.readers = np.zeros(units, np.int32)  # products under way that read each unit
        self._writer = np.full(units, -1, np.int64)  # lane that last wrote it, but for bulk copies
        self._written = np.zeros(units, np.int64)  # fences that lane had run then
        self._copied = np.full(units, _PLAIN, np.int64)  # its group of cp.async
        self._fences = np.zeros(lanes.count, np.int64)
        self._shown = np.zeros(lanes.count, np.int64)  # groups of cp.async complete at the last fence

    def fence(self, mask: Any) -> None:
        """Record fence.proxy.async of the active lanes."""
        self._fences += 1 if mask is None else mask
        np.copyto(self._shown, self.copies.waited, where=True if mask is None else mask)

    def write(self, access: Access, found: Pattern, in_flight: bool, bulk: bool) -> None:
        """Check and record a write; in_flight: by cp.async; bulk: by a bulk copy, which needs no fence."""
        busy = self.readers[found.words] > 0
        if busy.any():
            why = "writes what a wgmma may still read: no wgmma.wait_group covers it"
            raise self._stop(access, found, busy, why)
        self._writer[found.words] = -1 if bulk else found.lane
        self._written[found.words] = self._fences[found.lane]
        self._copied[found.words] = self.copies.committed[found.lane] if in_flight else _PLAIN

    def read(self, access: Access, found: Pattern) -> None:
        """Check and record that a product begins to read; what cp.async brought unfenced is a note."""
        writer, copied = self._writer[found.words], self._copied[found.words]
        plain = copied == _PLAIN
        fenced = np.where(
            plain, self._fences[writer] > self._written[found.words], copied < self._shown[writer]
        )
        bad = (writer >= 0) & ~fenced
        if bad.any():
            which = bad & plain if (bad & plain).any() else bad
            thread = self.lanes.thread_place(int(self.lanes.thread[writer[np.argmax(which)]]))
            why = f"reads what thread {thread} wrote without fence.proxy.async behind it"
            stop = self._stop(access, found, which, why)
            if (bad & plain).any():
                raise stop
            self.notes.add(stop)
        self.readers[found.words] += 1

    def _stop(self, access: Access, found: Pattern, which: Any, why: str) -> SimulationFault:
        where = int(np.argmax(which))
        address = int(found.words[where]) * self.shared.unit % self.shared.window
        return self.lanes.refuse(access, "async-product", why, int(found.lane[where]), address, "shared")

    def release(self, found: Pattern) -> None:
        """Record that a product was waited for."""
        self.readers[found.words] -= 1
