"""Array libraries: how each one's arrays become operands on a stream, and how a product becomes its array.

CuPy and PyTorch are asked directly, Numba and others by ``__cuda_array_interface__``, JAX and others by
DLPack. Nothing is copied, and no host thread waits for a GPU.
"""

from __future__ import annotations

import math
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

from autotune.errors import DeviceError, UsageError
from autotune.kernel.captures import LEGACY_DEFAULT, is_capturing
from autotune.kernel.dynamo import leave_out_frames
from autotune.kernel.operands import Idiom, Operand, kind_of, row_major, stream_pointer
from autotune.values.faults import known_fault
from autotune.values.problem import FLOAT_BYTES

_ON_A_GPU = (2, 13)  # DLDeviceType: kDLCUDA, kDLCUDAManaged


class Library:
    """One array library as a launch sees it; the base of the others.

    Attributes:
        name: For messages.
        stream_per_array: Whether two arrays on one GPU may be ordered by different streams.
        holds: Whether `hold` does anything.
        idiom: For messages.
    """

    name = ""
    idiom = Idiom()
    stream_per_array = False
    holds = False

    def stream(self, array: Any) -> int | None:
        """Return the stream on which the library orders work on an array; None if it has no such notion."""
        return None

    def view(self, name: str, array: Any, stream: int) -> tuple[Operand, Any]:
        """Return an array's operand, ready for work on a stream, and what keeps it alive."""
        raise NotImplementedError

    def empty(self, name: str, shape: tuple[int, ...], like: Any, ordinal: int, stream: int) -> Any:
        """Allocate a float32 array in row-major order for work on a stream, as `result` takes it."""
        raise UsageError(f"{name} is {kind_of(like)}, of which no result can be made: pass out=")

    def view_result(self, array: Any, stream: int) -> Operand:
        """Return the operand of what `empty` allocated."""
        return self.view("out", array, stream)[0]

    def result(self, array: Any, stream: int) -> Any:
        """Hand out what `empty` allocated, once the work that writes it is enqueued on the stream."""
        return array

    def hold(self, kept: Sequence[Any], ordinal: int, stream: int) -> None:
        """Keep what was read alive until the work on the stream has read it."""


class NumPyLibrary(Library):
    """Arrays in host memory, for kernels that run in the simulator."""

    name = "NumPy"

    def view(self, name: str, array: Any, stream: int) -> tuple[Operand, Any]:
        """See `Library`."""
        _require_float32(name, array.dtype, self.idiom)
        strides = _elements(name, array.strides, self.idiom)
        return Operand(array.ctypes.data, array.shape, strides, None, array.flags.writeable), array

    def empty(self, name: str, shape: tuple[int, ...], like: Any, ordinal: int, stream: int) -> Any:
        """See `Library`."""
        import numpy

        try:
            room = numpy.empty(math.prod(shape) + WIDE_FLOATS, numpy.float32)
        except (MemoryError, ValueError):  # ValueError: more than NumPy can address
            raise DeviceError(
                f"C of {' x '.join(map(str, shape))} needs {FLOAT_BYTES * math.prod(shape)} bytes, which "
                "this machine's memory does not hold: multiply parts of it"
            ) from None
        start = -room.ctypes.data // FLOAT_BYTES % WIDE_FLOATS
        return room[start : start + math.prod(shape)].reshape(shape)


WIDE_FLOATS = 4  # of 16 bytes: NumPy aligns to less on some platforms


