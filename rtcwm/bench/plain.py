"""The obvious loop: what one writes first for this model and these objectives. It is kept as it is, to measure against.

Plain torch on one device: diffusers' own blocks, norms and rotary embedding, eager; attention as one dense call for
every group of rows, sliced out of the keys; low-rank adapters as forward hooks; every block recomputed by
`torch.utils.checkpoint`; torch's AdamW. No DeepSpeed, no compiler, nothing parked. It shares with the rest of rtcwm
what is no matter of speed: the packed layout, who sees whom, adapter weights, noise levels.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from diffusers import MiniMaxH3Transformer3DModel
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3Attention, _apply_rotary_emb
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from rtcwm.model.dense import DenseAttention
from rtcwm.model.layout import CHUNK_LATENTS, MODALITIES, REFERENCE_TIME
from rtcwm.model.lora import Adapter, adapted_layers
from rtcwm.model.masks import Group, Rule, groups
from rtcwm.model.packing import Layout, TextTime, Window, patchify, row_times, unpatchify

Calls = Sequence[Group]


def group_attention(q: Tensor, k: Tensor, v: Tensor, calls: Calls, kernel: DenseAttention) -> Tensor:
    """Attention of rotated q, k and of v, [B, S, H, D]: one dense call a group of rows."""
    compact = [call.rows for call in calls if call.store == "compact"]
    stores = {
        "all": (k, v),
        "compact": tuple(torch.cat([x[:, rows] for rows in compact], dim=1) for x in (k, v)),
    }
    out = []
    for call in calls:
        parts = [[x[:, rows] for rows in call.keys] for x in stores[call.store]]
        keys, values = (pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1) for pieces in parts)
        out.append(kernel(q[:, call.rows], keys, values))
    return torch.cat(out, dim=1)


class PlainProcessor:
    """diffusers' processor for fused projections, with groups of rows (or None: full attention) as its mask."""

    def __init__(self, kernel: DenseAttention):
        self.kernel = kernel

    def __call__(
        self, attn: MiniMaxH3Attention, hidden_states: Tensor, rotary_emb=None, attention_mask: Calls | None = None
    ) -> Tensor:
        q, k, v = (x.unflatten(-1, (attn.heads, -1)) for x in attn.to_qkv(hidden_states).chunk(3, dim=-1))
        q, k = attn.norm_q(q), attn.norm_k(k)
        if callable(attention_mask):  # a stream's cache, which rotates its own keys
            out = attention_mask(q, k, v, rotary_emb, self.kernel)
        else:
            if rotary_emb is not None:
                q, k = _apply_rotary_emb(q, *rotary_emb), _apply_rotary_emb(k, *rotary_emb)
            if attention_mask is None:
                out = self.kernel(q, k, v)
            else:
                out = group_attention(q, k, v, attention_mask, self.kernel)
        return attn.to_out[0](out.flatten(2, 3))


