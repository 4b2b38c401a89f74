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
from autotune.kernel.multiply import serving
from autotune.torch.operator import fitting, readable
from autotune.values.problem import asked_maths

OURS = "autotune"
_STRIDES = "strides"
_OPERATORS = ("mm", "addmm", "bmm", "baddbmm")
_Counted = tuple[str, tuple[int, ...], str]
_PLAIN = (Tensor, torch.nn.Parameter)


@dataclass
class Counts:
    """How many calls went where; printing it shows a table.

    Attributes:
        calls: By operator, shape ``(batch,) m, n, k`` and where it went: "autotune", or PyTorch and why.
    """

    calls: Counter[_Counted] = field(default_factory=Counter)

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
_decided: dict[Any, tuple[str, _Counted]] = {}  # by what of the operands decides
_precision: Any = getattr(torch._C, "_get_fp32_precision_getter", None) or (
    lambda *_: "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
)


def enable(math: str = "ffma", tune: Tune | None = None) -> Counts:
    """Serve mm, addmm, bmm and baddbmm of float32 CUDA tensors by our kernels, in all threads.

    Whatever else those operators are called on goes to PyTorch as before; so does what cuBLAS computed faster
    when it was measured, and everything while PyTorch is allowed TF32.

    Args:
        math: "ffma", "3xtf32" or "any", as for `autotune.best_kernel`.
        tune: None or "quick", as for `autotune.best_kernel`: at the first call for a shape.

    Returns:
        What will be counted until `disable`.

    Raises:
        UsageError: A word is unknown, or PyTorch is older than 2.9 or lacks CUDA.
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
        out = operands[0] if kind == "_" else words.get("out")
        asked = _asked[-1] if _asked else None
        if asked is None:
            return original.call_boxed(keys, *operands, **words)
        product, why = _multiplied(asked, name, a, b, out, added, words.get("alpha", 1), words.get("beta", 1))
        return original.call_boxed(keys, *operands, **words) if why else product

    return call


def _multiplied(
    asked: _Asked,
    name: str,
    a: Tensor,
    b: Tensor,
    out: Tensor | None,
    added: Tensor | None,
    alpha: Any,
    beta: Any,
) -> tuple[Tensor | None, str]:
    """Return the product by our kernels, or None and why there is none; then nothing was written."""
    why, calls = _unlike(a, b, out, added), asked.counts.calls
    if why or not isinstance(alpha, int | float) or not isinstance(beta, int | float):
        why = why or "scalars"
        calls[_counted(name, a, b, why)] += 1
        return None, why
    alpha, beta = float(alpha), 0.0 if added is None else float(beta)
    if beta == 0.0:
        added = None
    gradients = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)  # autograd is above; its threads have states of their own
    try:
        why, counted = _decision(asked, name, a, b, out, added)
        if why == _STRIDES:  # PyTorch would copy, too
            a, b = fitting(a), fitting(b)
            why, counted = _decision(asked, name, a, b, out, added)
        if not why and out is not None:
            why = _shared(a, b, out, added)
            if why:
                counted = _counted(name, a, b, why)
        if not why:
            if added is not None:
                if out is None:
                    out = a.new_empty(_product_shape(a, b))
                if out is not added:
                    out.copy_(added)  # a bias is broadcast
            product = matmul(a, b, out, alpha=alpha, beta=beta, math=asked.math, tune=asked.tune)
        calls[counted] += 1
        return (None, why) if why else (product, "")
    except AutotuneError as error:
        if str(error) not in _told:
            _told.add(str(error))
            warnings.warn(f"a product is left to PyTorch: {error}", stacklevel=2)
        calls[_counted(name, a, b, "failed")] += 1
        return None, "failed"
    finally:
        torch._C._set_grad_enabled(gradients)


def _unlike(a: Tensor, b: Tensor, out: Tensor | None, added: Tensor | None) -> str:
    """Return what PyTorch alone serves in these tensors or settings; nothing where there is nothing."""
    for each in (a, b, out, added):
        if each is not None:
            if each.dtype is not torch.float32:
                return str(each.dtype).removeprefix("torch.")
            if type(each) not in _PLAIN:
                return "a subclass of Tensor"
    if a.dim() < 2 or b.dim() < 2:
        return "operands do not fit"
    return "" if _precision("cuda", "matmul") in ("ieee", "none") else "it is allowed TF32"


def _decision(
    asked: _Asked, name: str, a: Tensor, b: Tensor, out: Tensor | None, added: Tensor | None
) -> tuple[str, _Counted]:
    """Return why our kernels do not serve tensors of these shapes, or nothing; and what is counted."""
    facts = (a.shape, a.stride(), b.shape, b.stride(), a.get_device(), b.get_device())
    of_out = None if out is None else (out.shape, out.stride(), out.get_device())
    of_added = None if added is None else (added.shape, added.get_device())
    key = (name, facts, of_out, of_added, asked.math, asked.tune)
    found = _decided.get(key)
    if found is None:
        why, settled = _misfit(a, b, out, added), True
        if not why:
            beta = 0.0 if added is None else 1.0
            kernel = serving(a, b, out, beta=beta, math=asked.math, tune=asked.tune)
            record = kernel.record if kernel is not None and kernel.served == "exact" else None
            if record is not None and record.vs_cublas is not None and record.vs_cublas < 1.0:
                why = "cuBLAS is faster"
            settled = kernel is not None
        found = why, _counted(name, a, b, why)
        if settled:
            _decided[key] = found
    return found


def _counted(name: str, a: Tensor, b: Tensor, why: str) -> _Counted:
    """Return what is counted of a call: m, n and k stand behind a batch."""
    matrices = a.dim() > 1 and b.dim() > 1
    shape = (*a.shape[:-1], b.shape[-1], a.shape[-1]) if matrices else tuple(a.shape)
    return name, shape, f"PyTorch: {why}" if why else OURS


def _misfit(a: Tensor, b: Tensor, out: Tensor | None, added: Tensor | None) -> str:
    ordinal, shape = a.get_device(), _product_shape(a, b)
    if b.get_device() != ordinal or a.dim() != b.dim() or a.shape[-1] != b.shape[-2]:
        return "operands do not fit"
    if added is not None and (added.get_device() != ordinal or not _spreads(added.shape, shape)):
        return "operands do not fit"
    if a.dim() == 3 and a.shape[0] != b.shape[0]:
        return "operands do not fit"
    if 0 in (*shape, a.shape[-1]):
        return "empty"
    if not (readable(a) and readable(b)):
        return _STRIDES
    if out is not None and (out.get_device() != ordinal or out.shape != shape or not out.is_contiguous()):
        return "out"
    return ""


def _shared(a: Tensor, b: Tensor, out: Tensor, added: Tensor | None) -> str:
    """Return whether what is written may be read as something else."""
    read = [a, b] if added is None or added is out else [a, b, added]
    written = out.untyped_storage().data_ptr()
    shared = any(each.untyped_storage().data_ptr() == written for each in read)
    return "operands in one memory" if shared else ""


def _product_shape(a: Tensor, b: Tensor) -> tuple[int, ...]:
    return (*a.shape[:-1], b.shape[-1])


def _spreads(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Return whether a shape can be broadcast to another."""
    pairs = zip(reversed(shape), reversed(whole), strict=False)
    return len(shape) <= len(whole) and all(extent in (1, wide) for extent, wide in pairs)
