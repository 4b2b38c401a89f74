from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from autotune.code.compiler import Binary
from autotune.errors import DeviceError, MachineFault, Rejected
from autotune.measure.worker import GpuWorker
from autotune.values.measurement import Launch, MeasuredTrial
from autotune.values.problem import Problem

PROBLEM = Problem(64, 64, 64)


def binary(entry, cubin=b"ELF"):
    return Binary(cubin, "", "sm_90", entry, 32, 0, 0, 0, "", "13.5", (), 0.1)


def candidate(entry, cubin=b"ELF"):
    return binary(entry, cubin), Launch.of(entry, (1, 1, 1), (32, 1, 1))


def worker(service="stub_gpu:serve", **kwargs):
    return GpuWorker(0, PROBLEM, seed=1, service=service, **kwargs)


def measure(worker, *entries, timeout_s=20.0):
    """Submit all at once; return the outcomes by position."""
    for key, entry in enumerate(entries):
        worker.submit(key, *candidate(entry), None, timeout_s)
    outcomes = {}
    while worker.pending:
        outcomes.update(worker.collect(20))
    return [outcomes[key] for key in range(len(entries))]


def kinds(outcomes):
    return [
        outcome.timing.median_ms if isinstance(outcome, MeasuredTrial) else outcome.kind
        for outcome in outcomes
    ]


def test_facts_and_outcomes_arrive():
    with worker() as gpu:
        assert gpu.ready().driver == "580.95.05"
        assert gpu.pending == 0
        assert gpu.next_deadline is None
        assert kinds(measure(gpu, "1.5", "wrong", "2.5")) == [1.5, "correctness", 2.5]


def test_a_worker_that_only_knows_its_gpu_says_so():
    with worker("stub_gpu:identified_only") as gpu:
        device, driver = gpu.identity(10)
        assert (device.name, driver) == ("NVIDIA H200", "580.95.05")
        with pytest.raises(DeviceError, match="not ready"):
            gpu.ready(0.1)


def test_the_seconds_of_the_child_are_added_up():
    with worker() as gpu:
        gpu.ready()
        start = time.monotonic()
        measure(gpu, "1.5", "wrong", "2.5")
        assert 0 < gpu.busy_s < time.monotonic() - start


def test_outcomes_do_not_wait_for_ready():
    with worker() as gpu:
        assert gpu.next_deadline is not None
        assert kinds(measure(gpu, "1.5")) == [1.5]


@pytest.mark.parametrize("bad", ["crash", "poison", "refused"])
def test_only_the_candidate_at_fault_is_lost(bad):
    with worker() as gpu:
        outcomes = measure(gpu, "1.0", bad, "2.0", bad, bad, "3.0")
    assert kinds(outcomes) == [1.0, "crash", 2.0, "crash", "crash", 3.0]


def test_a_crash_says_how_the_process_ended():
    with worker() as gpu:
        (outcome,) = measure(gpu, "crash")
    assert outcome == Rejected("crash", "the GPU worker died: killed by SIGSEGV")


def test_a_candidate_over_its_limit_is_killed_and_the_rest_measured():
    start = time.monotonic()
    with worker() as gpu:
        gpu.ready()
        outcomes = measure(gpu, "1.0", "hang", "2.0", timeout_s=0.5)
    assert kinds(outcomes) == [1.0, "timeout", 2.0]
    assert outcomes[1].why == "no result after 0.5 s"
    assert time.monotonic() - start < 50  # the candidate would take 60 s


def test_the_limit_counts_from_the_start_of_a_candidate():
    with worker() as gpu:
        gpu.ready()
        gpu.submit("first", *candidate("hang"), None, 2.0)
        gpu.submit("second", *candidate("1.0"), None, 1.0)
        while not (outcomes := gpu.collect(5)):
            pass
        assert [key for key, _ in outcomes] == ["first"]
        assert [key for key, _ in gpu.collect(20)] == ["second"]


def test_a_sleeping_caller_is_told_when_to_wake():
    with worker() as gpu:
        gpu.ready()
        gpu.submit(0, *candidate("hang"), None, 5.0)
        begun = time.monotonic()
        end = begun + 60
        while gpu.next_deadline is None and time.monotonic() < end:
            assert gpu.collect(0.1) == []
        assert begun + 5 <= gpu.next_deadline <= time.monotonic() + 5


def test_sending_never_blocks_on_a_busy_worker():
    with worker() as gpu:
        gpu.ready()
        gpu.submit("hang", *candidate("hang"), None, 1.0)
        start = time.monotonic()
        gpu.submit("next", *candidate("1.0", cubin=bytes(5_000_000)), None, 20.0)
        assert time.monotonic() - start < 50  # nobody ends the candidate before outcomes are collected
        outcomes = {}
        while gpu.pending:
            outcomes.update(gpu.collect(20))
        assert kinds([outcomes["hang"], outcomes["next"]]) == ["timeout", 1.0]


