"""Distribution matching (Yin et al. 2024, DMD; and DMD2): the student's loss from two scores of its own samples.

The gradient of the Kullback-Leibler divergence between the student's distribution and the teacher's, at a noised
sample, is the difference of two scores; in terms of clean predictions it is ``x0_fake - x0_real``, divided by the size
of ``x - x0_real`` so that all noise levels weigh alike (DMD, eq. 7 and 8). The loss is a quadratic whose gradient is
that:

    loss = 0.5 mean || x - sg(x - (x0_fake - x0_real) / mean|x - x0_real|) ||^2

Several draws of level and noise for one sample average their differences, each with its own normaliser: the gradient's
expectation stays, its variance falls, for two forwards without a graph a draw.

The outer mean runs over the latents that carry a graph alone. Over the whole window it would scale the gradient by the
share of it that is alive. The normaliser is a mean over the whole window, of every sample of the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rtcwm.model.objectives import on_grid, shift

NORMALISER_FLOOR = 1e-3
"""Smallest normaliser: a teacher that agrees with the sample would otherwise divide by nothing. Latents have size 1."""

SCORE_RANGE = (0.02, 0.98)
"""The uniform numbers that noise levels of scores are shifted from, without the two ends."""


@dataclass(frozen=True)
class Matching:
    """The loss, and what tells a healthy one from a collapsing one.

    Attributes:
        loss: scalar with a graph.
        gradient: mean |(x0_fake - x0_real) / normaliser| over the live latents.
        cosine: between x0_fake - x and x0_real - x over the live latents; 1 when critic and teacher agree.
        gap: mean |x0_fake - x0_real| over the window.
    """

    loss: torch.Tensor
    gradient: torch.Tensor
    cosine: torch.Tensor
    gap: torch.Tensor


def score_level(generator: torch.Generator, amount: float, grid: int | None = None) -> tuple[float, float]:
    """One noise level for a window of latents, ``shift(U(0.02, 0.98), amount)``, on a grid of levels if there is one,
    and the uniform number behind it."""
    low, high = SCORE_RANGE
    uniform = low + (high - low) * torch.rand((), generator=generator)
    return on_grid(shift(uniform, amount), grid).item(), uniform.item()


def matching_loss(clean: torch.Tensor, scores: Sequence[tuple[torch.Tensor, torch.Tensor]], live: int) -> Matching:
    """The student's loss for one window.

    Args:
        clean: the rollout's latents ``[B, 24, T, h, w]``; its last ``live`` latents carry a graph.
        scores: of every draw, the clean predictions (real, fake) of teacher and critic for the same noised window,
            without a graph.
    """
    with torch.no_grad():
        draws = [_difference(clean, real, fake, live) for real, fake in scores]
        gradient, cosine, gap = (torch.stack(values).mean(dim=0) for values in zip(*draws, strict=True))
        target = clean[:, :, -live:] - gradient
    loss = 0.5 * (clean[:, :, -live:] - target).square().mean()
    return Matching(loss, gradient.abs().mean(), cosine, gap)


def _difference(clean: torch.Tensor, real: torch.Tensor, fake: torch.Tensor, live: int) -> tuple[torch.Tensor, ...]:
    """Of one draw: the normalised difference of the scores over the live latents, cosine and gap as in `Matching`."""
    normaliser = (clean - real).abs().mean(dim=(1, 2, 3, 4), keepdim=True).clamp(min=NORMALISER_FLOOR)
    to_fake, to_real = ((score - clean)[:, :, -live:].flatten() for score in (fake, real))
    cosine = torch.nn.functional.cosine_similarity(to_fake, to_real, dim=0)
    return ((fake - real) / normaliser)[:, :, -live:], cosine, (fake - real).abs().mean()
