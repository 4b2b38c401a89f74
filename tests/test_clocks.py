from __future__ import annotations

import os
import time
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace as Facts

import pytest

from autotune.measure.clocks import ClockMonitor, Reading, _handle, device_uuid, power_of, throttle_names


def test_normal_states_are_no_throttling():
    assert (
        throttle_names(0x1 | 0x2 | 0x10 | 0x100) == ()
    )  # idle, application clocks, sync boost, display clocks


def test_reasons_are_named():
    assert throttle_names(0x4 | 0x40) == ("power cap", "hardware thermal")


def test_no_such_gpu_is_no_monitor():
    assert ClockMonitor.open("ffff:ff:1f.0") is None
    assert device_uuid(10_000) is None


class Nvml:
    """NVML as a test says it is: its functions look up the state of one GPU."""

    NVML_CLOCK_SM = 1

    class NVMLError(Exception):
        pass

    class NVMLError_NotFound(NVMLError):  # noqa: N801 -- as NVML spells it
        pass

    def __init__(self, **state):
        facts = {"mhz": 1980, "reasons": 0, "thermal": 0, "watts": 700, "joules": 5, "pids": [], "busy": []}
        self.state = facts | state

    def _known(self, name):
        if self.state[name] is None:
            raise self.NVMLError(name)
        return self.state[name]

    def nvmlDeviceGetClockInfo(self, handle, kind):  # noqa: N802
        return self._known("mhz")

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):  # noqa: N802
        return self._known("reasons")

    def nvmlDeviceGetViolationStatus(self, handle, policy):  # noqa: N802
        return Facts(violationTime=self._known("thermal"))

    def nvmlDeviceGetPowerUsage(self, handle):  # noqa: N802
        return 1000 * self._known("watts")

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):  # noqa: N802
        return 1000 * self._known("joules")

    def nvmlDeviceGetComputeRunningProcesses(self, handle):  # noqa: N802
        return [Facts(pid=pid) for pid in self._known("pids")]

    def nvmlDeviceGetProcessUtilization(self, handle, since):  # noqa: N802
        samples = [Facts(pid=pid, timeStamp=at, smUtil=use) for pid, at, use in self._known("busy")]
        found = [sample for sample in samples if sample.timeStamp > since]
        if not found:
            raise self.NVMLError_NotFound
        return found

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        if uuid not in self.state["uuids"]:
            raise self.NVMLError(uuid)
        return uuid

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle):  # noqa: N802
        return f"parent of {handle}"

    def nvmlDeviceGetHandleByPciBusId(self, address):  # noqa: N802
        return address


def watched(nvml, **later):
    """Watch while the state changes."""
    monitor = ClockMonitor(nvml, "gpu")
    nvml.state["pids"] = nvml.state.get("ours", nvml.state["pids"])
    monitor.start()
    nvml.state |= later
    return monitor.stop()


def test_clocks_and_power_are_read_twice():
    assert watched(Nvml(), mhz=1755, reasons=0x4, watts=699) == {
        "sm_mhz_min": 1755,
        "sm_mhz_max": 1980,
        "throttle": ("power cap",),
        "watts": 699,
    }


def test_throttling_between_two_readings_is_found_by_its_counter():
    assert watched(Nvml(thermal=5), thermal=6)["throttle"] == ("software thermal",)
    assert watched(Nvml(thermal=5), thermal=5)["throttle"] == ()


def test_what_a_gpu_does_not_answer_is_left_out():
    told = watched(Nvml(thermal=None, watts=None, pids=None, busy=None))
    assert set(told) == {"sm_mhz_min", "sm_mhz_max", "throttle"}
    assert watched(Nvml(), mhz=None)["sm_mhz_min"] == 1980  # the last reading failed


ME = os.getpid()


