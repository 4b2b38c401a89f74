"""The short way of a call: what of its arrays decides a launch is looked up, and little is left to check.

Whatever is not as it was remembered takes the long way, which refuses it in words or remembers it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from autotune.kernel.libraries import CuPyLibrary, Library, TorchLibrary
from autotune.kernel.operands import Operand, row_major, stream_pointer
from autotune.values.problem import FLOAT_BYTES

if TYPE_CHECKING:
    from autotune.kernel.machine import Enqueue

_SEEN = 4096  # places that are remembered
_UNALIGNED = 15  # bits of an address that is no multiple of 16


class Way(NamedTuple):
    """How operands of certain shapes and strides are multiplied, at multiples of 16 bytes.

    Attributes:
        enqueue: The launch.
        a_bytes: From the first element of A to behind its last.
        b_bytes: The same of B.
        c_bytes: The same of C.
        shape: Of C as it is returned.
        steps: Strides of a new C.
    """

    enqueue: Enqueue
    a_bytes: int
    b_bytes: int
    c_bytes: int
    shape: tuple[int, ...]
    steps: tuple[int, ...]

    @classmethod
    def of(cls, enqueue: Enqueue, a: Operand, b: Operand, c: Operand, shape: tuple[int, ...]) -> Way | None:
        """Return the way of operands that were multiplied; None where it holds for these addresses alone."""
        if (a.address | b.address | c.address) & _UNALIGNED:
            return None
        call = enqueue.__call__  # a method is called sooner than an object
        return cls(call, _bytes(a), _bytes(b), _bytes(c), shape, row_major(shape))

    def apart(self, a: int, b: int, c: int) -> bool:
        """Return whether operands at these addresses are there, aligned, and C lies apart from the others."""
        return (
            not (a | b | c) & _UNALIGNED
            and (a + self.a_bytes <= c or c + self.c_bytes <= a)
            and (b + self.b_bytes <= c or c + self.c_bytes <= b)
            and 0 not in (a, b, c)
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
        if out is None:
            return a.shape, a.strides, b.shape, b.strides, a.data.device_id, words
        return a.shape, a.strides, b.shape, b.strides, out.shape, out.strides, a.data.device_id, words

    def __call__(
        self, a: Any, b: Any, out: Any, words: tuple[Any, ...], alpha: Any, beta: Any, stream: Any
    ) -> Any:
        """Enqueue what `matmul` would, and return C; None where the long way is needed."""
        kinds, float32 = self.kinds, self._float32
        if type(b) not in kinds or (out is not None and type(out) not in kinds):
            return None
        try:
            way = self.ways.get(self.look(a, b, out, words))
        except TypeError:  # a word of a wrong type
            return None
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

    At addresses where tensors were multiplied twice before, a guard of `torch.compile` says in one call
    whether shapes, strides, dtypes, and whatever else decides are what they were. PyTorch promises no such
    guard; without it everything is looked at in turn.

    Attributes:
        kinds: Types of its arrays.
        ways: What is remembered: see `look`.
    """

    def __init__(self, _: Library) -> None:
        import torch

        self.kinds: tuple[type, ...] = (torch.Tensor, torch.nn.Parameter)
        self.ways: dict[Hashable, Way] = {}
        self._float32 = torch.float32
        self._is_grad_enabled = torch.is_grad_enabled
        self._raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (
            lambda ordinal: int(torch.cuda.current_stream(ordinal).cuda_stream)
        )
        self._seen: dict[tuple[Any, ...], tuple[Callable[..., bool], Way, int]] = {}
        guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
        self._guard: Any = getattr(guards, "TensorGuards", None)
        self._allocate: Any = getattr(guards, "_empty_strided_cuda", None)
        self._current_device: Any = getattr(torch._C, "_cuda_getDevice", lambda: -1)

    def look(self, a: Any, b: Any, out: Any, words: tuple[Any, ...]) -> Hashable:
        """Return what decides how tensors are multiplied."""
        if out is None:
            return a.shape, a.stride(), b.shape, b.stride(), a.get_device(), words
        return a.shape, a.stride(), b.shape, b.stride(), out.shape, out.stride(), a.get_device(), words

    def __call__(
        self, a: Any, b: Any, out: Any, words: tuple[Any, ...], alpha: Any, beta: Any, stream: Any
    ) -> Any:
        """Enqueue what `matmul` would, and return C; None where the long way is needed."""
        if type(alpha) is not float or type(beta) is not float or alpha == 0.0:
            return None
        try:
            if out is None:
                places: tuple[Any, ...] = (a.data_ptr(), b.data_ptr(), words)
                seen = self._seen.get(places)
                if seen is None or not seen[0](a, b):
                    return self._looked_up(a, b, None, words, alpha, beta, stream, places)
            else:
                places = (a.data_ptr(), b.data_ptr(), out.data_ptr(), words)
                seen = self._seen.get(places)
                if seen is None or not seen[0](a, b, out):
                    return self._looked_up(a, b, out, words, alpha, beta, stream, places)
        except (AttributeError, TypeError, RuntimeError):  # no tensors, a wrong word, one that is sparse
            return None
        _, way, ordinal = seen
        handle = self._raw_stream(ordinal) if stream is None else stream_pointer(stream)
        if out is not None:
            way.enqueue(places[0], places[1], places[2], alpha, beta, handle)
            return out
        if beta != 0.0 or stream is not None:
            return None
        out = self._empty(a, way, ordinal)
        way.enqueue(places[0], places[1], out.data_ptr(), alpha, beta, handle)
        return out

    def _looked_up(
        self,
        a: Any,
        b: Any,
        out: Any,
        words: tuple[Any, ...],
        alpha: float,
        beta: float,
        stream: Any,
        places: tuple[Any, ...],
    ) -> Any:
        """Do what `__call__` does where these tensors were not at these places before."""
        operands = (a, b) if out is None else (a, b, out)
        if any(type(each) not in self.kinds for each in operands):
            return None
        way, ordinal = self.ways.get(self.look(a, b, out, words)), a.get_device()
        if way is None or (out is None and (beta != 0.0 or stream is not None)):
            return None
        wanted = self._is_grad_enabled()
        for each in operands:
            if (
                each.dtype is not self._float32
                or each.get_device() != ordinal
                or each.is_neg()
                or (wanted and each.requires_grad)
            ):
                return None
        handle = self._raw_stream(ordinal) if stream is None else stream_pointer(stream)
        c = self._empty(a, way, ordinal) if out is None else out
        if not way.apart(places[0], places[1], c.data_ptr()):
            return None
        way.enqueue(places[0], places[1], c.data_ptr(), alpha, beta, handle)
        self._note(places, operands, way, ordinal)
        return c

    def _note(self, places: tuple[Any, ...], operands: tuple[Any, ...], way: Way, ordinal: int) -> None:
        """Note that tensors were at some places, and make a guard for them when they come back."""
        if len(self._seen) >= _SEEN:  # addresses come anew all the time
            self._seen.clear()
        before = self._seen.get(places)
        self._seen[places] = (_unguarded, way, ordinal)
        if before is not None and before[0] is _unguarded and self._guard is not None:
            with suppress(Exception):  # another PyTorch
                guard = self._guard(*operands, dynamic_dims_sizes=None, dynamic_dims_strides=None)
                self._seen[places] = (guard.check, way, ordinal)

    def _empty(self, a: Any, way: Way, ordinal: int) -> Any:
        if self._allocate is None or self._current_device() != ordinal:
            return a.new_empty(way.shape)
        return self._allocate(way.shape, way.steps, self._float32)


def _unguarded(*tensors: Any) -> bool:
    return False


Short = Ndarrays | Tensors
OF_LIBRARIES: dict[type[Library], type[Short]] = {CuPyLibrary: Ndarrays, TorchLibrary: Tensors}


def remember(
    table: dict[type, Short],
    library: Library,
    arrays: tuple[Any, Any, Any],
    words: tuple[Any, ...],
    given: bool,
    way: Way | None,
) -> None:
    """Remember how arrays were multiplied.

    Args:
        table: Of those that are asked again, by types of arrays.
        library: Of A, one of `OF_LIBRARIES`.
        arrays: A, B and C.
        words: The other words of the call that decide.
        given: Whether C was passed.
        way: How it was done.
    """
    a, b, out = arrays
    short = table.get(type(a)) or OF_LIBRARIES[type(library)](library)
    if way is not None and all(type(each) in short.kinds for each in arrays):
        table.update(dict.fromkeys(short.kinds, short))
        short.ways[short.look(a, b, out if given else None, words)] = way


def _bytes(operand: Operand) -> int:
    steps = zip(operand.shape, operand.strides, strict=True)
    return FLOAT_BYTES * (1 + sum((extent - 1) * stride for extent, stride in steps))
