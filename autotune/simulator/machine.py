"""Runs the blocks of a launch: decides which lanes execute which basic block next."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np

from autotune.errors import AutotuneError, UsageError
from autotune.simulator import warp
from autotune.simulator.counters import Tally
from autotune.simulator.faults import SimulationFault, UnsupportedPTX
from autotune.simulator.lanes import WARP, Extent, Lanes, bytes_per_lane
from autotune.simulator.memory import GlobalMemory
from autotune.simulator.program import Program
from autotune.simulator.proxies import Proxies
from autotune.simulator.ptx import Instruction, integer
from autotune.simulator.races import RaceDetector
from autotune.simulator.shared import SharedMemory
from autotune.simulator.synchronisation import BARRIERS, AsyncCopies, Barriers, MBarriers
from autotune.simulator.wgmma import Warpgroups, Wgmmas

MAX_LANES = 8192  # threads that run at once
GROUP_BYTES = (
    256 << 20
)  # registers, stacks, shared memory and its bookkeeping of those threads, if they can be split
PATIENCE = 100  # times that lanes may test an mbarrier while nothing else happens
MAX_STEPS = 1_000_000  # basic blocks that one group of threads may execute
MAX_SECONDS = 60.0  # of CPU time that a launch may take: a busy or suspended machine does not count
BLOCK_BYTES = 4 << 30  # that one block may need
_STEPS_PER_LOOK = 16  # basic blocks between two looks at the clock
_SHADOW_BYTES = 33  # kept with checks for each unit of shared memory whose races are told apart


class Machine(Warpgroups):
    """Runs the blocks of one launch in groups; every array spans the lanes of one group.

    While all living lanes stand at one basic block, it runs as a whole. Where they part, the lanes at the
    lowest block run first: compilers lay out code so that they meet again there.

    Args:
        program: The kernel.
        grid: Blocks in x, y, z.
        block: Threads of a block in x, y, z.
        memory: The arrays.
        parameters: Bytes of each kernel parameter.
        shared_bytes: Static and dynamic shared memory of one block.
        checks: Look for races and the like.
        counters: Count instructions and traffic.
        max_steps: Basic blocks that one group may execute.
        max_seconds: CPU time that the launch may take.
    """

    def __init__(
        self,
        program: Program,
        grid: Extent,
        block: Extent,
        memory: GlobalMemory,
        parameters: dict[str, bytes],
        shared_bytes: int,
        checks: bool,
        counters: bool,
        max_steps: int = MAX_STEPS,
        max_seconds: float = MAX_SECONDS,
    ) -> None:
        tally = Tally(program) if counters else None
        super().__init__(memory, parameters, program.kernel.local_bytes, checks, tally)
        self.program, self.grid, self.block_shape, self.shared_bytes = program, grid, block, shared_bytes
        self.max_steps, self.max_seconds = max_steps, max_seconds
        self._blocks_allocated = 0
        self._at = 0  # the basic block that runs
        self.races = None
        if checks:
            syncs, unit = "bar.warp.sync" in program.uses, program.global_unit
            self.races = RaceDetector(program.orders_blocks, syncs, unit, self.notes)

    def run(self) -> None:
        """Run every block of the grid.

        Raises:
            SimulationFault: The first fault, or a limit was reached.
            UsageError: One block needs too much memory.
            UnsupportedPTX: A statement makes no sense to NumPy: operands of types that no compiler combines.
        """
        blocks = math.prod(self.grid)
        step = self._blocks_at_once()
        self._deadline = time.thread_time() + self.max_seconds
        with np.errstate(all="ignore"):
            for first in range(0, blocks, step):
                self._begin(first, min(step, blocks - first))
                self._look_at_clock(0)
                try:
                    self._execute()
                except (AutotuneError, MemoryError):
                    raise
                except Exception as error:
                    line = self.program.line_of(self._at)
                    where = f" near source line {line}" if line else ""
                    raise UnsupportedPTX(
                        f"PTX of kernel {self.program.kernel.name}{where} is not supported by the simulator "
                        f"({type(error).__name__}: {' '.join(str(error).split())[:120]})"
                    ) from error

    def _blocks_at_once(self) -> int:
        stride, cluster = Lanes(self.grid, self.block_shape, 0, 1).stride, self.program.kernel.cluster[0]
        lane_bytes = bytes_per_lane(self.program.layout.row_counts) + self.local_bytes + 64
        shadow = _SHADOW_BYTES * self.shared_bytes // self.program.shared_unit if self.checks else 0
        shared = self.shared_bytes + shadow
        block = (stride * lane_bytes + shared) * cluster
        if block > BLOCK_BYTES:
            what = "block" if cluster == 1 else "cluster"
            raise UsageError(
                f"one {what} of kernel {self.program.kernel.name} needs {block} bytes of registers, stacks "
                f"and shared memory; the simulator allows {BLOCK_BYTES}: launch fewer threads"
            )
        return max(1, min(MAX_LANES // (stride * cluster), GROUP_BYTES // block)) * cluster

    def _begin(self, first: int, blocks: int) -> None:
        """Set up a group of blocks; its arrays serve all groups of that size."""
        self.lanes = Lanes(self.grid, self.block_shape, first, blocks, self.program.kernel.cluster[0])
        self.special = self.lanes.special
        if self._blocks_allocated != blocks:
            self._blocks_allocated = blocks
            self.allocate(self.program.layout.row_counts, self.lanes.count)
            self.allocate_local(self.lanes.count)
            unit, counters = self.program.shared_unit, self.tally is not None
            self.shared = SharedMemory(self.lanes, self.shared_bytes, unit, self.checks, counters)
        self.shared.clear(self.lanes)
        self.async_copies = AsyncCopies(self.lanes.count)
        uses, size = self.program.uses, len(self.shared.storage)
        self.mbarriers = MBarriers(self.lanes, size) if "mbarrier" in uses else None
        self.wgmmas = Wgmmas(self.lanes) if "wgmma" in uses else None
        if self.races is not None:
            self.races.begin(self.lanes, self.shared, self.async_copies, self.mbarriers)
            if self.wgmmas is not None:
                self.races.proxies = Proxies(self.lanes, self.shared, self.async_copies, self.notes)

    def _execute(self) -> None:
        """Run the group to its end."""
        lanes, end = self.lanes, len(self.program.blocks)
        self.alive = lanes.exists.copy()
        self.parked = np.zeros(lanes.count, bool)  # at a warp-wide instruction that lacks lanes
        self.passed = np.zeros(lanes.count, bool)  # went on behind one at which their warp waits
        self.yielded = np.zeros(lanes.count, bool)  # asked for an mbarrier's phase that is not complete
        self.completions, self._patience = 0, (0, PATIENCE)
        self.barriers = Barriers(lanes)
        if self.races is not None:
            self.races.barriers = self.barriers
        self.place = np.zeros(lanes.count, np.int64)  # basic block of each lane, while they are apart
        self.steps = 0
        common: int | None = 0
        mask = None if lanes.full else self.alive
        while True:
            if common is not None:
                if common >= end:
                    self._end(self.alive)
                    return
                common = self._step_together(common, mask)
                if common is not None:
                    continue
            elif not self._step_apart(end):
                return
            if self.alive.any() and not self.barriers.waiting.any() and not self.yielded.any():
                places = self.place[self.alive]
                if (places == places[0]).all():
                    common = int(places[0])
                    self.parked[:] = False
                    mask = None if self.alive.all() else self.alive

    def _step_together(self, number: int, mask: Any) -> int | None:
        """Run a block for all living lanes; return the next block, None if they part or some end."""
        members = self.program.blocks[number].members
        if members is not None and mask is not None:
            self._warps_complete(number, members, mask)
        self._count_step(number, mask)
        self.program.function(number, mask is not None)(self, mask)
        if self.mbarriers is not None and self.yielded.any():
            self._transfer(number, self.alive if mask is None else mask)
            return None
        control = self.program.blocks[number].control
        if control is None:
            return number + 1
        if control.parts[0] == "bra":
            target = self.program.targets[control.operands[0]]
            if control.predicate is None:
                return target
            taken = self._predicate(control)
            if (mask is None and taken.all()) or (mask is not None and (taken | ~mask).all()):
                return target
            if not (taken.any() if mask is None else (taken & mask).any()):
                return number + 1
        elif control.predicate is None and control.parts[0] in ("ret", "exit"):
            return len(self.program.blocks)
        elif control.predicate is None and self.program.is_plain_barrier(control):
            if self.races is not None:
                self.races.barrier(None)
            return number + 1
        self._transfer(number, self.alive if mask is None else mask)
        return None

    def _step_apart(self, end: int) -> bool:
        """Run one block for the lanes at the lowest place; return False when all lanes have ended."""
        able = self.alive & ~self.barriers.waiting & ~self.parked
        ready = able & ~self.yielded
        if not ready.any():
            if not self.alive.any():
                return False
            if not able.any():
                raise self._stuck()
            self._retry(able)
            return True
        number = int(self.place[ready].min())
        if number >= end:
            self._end(self.alive & (self.place >= end))
            return True
        mask = self.alive & ~self.barriers.waiting & ~self.yielded & (self.place == number)
        members = self.program.blocks[number].members
        if members is not None:
            complete = self._warps_complete(number, members, mask)
            self.parked |= mask & ~complete
            mask &= complete
            self.parked &= ~mask
            if not mask.any():
                return True
        if self.parked.any():
            self._note_passing(number, mask)
        self._count_step(number, mask)
        self.program.function(number, True)(self, mask)
        self._transfer(number, mask)
        return True

    def _note_passing(self, number: int, mask: Any) -> None:
        """Remember lanes that run on behind a warp-wide instruction at which others of their warp wait."""
        for place in np.unique(self.place[self.parked & self.alive]).tolist():
            if number in self.program.leads_to(place):
                waits = (self.parked & (self.place == place)).reshape(-1, WARP).any(axis=1)
                self.passed |= mask & np.repeat(waits, WARP)

    def _retry(self, able: Any) -> None:
        """Let lanes test their mbarrier again, but not for ever."""
        seen, left = self._patience
        left = PATIENCE if seen != self.completions else left - 1
        self._patience = (self.completions, left)
        if left < 0 and self.parked.any():
            raise self._stuck()
        if left < 0:
            lane = int(np.argmax(able))
            line = self.program.line_of(int(self.place[lane]))
            raise self.lanes.stop("deadlock", "the phase of an mbarrier never completes", line, lane)
        self.yielded[:] = False

    def _predicate(self, control: Instruction) -> Any:
        assert control.predicate is not None
        taken = self.p[self.program.layout.rows[control.predicate][1]]
        return ~taken if control.negated else taken

    def _transfer(self, number: int, mask: Any) -> None:
        """Move the masked lanes past the end of a block."""
        control = self.program.blocks[number].control
        self.place[mask] = number + 1
        if control is None:
            return
        chosen = mask if control.predicate is None else mask & self._predicate(control)
        name = control.parts[0]
        if name == "bra":
            self.place[chosen] = self.program.targets[control.operands[0]]
        elif name == "brx":
            table = [self.program.targets[label] for label in self.program.kernel.tables[control.operands[1]]]
            self.place[chosen] = np.array(table).take(self._operand(control.operands[0])[chosen], mode="clip")
        elif name in ("ret", "exit"):
            self._end(chosen.copy())
        elif "cluster" in control.parts[1:2]:
            self._meet(control, chosen)
        elif name in ("bar", "barrier"):
            self._arrive(control, chosen)
        elif chosen.any():
            lane = int(np.argmax(chosen))
            raise self.lanes.stop("trap", "the kernel ran into a trap instruction", control.line, lane)

    def _end(self, chosen: Any) -> None:
        """End lanes; barriers no longer wait for them."""
        before, self.alive = self.alive, self.alive & ~chosen
        if self.lanes.cluster > 1 and self.races is not None:
            was, still = (each.reshape(self.lanes.blocks, -1).any(axis=1) for each in (before, self.alive))
            for block in np.flatnonzero(was & ~still).tolist():
                self.races.leave(block, self.program.kernel.instructions[-1].line)
        self.parked[:] = False
        self._release()

    def _operand(self, operand: str) -> Any:
        """Read a 32-bit operand of a control transfer, ``[lanes]``."""
        if operand in self.program.layout.rows:
            return self.u[self.program.layout.rows[operand][1]]
        return np.full(self.lanes.count, integer(operand) & 0xFFFFFFFF, np.uint32)

    def _arrive(self, control: Instruction, chosen: Any) -> None:
        """Bring lanes to a barrier."""
        operands = list(control.operands)
        if "red" in control.parts:
            condition = operands.pop()
            row = self.p[self.program.layout.rows[condition.lstrip("!")][1]]
            np.copyto(self.barriers.condition, ~row if condition.startswith("!") else row, where=chosen)
            operands.pop(0)
        number = self._operand(operands[0])
        if chosen.any() and int(number[chosen].max()) >= BARRIERS:
            lane = int(np.argmax(chosen & (number >= BARRIERS)))
            message = f"barrier {number[lane]} does not exist: a block has {BARRIERS}"
            raise self.lanes.stop("deadlock", message, control.line, lane)
        expected = self._operand(operands[1] if len(operands) > 1 else "0")
        if "arrive" in control.parts:
            self.barriers.arrive(chosen, number, expected)
        else:
            self.barriers.wait(chosen, number, expected)
        self._release()

    def _meet(self, control: Instruction, chosen: Any) -> None:
        """Bring lanes to the barrier of their cluster, or let them wait there."""
        if "arrive" in control.parts:
            wrong = self.barriers.arrive_at_cluster(chosen, "relaxed" in control.parts)
            why = "did not wait since it arrived"
            if self.races is not None:
                self.races.arrive(np.unique(self.lanes.block[chosen]))
        else:
            wrong, why = self.barriers.wait_for_cluster(chosen), "did not arrive"
        if wrong.any():
            message = f"{control.opcode} by a thread that {why}"
            raise self.lanes.stop("deadlock", message, control.line, int(np.argmax(wrong)))
        self._release()

    def _release(self) -> None:
        """Release the lanes whose barrier is complete."""
        for blocks, releases in self.barriers.complete_clusters(self.alive):
            if self.mbarriers is not None:
                self.mbarriers.new.reshape(self.lanes.blocks, -1)[blocks] = False
            if self.races is not None:
                self.races.cluster_barrier(blocks, releases)
        for block, at, whole in self.barriers.complete(self.alive):
            part = slice(block * self.lanes.stride, (block + 1) * self.lanes.stride)
            places = self.place[part][at]
            if whole and not (places == places[0]).all():
                stop = self._divergent(part.start, at, places)
                if not self._warps_agree(part, at):
                    raise stop
                self.notes.add(stop)
            self._reduce(part, at, places)
            if self.races is not None:
                self.races.barrier(block)

    def _warps_agree(self, part: slice, at: Any) -> bool:
        """Return whether each warp waits as a whole, and all alike: for the hardware that is one barrier."""
        place = np.where(at, self.place[part], -1).reshape(-1, WARP)
        first = place.max(axis=1, keepdims=True)
        waits = {self._barrier_before(int(each)).parts for each in first.flat if each >= 0}
        return bool(((place == first) | (place < 0)).all()) and len(waits) == 1

    def _reduce(self, part: slice, at: Any, places: Any) -> None:
        """Write the reduction over all lanes of a reducing barrier to each of them."""
        brought = self.barriers.condition[part][at]
        for place in np.unique(places).tolist():
            control = self._barrier_before(place)
            if "red" not in control.parts:
                continue
            here = at & (self.place[part] == place)
            bits, row = self.program.layout.rows[control.operands[0]]
            if bits == 1:
                self.p[row][part][here] = brought.all() if "and" in control.parts else brought.any()
            else:
                self.u[row][part][here] = np.count_nonzero(brought)

    def _barrier_before(self, place: int) -> Instruction:
        control = self.program.blocks[place - 1].control
        assert control is not None
        return control

    def _divergent(self, first: int, at: Any, places: Any) -> SimulationFault:
        found, members = np.unique(places, return_counts=True)
        rare = int(np.argmin(members))
        lane = first + int(np.flatnonzero(at)[np.argmax(places == found[rare])])
        lines = [self._barrier_before(int(place)).line for place in found]
        many = ", ".join(f"{count} at line {line}" for count, line in zip(members, lines, strict=True))
        message = f"the threads of the block wait at different barriers ({many})"
        return self.lanes.stop("divergent-barrier", message, lines[rare], lane)

    def _warps_complete(self, number: int, members: str, mask: Any) -> Any:
        """Return the lanes whose warps have every lane that a warp-wide instruction names, ``[lanes]`` bool.

        With several warps, all living ones among as many, counted from the block's first, must be there.
        Lanes that have ended need not come, unless they ran on behind the instruction first.
        """
        warps = self.program.blocks[number].warps
        named = self._operand(members).reshape(-1, WARP)
        bits = np.uint32(1) << np.arange(WARP, dtype=np.uint32)
        here = mask.reshape(-1, WARP)
        wanted = np.bitwise_or.reduce(np.where(here, named, np.uint32(0)), axis=1)
        absent = ((wanted[:, None] & bits) != 0) & ~here & self.lanes.exists.reshape(-1, WARP)
        incomplete = (absent & self.alive.reshape(-1, WARP)).any(axis=1)
        gone = absent & ~incomplete[:, None]
        if gone.any():
            self._note_missing(number, gone.reshape(-1))
        self.passed &= np.repeat(incomplete | ~here.any(axis=1), WARP)
        if warps > 1:
            elsewhere = self.alive.reshape(-1, WARP).any(axis=1) & ~here.any(axis=1)
            per_block = self.lanes.stride // WARP
            warp = np.arange(len(here))
            group = warp // per_block * per_block + warp % per_block // warps
            incomplete = np.isin(group, group[incomplete | elsewhere])
        return np.repeat(~incomplete, WARP)

    def _note_missing(self, number: int, gone: Any) -> None:
        """Report lanes that ended without a warp-wide instruction that names them."""
        passed = gone & self.passed
        lane = int(np.argmax(passed if passed.any() else gone))
        x = self.program.kernel.instructions[self.program.blocks[number].start]
        how = "went past it" if passed.any() else "ended without it: CUDA asks that it had ended before"
        stop = self.lanes.stop("divergent-warp", f"{x.opcode} names this thread, which {how}", x.line, lane)
        if passed.any():
            raise stop
        self.notes.add(stop)

    def shuffle(
        self, mode: str, value: Any, lane: Any, clamp: Any, members: Any, mask: Any
    ) -> tuple[Any, Any]:
        """Execute shfl.sync: return the values it brings, from lanes that may not have ended, and which."""
        source, valid = warp.shuffle(mode, self.lanes, lane, clamp)
        if not self.alive.all():
            ended = self.lanes.exists[source] & ~self.alive[source] & (self.alive if mask is None else mask)
            ended &= members >> self.lanes.in_warp[source].astype(np.uint32) & np.uint32(1) != 0
            if ended.any():
                lane = int(np.argmax(ended))
                x = self.program.kernel.instructions[self.program.blocks[self._at].start]
                message = f"{x.opcode} reads lane {source[lane] % WARP} of its warp, which has ended"
                raise self.lanes.stop("divergent-warp", message, x.line, lane)
        return np.broadcast_to(value, (self.lanes.count,))[source], valid

    def _stuck(self) -> SimulationFault:
        """Return the fault that names the barrier or warp-wide instruction at which no lane can go on."""
        parked = self.parked & self.alive
        if parked.any():
            lane = int(np.argmax(parked))
            x = self.program.kernel.instructions[self.program.blocks[int(self.place[lane])].start]
            message = f"{x.opcode} waits for lanes of its warp that never get there"
            return self.lanes.stop("divergent-warp", message, x.line, lane)
        first = int(np.argmax(self.alive)) // self.lanes.stride * self.lanes.stride
        part = slice(first, first + self.lanes.stride)
        at = self.alive[part]
        places = self.place[part][at]
        if not (places == places[0]).all():
            return self._divergent(first, at, places)
        lane = first + int(np.argmax(at))
        line = self._barrier_before(int(self.place[lane])).line
        return self.lanes.stop("deadlock", "a barrier waits for more threads than ever arrive", line, lane)

    def _count_step(self, number: int, mask: Any) -> None:
        self.steps += 1
        self._at = number
        if self.steps > self.max_steps:
            lane = 0 if mask is None else int(np.argmax(mask))
            message = (
                f"the kernel did not end within {self.max_steps} basic blocks: raise max_steps if it would"
            )
            raise self.lanes.stop("endless-loop", message, self.program.line_of(number), lane)
        if self.steps % _STEPS_PER_LOOK == 0:
            self._look_at_clock(number)
        if self.tally is not None:
            warps, threads = self.lanes.count // WARP, self.lanes.count
            if mask is not None:
                warps = int(np.count_nonzero(mask.reshape(-1, WARP).any(axis=1)))
                threads = int(np.count_nonzero(mask))
            self.tally.add_block(number, warps, threads)

    def _look_at_clock(self, number: int) -> None:
        """Stop a launch that has used up its time at a basic block."""
        if time.thread_time() > self._deadline:
            done, blocks = self.lanes.first_block, math.prod(self.grid)
            message = (
                f"the kernel did not end within {self.max_seconds:g} s of CPU time, with {done} of {blocks} "
                "blocks done: raise max_seconds, or launch less"
            )
            raise self.lanes.stop("time-limit", message, self.program.line_of(number), 0)