def test_other_processes_count_when_they_keep_the_gpu_busy():
    ours = {"ours": [ME, 7, 8]}
    assert (
        watched(Nvml(**ours), busy=[(ME, 10, 90), (7, 11, 5), (7, 12, 40), (8, 13, 0)])["other_processes"]
        == 1
    )
    assert watched(Nvml(**ours), busy=[(ME, 10, 90), (8, 13, 0)])["other_processes"] == 0
    assert watched(Nvml(**ours))["other_processes"] == 0  # nobody was busy


def test_process_ids_of_another_kind_say_nothing():
    assert "other_processes" not in watched(Nvml(ours=[ME]), busy=[(99_123, 10, 90)])


def test_what_was_busy_before_does_not_count():
    old = [(7, 3, 99), (ME, 4, 99)]
    assert watched(Nvml(ours=[ME, 7], busy=old), busy=[*old, (ME, 9, 50)])["other_processes"] == 0


def test_in_a_container_this_process_is_the_one_that_came():
    assert watched(Nvml(pids=[7], ours=[7, 4711]), busy=[(4711, 10, 90), (7, 11, 50)])["other_processes"] == 1
    assert "other_processes" not in watched(Nvml(pids=[7], ours=[7]), busy=[(7, 11, 50)])  # which one are we?
    assert "other_processes" not in watched(Nvml(ours=[1, 2]), busy=[(1, 11, 50)])


@pytest.mark.parametrize(
    ("uuids", "handle"),
    [
        (["GPU-12"], "GPU-12"),
        (["MIG-12"], "parent of MIG-12"),  # a slice: its clocks are those of its GPU
        ([], "0000:04:00.0"),
    ],
)
def test_a_gpu_is_found_by_uuid_and_else_by_address(uuids, handle):
    assert _handle(Nvml(uuids=uuids), "0000:04:00.0", "GPU-12") == handle


# -- while something runs ------------------------------------------------------------------------------------


def readings(monitor, count):
    """Wait until there are so many more readings."""
    end = time.monotonic() + 60
    with monitor.watch() as found:
        while len(found) < count:
            assert time.monotonic() < end
            time.sleep(0.01)
    return found


def test_readings_are_taken_while_something_runs(monkeypatch):
    monkeypatch.setattr("autotune.measure.clocks.WATCH_EVERY_S", 0.001)
    found = readings(ClockMonitor(Nvml(mhz=1755, reasons=0x4, joules=12), "gpu"), 3)
    assert {each.sm_mhz for each in found} == {1755}
    assert {(each.watts, each.joules) for each in found} == {(700.0, 12.0)}
    assert all(one.at <= other.at for one, other in pairwise(found))
    silent = readings(ClockMonitor(Nvml(watts=None, joules=None), "gpu"), 2)
    assert {(each.watts, each.joules) for each in silent} == {(None, None)}


def test_the_energy_counter_tells_the_power_where_there_is_one():
    counted = [
        Reading(10 + step, 1700 + step, 0x4 * (step > 0), 100.0, 50 + 600.0 * step) for step in range(3)
    ]
    assert power_of(counted) == (600.0, "energy counter", 1701.0, ("power cap",))
    read = [Reading(10 + step, 1700, 0, 500.0 + 100 * step, None) for step in range(3)]
    assert power_of(read) == (600.0, "power readings", 1700.0, ())
    assert power_of([Reading(1, 1700, 0, None, None)]) == (None, None, 1700.0, ())
    assert power_of([]) == (None, None, None, ())


def test_a_counter_that_moves_ten_times_a_second_is_read_where_it_moves():
    """70 J each 0.1 s, read each 0.03 s: from end to end it would be 770 W, or 640."""
    read = [Reading(0.03 * i, 1700, 0, 690.0, 70.0 * (3 * i // 10)) for i in range(40)]
    for begin in range(10):
        for end in range(25, 40):
            watts, by, *_ = power_of(read[begin:end])
            assert (watts, by) == (pytest.approx(700, rel=0.05), "energy counter")
    still = [replace(each, joules=7.0) for each in read]
    assert power_of(still)[:2] == (690.0, "power readings"), "a counter that stands still tells nothing"
