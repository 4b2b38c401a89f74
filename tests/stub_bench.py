"""A bench service without a GPU: what it does with a contest is the contest's alpha."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from autotune.errors import DeviceError, Rejected
from autotune.measure.bench_worker import Baseline, BenchFacts, Contested
from autotune.measure.service import received
from autotune.values.device import named_device
from autotune.values.measurement import MeasuredTrial, Timing, Verdict

HANG, CRASH, FAULT, WRONG, MEMORY, CUBLAS_CRASHES, LT_HANGS, SETUP_DIES = range(2, 10)


def timing(median):
    return Timing(median, (median, median, median), 25, 4, "warm", "back-to-back", None, False)


def measured(median):
    return MeasuredTrial(timing(median), Verdict(True, 1e-7, 1e-6, "", "stub"))


def serve(connection, ordinal):
    facts = BenchFacts(named_device("h200"), "580.95.05", "13.1.1", "13.1.1", 4150.4)
    connection.send(("ready", facts))
    for contest in received(connection):
        connection.send(answer(contest, lambda who: connection.send(("step", who))))


def serve_counting(connection, ordinal):
    """Like `serve`, adding its process id to the file named by STUB_BENCH."""
    with Path(os.environ["STUB_BENCH"]).open("a") as file:
        file.write(f"{os.getpid()}\n")
    serve(connection, ordinal)


def serve_telling_the_override(connection, ordinal):
    """Like `serve`, adding what its environment says of TF32 to the file named by STUB_BENCH."""
    with Path(os.environ["STUB_BENCH"]).open("a") as file:
        file.write(f"{os.environ.get('NVIDIA_TF32_OVERRIDE')}\n")
    serve(connection, ordinal)


def answer(contest, announce):
    act = int(contest.alpha)
    announce("setup")
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
    for name in contest.libraries:
        announce(name)
        if (act, name) == (CUBLAS_CRASHES, "cublas"):
            os._exit(3)
        if (act, name) == (LT_HANGS, "cublaslt"):
            time.sleep(60)
        times = {"cublas": 2.0, "cublaslt": 1.5, "cublas_tf32": 0.5}
        libraries[name] = Baseline(timing(times[name]), f"{name}_kernel", 1 if name == "cublas" else 7)
    wrong = Rejected("correctness", "C[0, 0] is nan")
    return "done", Contested(wrong if act == WRONG else measured(1.0), libraries)


def no_gpu(connection, ordinal):
    connection.send(("failed", DeviceError("there is no NVIDIA driver")))


def never_starts(connection, ordinal):
    raise ImportError("libsomething.so is missing")


def dies_for_good(connection, ordinal):
    """Like `serve_counting`, but no second one starts."""
    if Path(os.environ["STUB_BENCH"]).exists():
        os._exit(9)
    serve_counting(connection, ordinal)
