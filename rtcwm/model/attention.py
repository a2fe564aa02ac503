"""Attention of the blocks: dense kernels, how a layout's rule is carried out with them, and the processor.

A block hands its attention mask argument through to the processor, and rtcwm passes an `Attend` there: a callable that
gets queries, keys and values (normed, not yet rotated, so that a cache can keep keys that move to other positions) and
the rotary angles, and returns the attention output. All tensors are [B, rows, heads, head width].
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache

import torch
from diffusers import MiniMaxH3Transformer3DModel
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3Attention, _apply_rotary_emb
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from rtcwm.model.kernels import Kernel, flex, resolve, sdpa
from rtcwm.model.masks import Group, Rule, flex_mask_mod, groups
from rtcwm.model.packing import Layout

__all__ = ["Attend", "Flex", "Full", "Kernel", "Masked", "Prefix", "Processor", "install", "make_attend", "resolve"]

Rotary = tuple[Tensor, Tensor] | None


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """`x` [B, S, H, D] at its positions: (cos, sin) [S, rotated channels] of the model's rope; None leaves it alone."""
    return x if rotary is None else _apply_rotary_emb(x, *rotary)


class Attend(ABC):
    """What stands in the place of an attention mask."""

    @abstractmethod
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, rotary: Rotary) -> Tensor:
        """Attention output [B, S, H, D] of normed, unrotated q, k and of v, each [B, S, H, D]."""


class Full(Attend):
    """Every row sees every row: one dense call."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, rotary: Rotary) -> Tensor:
        return self.kernel.fn(rotate(q, rotary), rotate(k, rotary), v)


class Prefix(Attend):
    """A rule as dense calls, one a group of `masks.groups`; no masks, and no pair of rows computed in vain."""

    def __init__(self, kernel: Kernel, calls: Sequence[Group]) -> None:
        self.kernel = kernel
        self.sizes = [group.rows.stop - group.rows.start for group in calls]
        self.calls = tuple(calls)
        self.compact = [group.rows for group in calls if group.store == "compact"]
        self.from_all = [keys for group in calls if group.store == "all" for keys in group.keys]
        self.from_compact = [keys for group in calls if group.store == "compact" for keys in group.keys]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, rotary: Rotary) -> Tensor:
        queries = rotate(q, rotary).split(self.sizes, dim=1)
        keys, values = self._cut(rotate(k, rotary)), self._cut(v)
        return torch.cat([self.kernel.fn(*qkv) for qkv in zip(queries, keys, values)], dim=1)

    def _cut(self, x: Tensor) -> list[Tensor]:
        """Keys or values of every group: views, but for groups whose keys are in several pieces."""
        pieces = _SharedViews.apply(x, *self.compact, *self.from_all)
        compact = torch.cat(pieces[: len(self.compact)], dim=1)
        pieces_of = {
            "all": iter(pieces[len(self.compact) :]),
            "compact": iter(_SharedViews.apply(compact, *self.from_compact)),
        }
        cut = []
        for group in self.calls:
            parts = [next(pieces_of[group.store]) for _ in group.keys]
            cut.append(parts[0] if len(parts) == 1 else torch.cat(parts, dim=1))
        return cut


class _SharedViews(torch.autograd.Function):
    """Overlapping slices of the rows of x, as views. The gradient adds every slice's part into one buffer, where plain
    slicing would fill and add a whole buffer of zeros for each."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, *rows: slice) -> tuple[Tensor, ...]:
        ctx.rows, ctx.shape = rows, x.shape
        ctx.set_materialize_grads(False)
        return tuple(x[:, piece] for piece in rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        total = None
        for piece, grad in zip(ctx.rows, grads):
            if grad is not None:
                total = grad.new_zeros(ctx.shape) if total is None else total
                total[:, piece] += grad
        return total, *(None for _ in ctx.rows)


class Masked(Attend):
    """A boolean mask [S, S] through torch's SDPA: the reference for small sizes."""

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, rotary: Rotary) -> Tensor:
        return sdpa(rotate(q, rotary), rotate(k, rotary), v, mask=self.mask)


class Flex(Attend):
    """A rule as a block mask of flex attention."""

    def __init__(self, layout: Layout, rule: Rule) -> None:
        self.block_mask = _block_mask(layout, rule)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, rotary: Rotary) -> Tensor:
        return flex(rotate(q, rotary), rotate(k, rotary), v, block_mask=self.block_mask)


@lru_cache(maxsize=16)
def _block_mask(layout: Layout, rule: Rule) -> BlockMask:
    size = (layout.rows, layout.rows)
    return create_block_mask(flex_mask_mod(layout, rule), None, None, *size, device=layout.device)


def make_attend(kernel: Kernel, layout: Layout, rule: Rule) -> Attend:
    """The rule over a stream layout with this kernel: a block mask for flex, prefix calls for every other one.

    Raises UserError for an unknown rule, ValueError for a layout in stock order.
    """
    return Flex(layout, rule) if kernel.name == "flex" else Prefix(kernel, groups(layout, rule))


class Processor:
    """Attention processor of every block and refiner: fused qkv, per-head norms, an `Attend`, output projection.

    The mask argument is an `Attend`, or None for full attention. The refiner has no rotary angles.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.full = Full(kernel)

    def __call__(
        self,
        attn: MiniMaxH3Attention,
        hidden_states: Tensor,
        rotary_emb: Rotary = None,
        attention_mask: Attend | None = None,
    ) -> Tensor:
        q, k, v = (x.unflatten(-1, (attn.heads, -1)) for x in attn.to_qkv(hidden_states).chunk(3, dim=-1))
        attend = attention_mask or self.full
        out = attend(attn.norm_q(q), attn.norm_k(k), v, rotary_emb).flatten(2, 3)
        for layer in attn.to_out:
            out = layer(out)
        return out


def install(model: MiniMaxH3Transformer3DModel, kernel: Kernel) -> None:
    """Puts one `Processor` with this kernel on every attention of the model.

    Raises ValueError where an attention still has separate q, k and v (`attn.fuse_projections()` fuses them).
    """
    processor = Processor(kernel)
    for name, module in model.named_modules():
        if isinstance(module, MiniMaxH3Attention):
            if not isinstance(getattr(module, "to_qkv", None), nn.Module):
                raise ValueError(f"{name} has no fused to_qkv: fuse the projections before installing the processor")
            module.set_processor(processor)