def test_a_broken_worker_is_replaced_once_per_fault(tmp_path, monkeypatch):
    monkeypatch.setenv("STUB_GPU", str(tmp_path / "pids"))
    with worker("stub_gpu:serve_counting") as gpu:
        measure(gpu, "1.0", "poison", "2.0", "crash", "3.0", "refused")
    assert len((tmp_path / "pids").read_text().split()) == 3


def test_an_error_of_the_start_is_raised_as_it_was():
    with (
        worker("stub_gpu:no_memory") as gpu,
        pytest.raises(DeviceError, match=r"^64 x 64 x 64 nn needs 2 bytes"),
    ):
        gpu.ready()


@pytest.fixture
def starts(tmp_path, monkeypatch):
    """Count starts of a counting stub, which are retried without a long pause."""
    monkeypatch.setenv("STUB_GPU", str(tmp_path / "pids"))
    monkeypatch.setattr("autotune.measure.worker.RETRY_SECONDS", 0.01)
    return lambda: len((tmp_path / "pids").read_text().split())


def test_a_restart_that_fails_is_tried_again(starts):
    with worker("stub_gpu:fails_twice_after_the_first") as gpu:
        assert kinds(measure(gpu, "1.0", "crash", "2.0")) == [1.0, "crash", 2.0]
        assert starts() == 4
        assert kinds(gpu.finals(entries("1.0", "crash"), 20).outcomes.values()) == [1.0, "crash"]


def test_a_restart_in_the_finals_that_fails_is_tried_again(starts):
    with worker("stub_gpu:fails_twice_after_the_first") as gpu:
        finals = gpu.finals(entries("1.0", "poison a", "poison b"), 20)
    assert kinds(finals.outcomes.values()) == [1.0, "crash", "crash"]
    assert starts() == 5


def test_a_restart_that_fails_three_times_is_the_error_it_was(starts):
    with (
        worker("stub_gpu:fails_after_the_first") as gpu,
        pytest.raises(DeviceError, match=r"^64 x 64 x 64 nn needs 2 bytes"),
    ):
        measure(gpu, "1.0", "crash", "2.0")
    assert starts() == 4


def test_a_worker_that_cannot_start_is_a_device_error():
    with (
        worker("stub_gpu:never_starts") as gpu,
        pytest.raises(DeviceError, match=r"failed 3 times .*libsomething"),
    ):
        measure(gpu, "1.0")


def test_a_silent_worker_is_not_waited_for():
    with worker("stub_gpu:silent") as gpu, pytest.raises(DeviceError, match=r"not ready after 0\.3 s"):
        gpu.ready(0.3)


def test_without_a_gpu_the_error_is_one_line():
    with GpuWorker(10_000, PROBLEM) as gpu, pytest.raises(DeviceError) as caught:
        gpu.ready()
    assert "\n" not in str(caught.value)
    assert "GPU" in str(caught.value) or "driver" in str(caught.value)


def test_a_worker_turns_to_another_problem_in_the_same_process(tmp_path, monkeypatch):
    monkeypatch.setenv("STUB_GPU", str(tmp_path / "pids"))
    other = Problem(128, 64, 64)
    with worker("stub_gpu:serve_counting") as gpu:
        gpu.turn_to(PROBLEM)  # it starts with that already
        assert kinds(measure(gpu, "1.0")) == [1.0]
        gpu.turn_to(other)
        assert gpu.next_deadline is not None
        assert kinds(measure(gpu, "2.0", "wrong")) == [2.0, "correctness"]
        gpu.turn_to(other)
        assert kinds(measure(gpu, "3.0")) == [3.0]
        assert len((tmp_path / "pids").read_text().split()) == 1
        gpu.submit(0, *candidate("hang"), None, 20.0)
        gpu.turn_to(PROBLEM)
        assert gpu.pending == 0
        assert kinds(measure(gpu, "4.0")) == [4.0]
    assert len((tmp_path / "pids").read_text().split()) == 2


def entries(*names):
    return [(name, *candidate(name.split()[0])) for name in names]


def test_finals_return_everyone_and_the_baseline():
    with worker() as gpu:
        finals = gpu.finals(entries("1.0", "2.0"), 20)
    assert list(finals.outcomes) == ["1.0", "2.0"]
    assert kinds(finals.outcomes.values()) == [1.0, 2.0]
    assert finals.cublas.median_ms == 0.5
    assert finals.cublas_kernel == "sgemm_kernel"


