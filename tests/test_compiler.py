from __future__ import annotations

import errno
import multiprocessing.connection
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

import pytest

from autotune.code import compiler, process
from autotune.code.compiler import Binary, CompilePool, compile_bounded, compile_text, default_workers
from autotune.code.nvrtc import _libraries, nvrtc, nvrtc_version, same_build
from autotune.code.process import Child
from autotune.errors import MachineError, MachineFault, Rejected, ToolchainError

SCALE = """
extern "C" __global__ void scale(const float* x, float* y) {
    __shared__ float tile[64];
    tile[threadIdx.x] = 2.0f * x[threadIdx.x];
    __syncthreads();
    y[threadIdx.x] = tile[63 - threadIdx.x];
}
"""

SEVERAL = """
__device__ __noinline__ float twice(float x) { return x + x; }
extern "C" __global__ void scale2(float* y) { y[threadIdx.x] = twice(y[threadIdx.x]); }
extern "C" __global__ void scale(float* y) { __shared__ float tile[32]; tile[threadIdx.x] = y[0];
    __syncthreads(); y[threadIdx.x] = twice(tile[31 - threadIdx.x]); }
extern "C" __global__ void scale3(float* y) { y[0] = 1.0f; }
"""

SPILLING = """
extern "C" __global__ void __launch_bounds__(1024, 2) spill(const float* a, const float* b, float* c) {
    float acc[64] = {};
    for (int k = 0; k < 1024; ++k)
        #pragma unroll
        for (int i = 0; i < 64; ++i) acc[i] += a[k * 64 + i] * b[k * 1024 + threadIdx.x];
    for (int i = 0; i < 64; ++i) c[i * 1024 + threadIdx.x] = acc[i];
}
"""

# 4096 accumulators, fully unrolled: about a minute of compiling.
ENDLESS = """
extern "C" __global__ void endless(const float* a, const float* b, float* c) {
    float acc[64][64] = {};
    for (int k = 0; k < 64; ++k)
        #pragma unroll
        for (int i = 0; i < 64; ++i)
            #pragma unroll
            for (int j = 0; j < 64; ++j) acc[i][j] += a[k * 64 + i] * b[k * 64 + j + threadIdx.x];
    #pragma unroll
    for (int i = 0; i < 64; ++i)
        #pragma unroll
        for (int j = 0; j < 64; ++j) c[(i * 64 + j) * 256 + threadIdx.x] = acc[i][j];
}
"""


def compiled(text: str, entry: str, arch: str = "sm_90") -> Binary:
    outcome = compile_text(text, entry, arch)
    assert isinstance(outcome, Binary)
    return outcome


def collect_all(pool: CompilePool, limit: float = 240.0) -> dict[object, Binary | Rejected | MachineFault]:
    outcomes: dict[object, Binary | Rejected | MachineFault] = {}
    end = time.monotonic() + limit
    while pool.pending:
        assert time.monotonic() < end, f"still {pool.pending} compiles after {limit} s"
        outcomes.update(pool.collect(timeout=1.0))
    return outcomes


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_one_compile_gives_cubin_ptx_and_resources(arch: str) -> None:
    binary = compiled(SCALE, "scale", arch)
    assert binary.cubin.startswith(b"\x7fELF")
    assert f".target {arch}" in binary.ptx
    assert ".entry scale(" in binary.ptx
    assert not binary.ptx.endswith("\0")
    assert (binary.arch, binary.entry, binary.nvrtc) == (arch, "scale", nvrtc_version())
    assert f"--gpu-architecture={arch}" in binary.options
    assert 4 <= binary.registers <= 32
    assert (binary.shared_bytes, binary.spill_bytes, binary.stack_bytes) == (256, 0, 0)
    assert len(binary.digest) == 64


def test_same_input_gives_an_equal_binary() -> None:
    first, second = compiled(SCALE, "scale"), compiled(SCALE, "scale")
    assert first == second
    assert first.digest == second.digest
    assert compiled(SCALE.replace("2.0f", "3.0f"), "scale").digest != first.digest


def test_resources_are_those_of_the_entry() -> None:
    shared = {entry: compiled(SEVERAL, entry).shared_bytes for entry in ("scale", "scale2", "scale3")}
    assert shared == {"scale": 128, "scale2": 0, "scale3": 0}


def test_spills_are_counted() -> None:
    binary = compiled(SPILLING, "spill")
    assert binary.registers <= 32
    assert binary.spill_bytes >= 256
    assert binary.stack_bytes >= 128


