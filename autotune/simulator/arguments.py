"""Checks a caller's launch and arguments, and places them in parameters and global memory."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from autotune.errors import UsageError
from autotune.simulator.emitter import DTYPES
from autotune.simulator.faults import UnsupportedPTX
from autotune.simulator.lanes import Extent
from autotune.simulator.memory import GlobalMemory
from autotune.simulator.ptx import MAX_ARRAY_BYTES, Kernel, Parameter
from autotune.values.device import known_devices

if TYPE_CHECKING:
    from numpy.typing import NDArray


# Of every compute capability (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability").
MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_BLOCK = (1024, 1024, 64)
MAX_THREADS = 1024
MAX_CLUSTER = 16  # blocks; 8 unless the launch asks for more
MAX_STATIC_SHARED = 48 << 10


def launch_extents(grid: Any, block: Any) -> tuple[Extent, Extent]:
    """Return a grid and a block as three extents each; an integer is x, and what is left out is 1.

    Raises:
        UsageError: An extent is not an integer, is not positive, or is beyond CUDA's limit.
    """
    return _extents("grid", grid, MAX_GRID), _extents("block", block, MAX_BLOCK)


def _extents(name: str, given: Any, limits: Extent) -> Extent:
    try:
        values = [index(given)]
    except TypeError:
        try:
            values = [] if isinstance(given, (str, bytes)) else [index(value) for value in given]
        except TypeError:
            values = []
    if not 1 <= len(values) <= 3 or min(values) < 1:
        raise UsageError(f"{name} {given!r:.80} is no launch: give one to three integers of at least 1")
    x, y, z = (*values, 1, 1)[:3]
    for axis, extent, limit in zip("xyz", (x, y, z), limits, strict=True):
        if extent > limit:
            raise UsageError(f"{name} {(x, y, z)}: CUDA allows at most {limit} along {axis}")
    return x, y, z


def check_launch(kernel: Kernel, grid: Extent, block: Extent, shared_bytes: int) -> int:
    """Return the shared memory of one block, static and dynamic; refuse a launch that no GPU would start.

    Raises:
        UsageError: The block has too many threads or too much shared memory for the kernel or its GPU, or the
            grid does not consist of whole clusters.
        UnsupportedPTX: Clusters extend along y or z.
    """
    size, *across = kernel.cluster
    if across != [1, 1]:
        raise UnsupportedPTX(f"clusters of {kernel.cluster} blocks are not supported: only such along x")
    if size > MAX_CLUSTER or grid[0] % size:
        raise UsageError(
            f"grid {grid} does not consist of whole clusters of {size} blocks along x, at most {MAX_CLUSTER}"
        )
    threads = math.prod(block)
    limit = min(kernel.max_threads or MAX_THREADS, MAX_THREADS)
    if threads > limit:
        raise UsageError(f"block {block} has {threads} threads; kernel {kernel.name} allows {limit}")
    dynamic = whole("shared_bytes", shared_bytes, 0)
    if kernel.shared_bytes > MAX_STATIC_SHARED:
        raise UsageError(
            f"kernel {kernel.name} declares {kernel.shared_bytes} bytes of static shared memory; CUDA allows "
            f"{MAX_STATIC_SHARED}: declare it extern and pass shared_bytes"
        )
    total, most = kernel.shared_bytes + dynamic, _most_shared(kernel.capability)
    if total > most:
        gpu = "any GPU" if kernel.capability is None else f"sm_{kernel.capability}"
        raise UsageError(
            f"a block of kernel {kernel.name} needs {total} bytes of shared memory; {gpu} allows {most}"
        )
    return total


def whole(name: str, value: Any, least: int) -> int:
    """Return an argument that is an integer.

    Raises:
        UsageError: It is none, or less than allowed.
    """
    try:
        number = index(value)
    except TypeError:
        raise UsageError(f"{name} = {value!r:.80} is not an integer") from None
    if number < least:
        raise UsageError(f"{name} = {number} is less than {least}")
    return number


def _most_shared(capability: int | None) -> int:
    """Return the most shared memory of one block, bytes: of this compute capability, else of its major."""
    known = {device.capability: device.shared_per_block for device in known_devices().values()}
    if capability in known:
        return known[capability]
    major = [limit for number, limit in known.items() if capability and number // 10 == capability // 10]
    return max(major or known.values())


def place_arguments(
    kernel: Kernel,
    args: Sequence[NDArray[Any] | int | float | np.generic],
    stored: frozenset[str] | None,
    unwritten: Sequence[NDArray[Any]],
) -> tuple[GlobalMemory, dict[str, bytes]]:
    """Assign an address to every array and bytes to every parameter.

    Args:
        kernel: Its parameters decide the types.
        args: One per parameter.
        stored: Parameters and variables that the kernel may store to; None for all.
        unwritten: Those of the arrays that nothing has written.

    Returns:
        (global memory, parameter name to bytes).

    Raises:
        UsageError: An argument does not fit its parameter, or the number of arguments is wrong.
    """
    if not isinstance(args, (list, tuple)):
        raise UsageError(
            f"the arguments are of type {type(args).__name__}: give a list, one for each parameter"
        )
    if len(args) != len(kernel.parameters):
        raise UsageError(
            f"kernel {kernel.name} takes {len(kernel.parameters)} arguments; {len(args)} were given"
        )
    arrays = []
    for position, (parameter, value) in enumerate(zip(kernel.parameters, args, strict=True)):
        if isinstance(value, np.ndarray):
            _check_array(position, parameter, value)
            arrays.append((position, f"argument {position + 1}", value))
    marked = [position for position, _, array in arrays if any(array is each for each in unwritten)]
    if len(marked) < len(unwritten):
        raise UsageError("unwritten= has an array that is no argument: give the very arrays passed in args")
    memory = GlobalMemory(kernel, arrays, stored, marked)
    parameters = {
        parameter.name: np.uint64(memory.pointers[position]).tobytes()
        if position in memory.pointers
        else _encode(position, parameter, args[position])
        for position, parameter in enumerate(kernel.parameters)
    }
    return memory, parameters


def set_variables(kernel: Kernel, memory: GlobalMemory, values: Mapping[str, NDArray[Any]]) -> None:
    """Copy arrays to variables of the PTX, as cudaMemcpyToSymbol does.

    Raises:
        UsageError: There is no such variable, or it is smaller.
    """
    for name, value in values.items():
        form = _variable_name(name)
        found = [each for each in memory.variables if form.fullmatch(each)]
        if len(found) != 1:
            known = ", ".join(memory.variables) or "none"
            raise UsageError(f"constants: the kernel has no variable {name!r:.80}; it has {known:.200}")
        array = np.ascontiguousarray(value)
        size = kernel.symbols[found[0]].size
        if array.dtype.hasobject or array.nbytes > size:
            raise UsageError(f"constants: variable {name} has {size} bytes; {array.nbytes} were given")
        octets = array.reshape(-1).view(np.uint8)
        memory.region_of(found[0]).data[: len(octets)] = octets


def has_variable(ptx: str, name: str) -> bool:
    """Return whether a PTX text declares a variable that C++ calls by a name."""
    declared = re.findall(r"\.(?:const|global)\s[^;={]*?([\w$]+)\s*(?:\[\d*\])*\s*[;=]", ptx)
    return any(_variable_name(name).fullmatch(each) for each in declared)


def _variable_name(name: str) -> re.Pattern[str]:
    """Return what C++ makes of a name: as it is, or behind the lengths and names of its namespaces."""
    words = name.split("::")
    return re.compile(
        rf"{re.escape(name)}|_ZN?.*{''.join(f'{len(word)}{re.escape(word)}' for word in words)}E?"
    )


def _check_array(position: int, parameter: Parameter, value: NDArray[Any]) -> None:
    where = f"argument {position + 1} ({parameter.name})"
    if parameter.type not in ("u64", "b64", "s64"):
        raise UsageError(f"{where} is a {parameter.type}, not a pointer: give a number, not an array")
    if not value.flags.c_contiguous:
        raise UsageError(f"{where}: the array is not C-contiguous; pass numpy.ascontiguousarray of it")
    if value.nbytes > MAX_ARRAY_BYTES:
        raise UsageError(
            f"{where}: the array has {value.nbytes} bytes; the simulator allows {MAX_ARRAY_BYTES}"
        )
    if isinstance(value, np.ma.MaskedArray):
        raise UsageError(f"{where}: a kernel does not see the mask of a masked array; pass its .filled(...)")
    if not value.dtype.isnative:
        raise UsageError(f"{where}: {value.dtype} is not in this machine's byte order; pass a native dtype")
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
    if parameter.type not in DTYPES:
        raise UsageError(f"{where} is a {parameter.type}, which no argument can be")
    dtype = np.dtype(DTYPES[parameter.type])
    if parameter.size != dtype.itemsize:
        raise UsageError(
            f"{where} is a struct of {parameter.size} bytes: give bytes or a NumPy structured scalar"
        )
    if isinstance(value, np.generic) and value.dtype.itemsize != dtype.itemsize:
        raise UsageError(f"{where} is a {parameter.type} of {dtype.itemsize} bytes; {value.dtype} was given")
    if not isinstance(value, (int, float, np.number, np.bool_)) or isinstance(value, np.complexfloating):
        raise UsageError(
            f"{where} is a {parameter.type}: give a number or an array, not {type(value).__name__}"
        )
    if dtype.kind == "f":
        try:
            with np.errstate(over="ignore"):
                return bytes(dtype.type(value).tobytes())
        except OverflowError:
            raise UsageError(f"{where} is a {parameter.type}: the integer is too large for it") from None
    if isinstance(value, (float, np.floating)):
        raise UsageError(f"{where} is a {parameter.type}: give an integer, not {value!r}")
    number = int(value)
    bits = dtype.itemsize * 8
    if not -(1 << (bits - 1)) <= number < 1 << bits:
        raise UsageError(f"{where} is a {parameter.type}: {number!s:.40} does not fit into {bits} bits")
    return int(number % (1 << bits)).to_bytes(int(dtype.itemsize), "little")
