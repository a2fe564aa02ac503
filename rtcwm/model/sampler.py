"""Chunk-by-chunk sampling of a stream, for inference and for the rollouts of distillation alike.

For every chunk: one forward brings the cache up to date (`prepare`), then the chunk is denoised from noise down the
schedule against it. With reuse, `prepare` runs the finished chunk at its history level and the new proxy, each in the
window it was generated in, so that a chunk costs the rows of one chunk however long the stream; the last chunk of a
rollout never enters. Without reuse it runs the whole history of the window again, at the slots the chunks hold now:
the reference, equal to one masked forward of the window. Up to six chunks both are the same. Beyond, keys of the second
block and deeper were computed from a window that reached further back, and differ.

Static rows (text at model time 0.999, Picture 1 at 0.999, silent audio) see each other alone; they run once a stream.
The state is float32 throughout. Which forwards run follows from plain numbers: steps, stops and the chunk count.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from diffusers import MiniMaxH3Transformer3DModel
from torch import Tensor

from rtcwm.model.attention import Kernel
from rtcwm.model.blocks import (
    Modulation,
    Run,
    call,
    embed_audio,
    embed_text,
    embed_video,
    modulate,
    video_output,
)
from rtcwm.model.cache import Cache, CachedAttend, Call, Place, Span, Store, plan, window_start
from rtcwm.model.layout import (
    AUDIO_CHANNELS,
    CHUNK_LATENTS,
    CLEAN_TIME,
    LATENT_CHANNELS,
    REFERENCE_TIME,
    SPAN_CHUNKS,
    Geometry,
)
from rtcwm.model.objectives import add_noise, clean_from_velocity, model_time
from rtcwm.model.packing import PROXY, STATIC, TARGET, Window, patchify, row_times, stream_layout
from rtcwm.model.schedule import SamplerConfig, euler, renoise

Noise = Callable[[str, int, int, tuple[int, ...]], Tensor]
"""`noise(kind, chunk, step, shape)`: standard normal float32 noise. The kinds, each asked for at most once a chunk and
step: "picture1" (chunk 0), "proxy", "target" (where a chunk starts), "renoise" (between steps) and "history"."""


@dataclass(frozen=True, eq=False)
class Conditions:
    """What a stream starts from, on the model's device: `picture1` [B, 24, 1, H1, W1] clean, `text` [B, n, text width],
    `text_tags` [n] on the CPU, `audio` [B, 2 * A, 32] silence of a whole six-chunk span, `geometry` of the latents."""

    picture1: Tensor
    text: Tensor
    text_tags: Tensor
    audio: Tensor
    geometry: Geometry

    @classmethod
    def of(cls, window: Window) -> "Conditions":
        """The conditions of a training window of six chunks."""
        return cls(window.picture1, window.text, window.text_tags, window.audio, window.geometry)


@dataclass(frozen=True, eq=False)
class _Seen:
    """A chunk of the window as it is attended to: its noised proxy and, once it is finished, its target at `level`."""

    proxy: Tensor
    target: Tensor | None = None
    level: Tensor | None = None


class Stream:
    """A stream of any length: give it the proxy of each chunk, take the clean latents of the chunk.

    Args:
        model: adapted base with the processors of `attention.install`; kernel: dense attention.
        run: how a block is run without a graph, `graph_run` with one (adapter, checkpointing), as `blocks.run_blocks`.
    """

    def __init__(
        self,
        model: MiniMaxH3Transformer3DModel,
        kernel: Kernel,
        conditions: Conditions,
        config: SamplerConfig,
        noise: Noise,
        run: Run = call,
        graph_run: Run = call,
    ) -> None:
        self.model, self.kernel, self.conditions, self.config = model, kernel, conditions, config
        self.run, self.graph_run = run, graph_run
        self.chunk = 0  # the next one
        self.cache = Cache()
        self._noise = noise
        self._sigmas = config.sigmas
        self._seen: dict[int, _Seen] = {}
        self._finished: Tensor | None = None
        self._told: dict[tuple, Modulation] = {}
        self._device = conditions.text.device
        tags, audio = conditions.text_tags, conditions.audio.shape[1] // AUDIO_CHANNELS
        picture_size = tuple(conditions.picture1.shape[-2:])
        layout = stream_layout(conditions.geometry, picture_size, SPAN_CHUNKS, tags, audio).to(self._device)
        self._span = Span(model, layout)
        # The head of a forward that holds the target of one chunk and nothing else.
        rows = torch.arange(layout.target_chunk, device=self._device)
        self._head = replace(layout, latents=CHUNK_LATENTS, target_rows=rows)

    def over(self, proxies: Iterable[Tensor]) -> Iterator[Tensor]:
        """Clean latents chunk by chunk, for proxies that may arrive one at a time."""
        return (self.next_chunk(proxy) for proxy in proxies)

    def next_chunk(self, proxy: Tensor, stop: int | None = None, graph: bool = False) -> Tensor:
        """The next chunk.

        Args:
            proxy: clean proxy latents [B, 24, 5, ph, pw] on the model's device.
            stop: index of the step whose clean prediction is the chunk, 0..steps - 1; None for the last.
            graph: keep the graph of that one step. It starts at the step's input: history is detached.

        Returns:
            [B, 24, 5, h, w] float32. Raises ValueError for a proxy of another shape or a stop outside the schedule.
        """
        stop = self.config.steps - 1 if stop is None else stop
        geometry, batch = self.conditions.geometry, self.conditions.text.shape[0]
        expected = (batch, LATENT_CHANNELS, CHUNK_LATENTS, geometry.proxy_height, geometry.proxy_width)
        if tuple(proxy.shape) != expected or not 0 <= stop < self.config.steps:
            found = f"proxy {tuple(proxy.shape)}, stop {stop}"
            raise ValueError(f"{found}: expected {expected} and a stop of 0..{self.config.steps - 1}")
        with torch.no_grad():
            self._prepare(proxy)
        place = Place(TARGET, self.chunk, window_start(self.chunk))
        calls = plan([place], self.cache.pieces, self._span, self.config.rule)
        state = self._draw("target", 0, (*expected[:3], geometry.height, geometry.width))
        for step in range(stop):
            with torch.no_grad():
                state = self._advance(state, self._clean(state, step, place, calls, self.run), step)
        with torch.set_grad_enabled(graph):
            clean = self._clean(state, stop, place, calls, self.graph_run if graph else self.run)
        self._finished = clean.detach()
        self.chunk += 1
        return clean

    def replace_history(self, latents: Tensor) -> None:
        """Puts other clean latents [B, 24, 5, h, w] in the place of the chunk just made, as the next ones see it; with
        the truth after every chunk the stream is teacher-forced. Raises ValueError for another shape, or too early."""
        made = None if self._finished is None else tuple(self._finished.shape)
        if made != tuple(latents.shape):
            raise ValueError(f"history of shape {tuple(latents.shape)} for a last chunk of shape {made}")
        self._finished = latents.detach().to(self._device, torch.float32)

    def _draw(self, kind: str, step: int, shape: Sequence[int], chunk: int | None = None) -> Tensor:
        chunk = self.chunk if chunk is None else chunk
        return self._noise(kind, chunk, step, tuple(shape)).to(self._device, torch.float32)

    def _reference(self, kind: str, clean: Tensor) -> Tensor:
        """A visual reference as the network sees it: really noised, to model time 0.999."""
        return add_noise(clean.float(), self._draw(kind, 0, clean.shape), 1 - REFERENCE_TIME)

    def _advance(self, state: Tensor, clean: Tensor, step: int) -> Tensor:
        sigma, following = self._sigmas[step], self._sigmas[step + 1]
        if self.config.solver == "euler":
            return euler(state, clean, sigma, following)
        return renoise(clean, self._draw("renoise", step, state.shape), following)

    def _clean(self, state: Tensor, step: int, place: Place, calls: Sequence[Call], run: Run) -> Tensor:
        """Clean prediction x0 = x + sigma v of the current chunk, at its place, from its state at a step's level."""
        sigma = self._sigmas[step]
        predicted = self._forward([place], [embed_video(self.model, patchify(state))], {place: sigma}, calls, run)
        return clean_from_velocity(state, predicted, sigma)

    def _prepare(self, proxy: Tensor) -> None:
        """Brings the cache to what the current chunk reads: one forward, without a graph."""
        chunk, first = self.chunk, window_start(self.chunk)
        if chunk > 0:
            level, clean = self.config.history_level(chunk - 1), self._finished
            if level > 0:
                clean = add_noise(clean, self._draw("history", 0, clean.shape, chunk - 1), level)
            self._seen[chunk - 1] = replace(self._seen[chunk - 1], target=clean, level=level)
        self._seen[chunk] = _Seen(self._reference("proxy", proxy))
        if chunk == 0:
            places = [Place(STATIC, -1, 0), Place(PROXY, 0, 0)]
        elif self.config.kv_reuse:
            places = [Place(TARGET, chunk - 1, window_start(chunk - 1)), Place(PROXY, chunk, first)]
        else:
            self.cache.drop_before(chunk)
            places = [Place(part, k, first) for k in range(first, chunk) for part in (PROXY, TARGET)]
            places.append(Place(PROXY, chunk, first))
        self._fill(places)
        self.cache.drop_before(first)
        self._seen = {k: seen for k, seen in self._seen.items() if k >= first}

    def _fill(self, places: list[Place]) -> None:
        """Runs history, proxies or static rows and appends their keys and values to the cache."""
        hidden = [self._embed(place) for place in places]
        sizes = [rows.shape[1] for rows in hidden]
        levels = {place: self._seen[place.chunk].level for place in places if place.part == TARGET}
        store = Store(places, sizes, len(self.model.transformer_blocks))
        calls = plan(places, self.cache.pieces, self._span, self.config.rule)
        self._forward(places, hidden, levels, calls, self.run, store)
        self.cache.append(store.pieces())

    def _embed(self, place: Place) -> Tensor:
        """Rows [B, rows, hidden] of static (text, Picture 1, audio), of a proxy or of a finished target."""
        model, given = self.model, self.conditions
        if place.part != STATIC:
            seen = self._seen[place.chunk]
            return embed_video(model, patchify(seen.proxy if place.part == PROXY else seen.target))
        picture = self._reference("picture1", given.picture1)
        parts = [embed_text(model, given.text), embed_video(model, patchify(picture)), embed_audio(model, given.audio)]
        return torch.cat(parts, dim=1)

    def _forward(
        self,
        places: Sequence[Place],
        hidden: Sequence[Tensor],
        levels: dict[Place, Tensor],
        calls: Sequence[Call],
        run: Run,
        store: Store | None = None,
    ) -> Tensor | None:
        """All blocks over the rows of `places` against the cache by `calls`. `levels`: the noise level of every target.

        Without a store the rows are one target, and its velocity [B, 24, 5, h, w] float32 is returned.
        """
        rows = [self._span.rows(place.part, place.slot_of(place.chunk)) for place in places]
        made = self._modulation(places, rows, levels)
        rotary = self._span.rotary(rows)
        states = torch.cat(list(hidden), dim=1)
        for index, block in enumerate(self.model.transformer_blocks):
            attend = CachedAttend(self.kernel, calls, index, store)
            states = run(block, states, made.blocks, made.adaln_index, rotary, attend)
        return video_output(self.model, states, made.temb, made.time_index, self._head) if store is None else None

    def _modulation(self, places: Sequence[Place], rows: Sequence[slice], levels: dict[Place, Tensor]) -> Modulation:
        """What the forward is told about noise levels. Where all targets share one, that depends on the kinds of its
        pieces and on the level alone, whatever the slots, and is kept: a stream meets the same few again and again."""
        layout = self._span.layout
        distinct = {level.item() for level in levels.values()}
        key = (tuple(place.part for place in places), *distinct)
        if len(distinct) <= 1 and key in self._told:
            return self._told[key]
        if len(distinct) <= 1:
            target_times = model_time(next(iter(levels.values()))) if levels else torch.tensor(CLEAN_TIME)
        else:
            target_times = torch.full((SPAN_CHUNKS,), CLEAN_TIME)
            for place, sigma in levels.items():
                target_times[place.slot_of(place.chunk)] = model_time(sigma)
        times, time_index = row_times(layout, target_times)
        time_index = torch.cat([time_index[piece] for piece in rows])
        made = modulate(self.model, times, time_index, torch.cat([layout.tags[piece] for piece in rows]))
        if len(distinct) <= 1:
            self._told[key] = made
        return made


