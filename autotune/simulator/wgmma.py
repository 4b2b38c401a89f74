"""Executes wgmma, the asynchronous products of warpgroups; sums reach registers when they are waited for.

A product is computed when it starts. Until its group is waited for, its sums are kept aside and their
registers hold NaN; registers that it reads must keep their values, and shared memory that it reads may not be
written. How its sums are rounded is in `warp`.
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
from autotune.simulator.memory import WIDE
from autotune.simulator.shared import SEVERAL, Pattern
from autotune.simulator.warp import left_fragments, sum_fragments, sum_registers, to_zero

PIECE = 16  # bytes that swizzling moves as a whole; a row of an operand has two of them
TURNED_DEPTH = 16  # of an instruction: only FP16 operands may be turned
ROWS = 64  # of an instruction, 16 of each warp
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
            self.races.read(self.races.touch(each.product.access, each.reads))

    def wgmma_multiply(self, product: Product, left: Values, right: Values, add: Values, mask: Any) -> None:
        """Execute wgmma.mma_async.

        Args:
            product: The instruction.
            left: Descriptor of A in shared memory of each lane; None where A lies in registers.
            right: Descriptor of B of each lane.
            add: Whether D is added to.
            mask: Active lanes.

        Raises:
            SimulationFault: A warp or a fence is missing, or an operand may not be read yet.
        """
        state = self.wgmmas
        assert state is not None
        warps = self._warps(mask)
        if not len(warps):
            return
        self._require_warpgroups(product, warps)
        firsts = warps[::WARPGROUP] * WARP  # the first lane of each warpgroup
        lanes = _lanes_of(warps)
        if not state.fenced[warps].all():
            lane = int(warps[np.argmin(state.fenced[warps])]) * WARP
            message = f"{product.access.opcode} without wgmma.fence since registers were last waited for"
            raise self.lanes.stop("async-product", message, product.access.line, lane)

        right_pieces, b = self._matrix(product, right, firsts, product.columns, product.turned[1])
        pieces = [right_pieces]
        if product.left is None:
            left_pieces, a = self._matrix(product, left, firsts, ROWS, product.turned[0])
            pieces.append(left_pieces)
        else:
            a = left_fragments(self.u2[product.left][:, lanes], product.seen)
        total = a.reshape(len(firsts), ROWS, -1) @ b.transpose(0, 2, 1)
        total = product.signs * total.reshape(len(warps), -1, product.columns)
        adds = np.broadcast_to(add, (self.lanes.count,))[lanes[::WARP]]
        if adds.any():
            total += adds[:, None, None] * sum_fragments(self._sums(product, lanes, warps))
        reads = self._note_reads(product, np.concatenate(pieces, axis=1), firsts)
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

    def _matrix(
        self, product: Product, descriptor: Values, firsts: Any, extent: int, turned: bool
    ) -> tuple[Any, Any]:
        """Read one operand of each warpgroup from shared memory.

        Returns:
            (bytes in the storage of all blocks at which its pieces begin, `[firsts, pieces]`;
            its numbers, `[firsts, extent, depth]` float64).
        """
        every = np.broadcast_to(descriptor, (self.lanes.count,)).astype(np.uint64)
        found = np.stack([_pieces(int(every[lane]), extent, turned) for lane in firsts])
        outside = found.max(axis=1) + PIECE > self.shared.size
        if outside.any():
            lane = int(firsts[np.argmax(outside)])
            address = int(found.max())
            message = (
                f"{product.access.opcode} reads byte {address} of shared memory, of which the block has "
                f"{self.shared.size}"
            )
            raise self.lanes.stop("out-of-bounds", message, product.access.line, lane, address, "shared")
        found += self.shared.base[firsts][:, None]
        numbers = product.seen(self.shared.view(WIDE[PIECE]).take(found // PIECE).view(np.uint32))
        if turned:
            numbers = numbers.reshape(len(firsts), -1, TURNED_DEPTH, PIECE // 2).swapaxes(2, 3)
        return found, numbers.reshape(len(firsts), extent, -1)

    def _note_reads(self, product: Product, pieces: Any, firsts: Any) -> Pattern | None:
        """Check and record what a product reads of shared memory."""
        races = self.races
        if races is None or races.proxies is None:
            return None
        found = Pattern(pieces, np.repeat(firsts, pieces.shape[1]), pieces.reshape(-1))
        words = pieces[:, :, None] // self.shared.unit + np.arange(PIECE // self.shared.unit)
        found.words, first = np.unique(words, return_index=True)
        found.lane = firsts[first // words[0].size]
        found.who = np.full(len(found.words), SEVERAL)
        found.blocks = self.lanes.block[found.lane]
        races.read(races.touch(product.access, found))
        races.proxies.read(product.access, found)
        return found


def _lanes_of(warps: Any) -> Any:
    return (warps[:, None] * WARP + np.arange(WARP)).reshape(-1)


@lru_cache(maxsize=4096)
def _pieces(descriptor: int, extent: int, turned: bool) -> Any:
    """Return the bytes at which the 16-byte pieces of one operand begin, `[pieces]`.

    Eight rows of 128 bytes follow each other; the next eight begin the descriptor's stride further. A row is
    one of the matrix, of which an instruction takes two pieces; or, turned, one step of k for 64 rows of the
    matrix, the next 64 the descriptor's leading offset further, and an instruction takes 16 steps. The pieces
    of a row are swapped by its number in the eight: bits 4 to 6 of an address by its bits 7 to 9.
    Source: PTX ISA, "Matrix Descriptor Format", "Strides" and "Swizzling Modes" of wgmma.

    Raises:
        UnsupportedPTX: The descriptor has another swizzling mode, or a base offset.
    """
    start, further, stride = ((descriptor >> at & 0x3FFF) << 4 for at in (0, 16, 32))
    if descriptor >> 62 != _SWIZZLE_128 or descriptor >> 49 & 7:
        raise UnsupportedPTX(
            f"the matrix descriptor {descriptor:#x} of a wgmma is not supported by the simulator: only the "
            "128-byte swizzle without a base offset is"
        )
    row, piece = np.arange(extent)[:, None], np.arange(2)
    if turned:
        row, piece = np.arange(TURNED_DEPTH), np.arange(extent // 8)[:, None]
    address = start + row // 8 * stride + row % 8 * 128 + piece // 8 * further + piece % 8 * PIECE
    return (address ^ (address >> 7 & 7) << 4).reshape(-1)
