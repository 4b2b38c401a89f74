"""`enabled`: the operators mm, addmm, bmm and baddbmm of PyTorch on our kernels, for float32 on GPUs.

They are replaced in the dispatcher, under autograd and behind whatever ends in them: ``nn.Linear``,
attention, ``einsum``, backward passes, and what ``torch.compile`` does not generate itself.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autotune.errors import AutotuneError, UsageError
from autotune.kernel import matmul
from autotune.kernel.best import QUICK, Tune
from autotune.torch.operator import readable
from autotune.values.problem import asked_maths

OURS = "autotune"
_OPERATORS = ("mm", "addmm", "bmm", "baddbmm")
_PLAIN = (Tensor, torch.nn.Parameter)


@dataclass
class Counts:
    """How many calls went where; printing it shows a table.

    Attributes:
        calls: By operator, shape ``(batch,) m, n, k`` and where it went: "autotune", or PyTorch and why.
    """

    calls: Counter[tuple[str, tuple[int, ...], str]] = field(default_factory=Counter)

    @property
    def ours(self) -> int:
        """Calls that our kernels served."""
        return sum(number for (_, _, where), number in self.calls.items() if where == OURS)

    @property
    def total(self) -> int:
        """All calls."""
        return self.calls.total()

    def __str__(self) -> str:
        lines = [f"{self.ours} of {self.total} calls on our kernels"]
        for (operator, shape, where), number in self.calls.most_common():
            lines.append(f"{number:8}  {operator:8} {' x '.join(map(str, shape)):28} {where}")
        return "\n".join(lines)


@dataclass(frozen=True)
class _Asked:
    math: str
    tune: Tune | None
    counts: Counts


_asked: list[_Asked] = []  # the last one holds
_changing = threading.RLock()
_library: torch.library.Library | None = None
_told: set[str] = set()


def enable(math: str = "ffma", tune: Tune | None = None) -> Counts:
    """Serve mm, addmm, bmm and baddbmm of float32 CUDA tensors by our kernels, in all threads.

    Whatever else those operators are called on goes to PyTorch as before, and so does what a record says
    cuBLAS computes faster, and everything while PyTorch is allowed TF32.

    Args:
        math: "ffma", "3xtf32" or "any", as for `autotune.best_kernel`.
        tune: None or "quick", as for `autotune.best_kernel`: at the first call for a shape.

    Returns:
        What will be counted until `disable`.

    Raises:
        UsageError: A word is unknown, or PyTorch is older than 2.9.
    """
    asked_maths(math)
    if tune not in (None, False, QUICK):
        raise UsageError(f"tune {tune!r:.60} is unknown here: give None or 'quick'")
    asked = _Asked(math, tune, Counts())
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
    overrides = {
        f"{name}{kind}": replaced(name, torch.library.get_kernel(f"aten::{name}{kind}", "CUDA"), kind)
        for name in _OPERATORS
        for kind in (("", ".out", "_") if "add" in name else ("", ".out"))
    }
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that something is overridden
        for name, override in overrides.items():
            library.impl(name, override, "CUDA", with_keyset=True, allow_override=True)
    _library = library


def _unregister() -> None:
    global _library
    if _library is not None:
        _library._destroy()
        _library = None


def replaced(name: str, original: Any, kind: str = "") -> Callable[..., Any]:
    """Return what takes the place of an operator of PyTorch.

    Args:
        name: Of the operator, as "addmm".
        original: Its kernel.
        kind: "" returns a new tensor; ".out" writes into one, "_" into its first operand.
    """
    adds = "add" in name

    def call(keys: Any, *operands: Any, **words: Any) -> Any:
        added, (a, b) = (operands[0], operands[1:3]) if adds else (None, operands[:2])
        # beta and alpha are words behind the operands, however they were passed
        beta, alpha = (float(words.get(each, 1)) for each in ("beta", "alpha")) if adds else (0.0, 1.0)
        out = operands[0] if kind == "_" else words.get("out")
        asked = _asked[-1] if _asked else None
        why = "disabled" if asked is None else _unfit(a, b, out, added)
        found = None
        if not why and asked is not None:
            found, why = _multiplied(asked, a, b, out, added, alpha, beta)
        if asked is not None:
            asked.counts.calls[name, _shape(a, b), OURS if not why else f"PyTorch: {why}"] += 1
        return original.call_boxed(keys, *operands, **words) if why else found

    return call


def _multiplied(
    asked: _Asked, a: Tensor, b: Tensor, out: Tensor | None, added: Tensor | None, alpha: float, beta: float
) -> tuple[Tensor | None, str]:
    """Return the product by our kernels, or None and why there is none; then nothing was written."""
    words: dict[str, Any] = {"alpha": alpha, "math": asked.math, "tune": asked.tune}
    gradients = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)  # autograd is above; this thread may be its own
    try:
        if added is None or beta == 0.0:
            return matmul(a, b, out, **words), ""
        if out is None:
            out = a.new_empty(_product_shape(a, b))
        if out is not added:
            out.copy_(added)  # a bias is broadcast
        return matmul(a, b, out, beta=beta, **words), ""
    except AutotuneError as error:
        if str(error) not in _told:
            _told.add(str(error))
            warnings.warn(f"a product is left to PyTorch: {error}", stacklevel=2)
        return None, "failed"
    finally:
        torch._C._set_grad_enabled(gradients)


def _unfit(a: Tensor, b: Tensor, out: Tensor | None, added: Tensor | None) -> str:
    """Return why our kernels do not serve these tensors; nothing where they do."""
    for each in (a, b, out, added):
        if each is not None:
            if each.dtype is not torch.float32:
                return str(each.dtype).removeprefix("torch.")
            if type(each) not in _PLAIN:
                return "a subclass of Tensor"
    if torch._C._get_cublas_allow_tf32():
        return "TF32 is allowed"
    ordinal = a.get_device()
    if b.get_device() != ordinal or a.dim() != b.dim() or a.shape[-1] != b.shape[-2]:
        return "operands do not fit"
    if not a.numel() or not b.numel():
        return "empty"
    if not (readable(a) and readable(b)):
        return "strides"
    shape = _product_shape(a, b)
    if added is not None and (added.get_device() != ordinal or not _spreads(added.shape, shape)):
        return "operands do not fit"
    if out is not None:
        if out.get_device() != ordinal or out.shape != shape or not out.is_contiguous():
            return "out"
        memory = out.untyped_storage().data_ptr()
        if memory in (a.untyped_storage().data_ptr(), b.untyped_storage().data_ptr()):
            return "out"
        if added is not None and added is not out and memory == added.untyped_storage().data_ptr():
            return "out"
    return ""


def _product_shape(a: Tensor, b: Tensor) -> tuple[int, ...]:
    return (*a.shape[:-1], b.shape[-1])


def _spreads(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Return whether a shape can be broadcast to another."""
    pairs = zip(reversed(shape), reversed(whole), strict=False)
    return len(shape) <= len(whole) and all(extent in (1, wide) for extent, wide in pairs)


def _shape(a: Tensor, b: Tensor) -> tuple[int, ...]:
    """Return m, n, k of a product, behind its batch."""
    return (*a.shape[:-1], b.shape[-1], a.shape[-1])
