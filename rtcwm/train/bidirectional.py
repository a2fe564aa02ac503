"""Batches of the teacher's windows through the base: stock order, every row sees every row, one level a window.

The base's blocks take one packed sequence and one set of model times for all of a batch. To give every window a noise
level of its own, a batch of B windows is laid out as one sequence of B documents: the AdaLN table holds the model times
of every window, and attention (`Documents`), the only place where rows meet, takes the documents apart again.
"""

import math
from dataclasses import dataclass, replace

import torch
from diffusers import MiniMaxH3Transformer3DModel
from torch import Tensor

from rtcwm.data.codec import load_codec
from rtcwm.engine.streams import Streams
from rtcwm.model.attention import Attend, Rotary, rotate
from rtcwm.model.blocks import Run, call, dtype_of, embed, run_blocks, time_embedding
from rtcwm.model.kernels import Kernel
from rtcwm.model.layout import CHUNK_LATENTS, MODALITIES, REFERENCE_TIME
from rtcwm.model.objectives import clean_from_velocity, model_time, velocity
from rtcwm.model.packing import Layout, Window, row_times, unpatchify
from rtcwm.model.schedule import euler, schedule
from rtcwm.train.bank import Bank, Draw
from rtcwm.train.span import SpanNoise


class Documents(Attend):
    """Full attention inside each of `count` documents of equal length that lie one after the other in a sequence.

    The rotary angles are those of one document.
    """

    def __init__(self, kernel: Kernel, count: int) -> None:
        self.kernel, self.count = kernel, count

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, rotary: Rotary) -> Tensor:
        q, k, v = (x[0].unflatten(0, (self.count, -1)) for x in (q, k, v))
        return self.kernel.fn(rotate(q, rotary), rotate(k, rotary), v).flatten(0, 1)[None]


def in_bf16(kernel: Kernel) -> Kernel:
    """The kernel with its inputs rounded to bf16 and its output in their former dtype: for fp32 weights on a GPU, whose
    fast kernels take half precision alone."""

    def rounded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return kernel.fn(*(x.to(torch.bfloat16) for x in (q, k, v))).to(q.dtype)

    return replace(kernel, fn=rounded, forward=None, backward=None)


def predict_velocities(
    model: MiniMaxH3Transformer3DModel,
    window: Window,
    layout: Layout,
    times: Tensor,
    kernel: Kernel,
    run: Run = call,
) -> Tensor:
    """Velocity ``[B, 24, T, h, w]`` fp32 of windows whose `video` holds noisy latents, each at its own model time.

    Equal to `blocks.predict_velocity` of one window after the other, with the stock rule for text and references.

    Args:
        layout: of one window, in stock order; times: model time 1 - sigma of every window ``[B]``.
    """
    batch = len(times)
    tables = [row_times(layout, time, "video") for time in times.unbind()]
    slots = tables[0][1]
    temb = time_embedding(model, torch.cat([table for table, _ in tables]))
    offsets = torch.arange(batch, device=times.device)[:, None] * len(tables[0][0])
    time_index = offsets + slots  # [B, S]
    adaln_index = (time_index * MODALITIES + layout.tags).flatten()
    hidden = embed(model, layout, window).flatten(0, 1)[None]
    attend = Documents(kernel, batch)
    hidden = run_blocks(model, hidden, temb, adaln_index, model.rope(layout.position_ids), attend, run)
    target = hidden[0].unflatten(0, (batch, -1)).index_select(1, layout.target_rows).flatten(0, 1)[None]
    target = model.norm_out(target, temb, time_index.index_select(1, layout.target_rows).flatten())
    rows = model.proj_out(target.to(dtype_of(model.proj_out))).float()
    rows = rows[0].unflatten(0, (batch, -1))
    return unpatchify(rows, layout.latents, layout.geometry.height, layout.geometry.width)


def noised(window: Window, noise: SpanNoise, sigma: Tensor) -> Window:
    """The windows as the network sees them: targets at their levels ``sigma [B]``, visual references noised to theirs,
    which the stock rule puts at model time max(t, 0.999)."""
    sigma = sigma.view(-1, 1, 1, 1, 1)
    return noise.on(window, sigma, sigma.clamp(max=1 - REFERENCE_TIME))


