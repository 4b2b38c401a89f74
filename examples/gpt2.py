"""Train a transformer of GPT-2 small's size in FP32, on PyTorch's matrix products and on ours, and compare.

The weights are random and the text is made up, but of words that are as frequent as those of a language and
follow each other as if by rules, so that the loss falls. TF32 is off. Both runs begin with the same weights
and see the same text; the script fails if their losses ever differ by more than 1e-4, relatively.

    python examples/gpt2.py                                 eager, math="any", tune="quick": the first time
                                                            a minute of measuring, whose records are kept
    python examples/gpt2.py --compiled --math ffma          torch.compile, FP32 on the CUDA cores
    python examples/gpt2.py --layers 2 --width 256 --heads 4 --vocabulary 4096    a smaller one
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

import autotune.torch

OURS = re.compile(r"sgemm(_\w+)?")  # our kernels bear the names of their families
PAUSE_S = 3  # after the first step: compilers that were started for it may still be at work
PRODUCTS = re.compile(r"gemm|gemv|cutlass|splitk|cublas", re.IGNORECASE)  # and cuBLAS's all hold one of these


@dataclass(frozen=True)
class Size:
    """Of the model and of one step."""

    layers: int
    heads: int
    width: int
    vocabulary: int
    context: int
    batch: int


class Block(nn.Module):
    """Attention and a feed-forward network, each behind a normalisation and beside a shortcut."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.before_attention, self.before_network = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.query_key_value = nn.Linear(size.width, 3 * size.width)
        self.gathered = nn.Linear(size.width, size.width)
        self.network = nn.Sequential(
            nn.Linear(size.width, 4 * size.width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * size.width, size.width),
        )
        unseen = torch.ones(size.context, size.context, dtype=torch.bool).triu(1)
        self.register_buffer("unseen", unseen, persistent=False)

    def attention(self, x: Tensor) -> Tensor:
        """Return what each word gathers from those before it: `[batch, context, width]`, as it is taken."""
        batch, context, width = x.shape
        split = self.query_key_value(x).view(batch, context, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        scores = query @ key.mT / math.sqrt(width // self.heads)
        weights = scores.masked_fill(self.unseen, -math.inf).softmax(-1)
        return self.gathered((weights @ value).transpose(1, 2).reshape(batch, context, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return `[batch, context, width]` from the same."""
        x = x + self.attention(self.before_attention(x))
        return x + self.network(self.before_network(x))


class Transformer(nn.Module):
    """GPT-2: learned positions, blocks, and an output that shares its weights with the embedding."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.words = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.last = nn.LayerNorm(size.width)
        for weights in (each for each in self.parameters() if each.dim() > 1):
            nn.init.normal_(weights, std=0.02)

    def forward(self, text: Tensor, following: Tensor) -> Tensor:
        """Return the loss of words `[batch, context]`, given those that follow them."""
        x = self.words(text) + self.positions.weight[: text.shape[1]]
        scores = self.last(self.blocks(x)) @ self.words.weight.mT
        return functional.cross_entropy(scores.flatten(0, 1), following.flatten())


def texts(size: Size, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield words and the words that follow them: by Zipf's law, or as a rule says for the word before.

    They are drawn on the CPU: on a GPU the sums in `multinomial` are not the same each time, nor is the text.
    """
    source = torch.Generator().manual_seed(1)
    frequency = 1.0 / torch.arange(1, size.vocabulary + 1)
    rule = torch.multinomial(frequency, size.vocabulary, replacement=True, generator=source)
    for _ in range(steps):
        shape = (size.batch, size.context + 1)
        words = torch.multinomial(frequency, math.prod(shape), True, generator=source).view(shape)
        ruled = torch.rand(shape, generator=source) < 0.5
        for place in range(1, shape[1]):
            words[:, place] = torch.where(ruled[:, place], rule[words[:, place - 1]], words[:, place])
        yield words[:, :-1].cuda(), words[:, 1:].cuda()


@dataclass
class Run:
    """What one training run gave.

    Attributes:
        losses: Of each step.
        step_ms: Median time of a step, the first ones left out.
        first_s: The first step, with all that is compiled and measured in it.
        products_ms: GPU time of matrix products in a step.
        ours_ms: The part of that in our kernels.
        other_ms: GPU time of everything else in a step.
    """

    losses: list[float]
    step_ms: float
    first_s: float
    products_ms: float
    ours_ms: float
    other_ms: float


def trained(size: Size, steps: int, compiled: bool) -> Run:
    """Train from the seed on, and look at where the time of a step goes."""
    torch.manual_seed(0)
    model = Transformer(size).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), fused=True)
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1.0, (done + 1) / 20))
    loss_of = torch.compile(model) if compiled else model
    losses, times = [], []

    def step(text: Tensor, following: Tensor) -> Tensor:
        loss = loss_of(text, following)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warm.step()
        return loss.detach()

    batches = list(texts(size, steps))
    for text, following in batches:
        torch.cuda.synchronize()
        start = time.perf_counter()
        losses.append(step(text, following).item())
        times.append(time.perf_counter() - start)
        if len(times) == 1:
            time.sleep(PAUSE_S)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for text, following in batches[:2]:
            step(text, following)
        torch.cuda.synchronize()
    spent = {"products": 0.0, "ours": 0.0, "other": 0.0}
    for event in profile.key_averages():
        ms = event.self_device_time_total / 1e3 / 2
        if OURS.fullmatch(event.key):
            spent["ours"] += ms
        spent["products" if OURS.fullmatch(event.key) or PRODUCTS.search(event.key) else "other"] += ms
    late = sorted(times[len(times) // 4 :])
    return Run(losses, late[len(late) // 2] * 1e3, times[0], spent["products"], spent["ours"], spent["other"])


def main() -> int:
    """Train twice and compare; return 1 where the runs differ or nothing is learned."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name, default in (("layers", 12), ("heads", 12), ("width", 768), ("vocabulary", 50257)):
        arguments.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("context", 512), ("batch", 8), ("steps", 20)):
        arguments.add_argument(f"--{name}", type=int, default=default)
    arguments.add_argument(
        "--math", default="any", help="ffma, any, or another that autotune.torch.enabled takes"
    )
    arguments.add_argument("--tune", default="quick", choices=["quick", "no"])
    arguments.add_argument("--compiled", action="store_true", help="with torch.compile")
    words = vars(arguments.parse_args())
    steps, compiled, exact, tune = (words.pop(name) for name in ("steps", "compiled", "math", "tune"))
    size = Size(**words)
    torch.backends.cuda.matmul.allow_tf32 = False
    warnings.filterwarnings("ignore", "records were measured under other circumstances")

    runs, served = [], nullcontext()
    for name in ("PyTorch", "autotune"):
        if name == "autotune":
            served = autotune.torch.enabled(math=exact, tune="quick" if tune == "quick" else None)
        with served as counts:
            run = trained(size, steps, compiled)
        runs.append(run)
        print(
            f"{name:9} first step {run.first_s:6.1f} s, then {run.step_ms:7.1f} ms a step: products "
            f"{run.products_ms:7.1f} ms, {run.ours_ms / run.products_ms:4.0%} of it on our kernels; "
            f"other kernels {run.other_ms:6.1f} ms",
            flush=True,
        )
    print(counts)
    stock, ours = runs
    apart = [abs(one - other) / one for one, other in zip(stock.losses, ours.losses, strict=True)]
    print("loss    ", " ".join(f"{loss:.4f}" for loss in ours.losses))
    worst = max(range(len(apart)), key=apart.__getitem__)
    print(f"apart by at most {apart[worst]:.1e} of it, in step {worst + 1} (1e-4 is allowed)")
    print(
        f"products {stock.products_ms / ours.products_ms:.2f} times faster, "
        f"a step {stock.step_ms / ours.step_ms:.2f} times"
    )
    falls = sum(ours.losses[-3:]) < 0.97 * sum(ours.losses[:3])
    print("the loss falls" if falls else "THE LOSS DOES NOT FALL")
    return 0 if falls and max(apart) <= 1e-4 else 1


if __name__ == "__main__":
    sys.exit(main())
