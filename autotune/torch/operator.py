"""`matmul` as an operator of PyTorch: compiled, captured, differentiated twice, under autocast and vmap."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autotune.errors import UsageError
from autotune.kernel import matmul as launch
from autotune.kernel.operands import kind_of

PLAIN = (Tensor, torch.nn.Parameter)
_NAME = "autotune::matmul"


def matmul(
    a: Tensor, b: Tensor, *, alpha: float = 1.0, math: str = "ffma", tune: str | None = None
) -> Tensor:
    """Return alpha A B by our kernels; it may be compiled, captured, differentiated and mapped.

    Both factors and the gradients of both are read as they lie: a transposed view costs nothing.

    Args:
        a: A, `[..., m, k]` float32 on a GPU; any dtype under ``torch.autocast``, which makes it float32.
        b: B, `[..., k, n]`, likewise. Extents before the last two are broadcast, as by ``torch.matmul``.
        alpha: Scalar of the product.
        math: "ffma", "3xtf32", "3xfp16" or "any", as for `autotune.best_kernel`.
        tune: None or "quick", as for `autotune.best_kernel`.

    Raises:
        UsageError: An operand is no matrix, is not float32 or not on a GPU, or the two do not fit.
    """
    for name, operand in (("a", a), ("b", b)):
        if not isinstance(operand, Tensor):
            raise UsageError(f"{name} is {kind_of(operand)}: pass a torch.Tensor")
        if operand.dim() < 2:
            raise UsageError(f"{name} has {operand.dim()} dimensions: pass a matrix, such as {name}[None, :]")
        if operand.device.type not in ("cuda", "meta"):
            raise UsageError(f"{name} is a tensor on {operand.device}: pass {name}.cuda()")
    words = (alpha, math, tune)
    if a.dim() == 2 and b.dim() == 2:
        return _product(a, b, *words)
    if b.dim() == 2 and a.is_contiguous():  # rows of all matrices under each other
        return _product(a.flatten(0, -2), b, *words).unflatten(0, a.shape[:-1])
    try:
        batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except RuntimeError:
        raise UsageError(
            f"a has shape {tuple(a.shape)} and b {tuple(b.shape)}: extents before the last two must agree, "
            "or be 1 or missing"
        ) from None
    left, right = a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:])
    return _product(left.flatten(0, -3), right.flatten(0, -3), *words).unflatten(0, batch)


def _product(a: Tensor, b: Tensor, *words: Any) -> Tensor:
    """Multiply eagerly without the operator, which takes the host several times as long, or else by it."""
    if torch.compiler.is_compiling():
        return _multiply(a, b, *words)
    if torch._C._are_functorch_transforms_active():  # they do not see the gradients of an operator
        return _Function.apply(a, b, *words)
    if _eager(a, b) and torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return _Function.apply(a, b, *words)
    return _computed(a, b, *words)


def _computed(a: Tensor, b: Tensor, *words: Any) -> Tensor:
    """Multiply tensors whose gradients are somebody else's affair."""
    return _launched(a, b, *words) if _eager(a, b) else _multiply(a, b, *words)


def _eager(a: Tensor, b: Tensor) -> bool:
    """Return whether autograd alone looks at what happens to tensors: no mode, subclass, autocast or vmap."""
    return (
        type(a) in PLAIN
        and type(b) in PLAIN
        and a.is_cuda
        and b.is_cuda
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._len_torch_dispatch_stack()
        and not torch.is_autocast_enabled("cuda")
    )


def _launched(a: Tensor, b: Tensor, alpha: float, math: str, tune: str | None) -> Tensor:
    gradients = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)  # a context would take longer
    try:
        return launch(fitting(a), fitting(b), alpha=alpha, math=math, tune=tune)  # type: ignore[arg-type]
    finally:
        torch._C._set_grad_enabled(gradients)


def _fake(a: Tensor, b: Tensor, alpha: float, math: str, tune: str | None) -> Tensor:
    torch._check(
        a.dtype == b.dtype == torch.float32, lambda: f"matmul of {a.dtype} and {b.dtype}: pass float32"
    )
    torch._check(
        a.dim() == b.dim() and a.shape[:-2] == b.shape[:-2] and a.shape[-1] == b.shape[-2],
        lambda: f"matmul of {tuple(a.shape)} and {tuple(b.shape)}: the inner extents must agree",
    )
    return a.new_empty(*a.shape[:-1], b.shape[-1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, *ctx.words = inputs
    ctx.save_for_backward(a, b)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """A's is G B^T and B's is A^T G: products in the layouts nt and tn of those operands."""
    a, b = ctx.saved_tensors
    needs_a, needs_b = ctx.needs_input_grad[:2]
    of_a = _product(gradient, b.mT, *ctx.words) if needs_a else None
    of_b = _product(a.mT, gradient, *ctx.words) if needs_b else None
    return of_a, of_b, None, None, None


def _mapped(info: Any, dims: tuple[Any, ...], a: Tensor, b: Tensor, *words: Any) -> tuple[Tensor, int]:
    """What is mapped becomes the batch, or its outer part; what is not is read again for each."""
    left, right = (
        each.expand(info.batch_size, *each.shape) if dim is None else each.movedim(dim, 0)
        for each, dim in zip((a, b), dims[:2], strict=True)
    )
    product = _product(left.flatten(0, -3), right.flatten(0, -3), *words)
    return product.unflatten(0, left.shape[:-2]), 0


class _Function(torch.autograd.Function):  # type: ignore[misc]  # PyTorch may be missing
    """The product with its gradients, for eager calls and for transforms of ``torch.func``."""

    @staticmethod
    def forward(a: Tensor, b: Tensor, *words: Any) -> Tensor:
        return _computed(a, b, *words)

    setup_context = staticmethod(_keep)
    backward = staticmethod(_gradients)
    vmap = staticmethod(_mapped)


_multiply: Any = torch.library.custom_op(_NAME, _launched, mutates_args=(), device_types="cuda")
_multiply.register_fake(_fake)
_multiply.register_autograd(_gradients, setup_context=_keep)
_multiply.register_autocast("cuda", torch.float32)
_multiply.register_vmap(_mapped)


def fitting(operand: Tensor) -> Tensor:
    """Return an operand itself, or a copy where neither its rows nor its columns are contiguous."""
    return operand if readable(operand) else operand.contiguous()


def readable(operand: Tensor) -> bool:
    """Return whether the matrices of a tensor are stored by rows or by columns, without overlap."""
    *_, height, width = operand.shape
    *_, rows, columns = operand.stride()
    by_rows = (columns == 1 or width == 1) and (rows >= width or height == 1)
    return bool(by_rows or ((rows == 1 or height == 1) and (columns >= height or width == 1)))
