from __future__ import annotations

import ctypes
import re
import sys
import types

import numpy as np
import pytest

from autotune.code.nvrtc import nvrtc
from autotune.errors import DeviceError, UsageError
from autotune.values.device import Device, current_device, has_gpu, known_devices, named_device
from autotune.values.problem import Problem

PROPERTIES = {
    "name": b"NVIDIA H200",
    "major": 9,
    "minor": 0,
    "multiProcessorCount": 132,
    "sharedMemPerBlockOptin": 232448,
    "sharedMemPerMultiprocessor": 233472,
    "regsPerMultiprocessor": 65536,
    "maxThreadsPerBlock": 1024,
    "maxThreadsPerMultiProcessor": 2048,
    "l2CacheSize": 62914560,
    "totalGlobalMem": 150110011392,
}


class FakeRuntime(types.ModuleType):
    """The few calls of ``cupy.cuda.runtime`` that a machine without a GPU cannot answer."""

    class CUDARuntimeError(RuntimeError):
        pass

    def __init__(self, count: int = 1, driver: int = 13000, why: str = "", **properties: object) -> None:
        super().__init__("cupy.cuda.runtime")
        self.count, self.driver, self.why, self.properties = count, driver, why, {**PROPERTIES, **properties}

    def getDeviceCount(self) -> int:  # noqa: N802  # CuPy's spelling
        if self.why:
            raise self.CUDARuntimeError(self.why)
        return self.count

    def getDeviceProperties(self, ordinal: int) -> dict[str, object]:  # noqa: N802
        return self.properties

    def deviceGetAttribute(self, attribute: int, ordinal: int) -> int:  # noqa: N802
        return {13: 1980000, 36: 3125000, 37: 6144, 106: 32}[attribute]  # kHz, kHz, bits, blocks

    def driverGetVersion(self) -> int:  # noqa: N802
        return self.driver

    def runtimeGetVersion(self) -> int:  # noqa: N802
        return 13020


@pytest.fixture
def with_runtime(monkeypatch):
    def install(runtime: FakeRuntime) -> None:
        cuda = types.ModuleType("cupy.cuda")
        cuda.runtime = runtime  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
        monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)

    return install


def test_every_known_device_is_complete_and_plausible():
    devices = known_devices()
    assert {"t4", "a100", "a10", "rtx4090", "h100sxm", "h200", "b200", "rtx5090"} <= set(devices)
    for key, device in devices.items():
        assert re.fullmatch(r"[a-z0-9]+", key)
        assert re.fullmatch(r"\d+\.\d", device.compute_capability)
        assert 48 * 1024 <= device.shared_per_block <= device.shared_per_sm
        assert device.shared_per_sm - device.shared_per_block in (0, 1024)
        assert device.max_threads_per_sm % device.max_threads_per_block in (0, 512)
        assert device.l2_bytes >= 2**22
        assert 300 <= device.bandwidth_gbs <= 10000
    assert len({device.slug for device in devices.values()}) == len(devices)


def test_nvrtc_knows_every_known_device():
    for device in known_devices().values():
        assert nvrtc().resolve(device.arch) == device.arch


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("h200", "h200"),
        ("H200", "h200"),
        ("NVIDIA H200", "h200"),
        ("GeForce RTX 4090", "rtx4090"),
        ("nvidia geforce rtx 4090", "rtx4090"),
        ("RTX-4090", "rtx4090"),
        ("Tesla T4", "t4"),
        ("t4", "t4"),
    ],
)
def test_a_device_is_named_as_people_write_it(name, key):
    assert named_device(name) is known_devices()[key]


@pytest.mark.parametrize("name", ["", "h20", "h2000", "voodoo2"])
def test_unknown_target_lists_the_known_ones(name):
    with pytest.raises(UsageError, match=rf"^target '{name}' is not in the table: give one of t4, a100, "):
        named_device(name)


def test_capability_and_architecture():
    assert (known_devices()["t4"].capability, known_devices()["t4"].arch) == (75, "sm_75")
    assert (known_devices()["rtx5090"].capability, known_devices()["rtx5090"].arch) == (120, "sm_120")


@pytest.mark.parametrize(
    ("name", "teraflops"),  # FP32 peak that the data sheet states
    [
        ("t4", 8.1),
        ("a100", 19.5),
        ("a10", 31.2),
        ("rtx3090", 35.6),
        ("rtx4090", 82.6),
        ("rtx6000ada", 91.1),
        ("l40s", 91.6),
        ("h100sxm", 67),
        ("h200", 67),
        ("b200", 75),
        ("rtx5080", 56.3),
        ("rtx5090", 104.8),
    ],
)
def test_peak_is_that_of_the_data_sheet(name, teraflops):
    assert known_devices()[name].peak_gflops == pytest.approx(1000 * teraflops, rel=0.01)


def test_slug_is_a_folder_name_and_tells_slices_apart():
    h200 = known_devices()["h200"]
    assert h200.slug == "NVIDIA_H200"
    sliced = Device(**{**vars(h200), "mig": "1g.18gb"})
    assert sliced.slug == "NVIDIA_H200_1g_18gb"


