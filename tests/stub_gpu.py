"""A worker service without a GPU: what it does with a candidate is the candidate's entry name."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from autotune.device import named_device
from autotune.errors import DeviceError, Rejected
from autotune.gpu.service import received
from autotune.gpu.worker import GpuFacts, MeasuredTrial
from autotune.timing import Timing
from autotune.verify import Verdict


def measured(median):
    timing = Timing(median, (median, median, median), 7, 1, "warm", "back-to-back", False)
    return MeasuredTrial(timing, Verdict(True, 1e-7, 1e-6, "", "stub"))


def act(entry):
    """Return (outcome, usable), or do not return."""
    if entry == "hang":
        time.sleep(60)
    if entry == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if entry == "poison":  # an error that stays with the CUDA context
        return Rejected("crash", "cudaErrorIllegalAddress: an illegal memory access was encountered"), False
    if entry == "refused":  # one that does not
        return Rejected("crash", "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES: too many resources requested"), True
    if entry == "wrong":
        return Rejected("correctness", "C[0, 0] is nan"), True
    return measured(float(entry)), True


def serve(connection, ordinal, problem, seed, cold):
    connection.send(("ready", GpuFacts(named_device("h200"), "580.95.05", True, 1 << 30, 2, "0000:04:00.0")))
    for kind, *rest in received(connection):
        if kind == "trial":
            entry = rest[1]
            connection.send(("started",))
            connection.send(("done", *act(entry)))
        else:
            entries, baseline = rest
            connection.send(("step", None))
            connection.send(finals([entry for _, entry, _ in entries], baseline, connection))


def finals(entries, baseline, connection):
    outcomes = []
    for index, entry in enumerate(entries):
        connection.send(("step", index))
        outcome, usable = act(entry)
        if not usable:
            return "fault", outcome
        outcomes.append(outcome)
    if not baseline:
        return "finals", outcomes, None, None
    connection.send(("step", len(entries)))
    if "breaks cublas" in os.environ.get("STUB_GPU", ""):
        os._exit(3)
    return "finals", outcomes, measured(0.5).timing, "sgemm_kernel"


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


def _starts():
    path = Path(os.environ["STUB_GPU"])
    return len(path.read_text().split()) if path.exists() else 0


def _count_start():
    with Path(os.environ["STUB_GPU"]).open("a") as file:
        file.write(f"{os.getpid()}\n")


def never_starts(connection, ordinal, problem, seed, cold):
    raise ImportError("libsomething.so is missing")


def silent(connection, ordinal, problem, seed, cold):
    time.sleep(60)


def setup_dies(connection, ordinal, problem, seed, cold):
    connection.send(("ready", GpuFacts(named_device("h200"), "580.95.05", True, 1 << 30, 2, "0000:04:00.0")))
    connection.recv()
    connection.send(("step", None))
    os._exit(7)