@pytest.mark.parametrize("bad", ["crash", "poison", "hang"])
def test_a_finalist_that_kills_the_worker_is_rejected_and_the_rest_repeated(bad):
    with worker() as gpu:
        finals = gpu.finals(entries("1.0", f"{bad} a", "2.0", f"{bad} b"), 0.5)
    expected = "timeout" if bad == "hang" else "crash"
    assert kinds(finals.outcomes.values()) == [1.0, expected, 2.0, expected]
    assert finals.cublas is not None


def test_finals_survive_a_broken_cublas(monkeypatch):
    monkeypatch.setenv("STUB_GPU", "breaks cublas")
    with worker() as gpu:
        finals = gpu.finals(entries("1.0"), 20)
    assert kinds(finals.outcomes.values()) == [1.0]
    assert finals.cublas is None


def test_finals_without_a_survivor():
    with worker() as gpu:
        finals = gpu.finals(entries("poison"), 20)
    assert kinds(finals.outcomes.values()) == ["crash"]
    assert finals.cublas is None


def test_finals_whose_setup_fails_blame_no_finalist():
    with (
        worker("stub_gpu:setup_dies") as gpu,
        pytest.raises(DeviceError, match=r"before a kernel ran: .*exit code 7"),
    ):
        gpu.finals(entries("1.0"), 20)


def test_finals_refuse_pending_candidates():
    with worker() as gpu:
        gpu.submit(0, *candidate("1.0"), None, 20.0)
        with pytest.raises(ValueError, match="1 candidates are pending"):
            gpu.finals(entries("1.0"), 20)


def test_the_seed_is_drawn_when_none_is_given():
    with (
        GpuWorker(0, PROBLEM, service="stub_gpu:serve") as a,
        GpuWorker(0, PROBLEM, service="stub_gpu:serve") as b,
    ):
        assert a.seed != b.seed


# -- faults of the machine -----------------------------------------------------------------------------------


@pytest.fixture
def first(tmp_path, monkeypatch):
    monkeypatch.setenv("STUB_FIRST", str(tmp_path / "asked"))


@pytest.mark.parametrize("fault", ["killed", "stopped", "starved"])
def test_a_candidate_with_which_the_machine_fails_once_is_measured_in_another_process(first, fault):
    with worker() as gpu:
        outcomes = measure(gpu, "2.0", f"first {fault}", "3.0", timeout_s=1.5)
    assert kinds(outcomes) == [2.0, 1.0, 3.0]


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("killed", "the GPU worker died: killed by SIGKILL"),
        ("stopped", "no result after 1 s: paused"),
        ("starved", "cudaErrorMemoryAllocation: out of memory"),
    ],
)
def test_a_candidate_with_which_the_machine_fails_twice_has_no_outcome(tmp_path, monkeypatch, fault, why):
    monkeypatch.setenv("STUB_GPU", str(tmp_path / "pids"))
    with worker("stub_gpu:serve_counting") as gpu:
        outcomes = measure(gpu, "2.0", fault, "3.0", timeout_s=1.0)
    assert outcomes[1] == MachineFault(why)
    assert kinds([outcomes[0], outcomes[2]]) == [2.0, 3.0]
    assert len((tmp_path / "pids").read_text().split()) >= 2


def test_a_fault_of_the_machine_in_the_finals_rejects_nobody(first):
    with worker() as gpu:
        finals = gpu.finals([("a", *candidate("2.0")), ("b", *candidate("first killed"))], 20)
    assert kinds(finals.outcomes.values()) == [2.0, 1.0]


def test_finals_in_which_the_machine_fails_again_and_again_are_given_up():
    says = "^the GPU worker failed 3 times, which is no kernel's fault: .* killed by SIGKILL$"
    with worker() as gpu, pytest.raises(DeviceError, match=says):
        gpu.finals(entries("1.0", "killed"), 20)


def test_a_pause_of_all_processes_is_not_a_slow_kernel():
    script = (
        "import sys; sys.path[:] = eval(sys.argv[1])\n"
        "from test_gpu import kinds, measure, worker\n"
        "with worker() as gpu:\n"
        "    gpu.ready(); print('ready', flush=True)\n"
        "    print(*kinds(measure(gpu, 'busy 0.7', timeout_s=5.0)), flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, repr(sys.path)],
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    ) as parent:  # fmt: skip
        assert parent.stdout.readline() == "ready\n"
        time.sleep(0.3)
        os.killpg(parent.pid, signal.SIGSTOP)
        time.sleep(7)
        os.killpg(parent.pid, signal.SIGCONT)
        assert parent.stdout.read() == "1.0\n"
