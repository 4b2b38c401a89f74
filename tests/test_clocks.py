from __future__ import annotations

from autotune.gpu.clocks import ClockMonitor, throttle_names


def test_normal_states_are_no_throttling():
    assert (
        throttle_names(0x1 | 0x2 | 0x10 | 0x100) == ()
    )  # idle, application clocks, sync boost, display clocks


def test_reasons_are_named():
    assert throttle_names(0x4 | 0x40) == ("power cap", "hardware thermal")


def test_no_such_gpu_is_no_monitor():
    assert ClockMonitor.open("ffff:ff:1f.0") is None