class CuPyLibrary(Library):
    """``cupy.ndarray``."""

    name = "CuPy"

    def stream(self, array: Any) -> int | None:
        """See `Library`."""
        from cupy.cuda import get_current_stream

        return int(get_current_stream(array.data.device_id).ptr)

    def view(self, name: str, array: Any, stream: int) -> tuple[Operand, Any]:
        """See `Library`."""
        _require_float32(name, array.dtype, self.idiom)
        memory, strides = array.data, _elements(name, array.strides, self.idiom)
        return Operand(memory.ptr, array.shape, strides, memory.device_id), array

    def empty(self, name: str, shape: tuple[int, ...], like: Any, ordinal: int, stream: int) -> Any:
        """See `Library`."""
        import cupy
        from cupy.cuda import get_current_stream, runtime

        if stream == get_current_stream(ordinal).ptr and ordinal == runtime.getDevice():
            return cupy.empty(shape, cupy.float32)
        with cupy_stream(ordinal, stream):  # memory is reused in the order of the stream it was allocated on
            return cupy.empty(shape, cupy.float32)


class TorchLibrary(Library):
    """``torch.Tensor``."""

    name = "PyTorch"
    idiom = Idiom("{}.contiguous()", "{}.clone()", "{}.float()", "{}.copy_(c)")

    def __init__(self) -> None:
        import torch

        leave_out_frames()
        self._torch = torch
        self._float32 = torch.float32
        self._strided = torch.strided
        self._raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)

    def stream(self, array: Any) -> int | None:
        """See `Library`."""
        ordinal = array.get_device()
        if ordinal < 0:
            return None
        if self._raw_stream is not None:
            return self._raw_stream(ordinal)
        return int(self._torch.cuda.current_stream(ordinal).cuda_stream)

    def view(self, name: str, array: Any, stream: int) -> tuple[Operand, Any]:
        """See `Library`."""
        if array.dtype is not self._float32:
            raise _not_float32(name, str(array.dtype)[6:], self.idiom)
        if array.layout is not self._strided:
            remedy = "a dense tensor" if name == "out" else f"{name}.to_dense()"
            raise UsageError(f"{name} is sparse ({array.layout}): pass {remedy}")
        ordinal = array.get_device()
        if ordinal < 0:
            remedy = self.idiom.instead(name, "{}.cuda()")
            raise UsageError(f"{name} is a tensor on {array.device}: {remedy}")
        if array.requires_grad and self._torch.is_grad_enabled():
            raise UsageError(
                f"{name} requires grad, which this call does not compute: call autotune.torch.matmul, "
                f"or pass {name}.detach()"
            )
        if array.is_neg():
            remedy = self.idiom.instead(name, "{}.resolve_neg()")
            raise UsageError(f"{name} is a lazily negated view: {remedy}")
        shape, strides = tuple(array.shape), array.stride()
        return Operand(array.data_ptr(), shape, strides, ordinal, True, self.idiom), array

    def empty(self, name: str, shape: tuple[int, ...], like: Any, ordinal: int, stream: int) -> Any:
        """See `Library`."""
        torch = self._torch
        context: AbstractContextManager[Any] = nullcontext()
        if stream != self.stream(like):  # its memory is reused in the order of the stream it was allocated on
            context = torch.cuda.stream(torch.cuda.ExternalStream(stream, device=like.device))
        with context:
            return torch.empty(shape, dtype=torch.float32, device=like.device)


class InterfaceLibrary(Library):
    """Any array with ``__cuda_array_interface__``."""

    name = "CUDA array interface"
    idiom = Idiom(
        *("cupy.asarray({}).copy()", "cupy.asarray({}).copy()"),
        *("cupy.asarray({}).astype('float32')", "cupy.asarray({})[...] = c"),
    )
    stream_per_array = True

    def stream(self, array: Any) -> int | None:
        """See `Library`: the stream that the array names, else the legacy default stream."""
        stream = _interface("an operand", array).get("stream")
        return 0 if stream in (None, LEGACY_DEFAULT) else int(stream)

    def view(self, name: str, array: Any, stream: int) -> tuple[Operand, Any]:
        """See `Library`."""
        facts = _interface(name, array)
        if facts.get("mask") is not None:
            raise UsageError(f"{name} has a mask: pass an array without one")
        kind = str(facts["typestr"])
        if kind[1:] != "f4" or kind[0] == ">":
            import numpy

            _require_float32(name, numpy.dtype(kind), self.idiom)
        shape, strides = tuple(facts["shape"]), facts.get("strides")
        address, read_only = facts["data"]
        strides = row_major(shape) if strides is None else _elements(name, strides, self.idiom)
        address = int(address or 0)
        ordinal = ordinal_of(name, address, empty=0 in shape)
        return Operand(address, shape, strides, ordinal, not read_only, self.idiom), array


