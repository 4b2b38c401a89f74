"""What a launch hands to the driver, and what it does when the driver refuses; tests/gpu has the driver."""

from __future__ import annotations

import ctypes
import gc
import itertools
import sys
import threading
import weakref
from types import SimpleNamespace
from typing import ClassVar

import pytest

from autotune.errors import DeviceError, UsageError
from autotune.kernel import captures, workspaces
from autotune.kernel.cuda import CudaLaunch, CudaMachine, driver_version
from autotune.values.measurement import KernelLaunch, Launch

GEOMETRY = (1000, 7, 1, 2, 32, 4, 1, 49152)
SHAPE = ((7, 1, 2), (32, 4, 1), 49152)


class DriverError(RuntimeError):
    def __init__(self, status):
        super().__init__(f"CUDA error {status}")
        self.status = status


class Driver:
    """Reads the arguments through the pointers, as the driver does, and notes them."""

    CUDADriverError = DriverError

    def __init__(self, runtime, workspace=False):
        self.runtime = runtime
        self.kinds = [ctypes.c_float, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_float, ctypes.c_uint64]
        self.kinds += [ctypes.c_uint64] if workspace else []
        self.launches = []
        self.failures = []

    def launchKernel(self, *words):  # noqa: N802
        *geometry, stream, pointers, extra = words
        assert (tuple(geometry), extra) == (GEOMETRY, 0)
        if self.failures:
            raise DriverError(self.failures.pop(0))
        if self.runtime.current != 0 or not self.runtime.has_context:
            raise DriverError(400 if self.runtime.has_context else 201)
        places = (ctypes.c_void_p * len(self.kinds)).from_address(pointers)
        arguments = [kind.from_address(place).value for kind, place in zip(self.kinds, places, strict=True)]
        self.launches.append((stream, *arguments))


class Runtime:
    CUDARuntimeError: ClassVar[type] = type("CUDARuntimeError", (RuntimeError,), {})

    def __init__(self, current=0, has_context=True):
        self.current, self.has_context, self.capturing, self.zeroed = current, has_context, set(), []

    def getDevice(self):  # noqa: N802
        return self.current

    def setDevice(self, ordinal):  # noqa: N802
        self.current = ordinal

    def free(self, address):
        assert address == 0
        self.has_context = True

    def streamIsCapturing(self, stream):  # noqa: N802
        return stream in self.capturing

    def memsetAsync(self, *words):  # noqa: N802
        self.zeroed.append(words)


class Captured:
    """The driver's calls for captures: ``graphs`` is the capture of each stream, as (number, graph)."""

    def __init__(self):
        self.graphs, self.modes, self.mode, self.owned = {}, [], 0, []

    def cuStreamGetCaptureInfo_v2(self, stream, status, number, graph, *rest):  # noqa: N802
        status._obj.value, (number._obj.value, graph._obj.value) = 1, self.graphs[stream.value]
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode):  # noqa: N802
        mode._obj.value, self.mode = self.mode, mode._obj.value
        self.modes.append(self.mode)
        return 0

    def cuUserObjectCreate(self, owned, memory, destroy, count, flags):  # noqa: N802
        assert (count, flags) == (1, 1)
        owned._obj.value = 1 + len(self.owned)
        self.owned.append(
            [None, lambda: ctypes.CFUNCTYPE(None, ctypes.c_void_p)(destroy.value)(ctypes.addressof(memory))]
        )
        return 0

    def cuGraphRetainUserObject(self, graph, owned, count, flags):  # noqa: N802
        assert (count, flags) == (1, 1)
        self.owned[owned.value - 1][0] = graph.value
        return 0

    def destroy(self, graph):
        for owner, destroy in self.owned:
            if owner == graph:
                destroy()


@pytest.fixture(autouse=True)
def captured(monkeypatch):
    driver = Captured()
    monkeypatch.setattr(captures, "_driver", lambda: driver)
    monkeypatch.setattr(workspaces, "graphs", captures.Graphs())
    monkeypatch.setattr(workspaces, "_made", {})
    monkeypatch.setattr(workspaces, "_spare", {})
    return driver


@pytest.fixture
def launch():
    runtime = Runtime()
    driver = Driver(runtime)
    return CudaLaunch(0, Launch.of("sgemm", *SHAPE), [1000], driver, runtime), driver, runtime


