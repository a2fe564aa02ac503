"""What lies between a block's matrix products: norms with modulation, heads with rotation, SwiGLU, gated residuals.

Each piece is a pure function and its gradient, another pure function, tied together by an autograd function that saves
one tensor of activations, or none. The base is frozen: norms and tables of modulation get no gradient. The gradient of
the block's last gated residual has a node of its own (`Gate`), made before the residual's value is computed, so that a
recompute, which ends with the last saved tensor, ends before the block's last product.

Compiled, a piece is one or two passes over its rows, where eager torch takes one an operation. The pure functions alone
are compiled: no graph, no mode and no hook of autograd is there when they run, so one compilation serves forward,
recompute and sampling. The number of rows and of table rows is dynamic. Uncompiled, values equal those of diffusers'
block to the last bit. Gradients are computed in float32 at least.

Shapes: rows ``[B, S, width]`` (or ``[n, width]``), tables ``[m, hidden]`` of modulation and the row of it that a row of
the sequence takes, ``index [S]``; cos and sin ``[S, rotated channels]``.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn.functional import pad, rms_norm, silu

Rotary = tuple[Tensor, Tensor] | None


def call(function: Callable, compiled: bool, *args: object) -> object:
    """A pure function of this module on tensors without their graphs, compiled or as it stands."""
    args = [arg.detach() if isinstance(arg, Tensor) and arg.requires_grad else arg for arg in args]
    if not compiled:
        return function(*args)
    for arg in args:
        if isinstance(arg, Tensor) and (arg.ndim > 1 or not arg.is_floating_point()):  # a norm's weight has no rows
            torch._dynamo.maybe_mark_dynamic(arg, 1 if arg.ndim > 2 else 0)
    return _compiled(function)(*args)


class _Unrecorded:
    """What an autograd function gets for its context where there is no graph: it keeps no tensor."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        pass


def apply(function: type[torch.autograd.Function], *args: object) -> object:
    """An autograd function of the blocks; without a graph its forward alone, which spares the host half of a call."""
    return function.apply(*args) if torch.is_grad_enabled() else function.forward(_Unrecorded(), *args)


@lru_cache
def _compiled(function: Callable) -> Callable:
    return torch.compile(function, fullgraph=True)


def norm_modulate(x: Tensor, weight: Tensor, eps: float, shift: Tensor, scale: Tensor, index: Tensor) -> Tensor:
    """``norm(x) (1 + scale) + shift``."""
    normed = rms_norm(x, weight.shape, weight, eps)
    return normed * (1.0 + scale.index_select(0, index)) + shift.index_select(0, index)


def norm_modulate_gradient(
    grad: Tensor, residual: Tensor, x: Tensor, weight: Tensor, eps: float, scale: Tensor, index: Tensor
) -> Tensor:
    """Gradient of x, with that which comes to it by the residual added."""
    wide = _wide(x)
    grad = grad.to(wide) * (1.0 + scale.index_select(0, index)).to(wide)
    return (residual.to(wide) + _norm_gradient(grad, x, weight, eps)).to(x.dtype)


def gate_norm_modulate(
    residual: Tensor, out: Tensor, gate: Tensor, weight: Tensor, eps: float, shift: Tensor, scale: Tensor, index: Tensor
) -> tuple[Tensor, Tensor]:
    """``x = residual + gate out``, and `norm_modulate` of it."""
    x = gated(residual, out, gate, index)
    return x, norm_modulate(x, weight, eps, shift, scale, index)


