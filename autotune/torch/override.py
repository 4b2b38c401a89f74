"""`enabled`: the operators mm, addmm, bmm and baddbmm of PyTorch on our kernels, for float32 on GPUs.

They are replaced in the dispatcher, under autograd and behind whatever ends in them: ``nn.Linear``,
attention, ``einsum``, backward passes, and what ``torch.compile`` does not generate itself.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from autotune.errors import UsageError
from autotune.kernel.best import QUICK, Tune
from autotune.torch.counts import Counts
from autotune.torch.products import Products
from autotune.values.problem import asked_maths

_OPERATORS = ("mm", "addmm", "bmm", "baddbmm")
_CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
_asked: list[Products] = []  # the last one holds
_changing = threading.RLock()
_library: torch.library.Library | None = None


def enable(math: str = "ffma", tune: Tune | None = None) -> Counts:
    """Serve mm, addmm, bmm and baddbmm of float32 CUDA tensors by our kernels, in all threads.

    Whatever else those operators are called on goes to PyTorch as before; so does what cuBLAS computed faster
    when it was measured, and everything while PyTorch is allowed TF32.

    Args:
        math: "ffma", "3xtf32", "3xfp16" or "any", as for `autotune.best_kernel`.
        tune: None or "quick", as for `autotune.best_kernel`: at the first call for a shape.

    Returns:
        What will be counted until `disable`.

    Raises:
        UsageError: A word is unknown, or PyTorch is older than 2.9 or lacks CUDA.
    """
    asked_maths(math)
    if tune not in (None, False, QUICK):
        raise UsageError(f"tune {tune!r:.60} is unknown here: give None or 'quick'")
    asked = Products(math, tune)
    with _changing:
        _register()
        _asked.append(asked)
    return asked.counts


def disable() -> None:
    """Undo the last `enable` that holds; nothing where there is none."""
    with _changing:
        if _asked:
            _asked.pop()
        if not _asked:
            _unregister()


@contextmanager
def enabled(math: str = "ffma", tune: Tune | None = None) -> Iterator[Counts]:
    """Serve PyTorch's operators by our kernels inside a ``with``: see `enable`."""
    found = enable(math, tune)
    try:
        yield found
    finally:
        with _changing:
            _asked[:] = [each for each in _asked if each.counts is not found]
            if not _asked:
                _unregister()


def counts() -> Counts:
    """Return what was counted since the last `enable` that holds.

    Raises:
        UsageError: Nothing is enabled.
    """
    if not _asked:
        raise UsageError("nothing is enabled: call autotune.torch.enable() before")
    return _asked[-1].counts


def _register() -> None:
    global _library
    if _library is not None:
        return
    if not hasattr(torch.library, "get_kernel"):
        raise UsageError(f"PyTorch {torch.__version__} is too old to be overridden: install 2.9 or later")
    if not torch.backends.cuda.is_built():
        raise UsageError("this PyTorch was built without CUDA: install one that has it, as pytorch.org says")
    overrides = {
        f"{name}{kind}": replaced(name, torch.library.get_kernel(f"aten::{name}{kind}", "CUDA"), kind)
        for name in _OPERATORS
        for kind in (("", ".out", "_") if "add" in name else ("", ".out"))
    }
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that something is overridden
        for name, override in overrides.items():
            library.impl(name, override, "CUDA", allow_override=True)
    _library = library


def _unregister() -> None:
    global _library
    if _library is not None:
        _library._destroy()
        _library = None


def replaced(name: str, original: Any, kind: str = "") -> Callable[..., Tensor]:
    """Return what takes the place of an operator of PyTorch.

    Args:
        name: Of the operator, as "addmm".
        original: Its kernel.
        kind: "" returns a new tensor; ".out" writes into one, "_" into its first operand.
    """

    def product(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Any:
        if _asked:
            found = _asked[-1].multiply(name, a, b, out)
            if found is not None:
                return found
        return original.call_boxed(_CUDA, a, b) if out is None else original.call_boxed(_CUDA, a, b, out=out)

    def sum_with(
        added: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1, out: Tensor | None = None
    ) -> Any:
        if _asked:
            found = _asked[-1].multiply(name, a, b, added if in_place else out, added, beta, alpha)
            if found is not None:
                return found
        words = {"beta": beta, "alpha": alpha} if out is None else {"beta": beta, "alpha": alpha, "out": out}
        return original.call_boxed(_CUDA, added, a, b, **words)

    in_place = kind == "_"
    return sum_with if "add" in name else product
