"""The simulator called by many threads at once: first calls in new processes, where code is generated."""

from __future__ import annotations

import subprocess
import sys

import pytest
from test_simulator import SGEMM, ptx_of

from autotune.simulator.body import parse_kernel
from autotune.simulator.opcodes import emit, is_control
from autotune.simulator.program import Program

# Sixteen threads make their first calls together; a seventeenth call, alone, finds what they left behind.
PROGRAM = """
import sys, threading
import numpy as np
from autotune.simulator import run_ptx
sys.setswitchinterval(1e-6)
ptx, warm = sys.stdin.read(), sys.argv[1] == "parsed"
random = np.random.default_rng(0)
a, b = random.standard_normal((128, 24), np.float32), random.standard_normal((24, 128), np.float32)
gate, outcomes = threading.Barrier(16), []

def call():
    c = np.full((128, 128), np.nan, np.float32)
    run_ptx(ptx, "sgemm", (1, 1, 1), (256, 1, 1), [128, 24, a, b, c], counters=True).raise_if_faulty()
    return c

def work():
    gate.wait()
    try:
        outcomes.append(call())
    except Exception as error:
        outcomes.append(error)

if warm:  # the threads meet while functions of one program are generated, not while it is parsed
    from autotune.simulator.program import load_program
    load_program(ptx, "sgemm")
threads = [threading.Thread(target=work) for _ in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
outcomes.append(call())
exact = a.astype(np.float64) @ b
wrong = [one for one in outcomes if isinstance(one, Exception) or not np.allclose(one, exact, 1e-4, 1e-4)]
print(len(outcomes), len(wrong), *wrong[:1])
"""


@pytest.mark.parametrize("start", ["parsed", "new"])
@pytest.mark.parametrize("repeat", range(3))
def test_first_calls_of_many_threads_compute_what_one_thread_does(start: str, repeat: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, start],
        input=ptx_of(SGEMM, "sgemm"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.split()[:2] == ["17", "0"], done.stdout + done.stderr


def test_the_names_in_statements_do_not_depend_on_the_order_in_which_they_are_generated() -> None:
    ptx = ptx_of(SGEMM, "sgemm")
    statements = []
    for order in (1, -1):
        program = Program(parse_kernel(ptx, "sgemm"))
        instructions = list(enumerate(program.kernel.instructions))[::order]
        found = {n: emit(program.layout, x, n, True) for n, x in instructions if not is_control(x)}
        statements.append(dict(sorted(found.items())))
    assert statements[0] == statements[1]
