"""Global memory of a simulated GPU: every array in an address window of its own, every access checked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autotune.errors import UsageError
from autotune.simulator.emitter import Access
from autotune.simulator.lanes import Lanes
from autotune.simulator.ptx import Kernel

REGION_BITS = (
    40  # every array gets a window of 1 TiB of its own, so that no stray pointer meets another array
)
STAGGER_BITS = (
    26  # arrays begin at uneven places of their windows: no round distance leads from one to another
)
ALLOCATION_ALIGN = 256  # what cudaMalloc guarantees
WIDE = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}  # one element per lane


@dataclass
class Region:
    """One array (or several overlapping ones) in global memory.

    Attributes:
        name: For messages, such as "argument 1".
        base: Address of the first byte.
        data: The bytes, ``[size]`` uint8, sharing memory with the array.
        writable: Whether stores are allowed.
        tracked: Whether races in it are looked for.
        unwritten: Whether nothing has written it before the launch.
        shadow: What is remembered of each unit, see `orders`.
    """

    name: str
    base: int
    data: Any
    writable: bool
    tracked: bool = False
    unwritten: bool = False
    shadow: Any = None
    views: dict[Any, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.data)

    def view(self, dtype: Any) -> Any:
        """See the bytes as elements; a last incomplete element is left out."""
        found = self.views.get(dtype)
        if found is None:
            width = np.dtype(dtype).itemsize
            found = self.views[dtype] = self.data[: self.size // width * width].view(dtype)
        return found


class GlobalMemory:
    """All arrays of one launch, and the kernel's own global and constant variables.

    Args:
        kernel: Its variables.
        arrays: Position, name and array of each array argument.
        stored: Parameters and variables that the kernel may store to; None for all.
        unwritten: Positions of arguments that nothing has written.

    Attributes:
        pointers: Address of each array argument by its position.
        variables: Address of each variable of the PTX text.
    """

    def __init__(
        self,
        kernel: Kernel,
        arrays: Sequence[tuple[int, str, Any]],
        stored: frozenset[str] | None = None,
        unwritten: Collection[int] = (),
    ) -> None:
        self.regions: dict[int, Region] = {}
        self.pointers: dict[int, int] = {}
        self.variables: dict[str, Any] = {}
        for group in _overlapping(arrays):
            region = self._add_group(group)
            positions = [position for position, _, _ in group]
            region.unwritten = all(position in unwritten for position in positions)
            names = {kernel.parameters[position].name for position in positions}
            region.tracked = region.unwritten or stored is None or not names.isdisjoint(stored)
        for name, symbol in kernel.symbols.items():
            if symbol.space in ("global", "const"):
                data = np.zeros(symbol.size, np.uint8)
                data[: len(symbol.initial)] = np.frombuffer(symbol.initial, np.uint8)
                region = self._add(f"variable {name}", data, 0, symbol.space == "global")
                region.tracked = region.writable and (stored is None or name in stored)
                self.variables[name] = np.uint64(region.base)
        for name, symbol in kernel.symbols.items():
            for place, target in symbol.references:
                if target in self.variables:
                    region = self.region_of(name)
                    region.data[place : place + 8] = np.frombuffer(self.variables[target].tobytes(), np.uint8)

    def _add(self, name: str, data: Any, low: int, writable: bool) -> Region:
        number = len(self.regions) + 1
        place = number * 2654435761 % 4096 << STAGGER_BITS  # Knuth's multiplicative hash
        region = Region(name, (number << REGION_BITS) + place + low, data, writable)
        self.regions[number] = region
        return region

    def _add_group(self, group: list[tuple[int, str, Any]]) -> Region:
        start = min(_start(array) for _, _, array in group)
        stop = max(_start(array) + array.nbytes for _, _, array in group)
        owner = _owner(group[0][2])
        inside = start - _start(owner)
        if len(group) == 1:
            data = group[0][2].reshape(-1).view(np.uint8)
        elif owner.flags.c_contiguous:
            data = owner.reshape(-1).view(np.uint8)[inside : inside + stop - start]
        else:
            names = " and ".join(name for _, name, _ in group)
            raise UsageError(
                f"{names} overlap in an array that is not contiguous: pass views of a contiguous one"
            )
        writable = all(array.flags.writeable for _, _, array in group)
        name = " and ".join(name for _, name, _ in group)
        region = self._add(name, data, inside % ALLOCATION_ALIGN, writable)
        for position, _, array in group:
            self.pointers[position] = region.base + _start(array) - start
        return region

    def region_of(self, variable: str) -> Region:
        """Return the memory of a variable."""
        return self.regions[int(self.variables[variable]) >> REGION_BITS]

    def peek(self, address: int, size: int) -> bytes:
        """Return up to `size` bytes from an address on; none where there is no array."""
        region = self.regions.get(address >> REGION_BITS)
        start = -1 if region is None else address - region.base
        return bytes(region.data[start : start + size]) if region is not None and start >= 0 else b""

    def locate(
        self, access: Access, address: Any, lanes: Any, geometry: Lanes
    ) -> list[tuple[Region, Any, Any]]:
        """Check an access and split it by region.

        Args:
            access: The instruction.
            address: Address of each active lane without the constant offset, ``[active]`` uint64, not empty.
            lanes: The active lanes, None for all.
            geometry: For the place of a fault.

        Returns:
            (region, byte offsets ``[part]`` int64, positions of that part in ``address`` or None for all).
        """
        first = int(address[0]) + access.offset
        region = self.regions.get(first >> REGION_BITS)
        if region is not None:
            offsets = address - np.uint64((region.base - access.offset) % 2**64)
            if int(offsets.max()) + access.size <= region.size:
                self._check_alignment(access, region, offsets, lanes, geometry)
                return [(region, offsets.view(np.int64), None)]
        absolute = address + np.uint64(access.offset % 2**64)
        numbers = absolute >> np.uint64(REGION_BITS)
        parts = []
        for number in np.unique(numbers):
            chosen = np.flatnonzero(numbers == number)
            who = chosen if lanes is None else lanes[chosen]
            region = self.regions.get(int(number))
            base, size = (region.base, region.size) if region is not None else (0, 0)
            offsets = absolute[chosen] - np.uint64(base)
            bad = (offsets > np.uint64(size)) | (offsets + np.uint64(access.size) > np.uint64(size))
            if region is None or bad.any():
                at = int(np.argmax(bad))
                place = int(absolute[chosen[at]])
                why = f"of {access.size} bytes {self._nearest(place)}"
                raise geometry.refuse(access, "out-of-bounds", why, int(who[at]), place, "global")
            self._check_alignment(access, region, offsets, who, geometry)
            parts.append((region, offsets.view(np.int64), chosen))
        return parts

    def _check_alignment(
        self, access: Access, region: Region, offsets: Any, lanes: Any, geometry: Lanes
    ) -> None:
        size = access.size
        low = region.base % size
        if low:
            offsets = offsets + np.uint64(low)
        if int(np.bitwise_or.reduce(offsets)) & (size - 1):
            where = int(np.argmax(offsets % np.uint64(size) != 0))
            address = int(offsets[where]) + region.base - low
            byte, lane = address - region.base, where if lanes is None else int(lanes[where])
            why = f"of {size} bytes in {region.name} at byte {byte}, an address that is no multiple of {size}"
            raise geometry.refuse(access, "misaligned", why, lane, address, "global")

    def _nearest(self, address: int) -> str:
        for shift in (0, 1):  # an address just below an array lies in the window before it
            region = self.regions.get((address >> REGION_BITS) + shift)
            if region is None or (shift and region.base - address > 1 << (REGION_BITS - 1)):
                continue
            offset = address - region.base
            if shift == 0 and offset > 1 << (REGION_BITS - 1):
                continue
            return f"at byte {offset} of {region.name}, which has {region.size}"
        return "far from every array"


def gather(view_of: Callable[[Any], Any], access: Access, offsets: Any, aligned: bool) -> Any:
    """Read each lane's elements: ``[lanes]`` for one element, ``[lanes, count]`` for a vector.

    Args:
        view_of: Returns the memory as elements of a type.
        access: The instruction.
        offsets: Byte offsets ``[lanes]`` int64, in bounds.
        aligned: Whether the memory's first byte lies at a multiple of the access size.
    """
    size, count = access.size, access.count
    if not aligned:
        octets = view_of(np.uint8)[offsets[:, None] + np.arange(size)]
        values = octets.view(access.dtype)
        return values if count > 1 else values[:, 0]
    if count == 1:
        return view_of(access.dtype).take(offsets // size, mode="clip")
    if size > 16:
        index = (offsets // 16)[:, None] + np.arange(size // 16)
        return view_of(np.complex128).take(index, mode="clip").view(access.dtype)
    return view_of(WIDE[size]).take(offsets // size, mode="clip").view(access.dtype).reshape(-1, count)


def scatter(view_of: Callable[[Any], Any], access: Access, offsets: Any, values: Any, aligned: bool) -> None:
    """Write each lane's elements, the counterpart of `gather`; of equal addresses the last lane wins."""
    size, count = access.size, access.count
    if not aligned:
        octets = np.ascontiguousarray(values).reshape(len(offsets), -1).view(np.uint8)
        view_of(np.uint8)[offsets[:, None] + np.arange(size)] = octets
    elif count == 1:
        view_of(access.dtype)[offsets // size] = values
    else:
        width = min(size, 16)
        index = (
            offsets // width
            if size == width
            else ((offsets // 16)[:, None] + np.arange(size // 16)).reshape(-1)
        )
        view_of(WIDE[width])[index] = np.ascontiguousarray(values).reshape(-1).view(WIDE[width])


def _start(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def _owner(array: Any) -> Any:
    """Return the array at the bottom of a chain of views."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _overlapping(arrays: Sequence[tuple[int, str, Any]]) -> list[list[tuple[int, str, Any]]]:
    """Group array arguments that share bytes."""
    groups: list[list[tuple[int, str, Any]]] = []
    end = -1
    for item in sorted(arrays, key=lambda item: _start(item[2])):
        start, size = _start(item[2]), item[2].nbytes
        if groups and size and start < end:
            groups[-1].append(item)
        else:
            groups.append([item])
        end = max(end, start + size) if size else end
    return groups
