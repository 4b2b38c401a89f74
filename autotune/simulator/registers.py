"""Turns the register counts of a kernel into rows over all lanes, seen as every type that fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


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
        """Make zeroed registers.

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


def _rows(bank: Any, *kinds: str) -> tuple[list[Any], ...]:
    return tuple(list(bank.view(kind)) for kind in kinds)
