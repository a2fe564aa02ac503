"""Chunks of a stream without a graph, one by one, on either side: `bench stream`, and a part of `bench distill`.

A chunk's forwards are matrix products and attention; the ceiling of the first is a large product, that of the second
one dense call of the chunk's own shape. Their times together are the least that a chunk can take here.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from diffusers import MiniMaxH3Transformer3DModel
from torch import Tensor

from rtcwm.bench import measure
from rtcwm.bench.inputs import Case
from rtcwm.bench.plain import PlainModel
from rtcwm.bench.plain_stream import PlainStream, plain_rollout
from rtcwm.bench.work import Work, chunk_passes
from rtcwm.engine.device import compute_dtype, synchronize
from rtcwm.model.blocks import Run
from rtcwm.model.kernels import Kernel
from rtcwm.model.layout import CHUNK_LATENTS, CHUNK_SECONDS, SPAN_CHUNKS
from rtcwm.model.lora import Adapter
from rtcwm.model.packing import Window
from rtcwm.model.sampler import Conditions, Noise, rollout
from rtcwm.model.schedule import SamplerConfig


@dataclass(frozen=True)
class Streamed:
    """A finished stream: latents [B, 24, 5 n, h, w], and the seconds of every chunk."""

    latents: Tensor
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class StreamCase:
    """A stream to run: its conditions on the device, a window of six chunks; the proxy of all chunks; its sampling.

    Noise comes from a generator of the device, in the order in which a stream asks.
    """

    span: Window
    proxy: Tensor
    config: SamplerConfig
    seed: int

    @property
    def chunks(self) -> int:
        return self.proxy.shape[2] // CHUNK_LATENTS

    def noise(self) -> Noise:
        device = self.proxy.device
        generator = torch.Generator(device).manual_seed(self.seed)
        return lambda kind, chunk, step, shape: torch.randn(shape, generator=generator, device=device)

    def ours(self, model: MiniMaxH3Transformer3DModel, kernel: Kernel, run: Run) -> Streamed:
        """Through `rtcwm.model.sampler`."""
        clock, stops = Clock(self.proxy.device), (self.config.steps - 1,) * self.chunks
        conditions = Conditions.of(self.span)
        made = rollout(
            model, kernel, conditions, self.proxy, self.config, self.noise(), stops, run=run, progress=clock.lap
        )
        return Streamed(torch.cat(made, dim=2), tuple(clock.laps))

    @torch.no_grad()
    def plain(self, model: PlainModel, adapter: Adapter | None) -> Streamed:
        """Through the obvious stream."""
        clock, stops = Clock(self.proxy.device), (self.config.steps - 1,) * self.chunks
        stream = PlainStream(model, adapter, self.span, self.config, self.noise())
        return Streamed(plain_rollout(stream, self.proxy, stops, (), clock.lap), tuple(clock.laps))


class Clock:
    """Seconds between calls, the device's work included."""

    def __init__(self, device: torch.device):
        self.device, self.laps = device, []
        synchronize(device)
        self.last = time.perf_counter()

    def lap(self, _chunk: int) -> None:
        synchronize(self.device)
        now = time.perf_counter()
        self.laps.append(now - self.last)
        self.last = now


def stream_case(window: Window, config: SamplerConfig, chunks: int, batch: int, seed: int, device: torch.device):
    """A `StreamCase` of the first chunks of a clip's window, for a batch of equal requests; the proxy of a clip that is
    too short begins again."""

    def repeat(tensor: Tensor) -> Tensor:
        return tensor.expand(batch, *tensor.shape[1:])

    span = SPAN_CHUNKS * CHUNK_LATENTS
    turns = -(-chunks * CHUNK_LATENTS // window.latents)
    proxy = window.proxy.repeat(1, 1, turns, 1, 1)[:, :, : chunks * CHUNK_LATENTS]
    cut = Window(
        video=repeat(window.video[:, :, :span]), proxy=repeat(window.proxy[:, :, :span]),
        picture1=repeat(window.picture1), text=repeat(window.text), text_tags=window.text_tags,
        audio=repeat(window.audio),
    )  # fmt: skip
    return StreamCase(cut.to(device), repeat(proxy).to(device), config, seed)


def chunk_work(case: Case, chunk: int, steps: int, batch: int) -> Work:
    """Work of one chunk without a graph: the forward that prepares it, and every step of the schedule."""
    prepare, step = chunk_passes(case.layout, chunk, "E")
    sizes = case.sizes
    return (sizes.forward(prepare.rows, prepare.pairs) + sizes.forward(step.rows, step.pairs) * steps) * batch


def attention_ceiling(case: Case, kernel: Kernel, device: torch.device) -> float:
    """Measured TFLOP/s of one dense call without a graph: rows of one chunk against keys of a full window."""
    layout, heads, width = case.layout, case.config["num_attention_heads"], case.config["attention_head_dim"]
    rows, keys = layout.target_chunk, layout.rows
    q = torch.randn(1, rows, heads, width, device=device).to(compute_dtype(device))
    k, v = (torch.randn(1, keys, heads, width, device=device).to(compute_dtype(device)) for _ in range(2))
    with torch.no_grad():
        seconds = measure.timed(lambda: kernel.fn(q, k, v), device, warmup=2, steps=5, inner=10)
    return 4 * rows * keys * heads * width / seconds.median / 1e12


def steady(seconds: Sequence[float], attention: float, work: Work, matmul: float) -> dict[str, float]:
    """A steady chunk: its seconds, the least by the two ceilings (TFLOP/s), and their ratio."""
    took = measure.Seconds(tuple(seconds)).median
    least = (work.linear + work.adapter) / (matmul * 1e12) + work.attention / (attention * 1e12)
    return {
        "seconds_a_chunk": took, "least_by_ceilings": least, "share_of_ceilings": least / took,
        "attention_tflops": attention, "plays": CHUNK_SECONDS, "speed": CHUNK_SECONDS / took,
    }  # fmt: skip
