"""The packed sequence: which row is what, where it sits in rotary space, and which model time it carries.

Two orders of the same rows, with the same positions:

- stock: `[text | Picture 1 | proxy | audio | target]`, the Ref2VA order of the release, for the bidirectional teacher;
- stream: `[text, Picture 1, audio | proxy 0, target 0 | proxy 1, target 1 | ...]`, in which everything that a chunk may
  see is a prefix, for the causal student.

Attention does not depend on the order of rows, only on their positions, so a model trained in one order runs in the
other. Positions are built in float64 because diffusers builds them there; the rotary embedding reads them in float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from rtcwm.model.layout import (
    AUDIO_CHANNELS,
    AUDIO_LATENT_CHANNELS,
    AUDIO_TAG,
    CHUNK_LATENTS,
    CLEAN_TIME,
    LATENT_CHANNELS,
    PATCH,
    REFERENCE_TIME,
    VIDEO_TAG,
    Geometry,
    chunks_of,
    padded,
)
from rtcwm.model.positions import stock_positions

TextTime = Literal["pinned", "video"]
STATIC, PROXY, TARGET = 0, 1, 2  # parts of the sequence, as masks know them

_TEXT_SLOT, _REFERENCE_SLOT, _AUDIO_SLOT, _TARGET_SLOT = 0, 1, 2, 3  # rows of the table of model times


@dataclass(frozen=True, eq=False)
class Layout:
    """Rows of one packed sequence of S rows. Every index tensor lists rows in its media's own order (frame-major, then
    row-major), whatever the order of the sequence. Layouts are cached and compared by identity.

    Fields: `position_ids` [S, 3] float64 (t, h, w); `tags` [S] modality; `part` [S] (STATIC, PROXY or TARGET);
    `chunk` [S], the chunk of proxy and target rows and -1 for static rows; `time_slot` [S], the row of the table of
    model times (text, references, audio, target chunks 0, 1, ...); `static` = number of static rows; `stream` tells
    the order; `latents` of the target.
    """

    geometry: Geometry
    latents: int
    stream: bool
    static: int
    position_ids: Tensor
    tags: Tensor
    part: Tensor
    chunk: Tensor
    time_slot: Tensor
    text_rows: Tensor
    picture_rows: Tensor
    proxy_rows: Tensor
    audio_rows: Tensor
    target_rows: Tensor
    video_rows: Tensor  # Picture 1, proxy, target: the rows that `proj_in` fills, in one call

    @property
    def rows(self) -> int:
        """Length S of the sequence."""
        return self.position_ids.shape[0]

    @property
    def chunks(self) -> int:
        """Chunks of the window, a cut one at the end included."""
        return chunks_of(self.latents)

    @property
    def proxy_chunk(self) -> int:
        """Rows of the proxy of one whole chunk."""
        return self.geometry.proxy_chunk

    @property
    def target_chunk(self) -> int:
        """Rows of the target of one whole chunk."""
        return self.geometry.target_chunk

    @property
    def device(self) -> torch.device:
        return self.position_ids.device

    def to(self, device: torch.device | str) -> "Layout":
        """The same layout on `device`; cached, so that repeated calls return the same object and copy nothing."""
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        return self if device == self.device else _moved(self, device)


@lru_cache(maxsize=64)
def _moved(layout: Layout, device: torch.device) -> Layout:
    tensors = {f.name: value.to(device) for f in fields(layout) if isinstance(value := getattr(layout, f.name), Tensor)}
    return replace(layout, **tensors)


def stock_layout(
    geometry: Geometry,
    picture_size: tuple[int, int],
    latents: int,
    text_tags: Sequence[int] | Tensor,
    audio_latents: int,
) -> Layout:
    """Rows in the order of diffusers' `build_ref2va_packed_sequence` for one image and one silent video reference.

    `picture_size` is (h, w) of Picture 1 in latent pixels, `text_tags` [n] the modality of every text row (rows of a
    vision block are video), `audio_latents` the audio latents a channel.
    """
    return _build(geometry, tuple(picture_size), latents, _hashable(text_tags), audio_latents, stream=False)


def stream_layout(
    geometry: Geometry,
    picture_size: tuple[int, int],
    chunks: int,
    text_tags: Sequence[int] | Tensor,
    audio_latents: int,
) -> Layout:
    """The rows and positions of `stock_layout` for `5 * chunks` latents, static rows first, then chunk by chunk."""
    latents = chunks * CHUNK_LATENTS
    return _build(geometry, tuple(picture_size), latents, _hashable(text_tags), audio_latents, stream=True)


def _hashable(text_tags: Sequence[int] | Tensor) -> tuple[int, ...]:
    return tuple(text_tags.tolist()) if isinstance(text_tags, Tensor) else tuple(text_tags)


@lru_cache(maxsize=64)
def _build(
    geometry: Geometry,
    picture_size: tuple[int, int],
    latents: int,
    text_tags: tuple[int, ...],
    audio_latents: int,
    stream: bool,
) -> Layout:
    if latents < 1 or not text_tags or audio_latents < 0:
        raise ValueError(f"a layout of {latents} latents, {len(text_tags)} text rows, {audio_latents} audio latents")
    blocks = stock_positions(geometry, picture_size, latents, len(text_tags), audio_latents)
    chunk_of_latent = torch.arange(latents) // CHUNK_LATENTS
    proxy_chunk = chunk_of_latent.repeat_interleave(geometry.proxy_rows)
    target_chunk = chunk_of_latent.repeat_interleave(geometry.target_rows)
    # name: (tag, part, chunk, row of the table of model times)
    labels = {
        "text": (torch.tensor(text_tags), STATIC, -1, _TEXT_SLOT),
        "picture": (VIDEO_TAG, STATIC, -1, _REFERENCE_SLOT),
        "proxy": (VIDEO_TAG, PROXY, proxy_chunk, _REFERENCE_SLOT),
        "audio": (AUDIO_TAG, STATIC, -1, _AUDIO_SLOT),
        "target": (VIDEO_TAG, TARGET, target_chunk, _TARGET_SLOT + target_chunk),
    }
    rows, columns, start = {}, [], 0
    for name, block in blocks.items():
        rows[name] = torch.arange(start, start + len(block))
        columns.append([torch.as_tensor(label).expand(len(block)) for label in labels[name]])
        start += len(block)
    position_ids = torch.from_numpy(np.concatenate(list(blocks.values())))
    tags, part, chunk, time_slot = (torch.cat(column) for column in zip(*columns))

    if stream:  # static first, then by chunk, the proxy before the target; a stable sort keeps each media's own order
        order = torch.argsort(chunk * 3 + part, stable=True)
        position_ids, tags, part, chunk, time_slot = (x[order] for x in (position_ids, tags, part, chunk, time_slot))
        place = torch.argsort(order)
        rows = {name: place[index] for name, index in rows.items()}
    return Layout(
        geometry=geometry,
        latents=latents,
        stream=stream,
        static=int((part == STATIC).sum()),
        position_ids=position_ids,
        tags=tags,
        part=part,
        chunk=chunk,
        time_slot=time_slot,
        video_rows=torch.cat([rows["picture"], rows["proxy"], rows["target"]]),
        **{f"{name}_rows": index for name, index in rows.items()},
    )


def row_times(layout: Layout, target_times: Tensor, text_time: TextTime = "pinned") -> tuple[Tensor, Tensor]:
    """Model times (t = 1 - sigma) of the sequence: `times` [m] float32, on the device of `target_times`, and
    `time_index` [S], the entry of every row, on the layout's.

    `target_times` is one time a chunk [chunks], or a scalar for all of them. "pinned" gives text 0.999 and visual
    references 0.999 whatever the target's time, so that cached keys stay valid; "video" is the stock rule: text takes
    the target's time, references max(target, 0.999). Audio is clean. Entries of `times` may repeat (no reduction to
    distinct values, which would stop the host until the device is done).
    Raises ValueError for other shapes or rules, or "video" with one time a chunk.
    """
    if target_times.shape not in ((), (1,), (layout.chunks,)):
        found = tuple(target_times.shape)
        raise ValueError(f"target_times of shape {found}: expected one each for {layout.chunks} chunks, or a scalar")
    target = target_times.to(torch.float32).reshape(-1)
    if text_time == "pinned":
        text = reference = target.new_full((1,), REFERENCE_TIME)
    elif text_time == "video" and len(target) == 1:
        text, reference = target, target.clamp(min=REFERENCE_TIME)
    else:
        raise ValueError(f"text_time {text_time!r} with {len(target)} target times: 'pinned', or 'video' with one time")
    times = torch.cat([text, reference, target.new_full((1,), CLEAN_TIME), target])
    slots = layout.time_slot
    return times, slots if len(target) == layout.chunks else slots.clamp(max=_TARGET_SLOT)


def patchify(latents: Tensor) -> Tensor:
    """Latents [B, C, T, h, w] -> rows [B, T * ceil(h / 2) * ceil(w / 2), C * 4], frame-major, then row-major; features
    are channel-major (c, down, across). Odd sizes are zero-padded at the bottom and at the right."""
    height, width = latents.shape[-2:]
    latents = pad(latents, (0, padded(width) - width, 0, padded(height) - height))
    latents = latents.unflatten(4, (-1, PATCH[2])).unflatten(3, (-1, PATCH[1]))  # [B, C, T, H, 2, W, 2]
    return latents.permute(0, 2, 3, 5, 1, 4, 6).flatten(4).flatten(1, 3)


def unpatchify(rows: Tensor, latents: int, height: int, width: int) -> Tensor:
    """Rows [B, latents * rows a latent, C * 4] -> latents [B, C, latents, height, width], padding cut off."""
    grid = (latents, padded(height) // PATCH[1], padded(width) // PATCH[2])
    rows = rows.unflatten(1, grid).unflatten(4, (-1, PATCH[1], PATCH[2]))  # [B, T, H, W, C, 2, 2]
    return rows.permute(0, 4, 1, 2, 5, 3, 6).flatten(5).flatten(3, 4)[..., :height, :width]


@dataclass(frozen=True)
class Window:
    """Clean latents and conditions of one window, batch axis first; all B requests share one packed layout.

    `video` [B, 24, T, h, w], `proxy` [B, 24, T, ph, pw], `picture1` [B, 24, 1, H1, W1], `text` [B, n, text width],
    `text_tags` [n] (a part of the layout: it stays on the CPU), `audio` [B, 2 * A, 32] channel-major rows.
    Raises ValueError where the parts do not belong together.
    """

    video: Tensor
    proxy: Tensor
    picture1: Tensor
    text: Tensor
    text_tags: Tensor
    audio: Tensor

    def __post_init__(self) -> None:
        batch, _, latents = self.video.shape[:3]
        found = {f.name: tuple(getattr(self, f.name).shape) for f in fields(self)}
        fits = (
            all(self.video.shape[1] == media.shape[1] == LATENT_CHANNELS for media in (self.proxy, self.picture1))
            and all(part.shape[0] == batch for part in (self.proxy, self.picture1, self.text, self.audio))
            and (self.proxy.shape[2], self.picture1.shape[2], self.text.shape[1]) == (latents, 1, len(self.text_tags))
            and self.audio.shape[1] % AUDIO_CHANNELS == 0
            and self.audio.shape[2] == AUDIO_LATENT_CHANNELS
        )
        if not fits:
            raise ValueError(f"the parts of a window do not belong together: {found}")

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> "Window":
        """The window on `device`; `dtype` applies to everything but the tags."""
        moved = {f.name: getattr(self, f.name).to(device, dtype) for f in fields(self) if f.name != "text_tags"}
        return replace(self, **moved)

    @property
    def geometry(self) -> Geometry:
        return Geometry(*self.video.shape[-2:], *self.proxy.shape[-2:])

    @property
    def latents(self) -> int:
        return self.video.shape[2]

    @property
    def chunks(self) -> int:
        """Chunks of the window, a cut one at the end included."""
        return chunks_of(self.latents)

    def layout(self, stream: bool) -> Layout:
        """The window's packed layout on the window's device, in stream or in stock order. Raises ValueError for a
        stream of latents that are no whole chunks."""
        if stream and self.latents % CHUNK_LATENTS:
            raise ValueError(f"a stream has whole chunks of {CHUNK_LATENTS} latents, the window {self.latents} latents")
        picture_size, audio_latents = tuple(self.picture1.shape[-2:]), self.audio.shape[1] // AUDIO_CHANNELS
        args = (self.geometry, picture_size, self.latents, _hashable(self.text_tags), audio_latents)
        return _build(*args, stream=stream).to(self.video.device)
