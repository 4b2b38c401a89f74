"""Executes wgmma, the asynchronous products of warpgroups; sums reach registers when they are waited for.

A product is computed when it starts. Until its group is waited for, its sums are kept aside and their
registers hold NaN; registers that it reads must keep their values, and shared memory that it reads may not be
written.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from autotune.simulator.bulk import BulkCopies
from autotune.simulator.emit_warp import Product
from autotune.simulator.faults import UnsupportedPTX
from autotune.simulator.lanes import WARP, WARPGROUP, Lanes
from autotune.simulator.load_store import Values
from autotune.simulator.shared import Pattern
from autotune.simulator.warp import sum_fragments, sum_registers, tf32, tf32_fragments, to_zero

DEPTH = 8  # TF32 elements along k of one instruction
ROWS = 16  # of one warp, of the 64 of an instruction
_UNKNOWN_BITS = np.uint32(0x7FB5A5A5)  # a NaN
_SWIZZLE_128 = 1


@dataclass(eq=False)
class Started:
    """One product that some warpgroups have started and not yet waited for.

    Attributes:
        product: Which.
        warps: The warps, `[count]`.
        groups: The commit group of each of them, `[count]`.
        left: What the registers of A held, `[4, 32 count]`; None where A lies in shared memory.
        reads: What it reads of shared memory, one pattern for all warps; None without checks.
    """

    product: Product
    warps: Any
    groups: Any
    left: Any
    reads: Pattern | None


class Wgmmas:
    """The products that the warpgroups of one group of blocks have started.

    Attributes:
        committed: Groups that each warp has closed, `[warps]`.
        fenced: Whether each warp ran wgmma.fence since it last waited, `[warps]` bool.
        aside: Sums of products not yet waited for: register row to `[lanes]` float32.
        flying: Group of the last product that writes a row: register row to `[warps]`, -1 for none.
        started: In order.
    """

    def __init__(self, lanes: Lanes) -> None:
        warps = lanes.count // WARP
        self.committed = np.zeros(warps, np.int64)
        self.fenced = np.zeros(warps, bool)
        self.aside: dict[int, Any] = {}
        self.flying: dict[int, Any] = {}
        self.started: list[Started] = []


class Warpgroups(BulkCopies):
    """What the generated code calls for wgmma and for the fence between proxies.

    Attributes:
        wgmmas: None if the kernel has none.
    """

    wgmmas: Wgmmas | None

    def fence_proxy(self, mask: Any) -> None:
        """Execute fence.proxy.async: show each active lane's writes to shared memory to the tensor cores."""
        if self.races is not None and self.races.proxies is not None:
            self.races.proxies.fence(mask)

    def wgmma_fence(self, mask: Any) -> None:
        """Execute wgmma.fence."""
        assert self.wgmmas is not None
        self.wgmmas.fenced[self._warps(mask)] = True

    def wgmma_commit(self, mask: Any) -> None:
        """Execute wgmma.commit_group."""
        assert self.wgmmas is not None
        self.wgmmas.committed[self._warps(mask)] += 1

    def wgmma_wait(self, pending: int, mask: Any) -> None:
        """Execute wgmma.wait_group: write the sums of all groups but the last `pending` to registers."""
        state = self.wgmmas
        assert state is not None
        warps = self._warps(mask)
        limit = np.full(len(state.committed), -1, np.int64)
        limit[warps] = state.committed[warps] - pending
        state.fenced[warps] = False
        remaining = []
        for each in state.started:
            done = each.groups < limit[each.warps]
            if done.any():
                self._finish(each, done)
            if not done.all():
                left = None if each.left is None else each.left.reshape(4, -1, WARP)[:, ~done].reshape(4, -1)
                reads = each.reads if not done.any() else None
                remaining.append(Started(each.product, each.warps[~done], each.groups[~done], left, reads))
        state.started = remaining
        for row, groups in list(state.flying.items()):
            ready = (groups >= 0) & (groups < limit)
            if ready.any():
                np.copyto(self.f2[row], state.aside[row], where=np.repeat(ready, WARP))
                groups[ready] = -1
                if (groups < 0).all():
                    del state.flying[row], state.aside[row]

    def _finish(self, each: Started, done: Any) -> None:
        """Check that a product's operands are unchanged, and release what it read."""
        if each.left is not None:
            lanes = _lanes_of(each.warps[done])
            before = each.left.reshape(4, -1, WARP)[:, done].reshape(4, -1)
            changed = (self.u2[each.product.left][:, lanes] != before).any(axis=0)
            if changed.any():
                lane = int(lanes[np.argmax(changed)])
                message = f"{each.product.access.opcode}: a register that it reads changes before its wait"
                raise self.lanes.stop("async-product", message, each.product.access.line, lane)
        if each.reads is not None:
            assert self.races is not None
            assert self.races.proxies is not None
            self.races.proxies.release(each.reads)
            self.races.read(each.product.access, each.reads)

    def wgmma_multiply(self, product: Product, left: Values, right: Values, add: Values, mask: Any) -> None:
        """Execute wgmma.mma_async.

        Args:
            product: The instruction.
            left: Descriptor of A in shared memory of each lane; None where A lies in registers.
            right: Descriptor of B of each lane.
            add: Whether D is added to.
            mask: Active lanes.

        Raises:
            Stop: A warp or a fence is missing, or an operand may not be read yet.
        """
        state = self.wgmmas
        assert state is not None
        warps = self._warps(mask)
        if not len(warps):
            return
        self._require_warpgroups(product, warps)
        firsts = warps[::WARPGROUP] * WARP  # the first lane of each warpgroup
        blocks = self.lanes.block[firsts]
        lanes = _lanes_of(warps)
        if not state.fenced[warps].all():
            lane = int(warps[np.argmin(state.fenced[warps])]) * WARP
            message = f"{product.access.opcode} without wgmma.fence since registers were last waited for"
            raise self.lanes.stop("async-product", message, product.access.line, lane)

        columns = self._described(product, right, firsts, product.columns)
        places = [columns]
        if product.left is None:
            rows = self._described(product, left, firsts, ROWS * WARPGROUP)
            places.append(rows)
            a = self._elements(rows, blocks).reshape(len(warps), ROWS, DEPTH)
        else:
            a = tf32_fragments(self.u2[product.left][:, lanes])
        b = np.repeat(self._elements(columns, blocks), WARPGROUP, axis=0)
        total = product.signs * (a @ b.transpose(0, 2, 1))
        adds = np.broadcast_to(add, (self.lanes.count,))[lanes[::WARP]]
        if adds.any():
            total += adds[:, None, None] * sum_fragments(self._sums(product, lanes, warps))
        reads = self._note_reads(product, places, firsts, blocks)
        values = sum_registers(to_zero(total))
        for row, value in zip(product.sums.tolist(), values, strict=True):
            if row not in state.flying:
                state.aside[row] = np.zeros(self.lanes.count, np.float32)
                state.flying[row] = np.full(len(state.committed), -1, np.int64)
            state.aside[row][lanes] = value
            state.flying[row][warps] = state.committed[warps]
            self.u2[row][lanes] = _UNKNOWN_BITS
        held = None if product.left is None else self.u2[product.left][:, lanes]
        state.started.append(Started(product, warps, state.committed[warps], held, reads))

    def _sums(self, product: Product, lanes: Any, warps: Any) -> Any:
        """Return D as it is before the product, `[columns / 2, lanes]`: from aside where one is under way."""
        assert self.wgmmas is not None
        values = self.f2[product.sums][:, lanes]
        for number, row in enumerate(product.sums.tolist()):
            if row in self.wgmmas.flying:
                here = np.repeat(self.wgmmas.flying[row][warps] >= 0, WARP)
                values[number] = np.where(here, self.wgmmas.aside[row][lanes], values[number])
        return values

    def _warps(self, mask: Any) -> Any:
        """Return the numbers of the warps that have active lanes."""
        if mask is None:
            return np.arange(self.lanes.count // WARP)
        return np.flatnonzero(np.asarray(mask).reshape(-1, WARP).any(axis=1))

    def _require_warpgroups(self, product: Product, warps: Any) -> None:
        """Refuse warps that do not come in fours, beginning with a multiple of four of their block."""
        in_block = warps % (self.lanes.stride // WARP)
        fours = len(warps) % WARPGROUP == 0 and (
            (in_block.reshape(-1, WARPGROUP) % WARPGROUP == np.arange(WARPGROUP)).all()
            and (np.diff(warps.reshape(-1, WARPGROUP)) == 1).all()
        )
        if not fours:
            message = f"{product.access.opcode} needs four warps, from a multiple of four on"
            raise self.lanes.stop("divergent-warp", message, product.access.line, int(warps[0]) * WARP)

    def _described(self, product: Product, descriptor: Values, firsts: Any, extent: int) -> Any:
        """Return where a matrix in shared memory lies: bytes in the block's window, `[firsts, extent, 8]`."""
        every = np.broadcast_to(descriptor, (self.lanes.count,)).astype(np.uint64)
        found = np.stack([_element_places(int(every[lane]), extent) for lane in firsts])
        outside = found.reshape(len(firsts), -1).max(axis=1) + 4 > self.shared.size
        if outside.any():
            lane = int(firsts[np.argmax(outside)])
            address = int(found.max())
            message = (
                f"{product.access.opcode} reads byte {address} of shared memory, of which the block has "
                f"{self.shared.size}"
            )
            raise self.lanes.stop("out-of-bounds", message, product.access.line, lane, address, "shared")
        return found

    def _elements(self, places: Any, blocks: Any) -> Any:
        """Read TF32 elements as float64, shaped as their places."""
        offsets = (places + (blocks * self.shared.window)[:, None, None]) // 4
        return tf32(self.shared.view(np.dtype(np.uint32)).take(offsets))

    def _note_reads(self, product: Product, places: list[Any], firsts: Any, blocks: Any) -> Pattern | None:
        """Check and record what a product reads of shared memory."""
        races = self.races
        if races is None or races.proxies is None:
            return None
        parts = [
            (place.reshape(len(firsts), -1) + (blocks * self.shared.window)[:, None]) for place in places
        ]
        offsets = np.concatenate(parts, axis=1)
        per_unit = np.arange(4 // self.shared.unit)
        words = (offsets // self.shared.unit)[:, :, None] + per_unit
        lane = np.broadcast_to(firsts[:, None, None], words.shape).reshape(-1)
        found = Pattern(offsets.reshape(-1), lane, np.sort(offsets.reshape(-1)))
        found.words, first = np.unique(words.reshape(-1), return_index=True)
        found.lane = lane[first]
        found.who = np.full(len(found.words), self.shared.several)
        found.blocks = self.lanes.block[found.lane]
        races.read(product.access, found)
        races.proxies.read(product.access, found)
        return found


def _lanes_of(warps: Any) -> Any:
    return (warps[:, None] * WARP + np.arange(WARP)).reshape(-1)


@lru_cache(maxsize=4096)
def _element_places(descriptor: int, extent: int) -> Any:
    """Return the bytes at which a K-major matrix of TF32 elements begins, `[extent, 8]`.

    Eight rows of 128 bytes follow each other, the next eight the descriptor's stride further. The 16-byte
    pieces of a row are swapped by its number in the eight: bits 4 to 6 of an address by its bits 7 to 9.
    Source: PTX ISA, "Matrix Descriptor Format" and "Swizzling Modes" of wgmma.

    Raises:
        UnsupportedPTX: The descriptor has another swizzling mode, or a base offset.
    """
    start, stride = (descriptor & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
    if descriptor >> 62 != _SWIZZLE_128 or descriptor >> 49 & 7:
        raise UnsupportedPTX(
            f"the matrix descriptor {descriptor:#x} of a wgmma is not supported by the simulator: only the "
            "128-byte swizzle without a base offset is"
        )
    row, element = np.arange(extent)[:, None], np.arange(DEPTH)
    address = start + row // 8 * stride + row % 8 * 128 + 4 * element
    return address ^ (address >> 7 & 7) << 4
