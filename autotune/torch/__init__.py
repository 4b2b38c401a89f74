"""PyTorch on our kernels: `matmul` as an operator of it, and `enabled`, which serves its own operators."""

from __future__ import annotations

from autotune.errors import LibraryMissing

try:
    import torch  # noqa: F401
except ImportError as error:
    raise LibraryMissing(
        f"autotune.torch needs PyTorch, which cannot be imported ({error}): install it, as pytorch.org says"
    ) from None

from autotune.torch.counts import Counts
from autotune.torch.operator import matmul
from autotune.torch.override import counts, disable, enable, enabled

__all__ = ["Counts", "counts", "disable", "enable", "enabled", "matmul"]