def test_log_parser_keeps_functions_apart() -> None:
    # Both orders in which ptxas prints functions that were not inlined.
    log = """
ptxas info    : Compiling entry function 'ka' for 'sm_90'
ptxas info    : Function properties for ka
ptxas         .     8 bytes stack frame, 16 bytes spill stores, 32 bytes spill loads
ptxas info    : Function properties for _Z5twicef
ptxas         .     1 bytes stack frame, 2 bytes spill stores, 3 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 8 bytes cumulative stack size, 512 bytes smem
ptxas info    : Compiling entry function 'ka2' for 'sm_90'
ptxas info    : Function properties for ka2
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers
ptxas info    : Function properties for _Z6thricef
ptxas         .     1 bytes stack frame, 2 bytes spill stores, 3 bytes spill loads
"""
    assert compiler._resources(log, "ka") == (40, 48, 8, 512)
    assert compiler._resources(log, "ka2") == (8, 0, 0, 0)
    assert compiler._resources(log, "k") is None
    assert compiler._resources(log, "_Z5twicef") is None


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("int x = y; zz(1);", 'kernel.cu(1): error: identifier "y" is undefined (2 errors)'),
        ('int error = 1; asm("foo.bar;");', "ptxas application ptx input, line"),
        ('static_assert(1 > 2, "BM must divide");', 'error: static assertion failed with "BM must divide"'),
        (
            "__shared__ float s[65536]; s[threadIdx.x] = a[0]; __syncthreads(); a[0] = s[9];",
            "ptxas error   : Entry function 'k' uses too much shared data (0x40000 bytes, 0xc000 max)",
        ),
    ],
)
def test_failing_compile_is_a_value_in_one_line(body: str, why: str) -> None:
    outcome = compile_text(f'extern "C" __global__ void k(float* a) {{ {body} }}', "k", "sm_90")
    assert isinstance(outcome, Rejected)
    assert outcome.kind == "compile"
    assert why in outcome.why
    assert outcome.why.isprintable()


def test_what_is_no_candidates_fault_raises() -> None:
    with pytest.raises(ToolchainError, match=r"no kernel other \(it has scale\)"):
        compile_text(SCALE, "other", "sm_90")
    with pytest.raises(ToolchainError, match="--no-such-option"):
        compile_text(SCALE, "scale", "sm_90", ("--no-such-option",))


def test_architectures() -> None:
    library = nvrtc()
    assert {"sm_80", "sm_90", "sm_120"} <= set(library.supported_archs)
    assert library.resolve("sm_90a") == "sm_90a"
    highest = max(int(name[3:]) for name in library.supported_archs)
    assert library.resolve(f"sm_{highest // 10}9") == f"sm_{highest}"
    assert compiled(SCALE, "scale", f"sm_{highest // 10}9").arch == f"sm_{highest}"
    for unknown in ("sm_35", "sm_999", "sm_129a", "90"):
        with pytest.raises(ToolchainError, match=f"for {unknown}: it supports .*sm_90"):
            library.resolve(unknown)


