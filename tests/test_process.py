from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from autotune.code.awake import AwakeClock
from autotune.code.process import Child, ChildDied, NoInterpreterError, interpreter

SERVICES = """
import os, signal, sys
from autotune.code.process import requests

class Unreadable:
    def __reduce__(self):
        return (int, ("not a number",))

def echo(connection, *args):
    for message in requests(connection):
        connection.send((message, args))

def idle(connection):
    for message in requests(connection, 0.2):
        connection.send(message)

def facts(connection):
    print("on stdout")
    os.system("echo from C")
    connection.send((os.getppid(), os.environ.get("COLOUR"), sys.path, "__main__" in sys.modules and
                     getattr(sys.modules["__main__"], "__file__", None)))
    connection.recv()

def fail(connection):
    sys.stderr.write("x" * 10_000 + "\\n")
    raise ValueError("the reason")

def segfault(connection):
    os.kill(os.getpid(), signal.SIGSEGV)

def starved(connection):
    raise MemoryError

def unreadable(connection):
    connection.send(Unreadable())
    connection.recv()

def stubborn(connection):
    connection.send("up")
    while True:
        signal.pause()
"""


@pytest.fixture(autouse=True)
def services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that only a child with this process's sys.path can import."""
    (tmp_path / "services.py").write_text(SERVICES)
    monkeypatch.syspath_prepend(tmp_path)


def gone(pid: int, within: float = 60.0) -> bool:
    """Wait until a process has ended (a zombie has)."""
    end = time.monotonic() + within
    while True:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        if time.monotonic() >= end:
            return False
        time.sleep(0.01)


def test_requests_are_answered_in_order_with_arguments() -> None:
    with Child("services:echo", 1, "two") as child:
        assert child.alive()
        for message in ("a", {"b": [1.5]}, b"c" * 1_000_000):
            child.send(message)
            assert child.receive() == (message, (1, "two"))
        assert not child.poll()
    assert not child.alive()
    assert gone(child.pid)


def test_child_sees_parent_path_and_env_but_not_its_main(capfd: pytest.CaptureFixture[str]) -> None:
    with Child("services:facts", env={"COLOUR": "blue"}) as child:
        parent, colour, path, main = child.receive()
    assert (parent, colour, main) == (os.getpid(), "blue", None)
    assert path == [os.path.abspath(entry) for entry in sys.path]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("service", "how"),
    [
        ("fail", "exit code 1"),
        ("segfault", "killed by SIGSEGV"),
        ("unreadable", "its message cannot be unpickled (ValueError: "),
        ("missing", "exit code 1"),
    ],
)
def test_receive_says_how_the_child_ended(service: str, how: str) -> None:
    child = Child(f"services:{service}")
    with pytest.raises(ChildDied) as caught:
        child.receive()
    assert caught.value.how.startswith(how)
    assert f"services:{service}" in str(caught.value)
    assert gone(child.pid, 0)


def test_tail_of_stderr_is_quoted() -> None:
    with Child("services:fail") as child, pytest.raises(ChildDied, match="the reason") as caught:
        child.receive()
    assert caught.value.summary == "exit code 1: ValueError: the reason"
    assert 0 < len(caught.value.stderr) <= 2048


def test_send_to_a_dead_child_raises() -> None:
    with Child("services:echo") as child:
        os.kill(child.pid, signal.SIGKILL)
        assert gone(child.pid)
        with pytest.raises(ChildDied, match="killed by SIGKILL"):
            child.send("anyone there?")
        assert not child.alive()


def test_unpicklable_request_leaves_the_child_usable() -> None:
    with Child("services:echo") as child:
        with pytest.raises(Exception, match="pickle"):
            child.send(lambda: None)
        child.send(1)
        assert child.receive() == (1, ())


def test_close_kills_what_does_not_end_itself() -> None:
    child = Child("services:stubborn")
    assert child.receive() == "up"
    start = time.monotonic()
    child.close(grace=0.2)
    assert 0.2 <= time.monotonic() - start < 50
    assert gone(child.pid, 0)
    child.close()
    child.kill()