def test_the_arguments_arrive(launch):
    enqueue, driver, _ = launch
    enqueue(1 << 40, (1 << 41) + 4, 3, 0.5, -2.0, 9)
    enqueue(4, 5, 6, 1, 0, 0)
    enqueue(4, 5, 6, float("inf"), 0.1, 2**63)
    assert driver.launches == [
        (9, 0.5, 1 << 40, (1 << 41) + 4, -2.0, 3),
        (0, 1.0, 4, 5, 0.0, 6),
        (2**63, float("inf"), 4, 5, pytest.approx(0.1), 6),
    ]


def test_a_sequence_is_launched_in_order_each_kernel_with_its_own_arguments(monkeypatch):
    pytest.importorskip("cupy")
    monkeypatch.setattr("cupy.cuda.Memory", Memory)
    kernels = (
        KernelLaunch("scan", (3, 1, 1), (64, 1, 1), 0, ("b", "workspace")),
        KernelLaunch("product", (7, 1, 2), (32, 4, 1), 49152, ("a", "c", "beta")),
    )
    launches = []

    def note(*words):
        *geometry, stream, pointers, _ = words
        kinds = {
            64: (ctypes.c_uint64, ctypes.c_uint64),
            32: (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_float),
        }
        some = kinds[geometry[4]]
        places = (ctypes.c_void_p * len(some)).from_address(pointers)
        values = [kind.from_address(place).value for kind, place in zip(some, places, strict=True)]
        launches.append((geometry, stream, values))

    runtime = Runtime()
    driver = SimpleNamespace(launchKernel=note, CUDADriverError=DriverError)
    enqueue = CudaLaunch(0, Launch(kernels, 512), [1000, 2000], driver, runtime)
    enqueue(4, 5, 6, 1.0, 0.5, 7)
    assert launches == [
        ([1000, 3, 1, 1, 64, 1, 1, 0], 7, [5, Memory.count << 32]),
        ([2000, 7, 1, 2, 32, 4, 1, 49152], 7, [4, 6, 0.5]),
    ]


def test_threads_never_mix_their_arguments(launch):
    enqueue, driver, _ = launch

    def call(number):
        for turn in range(300):
            value = 1000 * number + turn
            enqueue(value, value, value, float(value), float(value), value)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(driver.launches) == 2400
    assert all(len({*map(float, launched)}) == 1 for launched in driver.launches)


def test_another_current_device_is_set_for_the_launch_and_given_back(launch):
    enqueue, driver, runtime = launch
    runtime.current = 3
    enqueue(4, 5, 6, 1.0, 0.0, 7)
    assert driver.launches == [(7, 1.0, 4, 5, 0.0, 6)]
    assert runtime.current == 3


def test_a_thread_without_a_context_gets_one(launch):
    enqueue, driver, runtime = launch
    runtime.has_context = False
    enqueue(4, 5, 6, 1.0, 0.0, 7)
    assert len(driver.launches) == 1


def test_what_the_driver_refuses_is_one_clear_error(launch):
    enqueue, driver, runtime = launch
    driver.failures = [700]
    with pytest.raises(DeviceError, match="GPU 0 refuses the launch on stream 0x7: CUDA error 700"):
        enqueue(4, 5, 6, 1.0, 0.0, 7)
    runtime.current, driver.failures = 3, [400, 701]
    with pytest.raises(DeviceError, match="CUDA error 701"):
        enqueue(4, 5, 6, 1.0, 0.0, 7)
    assert runtime.current == 3
    enqueue(4, 5, 6, 1.0, 0.0, 7)  # and it goes on working
    assert len(driver.launches) == 1


class Memory:
    count = 0

    def __init__(self, size):
        Memory.count += 1
        self.size, self.ptr = size, Memory.count << 32


@pytest.fixture
def working(monkeypatch):
    pytest.importorskip("cupy")
    monkeypatch.setattr("cupy.cuda.Memory", Memory)
    runtime = Runtime()
    driver = Driver(runtime, workspace=True)
    return CudaLaunch(0, Launch.of("sgemm", *SHAPE, 512), [1000], driver, runtime), driver, runtime


def test_each_stream_has_a_workspace_zeroed_once(working):
    enqueue, driver, runtime = working
    for stream in (7, 7, 8, 0, 7):
        enqueue(4, 5, 6, 1.0, 0.0, stream)
    places = [launched[-1] for launched in driver.launches]
    assert places[0] == places[1] == places[4]
    assert len(set(places)) == 3
    assert runtime.zeroed == [(places[0], 0, 512, 7), (places[2], 0, 512, 8), (places[3], 0, 512, 0)]


def test_of_a_workspace_what_may_hold_anything_is_not_zeroed(working):
    _, driver, runtime = working
    one = Launch.of("sgemm", *SHAPE, 4096)
    for scratch in (4096 - 256, 4096):
        kernel = CudaLaunch(0, Launch(one.kernels, 4096, scratch), [1000], driver, runtime)
        kernel(4, 5, 6, 1.0, 0.0, 7)
    assert [(size, stream) for _, _, size, stream in runtime.zeroed] == [(256, 7)]


