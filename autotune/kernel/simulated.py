"""Launches kernels in the simulator, on operands in host memory given by address."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.code.compiler import Binary
from autotune.code.render import Source
from autotune.kernel.libraries import Taken, take
from autotune.kernel.machine import NoArray
from autotune.kernel.once import Once
from autotune.values.device import Device, named_device
from autotune.values.measurement import Argument
from autotune.values.problem import FLOAT_BYTES

DEFAULT_TARGET = "h200"
_FLOPS_PER_SECOND = 2e6  # a hundredth of what the simulator reaches: who is slower does not end
_ALLOCATION = 256  # bytes: the simulator takes the start of an allocation for aligned to this


class SimulatedMachine:
    """A simulated GPU of the built-in table; its arrays are NumPy's.

    Attributes:
        device: Its facts.
        ordinal: None: it is not a GPU of this machine.
        options: For the compiler: faults name lines of the source.
        ndarray: A type that no array has.
    """

    options: tuple[str, ...] = ("-lineinfo",)
    ordinal: int | None = None
    ndarray: Any = NoArray

    def __init__(self, device: Device) -> None:
        self.device = device

    def __reduce__(self) -> tuple[Any, ...]:
        return simulated_machine, (self.device.name,)

    def current_stream(self, ordinal: int) -> Any:
        """Raise: there are no streams here."""
        raise NotImplementedError

    def take(self, a: Any, b: Any, out: Any, stream: Any, name: str = "a") -> Taken:
        """Turn NumPy arrays into operands: see `autotune.kernel.libraries.take`."""
        return take(a, b, out, stream, name, host=True)

    def capturing(self, stream: int | None) -> bool:
        """Return that nothing is captured."""
        return False

    def load(self, source: Source, binary: Binary) -> SimulatedLaunch:
        """Return the kernel as a callable."""
        return SimulatedLaunch(source, binary)

    def answer(self, enqueue: Callable[[int], None], stream: int) -> float:
        """Return the float that a launch writes, given its address; 0 where it writes none."""
        found = np.zeros(1, np.float32)
        enqueue(found.ctypes.data)
        return float(found[0])


_machines: Once[str, SimulatedMachine] = Once()


def simulated_machine(target: str = DEFAULT_TARGET) -> SimulatedMachine:
    """Return the simulator of one GPU of the table.

    Raises:
        UsageError: The table has no such GPU.
    """
    device = named_device(target)
    return _machines(device.name, lambda: SimulatedMachine(device))


class SimulatedLaunch:
    """A kernel in the simulator; a call returns when C is complete."""

    def __init__(self, source: Source, binary: Binary) -> None:
        self._source = source
        self._ptx = binary.ptx

    def __call__(
        self, a: int, b: int, c: int, alpha: float, beta: float, stream: int, prepared: int = 0, /
    ) -> None:
        """Execute one launch on operands in host memory.

        Args:
            a: Address of A.
            b: Address of B.
            c: Address of C.
            alpha: Scalar of the product.
            beta: Scalar of C.
            stream: Ignored.
            prepared: Address of what B was prepared into, for a launch that takes it.

        Raises:
            SimulationFault: The kernel did something that no CUDA kernel may do.
        """
        from autotune.simulator import MAX_SECONDS
        from autotune.simulator.launches import run_launch, workspace_of

        problem, launch = self._source.problem, self._source.launch
        facts: dict[Argument, tuple[int, tuple[int, int], int, int]] = {
            "a": (a, problem.a_shape, problem.lda, problem.stride_a),
            "b": (b, problem.b_shape, problem.ldb, problem.stride_b),
            "c": (c, problem.c_shape, problem.ldc, problem.stride_c),
        }
        taken = {name for each in launch.kernels for name in each.arguments}
        places = {
            name: (address, (problem.batch - 1) * stride + (rows - 1) * lead + columns)
            for name, (address, (rows, columns), lead, stride) in facts.items()
            if name in taken
        }
        if "prepared" in taken:
            places["prepared"] = prepared, launch.prepared_bytes // FLOAT_BYTES
        scalars: dict[Argument, np.float32] = {"alpha": np.float32(alpha), "beta": np.float32(beta)}
        run_launch(
            self._ptx,
            launch,
            {**scalars, **_floats(places), **workspace_of(launch)},
            max_seconds=MAX_SECONDS + problem.flops / _FLOPS_PER_SECOND,
        ).raise_if_faulty()


def _floats(places: Mapping[Argument, tuple[int, int]]) -> dict[Argument, NDArray[np.float32]]:
    """View memory as arrays of float32 that keep the alignment of their addresses, and may overlap.

    Args:
        places: The address of each, and its floats.
    """
    first = min(address for address, _ in places.values()) // _ALLOCATION * _ALLOCATION
    last = max(address + FLOAT_BYTES * size for address, size in places.values())
    memory = np.frombuffer(memoryview((ctypes.c_char * (last - first)).from_address(first)), np.uint8)
    return {
        name: memory[address - first : address - first + FLOAT_BYTES * size].view(np.float32)
        for name, (address, size) in places.items()
    }
