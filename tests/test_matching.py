"""The distribution-matching loss: its gradient against the formula, and against what the formula stands for."""

import math

import pytest
import torch

from rtcwm.model.matching import NORMALISER_FLOOR, matching_loss, score_level
from rtcwm.model.objectives import add_noise


def latents(seed: int, batch: int = 1) -> torch.Tensor:
    return torch.randn(batch, 24, 12, 2, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_gradient_is_the_formulas():
    clean, real, fake = latents(0, 2).requires_grad_(), latents(1, 2), latents(2, 2)
    matching = matching_loss(clean, [(real, fake)], live=7)
    matching.loss.backward()
    for sample in range(2):
        normaliser = (clean[sample] - real[sample]).abs().mean()
        expected = (fake - real)[sample, :, -7:] / normaliser / (2 * 24 * 7 * 4)  # the mean over live latents
        torch.testing.assert_close(clean.grad[sample, :, -7:], expected.detach())
    assert not clean.grad[:, :, :-7].any()
    scaled = ((fake - real)[:, :, -7:] / (clean - real).abs().mean(dim=(1, 2, 3, 4), keepdim=True)).detach()
    assert matching.loss.item() == pytest.approx(0.5 * scaled.square().mean().item())
    assert matching.gradient.item() == pytest.approx(scaled.abs().mean().item())
    assert matching.gap.item() == pytest.approx((fake - real).abs().mean().item())
    to_fake, to_real = ((score - clean)[:, :, -7:].flatten() for score in (fake, real))
    expected = torch.dot(to_fake, to_real) / to_fake.norm() / to_real.norm()
    assert matching.cosine.item() == pytest.approx(expected.item())


def test_several_draws_average_their_gradients():
    clean = latents(0, 2)
    pairs = [(latents(1, 2), latents(2, 2)), (3 * latents(3, 2), latents(4, 2))]

    def gradient(scores):
        leaf = clean.clone().requires_grad_()
        matching_loss(leaf, scores, live=7).loss.backward()
        return leaf.grad

    torch.testing.assert_close(gradient(pairs), (gradient(pairs[:1]) + gradient(pairs[1:])) / 2)


def test_the_share_of_live_latents_does_not_scale_the_gradient():
    """Twice as many live latents share the mean: the gradient of one is half as large, not a matter of the window."""
    clean, real, fake = latents(0), latents(1), latents(2)
    norms = {}
    for live in (3, 6):
        leaf = clean.clone().requires_grad_()
        matching_loss(leaf, [(real, fake)], live).loss.backward()
        norms[live] = leaf.grad[:, :, -3:]
    torch.testing.assert_close(norms[3], 2 * norms[6])


def test_scores_that_agree_move_nothing_and_a_perfect_teacher_does_not_divide_by_zero():
    clean, score = latents(0).requires_grad_(), latents(1)
    matching_loss(clean, [(score, score.clone())], 5).loss.backward()
    assert not clean.grad.any()
    clean = latents(0).requires_grad_()
    matching = matching_loss(clean, [(clean.detach(), clean.detach() + 1e-3)], 12)
    matching.loss.backward()
    assert torch.isfinite(clean.grad).all()
    assert matching.gradient.item() == pytest.approx(1e-3 / NORMALISER_FLOOR, rel=1e-6)


def kl(mean: float, std: float, real_mean: float, real_std: float, sigma: float) -> float:
    """KL divergence of two normal distributions after noising: x_t = (1 - sigma) x0 + sigma eps."""
    alpha = 1 - sigma
    var, real_var = alpha**2 * std**2 + sigma**2, alpha**2 * real_std**2 + sigma**2
    return 0.5 * (math.log(real_var / var) + (var + alpha**2 * (mean - real_mean) ** 2) / real_var - 1)


def posterior_mean(noisy: torch.Tensor, mean: float, std: float, sigma: float) -> torch.Tensor:
    """E[x0 | x_t] of a normal x0: what an ideal network predicts."""
    alpha = 1 - sigma
    return mean + alpha * std**2 / (alpha**2 * std**2 + sigma**2) * (noisy - alpha * mean)


@pytest.mark.parametrize("sigma", [0.3, 0.7])
def test_the_gradient_is_the_slope_of_the_divergence(sigma):
    """A student N(m, s) against a teacher N(mr, sr), both scored exactly. With x0 = (x_t + sigma^2 score) / (1 -
    sigma), dKL/dm = (1 - sigma)^2 / sigma^2 E[x0_fake - x0_real]; the loss divides by its normaliser and by the
    latents."""
    mean, std, real_mean, real_std = 0.8, 0.6, -0.4, 1.1
    base, noise = latents(3), latents(4)
    # Mirrored samples and noises make every linear expectation exact.
    base, noise = torch.cat([base, -base]), torch.cat([noise, -noise])
    shape = torch.tensor(mean, dtype=torch.float64, requires_grad=True)
    clean = shape + std * base
    noisy = add_noise(clean.detach(), noise, sigma)
    fake, real = posterior_mean(noisy, mean, std, sigma), posterior_mean(noisy, real_mean, real_std, sigma)
    step = 1e-5
    slope = (kl(mean + step, std, real_mean, real_std, sigma) - kl(mean - step, std, real_mean, real_std, sigma)) / (
        2 * step
    )
    gradient = 0.0
    for sample in range(2):  # each with a normaliser of its own
        leaf = clean[sample : sample + 1]
        matching = matching_loss(leaf, [(real[sample : sample + 1], fake[sample : sample + 1])], live=12)
        (one,) = torch.autograd.grad(matching.loss, shape, retain_graph=True)
        normaliser = (leaf - real[sample : sample + 1]).abs().mean()
        gradient += (one * normaliser).item() / 2
    assert gradient == pytest.approx(slope * sigma**2 / (1 - sigma) ** 2, rel=1e-6)


def test_levels_of_scores():
    generator, twin = torch.Generator().manual_seed(0), torch.Generator().manual_seed(0)
    sigma, uniform = score_level(generator, 12.0)
    expected = 0.02 + 0.96 * torch.rand((), generator=twin).item()
    assert uniform == pytest.approx(expected, rel=1e-6)
    assert sigma == pytest.approx(12 * expected / (1 + 11 * expected), rel=1e-6)
    uniforms = [score_level(generator, 12.0)[1] for _ in range(3000)]
    assert min(uniforms) >= 0.02 and max(uniforms) <= 0.98
    assert sum(uniforms) / 3000 == pytest.approx(0.5, abs=0.02)
