from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_compiler import ENDLESS, SCALE

from autotune.code import pool as pools
from autotune.code import single
from autotune.code.compiler import Binary, compile_text
from autotune.code.pool import CompilePool
from autotune.code.process import NoInterpreterError
from autotune.code.single import compile_bounded
from autotune.errors import Rejected, ToolchainError


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[single._Alone]:
    made = single._Alone()
    monkeypatch.setattr(single, "_alone", made)
    yield made
    if made._pool is not None:
        made._pool.close()


def test_a_compile_in_a_child_gives_what_compile_text_gives(alone: single._Alone) -> None:
    assert compile_bounded(SCALE, "scale", "sm_90") == compile_text(SCALE, "scale", "sm_90")
    broken = SCALE.replace("tile[64]", "tile[sixty]")
    assert compile_bounded(broken, "scale", "sm_90") == compile_text(broken, "scale", "sm_90")
    with pytest.raises(ToolchainError, match="cannot compile for sm_35"):
        compile_bounded(SCALE, "scale", "sm_35")
    assert isinstance(compile_bounded(SCALE, "scale", "sm_90"), Binary)


def test_the_compiler_can_begin_before_it_is_known_what_to_compile(alone: single._Alone) -> None:
    single.begin()
    assert alone._pool is not None
    (worker,) = alone._pool._workers
    single.begin()
    assert isinstance(compile_bounded(SCALE, "scale", "sm_90"), Binary)
    assert alone._pool._workers == [worker]
    compiling = threading.Thread(target=lambda: [alone.__enter__(), time.sleep(0.5), alone.__exit__()])
    compiling.start()
    single.begin()  # which waits for no other thread
    assert compiling.is_alive()
    compiling.join()


def test_a_compiler_that_cannot_begin_is_told_when_it_is_needed(
    alone: single._Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(self: object) -> None:
        raise NoInterpreterError("no interpreter")

    monkeypatch.setattr(CompilePool, "warm", none)
    single.begin()
    assert isinstance(compile_bounded(SCALE, "scale", "sm_90"), Binary)


# Each level doubles the text: 2^40 additions, which no compiler finishes.
BOMB = "#define A0(x) x + x\n" + "".join(
    f"#define A{n}(x) A{n - 1}(x) + A{n - 1}(x)\n" for n in range(1, 40)
) + 'extern "C" __global__ void bomb(float* y) { y[0] = A39(y[1]); }'  # fmt: skip


def test_a_macro_bomb_does_not_hold_the_compiler_for_ever(
    alone: single._Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(single, "ALONE_TIMEOUT_S", 1.5)
    began = time.monotonic()
    outcome = compile_bounded(BOMB, "bomb", "sm_90")
    assert time.monotonic() - began < 60
    assert outcome == Rejected("compile_timeout", "no binary after 1.5 s of compiling")
    monkeypatch.setattr(single, "ALONE_TIMEOUT_S", 60.0)
    assert isinstance(compile_bounded(SCALE, "scale", "sm_90"), Binary)


def test_an_interrupted_compile_is_not_waited_for(
    alone: single._Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(CompilePool, "collect", interrupted)
        with pytest.raises(KeyboardInterrupt):
            compile_bounded(ENDLESS, "endless", "sm_90")
    assert isinstance(compile_bounded(SCALE, "scale", "sm_90"), Binary)


def test_a_compiler_that_left_because_it_was_idle_is_started_again(
    alone: single._Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(single, "IDLE_S", 0.1)
    for _ in range(3):
        assert isinstance(compile_bounded(SCALE, "scale", "sm_90"), Binary)
        time.sleep(0.11)


def test_where_no_child_can_be_started_this_process_compiles(
    alone: single._Alone, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("multiprocessing.spawn.get_executable", lambda: "")
    monkeypatch.setattr(sys, "exec_prefix", str(tmp_path))
    monkeypatch.setattr(sys, "base_exec_prefix", str(tmp_path))
    assert isinstance(compile_bounded(SCALE, "scale", "sm_90"), Binary)


def test_a_killed_compiler_is_an_error_in_one_line(
    alone: single._Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "_SERVICE", "stub_gpu:killed_compiler")
    with pytest.raises(ToolchainError, match=r"^kernel scale cannot be compiled now: .* killed by SIGKILL$"):
        compile_bounded(SCALE, "scale", "sm_90")


def test_a_forked_process_compiles_though_a_thread_was_compiling(alone: single._Alone) -> None:
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
