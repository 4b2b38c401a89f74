"""A service without a GPU that compares: what it does with a comparison is its alpha."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from autotune.errors import DeviceError, Rejected
from autotune.measure.comparison import Baseline, BenchFacts, Compared
from autotune.measure.service import attend, received
from autotune.values.device import named_device
from autotune.values.measurement import GpuFacts, MeasuredTrial, Sustained, Timing, Verdict

HANG, CRASH, FAULT, WRONG, MEMORY, CUBLAS_CRASHES, LT_HANGS, SETUP_DIES = range(2, 10)


def timing(median):
    return Timing(median, (median, median, median), 25, 4, "warm", "back-to-back", None, False)


def measured(median):
    return MeasuredTrial(timing(median), Verdict(True, 1e-7, 1e-6, "", "stub"))


FACTS = BenchFacts(named_device("h200"), "580.95.05", "13.1.1", "13.1.1", 4150.4)


def serve(connection, ordinal, problem, seed, cold):
    connection.send(("ready", GpuFacts(FACTS.device, FACTS.driver, 1 << 30, 0, "0000:04:00.0")))
    attend(connection, received(connection), Stub())


class Stub:
    def answer(self, kind, about, announce):
        announce(None)
        return ("answer", FACTS) if kind == "facts" else answer(*about, announce)


def serve_counting(connection, ordinal, problem, seed, cold):
    """Like `serve`, adding its process id to the file named by STUB_BENCH."""
    with Path(os.environ["STUB_BENCH"]).open("a") as file:
        file.write(f"{os.getpid()}\n")
    serve(connection, ordinal, problem, seed, cold)


def serve_telling_the_override(connection, ordinal, problem, seed, cold):
    """Like `serve`, adding what its environment says of TF32 to the file named by STUB_BENCH."""
    with Path(os.environ["STUB_BENCH"]).open("a") as file:
        file.write(f"{os.environ.get('NVIDIA_TF32_OVERRIDE')}\n")
    serve(connection, ordinal, problem, seed, cold)


def answer(comparison, announce):
    act = int(comparison.alpha)
    if act == MEMORY:
        return "refused", DeviceError("8 bytes are needed and 4 are free")
    if act == SETUP_DIES:
        os._exit(5)
    announce("kernel")
    if act == HANG:
        time.sleep(60)
    if act == CRASH:
        os.kill(os.getpid(), signal.SIGSEGV)
    if act == FAULT:
        return "fault", Rejected("crash", "cudaErrorIllegalAddress")
    libraries = {}
    times = {"cublas": 2.0, "cublaslt": 1.5, "cublas_tf32": 0.5}
    for name in comparison.libraries:
        announce(name)
        if (act, name) == (CUBLAS_CRASHES, "cublas"):
            os._exit(3)
        if (act, name) == (LT_HANGS, "cublaslt"):
            time.sleep(60)
        libraries[name] = Baseline(timing(times[name]), f"{name}_kernel", 1 if name == "cublas" else 7)
    sustained = {}
    if comparison.sustained_s:
        for name, ms in {"kernel": 1.25, **{name: times[name] for name in libraries}}.items():
            announce(name)
            sustained[name] = _held(ms, comparison.sustained_s)
    wrong = Rejected("correctness", "C[0, 0] is nan")
    return "answer", Compared(wrong if act == WRONG else measured(1.0), libraries, sustained)


def _held(ms, seconds):
    return Sustained(seconds, 9, ms, 0.6905 * ms, "energy counter", 1650.0, ("power cap",))


def no_gpu(connection, ordinal, problem, seed, cold):
    connection.send(("failed", DeviceError("there is no NVIDIA driver")))


def never_starts(connection, ordinal, problem, seed, cold):
    raise ImportError("libsomething.so is missing")


def dies_for_good(connection, ordinal, problem, seed, cold):
    """Like `serve_counting`, but no second one starts."""
    if Path(os.environ["STUB_BENCH"]).exists():
        os._exit(9)
    serve_counting(connection, ordinal, problem, seed, cold)
