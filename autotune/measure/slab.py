"""The layout of one allocation whose named sections lie between guard zones, which show stray writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

ALIGNMENT = 256  # what CUDA gives an allocation of its own
GUARD_BYTES = 1 << 20
WORD_BYTES = 4


@dataclass(frozen=True)
class Span:
    """A stretch of memory.

    Attributes:
        name: What it is, for messages.
        begin: Offset of its first byte.
        end: Offset behind its last byte.
    """

    name: str
    begin: int
    end: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.end - self.begin

    @property
    def words(self) -> tuple[int, int]:
        """Begin and end in 32-bit words; offsets must be multiples of 4."""
        return self.begin // WORD_BYTES, self.end // WORD_BYTES


@dataclass(frozen=True)
class Slab:
    """Where everything lies in one allocation.

    Attributes:
        sections: In the order asked for, each aligned to `ALIGNMENT`.
        guards: The zones before, between and after the sections; sections and guards cover everything.
        total: Bytes.
    """

    sections: tuple[Span, ...]
    guards: tuple[Span, ...]
    total: int

    @classmethod
    def of(cls, sizes: Mapping[str, int], guard_bytes: int = GUARD_BYTES) -> Slab:
        """Place sections of the given sizes, in bytes and multiples of 4, ``guard_bytes`` or more apart.

        A guard begins directly behind its section, so that a write one element too far falls into it.
        """
        sections = []
        offset = guard_bytes
        for name, size in sizes.items():
            offset = -(-offset // ALIGNMENT) * ALIGNMENT
            sections.append(Span(name, offset, offset + size))
            offset += size + guard_bytes
        total = -(-offset // ALIGNMENT) * ALIGNMENT
        first, last = sections[0], sections[-1]
        guards = [Span(f"before {first.name}", 0, first.begin)]
        for left, right in pairwise(sections):
            guards.append(Span(f"between {left.name} and {right.name}", left.end, right.begin))
        guards.append(Span(f"after {last.name}", last.end, total))
        return cls(tuple(sections), tuple(guards), total)

    def __getitem__(self, name: str) -> Span:
        """Return a section by its name."""
        return next(section for section in self.sections if section.name == name)
