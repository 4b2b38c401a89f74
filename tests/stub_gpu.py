"""A worker service without a GPU: what it does with a candidate is the candidate's entry name."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

from autotune.errors import DeviceError, MachineFault, Rejected
from autotune.measure.service import attend, received
from autotune.values.device import named_device
from autotune.values.measurement import Finals, GpuFacts, MeasuredTrial, Sustained, Timing, Verdict

FACTS = GpuFacts(named_device("h200"), "580.95.05", 1 << 30, 2, "0000:04:00.0")


TOO_LARGE = 99_999  # rows that do not fit into the memory of `serve_hashed`


def measured(median):
    timing = Timing(median, (median, median, median), 7, 1, "warm", "back-to-back", None, False)
    return MeasuredTrial(timing, Verdict(True, 1e-7, 1e-6, "", "stub"))


def act(entry):
    """Return (outcome, usable), or do not return."""
    if entry == "hang":
        time.sleep(60)
    if entry == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if entry == "killed":  # by the machine
        os.kill(os.getpid(), signal.SIGKILL)
    if entry == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if entry.startswith("first ") and _first_time():
        return act(entry.removeprefix("first "))
    if entry.startswith("first "):
        return measured(1.0), True
    if entry.startswith("busy "):
        end = time.process_time() + float(entry.removeprefix("busy "))
        while time.process_time() < end:
            pass
        return measured(1.0), True
    if entry == "starved":
        return MachineFault("cudaErrorMemoryAllocation: out of memory"), False
    if entry == "poison":  # an error that stays with the CUDA context
        return Rejected("crash", "cudaErrorIllegalAddress: an illegal memory access was encountered"), False
    if entry == "refused":  # one that does not
        return Rejected("crash", "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES: too many resources requested"), True
    if entry == "wrong":
        return Rejected("correctness", "C[0, 0] is nan"), True
    return measured(float(entry)), True


def sustained(about, announce):
    _, timing, seconds = about
    announce("kernel")
    if os.environ.get("STUB_SUSTAINED"):
        act(os.environ["STUB_SUSTAINED"])
    ms = 1.25 * timing.median_ms
    return "answer", Sustained(seconds, 9, ms, 0.7 * ms, "energy counter", 1650.0, ("power cap",))


def serve(connection, ordinal, problem, seed, cold):
    connection.send(("ready", FACTS))
    messages = received(connection)
    while attend(connection, messages, Stub()) is not None:
        connection.send(("ready", FACTS))


def serve_other(connection, ordinal, problem, seed, cold):
    """Like `serve`, on another kind of GPU."""
    connection.send(("ready", replace(FACTS, device=named_device("a10"))))
    attend(connection, received(connection), Stub())


class Stub:
    def trial(self, cubin, launch, best_ms):
        return act(launch.kernels[0].entry)

    def answer(self, kind, about, announce):
        if kind == "sustained":
            return sustained(about, announce)
        assert kind == "finals"
        candidates, baseline = about
        announce(None)
        outcomes = {}
        for number, (_, launch) in candidates.items():
            announce(number)
            outcomes[number], usable = act(launch.kernels[0].entry)
            if not usable:
                return "fault", outcomes[number]
        if not baseline:
            return "answer", Finals(outcomes, None, None)
        announce("cublas")
        if "breaks cublas" in os.environ.get("STUB_GPU", ""):
            os._exit(3)
        return "answer", Finals(outcomes, measured(0.5).timing, "sgemm_kernel", "13.1.0")


def serve_hashed(connection, ordinal, problem, seed, cold):
    """Measure every candidate: its time is a hash of its machine code and launch.

    STUB_GPU names a file to which each measurement adds a line before it begins, STUB_SECONDS how long one
    takes. Words in a cubin do what they say to the process.
    """
    connection.send(("identified", FACTS.device, FACTS.driver))
    messages, next_problem = received(connection), problem
    while next_problem is not None:
        if next_problem.m == TOO_LARGE:
            connection.send(
                ("failed", DeviceError(f"{next_problem} needs 2 bytes of device memory and 1 are free"))
            )
            return
        connection.send(("ready", FACTS))
        next_problem = attend(connection, messages, Hashed())


class Hashed:
    def __init__(self):
        self._file = os.open(os.environ["STUB_GPU"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._seconds = float(os.environ.get("STUB_SECONDS", "0.002"))

    def trial(self, cubin, launch, best_ms):
        digest, outcome = hashed(cubin, launch)
        os.write(self._file, f"{digest}\n".encode())
        time.sleep(self._seconds)
        if digest in os.environ.get("STUB_STARVED", "").split():
            return act("starved")
        if os.path.exists(os.environ.get("STUB_FAULT", "")):
            return act(Path(os.environ["STUB_FAULT"]).read_text())
        word = next((word for word in HARM if word.encode() in cubin), "")
        return act(HARM[word]) if word else (outcome, True)

    def answer(self, kind, about, announce):
        if kind == "sustained":
            return sustained(about, announce)
        candidates, _ = about
        announce(None)
        outcomes = {}
        for number, candidate in candidates.items():
            announce(number)
            time.sleep(float(os.environ.get("STUB_FINALS", self._seconds)))
            outcomes[number] = hashed(*candidate)[1]
        return "answer", Finals(outcomes, None, None)


HARM = {  # a name in a cubin: what it does
    "torture_endless_kernel": "hang",
    "torture_segfault": "crash",
    "torture_stray_far": "poison",
    "torture_wrong": "wrong",
}


def hashed(cubin, launch):
    """Return digits and a measurement made of a candidate's code and launch: 1 to 2 ms."""
    digest = hashlib.sha256(cubin + repr(launch).encode()).hexdigest()[:16]
    return digest, measured(1.0 + int(digest, 16) / 16**16)


