"""One GPU of this process: machine code is loaded onto it and launched on addresses, through CuPy.

A launch writes its arguments into a buffer that was laid out once, and calls the driver: nothing is
converted.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from autotune.code.compiler import Binary
from autotune.code.render import Source
from autotune.errors import DeviceError, UsageError
from autotune.kernel.captures import LEGACY_DEFAULT, is_capturing
from autotune.kernel.libraries import Taken, cupy_stream, take
from autotune.kernel.once import Once
from autotune.kernel.workspaces import PER_THREAD_DEFAULT, Workspaces, current, workspaces_of
from autotune.measure.calls import Calls, Start
from autotune.values.device import Device, current_device
from autotune.values.faults import known_fault
from autotune.values.measurement import Launch

_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CUfunction_attribute of cuda.h
_INVALID_CONTEXT = 201  # CUresult
_numbers = itertools.count()  # of loaded kernels


class CudaMachine:
    """One GPU of this process.

    Attributes:
        device: Its facts.
        ordinal: Its CUDA ordinal.
        options: For the compiler, beyond its usual ones.
        ndarray: The array type with the short way through `Kernel.__call__`.
    """

    options: tuple[str, ...] = ()

    def __init__(self, ordinal: int, device: Device) -> None:
        import cupy
        from cupy.cuda import get_current_stream

        self.ordinal: int = ordinal
        self.device = device
        self.ndarray: Any = cupy.ndarray
        self.current_stream = get_current_stream

    def __reduce__(self) -> tuple[Any, ...]:
        return _same_machine, (self.ordinal, self.device)

    def take(self, a: Any, b: Any, out: Any, stream: Any, name: str = "a") -> Taken:
        """Turn arrays into operands on a stream: see `autotune.kernel.libraries.take`."""
        return take(a, b, out, stream, name)

    def load(self, source: Source, binary: Binary) -> CudaLaunch:
        """Load machine code onto the GPU.

        Raises:
            DeviceError: The driver refuses it.
        """
        return loaded(self.ordinal, source, binary.cubin)

    def answer(self, enqueue: Callable[[int], None], stream: int) -> float:
        """Wait for the float that a launch on a stream writes, given its address; 0 where it writes none."""
        import cupy
        from cupy.cuda import runtime

        if is_capturing(runtime, stream):
            raise UsageError(
                f"stream {stream:#x} is being captured, where the host cannot look at the operands first: "
                "capture a kernel that was made without check_finite"
            )
        with cupy_stream(self.ordinal, stream):
            found = cupy.zeros(1, cupy.float32)
            enqueue(found.data.ptr)
            return float(found.get()[0])

    def capturing(self, stream: int | None) -> bool:
        """Return whether a stream is being captured; None for the current ones of this thread's libraries."""
        from cupy.cuda import runtime

        streams = [stream] if stream is not None else [int(self.current_stream(self.ordinal).ptr)]
        torch = sys.modules.get("torch")
        if stream is None and torch is not None and torch.cuda.is_initialized():
            streams.append(int(torch.cuda.current_stream(self.ordinal).cuda_stream))
        return any(is_capturing(runtime, each) for each in streams)


_machines: Once[int, CudaMachine] = Once()


def cuda_machine(ordinal: int) -> CudaMachine:
    """Return the GPU with a CUDA ordinal.

    Raises:
        DeviceError: CuPy or the driver is missing, or this process sees no such GPU.
    """
    return _machines(ordinal, lambda: CudaMachine(ordinal, current_device(ordinal)))


def _same_machine(ordinal: int, device: Device) -> CudaMachine:
    """Return the GPU on which a kernel was pickled, or another of its kind with the same ordinal."""
    machine = cuda_machine(ordinal)
    here = machine.device
    if (here.slug, here.arch, here.sm_count) != (device.slug, device.arch, device.sm_count):
        raise DeviceError(
            f"the kernel was pickled for {device.name} ({device.sm_count} SMs), and GPU {ordinal} is "
            f"{here.name} ({here.sm_count} SMs) here: call best_kernel here"
        )
    return machine


def current_ordinal() -> int:
    """Return the ordinal of CuPy's current device; 0 where there is none, which `cuda_machine` reports."""
    try:
        from cupy.cuda import runtime

        return int(runtime.getDevice())
    except Exception:  # without CuPy, driver or GPU
        return 0


