"""What threads make together, and what a process forked meanwhile finds."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import autotune
from autotune.kernel.once import Once

FORKED = """
import os, signal, threading, time
{before}
child = os.fork()
if not child:
    signal.alarm(90)  # a child that waits for a thread it does not have is killed
    {inside}
    os._exit(0)
_, status = os.waitpid(child, 0)
os._exit(os.waitstatus_to_exitcode(status) != 0)
"""

LOADING = """
import numpy
from autotune.kernel import multiply
a, b = numpy.ones((8, 4), "f"), numpy.ones((4, 6), "f")
load, loading = multiply.load, threading.Event()
def never(*words, **named):
    loading.set()
    time.sleep(600)
multiply.load = never
threading.Thread(target=multiply.matmul, args=(a, b), kwargs={"device": "simulator"}, daemon=True).start()
loading.wait()
multiply.load = load
"""

COMPILING = """
from pathlib import Path
from autotune.code import cubins
from autotune.code.depot import Depot
depot = Depot(Path(os.environ["AUTOTUNE_CACHE_DIR"]))
compile_bounded, compiling = cubins.compile_bounded, threading.Event()
def slow(*words):
    compiling.set()
    time.sleep(600)
cubins.compile_bounded = slow
TEXT = 'extern "C" __global__ void f(float* x) { x[0] = %s; }'
words = ("f", "sm_90")
threading.Thread(target=lambda: cubins.load_or_compile(TEXT % 1, *words, depot=depot), daemon=True).start()
compiling.wait()
cubins.compile_bounded = compile_bounded
"""

VARIANT = """
import numpy
import autotune
kernel = autotune.best_kernel(8, 6, 4, device="simulator")
a, b = numpy.ones((8, 5), "f")[:, :4], numpy.ones((4, 6), "f")
made, making = kernel._made, threading.Event()
def never(problem):
    making.set()
    time.sleep(600)
kernel._made = never
threading.Thread(target=kernel, args=(a, b), daemon=True).start()
making.wait()
kernel._made = made
"""


PROPERTY = """
from autotune.values.lazy import cached_property
class Facts:
    def __init__(self, wait):
        self.wait, self.asked = wait, threading.Event()
    @cached_property
    def value(self):
        self.asked.set()
        time.sleep(self.wait)
        return object()
slow, quick = Facts(600), Facts(0)
threading.Thread(target=lambda: slow.value, daemon=True).start()
slow.asked.wait()
"""


@pytest.mark.parametrize(
    ("before", "inside"),
    [
        (LOADING, "assert (multiply.matmul(a, b, device='simulator') == 4).all()"),
        (VARIANT, "assert (kernel(a, b) == 4).all()"),
        (COMPILING, "assert cubins.load_or_compile(TEXT % 2, *words, depot=depot).cubin"),
        (PROPERTY, "assert quick.value is quick.value"),
    ],
    ids=["a kernel is loaded", "a variant is made", "a text is compiled", "a property is computed"],
)
def test_a_process_that_is_forked_while(before, inside, tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOTUNE_CACHE_DIR", str(tmp_path))
    program = FORKED.format(before=before, inside=inside)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], timeout=300)
    assert done.returncode == 0


def test_what_is_asked_for_by_many_threads_is_made_once():
    table: Once[str, object] = Once()
    made, found = [], []

    def make():
        time.sleep(0.05)
        made.append(object())
        return made[-1]

    threads = [threading.Thread(target=lambda: found.append(table("key", make))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert found == made * 8


def test_what_fails_is_made_again():
    table: Once[str, int] = Once()

    def fail():
        raise ValueError("not yet")

    for _ in range(2):
        with pytest.raises(ValueError, match="not yet"):
            table("key", fail)
    assert table("key", lambda: 3) == 3
    assert table("key", fail) == 3


@pytest.mark.parametrize("make", ["simulated_machine", "cuda_machine"])
def test_threads_find_one_machine(make, monkeypatch):
    """Two would load every kernel twice."""
    from autotune.kernel import cuda, simulated
    from autotune.values.device import named_device

    def slow(*words):
        time.sleep(0.05)
        return object()

    monkeypatch.setattr(simulated, "SimulatedMachine", slow)
    monkeypatch.setattr(cuda, "CudaMachine", slow)
    monkeypatch.setattr(cuda, "current_device", lambda ordinal: named_device("h200"))
    for module in (simulated, cuda):
        monkeypatch.setattr(module, "_machines", Once())
    machine_of = {"simulated_machine": simulated.simulated_machine, "cuda_machine": cuda.cuda_machine}[make]
    names = ["h200", "NVIDIA H200"] * 4 if make == "simulated_machine" else [0] * 8
    found = []
    threads = [threading.Thread(target=lambda name=name: found.append(machine_of(name))) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(map(id, found))) == 1


def test_no_property_of_ours_holds_a_lock():
    """See `autotune.values.lazy`."""
    package = Path(autotune.__file__).parent
    texts = {path.relative_to(package): path.read_text() for path in package.rglob("*.py")}
    users = [str(path) for path, text in texts.items() if re.search(r"functools.*cached_property", text)]
    assert users == ["values/lazy.py"]
