"""The forward of one block of the base: that of diffusers, with the pieces of `glue` and a feed-forward in parts.

It is put on the instances (`attention.install`), so that blocks stay diffusers' class, called as modules through their
hooks, and every weight is reached inside of the block's own forward, where a partitioned base has gathered it.

A feed-forward in parts takes so many rows at a time through both of its layers and keeps their input alone: the
gradient computes each part again, so that of the two widest tensors of a block only a part lives at any time. No
product is done twice for it where blocks are recomputed, since the recompute of a block then ends before its
feed-forward.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import MethodType

import torch
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3TransformerBlock
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from rtcwm.model.adapted import (
    Joint,
    Later,
    Layer,
    Pending,
    gradients,
    low_rank,
    pending,
    product,
    token_like,
    without_graph,
)
from rtcwm.model.glue import Enter, Gate, Middle, Rotary, SwiGLU, apply, call, frozen, gated, swiglu, swiglu_gradient
from rtcwm.model.lora import layer_of


def install_forward(block: MiniMaxH3TransformerBlock, compiled: bool, ffn_rows: int) -> None:
    """Gives a block the forward of this module; arguments as of `attention.install`."""
    block.forward = MethodType(partial(_forward, compiled=compiled, ffn_rows=ffn_rows), block)


def _forward(
    block: MiniMaxH3TransformerBlock,
    hidden_states: Tensor,
    temb: Tensor,
    adaln_indices: Tensor,
    rotary_emb: Rotary,
    attention_mask: Callable[..., Tensor] | None = None,
    *,
    compiled: bool,
    ffn_rows: int,
) -> Tensor:
    """Rows ``[B, S, hidden]`` through the block; the arguments are those of diffusers' forward."""
    index = adaln_indices
    shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = block.adaln_proj(temb)
    residual, normed = apply(Enter, hidden_states, block.norm1, shift, scale, index, compiled)
    out = block.attn(normed, rotary_emb, attention_mask)
    residual, normed = apply(Middle, residual, out, gate, block.norm2, ffn_shift, ffn_scale, index, compiled)
    out = feed_forward(block.ff, normed, compiled, ffn_rows)
    return _leave(residual, out, ffn_gate, index, compiled)


def _leave(residual: Tensor, out: Pending, gate: Tensor, index: Tensor, compiled: bool) -> Tensor:
    """``residual + gate out``."""
    token, compute = out

    def finish() -> Tensor:
        return call(gated, compiled, residual, compute().view_as(residual), gate, index)

    if token is None:
        return finish()
    token = Gate.apply(token.unflatten(0, residual.shape[:2]), gate, index, compiled)
    return Later.apply(finish, residual, token)


def feed_forward(ff: nn.Module, x: Tensor, compiled: bool, part: int) -> Pending:
    """diffusers' SwiGLU feed-forward of ``x [B, S, hidden]``, `part` rows at a time; 0: all at once.

    Raises RuntimeError where its weights want a gradient.
    """
    first, second = ff.net[0].proj, ff.net[2]
    if not part:
        return pending(apply(SwiGLU, first(x), compiled).flatten(0, 1), layer_of(second))
    layers, rows = (layer_of(first), layer_of(second)), x.flatten(0, 1)
    frozen(*(layer.weight for layer in layers))
    if isinstance(layers[0], Joint):
        without_graph()
    token = _Parts.apply(rows, compiled, part, *layers[0], *layers[1]) if torch.is_grad_enabled() else None
    return Pending(token, partial(_parts, rows.detach(), layers, compiled, part))


def _parts(x: Tensor, layers: Sequence[Layer | Joint], compiled: bool, part: int) -> Tensor:
    """The feed-forward of rows ``[n, hidden]``, part by part, without a graph. Of several adapters, each one's rows."""
    out = x.new_empty(x.shape[0], layers[1].weight.shape[0])
    shares = [(x, out, layers)]
    if isinstance(layers[0], Joint):
        pairs = zip(*(joint.layers for joint in layers))
        shares = zip(layers[0].cut(x), layers[0].cut(out), pairs, strict=True)
    for given, made, (first, second) in shares:
        for rows in _cut(given.shape[0], part):
            _, _, inner = _inner(given[rows], first, compiled)
            product(inner, low_rank(inner, second), second, made[rows])
    return out


def _inner(x: Tensor, layer: Layer, compiled: bool) -> tuple[Tensor | None, Tensor, Tensor]:
    """Of rows ``[n, hidden]``: the first layer's low-rank product, its output, and the SwiGLU of that."""
    low = low_rank(x, layer)
    wide = product(x, low, layer, x.new_empty(x.shape[0], layer.weight.shape[0]))
    return low, wide, call(swiglu, compiled, wide)


def _cut(rows: int, part: int) -> Iterator[slice]:
    return (slice(start, min(rows, start + part)) for start in range(0, rows, part))


class _Parts(torch.autograd.Function):
    """Saves the input of a feed-forward in parts and owns its gradient; its output is a token for `Later`."""

    @staticmethod
    def forward(ctx: FunctionCtx, x, compiled: bool, part: int, weight, down, up, scale, weight2, down2, up2, scale2):
        ctx.compiled, ctx.part, ctx.weights, ctx.scales = compiled, part, (weight, weight2), (scale, scale2)
        ctx.save_for_backward(x, down, up, down2, up2)
        return token_like(x, weight2.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor):
        x, *weights = ctx.saved_tensors
        first, second = (
            Layer(weight, *pair, scale)
            for weight, pair, scale in zip(ctx.weights, (weights[:2], weights[2:]), ctx.scales)
        )
        wants_x, _, _, _, *wants, _, _, wants_down2, wants_up2, _ = ctx.needs_input_grad
        wants = (*wants[:2], wants_down2, wants_up2)
        dx = torch.empty_like(x) if wants_x else None
        sums = [torch.zeros_like(weight) if want else None for weight, want in zip(weights, wants)]
        for rows in _cut(x.shape[0], ctx.part):
            low, wide, inner = _inner(x[rows], first, ctx.compiled)
            low2 = low_rank(inner, second)
            dinner = torch.empty_like(inner)
            kept = (inner if wants[2] else None, low2 if wants[3] else None)
            outer = gradients(grad[rows], *kept, second, dinner)
            dwide = call(swiglu_gradient, ctx.compiled, dinner, wide)
            kept = (x[rows] if wants[0] else None, low if wants[1] else None)
            parts = gradients(dwide, *kept, first, None if dx is None else dx[rows]) + outer
            for total, piece in zip(sums, parts):
                if total is not None:
                    total += piece  # in the adapter's own precision
        return dx, None, None, None, *sums[:2], None, None, *sums[2:], None