class NumbaLibrary(InterfaceLibrary):
    """Device arrays of ``numba.cuda``."""

    name = "Numba"

    def empty(self, name: str, shape: tuple[int, ...], like: Any, ordinal: int, stream: int) -> Any:
        """See `Library`."""
        import numpy
        from numba import cuda

        bound = cuda.external_stream(stream) if stream > LEGACY_DEFAULT else 0
        with cuda.gpus[ordinal]:
            return cuda.device_array(shape, numpy.float32, stream=bound)


class DLPackLibrary(Library):
    """Any array with ``__dlpack__``, taken in by CuPy: its producer makes our stream wait for it."""

    name = "DLPack"
    idiom = Idiom(
        *("cupy.from_dlpack({}).copy()", "cupy.from_dlpack({}).copy()"),
        *("cupy.from_dlpack({}).astype('float32')", "cupy.from_dlpack({})[...] = c"),
    )
    stream_per_array = True  # it has none, and needs one of the others
    holds = True

    def __init__(self) -> None:
        self._held: deque[tuple[Any, Sequence[Any]]] = deque()
        self._sweeping = threading.Lock()

    def view(self, name: str, array: Any, stream: int) -> tuple[Operand, Any]:
        """See `Library`."""
        try:
            kind, ordinal = array.__dlpack_device__()
        except Exception as error:
            raise _unreadable(f"{name} is {kind_of(array)} without a device of its own", error) from None
        if kind not in _ON_A_GPU:
            raise UsageError(f"{name} is {kind_of(array)} in host memory: pass one that lies on a GPU")
        import cupy

        with cupy_stream(ordinal, stream):
            try:
                taken = cupy.from_dlpack(array)
            except Exception as error:
                raise _unreadable(f"{name} cannot be read through DLPack", error) from None
        _require_float32(name, taken.dtype, self.idiom)
        operand, _ = _cupy().view(name, taken, stream)
        return operand._replace(idiom=self.idiom), (array, taken)

    def hold(self, kept: Sequence[Any], ordinal: int, stream: int) -> None:
        """See `Library`: a producer reuses memory that nobody refers to, and knows nothing of our stream."""
        from cupy.cuda import Device, Event, runtime

        if is_capturing(runtime, stream):  # whoever keeps the graph keeps its arrays
            return
        with Device(ordinal):
            event = Event(disable_timing=True)
            event.record(_as_cupy(stream))
        self._held.append((event, kept))
        if self._sweeping.acquire(
            blocking=False
        ):  # one thread is enough; who was forked meanwhile waits for none
            try:
                while self._held and self._held[0][0].done:
                    self._held.popleft()
            finally:
                self._sweeping.release()


class JaxLibrary(DLPackLibrary):
    """``jax.Array``, whose results are made by CuPy and handed over by DLPack."""

    name = "JAX"

    def view(self, name: str, array: Any, stream: int) -> tuple[Operand, Any]:
        """See `Library`."""
        if name == "out":
            raise UsageError(
                "out is an array of JAX, which never changes: leave it out, the product is returned"
            )
        return super().view(name, array, stream)

    def empty(self, name: str, shape: tuple[int, ...], like: Any, ordinal: int, stream: int) -> Any:
        """See `Library`."""
        return _cupy().empty(name, shape, like, ordinal, stream)

    def view_result(self, array: Any, stream: int) -> Operand:
        """See `Library`."""
        return _cupy().view("out", array, stream)[0]

    def result(self, array: Any, stream: int) -> Any:
        """See `Library`."""
        from jax import dlpack

        with cupy_stream(array.data.device_id, stream):  # JAX's stream is made to wait for this one
            return dlpack.from_dlpack(array)