class PlainModel:
    """A base on one device with adapters hooked to it.

    Args:
        model: whole, with fused projections.
        kernel: dense attention.
    """

    def __init__(self, model: MiniMaxH3Transformer3DModel, kernel: DenseAttention):
        self.model = model
        self.adapter: Adapter | None = None
        processor = PlainProcessor(kernel)
        for module in model.modules():
            if isinstance(module, MiniMaxH3Attention):
                module.set_processor(processor)
        for index, block in enumerate(model.transformer_blocks):
            for site, layer in adapted_layers(block).items():
                layer.register_forward_hook(self._hook(index, site))

    def _hook(self, block: int, site: str) -> Callable:
        def add(_layer: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
            if self.adapter is None:
                return output
            pair, x = self.adapter.blocks[block][site], inputs[0]
            low = functional.linear(x, pair.down.to(x.dtype))
            return output + functional.linear(low, pair.up.to(x.dtype)) * self.adapter.scale

        return add

    @contextmanager
    def use(self, adapter: Adapter | None) -> Iterator[None]:
        """Binds an adapter for a while."""
        former, self.adapter = self.adapter, adapter
        try:
            yield
        finally:
            self.adapter = former

    def run(self, adapter: Adapter | None, block: nn.Module, *inputs: object) -> Tensor:
        """One block with an adapter, recomputed in the backward pass."""

        def forward(*given: object) -> Tensor:
            with self.use(adapter):
                return block(*given)

        if torch.is_grad_enabled():
            return checkpoint(forward, *inputs, use_reentrant=False)
        return forward(*inputs)

    def text(self, text: Tensor) -> Tensor:
        """Refined rows [B, n, hidden] of text features [B, n, text width]."""
        model = self.model
        return model.token_refiner(model.context_embedder(text.to(model.context_embedder.weight.dtype)))

    def media(self, projection: nn.Linear, rows: Tensor) -> Tensor:
        """Rows [B, n, features] of video or audio as [B, n, hidden], in the dtype of the blocks."""
        return projection(rows.to(projection.weight.dtype)).to(self.model.context_embedder.weight.dtype)

    def times(self, times: Tensor) -> Tensor:
        """Embedding [m, time width] of model times [m]."""
        model = self.model
        return model.time_embedder(model.time_proj(times).to(model.time_embedder.linear_1.weight.dtype))

    def head(self, hidden: Tensor, temb: Tensor, time_index: Tensor, latents: int, height: int, width: int) -> Tensor:
        """Velocity [B, 24, T, h, w] of target rows [B, n, hidden], whose times are ``temb[time_index]``."""
        hidden = self.model.norm_out(hidden, temb, time_index)
        rows = self.model.proj_out(hidden.to(self.model.proj_out.weight.dtype)).float()
        return unpatchify(rows, latents, height, width)

    def velocity(
        self, adapter: Adapter | None, window: Window, layout: Layout, times: Tensor, calls: Calls | None,
        text_time: TextTime = "pinned",
    ) -> Tensor:  # fmt: skip
        """Velocity [B, 24, T, h, w] of a noised window at model times ``times`` (one a chunk, or one)."""
        model = self.model
        values, time_index = row_times(layout, times, text_time)
        temb = self.times(values.to(layout.device))
        text = self.text(window.text)
        video = torch.cat([patchify(part) for part in (window.picture1, window.proxy, window.video)], dim=1)
        hidden = text.new_zeros(text.shape[0], layout.rows, text.shape[2])
        hidden[:, layout.text_rows] = text
        hidden[:, layout.video_rows] = self.media(model.proj_in, video)
        hidden[:, layout.audio_rows] = self.media(model.audio_proj_in, window.audio)
        rotary = model.rope(layout.position_ids)
        adaln_index = time_index * MODALITIES + layout.tags
        for block in model.transformer_blocks:
            hidden = self.run(adapter, block, hidden, temb, adaln_index, rotary, calls)
        rows = layout.target_rows
        geometry = layout.geometry
        return self.head(hidden[:, rows], temb, time_index[rows], layout.latents, geometry.height, geometry.width)


def noise_to(clean: Tensor, noise: Tensor, sigma: Tensor | float) -> Tensor:
    """``(1 - sigma) x0 + sigma eps``."""
    return (1 - sigma) * clean + sigma * noise


def optimizer_of(adapter: Adapter, parameters: dict) -> torch.optim.AdamW:
    """torch's AdamW with the betas, epsilon and decay of an adapter engine's file."""
    known = {key: value for key, value in parameters.items() if key in ("betas", "eps", "weight_decay")}
    return torch.optim.AdamW(adapter.parameters(), lr=0.0, **known)


def update(adapter: Adapter, optimizer: torch.optim.AdamW, loss: Tensor, lr: float, clipping: float) -> float:
    """Backward, clip, step; returns the norm of the gradient before clipping."""
    loss.backward()
    norm = nn.utils.clip_grad_norm_(adapter.parameters(), clipping)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()
    return norm.item()


def span_loss(
    model: PlainModel, adapter: Adapter, rule: Rule, window: Window, noises: tuple[Tensor, Tensor, Tensor],
    sigma: Tensor, weight: Tensor,
) -> Tensor:  # fmt: skip
    """The loss of diffusion forcing of a clean span: mean squared velocity error, weighted by chunk.

    Args:
        noises: of target, proxy and Picture 1; sigma, weight: of every chunk ``[chunks]``.
    """
    reference = 1 - REFERENCE_TIME
    levels = sigma.repeat_interleave(CHUNK_LATENTS)[None, None, :, None, None]
    noisy = Window(
        video=noise_to(window.video, noises[0], levels),
        proxy=noise_to(window.proxy, noises[1], reference),
        picture1=noise_to(window.picture1, noises[2], reference),
        text=window.text,
        text_tags=window.text_tags,
        audio=window.audio,
    )
    layout = window.layout(stream=True)
    predicted = model.velocity(adapter, noisy, layout, 1 - sigma, groups(layout, rule))
    error = (predicted - (window.video - noises[0])).square()
    losses = error.unflatten(2, (layout.chunks, CHUNK_LATENTS)).mean(dim=(0, 1, 3, 4, 5))
    return (losses * weight).sum() / weight.sum()
