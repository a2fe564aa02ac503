"""The obvious stream: a cache of keys and values, one forward for every part that enters it. Kept to measure against.

Every chunk: its proxy is run and cached, noise is denoised step by step against the cache, and the finished chunk,
noised to its history level, is run once more and cached. Keys are cached before rotation and rotated at every read.
The numbers are those of `rtcwm.model.sampler` with reused keys, which runs fewer and larger forwards.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch
from diffusers.models.transformers.transformer_minimax_h3 import _apply_rotary_emb
from torch import Tensor

from rtcwm.bench.plain import PlainModel, noise_to
from rtcwm.model.dense import DenseAttention
from rtcwm.model.layout import CHUNK_LATENTS, CLEAN_TIME, MODALITIES, REFERENCE_TIME, SPAN_CHUNKS
from rtcwm.model.lora import Adapter
from rtcwm.model.packing import PROXY, STATIC, TARGET, Layout, Window, patchify
from rtcwm.model.schedule import SamplerConfig

Part = tuple[int, int]
"""What a forward runs: (STATIC, -1), or PROXY or TARGET with its chunk."""

Blocks = list[tuple[Tensor, Tensor] | None]
"""Keys and values of a part, by block."""


class PlainStream:
    """One stream on a base with an adapter.

    Args:
        conditions: a window whose Picture 1, text and audio (of a six-chunk span) start the stream; its video gives the
            size. noise: as `sampler.rollout` takes it.
    """

    def __init__(
        self, model: PlainModel, adapter: Adapter | None, conditions: Window, config: SamplerConfig,
        noise: Callable[[str, int, int, Sequence[int]], Tensor],
    ):  # fmt: skip
        self.model, self.adapter, self.conditions = model, adapter, conditions
        self.config, self.noise = config, noise
        self.layout: Layout = conditions.layout(stream=True)
        self.cos, self.sin = model.model.rope(self.layout.position_ids)
        self.cache: dict[Part, Blocks] = {}
        self.chunk = 0
        self.finished: Tensor | None = None

    def next_chunk(self, proxy: Tensor, stop: int, graph: bool) -> Tensor:
        """The chunk's clean prediction at its stopping step, [B, 24, 5, h, w]; with a graph of that step alone."""
        with torch.no_grad():
            self._prepare(proxy)
        sigmas, chunk = self.config.sigmas.tolist(), self.chunk
        shape = self.conditions.video[:, :, :CHUNK_LATENTS].shape
        state = self._draw("target", chunk, 0, shape)
        for step in range(stop + 1):
            with torch.set_grad_enabled(graph and step == stop):
                clean = state + sigmas[step] * self._velocity(state, sigmas[step])
            if step < stop:
                state = noise_to(clean, self._draw("renoise", chunk, step, shape), sigmas[step + 1])
        self.finished = clean.detach()
        self.chunk += 1
        return clean

    def _draw(self, kind: str, chunk: int, step: int, shape: Sequence[int]) -> Tensor:
        return self.noise(kind, chunk, step, tuple(shape)).to(self.conditions.video.device)

    def _prepare(self, proxy: Tensor) -> None:
        """Puts the chunk before, and this chunk's proxy, into the cache; on the first call static rows too."""
        model, chunk, reference = self.model, self.chunk, 1 - REFERENCE_TIME
        if chunk > 0:
            level, history = self.config.history_level(chunk - 1).item(), self.finished
            if level > 0:
                history = noise_to(history, self._draw("history", chunk - 1, 0, history.shape), level)
            rows = model.media(model.model.proj_in, patchify(history))
            self.forward((TARGET, chunk - 1), rows, 1 - level, keep=True)
        noised = noise_to(proxy, self._draw("proxy", chunk, 0, proxy.shape), reference)
        if chunk == 0:
            self.forward((STATIC, -1), self._static_rows(), REFERENCE_TIME, keep=True)
        self.forward((PROXY, chunk), model.media(model.model.proj_in, patchify(noised)), REFERENCE_TIME, keep=True)
        first = window_start(chunk)
        self.cache = {part: kept for part, kept in self.cache.items() if part[0] == STATIC or part[1] >= first}

    def _static_rows(self) -> Tensor:
        model, given = self.model, self.conditions
        noise = self._draw("picture1", 0, 0, given.picture1.shape)
        picture = noise_to(given.picture1, noise, 1 - REFERENCE_TIME)
        video = model.media(model.model.proj_in, patchify(picture))
        audio = model.media(model.model.audio_proj_in, given.audio)
        return torch.cat([model.text(given.text), video, audio], dim=1)

    def _velocity(self, state: Tensor, sigma: float) -> Tensor:
        rows = self.model.media(self.model.model.proj_in, patchify(state))
        hidden, temb, time_index = self.forward((TARGET, self.chunk), rows, 1 - sigma, keep=False)
        geometry = self.layout.geometry
        return self.model.head(hidden, temb, time_index, CHUNK_LATENTS, geometry.height, geometry.width)

    def forward(self, part: Part, hidden: Tensor, time: float, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
        """All blocks over the rows of one part against the cache; ``keep`` puts its keys and values there.

        Returns:
            Hidden rows, the time embedding, and the rows' index into it.
        """
        model, first = self.model, window_start(part[1])
        rows = self._rows(part, first)
        tags = self.layout.tags[rows]
        # Audio is clean; all else of a part has one time.
        times = torch.tensor([time, CLEAN_TIME], device=hidden.device)
        time_index = (tags == MODALITIES - 1).long()
        temb = model.times(times)
        seen = [other for other in self.cache if sees(part, other, first)]
        spans = [*(self._rows(other, first) for other in seen), rows]
        angles = tuple(torch.cat([table[span] for span in spans]) for table in (self.cos, self.sin))
        own = (self.cos[rows], self.sin[rows])
        kept: Blocks = [None] * len(model.model.transformer_blocks)
        for index, block in enumerate(model.model.transformer_blocks):
            cached = [self.cache[other][index] for other in seen]
            attend = partial(attend_cached, cached, angles, kept if keep else None, index)
            hidden = model.run(self.adapter, block, hidden, temb, time_index * MODALITIES + tags, own, attend)
        if keep:
            self.cache[part] = kept
        return hidden, temb, time_index

    def _rows(self, part: Part, first: int) -> slice:
        """Rows of a part in the span that starts with chunk ``first``."""
        layout, (kind, chunk) = self.layout, part
        if kind == STATIC:
            return slice(0, layout.static)
        start = layout.static + (chunk - first) * (layout.proxy_chunk + layout.target_chunk)
        middle = start + layout.proxy_chunk
        return slice(start, middle) if kind == PROXY else slice(middle, middle + layout.target_chunk)


def attend_cached(
    cached: Sequence[tuple[Tensor, Tensor]], angles: tuple[Tensor, Tensor], kept: Blocks | None, block: int,
    q: Tensor, k: Tensor, v: Tensor, own: tuple[Tensor, Tensor], kernel: DenseAttention,
) -> Tensor:  # fmt: skip
    """Attention of one block's rows to cached keys and their own."""
    if kept is not None:
        kept[block] = (k, v.contiguous())
    keys = torch.cat([*(pair[0] for pair in cached), k], dim=1)
    values = torch.cat([*(pair[1] for pair in cached), v], dim=1)
    return kernel(_apply_rotary_emb(q, *own), _apply_rotary_emb(keys, *angles), values)


def window_start(chunk: int) -> int:
    """First chunk that a chunk sees."""
    return max(0, chunk - SPAN_CHUNKS + 1)


def sees(part: Part, other: Part, first: int) -> bool:
    """Whether a part sees a cached one: rule "E", a causal proxy."""
    if other[0] == STATIC or part[0] == STATIC:
        return other[0] == STATIC
    return other[1] >= first and (other[0] == PROXY or part[0] == TARGET)


def plain_rollout(
    stream: PlainStream, proxy: Tensor, stops: Sequence[int], graph_chunks: Collection[int],
    progress: Callable[[int], None] = lambda chunk: None,
) -> Tensor:  # fmt: skip
    """A whole rollout, [B, 24, 5 R, h, w]."""
    chunks = []
    for chunk, piece in enumerate(proxy.split(CHUNK_LATENTS, dim=2)):
        chunks.append(stream.next_chunk(piece, stops[chunk], chunk in graph_chunks))
        progress(chunk)
    return torch.cat(chunks, dim=2)
