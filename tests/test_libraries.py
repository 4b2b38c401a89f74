"""What the array interfaces say, read as GPU memory would be; tests/gpu has the libraries themselves."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.errors import UsageError
from autotune.kernel import libraries
from autotune.kernel.libraries import InterfaceLibrary, take


class Exposed:
    """Host memory behind the protocol of GPU arrays."""

    def __init__(self, array, **changes):
        self.array = array
        self.changes = changes

    @property
    def __cuda_array_interface__(self):
        interface = self.array.__array_interface__
        strides = None if self.array.flags.c_contiguous else self.array.strides
        facts = {"shape": self.array.shape, "typestr": self.array.dtype.str, "data": interface["data"]}
        return {**facts, "strides": strides, "version": 3, "stream": None, **self.changes}


class Broken:
    @property
    def __cuda_array_interface__(self):
        raise RuntimeError("detached\nfrom its memory")


@pytest.fixture(autouse=True)
def on_gpu_zero(monkeypatch):
    monkeypatch.setattr(libraries, "ordinal_of", lambda name, address, empty: 0)


def view(array):
    return InterfaceLibrary().view("a", array, 0)[0]


def fault(call, *words):
    with pytest.raises(UsageError) as caught:
        call(*words)
    assert "\n" not in str(caught.value)
    return str(caught.value)


F32 = np.zeros((6, 8), np.float32)


def test_strides_come_in_elements():
    assert view(Exposed(F32)).strides == (8, 1)
    assert view(Exposed(F32[:, ::2])).strides == (8, 2)
    assert view(Exposed(F32[::-1])).strides == (-8, 1)
    assert view(Exposed(F32.T)).strides == (1, 8)
    assert view(Exposed(np.zeros((2, 3, 4), np.float32))).strides == (12, 4, 1)
    assert view(Exposed(F32[2:])).address == F32.ctypes.data + 64


def test_what_is_read_only_is_not_writable():
    frozen = F32.copy()
    frozen.flags.writeable = False
    assert not view(Exposed(frozen)).writable
    assert view(Exposed(F32)).writable


@pytest.mark.parametrize("kind", ["float64", "float16", "int32", "complex64", ">f4"])
def test_only_float32_is_taken(kind):
    assert fault(view, Exposed(F32.astype(kind))) == (
        f"a is {np.dtype(kind)}, not float32: pass cupy.asarray(a).astype('float32')"
    )


def test_what_cannot_be_taken():
    assert "has a mask" in fault(view, Exposed(F32, mask=Exposed(F32)))
    assert "no multiples of 4" in fault(view, Exposed(F32, strides=(33, 4)))
    assert "cannot be read: detached from its memory" in fault(view, Broken())


def test_arrays_on_one_stream_run_on_it():
    a, b, out = (Exposed(F32, stream=stream) for stream in (9, 9, 9))
    assert take(a, b, out, None).stream == 9
    assert take(Exposed(F32), Exposed(F32, stream=1), None, None).stream == 0
    assert take(a, Exposed(F32, stream=7), out, 5).stream == 5


def test_arrays_on_two_streams_need_one_passed():
    message = fault(take, Exposed(F32, stream=9), Exposed(F32, stream=7), None, None)
    assert message.startswith(
        "a (CUDA array interface) on stream 0x9 and b (CUDA array interface) on stream 0x7"
    )
    assert message.endswith(": pass stream=, and order the work on it yourself")


def test_host_arrays_are_for_the_simulator_and_only_they():
    assert fault(take, F32, F32, None, None) == (
        "a is a numpy.ndarray, in host memory: pass cupy.asarray(a), or ask for device='simulator'"
    )
    with pytest.raises(
        UsageError, match=r"b is an? .*Exposed: a kernel in the simulator takes numpy\.ndarray"
    ):
        take(F32, Exposed(F32), None, None, host=True)
    taken = take(F32, F32, None, None, host=True)
    assert taken.a.ordinal is None
    assert taken.stream == 0


def test_out_is_written_back_where_only_a_copy_can_be_taken():
    assert fault(take, Exposed(F32), Exposed(F32), F32, 0) == (
        "out is a numpy.ndarray, in host memory: pass c = cupy.asarray(out) as out, then out[...] = c.get(), "
        "or ask for device='simulator'"
    )
    assert fault(take, Exposed(F32), Exposed(F32), Exposed(F32.astype("d")), 0) == (
        "out is float64, not float32: pass c = cupy.asarray(out).astype('float32') as out, "
        "then cupy.asarray(out)[...] = c"
    )


@pytest.mark.parametrize("value", [None, 3.0, [[1.0]], "a", memoryview(b"abcd")])
def test_what_is_no_array(value):
    assert fault(take, value, Exposed(F32), None, None).endswith(
        "pass an array on a GPU (CuPy, PyTorch, Numba or JAX), float32"
    )


def test_dlpack_in_host_memory_is_refused():
    class OnTheHost:
        def __dlpack__(self, **words):
            raise AssertionError("nobody asks for the memory")

        def __dlpack_device__(self):
            return (1, 0)

    assert "in host memory: pass one that lies on a GPU" in fault(take, OnTheHost(), Exposed(F32), None, 0)


def test_an_unknown_library_has_no_result():
    taken = take(Exposed(F32), Exposed(F32), None, None)
    assert fault(taken.library.empty, "a", (2, 2), taken.like, 0, 0).endswith(
        "of which no result can be made: pass out="
    )


def test_numpy_results_are_aligned():
    for shape in ((1, 1), (3, 5), (33, 17)):
        made = libraries.NumPyLibrary().empty("a", shape, F32, 0, 0)
        assert made.shape == shape
        assert made.flags.c_contiguous
        assert made.ctypes.data % 16 == 0
