"""Attention of the blocks: how a layout's rule is carried out with a dense kernel, and the processor.

A block hands its attention mask argument through to the processor, and rtcwm passes an `Attend` there: a callable that
gets queries, keys and values (normed, not yet rotated, so that a cache can keep keys that move to other positions) and
the rotary angles, and returns the attention output. All tensors are [B, rows, heads, head width].
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache

from diffusers import MiniMaxH3Transformer3DModel
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3Attention, _apply_rotary_emb
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from rtcwm.model.dense import flex, sdpa
from rtcwm.model.kernels import Kernel, resolve
from rtcwm.model.masks import Group, Rule, flex_mask_mod, groups
from rtcwm.model.packing import Layout
from rtcwm.model.prefix import attention, encode

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
        return attention(self.kernel, rotate(q, rotary), rotate(k, rotary), v)


class Prefix(Attend):
    """A rule as dense calls, one a group of `masks.groups`, inside one operator (`rtcwm.model.prefix`); no masks, and
    no pair of rows computed in vain."""

    def __init__(self, kernel: Kernel, calls: Sequence[Group]) -> None:
        self.kernel = kernel
        self.plan = encode(calls)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, rotary: Rotary) -> Tensor:
        return attention(self.kernel, rotate(q, rotary), rotate(k, rotary), v, self.plan)


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
