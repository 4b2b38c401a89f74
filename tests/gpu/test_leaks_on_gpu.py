"""What many calls leave behind: memory over shapes, streams and threads; kernels dropped while they run."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

import autotune

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:records were measured under other")]

CALLS, SHAPES, STREAMS = 10_000, 200, 16
COMPILE = "import sys, json, autotune; [autotune.best_kernel(*each) for each in json.loads(sys.argv[1])]"


def shapes():
    """Small ones, of which a third have kernels that work in a workspace."""
    random = np.random.default_rng(2)
    return [
        (int(m), int(n), int(k) * (20 if number % 3 else 1), ("nn", "nt", "tn")[number % 3])
        for number, (m, n, k) in enumerate(zip(*random.integers(1, 90, (3, SHAPES)), strict=True))
    ]


@pytest.fixture(scope="module", autouse=True)
def compiled(tmp_path_factory):
    """Compile all in several processes: here only what is on disk is loaded."""
    import json

    root = tmp_path_factory.mktemp("records")
    os.environ["AUTOTUNE_CACHE_DIR"] = str(root)
    count = min(16, os.cpu_count() or 1)
    children = [
        subprocess.Popen([sys.executable, "-W", "ignore", "-c", COMPILE, json.dumps(shapes()[first::count])])
        for first in range(count)
    ]
    assert [child.wait(timeout=240) for child in children] == [0] * count


def test_memory_after_many_calls_over_shapes_streams_and_threads():
    torch = pytest.importorskip("torch")
    operands = []
    for m, n, k, layout in shapes():
        a = torch.ones((m, k) if layout[0] == "n" else (k, m), device="cuda")
        b = torch.ones((k, n) if layout[1] == "n" else (n, k), device="cuda")
        operands.append((a if layout[0] == "n" else a.mT, b if layout[1] == "n" else b.mT, k))
    torch.cuda.synchronize()
    failures = []

    def call(number, stream, calls):
        with torch.cuda.stream(stream):
            for turn in range(calls):
                a, b, k = operands[(turn * 7 + number) % SHAPES]
                out = autotune.matmul(a, b)
                if turn % 50 == 0 and not bool((out == k).all()):
                    failures.append((number, turn))

    streams = [torch.cuda.Stream() for _ in range(STREAMS)]

    def in_threads(calls):
        threads = [
            threading.Thread(target=call, args=(number, stream, calls))
            for number, stream in enumerate(streams)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    before = torch.cuda.mem_get_info()[0]
    first = in_threads(SHAPES)  # each shape once on each stream
    last = in_threads(CALLS // STREAMS)
    assert not failures
    assert first - last < 8 << 20, f"{(first - last) >> 20} MiB were lost in {CALLS} calls"
    assert before - last < 1 << 30, f"{(before - last) >> 20} MiB are kept"


def test_a_kernel_that_is_dropped_while_it_runs():
    torch = pytest.importorskip("torch")
    a, b = torch.ones(64, 8192, device="cuda"), torch.ones(8192, 64, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    free = []
    for number in range(40):
        kernel = autotune.best_kernel(64, 64, 8192)
        found = []
        for stream in streams:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(3_000_000)
                found.append(kernel(a, b))
        del kernel
        gc.collect()
        torch.cuda.synchronize()
        assert all(bool((each == 8192).all()) for each in found)
        if number in (5, 39):
            free.append(torch.cuda.mem_get_info()[0])
    assert free[0] - free[1] < 8 << 20
