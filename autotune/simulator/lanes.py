"""The lanes of a group of blocks: which thread of which block each one is; and their registers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from autotune.simulator.faults import Fault, FaultKind, SimulationFault
from autotune.values.lazy import cached_property

if TYPE_CHECKING:
    from autotune.simulator.emitter import Access

WARP = 32
WARPGROUP = 4  # warps
RANK_BITS = 24  # of a shared address, the first above the offset: 1 + the block's rank in its cluster, or 0
Extent = tuple[int, int, int]


class Lanes:
    """The threads of some consecutive blocks, block after block, each padded to whole warps.

    Attributes:
        count: Lanes, padding included.
        blocks: Number of blocks.
        cluster: Blocks of a cluster, which lie side by side along x.
        threads: Threads of one block.
        stride: Lanes of one block (threads rounded up to whole warps).
        block: Block of each lane, counted within these blocks, ``[count]`` int64.
        thread: Linear thread index of each lane within its block, ``[count]`` int64.
        exists: False for padding lanes, ``[count]`` bool.
    """

    def __init__(self, grid: Extent, block: Extent, first_block: int, blocks: int, cluster: int = 1) -> None:
        self.grid, self.block_shape, self.first_block, self.blocks = grid, block, first_block, blocks
        self.cluster = cluster
        self.threads = math.prod(block)
        self.stride = -(-self.threads // WARP) * WARP
        self.count = blocks * self.stride
        self.index = np.arange(self.count)
        self.block = self.index // self.stride
        self.thread = self.index % self.stride
        self.exists = self.thread < self.threads
        self.full = self.threads == self.stride

    @property
    def block_ids(self) -> Any:
        """Linear blockIdx of each lane, ``[count]`` int64."""
        return self.block + self.first_block

    @cached_property
    def in_warp(self) -> Any:
        """Lane number within the warp, ``[count]`` int64."""
        return self.index % WARP

    @cached_property
    def special(self) -> dict[str, Any]:
        """Values of the PTX special registers: uint32 arrays ``[count]``, or scalars."""
        thread, block_id = self.thread, self.block_ids
        lane = self.in_warp.astype(np.uint32)
        bit = np.uint32(1) << lane
        below = bit - np.uint32(1)
        rank, clusters = block_id % self.cluster, (self.grid[0] // self.cluster, *self.grid[1:])
        return {
            **_coordinates("%tid", thread, self.block_shape),
            **_coordinates("%ctaid", block_id, self.grid),
            **_extents("%ntid", self.block_shape),
            **_extents("%nctaid", self.grid),
            **_coordinates("%cluster_ctaid", rank, (self.cluster, 1, 1)),
            **_coordinates("%clusterid", block_id // self.cluster, clusters),
            **_extents("%cluster_nctaid", (self.cluster, 1, 1)),
            **_extents("%nclusterid", clusters),
            "%cluster_ctarank": rank.astype(np.uint32),
            "%cluster_nctarank": np.uint32(self.cluster),
            "%laneid": lane,
            "%warpid": (thread // WARP).astype(np.uint32),
            "%nwarpid": np.uint32(self.stride // WARP),
            "WARP_SZ": np.uint32(WARP),
            "%lanemask_eq": bit,
            "%lanemask_lt": below,
            "%lanemask_le": below | bit,
            "%lanemask_gt": ~(below | bit),
            "%lanemask_ge": ~below,
            "%smid": block_id.astype(np.uint32),
            "%nsmid": np.uint32(min(math.prod(self.grid), 0xFFFFFFFF)),
            "%gridid": np.uint32(0),
        }

    def place(self, lane: int) -> tuple[Extent, Extent]:
        """Return blockIdx and threadIdx of a lane."""
        block_id = int(self.block[lane]) + self.first_block
        return _unflatten(block_id, self.grid), self.thread_place(int(self.thread[lane]))

    def block_place(self, block_id: int) -> Extent:
        """Return blockIdx of a linear block index."""
        return _unflatten(block_id, self.grid)

    def thread_place(self, thread: int) -> Extent:
        """Return threadIdx of a linear thread index."""
        return _unflatten(thread, self.block_shape)

    def check_offsets(self, access: Access, offsets: Any, size: int, lanes: Any, space: str) -> None:
        """Refuse offsets outside shared memory or a stack, and misaligned ones."""
        outside = (offsets < 0) | (offsets + access.size > size)
        crooked = offsets & (access.size - 1) != 0
        bad = outside if outside.any() else crooked
        if bad.any():
            where = int(np.argmax(bad))
            memory, has = "shared memory", "of which the block has"
            if space == "local":
                memory, has = "the thread's stack", "which has"
            kind: FaultKind = "misaligned" if bad is crooked else "out-of-bounds"
            what = f"an address that is no multiple of {access.size}" if bad is crooked else f"{has} {size}"
            why = f"of {access.size} bytes at byte {offsets[where]} of {memory}, {what}"
            raise self.refuse(access, kind, why, int(lanes[where]), int(offsets[where]), space)

    def refuse(
        self, access: Access, kind: FaultKind, why: str, lane: int, address: int | None, where: str | None
    ) -> SimulationFault:
        """Return the exception that ends the simulation with a fault of one lane's access."""
        return self.stop(kind, f"{access.opcode} {why}", access.line, lane, address, where)

    def stop(
        self,
        kind: FaultKind,
        message: str,
        line: int,
        lane: int,
        address: int | None = None,
        where: str | None = None,
    ) -> SimulationFault:
        """Return the exception that ends the simulation with a fault of one lane."""
        block, thread = self.place(lane)
        return SimulationFault(Fault(kind, message, line or None, block, thread, address, where))