def test_the_gpu_of_this_process_is_read_from_the_driver(with_runtime):
    with_runtime(FakeRuntime())
    device = current_device(0)
    assert device == Device(**{**vars(known_devices()["h200"]), "memory_bytes": 150110011392})


def test_a_slice_is_split_from_the_name(with_runtime):
    with_runtime(FakeRuntime(name=b"NVIDIA H200 MIG 1g.18gb", multiProcessorCount=16))
    device = current_device(0)
    assert (device.name, device.mig, device.sm_count) == ("NVIDIA H200", "1g.18gb", 16)


@pytest.mark.parametrize("ordinal", [-1, 2])
def test_an_ordinal_that_does_not_exist(with_runtime, ordinal):
    with_runtime(FakeRuntime(count=2))
    with pytest.raises(DeviceError, match=rf"^GPU {ordinal} does not exist: this process sees 2"):
        current_device(ordinal)


def test_a_gpu_that_is_too_old(with_runtime):
    with_runtime(FakeRuntime(major=7, minor=0))
    with pytest.raises(DeviceError, match=r"compute capability 7\.0 is too old: 7\.5"):
        current_device(0)


@pytest.mark.parametrize(
    ("driver", "why", "says"),
    [
        (0, "cudaErrorInsufficientDriver: CUDA driver version", "^there is no NVIDIA driver: run on"),
        (
            12080,
            "cudaErrorInsufficientDriver: x",
            r"supports CUDA 12, but this CuPy .* CUDA 13: update the driver, or pip install .*\[cuda12\]",
        ),
        (13000, "cudaErrorNoDevice: no CUDA-capable device", r"^no GPU can be used \(cudaErrorNoDevice\)"),
        (13000, "cudaErrorInitializationError: initialization error", r"as after a fork.*'spawn' method"),
        (13000, "cudaErrorLaunchFailure: unspecified launch failure", r"start a new one"),
    ],
)
def test_why_there_is_no_gpu(with_runtime, driver, why, says):
    with_runtime(FakeRuntime(driver=driver, why=why))
    with pytest.raises(DeviceError, match=says) as raised:
        current_device(0)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["getDeviceProperties", "deviceGetAttribute"])
def test_a_gpu_that_failed_before_is_one_line(with_runtime, name):
    runtime = FakeRuntime()

    def fail(*words):
        raise runtime.CUDARuntimeError("cudaErrorIllegalAddress: an illegal memory access was encountered")

    setattr(runtime, name, fail)
    with_runtime(runtime)
    with pytest.raises(DeviceError, match=r"^GPU 0 cannot be used: a kernel that ran earlier in this"):
        current_device(0)


@pytest.mark.parametrize("ordinal", [np.int64(0), np.uint8(0), 0])
def test_an_ordinal_may_be_an_integer_of_numpy(with_runtime, ordinal):
    with_runtime(FakeRuntime())
    assert current_device(ordinal).name == "NVIDIA H200"


@pytest.mark.parametrize("ordinal", [0.0, True, "0", None, np.zeros(1)])
def test_what_is_no_ordinal(with_runtime, ordinal):
    with_runtime(FakeRuntime())
    with pytest.raises(UsageError, match=r"is not a CUDA ordinal: give 0 or another integer"):
        current_device(ordinal)


@pytest.mark.parametrize("name", [3, None, b"h200", ["h200"]])
def test_what_is_no_name_of_a_gpu(name):
    with pytest.raises(UsageError, match=r"is not the name of a GPU: give one of t4, "):
        named_device(name)


def test_without_cupy_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    monkeypatch.setattr("autotune.values.device.has_gpu", lambda: True)
    with pytest.raises(DeviceError, match=r"^CuPy cannot be imported .*: pip install .*\[cuda13\]"):
        current_device(0)
    monkeypatch.setattr("autotune.values.device.has_gpu", lambda: False)
    with pytest.raises(DeviceError, match=r"^there is no NVIDIA driver"):  # CuPy would be of no use
        current_device(0)


@pytest.mark.parametrize(("answer", "there"), [(0, True), (34, False), (35, True), (100, False), (803, True)])
def test_a_gpu_that_cannot_be_used_is_there_all_the_same(monkeypatch, answer, there):
    """CUresult: success, stub library, driver too old, no device, driver mismatch."""
    monkeypatch.setattr(ctypes, "CDLL", lambda name: types.SimpleNamespace(cuInit=lambda flags: answer))
    assert has_gpu() == there


def test_without_a_driver_there_is_no_gpu(monkeypatch):
    def absent(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", absent)
    assert not has_gpu()


def test_operands_that_do_not_fit_are_counted():
    h200, t4 = known_devices()["h200"], known_devices()["t4"]
    assert h200.shortage(Problem(65536, 65536, 65536)) == ""
    assert h200.shortage(Problem(10**6, 10**6, 10**6)) == (
        "A, B and C of 1000000 x 1000000 x 1000000 nn take 12,000.0 GB, and NVIDIA H200 has 141.0 GB of "
        "memory: give smaller sizes, such as those of a part of C"
    )
    assert t4.shortage(Problem(37000, 37000, 37000)) == ""  # 16.4 GB: its 16 GB are GiB
    assert "take 23.6 GB, and Tesla T4 has 16.0 GB" in t4.shortage(Problem(65536, 65536, 12288))
