from __future__ import annotations

import errno
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_compiler import ENDLESS, SCALE

from autotune.code import pool as pools
from autotune.code import process
from autotune.code.compiler import Binary, compile_text
from autotune.code.pool import CompilePool, default_workers
from autotune.code.process import Child
from autotune.errors import MachineError, MachineFault, Rejected, ToolchainError


def collect_all(pool: CompilePool, limit: float = 240.0) -> dict[object, Binary | Rejected | MachineFault]:
    outcomes: dict[object, Binary | Rejected | MachineFault] = {}
    end = time.monotonic() + limit
    while pool.pending:
        assert time.monotonic() < end, f"still {pool.pending} compiles after {limit} s"
        outcomes.update(pool.collect(timeout=1.0))
    return outcomes


def test_pool_gives_what_compile_text_gives() -> None:
    with CompilePool(2) as pool:
        assert (pool.free, pool.pending, pool.waitables, pool.next_deadline) == (2, 0, [], None)
        assert pool.collect(timeout=5) == []
        broken = SCALE.replace("tile[64]", "tile[sixty]")
        texts = {("good", 1): SCALE, ("bad", 2): broken, ("good", 3): SCALE.replace("2.0f", "3.0f")}
        for key, text in texts.items():
            pool.submit(key, text, "scale", "sm_90")
        assert (pool.free, pool.pending, len(pool.waitables)) == (-1, 3, 2)
        assert pool.next_deadline is not None
        assert pool.next_deadline > time.monotonic()
        assert multiprocessing.connection.wait(pool.waitables, timeout=120)
        assert collect_all(pool) == {key: compile_text(text, "scale", "sm_90") for key, text in texts.items()}
        assert (pool.free, pool.pending) == (2, 0)


def test_slow_compile_times_out_alone() -> None:
    with CompilePool(2, timeout_s=1.5) as pool:
        pool.submit("endless", ENDLESS, "endless", "sm_90")
        for number in range(4):
            pool.submit(number, SCALE, "scale", "sm_90")
        slow = pool._workers[0].child.pid
        outcomes = collect_all(pool)
        late = outcomes.pop("endless")
        assert isinstance(late, Rejected)
        assert late.kind == "compile_timeout"
        assert "1.5 s" in late.why
        assert [type(outcome) for outcome in outcomes.values()] == [Binary] * 4
        assert not Path(f"/proc/{slow}").exists()
        pool.submit("again", SCALE, "scale", "sm_90")
        pool.submit("and again", SCALE, "scale", "sm_90")
        assert slow not in [worker.child.pid for worker in pool._workers]
        assert all(isinstance(outcome, Binary) for outcome in collect_all(pool).values())


def test_a_compile_whose_child_crashes_is_rejected() -> None:
    with CompilePool(2) as pool:
        pool.submit("lost", ENDLESS, "endless", "sm_90")
        pool.submit("kept", SCALE, "scale", "sm_90")
        pool.submit("later", SCALE, "scale", "sm_90")
        os.kill(pool._workers[0].child.pid, signal.SIGSEGV)
        outcomes = collect_all(pool)
        assert outcomes.pop("lost") == Rejected("compile", "the compiler process died: killed by SIGSEGV")
        assert [type(outcome) for outcome in outcomes.values()] == [Binary] * 2


