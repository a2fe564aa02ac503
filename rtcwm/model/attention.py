"""Attention of the blocks: how a layout's rule is carried out with a dense kernel, and the processor.

A block hands its attention mask argument through to the processor, and rtcwm passes an `Attend` there: a callable that
gets queries, keys and values and the rotary angles, and returns the attention output. All tensors are [B, rows, heads,
head width]. Queries and keys are normed. Most kinds of attention get them rotated as well, which then costs no pass of
its own; a cache keeps keys that move to other positions, and rotates them itself.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache

from diffusers import MiniMaxH3Transformer3DModel
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3Attention
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from rtcwm.model.block import install_forward
from rtcwm.model.dense import flex, sdpa
from rtcwm.model.glue import Heads, Rotary, Rotate, apply
from rtcwm.model.kernels import Kernel, resolve
from rtcwm.model.masks import Group, Rule, flex_mask_mod, groups
from rtcwm.model.packing import Layout
from rtcwm.model.prefix import attention, encode

__all__ = ["Attend", "Flex", "Full", "Kernel", "Masked", "Prefix", "Processor", "install", "make_attend", "resolve"]


def rotate(x: Tensor, rotary: Rotary, compiled: bool = False) -> Tensor:
    """`x` [B, S, H, D] at its positions: (cos, sin) [S, rotated channels] of the model's rope; None leaves it alone."""
    return x if rotary is None else apply(Rotate, x, *rotary, compiled)


class Attend(ABC):
    """What stands in the place of an attention mask.

    Attributes:
        takes_rotated: q and k arrive rotated, and no rotary angles with them.
    """

    takes_rotated = False

    @abstractmethod
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, rotary: Rotary) -> Tensor:
        """Attention output [B, S, H, D] of normed q, k and of v, each [B, S, H, D]; q and k are still to be rotated by
        `rotary`, unless that is None."""


class Full(Attend):
    """Every row sees every row: one dense call."""

    takes_rotated = True

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, rotary: Rotary) -> Tensor:
        return attention(self.kernel, rotate(q, rotary), rotate(k, rotary), v)


class Prefix(Attend):
    """A rule as dense calls, one a group of `masks.groups`, inside one operator (`rtcwm.model.prefix`); no masks, and
    no pair of rows computed in vain."""

    takes_rotated = True

    def __init__(self, kernel: Kernel, calls: Sequence[Group]) -> None:
        self.kernel = kernel
        self.plan = encode(calls)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, rotary: Rotary) -> Tensor:
        return attention(self.kernel, rotate(q, rotary), rotate(k, rotary), v, self.plan)


class Masked(Attend):
    """A boolean mask [S, S] through torch's SDPA: the reference for small sizes."""

    takes_rotated = True

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, rotary: Rotary) -> Tensor:
        return sdpa(rotate(q, rotary), rotate(k, rotary), v, mask=self.mask)


class Flex(Attend):
    """A rule as a block mask of flex attention."""

    takes_rotated = True

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
        attend = attention_mask or self.full
        qkv = attn.to_qkv(hidden_states).unflatten(-1, (3, attn.heads, -1))
        now, later = (rotary_emb, None) if attend.takes_rotated else (None, rotary_emb)
        out = attend(*self._heads(attn, qkv, now), later).flatten(2, 3)
        for layer in attn.to_out:
            out = layer(out)
        return out

    def _heads(self, attn: MiniMaxH3Attention, qkv: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """Normed q and k, rotated where angles are given, and v, of qkv [B, S, 3, H, D]. The norms are called as
        modules, and may be trained."""
        q, k, v = qkv.unbind(dim=2)
        return rotate(attn.norm_q(q), rotary), rotate(attn.norm_k(k), rotary), v


class BlockProcessor(Processor):
    """The same for blocks whose weights are frozen and gathered as a whole: norms and rotation in one piece."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self.compiled = kernel.compiled

    def _heads(self, attn: MiniMaxH3Attention, qkv: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        return apply(Heads, qkv, attn.norm_q, attn.norm_k, rotary, self.compiled)


def install(model: MiniMaxH3Transformer3DModel, kernel: Kernel, ffn_rows: int = 0, frozen: bool = True) -> None:
    """Makes the model attend with this kernel: a processor on every attention, and on every block the forward of
    `rtcwm.model.block`, whose elementwise pieces are compiled if the kernel says so.

    Args:
        ffn_rows: rows that go through a feed-forward at a time; 0 for all.
        frozen: False for a base that is itself trained: its blocks keep diffusers' forward, which gives gradients to
            norms and AdaLN as well.

    Raises ValueError where an attention still has separate q, k and v (`attn.fuse_projections()` fuses them).
    """
    for name, module in model.named_modules():
        if isinstance(module, MiniMaxH3Attention):
            if not isinstance(getattr(module, "to_qkv", None), nn.Module):
                raise ValueError(f"{name} has no fused to_qkv: fuse the projections before installing the processor")
            module.set_processor(Processor(kernel))
    if frozen:
        for block in model.transformer_blocks:
            block.attn.set_processor(BlockProcessor(kernel))
            install_forward(block, kernel.compiled, ffn_rows)
