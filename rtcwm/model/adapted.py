"""The arithmetic of an adapted linear layer: ``x weight^T + scale * (x down^T) up^T``, its gradient, and several at
once.

It takes no pass over its rows beyond the products. The small product comes first and the base's is added onto it by the
matrix kernel itself (``addmm_``), which reads the sum where it writes it; so in the backward pass. The graph of a layer
is two nodes: one saves what the backward pass needs, before anything is computed, and owns the gradient; the other
computes. A recompute of a block ends where its last tensor is saved, and so never repeats the base's product of the
last layer, which nothing in the block needs; the other products may be kept (`rtcwm.model.recompute`). A frozen weight
is kept as the parameter itself: under ZeRO-3 its values come and go with its block, and a tensor made of it would keep
them gathered.

Without a graph several adapters may be bound at once: the batch is cut into as many equal parts, in their order, and
each part gets the low-rank term of its own adapter under one product with the base's weight (`Joint`). Two models then
score a sample in one pass over the base, with one fetch of its weights.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from rtcwm.model.recompute import product_output


class Layer(NamedTuple):
    """What an adapted layer computes with: ``x weight^T + scale * (x down^T) up^T``, or the first product alone.

    weight ``[out, in]`` frozen; down ``[rank, in]``, up ``[out, rank]`` in a dtype of their own.
    """

    weight: Tensor
    down: Tensor | None = None
    up: Tensor | None = None
    scale: float = 1.0


class Joint(NamedTuple):
    """Layers of one weight, each with an adapter of its own (or none), for equal parts of the rows in their order."""

    layers: tuple[Layer, ...]

    @property
    def weight(self) -> Tensor:
        return self.layers[0].weight

    def product(self, x: Tensor) -> Tensor:
        """The output of rows ``[n, in]``: the low-rank terms part by part, then the base's product of all rows at once.
        No graph."""
        out = x.new_empty(x.shape[0], self.weight.shape[0])
        for part, sums, layer in zip(self.cut(x), self.cut(out), self.layers, strict=True):
            low = low_rank(part, layer)
            if low is None:
                sums.zero_()
            else:
                torch.mm(low, layer.up.detach().to(x.dtype).t(), out=sums)
        return out.addmm_(x, self.weight.t())

    def cut(self, rows: Tensor) -> tuple[Tensor, ...]:
        """The parts of rows ``[n, width]``. Raises ValueError where they cannot be equal."""
        if rows.shape[0] % len(self.layers):
            raise ValueError(f"{rows.shape[0]} rows in {len(self.layers)} equal parts, one for each adapter")
        return rows.split(rows.shape[0] // len(self.layers))


def low_rank(x: Tensor, layer: Layer) -> Tensor | None:
    """``scale * x down^T`` of rows ``[n, in]``, ``[n, rank]``; None without an adapter. No graph."""
    if layer.down is None:
        return None
    low = x @ layer.down.detach().to(x.dtype).t()
    return low if layer.scale == 1.0 else low.mul_(layer.scale)


def product(x: Tensor, low: Tensor | None, layer: Layer, out: Tensor) -> Tensor:
    """The layer's output for rows ``[n, in]``, written into ``out [n, out]``; ``low`` as from `low_rank`. No graph."""
    if low is None:
        return torch.mm(x, layer.weight.t(), out=out)
    torch.mm(low, layer.up.detach().to(x.dtype).t(), out=out)
    return out.addmm_(x, layer.weight.t())


def gradients(
    grad: Tensor, x: Tensor | None, low: Tensor | None, layer: Layer, dx: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of ``down`` and ``up`` in x's dtype, and of the input into ``dx [n, in]``. None where not wanted.

    Args:
        grad: of the output ``[n, out]``; x: the layer's rows where ``down`` wants a gradient; low: as from `low_rank`
            where ``up`` wants one; dx: written, where the input wants one.
    """
    if layer.down is None:
        if dx is not None:
            torch.mm(grad, layer.weight, out=dx)
        return None, None
    dlow = grad @ layer.up.detach().to(grad.dtype)
    dlow = dlow if layer.scale == 1.0 else dlow.mul_(layer.scale)
    if dx is not None:
        torch.mm(dlow, layer.down.detach().to(grad.dtype), out=dx)
        dx.addmm_(grad, layer.weight)
    return None if x is None else dlow.t() @ x, None if low is None else grad.t() @ low


class Later(torch.autograd.Function):
    """``(compute, *tokens) -> compute()``, without a graph. Its gradient goes to every token as it is; the node of a
    token has saved beforehand what it needs."""

    @staticmethod
    def forward(ctx: FunctionCtx, compute: Callable[[], Tensor], *tokens: Tensor) -> Tensor:
        ctx.tokens = len(tokens)
        return compute()

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(grad,) * ctx.tokens


def token_like(x: Tensor, width: int) -> Tensor:
    """One number of x's dtype that stands for ``[n, width]``: autograd wants a gradient in the shape of its tensor."""
    return x.new_empty(1).expand(x.shape[0], width)


class _Kept(torch.autograd.Function):
    """Saves what the gradients of an adapted layer need and computes nothing; its output is a token for `Later`."""

    @staticmethod
    def forward(ctx: FunctionCtx, x, low, weight, down, up, scale) -> Tensor:
        _, _, _, wants_down, wants_up, _ = ctx.needs_input_grad
        ctx.weight, ctx.scale = weight, scale
        ctx.save_for_backward(x if wants_down else None, low if wants_up else None, down, up)
        return token_like(x, weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, low, down, up = ctx.saved_tensors
        dx = grad.new_empty(grad.shape[0], ctx.weight.shape[1]) if ctx.needs_input_grad[0] else None
        ddown, dup = gradients(grad, x, low, Layer(ctx.weight, down, up, ctx.scale), dx)
        ddown, dup = (None if g is None else g.to(p.dtype) for g, p in ((ddown, down), (dup, up)))
        return dx, None, None, ddown, dup, None


class Pending(NamedTuple):
    """A tensor ``[n, width]`` that is still to be computed: the token of its graph (None without one), and how."""

    token: Tensor | None
    compute: Callable[[], Tensor]


def pending(x: Tensor, layer: Layer | Joint) -> Pending:
    """The layer's output for rows ``[n, in]``, with gradients of x and of the adapter.

    Raises RuntimeError where the base's weight wants a gradient, which it gets none of here, or where a graph is wanted
    of several adapters.
    """
    if layer.weight.requires_grad:
        raise RuntimeError("the base's weights are frozen under an adapter, and this one asks for a gradient")
    rows = x.detach()
    if isinstance(layer, Joint):
        without_graph()
        return Pending(None, partial(layer.product, rows))
    low = low_rank(rows, layer)

    def compute() -> Tensor:
        return product(rows, low, layer, rows.new_empty(rows.shape[0], layer.weight.shape[0]))

    return Pending(_Kept.apply(x, low, *layer) if torch.is_grad_enabled() else None, compute)


def without_graph() -> None:
    """Raises RuntimeError where a graph is being built under several adapters."""
    if torch.is_grad_enabled():
        raise RuntimeError("several adapters are bound, which have no gradient together: run under torch.no_grad()")


def adapted(x: Tensor, layer: Layer | Joint) -> Tensor:
    """The layer's output ``[..., out]`` for x ``[..., in]``; see `pending`."""
    token, compute = pending(x.flatten(0, -2), layer)
    out = compute() if token is None else Later.apply(partial(product_output, compute), token)
    return out.unflatten(0, x.shape[:-1])
