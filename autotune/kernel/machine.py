"""What launches kernels: a GPU or the simulator of one, as `Machine`, and a loaded kernel, as `Enqueue`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from autotune.code.compiler import Binary
from autotune.code.render import Source
from autotune.kernel.libraries import Taken
from autotune.values.device import Device


class Enqueue(Protocol):
    """A loaded kernel: one call starts one launch."""

    def __call__(
        self, a: int, b: int, c: int, alpha: float, beta: float, stream: int, prepared: int = 0, /
    ) -> None:
        """Start one launch on addresses."""


class Machine(Protocol):
    """Where kernels run: a GPU, or the simulator of one.

    Attributes:
        device: Its facts.
        ordinal: CUDA ordinal; None for the simulator.
        options: For the compiler, beyond its usual ones.
        ndarray: The array type with a short way through `Kernel.__call__`.
    """

    device: Device
    options: tuple[str, ...]
    ndarray: Any

    @property
    def ordinal(self) -> int | None:
        """CUDA ordinal; None for the simulator."""

    def current_stream(self, ordinal: int, /) -> Any:
        """Return the current stream of ``ndarray``'s library."""

    def take(self, a: Any, b: Any, out: Any, stream: Any, name: str = "a") -> Taken:
        """Turn arrays into operands on a stream: see `autotune.kernel.libraries.take`."""

    def load(self, source: Source, binary: Binary) -> Enqueue:
        """Make machine code callable."""

    def answer(self, enqueue: Callable[[int], None], stream: int) -> float:
        """Wait for the float that a launch on a stream writes, given its address; 0 where it writes none."""

    def capturing(self, stream: int | None) -> bool:
        """Return whether a stream is being captured; None for the current ones of this thread's libraries."""


class NoArray:
    """A type that no operand has: a kernel with this ``ndarray`` has no short way."""
