"""Executes what a kernel says to its user: printf and assert."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from autotune.simulator.emitter import LOCAL_WINDOW
from autotune.simulator.load_store import LoadStore

MOST_OUTPUT = 1 << 20  # characters of one launch
_LONGEST = 1 << 12  # characters of one text
_CONVERSION = re.compile(r"%([-+ #0]*)(\*|\d*)(?:\.(\*|\d*))?(hh|h|ll|l|j|z|t|L)?([diouxXcsfFeEgGaAp%])")


class Printing(LoadStore):
    """What the generated code calls for printf and a failed assert.

    Attributes:
        output: Everything printed so far.
    """

    output: str = ""

    def printf(self, template: int, arguments: int, mask: Any) -> None:
        """Execute printf; its two parameters lie at bytes of each thread's stack."""
        for lane in np.flatnonzero(self.lanes.exists if mask is None else mask).tolist():
            if len(self.output) >= MOST_OUTPUT:
                break
            text = self._text(self._pointer(template, lane), lane)
            line = "".join(self._formatted(text, self._pointer(arguments, lane), lane))
            self.output = (self.output + line)[:MOST_OUTPUT]

    def fail_assertion(self, condition: int, line: int, mask: Any) -> None:
        """Execute __assertfail."""
        lanes = np.flatnonzero(self.lanes.exists if mask is None else mask)
        if len(lanes):
            text = self._text(self._pointer(condition, int(lanes[0])), int(lanes[0]))
            raise self.lanes.stop("assertion", f"assert({text}) failed", line, int(lanes[0]))

    def _pointer(self, offset: int, lane: int) -> int:
        start = lane * self._local_stride + offset
        return int.from_bytes(self._local[start : start + 8].tobytes(), "little")

    def _bytes(self, address: int, size: int, lane: int) -> bytes:
        if address >> 56 != LOCAL_WINDOW >> 56:
            return self.memory.peek(address, size)
        start = address - LOCAL_WINDOW
        end = min(start + size, self.local_bytes)
        base = lane * self._local_stride
        return bytes(self._local[base + start : base + end])

    def _text(self, address: int, lane: int) -> str:
        return self._bytes(address, _LONGEST, lane).partition(b"\0")[0].decode(errors="replace")

    def _formatted(self, template: str, place: int, lane: int) -> Iterator[str]:
        """Yield the pieces of a text; each argument lies at a multiple of its size."""

        def argument(size: int, signed: bool = False) -> int:
            nonlocal place
            place = -(-place // size) * size + size
            return int.from_bytes(self._bytes(place - size, size, lane), "little", signed=signed)

        end = 0
        for found in _CONVERSION.finditer(template):
            yield template[end : found.start()]
            end = found.end()
            flags, width, precision, length, kind = found.groups()
            if kind == "%":
                yield "%"
                continue
            size = 8 if length in ("l", "ll", "j", "z", "t") or kind in "spfFeEgGaA" else 4
            width, precision = (
                str(argument(4, True)) if each == "*" else each for each in (width, precision)
            )
            form = f"%{flags}{width}" + (f".{precision}" if precision is not None else "")
            number = argument(size, kind in "di")
            if kind == "s":
                yield f"{form}s" % self._text(number, lane)
            elif kind == "c":
                yield f"{form}c" % chr(number & 0xFF)
            elif kind == "p":
                yield f"{form}s" % hex(number)
            elif kind in "diouxX":
                bits = {"hh": 8, "h": 16}.get(length or "", 8 * size)
                number &= (1 << bits) - 1
                signed = number - (1 << bits) if kind in "di" and number >> (bits - 1) else number
                yield f"{form}{'d' if kind == 'u' else kind}" % signed
            else:
                value = np.uint64(number).view(np.float64).item()
                yield f"{form}s" % value.hex() if kind in "aA" else f"{form}{kind}" % value
        yield template[end:]
