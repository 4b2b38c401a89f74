"""Ctrl-C, SIGTERM and SIGHUP: at any moment, within two seconds, with everything measured on disk."""
# ruff: noqa: PT012 -- what raises is a signal, after several statements

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from tuning import PLAIN

from autotune.records.trials import read_log
from autotune.tuning.interrupt import PATIENCE_S, Interrupts

HERE = Path(__file__).parent


# -- the question --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_waits_until_it_is_asked_for(number):
    def interrupt(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(number, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt), Interrupts() as interrupts:
            interrupts.check()
            signal.raise_signal(number)
            done = True
            interrupts.check()
        assert done
        assert signal.getsignal(number) is interrupt
    finally:
        signal.signal(number, before)


def test_a_loop_that_does_not_ask_is_cut():
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt), Interrupts():
        signal.raise_signal(signal.SIGINT)
        time.sleep(60)
    assert PATIENCE_S <= time.monotonic() - start < 50


def test_a_second_signal_is_not_held():
    with pytest.raises(KeyboardInterrupt), Interrupts():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("it was held")


def test_a_signal_that_nobody_asked_for_acts_at_the_end():
    reached = []
    with pytest.raises(KeyboardInterrupt), Interrupts():
        signal.raise_signal(signal.SIGINT)
        reached.append(True)
    assert reached
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


# -- the command ---------------------------------------------------------------------------------------------


class Command:
    """A search on the stub, as a process in a session of its own."""

    def __init__(self, folder, *, budget="60s", target=None, before=None, **environment):
        self.root = folder / "records"
        words = f"tune --m 64 --n 64 --k 8 --strategy random --budget {budget} --workers 2"
        program = [HERE / "stub_cli.py", *words.split(), "--space", PLAIN]
        if target:
            words = f"tune --m 64 --n 64 --k 64 --budget {budget} --workers 2 --target {target}"
            program = ["-m", "autotune", *words.split()]
        self._process = subprocess.Popen(
            [sys.executable, *program, "--cache", self.root],
            env={
                **os.environ,
                "STUB_GPU": str(folder / "measured"),
                "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]),
                **environment,
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=before,
        )

    def log(self):
        paths = list(self.root.glob("**/*.trials.jsonl"))
        return read_log(paths[0])[1] if paths and paths[0].stat().st_size else []

    def wait_for(self, count):
        end = time.monotonic() + 240
        while sum("outcome" in line for line in self.log()) < count:
            assert self._process.poll() is None, self._process.stderr.read()
            assert time.monotonic() < end
            time.sleep(0.02)

    def send(self, number):
        self._process.send_signal(number)

    def wait_for_start(self):
        """Wait until a candidate is on the GPU."""
        end = time.monotonic() + 240
        while not any(line.get("event") == "started" for line in self.log()):
            assert time.monotonic() < end
            time.sleep(0.02)

    def pause(self, seconds):
        """Stop the command and all its children, as Ctrl-Z does, and have them go on."""
        os.killpg(self._process.pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.killpg(self._process.pid, signal.SIGCONT)

    def wait(self):
        """Wait for the end; return (exit code, what it said)."""
        told = self._process.communicate(timeout=120)[1]
        return self._process.returncode, told

    def end(self, number):
        """Send a signal; return (exit code, seconds, what it said, processes left)."""
        start = time.monotonic()
        self._process.send_signal(number)
        told = self._process.communicate(timeout=120)[1]
        seconds = time.monotonic() - start
        time.sleep(0.3)
        return self._process.returncode, seconds, told, _session(self._process.pid)


def _session(leader):
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(session) == leader and state != "Z":
            found.append(stat.parent.name)
    return found


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name
)
def test_in_the_search(tmp_path, number):
    command = Command(tmp_path, STUB_SECONDS="0.05")
    command.wait_for(5)
    code, seconds, told, left = command.end(number)
    assert (code, left) == (130, [])
    assert seconds < 50  # what goes on would take 60 s
    assert "what became of each candidate so far is kept: the same command goes on from there\n" in told
    assert told.endswith("\nautotune: interrupted\n")
    assert "Traceback" not in told
    lines = command.log()
    assert [line["why"] for line in lines if line.get("event") == "end"] == ["interrupted"]
    outcomes = {line["id"] for line in lines if "outcome" in line}
    started = [line["id"] for line in lines if line.get("event") == "started"]
    assert len(set(started) - outcomes) <= 1


def test_while_a_candidate_hangs(tmp_path):
    command = Command(tmp_path, STUB_SECONDS="60")
    command.wait_for_start()
    code, seconds, _, left = command.end(signal.SIGINT)
    assert (code, left) == (130, [])
    assert seconds < 50  # what goes on would take 60 s


def test_in_the_finals(tmp_path):
    command = Command(tmp_path, STUB_FINALS="60")
    command.wait_for(60)
    time.sleep(0.5)
    code, seconds, told, left = command.end(signal.SIGTERM)
    assert (code, left) == (130, [])
    assert seconds < 50  # what goes on would take 60 s
    assert "checking the finalists" in told
    assert not list(command.root.glob("*/*.json"))


@pytest.mark.timing
@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name
)
@pytest.mark.parametrize("seconds_each", ["0.05", "60"])
def test_a_search_ends_within_two_seconds(tmp_path, number, seconds_each):
    command = Command(tmp_path, STUB_SECONDS=seconds_each)
    command.wait_for_start()
    assert command.end(number)[1] < 2