def places(driver):
    return [launched[-1] for launched in driver.launches]


def more(driver, runtime, size):
    """Another kernel, of a larger workspace."""
    return CudaLaunch(0, Launch.of("sgemm", *SHAPE, size), [1000], driver, runtime)


def test_kernels_of_a_stream_share_memory_in_turns(working):
    """Each has a place of its own as long as there is room, then takes over what others had, zeroed anew."""
    enqueue, driver, runtime = working
    before, size = Memory.count, 5 << 20
    kernels = [enqueue, *(more(driver, runtime, size) for _ in range(20))]
    for kernel in kernels:
        kernel(4, 5, 6, 1.0, 0.0, 7)
    assert workspaces.held_bytes() <= workspaces.LIMIT_BYTES
    assert (Memory.count - before) * size <= workspaces.LIMIT_BYTES + size
    assert len(runtime.zeroed) == len(kernels)
    kernels[-1](4, 5, 6, 1.0, 0.0, 7)
    assert len(runtime.zeroed) == len(kernels)  # its place is still there
    enqueue(4, 5, 6, 1.0, 0.0, 7)
    assert runtime.zeroed[-1] == (places(driver)[-1], 0, 512, 7)
    latest = {place: size for place, _, size, _ in runtime.zeroed[-3:]}
    assert all(a + latest[a] <= b for a, b in itertools.pairwise(sorted(latest)))


def test_a_kernel_that_needs_more_than_the_limit_has_it(working):
    _, driver, runtime = working
    large = more(driver, runtime, 3 * workspaces.LIMIT_BYTES)
    small = more(driver, runtime, 512)
    for kernel in (small, large, small, large):
        kernel(4, 5, 6, 1.0, 0.0, 7)
    assert [size for _, _, size, _ in runtime.zeroed] == [
        512,
        3 * workspaces.LIMIT_BYTES,
        512,
        large._workspace_bytes,
    ]


def test_a_captured_stream_has_a_workspace_of_its_graph_called_before_or_not(working, captured):
    enqueue, driver, runtime = working
    runtime.capturing, captured.graphs = {7}, {7: (1, 0xA)}
    enqueue(4, 5, 6, 1.0, 0.0, 7)
    enqueue(4, 5, 6, 1.0, 0.0, 7)  # behind the first in the same graph, which left it zeroed
    enqueue(4, 5, 6, 1.0, 0.0, 8)
    runtime.capturing = set()
    enqueue(4, 5, 6, 1.0, 0.0, 7)
    runtime.capturing, captured.graphs = {7}, {7: (2, 0xB)}
    enqueue(4, 5, 6, 1.0, 0.0, 7)
    first, second, other, eager, next_graph = places(driver)
    assert first == second
    assert len({first, other, eager, next_graph}) == 4
    assert [(place, stream) for place, _, _, stream in runtime.zeroed] == [
        (first, 7),  # captured: a node of the graph
        (other, 8),
        (eager, 7),
        (next_graph, 7),
    ]
    assert captured.mode == 0  # what was relaxed is strict again
    assert 2 in captured.modes


def test_streams_that_one_capture_joins_share_no_workspace(working, captured):
    enqueue, driver, runtime = working
    runtime.capturing, captured.graphs = {7, 8}, {7: (1, 0xA), 8: (1, 0xA)}
    for stream in (7, 8, 7):
        enqueue(4, 5, 6, 1.0, 0.0, stream)
    one, two, again = places(driver)
    assert one == again != two


def test_the_workspace_of_a_graph_that_is_gone_serves_the_next_one(working, captured):
    enqueue, driver, runtime = working
    before = Memory.count
    runtime.capturing = {7}
    for number in range(1, 40):
        captured.graphs = {7: (number, number)}
        enqueue(4, 5, 6, 1.0, 0.0, 7)
        if number > 2:  # two are in use at any time
            captured.destroy(number - 2)
    assert Memory.count - before <= 4
    assert all(one != two for one, two in itertools.pairwise(places(driver)))
    assert len(workspaces._made) <= 3


def test_a_graph_keeps_a_kernel_that_was_dropped(working, captured):
    _, driver, runtime = working
    enqueue = CudaLaunch(0, Launch.of("sgemm", *SHAPE, 512), [1000], driver, runtime)
    runtime.capturing, captured.graphs = {7}, {7: (1, 0xA)}
    enqueue(4, 5, 6, 1.0, 0.0, 7)
    alive = weakref.ref(enqueue)
    del enqueue
    workspaces.graphs.sweep()
    gc.collect()
    assert alive() is not None
    captured.destroy(0xA)
    workspaces.graphs.sweep()
    gc.collect()
    assert alive() is None


