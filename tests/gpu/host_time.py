"""Host time of a call in us: matmul on tensors and CuPy arrays beside torch.mm and cupy.matmul; by hand.

The GPU is kept idle: products are small, and each round waits for them before the next.
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections.abc import Callable

import cupy
import torch

import autotune

ROUNDS, CALLS = 41, 200


def contenders(m: int, n: int, k: int) -> dict[str, Callable[[], object]]:
    """Calls on the same operands, by name."""
    a, b, c = (torch.rand(shape, device="cuda") for shape in ((m, k), (k, n), (m, n)))
    x, y, z = (cupy.asarray(each) for each in (a, b, c))
    kernel = autotune.best_kernel(m, n, k)
    places = a.data_ptr(), b.data_ptr(), c.data_ptr()
    return {
        "torch.mm out=": lambda: torch.mm(a, b, out=c),
        "torch.mm": lambda: torch.mm(a, b),
        "matmul out=, tensors": lambda: autotune.matmul(a, b, out=c),
        "matmul, tensors": lambda: autotune.matmul(a, b),
        "kernel out=, tensors": lambda: kernel(a, b, out=c),
        "matmul out=, CuPy": lambda: autotune.matmul(x, y, out=z),
        "matmul, CuPy": lambda: autotune.matmul(x, y),
        "launch on addresses": lambda: kernel.launch(*places),
        "kernel out=, CuPy": lambda: kernel(x, y, out=z),
        "cupy.matmul out=": lambda: cupy.matmul(x, y, out=z),
    }


def main() -> int:
    warnings.simplefilter("ignore", UserWarning)
    failed = 0
    for shape in ((128, 128, 128), (1, 512, 2048)):
        calls = contenders(*shape)
        for call in calls.values():
            for _ in range(50):
                call()
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(ROUNDS):  # in turns
            for name, call in calls.items():
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(CALLS):
                    call()
                times[name].append((time.perf_counter() - start) / CALLS * 1e6)
        medians = {name: statistics.median(found) for name, found in times.items()}
        print(f"{shape}: us per call")
        for name, median in medians.items():
            print(f"{median:8.2f}  {name}")
        ratios = (
            ("out=", medians["matmul out=, tensors"] / medians["torch.mm out="], 0.75),
            ("allocating", medians["matmul, tensors"] / medians["torch.mm"], 1.0),
        )
        for name, ratio, limit in ratios:
            failed += ratio > limit
            print(f"{ratio:8.2f}  of torch.mm, {name} (at most {limit})")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
