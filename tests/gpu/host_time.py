"""Host time of a call in us beside PyTorch's and CuPy's: matmul on their arrays, and PyTorch's own operators.

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
import autotune.torch

ROUNDS, CALLS = 41, 200
SHAPES = ((128, 128, 128), (512, 512, 512), (1, 512, 2048))
Calls = dict[str, Callable[[], object]]


def contenders(m: int, n: int, k: int) -> Calls:
    """Calls on the same operands, by name."""
    a, b, c = (torch.rand(shape, device="cuda") for shape in ((m, k), (k, n), (m, n)))
    x, y, z = (cupy.asarray(each) for each in (a, b, c))
    leaf, kernel = b.clone().requires_grad_(), autotune.best_kernel(m, n, k)
    places = a.data_ptr(), b.data_ptr(), c.data_ptr()
    return {
        "torch.mm out=": lambda: torch.mm(a, b, out=c),
        "torch.mm": lambda: torch.mm(a, b),
        "matmul out=, tensors": lambda: autotune.matmul(a, b, out=c),
        "matmul, tensors": lambda: autotune.matmul(a, b),
        "kernel out=, tensors": lambda: kernel(a, b, out=c),
        "torch.mm, requires grad": lambda: torch.mm(a, leaf),
        "autotune.torch.matmul": lambda: autotune.torch.matmul(a, b),
        "autotune.torch.matmul, requires grad": lambda: autotune.torch.matmul(a, leaf),
        "matmul out=, CuPy": lambda: autotune.matmul(x, y, out=z),
        "matmul, CuPy": lambda: autotune.matmul(x, y),
        "launch on addresses": lambda: kernel.launch(*places),
        "kernel out=, CuPy": lambda: kernel(x, y, out=z),
        "cupy.matmul out=": lambda: cupy.matmul(x, y, out=z),
    }


def operators() -> tuple[Calls, dict[str, float]]:
    """Calls of PyTorch's operators, and how much of the time that they take without us they may take."""
    a, b, bias = (torch.rand(shape, device="cuda") for shape in ((64, 64), (64, 64), (64,)))
    many, others = (torch.rand(16, 64, 64, device="cuda") for _ in range(2))
    weight, x = b.clone().requires_grad_(), many.clone().requires_grad_()
    out, linear = torch.empty_like(a), torch.nn.functional.linear
    calls: Calls = {
        "mm": lambda: torch.mm(a, b),
        "mm out=": lambda: torch.mm(a, b, out=out),
        "bmm": lambda: torch.bmm(many, others),
        "addmm": lambda: torch.addmm(bias, a, b),
        "linear layer": lambda: linear(a, weight, bias),
        "bmm and its gradient": lambda: torch.autograd.grad(torch.bmm(x, others).sum(), x),
    }
    return calls, {"mm": 1.1, "mm out=": 1.1, "bmm": 1.1, "addmm": 1.3}


def medians(calls: Calls, rounds: int = ROUNDS) -> dict[str, float]:
    """Time of each call in us, taken in turns."""
    for call in calls.values():
        for _ in range(50):
            call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            times[name].append((time.perf_counter() - start) / CALLS * 1e6)
    return {name: statistics.median(found) for name, found in times.items()}


def overridden() -> int:
    """Print what PyTorch's operators take on their kernels and on ours; return how many take too long."""
    calls, limits = operators()
    stock: list[dict[str, float]] = []
    ours: list[dict[str, float]] = []
    for _ in range(3):
        stock.append(medians(calls, ROUNDS // 4))
        with autotune.torch.enabled():
            ours.append(medians(calls, ROUNDS // 4))
    failed = 0
    print("operators of PyTorch: us per call without and with enabled()")
    for name in calls:
        before, after = (statistics.median(each[name] for each in found) for found in (stock, ours))
        limit = limits.get(name)
        failed += limit is not None and after > limit * before
        said = "" if limit is None else f" (at most {limit})"
        print(f"{before:8.2f} {after:8.2f}  {name}: {after / before:.2f}{said}")
    return failed


def main() -> int:
    warnings.simplefilter("ignore", UserWarning)
    failed = 0
    for shape in SHAPES:
        found = medians(contenders(*shape))
        print(f"{shape}: us per call")
        for name, median in found.items():
            print(f"{median:8.2f}  {name}")
        ratios = (
            ("out=", found["matmul out=, tensors"] / found["torch.mm out="], 0.75),
            ("allocating", found["matmul, tensors"] / found["torch.mm"], 1.0),
        )
        for name, ratio, limit in ratios:
            failed += ratio > limit
            print(f"{ratio:8.2f}  of torch.mm, {name} (at most {limit})")
    failed += overridden()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
