"""One span through the adapted base: from clean latents and noise levels to a loss for every chunk.

Training and validation share this, so that a held-out loss measures what training minimises.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from diffusers import MiniMaxH3Transformer3DModel

from rtcwm.errors import UserError
from rtcwm.model.attention import Kernel, make_attend
from rtcwm.model.blocks import predict_velocity
from rtcwm.model.layout import CHUNK_LATENTS, REFERENCE_TIME
from rtcwm.model.masks import Rule
from rtcwm.model.objectives import add_noise, chunk_losses, model_time, per_latent
from rtcwm.model.packing import Window


@dataclass(frozen=True)
class SpanNoise:
    """The noise of one span: of its target ``[B, 24, T, h, w]``, and of its visual references, each in its shape."""

    video: torch.Tensor
    proxy: torch.Tensor
    picture1: torch.Tensor

    @classmethod
    def draw(cls, window: Window, *generators: torch.Generator) -> "SpanNoise":
        """Standard normal noise for a window, drawn on the CPU (the same numbers on every device) and moved to it.

        Args:
            generators: one for every request of the batch, so that a request's noise is its own whatever the batch.
        """

        def like(tensor: torch.Tensor) -> torch.Tensor:
            return batch_noise(tensor.shape, generators).to(tensor.device)

        return cls(like(window.video), like(window.proxy), like(window.picture1))

    def on(self, window: Window, sigma: torch.Tensor | float, reference: torch.Tensor | float) -> Window:
        """The window with this noise: its target at ``sigma``, its visual references at ``reference``; numbers, or
        tensors that go with ``[B, 24, T, h, w]``."""
        return replace(
            window,
            video=add_noise(window.video, self.video, sigma),
            proxy=add_noise(window.proxy, self.proxy, reference),
            picture1=add_noise(window.picture1, self.picture1, reference),
        )

    def to(self, device: torch.device) -> "SpanNoise":
        return SpanNoise(self.video.to(device), self.proxy.to(device), self.picture1.to(device))


def batch_noise(shape: Sequence[int], generators: Sequence[torch.Generator]) -> torch.Tensor:
    """Standard normal noise ``[B, ...]`` on the CPU, each of the B requests from its own generator."""
    if len(generators) != shape[0]:
        raise ValueError(f"{len(generators)} generators for a batch of {shape[0]}")
    return torch.cat([torch.randn((1, *shape[1:]), generator=generator) for generator in generators])


def stack(windows: Sequence[Window]) -> Window:
    """Windows of one layout as one batch.

    Raises:
        UserError: they differ in a size, such as the number of text rows.
    """
    first = windows[0]
    sizes = [tuple(getattr(window, item.name).shape[1:] for item in fields(Window)) for window in windows]
    if any(size != sizes[0] for size in sizes) or any(not torch.equal(w.text_tags, first.text_tags) for w in windows):
        raise UserError(
            "--batch needs windows of one layout, and these differ in their text rows or picture sizes; "
            "set --batch 1 and accumulate instead"
        )
    parts = {item.name: torch.cat([getattr(window, item.name) for window in windows]) for item in fields(Window)}
    return replace(first, **parts | {"text_tags": first.text_tags})


def noised(window: Window, noise: SpanNoise, sigma: torch.Tensor) -> Window:
    """The window as the network sees it: target chunks at their levels ``sigma [chunks]``, visual references at theirs
    (model time 0.999: the release really noises them)."""
    return noise.on(window, per_latent(sigma, CHUNK_LATENTS), 1 - REFERENCE_TIME)


def span_losses(
    model: MiniMaxH3Transformer3DModel,
    window: Window,
    noise: SpanNoise,
    sigma: torch.Tensor,
    kernel: Kernel,
    rule: Rule,
    run: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """Mean squared velocity error of every chunk of a span, ``[chunks]`` fp32, under the causal mask.

    Args:
        window: clean latents on the model's device; sigma: noise level of every chunk ``[chunks]``, on the CPU.
        run: how a block is run (adapter, checkpointing), see `Activations.runner`.
    """
    layout = window.layout(stream=True)
    attend = make_attend(kernel, layout, rule)
    noisy = noised(window, noise, sigma.to(layout.device))
    predicted = predict_velocity(model, noisy, layout, model_time(sigma), attend, run=run)
    return chunk_losses(predicted, window.video, noise.video, window.chunks)
