"""Checks a caller's launch and arguments, and places them in parameters and global memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from autotune.errors import UsageError
from autotune.simulator.emitter import DTYPES
from autotune.simulator.lanes import Extent
from autotune.simulator.memory import GlobalMemory
from autotune.simulator.ptx import Kernel, Parameter

if TYPE_CHECKING:
    from numpy.typing import NDArray


def check_launch(kernel: Kernel, grid: Extent, block: Extent, shared_bytes: int) -> None:
    """Refuse a launch that no GPU would start.

    Raises:
        UsageError: An extent is not positive, or the block has more threads than the kernel allows.
    """
    for name, extents in (("grid", grid), ("block", block)):
        if not isinstance(extents, Sequence) or len(extents) != 3 or min(extents) < 1:
            raise UsageError(f"{name} {extents} is no launch: give three extents of at least 1")
    threads = block[0] * block[1] * block[2]
    limit = kernel.max_threads or 1024
    if threads > limit:
        raise UsageError(f"block {tuple(block)} has {threads} threads; kernel {kernel.name} allows {limit}")
    if shared_bytes < 0:
        raise UsageError(f"shared_bytes = {shared_bytes} is negative")


def place_arguments(
    kernel: Kernel, args: Sequence[NDArray[Any] | int | float | np.generic], unit: int
) -> tuple[GlobalMemory, dict[str, bytes]]:
    """Assign an address to every array and bytes to every parameter.

    Args:
        kernel: Its parameters decide the types.
        args: One per parameter.
        unit: Bytes of the smallest store to global memory.

    Returns:
        (global memory, parameter name to bytes).

    Raises:
        UsageError: An argument does not fit its parameter, or the number of arguments is wrong.
    """
    if len(args) != len(kernel.parameters):
        raise UsageError(
            f"kernel {kernel.name} takes {len(kernel.parameters)} arguments; {len(args)} were given"
        )
    arrays = []
    for position, (parameter, value) in enumerate(zip(kernel.parameters, args, strict=True)):
        if isinstance(value, np.ndarray):
            _check_array(position, parameter, value)
            arrays.append((position, f"argument {position + 1}", value))
    memory = GlobalMemory(kernel, arrays, unit)
    parameters = {
        parameter.name: np.uint64(memory.pointers[position]).tobytes()
        if position in memory.pointers
        else _encode(position, parameter, args[position])
        for position, parameter in enumerate(kernel.parameters)
    }
    return memory, parameters


def _check_array(position: int, parameter: Parameter, value: NDArray[Any]) -> None:
    where = f"argument {position + 1} ({parameter.name})"
    if parameter.type not in ("u64", "b64", "s64"):
        raise UsageError(f"{where} is a {parameter.type}, not a pointer: give a number, not an array")
    if not value.flags.c_contiguous:
        raise UsageError(f"{where}: the array is not C-contiguous; pass numpy.ascontiguousarray of it")
    if value.dtype.hasobject:
        raise UsageError(f"{where}: an array of Python objects has no bytes for a kernel")


def _encode(position: int, parameter: Parameter, value: Any) -> bytes:
    """Convert a scalar argument to the bytes of its parameter."""
    where = f"argument {position + 1} ({parameter.name})"
    if isinstance(value, (bytes, np.void)):
        raw = bytes(value) if isinstance(value, bytes) else bytes(value.tobytes())
        if len(raw) != parameter.size:
            raise UsageError(f"{where} has {parameter.size} bytes; {len(raw)} were given")
        return raw
    dtype = np.dtype(DTYPES[parameter.type])
    if parameter.size != dtype.itemsize:
        raise UsageError(
            f"{where} is a struct of {parameter.size} bytes: give bytes or a NumPy structured scalar"
        )
    if isinstance(value, np.generic) and value.dtype.itemsize != dtype.itemsize:
        raise UsageError(f"{where} is a {parameter.type} of {dtype.itemsize} bytes; {value.dtype} was given")
    if not isinstance(value, (int, float, np.number, np.bool_)):
        raise UsageError(
            f"{where} is a {parameter.type}: give a number or an array, not {type(value).__name__}"
        )
    if dtype.kind == "f":
        return bytes(dtype.type(value).tobytes())
    if isinstance(value, (float, np.floating)):
        raise UsageError(f"{where} is a {parameter.type}: give an integer, not {value!r}")
    number = int(value)
    bits = dtype.itemsize * 8
    if not -(1 << (bits - 1)) <= number < 1 << bits:
        raise UsageError(f"{where} is a {parameter.type}: {number} does not fit into {bits} bits")
    return int(number % (1 << bits)).to_bytes(int(dtype.itemsize), "little")
