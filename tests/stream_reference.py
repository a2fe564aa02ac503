"""Second implementations of a stream, for the tests of the cache and of the sampler: no cache, no checkpointing.

`masked_velocity` is one masked forward of the window. `lockstep_velocity` runs all chunks at once, block by block, with
everything but the newest chunk detached; with reuse each chunk sits in the window it was generated in, which is what a
cache that never recomputes must equal beyond six chunks too, without reuse all sit in the newest chunk's window.
"""

import hashlib
from dataclasses import dataclass, replace

import torch
from small import GEOMETRY, TEXT_TAGS, random_window
from torch import Tensor

from rtcwm.model import blocks
from rtcwm.model.attention import Attend, Masked, Prefix, resolve
from rtcwm.model.masks import boolean_mask, groups
from rtcwm.model.packing import PROXY, STATIC, TARGET, Layout, patchify, unpatchify
from rtcwm.model.sampler import Conditions
from rtcwm.model.schedule import SamplerConfig

CPU = resolve("sdpa", "cpu")
CHUNK_UNITS = 85.0 / 3.0  # rotary time of a chunk
STATIC_ROWS = len(TEXT_TAGS) + 6 + 6  # text, Picture 1 of 4 x 6 latents, two channels of three audio latents
PROXY_ROWS, TARGET_ROWS = 20, 30
assert (GEOMETRY.proxy_chunk, GEOMETRY.target_chunk) == (PROXY_ROWS, TARGET_ROWS)


def noise(kind: str, chunk: int, step: int, shape: tuple[int, ...]) -> Tensor:
    """The same noise for the same request, whatever was asked before."""
    digest = hashlib.sha256(f"{kind} {chunk} {step}".encode()).digest()
    return torch.randn(shape, generator=torch.Generator().manual_seed(int.from_bytes(digest[:7], "little")))


def request(chunks: int, batch: int = 1) -> tuple[Conditions, Tensor]:
    """Conditions of a six-chunk window and the proxy of `chunks` chunks."""
    conditions = Conditions.of(random_window(latents=30, batch=batch, seed=1))
    return conditions, random_window(latents=5 * chunks, batch=batch, seed=2).proxy


@dataclass
class Request:
    """A stream's inputs, noised, and what has been generated so far."""

    config: SamplerConfig
    conditions: Conditions
    proxy: Tensor
    done: list[Tensor]

    def level(self, chunk: int) -> float:
        sigmas = [float(sigma) for sigma in self.config.sigmas]
        return sigmas[-2] if self.config.history == "last-step" and chunk > 0 else 0.0

    def history(self, chunk: int) -> Tensor:
        clean, level = self.done[chunk].detach(), self.level(chunk)
        return (1 - level) * clean + (level * noise("history", chunk, 0, clean.shape) if level else 0.0)

    def noised_proxy(self, chunk: int) -> Tensor:
        clean = self.proxy[:, :, 5 * chunk : 5 * chunk + 5]
        return 0.999 * clean + 0.001 * noise("proxy", chunk, 0, clean.shape)

    def picture1(self) -> Tensor:
        clean = self.conditions.picture1
        return 0.999 * clean + 0.001 * noise("picture1", 0, 0, clean.shape)


def masked_velocity(model, given: Request, state: Tensor, sigma: float, reference: str) -> Tensor:
    """Velocity of the newest chunk by one forward of its window under the rule: prefix calls or a boolean mask."""
    chunk = len(given.done)
    window_chunks = range(max(0, chunk - 5), chunk + 1)
    window = replace(
        random_window(latents=30, batch=state.shape[0], seed=1),
        video=torch.cat([*(given.history(k) for k in window_chunks[:-1]), state], dim=2),
        proxy=torch.cat([given.noised_proxy(k) for k in window_chunks], dim=2),
        picture1=given.picture1(),
    )
    layout = first_chunks(random_window(latents=30).layout(stream=True), len(window_chunks))
    rule = given.config.rule
    attend = Masked(boolean_mask(layout, rule)) if reference == "mask" else Prefix(CPU, groups(layout, rule))
    times = torch.tensor([*(1 - given.level(k) for k in window_chunks[:-1]), 1 - sigma])
    return blocks.predict_velocity(model, window, layout, times, attend)[:, :, -5:]


def first_chunks(layout: Layout, chunks: int) -> Layout:
    """The static rows and the first chunks of a stream layout, at their positions in the whole one."""
    rows = layout.static + chunks * (layout.proxy_chunk + layout.target_chunk)
    proxy_rows, target_rows = layout.proxy_rows[: chunks * PROXY_ROWS], layout.target_rows[: chunks * TARGET_ROWS]
    names = ("position_ids", "tags", "part", "chunk", "time_slot")
    return replace(
        layout, latents=5 * chunks, proxy_rows=proxy_rows, target_rows=target_rows,
        video_rows=torch.cat([layout.picture_rows, proxy_rows, target_rows]),
        **{name: getattr(layout, name)[:rows] for name in names},
    )  # fmt: skip


def rotated(x: Tensor, positions: Tensor, inv_freq: Tensor) -> Tensor:
    """x [B, S, H, D] rotated by angles position * frequency of the three axes, channel i with channel i + 3 F."""
    angles = (positions.float()[:, :, None] * inv_freq).flatten(1)[None, :, None]
    half = angles.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def positions(part: int, slot: int) -> Tensor:
    """[rows, 3] float64 of a piece: slot 0, moved on in time by whole chunks."""
    ids = random_window(latents=30).layout(stream=True).position_ids
    first = {STATIC: 0, PROXY: STATIC_ROWS, TARGET: STATIC_ROWS + PROXY_ROWS}[part]
    rows = {STATIC: STATIC_ROWS, PROXY: PROXY_ROWS, TARGET: TARGET_ROWS}[part]
    moved = torch.tensor([CHUNK_UNITS * slot, 0.0, 0.0], dtype=torch.float64)
    return ids[first : first + rows] + moved