def serve_counting(connection, ordinal, problem, seed, cold):
    """Like `serve`, adding its process id to the file named by STUB_GPU."""
    _count_start()
    serve(connection, ordinal, problem, seed, cold)


def no_memory(connection, ordinal, problem, seed, cold):
    connection.send(("failed", DeviceError(f"{problem} needs 2 bytes of device memory and 1 are free")))


def fails_twice_after_the_first(connection, ordinal, problem, seed, cold):
    """Like `serve_counting`, but the second and third start find no memory."""
    if _starts() in (1, 2):
        _count_start()
        no_memory(connection, ordinal, problem, seed, cold)
    else:
        serve_counting(connection, ordinal, problem, seed, cold)


def fails_after_the_first(connection, ordinal, problem, seed, cold):
    if _starts():
        _count_start()
        no_memory(connection, ordinal, problem, seed, cold)
    else:
        serve_counting(connection, ordinal, problem, seed, cold)


def _first_time():
    """Return whether nobody asked before."""
    try:
        os.close(os.open(os.environ["STUB_FIRST"], os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def _starts():
    path = Path(os.environ["STUB_GPU"])
    return len(path.read_text().split()) if path.exists() else 0


def _count_start():
    with Path(os.environ["STUB_GPU"]).open("a") as file:
        file.write(f"{os.getpid()}\n")


def never_starts(connection, ordinal, problem, seed, cold):
    raise ImportError("libsomething.so is missing")


def identified_only(connection, ordinal, problem, seed, cold):
    connection.send(("identified", FACTS.device, FACTS.driver))
    time.sleep(60)


def silent(connection, ordinal, problem, seed, cold):
    time.sleep(60)


def setup_dies(connection, ordinal, problem, seed, cold):
    connection.send(("ready", FACTS))
    connection.recv()
    connection.send(("step", None))
    os._exit(7)


def killed_compiler(connection, idle_s):
    """Die as the kernel ends a process when there is no memory, with the first text."""
    connection.recv()
    os.kill(os.getpid(), signal.SIGKILL)
