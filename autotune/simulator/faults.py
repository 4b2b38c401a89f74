"""What a kernel did wrong, as a `Fault`: its kind, source line, block, thread and address."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autotune.errors import AutotuneError

FaultKind = Literal[
    "out-of-bounds",
    "misaligned",
    "read-only",
    "shared-race",
    "global-race",
    "uninitialised-read",
    "async-copy",
    "async-product",
    "early-access",
    "early-exit",
    "divergent-barrier",
    "divergent-warp",
    "write-conflict",
    "endless-loop",
    "time-limit",
    "deadlock",
    "trap",
    "assertion",
]


@dataclass(frozen=True)
class Fault:
    """One thing a kernel did that no CUDA kernel may do.

    Attributes:
        kind: out-of-bounds (an access outside every array, or outside the block's shared or local memory),
            misaligned (an address that is no multiple of the access width), read-only (a store into
            memory that may not be written), shared-race (two threads touch one shared word, one of them
            writes, no barrier lies between), global-race (the same in global memory, where between blocks
            only a fence followed by an atomic operation orders), uninitialised-read (of shared memory, or
            of an argument marked as unwritten, where nothing wrote),
            async-copy (data of ``cp.async`` used before its wait, or before a barrier in another thread),
            async-product (operands of ``wgmma`` changed before its wait, or not fenced before it),
            early-access (a kernel that is launched while those before it run does not first wait for them),
            early-exit (a block of a cluster ends while others may still access its shared memory),
            divergent-barrier (the threads of a block wait at different barriers), divergent-warp (a warp
            operation waits for lanes that never arrive), write-conflict (two blocks store to one global
            address), endless-loop (the limit of steps was reached), time-limit (the limit of seconds was),
            deadlock, trap, assertion (an ``assert`` failed).
        message: One line in words, without the place.
        line: CUDA source line; None without line information.
        block: blockIdx (x, y, z).
        thread: threadIdx (x, y, z).
        address: Address in bytes; within the block's window for shared and local memory.
        where: "global", "shared" or "local" where an address is given.
    """

    kind: FaultKind
    message: str
    line: int | None
    block: tuple[int, int, int]
    thread: tuple[int, int, int]
    address: int | None = None
    where: str | None = None

    def __str__(self) -> str:
        place = f"line {self.line}, " if self.line is not None else ""
        address = f", {self.where} address {self.address:#x}" if self.address is not None else ""
        return f"{self.kind}: {self.message} ({place}block {self.block}, thread {self.thread}{address})"


class SimulationFault(AutotuneError):
    """A simulated kernel did something no CUDA kernel may do.

    Attributes:
        fault: What, and where.
    """

    def __init__(self, fault: Fault) -> None:
        super().__init__(str(fault))
        self.fault = fault


class UnsupportedPTX(AutotuneError):
    """The PTX text is malformed, or holds something that the simulator does not support; it never guesses.

    The message quotes the text, so it is cut at 250 characters and holds no control character.
    """

    def __init__(self, message: str) -> None:
        text = "".join(letter if letter.isprintable() else "?" for letter in message)
        super().__init__(text if len(text) <= 250 else f"{text[:247]}...")


class Notes:
    """What no fault is, though CUDA leaves it undefined; one for each kind and source line."""

    def __init__(self) -> None:
        self._found: dict[tuple[FaultKind, int | None], Fault] = {}

    def add(self, stop: SimulationFault) -> None:
        """Keep what would have stopped the kernel."""
        self._found.setdefault((stop.fault.kind, stop.fault.line), stop.fault)

    def all(self) -> tuple[Fault, ...]:
        """Return them in the order in which they were found."""
        return tuple(self._found.values())