def test_kill_and_ctrl_c() -> None:
    child = Child("services:stubborn")
    assert child.receive() == "up"
    os.kill(child.pid, signal.SIGINT)
    time.sleep(0.1)
    assert child.alive()
    child.kill()
    assert not child.alive()
    assert child.poll()
    with pytest.raises(ChildDied, match="SIGKILL"):
        child.receive()


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_children_end_with_a_killed_parent() -> None:
    script = (
        "import sys, time; sys.path[:] = eval(sys.argv[1])\n"
        "from autotune.code.process import Child\n"
        "child = Child('services:stubborn'); child.receive()\n"  # no main guard; the child ignores its pipe
        "print(child.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, repr(sys.path)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout
        pid = int(parent.stdout.readline())
        assert not gone(pid, 0.1)
        parent.kill()
        assert gone(pid)


def test_child_outlives_the_thread_that_started_it() -> None:
    children: list[Child] = []

    def start() -> None:
        children.append(Child("services:echo"))
        children[0].send("up?")
        children[0].receive()

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    with children[0] as child:
        time.sleep(0.1)
        child.send("still there?")
        assert child.receive() == ("still there?", ())


def test_other_processes_do_not_hold_the_pipe_open() -> None:
    with Child("services:echo") as first, Child("services:echo") as second:
        second.send(1)
        second.receive()
        first.connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            first._process.wait(5)
        assert not first.alive()


def test_import_stays_light() -> None:
    heavy = {"numpy", "cupy", "optuna", "jinja2", "concurrent.futures", "asyncio", "importlib.metadata"}
    script = f"import sys; sys.path[:] = {sys.path!r}\nimport autotune.code.process\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "autotune.code.process" in loaded
    assert not heavy & loaded


def test_a_variable_can_be_taken_from_the_child(services, monkeypatch):
    monkeypatch.setenv("COLOUR", "red")
    with Child("services:facts", env={"COLOUR": None}) as child:
        assert child.receive()[1] is None


@pytest.mark.parametrize(
    ("service", "signal_sent", "outside"),
    [
        ("stubborn", signal.SIGKILL, True),
        ("stubborn", signal.SIGTERM, True),
        ("stubborn", signal.SIGSEGV, False),
        ("stubborn", signal.SIGABRT, False),
        ("starved", None, True),
        ("fail", None, False),
    ],
)
def test_what_came_from_outside_is_told_from_the_childs_own_fault(service, signal_sent, outside):
    child = Child(f"services:{service}")
    if signal_sent is not None:
        assert child.receive() == "up"
        os.kill(child.pid, signal_sent)
    with pytest.raises(ChildDied) as caught:
        child.receive()
    assert caught.value.outside is outside


def test_a_child_that_we_end_was_not_ended_from_outside():
    child = Child("services:stubborn")
    assert child.receive() == "up"
    child.stop()
    with pytest.raises(ChildDied, match="SIGKILL") as caught:
        child.receive()
    assert not caught.value.outside


def test_a_pause_of_the_child_is_told_once_also_when_it_is_over():
    with Child("services:stubborn") as child:
        assert child.receive() == "up"
        assert not child.paused()
        os.kill(child.pid, signal.SIGSTOP)
        end = time.monotonic() + 10
        while not child.paused():
            assert time.monotonic() < end
        assert not child.paused()
        os.kill(child.pid, signal.SIGCONT)
        while not child.paused():
            assert time.monotonic() < end
        assert not child.paused()
        assert child.alive()


def test_the_cpu_time_of_a_child_is_known_while_it_lives():
    with Child("services:stubborn") as child:
        assert child.receive() == "up"
        assert 0 < child.cpu_seconds() < 60
    assert child.cpu_seconds() is None


def test_a_gap_between_two_looks_counts_as_one_second():
    seconds = iter([100.0, 100.2, 107.5, 107.6, 108.0])
    clock = AwakeClock(lambda: next(seconds), lambda: 1.0)
    assert [clock.now() for _ in range(3)] == pytest.approx([0.2, 1.2, 1.3])
    assert clock.left(deadline=9.0) == AwakeClock.LONGEST_LOOK / 2


@pytest.mark.parametrize("closed", ["0", "1", "2", "012"])
def test_children_start_where_standard_streams_are_closed(closed):
    script = (
        f"import os, sys; [os.close(int(n)) for n in {closed!r}]; sys.path[:] = eval(sys.argv[1])\n"
        "from autotune.code.process import Child\n"
        "with Child('services:echo') as child:\n"
        "    child.send(1); answer = child.receive()\n"
        "os._exit(7 if answer == (1, ()) else 8)"
    )
    done = subprocess.run([sys.executable, "-c", script, repr(sys.path)], capture_output=True, timeout=60)
    assert done.returncode == 7, done.stderr


def test_a_program_that_embeds_python_is_not_started_in_its_place(monkeypatch):
    for executable in ("", None, "/bin/true"):
        monkeypatch.setattr("multiprocessing.spawn.get_executable", lambda stated=executable: stated)
        assert interpreter() != executable
        with Child("services:echo") as child:
            child.send(1)
            assert child.receive() == (1, ())


def test_without_any_interpreter_the_error_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr("multiprocessing.spawn.get_executable", lambda: "")
    monkeypatch.setattr(sys, "exec_prefix", str(tmp_path))
    monkeypatch.setattr(sys, "base_exec_prefix", str(tmp_path))
    with pytest.raises(NoInterpreterError, match=r"Call multiprocessing\.set_executable") as caught:
        Child("services:echo")
    assert "\n" not in str(caught.value)


def test_an_idle_service_ends_by_itself():
    with Child("services:idle") as child:
        child.send(1)
        assert child.receive() == 1
        assert gone(child.pid)


def test_a_gap_in_which_the_process_computed_counts():
    seconds, computed = iter([0.0, 5.0, 15.0]), iter([0.0, 4.5, 7.5])
    clock = AwakeClock(lambda: next(seconds), lambda: next(computed))
    assert [clock.now(), clock.now()] == pytest.approx([4.5, 7.5])