def rollout(
    model: MiniMaxH3Transformer3DModel,
    kernel: Kernel,
    conditions: Conditions,
    proxy: Tensor,
    config: SamplerConfig,
    noise: Noise,
    stops: Sequence[int],
    graph_chunks: Collection[int] = (),
    run: Run = call,
    graph_run: Run = call,
    progress: Callable[[int], None] = lambda chunk: None,
) -> tuple[Tensor, ...]:
    """Chunks of a rollout, each [B, 24, 5, h, w] float32: the clean prediction at the chunk's own stopping step.

    Args:
        proxy: clean proxy latents [B, 24, 5 * R, ph, pw].
        stops: stopping step of each of the R chunks, 0..steps - 1.
        graph_chunks: chunks that keep a graph, of their stopping step alone. What they read of history is detached,
            and the graphs share it with each other: after the rollout, nothing else of the cache is alive.
        progress: called with the index of every finished chunk.

    Raises ValueError where proxy, stops and graph chunks do not fit each other.
    """
    chunks = len(stops)
    if chunks == 0 or proxy.shape[2] != chunks * CHUNK_LATENTS or not set(graph_chunks) <= set(range(chunks)):
        found = f"{chunks} stops, {proxy.shape[2]} proxy latents, graph chunks {sorted(graph_chunks)}"
        raise ValueError(f"{found}: expected {CHUNK_LATENTS} latents for every stop, and graph chunks among them")
    stream = Stream(model, kernel, conditions, config, noise, run, graph_run)
    latents = []
    for chunk, piece in enumerate(proxy.split(CHUNK_LATENTS, dim=2)):
        latents.append(stream.next_chunk(piece, stops[chunk], chunk in graph_chunks))
        progress(chunk)
    return tuple(latents)
