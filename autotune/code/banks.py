"""Register reads of a loop's FFMAs: how many wait for a bank, and how many issue per clock at most.

The registers of a scheduler lie in two banks, even and odd numbers, each read once per clock. An FFMA reads
up to three; an operand marked ``.reuse`` is kept for the same slot of the warp's next instruction, which does
not read it again. So FFMAs issue one per clock only while each needs at most one new operand of either bank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

BANKS = 2
QUEUED = 1  # reads of a bank that may be late before an FFMA waits
_REGISTER = re.compile(r"[-|~]*R(\d+)(\.reuse)?\|?")  # neither RZ, which is no register, nor uniform ones


@dataclass(frozen=True)
class BankReads:
    """What the FFMAs of a stretch of machine code read.

    Attributes:
        ffmas: Their number.
        others: Instructions beside them.
        reads: Registers that they read, without operands that were kept.
        waiting: FFMAs that wait for a bank.
        waited: Clocks that they wait together.
    """

    ffmas: int
    others: int
    reads: int
    waiting: int
    waited: int

    @property
    def per_ffma(self) -> float:
        """Registers that an FFMA reads."""
        return self.reads / self.ffmas

    @property
    def waiting_share(self) -> float:
        """Share of the FFMAs that wait for a bank, 0 to 1."""
        return self.waiting / self.ffmas

    @property
    def clocks(self) -> int:
        """Clocks of a scheduler: one for each instruction, and those waited."""
        return self.ffmas + self.others + self.waited

    @property
    def waited_share(self) -> float:
        """Share of the clocks in which an FFMA waits for a bank, 0 to 1."""
        return self.waited / self.clocks

    @property
    def ffmas_per_clock(self) -> float:
        """FFMAs that a scheduler issues per clock at most."""
        return self.ffmas / self.clocks


def bank_reads(code: Iterable[tuple[str, str]]) -> BankReads | None:
    """Count the register reads of the FFMAs, of one warp that issues alone; None where there is no FFMA.

    Late reads stay late while another instruction issues, which reads registers itself.

    Args:
        code: Opcode and operands of each instruction, as nvdisasm writes them: "FFMA", "R0,R1.reuse,R2,R0".
    """
    ffmas = others = reads = waiting = waited = 0
    late = [0] * BANKS
    kept: dict[int, str] = {}  # slot to the register that it keeps
    for opcode, operands in code:
        if opcode.split(".")[0] != "FFMA":
            others += 1
            kept = {}
            continue
        named = [_REGISTER.fullmatch(operand.strip()) for operand in operands.split(",")[1:]]
        slots = {slot: found for slot, found in enumerate(named) if found}
        fresh = {found[1] for slot, found in slots.items() if kept.get(slot) != found[1]}
        kept = {slot: found[1] for slot, found in slots.items() if found[2]}
        for bank in range(BANKS):
            late[bank] = max(0, late[bank] - 1 + sum(int(register) % BANKS == bank for register in fresh))
        wait = max(0, max(late) - QUEUED)
        late = [max(0, count - wait) for count in late]
        ffmas += 1
        reads += len(fresh)
        waiting += wait > 0
        waited += wait
    return BankReads(ffmas, others, reads, waiting, waited) if ffmas else None