class Taken(NamedTuple):
    """The operands of one call.

    Attributes:
        a: First factor.
        b: Second factor.
        out: Where the product goes; None to allocate it.
        stream: Handle of the stream.
        library: That of ``a``, of which a result is made.
        like: ``a`` as it was passed.
        kept: What must live until the kernel has run, and by whose rules.
    """

    a: Operand
    b: Operand
    out: Operand | None
    stream: int
    library: Library
    like: Any
    kept: tuple[tuple[Library, Any], ...] = ()


def take(a: Any, b: Any, out: Any, stream: Any, name: str = "a", *, host: bool = False) -> Taken:
    """Turn the arrays of one call into operands on one stream.

    Args:
        a: First factor.
        b: Second factor.
        out: Where the product goes, or None.
        stream: A stream or its handle; None for the current one of the arrays' library.
        name: What the user calls the first factor.
        host: Whether the arrays are NumPy's, for the simulator.

    Raises:
        UsageError: An array is of an unknown kind, on no GPU, or not float32; or their libraries work on
            different streams and none was passed.
    """
    library = library_of(name, a, host)
    b_library = library if type(b) is type(a) else library_of("b", b, host)
    out_library = library if out is None or type(out) is type(a) else library_of("out", out, host)
    if stream is not None:
        pointer = stream_pointer(stream)
    elif library is b_library is out_library and not library.stream_per_array:
        pointer = library.stream(a) or 0
    else:
        pointer = _common_stream(
            [(name, a, library), ("b", b, b_library)] + ([] if out is None else [("out", out, out_library)])
        )
    a_view, a_kept = library.view(name, a, pointer)
    b_view, b_kept = b_library.view("b", b, pointer)
    out_view = None if out is None else out_library.view("out", out, pointer)[0]
    kept: tuple[tuple[Library, Any], ...] = ()
    if library.holds or b_library.holds:
        kept = ((library, a_kept), (b_library, b_kept))
    return Taken(a_view, b_view, out_view, pointer, library, a, kept)


def library_of(name: str, array: Any, host: bool = False) -> Library:
    """Return the library of an array.

    Raises:
        UsageError: It is no array, or in host memory where one on a GPU is needed, or the other way round.
    """
    library = _known.get(type(array))
    if library is None:
        library = _recognised(name, array, host)
        _known[type(array)] = library
    if isinstance(library, NumPyLibrary) is host:
        return library
    if host:
        raise UsageError(f"{name} is {kind_of(array)}: a kernel in the simulator takes numpy.ndarray")
    on_gpu = Idiom(assign="{}[...] = c.get()").instead(name, "cupy.asarray({})")
    raise UsageError(f"{name} is {kind_of(array)}, in host memory: {on_gpu}, or ask for device='simulator'")


def ordinal_of(name: str, address: int, empty: bool = False) -> int:
    """Return the ordinal of the GPU on which an address lies, as the driver says.

    What is empty lies on none: it counts as on the current one.

    Raises:
        UsageError: On none.
    """
    from cupy.cuda import runtime

    if empty:
        return int(runtime.getDevice())
    try:
        found = runtime.pointerGetAttributes(address)
    except runtime.CUDARuntimeError as error:
        raise _unreadable(f"{name} does not lie in memory that CUDA knows", error) from None
    if not found.devicePointer:
        raise UsageError(f"{name} lies in host memory: pass an array on a GPU")
    return int(found.device)


_known: dict[type, Library] = {}
_made: dict[type[Library], Library] = {}


