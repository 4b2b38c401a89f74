"""The instruction mix of a kernel's main loop, read from its machine code by nvdisasm."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from autotune.code.banks import BankReads, bank_reads
from autotune.errors import ToolchainError

INSTRUCTION_BYTES = 16  # since Volta
MULTIPLIES = ("FFMA", "HMMA", "HGMMA")  # the instructions that a main loop exists for
_LEAST_SHARE = (
    0.25  # of a kernel's multiplies that its main loop has; the others are peeled off, or follow it
)
_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Loop:
    """A stretch of machine code: the main loop of a kernel, or all of it where there is no loop.

    Attributes:
        opcodes: Opcode without modifiers (FFMA, LDS, LDGSTS) to its number of instructions.
        first: Index of its first instruction.
        total: Instructions of the whole kernel.
        banks: Register reads of its FFMAs; None where there is none.
    """

    opcodes: Mapping[str, int]
    first: int
    total: int
    banks: BankReads | None

    @property
    def instructions(self) -> int:
        """Instructions of one iteration."""
        return sum(self.opcodes.values())

    @property
    def code_bytes(self) -> int:
        """Size of the loop."""
        return self.instructions * INSTRUCTION_BYTES

    @property
    def multiply(self) -> str:
        """The opcode that multiplies: of `MULTIPLIES` the one that occurs most; FFMA where none does."""
        return max(MULTIPLIES, key=lambda opcode: self.opcodes.get(opcode, 0))

    def share(self, opcode: str) -> float:
        """Share of one opcode among the instructions, 0 to 1."""
        return self.opcodes.get(opcode, 0) / max(self.instructions, 1)

    def ratio(self, opcode: str, per: str | None = None) -> float:
        """Instructions of one opcode for each of another, `multiply`; infinite where there is none of it."""
        per = self.multiply if per is None else per
        return self.opcodes.get(opcode, 0) / self.opcodes[per] if self.opcodes.get(per) else float("inf")


def main_loop(cubin: bytes, entry: str) -> Loop:
    """Return the loop with the most `MULTIPLIES`: what one of its iterations executes.

    Of a loop over tiles it is the loop within that has more than half of them. Where no loop has a quarter of
    the kernel's, it is the whole kernel.
    Predicated-off padding (``@!PT``) counts: it takes an issue slot like any other instruction.

    Raises:
        ToolchainError: There is no nvdisasm, or it does not read the machine code.
    """
    code = _disassembled(cubin, entry)
    opcodes = [instruction["opcode"].split(".")[0] for instruction in code]
    multiplies = [0]
    for opcode in opcodes:
        multiplies.append(multiplies[-1] + (opcode in MULTIPLIES))
    loops = []
    for index, instruction in enumerate(code):
        target = instruction.get("operands", "").split(",")[-1].strip()
        if opcodes[index] == "BRA" and target.startswith("0x"):
            first = int(target, 16) // INSTRUCTION_BYTES
            if first < index:  # not the endless branch behind every kernel, which jumps to itself
                loops.append((first, index + 1))

    def weight(loop: tuple[int, int]) -> tuple[int, int]:
        return multiplies[loop[1]] - multiplies[loop[0]], loop[0] - loop[1]

    whole = (0, len(code))
    best = max(loops, key=weight, default=whole)
    if _LEAST_SHARE * multiplies[-1] > weight(best)[0]:
        best = whole  # the loop that multiplies is unrolled whole, and this one adds up sums
    while within := [
        (first, end)
        for first, end in loops
        if best[0] <= first
        and end <= best[1]
        and best != (first, end)
        and 2 * weight((first, end))[0] > weight(best)[0]
    ]:
        best = max(within, key=weight)
    first, end = best
    banks = bank_reads((each["opcode"], each.get("operands", "")) for each in code[first:end])
    return Loop(dict(Counter(opcodes[first:end]).most_common()), first, len(code), banks)


def _disassembled(cubin: bytes, entry: str) -> list[dict[str, Any]]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [nvdisasm(), "-json", file.name], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    try:
        functions = json.loads(done.stdout)[1]
        return next(f["sass-instructions"] for f in functions if f["function-name"] == entry)
    except (ValueError, LookupError, TypeError, StopIteration):
        said = (done.stderr or done.stdout).strip().splitlines()[:1]
        raise ToolchainError(f"nvdisasm does not read the machine code of {entry}: {said}") from None


@cache
def nvdisasm() -> str:
    """Return the path of nvdisasm: of the wheel beside this package, on the PATH, or of a CUDA toolkit.

    Raises:
        ToolchainError: There is none.
    """
    for folder in map(Path, filter(None, sys.path)):
        for place in ("nvidia/cu13/bin", "nvidia/cuda_nvdisasm/bin"):
            if os.access(folder / place / "nvdisasm", os.X_OK):
                return str(folder / place / "nvdisasm")
    found = shutil.which("nvdisasm") or shutil.which("nvdisasm", path="/usr/local/cuda/bin")
    if found is None:
        raise ToolchainError("nvdisasm is not installed: pip install nvidia-cuda-nvdisasm")
    return found