@pytest.mark.parametrize("after", [0.25, 0.5, 0.75, 1.0])
def test_while_it_starts(tmp_path, after):
    command = Command(tmp_path)
    time.sleep(after)
    code, seconds, told, left = command.end(signal.SIGINT)
    assert code in (130, -signal.SIGINT), told  # Python's own way of ending, until the command is there
    assert left == []
    assert seconds < 50  # what goes on would take 60 s


def test_an_interrupt_that_was_ignored_before_stays_ignored(tmp_path):
    """A job in the background, or under nohup, goes on when its terminal is interrupted."""
    command = Command(
        tmp_path, before=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN), STUB_SECONDS="0.05"
    )
    command.wait_for(3)
    seen = len(command.log())
    command.send(signal.SIGINT)
    command.wait_for(seen + 10)
    code, _, told, left = command.end(signal.SIGTERM)
    assert (code, left) == (130, []), told


def test_a_pause_is_not_of_the_budget(tmp_path):
    """After Ctrl-Z and fg, or a suspended machine, a search goes on for the rest of its time."""
    command = Command(tmp_path, budget="4s", STUB_SECONDS="0.2")
    command.wait_for(3)
    command.pause(6)
    before = sum("outcome" in line for line in command.log())
    status, told = command.wait()
    assert status == 0, told
    outcomes = [line for line in command.log() if "outcome" in line and "event" not in line]
    assert len(outcomes) >= before + 4  # two may have been on their way
    assert {line["outcome"] for line in outcomes} == {"measured"}


def test_a_pause_without_a_gpu_leaves_time_for_candidates(tmp_path):
    command = Command(tmp_path, budget="5s", target="t4")
    end = time.monotonic() + 60
    while not command.log():
        assert time.monotonic() < end
        time.sleep(0.01)
    command.pause(6)
    status, told = command.wait()
    assert status == 0, told
    assert any(line.get("outcome") == "estimated" for line in command.log())


def test_a_terminal_that_hangs_up_ends_the_search_as_a_signal_does(tmp_path):
    """With the live table, which can no longer be drawn then."""
    words = "-m autotune tune --m 64 --n 64 --k 64 --target t4 --budget 300s --workers 1 --cache records"
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, *words.split()],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(slave)
    end = time.monotonic() + 120
    logs = []
    while not logs or b'"begin"' not in logs[0].read_bytes():
        logs = list(tmp_path.glob("records/*/*/*.trials.jsonl"))
        assert process.poll() is None
        assert time.monotonic() < end
        if select.select([master], [], [], 0.05)[0]:
            os.read(master, 4096)  # what the table draws must find room
    os.close(master)
    assert process.wait(60) == 130
    assert read_log(logs[0])[1][-1]["why"] == "interrupted"