def window_losses(
    model: MiniMaxH3Transformer3DModel, window: Window, noise: SpanNoise, sigma: Tensor, kernel: Kernel, run: Run = call
) -> Tensor:
    """Mean squared velocity error of every window ``[B]`` fp32, at its level ``sigma [B]``."""
    layout = window.layout(stream=False)
    predicted = predict_velocities(model, noised(window, noise, sigma), layout, model_time(sigma), kernel, run)
    return (predicted - velocity(window.video, noise.video)).square().mean(dim=(1, 2, 3, 4))


def draw_noise(window: Window, generator: torch.Generator) -> SpanNoise:
    """Noise for a batch, drawn on the window's device, where the generator is."""

    def like(tensor: Tensor) -> Tensor:
        return torch.randn(tensor.shape, generator=generator, device=tensor.device)

    return SpanNoise(like(window.video), like(window.proxy), like(window.picture1))


def on_device(generator: torch.Generator, device: torch.device) -> torch.Generator:
    """A generator on the device, seeded as the given fresh one is: `Streams` names it, the device draws."""
    return torch.Generator(device).manual_seed(generator.initial_seed())


@dataclass(frozen=True, eq=False)
class Grid:
    """Held-out windows at fixed levels with fixed noise: losses that can be compared over a run and between runs.

    Attributes:
        bank: of held-out clips; windows: rows of its table ``[n]``; levels: noise levels, each of all windows.
    """

    bank: Bank
    windows: Tensor
    levels: tuple[float, ...]
    streams: Streams

    @classmethod
    def over(
        cls, bank: Bank, windows: int, streams: Streams, levels: tuple[float, ...] = (0.3, 0.6, 0.8, 0.95)
    ) -> "Grid":
        """Windows spread evenly over the bank's."""
        rows = torch.linspace(0, bank.windows - 1, min(windows, bank.windows)).round().long()
        return cls(bank, rows.to(bank.device), levels, streams)

    @torch.no_grad()
    def losses(self, model: MiniMaxH3Transformer3DModel, kernel: Kernel, run: Run) -> dict[str, float]:
        """Mean loss at every level under "true/<level>", with the proxies of other windows under "foreign/<level>", and
        their means "true" and "foreign". The difference tells how much the model follows its proxy."""
        truth = self.bank.truth(self.windows)
        found = {}
        for name, draw in (("true", truth), ("foreign", _exchanged(truth))):
            window = self.bank.batch(draw)
            for index, level in enumerate(self.levels):
                noise = draw_noise(window, on_device(self.streams.own("held-out noise", index), self.bank.device))
                sigma = torch.full(self.windows.shape, level, device=self.bank.device)
                found[f"{name}/{level}"] = window_losses(model, window, noise, sigma, kernel, run).mean().item()
            found[name] = sum(found[f"{name}/{level}"] for level in self.levels) / len(self.levels)
        return found

    @torch.no_grad()
    def sampled(
        self, model: MiniMaxH3Transformer3DModel, kernel: Kernel, run: Run, steps: int, level_shift: float
    ) -> dict[str, float]:
        """Samples the windows with their own proxies by Euler steps and holds them against the truth.

        Returns:
            "latent_error": mean squared error of the latents; "psnr": of the decoded frames of the whole chunks, in dB,
            against the decoded truth (the codec's own loss is not in it).
        """
        window = self.bank.batch(self.bank.truth(self.windows))
        layout, levels = window.layout(stream=False), schedule(steps, level_shift).to(self.bank.device)
        noise = draw_noise(window, on_device(self.streams.own("sampled noise", 0), self.bank.device))
        state = noise.video
        for sigma, following in zip(levels[:-1], levels[1:]):
            seen = replace(noised(window, noise, sigma.expand(len(state))), video=state)
            times = model_time(sigma).expand(len(state))
            predicted = predict_velocities(model, seen, layout, times, kernel, run)
            state = euler(state, clean_from_velocity(state, predicted, sigma), sigma, following)
        whole, codec = slice(window.latents - window.latents % CHUNK_LATENTS), load_codec()
        errors = []
        for sample, truth in zip(state[:, :, whole].cpu(), window.video[:, :, whole].cpu(), strict=True):
            difference = codec.decode(sample).astype(float) - codec.decode(truth)
            errors.append((difference**2).mean())
        psnr = 10 * math.log10(255**2 / (sum(errors) / len(errors)))
        return {"latent_error": (state - window.video).square().mean().item(), "psnr": psnr}


def _exchanged(draw: Draw) -> Draw:
    """The same windows, each with the proxy of the one half the grid away: of another clip, where there are several."""
    return replace(draw, proxy=draw.proxy.roll(len(draw.proxy) // 2))
