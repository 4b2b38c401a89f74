"""Whole searches on a real GPU: broken candidates, disturbed timings, resumed runs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from autotune.kernel import best_kernel
from autotune.kernel.cuda import cuda_machine
from autotune.measure.clocks import ClockMonitor, device_uuid
from autotune.measure.worker import GpuWorker
from autotune.records import Store
from autotune.records.trials import read_log
from autotune.space.space import Space
from autotune.tuning import quick, tuner
from autotune.tuning.tuner import tune
from autotune.values.device import current_device
from autotune.values.problem import Problem

pytestmark = pytest.mark.gpu

TORTURE = Path(__file__).parents[1] / "data" / "torture" / "torture.toml"
BUSY = """
import cupy, sys
a = cupy.ones((4096, 4096), cupy.float32)
print("busy", flush=True)
while True:
    for _ in range(50):
        a = a * 1.0001 + a
    cupy.cuda.runtime.deviceSynchronize()
"""


@pytest.fixture(scope="module")
def device():
    return current_device(0)


def some(folder, variants):
    shutil.copy(TORTURE.with_name("torture.cu.jinja"), folder)
    path = folder / "some.toml"
    path.write_text(f'extends = "{TORTURE}"\n[parameters]\nvariant = {list(range(variants))}\n')
    return Space.load(path)


def log(root):
    paths = [path for path in root.glob("*/*.trials.jsonl") if ".old" not in path.name]
    return [line for path in paths for line in read_log(path)[1]]


def test_every_broken_candidate_is_named_and_every_good_one_measured(device, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    monkeypatch.setattr(tuner, "GpuWorker", partial(GpuWorker, service="torture_service:serve"))
    monkeypatch.setattr("autotune.tuning.request.COMPILE_TIMEOUT_S", 8.0)
    space, problem, root = some(tmp_path, 3), Problem(64, 64, 64), tmp_path / "records"
    record = tune(problem, space=space, budget="1000", strategy="exhaustive", root=root)
    assert record.search.outcomes == {
        "measured": 18,
        "compile": 1,
        "compile_timeout": 1,
        "timeout": 1,
        "crash": 2,
        "correctness": 1,
    }
    assert record.search.complete
    outcomes = [line for line in log(root) if "event" not in line]
    for line in outcomes:
        number = line["config"]["variant"] * 8 + line["config"]["num_threads"] // 32 - 1
        assert (line["outcome"] != "measured") == (number % 4 == 3), line

    again = tune(problem, space=space, budget="1000", strategy="exhaustive", root=root)
    assert (again.search.resumed, again.search.seen) == (24, 24)
    started = Counter(line["id"] for line in log(root) if line.get("event") == "started")
    assert set(started.values()) == {1}
    assert again.timing.median_ms == pytest.approx(record.timing.median_ms, rel=0.2)


def test_the_trace_and_the_record_say_when_and_where(device, tmp_path):
    record = tune(Problem(512, 512, 512), budget="12", root=tmp_path)
    lines = log(tmp_path)
    assert {line["gpu"] for line in lines if line.get("event") == "started"} == {0}
    gpu, *_ = [line for line in lines if line.get("event") == "gpu"]
    assert gpu["uuid"] == device_uuid(0)
    assert gpu["uuid"].startswith("GPU-")
    assert set(gpu["start_s"]) == {"clocks", "context", "verify_kernels", "inputs"}
    stages = record.search.stages_s
    assert 0 < stages["gpu"] < stages["search"]
    assert stages["start"] < stages["first_outcome"]
    assert record.timing.clocks is None or record.timing.clocks["sm_mhz_max"] > 100
    assert Store(tmp_path).find(device, record.family, record.problem) is not None


def test_clocks_are_those_of_this_gpu(device):
    monitor = ClockMonitor.open("ffff:ff:1f.0", device_uuid(0))
    if monitor is None:
        pytest.skip("NVML does not serve this GPU")
    monitor.start()
    clocks = monitor.stop()
    assert 100 < clocks["sm_mhz_min"] <= clocks["sm_mhz_max"] < 5000


def test_finals_beside_another_process_are_noisy_and_alone_they_are_not(device, tmp_path):
    problem = Problem(4096, 4096, 4096)  # longer than a process has the GPU for itself
    other = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE)
    try:
        assert other.stdout.readline() == b"busy\n"
        disturbed = tune(problem, budget="4", root=tmp_path)
    finally:
        other.kill()
        other.wait()
    alone = tune(problem, budget="4", root=tmp_path)
    assert disturbed.timing.noisy
    assert not alone.timing.noisy
    assert alone.search.resumed == 4
    assert alone.timing.median_ms < disturbed.timing.median_ms


def test_a_worker_turns_to_another_problem(device):
    with GpuWorker(0, Problem(512, 512, 512)) as gpu:
        before = gpu.ready()
        gpu.turn_to(Problem(256, 4096, 64, "nt", 1))
        after = gpu.ready()
        assert after.device == before.device
        assert set(after.start_s) == {"inputs"}
        for size in (8192, 512) * 3:
            gpu.turn_to(Problem(size, size, size))
            memory = gpu.ready().memory_free
        assert memory > before.memory_free - (64 << 20)


def test_a_first_call_measures_a_few_points_and_a_search_goes_on_from_there(device, tmp_path):
    import cupy

    shapes = [(500, 300, 200, "nt"), (1000, 720, 96, "nn")]
    for m, n, k, layout in shapes:
        kernel = best_kernel(m, n, k, layout, tune="quick", root=tmp_path)
        search = kernel.record.search
        assert (kernel.served, search.strategy, search.complete) == ("exact", "quick", False)
        assert 1 <= search.outcomes["measured"] <= search.seen <= quick.FIRST
        a, b = (
            cupy.random.standard_normal(shape, dtype=cupy.float32)
            for shape in (kernel.problem.a_shape, kernel.problem.b_shape)
        )
        product = (a.T if layout[0] == "t" else a) @ (b.T if layout[1] == "t" else b)
        cupy.testing.assert_allclose(kernel(a, b), product, rtol=1e-3, atol=1e-3)
        later = tune(kernel.problem, budget=str(search.seen + 4), root=tmp_path)
        assert later.search.resumed == search.seen
    quick.close()


def test_a_stream_that_is_captured_is_seen(device):
    import cupy

    machine, stream = cuda_machine(0), cupy.cuda.Stream(non_blocking=True)
    assert not machine.capturing(None)
    with stream:
        stream.begin_capture()
        seen = machine.capturing(None), machine.capturing(stream.ptr), machine.capturing(0)
        stream.end_capture()
        assert not machine.capturing(None)
    assert seen == (True, True, False)


def test_a_record_has_the_energy_of_a_launch(device, tmp_path):
    problem = Problem(2048, 2048, 2048)
    record = tune(problem, space="sgemm", budget=8, root=tmp_path)
    held = record.sustained
    assert held is not None
    assert 0.9 * record.timing.median_ms < held.mean_ms < 2 * record.timing.median_ms
    assert held.launches * held.mean_ms == pytest.approx(500 * held.seconds, rel=0.2)
    if held.power_by is not None:  # NVML serves this GPU
        assert held.power_by == "energy counter"
        assert 20 < held.watts < 2000
        assert held.gflops_per_watt(problem.flops) > 1
