"""`Products`: tensors to their product by our kernels, or word that PyTorch has to multiply them.

What is done with tensors of certain types, shapes and strides is decided once, and looked up from then on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from autotune.errors import AutotuneError, DeviceError
from autotune.kernel import matmul
from autotune.kernel.best import Tune
from autotune.kernel.multiply import way_of
from autotune.torch.counts import OURS, Counted, Counts, Decision
from autotune.torch.operator import PLAIN, fitting, readable

_REAL = (float, int)
_EXACT = ("ieee", "none")
_GUARDS = 7  # beside the latest, of operands with so many elements
_UNALIGNED = 15  # bits of an address that is no multiple of 16
_float32 = torch.float32
_precision: Any = getattr(torch._C, "_get_fp32_precision_getter", None) or (
    lambda *_: "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
)
_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (
    lambda ordinal: int(torch.cuda.current_stream(ordinal).cuda_stream)
)
_guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_allocate: Any = getattr(_guards, "_empty_strided_cuda", None)  # on the current GPU
_current_gpu: Any = getattr(torch._C, "_cuda_getDevice", None) if _allocate else lambda: -1
_told: set[str] = set()


class Products:
    """What one `enable` asked for, and what was decided since.

    From its second call on a kind of operands is known by a guard of `torch.compile`, which says in one call
    whether types, shapes, strides and whatever else decides are as they were. PyTorch promises no such guard;
    without it what decides is looked at in turn.

    Attributes:
        counts: What went where.
    """

    def __init__(self, math: str, tune: Tune | None) -> None:
        self.counts = Counts()
        self._decided = self.counts.decided
        self._guarded: dict[Hashable, list[tuple[Callable[..., bool], Decision]]] = {}
        self._math = math
        self._tune = tune

    def multiply(
        self,
        name: str,
        a: Tensor,
        b: Tensor,
        out: Tensor | None = None,
        added: Tensor | None = None,
        beta: Any = 0,
        alpha: Any = 1,
    ) -> Tensor | None:
        """Return alpha A B + beta ``added`` by our kernels; None, with nothing written, where PyTorch has to.

        Args:
            name: Of the operator, for counting.
            a: A, any tensor, as are the others.
            b: B.
            out: Where the product goes, which may be ``added`` itself; a new tensor if it is None.
            added: What is added: it is broadcast, and not read where beta is 0.
            beta: Scalar of ``added``.
            alpha: Scalar of the product.
        """
        operands = (a, b) if added is None else (a, b, added)
        if out is not None and out is not added:
            operands = (*operands, out)
        like = (name, out is None, added is None or added is out, a.numel(), b.numel())
        decision: Decision | None
        for guard, decision in self._guarded.get(like, ()):  # noqa: B007  # it is used behind
            if guard(*operands):
                break
        else:
            decision = self._looked_up(like, operands, name, a, b, out, added)
        if (
            decision is None
            or (way := decision.way) is None
            or _precision("cuda", "matmul") not in _EXACT
            or (added is not None and not (alpha and type(alpha) in _REAL and type(beta) in _REAL))
        ):
            if decision is not None and decision.copied:
                return self.multiply(name, fitting(a), fitting(b), out, added, beta, alpha)
            return self._at_length(name, a, b, out, added, beta, alpha)
        ordinal, a_address, b_address = decision.ordinal, a.data_ptr(), b.data_ptr()
        if out is None:
            if (a_address | b_address) & _UNALIGNED or not (a_address and b_address):
                return self._at_length(name, a, b, out, added, beta, alpha)
            if _current_gpu() == ordinal:
                c = _allocate(way.shape, way.steps, _float32)
            else:
                c = a.new_empty(way.shape)
            c_address = c.data_ptr()
        else:
            c, c_address = out, out.data_ptr()
            if not way.apart(a_address, b_address, c_address) or _meet(added, out):
                return self._at_length(name, a, b, out, added, beta, alpha)
        of_c = beta if added is out else 0.0  # what is added otherwise is added below
        try:
            way.enqueue(a_address, b_address, c_address, alpha, of_c, _raw_stream(ordinal))
        except AutotuneError as error:
            self._failed(name, a, b, error)
            return None
        if beta and added is not None and added is not out:
            c.add_(added) if beta == 1 else c.add_(added, alpha=beta)
        decision.calls += 1
        return c

    def _looked_up(
        self,
        like: Hashable,
        operands: tuple[Tensor, ...],
        name: str,
        a: Tensor,
        b: Tensor,
        out: Tensor | None,
        added: Tensor | None,
    ) -> Decision | None:
        """Return what was decided for such tensors, and guard it from now on; None where nothing was."""
        decision = self._decided.get(_kind(name, a, b, out, added))
        if decision is not None and _guards is not None:
            with suppress(Exception):  # another PyTorch
                guard = _guards.TensorGuards(*operands, dynamic_dims_sizes=None, dynamic_dims_strides=None)
                self._guarded[like] = [(guard.check, decision), *self._guarded.get(like, [])[:_GUARDS]]
        return decision

    def _at_length(
        self,
        name: str,
        a: Tensor,
        b: Tensor,
        out: Tensor | None,
        added: Tensor | None,
        beta: Any,
        alpha: Any,
    ) -> Tensor | None:
        """Do what `multiply` does for new tensors, odd addresses, tensors in one memory, and alpha = 0."""
        gradients = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # autograd is above; its threads have states of their own
        key = _kind(name, a, b, out, added)
        try:
            decision = self._decided.get(key)
            if decision is None and (why := _misfit(a, b, out, added)):
                decision = self._settled(key, Decision(_counted(name, a, b, why)))
            if decision is not None and decision.way is None:
                decision.calls += 1
                return None
            if why := _refused(a, b, out, added, beta, alpha):
                self.counts.undecided[_counted(name, a, b, why)] += 1
                return None
            if not (readable(a) and readable(b)):  # PyTorch would copy, too
                self._settled(key, Decision(_counted(name, a, b), copied=True))
                return self.multiply(name, fitting(a), fitting(b), out, added, beta, alpha)
            in_place = out is not None and added is out
            words: dict[str, Any] = {"math": self._math, "tune": self._tune}
            if decision is None:
                decision = self._decision(key, name, a, b, out, 1.0 if in_place else 0.0, words)
            if decision is not None and decision.way is None:
                decision.calls += 1
                return None
            product = matmul(a, b, out, alpha=alpha, beta=beta if in_place else 0.0, **words)
            if beta and added is not None and not in_place:
                product.add_(added, alpha=beta)
            if decision is None:
                self.counts.undecided[_counted(name, a, b)] += 1
            else:
                decision.calls += 1
            return product
        except AutotuneError as error:
            if not isinstance(error, DeviceError):  # the next call may have more luck
                self._settled(key, Decision(_counted(name, a, b, "failed")))
            self._failed(name, a, b, error)
            return None
        finally:
            torch._C._set_grad_enabled(gradients)

    def _decision(
        self,
        key: Hashable,
        name: str,
        a: Tensor,
        b: Tensor,
        out: Tensor | None,
        beta: float,
        words: dict[str, Any],
    ) -> Decision | None:
        """Decide about tensors that our kernels can take; None while it is too early to decide."""
        found = way_of(a, b, out, beta=beta, **words)
        if found is None:
            return None
        kernel, way = found
        record = kernel.record if kernel.served == "exact" else None
        if record is not None and record.vs_cublas is not None and record.vs_cublas < 1.0:
            return self._settled(key, Decision(_counted(name, a, b, "cuBLAS is faster")))
        return self._settled(key, Decision(_counted(name, a, b), way, a.get_device()))

    def _settled(self, key: Hashable, decision: Decision) -> Decision:
        return self._decided.setdefault(key, decision)

    def _failed(self, name: str, a: Tensor, b: Tensor, error: AutotuneError) -> None:
        """Leave a product to PyTorch, and say once why."""
        if str(error) not in _told:
            _told.add(str(error))
            warnings.warn(f"a product is left to PyTorch: {error}", stacklevel=2)
        self.counts.undecided[_counted(name, a, b, "failed")] += 1


def _kind(name: str, a: Tensor, b: Tensor, out: Tensor | None, added: Tensor | None) -> Hashable:
    """Return all that decides where tensors go but addresses."""
    kind: tuple[Any, ...] = (
        *(name, type(a), a.shape, a.stride(), a.dtype, a.get_device()),
        *(type(b), b.shape, b.stride(), b.dtype, b.get_device()),
    )
    if out is not None:
        kind = (*kind, type(out), out.shape, out.stride(), out.dtype, out.get_device())
    if added is not None:
        kind = (*kind, type(added), added.shape, added.dtype, added.get_device(), added is out)
    return kind


def _counted(name: str, a: Tensor, b: Tensor, why: str = "") -> Counted:
    """Return what is counted of a call: m, n and k stand behind a batch."""
    matrices = a.dim() > 1 and b.dim() > 1
    shape = (*a.shape[:-1], b.shape[-1], a.shape[-1]) if matrices else tuple(a.shape)
    return name, shape, f"PyTorch: {why}" if why else OURS


def _misfit(a: Tensor, b: Tensor, out: Tensor | None, added: Tensor | None) -> str:
    """Return what PyTorch alone serves in such tensors; nothing where there is nothing."""
    ordinal = a.get_device()
    for each in (a, b, out, added):
        if each is None:
            continue
        if each.dtype is not _float32:
            return str(each.dtype).removeprefix("torch.")
        if type(each) not in PLAIN:
            return "a subclass of Tensor"
        if each.get_device() != ordinal:
            return "operands do not fit"
    if not 2 <= a.dim() == b.dim() <= 3 or a.shape[-1] != b.shape[-2] or a.shape[:-2] != b.shape[:-2]:
        return "operands do not fit"
    shape = (*a.shape[:-1], b.shape[-1])
    if added is not None and not _spreads(added.shape, shape):
        return "operands do not fit"
    if 0 in (*shape, a.shape[-1]):
        return "empty"
    if out is not None and (out.shape != shape or not _by_rows(out)):
        return "out"
    return ""


def _by_rows(out: Tensor) -> bool:
    """Return whether a tensor is stored row by row, which may lie apart, and matrix by matrix."""
    *batch, height, width = out.shape
    *outer, rows, columns = out.stride()
    contiguous = (columns == 1 or width == 1) and (rows >= width or height == 1)
    apart = not batch or batch[0] == 1 or outer[0] >= (height - 1) * rows + width
    return bool(contiguous and apart)


def _refused(a: Tensor, b: Tensor, out: Tensor | None, added: Tensor | None, beta: Any, alpha: Any) -> str:
    """Return what PyTorch alone serves in one call; nothing where there is nothing."""
    if not isinstance(alpha, int | float) or not isinstance(beta, int | float):
        return "scalars"
    if _precision("cuda", "matmul") not in _EXACT:
        return "it is allowed TF32"
    if out is not None and any(_meet(each, out) for each in (a, b, added)):
        return "operands in one memory"
    return ""


def _meet(read: Tensor | None, written: Tensor) -> bool:
    """Return whether what is written may be read as something else."""
    if read is None or read is written:
        return False
    return bool(read.untyped_storage().data_ptr() == written.untyped_storage().data_ptr())


def _spreads(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Return whether a shape can be broadcast to another."""
    pairs = zip(reversed(shape), reversed(whole), strict=False)
    return len(shape) <= len(whole) and all(extent in (1, wide) for extent, wide in pairs)