class Registers:
    """The registers of one group of threads: one row of lanes per PTX register.

    Attributes:
        u, s, f: 32-bit registers as uint32, int32 and float32 rows, each ``[lanes]``.
        U, S, F: 64-bit registers likewise.
        hu, hs, hf: 16-bit registers likewise.
        p: Predicates, bool rows.
        u2, f2: All 32-bit registers, ``[rows, lanes]``.
    """

    def allocate(self, counts: Mapping[int, int], lanes: int) -> None:
        """Allocate zeroed registers.

        Args:
            counts: Width in bits (1, 16, 32, 64) to the number of registers.
            lanes: Threads.
        """
        half, word, wide = (np.zeros((counts[bits], lanes), f"u{bits // 8}") for bits in (16, 32, 64))
        self.p: list[Any] = list(np.zeros((counts[1], lanes), np.bool_))
        self.u2, self.f2 = word, word.view(np.float32)
        self.u, self.s, self.f = _rows(word, "u4", "i4", "f4")
        self.U, self.S, self.F = _rows(wide, "u8", "i8", "f8")
        self.hu, self.hs, self.hf = _rows(half, "u2", "i2", "f2")


def bytes_per_lane(counts: Mapping[int, int]) -> int:
    """Return the register bytes of one thread."""
    return counts[1] + 2 * counts[16] + 4 * counts[32] + 8 * counts[64]


def _coordinates(name: str, linear: Any, shape: Extent) -> dict[str, Any]:
    x, y, _ = shape
    values = (linear % x, linear // x % y, linear // (x * y))
    return {f"{name}.{axis}": value.astype(np.uint32) for axis, value in zip("xyz", values, strict=True)}


def _extents(name: str, shape: Extent) -> dict[str, Any]:
    return {f"{name}.{axis}": np.uint32(extent) for axis, extent in zip("xyz", shape, strict=True)}


def _unflatten(linear: int, shape: Extent) -> Extent:
    return linear % shape[0], linear // shape[0] % shape[1], linear // (shape[0] * shape[1])


def _rows(bank: Any, *kinds: str) -> tuple[list[Any], ...]:
    return tuple(list(bank.view(kind)) for kind in kinds)
