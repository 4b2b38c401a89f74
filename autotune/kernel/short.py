"""The short way of `matmul`: what of its arrays decides a launch is looked up, and little is left to check.

Whatever is not as it was remembered takes the long way, which refuses it in words or remembers it.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from autotune.kernel.libraries import CuPyLibrary, Library, TorchLibrary
from autotune.kernel.operands import Operand, stream_pointer
from autotune.values.problem import FLOAT_BYTES

if TYPE_CHECKING:
    from autotune.kernel.machine import Enqueue

_UNALIGNED = 15  # bits of an address that is no multiple of 16


class Way(NamedTuple):
    """How operands of certain shapes and strides are multiplied, at multiples of 16 bytes.

    Attributes:
        enqueue: The launch.
        a_bytes: From the first element of A to behind its last.
        b_bytes: The same of B.
        c_bytes: The same of C.
        shape: Of C as it is returned.
    """

    enqueue: Enqueue
    a_bytes: int
    b_bytes: int
    c_bytes: int
    shape: tuple[int, ...]

    @classmethod
    def of(cls, enqueue: Enqueue, a: Operand, b: Operand, c: Operand, shape: tuple[int, ...]) -> Way | None:
        """Return the way of operands that were multiplied; None where it holds for these addresses alone."""
        if (a.address | b.address | c.address) & _UNALIGNED:
            return None
        return cls(enqueue, _bytes(a), _bytes(b), _bytes(c), shape)

    def apart(self, a: int, b: int, c: int) -> bool:
        """Return whether operands at these addresses are there, aligned, and C lies apart from the others."""
        return (
            not (a | b | c) & _UNALIGNED
            and 0 not in (a, b, c)
            and (a + self.a_bytes <= c or c + self.c_bytes <= a)
            and (b + self.b_bytes <= c or c + self.c_bytes <= b)
        )


class Ndarrays:
    """The short way of ``cupy.ndarray``.

    Attributes:
        kinds: Types of its arrays.
        ways: What is remembered: see `look`.
    """

    def __init__(self, library: Library) -> None:
        import cupy
        from cupy.cuda import get_current_stream

        self.kinds: tuple[type, ...] = (cupy.ndarray,)
        self.ways: dict[Hashable, Way] = {}
        self._library = library
        self._current_stream = get_current_stream
        self._float32 = np.dtype(np.float32)

    def look(self, a: Any, b: Any, out: Any, words: tuple[Any, ...]) -> Hashable:
        """Return what decides how arrays are multiplied."""
        key = (a.shape, a.strides, b.shape, b.strides, a.data.device_id, words)
        return key if out is None else (key, out.shape, out.strides)

    def __call__(
        self, a: Any, b: Any, out: Any, words: tuple[Any, ...], alpha: Any, beta: Any, stream: Any
    ) -> Any:
        """Enqueue what `matmul` would, and return C; None where the long way is needed."""
        kinds, float32 = self.kinds, self._float32
        if type(b) not in kinds or (out is not None and type(out) not in kinds):
            return None
        way = _found(self.ways, self.look(a, b, out, words))
        if (
            way is None
            or a.dtype is not float32
            or b.dtype is not float32
            or type(alpha) is not float
            or type(beta) is not float
            or alpha == 0.0
        ):
            return None
        a_memory, b_memory = a.data, b.data
        ordinal = a_memory.device_id
        handle = self._current_stream(ordinal).ptr if stream is None else stream_pointer(stream)
        if out is None:
            if beta != 0.0:
                return None
            out = self._library.empty("a", way.shape, a, ordinal, handle)
        elif out.dtype is not float32:
            return None
        c_memory = out.data
        a_address, b_address, c_address = a_memory.ptr, b_memory.ptr, c_memory.ptr
        if b_memory.device_id != ordinal or c_memory.device_id != ordinal:
            return None
        if not way.apart(a_address, b_address, c_address):
            return None
        way.enqueue(a_address, b_address, c_address, alpha, beta, handle)
        return out


class Tensors:
    """The short way of ``torch.Tensor``.

    Attributes:
        kinds: Types of its arrays.
        ways: What is remembered: see `look`.
    """

    def __init__(self, library: Library) -> None:
        import torch

        self.kinds: tuple[type, ...] = (torch.Tensor, torch.nn.Parameter)
        self.ways: dict[Hashable, Way] = {}
        self._stream = library.stream
        self._raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        self._float32 = torch.float32
        self._is_grad_enabled = torch.is_grad_enabled

    def look(self, a: Any, b: Any, out: Any, words: tuple[Any, ...]) -> Hashable:
        """Return what decides how tensors are multiplied."""
        key = (a.shape, a.stride(), b.shape, b.stride(), a.get_device(), words)
        return key if out is None else (key, out.shape, out.stride())

    def __call__(
        self, a: Any, b: Any, out: Any, words: tuple[Any, ...], alpha: Any, beta: Any, stream: Any
    ) -> Any:
        """Enqueue what `matmul` would, and return C; None where the long way is needed."""
        kinds, float32 = self.kinds, self._float32
        if type(b) not in kinds or (out is not None and type(out) not in kinds):
            return None
        try:
            way = self.ways.get(self.look(a, b, out, words))
        except (TypeError, RuntimeError):  # a word of a wrong type; a tensor without strides
            return None
        ordinal = a.get_device()
        if (
            way is None
            or a.dtype is not float32
            or b.dtype is not float32
            or b.get_device() != ordinal
            or type(alpha) is not float
            or type(beta) is not float
            or alpha == 0.0
            or a.is_neg()
            or b.is_neg()
        ):
            return None
        if (a.requires_grad or b.requires_grad) and self._is_grad_enabled():
            return None
        if stream is None:
            handle = self._stream(a) or 0 if self._raw_stream is None else self._raw_stream(ordinal)
        else:
            handle = stream_pointer(stream)
        if out is None:
            if beta != 0.0 or stream is not None:
                return None
            out = a.new_empty(way.shape)
        elif (
            out.dtype is not float32
            or out.get_device() != ordinal
            or out.is_neg()
            or (out.requires_grad and self._is_grad_enabled())
        ):
            return None
        a_address, b_address, c_address = a.data_ptr(), b.data_ptr(), out.data_ptr()
        if not way.apart(a_address, b_address, c_address):
            return None
        way.enqueue(a_address, b_address, c_address, alpha, beta, handle)
        return out


Short = Ndarrays | Tensors
OF_LIBRARIES: dict[type[Library], type[Short]] = {CuPyLibrary: Ndarrays, TorchLibrary: Tensors}
of_types: dict[type, Short] = {}  # of arrays that were multiplied


def remember(
    library: Library, arrays: tuple[Any, Any, Any], words: tuple[Any, ...], given: bool, way: Way | None
) -> None:
    """Remember how arrays were multiplied.

    Args:
        library: Of A, one of `OF_LIBRARIES`.
        arrays: A, B and C.
        words: The other words of the call that decide.
        given: Whether C was passed.
        way: How it was done.
    """
    a, b, out = arrays
    short = of_types.get(type(a)) or OF_LIBRARIES[type(library)](library)
    if way is not None and all(type(each) in short.kinds for each in arrays):
        of_types.update(dict.fromkeys(short.kinds, short))
        short.ways[short.look(a, b, out if given else None, words)] = way


def _found(ways: dict[Hashable, Way], key: Hashable) -> Way | None:
    try:
        return ways.get(key)
    except TypeError:  # a word of a wrong type
        return None


def _bytes(operand: Operand) -> int:
    steps = zip(operand.shape, operand.strides, strict=True)
    return FLOAT_BYTES * (1 + sum((extent - 1) * stride for extent, stride in steps))
