"""Noise levels, velocities and the objectives of streaming training.

Conventions of MiniMax-H3: model time t = 1 - sigma (t = 1 is clean), ``x_t = (1 - sigma) x0 + sigma eps``, and the
network predicts the velocity ``v = x0 - eps``. Fed sigma in place of t, or the opposite sign, training still lowers
its loss and learns nonsense, so nothing outside this module spells these formulas out.

An objective draws one noise level and one loss weight for every chunk of a span. It decides nothing else: the same
packed rows, the same mask and the same number of forwards serve every objective.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch


def shift(sigma: torch.Tensor, amount: float) -> torch.Tensor:
    """Moves noise levels towards 1: ``s sigma / (1 + (s - 1) sigma)`` (Esser et al. 2024, eq. 23). Any shape."""
    return amount * sigma / (1 + (amount - 1) * sigma)


def add_noise(clean: torch.Tensor, noise: torch.Tensor, sigma: torch.Tensor | float) -> torch.Tensor:
    """``x_t = (1 - sigma) x0 + sigma eps``; sigma broadcasts against the latents ``[B, 24, T, h, w]``."""
    return (1 - sigma) * clean + sigma * noise


def velocity(clean: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """The network's target ``v = x0 - eps``, the derivative of x_t by the model time t = 1 - sigma."""
    return clean - noise


def clean_from_velocity(noisy: torch.Tensor, predicted: torch.Tensor, sigma: torch.Tensor | float) -> torch.Tensor:
    """The clean latents that a velocity implies: ``x0 = x_t + sigma v``."""
    return noisy + sigma * predicted


def model_time(sigma: torch.Tensor) -> torch.Tensor:
    """What the network is fed: ``t = 1 - sigma``, unscaled in [0, 1]."""
    return 1 - sigma


def on_grid(sigma: torch.Tensor, steps: int | None) -> torch.Tensor:
    """The nearest of the noise levels ``k / steps``, which a table of model times holds; None leaves levels alone."""
    return sigma if steps is None else (sigma * steps).round() / steps


def per_latent(levels: torch.Tensor, latents_a_chunk: int) -> torch.Tensor:
    """Levels of chunks ``[chunks]`` as ``[1, 1, chunks * latents_a_chunk, 1, 1]``, to broadcast against latents."""
    return levels.repeat_interleave(latents_a_chunk)[None, None, :, None, None]


@dataclass(frozen=True)
class Levels:
    """What an objective decides for one span.

    Attributes:
        sigma: noise level of every chunk, ``[chunks]`` fp32 in [0, 1].
        weight: weight of every chunk in the loss, ``[chunks]`` fp32, not all zero.
    """

    sigma: torch.Tensor
    weight: torch.Tensor


Objective = Callable[[int, float, torch.Generator], Levels]
OBJECTIVES: dict[str, Objective] = {}


def objective(name: str) -> Callable[[Objective], Objective]:
    """Registers a function ``(chunks, level_shift, generator) -> Levels`` under a name."""

    def register(function: Objective) -> Objective:
        OBJECTIVES[name] = function
        return function

    return register


@objective("df")
def diffusion_forcing(chunks: int, level_shift: float, generator: torch.Generator) -> Levels:
    """Diffusion forcing (Chen et al. 2024): every chunk draws a noise level of its own, all chunks are learnt."""
    sigma = shift(torch.rand(chunks, generator=generator), level_shift)
    return Levels(sigma, torch.ones(chunks))


@objective("tf")
def teacher_forcing(chunks: int, level_shift: float, generator: torch.Generator) -> Levels:
    """Teacher forcing: one chunk, drawn uniformly, is learnt from clean history.

    Later chunks are pure noise of weight zero; the mask keeps them out of sight, and the shape of a step constant.
    """
    learnt = int(torch.randint(chunks, (1,), generator=generator))
    sigma = torch.zeros(chunks)
    sigma[learnt] = shift(torch.rand(1, generator=generator), level_shift)[0]
    sigma[learnt + 1 :] = 1.0
    weight = torch.zeros(chunks)
    weight[learnt] = 1.0
    return Levels(sigma, weight)


CAUSAL_OBJECTIVES = (*OBJECTIVES, "dmd")
"""What the files of adapters that know the causal layout alone say they were trained for: these objectives, whose
adapters take many steps a chunk, and distillation, whose students take few."""


def keep_first_clean(levels: Levels) -> Levels:
    """The same levels with chunk 0 clean and out of the loss; where it alone was learnt, chunk 1 takes its place."""
    sigma, weight = levels.sigma.clone(), levels.weight.clone()
    sigma[0] = weight[0] = 0
    if not weight.any():
        sigma[1], weight[1] = levels.sigma[0], 1
    return Levels(sigma, weight)


def chunk_losses(predicted: torch.Tensor, clean: torch.Tensor, noise: torch.Tensor, chunks: int) -> torch.Tensor:
    """Mean squared velocity error of every chunk, fp32.

    Args:
        predicted: velocity ``[B, 24, T, h, w]``; clean, noise: the latents and the noise of the same shape.
        chunks: chunks in T; each holds T / chunks latents.

    Returns:
        ``[chunks]``.
    """
    error = (predicted.float() - velocity(clean, noise).float()).square()
    return error.unflatten(2, (chunks, -1)).mean(dim=(0, 1, 3, 4, 5))


def weighted_loss(losses: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Mean over chunks of positive weight: ``sum(w l) / sum(w)``; a scalar with a graph."""
    return (losses * weight).sum() / weight.sum()
