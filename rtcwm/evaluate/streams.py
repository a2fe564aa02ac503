"""Latents of one model for all clips: windows of a teacher, streams of a student."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from diffusers import MiniMaxH3Transformer3DModel
from torch import Tensor

from rtcwm.evaluate.clips import Truth
from rtcwm.evaluate.models import Model
from rtcwm.model.attention import Kernel
from rtcwm.model.blocks import Run, predict_velocity
from rtcwm.model.cache import rollout_memory
from rtcwm.model.layout import CHUNK_LATENTS, REFERENCE_TIME, SPAN_CHUNKS, TEACHER_LATENTS
from rtcwm.model.lora import Adapter, Slot
from rtcwm.model.objectives import add_noise, clean_from_velocity, model_time
from rtcwm.model.packing import Window
from rtcwm.model.sampler import Noise, Stream
from rtcwm.model.schedule import euler
from rtcwm.train.inference import clip_noise, conditions

TEACHER_CHUNKS = TEACHER_LATENTS // CHUNK_LATENTS
"""Whole chunks of a teacher's window; its last two latents begin another."""

MOST_CLIPS, MOST_CACHE = 16, 8 * 2**30
"""Clips of a batch, and bytes that their keys and values may take, where no batch size is given."""


@dataclass
class Maker:
    """Runs models on one base.

    Args:
        model: the base with its processors installed; slot: of its adapters.
        batch: clips of a forward; None for `MOST_CLIPS` or fewer, by the size of their keys and values.
        progress: called with the number of clips times chunks that were finished.
    """

    model: MiniMaxH3Transformer3DModel
    slot: Slot
    kernel: Kernel
    truth: Truth
    seed: int
    device: torch.device
    batch: int | None = None
    progress: Callable[[int], None] = lambda done: None

    @torch.no_grad()
    def latents(self, model: Model, adapter: Adapter | None) -> Tensor:
        """What a model makes of every clip, [clips, 24, 5 n, h, w] float32 on the CPU; n is the truth's number of
        chunks, for a teacher at most 7."""
        teacher = model.kind == "teacher"
        length = TEACHER_LATENTS if teacher else self.truth.chunks * CHUNK_LATENTS
        made: dict[int, Tensor] = {}
        for members, window in self.truth.batches(length, model.picture1, self.batch or self._fitting()):
            noise = clip_noise(self.seed, [self.truth.clips[index].id for index in members])
            window = window.to(self.device)
            if teacher:
                chunks = min(TEACHER_CHUNKS, self.truth.chunks)
                video = teacher_window(self.model, window, model, noise, self.slot.runner(adapter))[
                    :, :, : chunks * CHUNK_LATENTS
                ]
                self.progress(len(members) * chunks)
            else:
                video = self._stream(window, model, noise, self.slot.runner(adapter))
            made |= dict(zip(members, video.cpu(), strict=True))
        return torch.stack([made[index] for index in range(len(self.truth.clips))])

    def _stream(self, window: Window, model: Model, noise: Noise, run: Run) -> Tensor:
        stream = Stream(self.model, self.kernel, conditions(window, self.truth.root), model.sampling, noise, run)
        chunks = []
        for proxy, true in zip(window.proxy.split(CHUNK_LATENTS, dim=2), window.video.split(CHUNK_LATENTS, dim=2)):
            chunks.append(stream.next_chunk(proxy))
            if model.forced:
                stream.replace_history(true)
            self.progress(len(window.text))
        return torch.cat(chunks, dim=2)

    def _fitting(self) -> int:
        window = self.truth.window(self.truth.clips[0], CHUNK_LATENTS)
        one = rollout_memory(self.model, window.layout(stream=True), SPAN_CHUNKS + 1, (), kv_reuse=True).peak
        return max(1, min(MOST_CLIPS, MOST_CACHE // one))


def teacher_window(model: MiniMaxH3Transformer3DModel, window: Window, row: Model, noise: Noise, run: Run) -> Tensor:
    """Samples a bidirectional window from pure noise with Euler's method, [B, 24, 37, h, w] float32.

    The layout is the one that teachers are trained in: stock order, text at the target's time, Picture 1 the start
    frame, visual references at model time max(t, 0.999). The noise is that of the chunks that the window covers.
    """
    device = window.video.device

    def drawn(kind: str, like: Tensor) -> Tensor:
        batch, channels, latents, *size = like.shape
        chunks = range(-(-latents // CHUNK_LATENTS))
        parts = [noise(kind, chunk, 0, (batch, channels, CHUNK_LATENTS, *size)) for chunk in chunks]
        return torch.cat(parts, dim=2)[:, :, :latents].to(device)

    state = drawn("target", window.video)
    of_proxy = drawn("proxy", window.proxy)
    of_picture = noise("picture1", 0, 0, tuple(window.picture1.shape)).to(device)
    layout, sigmas = window.layout(stream=False), row.sampling.sigmas
    for sigma, following in zip(sigmas[:-1], sigmas[1:]):
        reference = min(sigma.item(), 1 - REFERENCE_TIME)
        seen = replace(
            window,
            video=state,
            proxy=add_noise(window.proxy, of_proxy, reference),
            picture1=add_noise(window.picture1, of_picture, reference),
        )
        velocity = predict_velocity(model, seen, layout, model_time(sigma), None, text_time="video", run=run)
        state = euler(state, clean_from_velocity(state, velocity, sigma), sigma, following)
    return state
