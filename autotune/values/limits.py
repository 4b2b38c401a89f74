"""What the type of a field cannot state: its limits, in its annotation, and mappings that cannot change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, TypeVar

V = TypeVar("V")


@dataclass(frozen=True)
class Limit:
    """Limits of one field, checked where a file is read; used as ``Annotated[float, Limit(above=0)]``.

    Attributes:
        least: Smallest value allowed.
        above: The value must be greater than this.
        pattern: Regular expression that the whole string matches.
        decimals: Decimals to write, or four significant digits where those are more.
            Without it a float is written with six significant digits.
        omitted: The key is left out of a file where the value is the default.
    """

    least: float | None = None
    above: float | None = None
    pattern: str | None = None
    decimals: int | None = None
    omitted: bool = False


class ReadOnly(Mapping[str, V]):
    """A mapping that cannot be changed: hashable, picklable, equal to a dict with the same items."""

    def __init__(self, items: Mapping[str, V]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> V:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


Count = Annotated[int, Limit(least=0)]
Size = Annotated[int, Limit(least=1)]
Milliseconds = Annotated[float, Limit(above=0)]
Quantiles = tuple[Milliseconds, Milliseconds, Milliseconds]
Name = Annotated[str, Limit(pattern=r"[A-Za-z0-9_][A-Za-z0-9._-]*")]
Scalar = bool | int | float | str | None
