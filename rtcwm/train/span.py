"""One span through the adapted base: from clean latents and noise levels to a loss for every chunk.

Training and validation share this, so that a held-out loss measures what training minimises.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from diffusers import MiniMaxH3Transformer3DModel

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
    def draw(cls, window: Window, generator: torch.Generator) -> "SpanNoise":
        """Standard normal noise for a window, drawn on the CPU (the same numbers on every device) and moved to it."""

        def like(tensor: torch.Tensor) -> torch.Tensor:
            return torch.randn(tensor.shape, generator=generator).to(tensor.device)

        return cls(like(window.video), like(window.proxy), like(window.picture1))


def noised(window: Window, noise: SpanNoise, sigma: torch.Tensor) -> Window:
    """The window as the network sees it: target chunks at their levels ``sigma [chunks]``, visual references at theirs
    (model time 0.999: the release really noises them)."""
    reference = 1 - REFERENCE_TIME
    return replace(
        window,
        video=add_noise(window.video, noise.video, per_latent(sigma, CHUNK_LATENTS)),
        proxy=add_noise(window.proxy, noise.proxy, reference),
        picture1=add_noise(window.picture1, noise.picture1, reference),
    )


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
        window: clean latents on the model's device; sigma: noise level of every chunk ``[chunks]``, on the device.
        run: how a block is run (adapter, checkpointing), see `Activations.runner`.
    """
    layout = window.layout(stream=True)
    attend = make_attend(kernel, layout, rule)
    predicted = predict_velocity(model, noised(window, noise, sigma), layout, model_time(sigma), attend, run=run)
    return chunk_losses(predicted, window.video, noise.video, window.chunks)
