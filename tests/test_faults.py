"""Errors of CUDA, as the array libraries word them, become one line of our own error tree."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.errors import DeviceError, UsageError
from autotune.values.faults import cuda_fault


def error(kind, text):
    return type(kind, (RuntimeError,), {})(text)


FAULTS = [
    error("CUDARuntimeError", "cudaErrorIllegalAddress: an illegal memory access was encountered"),
    error("CUDADriverError", "CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered"),
    error("CUDADriverError", "CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure"),
    error("CUDARuntimeError", "cudaErrorLaunchTimeout: the launch timed out and was terminated"),
    error("CUDARuntimeError", "cudaErrorMisalignedAddress: misaligned address"),
    error(
        "AcceleratorError", "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might"
    ),
    error("RuntimeError", "CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA"),
    error("XlaRuntimeError", "INTERNAL: failed: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access"),
    error("CudaAPIError", "[700] Call to cuMemAlloc results in CUDA_ERROR_ILLEGAL_ADDRESS"),
]
FORKED = [
    error("CUDARuntimeError", "cudaErrorInitializationError: initialization error"),
    error("CUDADriverError", "CUDA_ERROR_NOT_INITIALIZED: initialization error"),
    error(
        "RuntimeError",
        "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you",
    ),
    error("CudaDriverError", "CUDA initialized before forking"),
]
CAPTURED = [
    error(
        "CUDARuntimeError",
        "cudaErrorStreamCaptureUnsupported: operation not permitted when stream is capturing",
    ),
    error(
        "CUDARuntimeError", "cudaErrorStreamCaptureImplicit: operation would make the legacy stream depend on"
    ),
    error(
        "CUDADriverError",
        "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED: operation not permitted when stream is capt",
    ),
    error("AcceleratorError", "CUDA error: operation not permitted when stream is capturing\nSearch f"),
    error(
        "CUDARuntimeError", "cudaErrorCapturedEvent: operation not permitted on an event last recorded in a"
    ),
]
FULL = [
    error("CUDARuntimeError", "cudaErrorMemoryAllocation: out of memory"),
    error("CUDADriverError", "CUDA_ERROR_OUT_OF_MEMORY: out of memory"),
    error("OutOfMemoryError", "Out of memory allocating 4,096 bytes (allocated so far: 0 bytes)."),
    error(
        "OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of"
    ),
]
CASES = [
    *((each, "start a new one (compute-sanitizer names the kernel)") for each in FAULTS),
    *((each, "start children by multiprocessing's 'spawn' method") for each in FORKED),
    *((each, "make the same call once before the capture") for each in CAPTURED),
    *((each, "the GPU has too little free memory") for each in FULL),
    (
        error("CUDARuntimeError", "cudaErrorInvalidPciBusId: invalid\n id"),
        "CUDA refuses the call: cudaErrorInvalidP",
    ),
]


@pytest.mark.parametrize(("fault", "meaning"), CASES, ids=lambda each: str(each)[:30])
def test_what_an_error_of_cuda_means_is_one_line(fault, meaning):
    said = cuda_fault(fault)
    assert said is not None
    assert meaning in said
    assert "\n" not in said


@pytest.mark.parametrize(
    "other",
    [RuntimeError("illegal"), ValueError("out of memory"), KeyError("x"), MemoryError(), UsageError("no")],
)
def test_any_other_error_is_left_alone(other):
    assert cuda_fault(other) is None


@pytest.mark.parametrize(
    ("fault", "meaning"), [CASES[0], CASES[9], CASES[13], CASES[18]], ids=lambda e: str(e)[:30]
)
def test_a_call_raises_none_of_them(fault, meaning, monkeypatch):
    """Whatever step of a call a library fails in."""
    import autotune
    from autotune.kernel.kernel import Kernel
    from autotune.kernel.libraries import NumPyLibrary
    from autotune.kernel.simulated import SimulatedMachine

    def fail(*words, **named):
        raise fault

    kernel = autotune.best_kernel(8, 6, 4, device="simulator")
    a, b, out = np.ones((8, 4), "f"), np.ones((4, 6), "f"), np.ones((8, 6), "f")
    for owner, name in ((NumPyLibrary, "view"), (NumPyLibrary, "empty"), (SimulatedMachine, "take")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            with pytest.raises(DeviceError, match=meaning.split("(")[0]):
                kernel(a, b)
    with monkeypatch.context() as patch:
        patch.setattr(NumPyLibrary, "view", fail)
        with pytest.raises(DeviceError, match=meaning.split("(")[0]):
            autotune.matmul(a, b, device="simulator")
    with monkeypatch.context() as patch:
        patch.setattr(kernel, "_enqueue", fail)
        with pytest.raises(DeviceError, match=meaning.split("(")[0]):
            kernel.launch(a.ctypes.data, b.ctypes.data, out.ctypes.data)
    with monkeypatch.context() as patch:
        patch.setattr(SimulatedMachine, "load", fail)
        with pytest.raises(DeviceError, match=meaning.split("(")[0]):
            autotune.best_kernel(8, 6, 4, device="simulator")
        with pytest.raises(DeviceError, match=meaning.split("(")[0]):
            autotune.matmul(a[:3], b, device="simulator")
    assert isinstance(kernel, Kernel)
    assert (kernel(a, b) == 4).all()