def of_job(pool: CompilePool, key: object) -> pools._Worker:
    """Wait for the worker that has a job."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        for worker in pool._workers:
            if worker.job is not None and worker.job.key == key:
                return worker
        pool.collect(0.01)
    raise AssertionError(f"nobody has {key!r}")


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_a_compile_whose_child_is_killed_is_tried_once_more_in_another(sent: signal.Signals) -> None:
    with CompilePool(1) as pool:
        pool.submit("once", SCALE, "scale", "sm_90")
        os.kill(of_job(pool, "once").child.pid, sent)
        assert isinstance(collect_all(pool)["once"], Binary)
        pool.submit("twice", ENDLESS, "endless", "sm_90")
        first = of_job(pool, "twice").child.pid
        os.kill(first, sent)
        while of_job(pool, "twice").child.pid == first:
            assert pool.collect(0.01) == []
        os.kill(of_job(pool, "twice").child.pid, sent)
        why = f"the compiler process died: killed by {sent.name}"
        assert collect_all(pool) == {"twice": MachineFault(why)}


@pytest.mark.parametrize("says", ["NVRTC_ERROR_OUT_OF_MEMORY", "ptxas fatal   : Memory allocation failure"])
def test_a_compiler_without_memory_is_no_fault_of_the_candidate(
    says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "starved.py").write_text(
        "from autotune.code import pool\n"
        "from autotune.code.nvrtc import Nvrtc\n"
        f"answer = (1, '', b'', '', '') if 'NVRTC' in {says!r} else (6, {says!r}, b'', '', '')\n"
        "Nvrtc.compile = lambda *words: answer\n"
        "serve = pool.serve\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(pools, "_SERVICE", "starved:serve")
    with CompilePool(1) as pool:
        pool.submit("any", SCALE, "scale", "sm_90")
        assert collect_all(pool) == {"any": MachineFault(f"NVRTC had not enough memory: {says}")}


def test_a_compile_without_cpu_time_gets_longer_and_is_then_no_fault_of_the_candidate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pools, "MAX_EXTENSIONS", 2)
    monkeypatch.setattr(Child, "cpu_seconds", lambda self: 0.125)
    with CompilePool(1, timeout_s=0.5) as pool:
        pool.submit("starved", ENDLESS, "endless", "sm_90")
        began = time.monotonic()
        outcome = collect_all(pool)["starved"]
        assert time.monotonic() - began > 2 * 3 * 0.5
    assert outcome == MachineFault("no binary after 1.5 s, of which the compiler ran 0.0 s")


def test_a_compile_that_was_paused_is_tried_again() -> None:
    with CompilePool(1, timeout_s=2.0) as pool:
        pool.submit("paused", SCALE, "scale", "sm_90")
        stopped = of_job(pool, "paused").child.pid
        os.kill(stopped, signal.SIGSTOP)
        assert isinstance(collect_all(pool)["paused"], Binary)
        assert not Path(f"/proc/{stopped}").exists()


def test_child_that_died_idle_costs_nothing() -> None:
    with CompilePool(1) as pool:
        pool.warm()
        (worker,) = pool._workers
        os.kill(worker.child.pid, signal.SIGKILL)
        worker.child._process.wait()
        pool.submit("first", SCALE, "scale", "sm_90")
        assert isinstance(collect_all(pool)["first"], Binary)


def test_pool_raises_what_is_no_candidates_fault() -> None:
    with CompilePool(1) as pool:
        pool.submit("old", SCALE, "scale", "sm_35")
        with pytest.raises(ToolchainError, match="cannot compile for sm_35"):
            pool.collect(timeout=120)
        pool.submit("new", SCALE, "scale", "sm_90")
        assert isinstance(collect_all(pool)["new"], Binary)


def test_dropped_compiles_are_forgotten_and_the_pool_goes_on() -> None:
    with CompilePool(1) as pool:
        pool.submit("dropped", SCALE, "scale", "sm_90")
        pool.submit("waiting", SCALE, "scale", "sm_90")
        pool.drop()
        assert pool.pending == 0
        pool.submit("wanted", SCALE, "scale", "sm_90")
        assert pool.pending == 1
        outcomes = []
        while pool.pending:
            outcomes += pool.collect(30)
        assert [key for key, _ in outcomes] == ["wanted"]
        assert isinstance(outcomes[0][1], Binary)


def test_compilers_yield_to_other_processes() -> None:
    with CompilePool(1) as pool:
        pool.submit(0, SCALE, "scale", "sm_90")
        while not pool.collect(30):
            pass
        (worker,) = pool._workers
        stat = Path(f"/proc/{worker.child.pid}/stat").read_text().rpartition(")")[2].split()
        assert int(stat[16]) == os.getpriority(os.PRIO_PROCESS, 0) + pools.NICENESS
        assert Path(f"/proc/{worker.child.pid}/oom_score_adj").read_text().strip() == "1000"


def test_closed_pool_leaves_no_process() -> None:
    pool = CompilePool(2)
    pool.warm()
    pool.submit("endless", ENDLESS, "endless", "sm_90")
    pids = [worker.child.pid for worker in pool._workers]
    pool.close()
    assert len(pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    with pytest.raises(ValueError, match="closed"):
        pool.submit("late", SCALE, "scale", "sm_90")


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_killed_parent_leaves_no_compiler_running() -> None:
    script = (
        "import sys, time; sys.path[:] = eval(sys.argv[1])\n"
        "from autotune.code.pool import CompilePool\n"
        "pool = CompilePool(2); pool.warm()\n"
        "pool.submit('warm', sys.argv[2], 'scale', 'sm_90'); pool.collect(120)\n"
        "pool.submit('busy', sys.argv[3], 'endless', 'sm_90')\n"
        "print(*[worker.child.pid for worker in pool._workers], flush=True); time.sleep(300)"
    )
    arguments = [sys.executable, "-c", script, repr(sys.path), SCALE, ENDLESS]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        time.sleep(0.2)
        running = [pid for pid in pids if _runs(pid)]
        parent.kill()
    assert len(running) == 2
    end = time.monotonic() + 60
    while any(_runs(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(_runs(pid) for pid in pids)


def _runs(pid: int) -> bool:
    """Tell whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_pool_without_workers_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 worker"):
        CompilePool(0)


def test_default_workers_leaves_one_cpu() -> None:
    assert 1 <= default_workers() <= min(pools.MAX_WORKERS, max(1, len(os.sched_getaffinity(0)) - 1))
    assert default_workers() <= default_workers(spare=0) <= default_workers() + 1


# -- a system that starts no more processes ------------------------------------------------------------------


def test_a_pool_does_with_the_processes_that_the_system_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    popen = process._popen

    def limited(*words: object, **named: object) -> object:
        if len(pool._workers) >= 1:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return popen(*words, **named)

    monkeypatch.setattr(process, "_popen", limited)
    with CompilePool(4) as pool:
        pool.warm()
        for number in range(3):
            pool.submit(number, SCALE, "scale", "sm_90")
        assert len(pool._workers) == 1
        assert all(isinstance(outcome, Binary) for outcome in collect_all(pool).values())


def test_a_system_that_starts_no_process_at_all_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*words: object, **named: object) -> object:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(process, "_popen", refused)
    with CompilePool(2) as pool, pytest.raises(MachineError, match=r"cannot be started .Cannot allocate mem"):
        pool.submit(0, SCALE, "scale", "sm_90")