class Lockstep(Attend):
    """Softmax attention of many pieces at once, each query piece with the keys of its own window in their slots.
    The last piece is the newest target; all that it reads of others is detached."""

    def __init__(self, model, pieces: list[tuple[int, int]], config: SamplerConfig) -> None:
        self.inv_freq, self.pieces, self.rule, self.kv_reuse = model.rope.inv_freq, pieces, config.rule, config.kv_reuse
        self.sizes = [len(positions(part, 0)) for part, _ in pieces]

    def first(self, chunk: int) -> int:
        return max(0, (chunk if self.kv_reuse else self.pieces[-1][1]) - 5)

    def sees(self, query: tuple[int, int], key: tuple[int, int]) -> bool:
        (part, chunk), (key_part, key_chunk) = query, key
        in_window = self.first(chunk) <= key_chunk <= chunk
        if key_part == STATIC or part == STATIC:
            return key_part == STATIC
        if part == TARGET:
            return in_window
        return key_part == PROXY and (key_chunk == chunk if self.rule == "own" else in_window)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, rotary: object) -> Tensor:
        split = [x.split(self.sizes, dim=1) for x in (q, k, v)]
        outputs = []
        for index, (part, chunk) in enumerate(self.pieces):
            first = self.first(chunk)
            keys, values = [], []
            for other, (key_part, key_chunk) in enumerate(self.pieces):
                if self.sees((part, chunk), (key_part, key_chunk)):
                    key, value = split[1][other], split[2][other]
                    if other != len(self.pieces) - 1:
                        key, value = key.detach(), value.detach()
                    slot = 0 if key_part == STATIC else key_chunk - first
                    keys.append(rotated(key, positions(key_part, slot), self.inv_freq))
                    values.append(value)
            query = rotated(split[0][index], positions(part, 0 if part == STATIC else chunk - first), self.inv_freq)
            scores = torch.einsum("bqhd,bkhd->bhqk", query, torch.cat(keys, dim=1)) / query.shape[-1] ** 0.5
            outputs.append(torch.einsum("bhqk,bkhd->bqhd", scores.softmax(dim=-1), torch.cat(values, dim=1)))
        return torch.cat(outputs, dim=1)


def lockstep_velocity(model, given: Request, state: Tensor, sigma: float) -> Tensor:
    """Velocity of the newest chunk; earlier chunks run at their history levels."""
    chunk, conditions = len(given.done), given.conditions
    present = range(0 if given.config.kv_reuse else max(0, chunk - 5), chunk + 1)
    proxies, targets = [(PROXY, k) for k in present], [(TARGET, k) for k in present]
    pieces = [(STATIC, -1), *proxies, *targets]
    latents = [*(given.noised_proxy(k) for k in present), *(given.history(k) for k in present[:-1]), state]
    static = [
        blocks.embed_text(model, conditions.text),
        blocks.embed_video(model, patchify(given.picture1())),
        blocks.embed_audio(model, conditions.audio),
    ]
    hidden = torch.cat([*static, *(blocks.embed_video(model, patchify(x)) for x in latents)], dim=1)
    times = torch.tensor([0.999, 1.0, *(1 - given.level(k) for k in present[:-1]), 1 - sigma])
    time_index = [0] * 11 + [1] * 6 + [0] * (PROXY_ROWS * len(present))
    tags = [*TEXT_TAGS, *[0] * 6, *[2] * 6, *[0] * (PROXY_ROWS * len(present))]
    for k in range(len(present)):
        time_index += [2 + k] * TARGET_ROWS
        tags += [0] * TARGET_ROWS
    index, tags = torch.tensor(time_index), torch.tensor(tags)
    temb = blocks.time_embedding(model, times)
    attend = Lockstep(model, pieces, given.config)
    hidden = blocks.run_blocks(model, hidden, temb, 3 * index + tags, (None, None), attend)[:, -TARGET_ROWS:]
    rows = model.proj_out(model.norm_out(hidden, temb, index[-TARGET_ROWS:]))
    return unpatchify(rows, 5, GEOMETRY.height, GEOMETRY.width)


def sample(velocity, config: SamplerConfig, conditions: Conditions, proxy: Tensor, stops, graphs=(), draw=noise):
    """The sampler written out with `velocity(given, state, sigma)`; returns the chunks."""
    given = Request(config, conditions, proxy, [])
    sigmas = [float(sigma) for sigma in config.sigmas]
    shape = (proxy.shape[0], 24, 5, GEOMETRY.height, GEOMETRY.width)
    for chunk, stop in enumerate(stops):
        state = draw("target", chunk, 0, shape)
        for step in range(stop + 1):
            with torch.set_grad_enabled(chunk in graphs and step == stop):
                clean = state + sigmas[step] * velocity(given, state, sigmas[step])
            following = sigmas[step + 1]
            if config.solver == "euler":
                state = clean + (following / sigmas[step]) * (state - clean)
            elif step < stop:
                state = (1 - following) * clean + following * noise("renoise", chunk, step, shape)
        given.done.append(clean)
    return given.done