def test_lookup(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    load = nvrtc.__wrapped__
    monkeypatch.setenv("AUTOTUNE_NVRTC", nvrtc().path)
    assert load().version == nvrtc().version
    for wrong in (tmp_path / "absent.so", Path(__file__)):
        monkeypatch.setenv("AUTOTUNE_NVRTC", str(wrong))
        with pytest.raises(
            ToolchainError, match=rf"AUTOTUNE_NVRTC: {wrong}.*pip install nvidia-cuda-nvrtc"
        ) as caught:
            load()
        assert "\n" not in str(caught.value)


def test_lookup_prefers_the_drivers_major(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    twelve = tmp_path / "nvidia/cuda_nvrtc/lib/libnvrtc.so.12"
    thirteen = tmp_path / "nvidia/cu13/lib/libnvrtc.so.13"
    for file in (twelve, thirteen):
        file.parent.mkdir(parents=True)
        file.touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert list(_libraries(None))[:3] == [str(thirteen), str(twelve), "libnvrtc.so.13"]
    assert list(_libraries(12))[:3] == [str(twelve), str(thirteen), "libnvrtc.so.12"]


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


def of_job(pool: CompilePool, key: object) -> compiler._Worker:
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
        "from autotune.code import compiler\n"
        "from autotune.code.nvrtc import Nvrtc\n"
        f"answer = (1, '', b'', '') if 'NVRTC' in {says!r} else (6, {says!r}, b'', '')\n"
        "Nvrtc.compile = lambda self, text, options: answer\n"
        "serve = compiler.serve\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(compiler, "_SERVICE", "starved:serve")
    with CompilePool(1) as pool:
        pool.submit("any", SCALE, "scale", "sm_90")
        assert collect_all(pool) == {"any": MachineFault(f"NVRTC had not enough memory: {says}")}


def test_a_compile_without_cpu_time_gets_longer_and_is_then_no_fault_of_the_candidate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiler, "MAX_EXTENSIONS", 2)
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
        assert int(stat[16]) == os.getpriority(os.PRIO_PROCESS, 0) + compiler.NICENESS
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
        "from autotune.code.compiler import CompilePool\n"
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
    assert 1 <= default_workers() <= min(compiler.MAX_WORKERS, max(1, len(os.sched_getaffinity(0)) - 1))
    assert default_workers() <= default_workers(spare=0) <= default_workers() + 1


# -- one compile outside a search ----------------------------------------------------------------------------


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[compiler._Alone]:
    made = compiler._Alone()
    monkeypatch.setattr(compiler, "_alone", made)
    yield made
    if made._pool is not None:
        made._pool.close()


def test_a_compile_in_a_child_gives_what_compile_text_gives(alone: compiler._Alone) -> None:
    assert compile_bounded(SCALE, "scale", "sm_90") == compile_text(SCALE, "scale", "sm_90")
    broken = SCALE.replace("tile[64]", "tile[sixty]")
    assert compile_bounded(broken, "scale", "sm_90") == compile_text(broken, "scale", "sm_90")
    with pytest.raises(ToolchainError, match="cannot compile for sm_35"):
        compile_bounded(SCALE, "scale", "sm_35")
    assert isinstance(compile_bounded(SCALE, "scale", "sm_90"), Binary)


# Each level doubles the text: 2^40 additions, which no compiler finishes.
BOMB = "#define A0(x) x + x\n" + "".join(
    f"#define A{n}(x) A{n - 1}(x) + A{n - 1}(x)\n" for n in range(1, 40)
) + 'extern "C" __global__ void bomb(float* y) { y[0] = A39(y[1]); }'  # fmt: skip


def test_a_macro_bomb_does_not_hold_the_compiler_for_ever(
    alone: compiler._Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "ALONE_TIMEOUT_S", 1.5)
    began = time.monotonic()
    outcome = compile_bounded(BOMB, "bomb", "sm_90")
    assert time.monotonic() - began < 60
    assert outcome == Rejected("compile_timeout", "no binary after 1.5 s of compiling")
    monkeypatch.setattr(compiler, "ALONE_TIMEOUT_S", 60.0)
    assert isinstance(compile_bounded(SCALE, "scale", "sm_90"), Binary)


def test_an_interrupted_compile_is_not_waited_for(
    alone: compiler._Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(CompilePool, "collect", interrupted)
        with pytest.raises(KeyboardInterrupt):
            compile_bounded(ENDLESS, "endless", "sm_90")
    assert isinstance(compile_bounded(SCALE, "scale", "sm_90"), Binary)


def test_a_compiler_that_left_because_it_was_idle_is_started_again(
    alone: compiler._Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "IDLE_S", 0.1)
    for _ in range(3):
        assert isinstance(compile_bounded(SCALE, "scale", "sm_90"), Binary)
        time.sleep(0.11)


def test_where_no_child_can_be_started_this_process_compiles(
    alone: compiler._Alone, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("multiprocessing.spawn.get_executable", lambda: "")
    monkeypatch.setattr(sys, "exec_prefix", str(tmp_path))
    monkeypatch.setattr(sys, "base_exec_prefix", str(tmp_path))
    assert isinstance(compile_bounded(SCALE, "scale", "sm_90"), Binary)


def test_a_killed_compiler_is_an_error_in_one_line(
    alone: compiler._Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "_SERVICE", "stub_gpu:killed_compiler")
    with pytest.raises(ToolchainError, match=r"^kernel scale cannot be compiled now: .* killed by SIGKILL$"):
        compile_bounded(SCALE, "scale", "sm_90")


def test_a_forked_process_compiles_though_a_thread_was_compiling(alone: compiler._Alone) -> None:
    compile_bounded(SCALE, "scale", "sm_90")
    busy = threading.Thread(target=compile_bounded, args=(SCALE.replace("2.0f", "5.0f"), "scale", "sm_90"))
    with alone:
        busy.start()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                threading.Thread(target=lambda: None).start()
                status = 0 if isinstance(compile_bounded(SCALE, "scale", "sm_90"), Binary) else 2
            finally:
                os._exit(status)
    busy.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# -- the full version ----------------------------------------------------------------------------------------


def test_the_full_build_identifies_nvrtc() -> None:
    short = "{}.{}".format(*nvrtc().version)
    assert re.fullmatch(rf"{re.escape(short)}\.\d+", nvrtc_version())
    assert compiled(SCALE, "scale").nvrtc == nvrtc_version()
    if "site-packages/nvidia" in nvrtc().path:
        wheels = [f"nvidia-cuda-nvrtc{suffix}" for suffix in ("", "-cu12")]
        found = [dist.version for dist in distributions() if dist.metadata["Name"] in wheels]
        assert nvrtc_version() in found


def test_a_header_that_says_no_build_leaves_major_and_minor() -> None:
    library = nvrtc()
    short = "{}.{}".format(*library.version)
    assert library.build_of("// Cuda compilation tools, release 1.0, V1.0.3\n") == short
    assert library.build_of(f"//\n// Cuda compilation tools, release {short}, V{short}.48\n") == f"{short}.48"
    assert library.build_of("") == short


@pytest.mark.parametrize(
    ("stated", "build", "same"),
    [
        ("13.0", "13.0.48", True),
        ("13.0", "13.0.88", True),
        ("13.0.88", "13.0.88", True),
        ("13.0.48", "13.0.88", False),
        ("13.0.8", "13.0.88", False),
        ("13.0", "13.01.1", False),
        ("13", "12.9.1", False),
    ],
)
def test_an_older_record_agrees_with_every_build_of_its_version(stated: str, build: str, same: bool) -> None:
    assert same_build(stated, build) is same


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