def _recognised(name: str, array: Any, host: bool) -> Library:
    kind = type(array)
    package = kind.__module__.partition(".")[0]
    modules = sys.modules  # whoever passes an array has imported its library
    if package == "cupy" and isinstance(array, modules["cupy"].ndarray):
        return _the(CuPyLibrary)
    if "torch" in modules and isinstance(array, modules["torch"].Tensor):
        if kind is modules["torch"].Tensor or kind is modules["torch"].nn.Parameter:
            return _the(TorchLibrary)
        raise UsageError(f"{name} is {kind_of(array)}: pass a plain torch.Tensor")
    if "numpy" in modules and isinstance(array, modules["numpy"].ndarray):
        if "numpy.ma" in modules and isinstance(array, modules["numpy.ma"].MaskedArray):
            remedy = "out.data" if name == "out" else f"{name}.filled(0)"
            raise UsageError(f"{name} is a masked array, and a kernel sees no mask: pass {remedy}")
        return _the(NumPyLibrary)
    if package in ("jax", "jaxlib") and hasattr(array, "__dlpack__"):
        return _the(JaxLibrary)
    if package in ("numba", "numba_cuda") and hasattr(kind, "__cuda_array_interface__"):
        return _the(NumbaLibrary)
    if hasattr(array, "__cuda_array_interface__"):
        return _the(InterfaceLibrary)
    if hasattr(array, "__dlpack__"):
        return _the(DLPackLibrary)
    wanted = "a numpy.ndarray" if host else "an array on a GPU (CuPy, PyTorch, Numba or JAX)"
    raise UsageError(f"{name} is {kind_of(array)}: pass {wanted}, float32")


def _the(kind: type[Library]) -> Library:
    return _made.setdefault(kind, kind()) if kind not in _made else _made[kind]


def _cupy() -> Library:
    return _the(CuPyLibrary)


def _common_stream(arrays: list[tuple[str, Any, Library]]) -> int:
    """Return the one stream on which all arrays of a call are ready."""
    found: dict[int, str] = {}
    for name, array, library in arrays:
        pointer = library.stream(array)
        if pointer is not None:
            found.setdefault(pointer, f"{name} ({library.name}) on stream {pointer:#x}")
    if len(found) > 1:
        raise UsageError(f"{' and '.join(found.values())}: pass stream=, and order the work on it yourself")
    if found:
        return next(iter(found))
    if any(isinstance(library, DLPackLibrary) for _, _, library in arrays):
        from cupy.cuda import get_current_stream

        return int(get_current_stream().ptr)
    return 0


@contextmanager
def cupy_stream(ordinal: int, stream: int) -> Iterator[None]:
    """Make a GPU and a stream current to CuPy in this thread."""
    from cupy.cuda import Device

    with Device(ordinal), _as_cupy(stream):
        yield


class _Handle(NamedTuple):
    """A stream that is known by its handle alone."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


def _as_cupy(stream: int) -> Any:
    from cupy.cuda import Stream

    return Stream.from_external(_Handle(stream))


def _interface(name: str, array: Any) -> dict[str, Any]:
    try:
        facts: dict[str, Any] = array.__cuda_array_interface__
    except Exception as error:
        raise _unreadable(f"{name} is {kind_of(array)} and cannot be read", error) from None
    return facts


def _require_float32(name: str, dtype: Any, idiom: Idiom) -> None:
    if dtype.char != "f" or not dtype.isnative:
        raise _not_float32(name, str(dtype), idiom)


def _not_float32(name: str, dtype: str, idiom: Idiom) -> UsageError:
    return UsageError(f"{name} is {dtype}, not float32: {idiom.instead(name, idiom.float32)}")


def _elements(name: str, strides: tuple[int, ...], idiom: Idiom) -> tuple[int, ...]:
    """Return strides in floats from strides in bytes."""
    if any(stride % FLOAT_BYTES for stride in strides):
        remedy = idiom.instead(name, idiom.copy)
        raise UsageError(f"{name} has strides of {strides} bytes, no multiples of 4: {remedy}")
    return tuple(stride // FLOAT_BYTES for stride in strides)


def _unreadable(what: str, error: Exception) -> DeviceError | UsageError:
    """Return why an array cannot be read: a fault of CUDA, or what its library says."""
    said = " ".join(str(error).split()) or type(error).__name__
    fault = known_fault(said)
    return UsageError(f"{what}: {said}") if fault is None else DeviceError(fault)