def test_a_capture_that_failed_is_said_to_have(working, captured):
    enqueue, driver, runtime = working
    runtime.capturing, captured.graphs = {7}, {7: (0, 0)}
    with pytest.raises(DeviceError, match="the capture of stream 0x7 has failed: end it"):
        enqueue(4, 5, 6, 1.0, 0.0, 7)
    assert driver.launches == []


def test_the_per_thread_default_stream_is_another_in_every_thread(working):
    enqueue, driver, _ = working
    enqueue(4, 5, 6, 1.0, 0.0, 2)
    thread = threading.Thread(target=enqueue, args=(4, 5, 6, 1.0, 0.0, 2))
    thread.start()
    thread.join()
    assert len({launched[-1] for launched in driver.launches}) == 2


@pytest.mark.parametrize(
    ("line", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Tue Aug 12 21:09:50 UTC 2026",
            "580.159.04",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (x@y)",
            "580.95.05",
        ),
        ("something else", None),
    ],
)
def test_the_version_of_the_driver_is_read_from_the_kernel_module(line, version, monkeypatch):
    monkeypatch.setattr("autotune.kernel.cuda.Path.read_text", lambda self: f"{line}\nGCC version: 13.2.0\n")
    driver_version.cache_clear()
    assert driver_version() == version
    driver_version.cache_clear()


# --- what a machine loads and asks ---


def test_a_fault_of_the_process_is_not_said_of_the_kernel(monkeypatch):
    """Every other kernel would fail alike: it is raised at once, not passed over."""
    pytest.importorskip("cupy")
    from cupy.cuda import runtime

    from autotune.kernel import cuda

    source = SimpleNamespace(launch=SimpleNamespace(), entry="f", config=SimpleNamespace(id="BM64"))

    def current(text):
        def fail(runtime, ordinal):
            raise runtime.CUDARuntimeError(text)

        return fail

    monkeypatch.setattr(cuda, "current", current(700))
    with pytest.raises(runtime.CUDARuntimeError, match="cudaErrorIllegalAddress"):
        cuda.loaded(0, source, b"")
    monkeypatch.setattr(cuda, "current", current(98))
    with pytest.raises(DeviceError, match="GPU 0 does not load kernel BM64: cudaErrorInvalidDeviceFunction"):
        cuda.loaded(0, source, b"")


def test_a_captured_stream_is_refused_before_anything_is_asked_of_it(monkeypatch):
    pytest.importorskip("cupy")

    machine = object.__new__(CudaMachine)
    machine.ordinal = 0
    monkeypatch.setattr("cupy.cuda.runtime.streamIsCapturing", lambda stream: True)
    with pytest.raises(UsageError, match=r"stream 0x7 is being captured, .* made without check_finite"):
        machine.answer(lambda address: pytest.fail("nothing is launched"), 7)


def test_arrays_of_a_graph_are_kept_by_whoever_keeps_the_graph(monkeypatch):
    """An event that was recorded in a capture can never be asked whether it is done."""
    pytest.importorskip("cupy")
    from autotune.kernel.libraries import DLPackLibrary

    monkeypatch.setattr("cupy.cuda.runtime.streamIsCapturing", lambda stream: True)
    monkeypatch.setattr("cupy.cuda.Event", lambda **words: pytest.fail("nothing is recorded"))
    library = DLPackLibrary()
    library.hold([object()], 0, 7)
    assert not library._held


def test_a_capture_is_seen_on_the_current_stream_of_each_library(monkeypatch):
    machine = object.__new__(CudaMachine)
    machine.ordinal, machine.current_stream = 0, lambda ordinal: SimpleNamespace(ptr=5)
    captured = set()
    runtime = SimpleNamespace(streamIsCapturing=lambda stream: stream in captured)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    monkeypatch.setitem(sys.modules, "cupy.cuda", SimpleNamespace(runtime=runtime))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert not machine.capturing(None)
    captured.add(5)
    assert machine.capturing(None)
    assert not machine.capturing(0)  # the default stream is never captured
    assert not machine.capturing(7)
    captured.clear()
    captured.add(9)
    assert not machine.capturing(None)
    torch = SimpleNamespace(
        is_initialized=lambda: True, current_stream=lambda ordinal: SimpleNamespace(cuda_stream=9)
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=torch))
    assert machine.capturing(None)
    assert machine.capturing(9)