def gate_norm_modulate_gradient(
    grad: Tensor, residual: Tensor, x: Tensor, gate: Tensor, weight: Tensor, eps: float, scale: Tensor, index: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of residual and out; ``residual`` is the gradient that comes to x by its later residual."""
    dx = norm_modulate_gradient(grad, residual, x, weight, eps, scale, index)
    return dx, gated_gradient(dx, gate, index)


def gated(residual: Tensor, out: Tensor, gate: Tensor, index: Tensor) -> Tensor:
    """``residual + gate out``."""
    return residual + gate.index_select(0, index) * out


def gated_gradient(grad: Tensor, gate: Tensor, index: Tensor) -> Tensor:
    """Gradient of out."""
    return gate.index_select(0, index) * grad


def swiglu(x: Tensor) -> Tensor:
    """``a silu(b)`` of rows ``[..., (a, b)]``."""
    value, gate = x.chunk(2, dim=-1)
    return value * silu(gate)


def swiglu_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Gradient of x: ``silu'(b) = s (1 + b (1 - s))`` with ``s = sigmoid(b)``."""
    grad, (value, gate) = grad.to(_wide(x)), x.to(_wide(x)).chunk(2, dim=-1)
    s = gate.sigmoid()
    return torch.cat([(grad * gate * s).to(x.dtype), (grad * value * s * (1 + gate * (1 - s))).to(x.dtype)], dim=-1)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x [B, S, heads, width]`` at its positions: ``cos x + sin (-x_2, x_1)`` over the leading channels ``(x_1, x_2)``
    that have angles; the others pass."""
    turned = cos.shape[-1]
    cos, sin = _angles(x, cos, sin)
    return x * cos + _swapped(x, turned) * sin


def rotated_gradient(grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Gradient of x, the rotation backwards."""
    turned = cos.shape[-1]
    cos, sin = _angles(grad, cos, sin)
    return grad * cos + _swapped(grad * sin, turned)


def _angles(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Factors ``[S, 1, width]`` of a row's channels and of their partners', in x's dtype."""
    turned = cos.shape[-1]
    sign = torch.where(torch.arange(turned, device=x.device) < turned // 2, -1.0, 1.0).to(x.dtype)
    rest = (0, x.shape[-1] - turned)
    return pad(cos.to(x.dtype), rest, value=1.0)[:, None], pad(sin.to(x.dtype) * sign, rest)[:, None]


def _swapped(x: Tensor, turned: int) -> Tensor:
    """x with the halves of its leading `turned` channels exchanged."""
    half = turned // 2
    if not torch.compiler.is_compiling():
        return torch.cat([x[..., half:turned], x[..., :half], x[..., turned:]], dim=-1)
    # The compiler may write the parts of a concatenation to memory first, and reads an index in place; eager torch
    # concatenates ten times as fast as it indexes.
    at = torch.arange(x.shape[-1], device=x.device)
    return x.index_select(-1, torch.where(at < half, at + half, torch.where(at < turned, at - half, at)))


def heads(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, *rotary: Tensor) -> tuple[Tensor, Tensor]:
    """Normed queries and keys ``[B, S, heads, width]`` of the fused ``qkv [B, S, 3, heads, width]``, rotated where
    rotary angles are given."""
    pair = [rms_norm(qkv[:, :, at], weight.shape, weight, eps) for at, weight in enumerate((q_weight, k_weight))]
    return tuple(rotated(x, *rotary) for x in pair) if rotary else tuple(pair)


def heads_gradient(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, *rotary: Tensor
) -> Tensor:
    """Gradient of qkv."""
    parts = []
    rotary = tuple(table.to(qkv.dtype) for table in rotary)  # rounded as in the forward
    for at, (grad, weight) in enumerate(((dq, q_weight), (dk, k_weight))):
        grad = grad.to(_wide(qkv))
        grad = rotated_gradient(grad, *rotary) if rotary else grad
        parts.append(_norm_gradient(grad, qkv[:, :, at], weight, eps).to(qkv.dtype))
    return torch.stack([*parts, dv], dim=2)


def _norm_gradient(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Gradient of x under an RMS norm, wide: ``r (g w - x r^2 mean(g w x))`` with ``r = 1 / sqrt(mean(x^2) + eps)``."""
    x, grad = x.to(grad.dtype), grad * weight.to(grad.dtype)
    r = (x.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
    return r * (grad - x * r.square() * (grad * x).mean(dim=-1, keepdim=True))


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


class Enter(torch.autograd.Function):
    """``(x, norm, shift, scale, index, compiled) -> (x, norm_modulate)``: the block's input, what attention gets."""

    @staticmethod
    def forward(ctx: FunctionCtx, x, norm: nn.RMSNorm, shift, scale, index, compiled: bool):
        frozen(shift, norm.weight)
        ctx.norm, ctx.compiled = norm, compiled
        ctx.save_for_backward(x, scale, index)
        return x, call(norm_modulate, compiled, x, norm.weight, norm.eps, shift, scale, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, residual: Tensor, grad: Tensor):
        x, *rest = ctx.saved_tensors
        norm = (ctx.norm.weight, ctx.norm.eps)
        return call(norm_modulate_gradient, ctx.compiled, grad, residual, x, *norm, *rest), *(None,) * 5


class Middle(torch.autograd.Function):
    """``(residual, out, gate, norm, shift, scale, index, compiled) -> gate_norm_modulate``: rows after attention, and
    what the feed-forward gets."""

    @staticmethod
    def forward(ctx: FunctionCtx, residual, out, gate, norm: nn.RMSNorm, shift, scale, index, compiled: bool):
        ctx.norm, ctx.compiled = norm, compiled
        norm = (norm.weight, norm.eps)
        x, normed = call(gate_norm_modulate, compiled, residual, out, gate, *norm, shift, scale, index)
        ctx.save_for_backward(x, gate, scale, index)
        return x, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, residual: Tensor, grad: Tensor):
        x, gate, *rest = ctx.saved_tensors
        norm = (ctx.norm.weight, ctx.norm.eps)
        gradients = call(gate_norm_modulate_gradient, ctx.compiled, grad, residual, x, gate, *norm, *rest)
        return *gradients, *(None,) * 6


class Gate(torch.autograd.Function):
    """``(token, gate, index, compiled) -> token``: owns the gradient of what a `gated` sum adds, computes nothing."""

    @staticmethod
    def forward(ctx: FunctionCtx, token, gate, index, compiled: bool):
        ctx.compiled = compiled
        ctx.save_for_backward(gate, index)
        return token

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor):
        return call(gated_gradient, ctx.compiled, grad, *ctx.saved_tensors), None, None, None


class SwiGLU(torch.autograd.Function):
    """``(x, compiled) -> swiglu``."""

    @staticmethod
    def forward(ctx: FunctionCtx, x, compiled: bool):
        ctx.compiled = compiled
        ctx.save_for_backward(x)
        return call(swiglu, compiled, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor):
        return call(swiglu_gradient, ctx.compiled, grad, *ctx.saved_tensors), None


class Heads(torch.autograd.Function):
    """``(qkv, norm_q, norm_k, rotary, compiled) -> q, k, v``: `heads`, and the values as a view of qkv."""

    @staticmethod
    def forward(ctx: FunctionCtx, qkv, norm_q: nn.RMSNorm, norm_k: nn.RMSNorm, rotary: Rotary, compiled: bool):
        frozen(norm_q.weight, norm_k.weight)
        ctx.norms, ctx.compiled, rotary = (norm_q, norm_k), compiled, rotary or ()
        ctx.save_for_backward(qkv, *rotary)
        q, k = call(heads, compiled, qkv, norm_q.weight, norm_k.weight, norm_q.eps, *rotary)
        return q, k, qkv[:, :, 2]

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor):
        qkv, *rotary = ctx.saved_tensors
        norms = (*(norm.weight for norm in ctx.norms), ctx.norms[0].eps)
        return call(heads_gradient, ctx.compiled, *grads, qkv, *norms, *rotary), None, None, None, None


class Rotate(torch.autograd.Function):
    """``(x, cos, sin, compiled) -> rotated``."""

    @staticmethod
    def forward(ctx: FunctionCtx, x, cos, sin, compiled: bool):
        ctx.compiled = compiled
        ctx.save_for_backward(cos, sin)
        return call(rotated, compiled, x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor):
        return call(rotated_gradient, ctx.compiled, grad, *ctx.saved_tensors), None, None, None


def frozen(*tensors: Tensor) -> None:
    """Raises RuntimeError where one of these wants a gradient: in this module they get none."""
    if any(tensor.requires_grad for tensor in tensors):
        raise RuntimeError("norms and AdaLN of a block that ask for a gradient: install the processors alone")