@cache
def driver_version() -> str | None:
    """Return the version of the driver, such as "580.95.05"; None where the kernel module states none."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"Kernel Module[^\n]*?\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return found[1] if found else None


def loaded(ordinal: int, source: Source, cubin: bytes) -> CudaLaunch:
    """Load machine code onto a GPU.

    Raises:
        DeviceError: The driver refuses it.
    """
    from cupy.cuda import runtime
    from cupy.cuda.function import Module
    from cupy_backends.cuda.api import driver

    launch = source.launch
    try:
        with current(runtime, ordinal):
            module = Module()
            module.load(cubin)
            functions = [module.get_function(each.entry) for each in launch.kernels]
            for each, function in zip(launch.kernels, functions, strict=True):
                if each.shared_bytes > 0:  # above 48 KiB a kernel must opt in
                    driver.funcSetAttribute(function.ptr, _MAX_DYNAMIC_SHARED_SIZE_BYTES, each.shared_bytes)
    except (driver.CUDADriverError, runtime.CUDARuntimeError) as error:
        if known_fault(str(error)):  # not this kernel's doing: any other would fail alike
            raise
        raise DeviceError(f"GPU {ordinal} does not load kernel {source.config.id}: {error}") from None
    return CudaLaunch(ordinal, launch, [function.ptr for function in functions], driver, runtime, functions)


class CudaLaunch:
    """Loaded kernels; calling it enqueues one multiplication.

    Args:
        ordinal: CUDA ordinal of the GPU.
        launch: What is launched, and how.
        functions: Handle of each kernel of the launch.
        driver: CuPy's driver interface.
        runtime: CuPy's runtime interface.
        kept: An object that must live as long as this.
    """

    def __init__(
        self,
        ordinal: int,
        launch: Launch,
        functions: Sequence[int],
        driver: Any,
        runtime: Any,
        kept: Any = None,
    ) -> None:
        self._ordinal = ordinal
        self._launch, self._functions, self._driver = launch, functions, driver
        self._workspace_bytes, self._zeroed = launch.workspace_bytes, launch.zeroed_bytes
        self._errors: tuple[type[Exception], ...] = (driver.CUDADriverError, runtime.CUDARuntimeError)
        self._runtime = runtime
        self._kept = kept
        self._number = next(_numbers)
        self._of_streams: dict[int, Workspaces] = {}
        self._is_capturing = runtime.streamIsCapturing
        self._spare: list[Calls] = []

    def __call__(
        self, a: int, b: int, c: int, alpha: float, beta: float, stream: int, prepared: int = 0, /
    ) -> None:
        """Enqueue one launch.

        Args:
            a: Address of A.
            b: Address of B.
            c: Address of C.
            alpha: Scalar of the product.
            beta: Scalar of C.
            stream: Handle.
            prepared: Address of what B was prepared into, for a launch that takes it.

        Raises:
            DeviceError: The driver refuses the launch.
        """
        spare = self._spare
        try:
            calls = spare.pop()  # arguments of its own for every launch under way: threads share none
        except IndexError:
            calls = Calls(self._launch, self._functions, self._driver)
        addresses, scalars = calls.addresses, calls.scalars
        addresses[0] = a
        addresses[1] = b
        addresses[2] = c
        if prepared:
            addresses[4] = prepared
        scalars[0] = alpha
        scalars[1] = beta
        workspaces = None
        if self._workspace_bytes:
            workspaces = self._of_streams.get(stream)
            if workspaces is None or (stream > LEGACY_DEFAULT and self._is_capturing(stream)):
                workspaces = self._workspaces(stream)
            workspaces.lock.acquire()  # until the launch: then another kernel may have the place
        try:
            if workspaces is not None:
                addresses[3] = workspaces.places.get(self._number) or workspaces.place(
                    self._number, self._workspace_bytes, self._zeroed
                )
            for start in calls.starts:
                try:
                    start(stream)
                except self._errors as error:
                    self._start_again(error, start, stream)
        finally:
            if workspaces is not None:
                workspaces.lock.release()
        spare.append(calls)

    def _workspaces(self, stream: int) -> Workspaces:
        """Return those of a stream that is new or captured, and remember the ones that are no graph's."""
        found = workspaces_of(self._runtime, self._ordinal, stream, self)
        captured = stream > LEGACY_DEFAULT and self._is_capturing(stream)
        if not captured and stream != PER_THREAD_DEFAULT:
            self._of_streams[stream] = found
        return found

    def _start_again(self, error: Exception, start: Start, stream: int) -> None:
        """Make the kernel's GPU current and repeat the launch, if that can have been what was missing.

        Raises:
            DeviceError: It was not.
        """
        try:
            elsewhere = self._runtime.getDevice() != self._ordinal
            if elsewhere or getattr(error, "status", None) == _INVALID_CONTEXT:
                with current(self._runtime, self._ordinal):
                    start(stream)
                return
        except self._errors as again:
            error = again
        why = known_fault(str(error)) or str(error)
        raise DeviceError(f"GPU {self._ordinal} refuses the launch on stream {stream:#x}: {why}") from None

    def __del__(self) -> None:
        with suppress(Exception), current(self._runtime, self._ordinal):  # others may be capturing just now
            self._kept = None
