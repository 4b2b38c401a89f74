"""Energies and forces of many small molecules by a graph network: batches of small products, in FP32.

Each molecule is a dense graph of its atoms. A layer compares the features of all pairs (`H @ H.mT`), lets
that fade with distance, and gathers features by it (`weights @ H`); forces are the gradient of the energy
with respect to positions. It runs on PyTorch's products and on ours; both are compared with float64.

    python examples/molecules.py                            1024 molecules of 64 atoms, 64 features
    python examples/molecules.py --molecules 4096 --atoms 24 --features 128 --compiled
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import time
import warnings
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import autotune.torch

OURS = re.compile(r"sgemm(_\w+)?")  # our kernels bear the names of their families
PAUSE_S = 3  # after the first step: compilers that were started for it may still be at work
PRODUCTS = re.compile(r"gemm|gemv|cutlass|splitk|cublas", re.IGNORECASE)  # and cuBLAS's all hold one of these


class Layer(nn.Module):
    """Gathers features of the atoms around, by how alike and how near they are."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.mixing = nn.Linear(features, features)
        self.reach = nn.Parameter(torch.rand(()) + 0.5)

    def forward(self, features: Tensor, squares: Tensor) -> Tensor:
        """Return features `[molecules, atoms, features]` from the same and squared distances of pairs."""
        alike = (features @ features.mT / math.sqrt(features.shape[-1])).tanh()
        weights = alike * torch.exp(-self.reach * squares)
        return features + self.mixing(weights @ features).tanh()


class Network(nn.Module):
    """Energies of molecules from positions and kinds of their atoms."""

    def __init__(self, layers: int, features: int) -> None:
        super().__init__()
        self.kinds = nn.Embedding(10, features)
        self.layers = nn.ModuleList(Layer(features) for _ in range(layers))
        self.energy = nn.Linear(features, 1)

    def forward(self, positions: Tensor, kinds: Tensor) -> Tensor:
        """Return energies `[molecules]` of atoms at `[molecules, atoms, 3]`."""
        squares = (positions[:, :, None] - positions[:, None]).square().sum(-1)
        features = self.kinds(kinds)
        for layer in self.layers:
            features = layer(features, squares)
        return self.energy(features).sum((1, 2))


@dataclass
class Run:
    """What one run gave.

    Attributes:
        forces: Of all atoms, `[molecules, atoms, 3]`.
        step_ms: Median time of energies and forces.
        first_s: The first time, with all that is compiled and measured in it.
        products_ms: GPU time of matrix products in a step.
        ours_ms: The part of that in our kernels.
    """

    forces: Tensor
    step_ms: float
    first_s: float
    products_ms: float
    ours_ms: float


def run(network: nn.Module, positions: Tensor, kinds: Tensor, compiled: bool, steps: int) -> Run:
    """Compute energies and forces again and again, and look at where the time goes."""
    energies_of = torch.compile(network) if compiled else network
    times = []

    def forces() -> Tensor:
        places = positions.detach().requires_grad_()
        return -torch.autograd.grad(energies_of(places, kinds).sum(), places)[0]

    for _ in range(steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        found = forces()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        if len(times) == 1:
            time.sleep(PAUSE_S)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            forces()
        torch.cuda.synchronize()
    spent = {event.key: event.self_device_time_total / 1e3 / 3 for event in profile.key_averages()}
    ours = sum(ms for name, ms in spent.items() if OURS.fullmatch(name))
    products = ours + sum(
        ms for name, ms in spent.items() if PRODUCTS.search(name) and not OURS.fullmatch(name)
    )
    return Run(found, sorted(times)[len(times) // 2] * 1e3, times[0], products, ours)


def main() -> int:
    """Run on both and compare; return 1 where ours is further from float64 than FP32 may be."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name, default in (("molecules", 1024), ("atoms", 64), ("features", 64), ("layers", 4), ("steps", 30)):
        arguments.add_argument(f"--{name}", type=int, default=default)
    arguments.add_argument(
        "--math", default="any", help="ffma, any, or another that autotune.torch.enabled takes"
    )
    arguments.add_argument("--tune", default="quick", choices=["quick", "no"])
    arguments.add_argument("--compiled", action="store_true", help="with torch.compile")
    asked = arguments.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    warnings.filterwarnings("ignore", "records were measured under other circumstances")
    torch.manual_seed(0)
    network = Network(asked.layers, asked.features).cuda().requires_grad_(False)
    positions = torch.rand(asked.molecules, asked.atoms, 3, device="cuda") * 4
    kinds = torch.randint(10, (asked.molecules, asked.atoms), device="cuda")

    some = min(asked.molecules, 64)
    exact = positions[:some].double().requires_grad_()
    wanted = -torch.autograd.grad(network.double()(exact, kinds[:some]).sum(), exact)[0]
    network.float()
    runs, served = [], nullcontext()
    for name in ("PyTorch", "autotune"):
        if name == "autotune":
            tune = "quick" if asked.tune == "quick" else None
            served = autotune.torch.enabled(math=asked.math, tune=tune)
        with served as counts:
            done = run(network, positions, kinds, asked.compiled, asked.steps)
        runs.append(done)
        error = float((done.forces[:some] - wanted).norm() / wanted.norm())
        print(
            f"{name:9} first {done.first_s:6.1f} s, then {done.step_ms:7.2f} ms: products "
            f"{done.products_ms:7.2f} ms, {done.ours_ms / done.products_ms:4.0%} of it on our kernels; "
            f"forces {error:.1e} from float64",
            flush=True,
        )
    print(counts)
    stock, ours = runs
    print(
        f"products {stock.products_ms / ours.products_ms:.2f} times faster, "
        f"energies and forces {stock.step_ms / ours.step_ms:.2f} times"
    )
    return 0 if error < 1e-4 else 1


if __name__ == "__main__":
    sys.exit(main())
