"""The base run submodule by submodule: rows in, velocity out.

`MiniMaxH3Transformer3DModel.forward` takes no mask and runs its heads over every row, so rtcwm drives the same
submodules itself. Every weight is reached by calling the submodule that owns it, never directly: under ZeRO-3 a
submodule gathers its weights in hooks around its own forward, and outside of it they have shape [0]. Only dtypes are
read from parameters.

The dtype contract of the release: `proj_in`, `audio_proj_in`, `time_embedder` and `proj_out` compute in float32,
everything else in bfloat16. Inputs are cast to the dtype of the projection that takes them, rows enter the packed
sequence in the text's dtype, and the time embedding stays float32 until each AdaLN has applied its SiLU.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from diffusers import MiniMaxH3Transformer3DModel
from torch import Tensor, nn

from rtcwm.model.attention import Attend
from rtcwm.model.layout import MODALITIES
from rtcwm.model.modulation import TableRows
from rtcwm.model.packing import Layout, TextTime, Window, patchify, row_times, unpatchify

Run = Callable[..., Tensor]  # run(block, hidden, modulation, adaln_index, rotary, attend) -> hidden


class Modulation(NamedTuple):
    """What blocks and head are told about noise levels.

    `temb` [m, time width] of the m model times, and `time_index` [S] into it; `blocks`, from which every block makes
    its AdaLN rows (time, tag): temb again, or rows of a table for all blocks (`rtcwm.model.modulation`); `adaln_index`
    [S] into them.
    """

    temb: Tensor
    time_index: Tensor
    blocks: Tensor
    adaln_index: Tensor


def call(block: nn.Module, *args: object) -> Tensor:
    """The plain way to run a block; a trainer passes its own `run` to checkpoint or offload around it."""
    return block(*args)


def dtype_of(module: nn.Module) -> torch.dtype:
    """Dtype of a module's parameters, which a partitioned parameter of shape [0] keeps."""
    return next(module.parameters()).dtype


def modulate(model: MiniMaxH3Transformer3DModel, times: Tensor, time_index: Tensor, tags: Tensor) -> Modulation:
    """For rows of these times and modalities: `times` [m], on the CPU or the host waits for the device; `time_index`
    and `tags` [S] on the device.

    Raises UserError for a time that the base's AdaLN table, if it has one, does not hold.
    """
    temb = time_embedding(model, times.to(tags.device))
    adaln = model.transformer_blocks[0].adaln_proj
    if not isinstance(adaln, TableRows):
        return Modulation(temb, time_index, temb, time_index * MODALITIES + tags)
    rows, which = adaln.table.rows(times)
    return Modulation(temb, time_index, rows, which.to(tags.device)[time_index] * MODALITIES + tags)


def time_embedding(model: MiniMaxH3Transformer3DModel, times: Tensor) -> Tensor:
    """Model times t = 1 - sigma [m] -> [m, time width] in the time embedder's dtype (float32 in the release)."""
    return model.time_embedder(model.time_proj(times).to(dtype_of(model.time_embedder)))


def embed_text(model: MiniMaxH3Transformer3DModel, text: Tensor) -> Tensor:
    """Text features [B, n, text width] -> refined rows [B, n, hidden]. They depend on nothing but the text."""
    return model.token_refiner(model.context_embedder(text.to(dtype_of(model.context_embedder))))


def embed_video(model: MiniMaxH3Transformer3DModel, rows: Tensor) -> Tensor:
    """Patchified rows [B, n, 96] -> [B, n, hidden], computed in the dtype of `proj_in` and rounded to the blocks'."""
    return model.proj_in(rows.to(dtype_of(model.proj_in))).to(dtype_of(model.context_embedder))


def embed_audio(model: MiniMaxH3Transformer3DModel, rows: Tensor) -> Tensor:
    """Audio rows [B, n, 32] -> [B, n, hidden], as `embed_video`."""
    return model.audio_proj_in(rows.to(dtype_of(model.audio_proj_in))).to(dtype_of(model.context_embedder))


def video_rows(window: Window) -> Tensor:
    """Patchified Picture 1, proxy and target, [B, rows, 96], in the order of `Layout.video_rows`."""
    return torch.cat([patchify(media) for media in (window.picture1, window.proxy, window.video)], dim=1)


def embed(model: MiniMaxH3Transformer3DModel, layout: Layout, window: Window, text: Tensor | None = None) -> Tensor:
    """Packed sequence [B, S, hidden] of a window whose `video` is the noisy target; `text` as of `predict_velocity`.

    Raises ValueError where the window is not of the layout's sizes.
    """
    video = video_rows(window)
    found = (window.text.shape[1], video.shape[1], window.audio.shape[1])
    expected = (len(layout.text_rows), len(layout.video_rows), len(layout.audio_rows))
    if found != expected:
        raise ValueError(f"window of {found} text, video and audio rows for a layout of {expected}")
    text = embed_text(model, window.text) if text is None else text
    hidden = text.new_zeros(text.shape[0], layout.rows, text.shape[2])
    hidden = hidden.index_copy(1, layout.text_rows, text)
    hidden = hidden.index_copy(1, layout.video_rows, embed_video(model, video))
    return hidden.index_copy(1, layout.audio_rows, embed_audio(model, window.audio))


def run_blocks(
    model: MiniMaxH3Transformer3DModel,
    hidden: Tensor,
    modulation: Tensor,
    adaln_index: Tensor,
    rotary: tuple[Tensor, Tensor],
    attend: Attend | None,
    run: Run = call,
) -> Tensor:
    """All blocks over `hidden` [B, S, hidden]; `modulation` and `adaln_index` from `modulate`. `attend` travels as
    the blocks' attention mask to the processors that `attention.install` put there (None: full attention)."""
    for block in model.transformer_blocks:
        hidden = run(block, hidden, modulation, adaln_index, rotary, attend)
    return hidden


def video_output(
    model: MiniMaxH3Transformer3DModel, hidden: Tensor, temb: Tensor, time_index: Tensor, layout: Layout
) -> Tensor:
    """Velocity v = x0 - eps of the target, [B, 24, T, h, w] float32. The head runs over target rows alone."""
    hidden = hidden.index_select(1, layout.target_rows)
    hidden = model.norm_out(hidden, temb, time_index.index_select(0, layout.target_rows))
    rows = model.proj_out(hidden.to(dtype_of(model.proj_out))).float()
    return unpatchify(rows, layout.latents, layout.geometry.height, layout.geometry.width)


def predict_velocity(
    model: MiniMaxH3Transformer3DModel,
    window: Window,
    layout: Layout,
    target_times: Tensor,
    attend: Attend | None,
    text_time: TextTime = "pinned",
    run: Run = call,
    copies: int = 1,
    text: Tensor | None = None,
) -> Tensor:
    """Velocity [B, 24, T, h, w] float32 of a window whose `video` holds the noisy latents at model time `target_times`
    (1 - sigma; one a chunk [chunks], or a scalar; on the CPU, or the host may have to wait for the device).

    Args:
        copies: run the batch so many times over, one copy after the other along the batch axis, as adapters that share
            a pass take it; the result is [copies * B, ...].
        text: rows of `embed_text` for the window's text, where they are known.
    """
    made = modulate(model, *row_times(layout, target_times, text_time), layout.tags)
    hidden = embed(model, layout, window, text)
    hidden = hidden if copies == 1 else hidden.repeat(copies, 1, 1)
    rotary = model.rope(layout.position_ids)
    hidden = run_blocks(model, hidden, made.blocks, made.adaln_index, rotary, attend, run)
    return video_output(model, hidden, made.temb, made.time_index, layout)
