"""Conventions of time, noise and velocity as identities; the objectives and the loss against plain formulas."""

from dataclasses import replace

import pytest
import torch
from diffusers import MiniMaxH3Scheduler
from small import random_window

from rtcwm.engine.streams import Streams
from rtcwm.errors import UserError
from rtcwm.model.objectives import (
    OBJECTIVES,
    add_noise,
    chunk_losses,
    clean_from_velocity,
    model_time,
    per_latent,
    shift,
    velocity,
    weighted_loss,
)
from rtcwm.train.span import SpanNoise, stack


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_velocity_gives_back_the_clean_latents_at_every_level():
    clean, noise = draw(0, 1, 24, 5, 2, 2), draw(1, 1, 24, 5, 2, 2)
    for sigma in (0.0, 0.1, 0.625, 1.0):
        noisy = add_noise(clean, noise, sigma)
        torch.testing.assert_close(clean_from_velocity(noisy, velocity(clean, noise), sigma), clean)
    assert torch.equal(add_noise(clean, noise, 0.0), clean)
    assert torch.equal(add_noise(clean, noise, 1.0), noise)


def test_velocity_is_the_derivative_of_the_noisy_latents_by_model_time():
    clean, noise, step = draw(2, 24), draw(3, 24), 1e-6
    later, earlier = (add_noise(clean, noise, sigma) for sigma in (0.4 - step, 0.4 + step))
    times = model_time(torch.tensor([0.4 - step, 0.4 + step], dtype=torch.float64))
    slope = (later - earlier) / (times[0] - times[1])
    torch.testing.assert_close(slope, velocity(clean, noise), rtol=1e-6, atol=1e-6)
    assert model_time(torch.tensor(0.0)) == 1.0  # clean


def test_shift_against_its_formula_and_diffusers_scheduler():
    assert shift(torch.linspace(1, 0, 5), 5.0).tolist() == pytest.approx([1, 0.9375, 5 / 6, 0.625, 0], abs=1e-7)
    scheduler = MiniMaxH3Scheduler(shift=12.0)
    scheduler.set_timesteps(7)
    sigmas = 1 - scheduler.timesteps.double()  # the scheduler counts model time
    linear = sigmas / (12 - 11 * sigmas)  # the inverse of the shift
    torch.testing.assert_close(shift(linear, 12.0), sigmas)
    assert torch.equal(shift(sigmas, 1.0), sigmas)


def test_diffusion_forcing_draws_a_shifted_level_for_every_chunk():
    generator, twin = torch.Generator().manual_seed(4), torch.Generator().manual_seed(4)
    levels = OBJECTIVES["df"](6, 3.0, generator)
    uniform = torch.rand(6, generator=twin)
    torch.testing.assert_close(levels.sigma, 3 * uniform / (1 + 2 * uniform))
    assert levels.weight.tolist() == [1] * 6
    assert len(set(levels.sigma.tolist())) == 6
    many = torch.cat([OBJECTIVES["df"](6, 3.0, generator).sigma for _ in range(4000)])
    # Median of the uniform level is 1/2, so that of the shifted one is 3/4.
    assert many.median().item() == pytest.approx(0.75, abs=0.01)


def test_teacher_forcing_learns_one_chunk_from_clean_history():
    generator, learnt = torch.Generator().manual_seed(5), []
    for _ in range(200):
        levels = OBJECTIVES["tf"](6, 3.0, generator)
        (chunk,) = levels.weight.nonzero().flatten().tolist()
        assert levels.sigma[:chunk].tolist() == [0] * chunk
        assert levels.sigma[chunk + 1 :].tolist() == [1] * (5 - chunk)
        assert 0 < levels.sigma[chunk] < 1
        learnt.append(chunk)
    assert set(learnt) == set(range(6))


def test_loss_against_a_few_lines():
    clean, noise, predicted = (draw(seed, 2, 24, 10, 2, 4).float() for seed in (6, 7, 8))
    losses = chunk_losses(predicted, clean, noise, chunks=2)
    expected = [((predicted - (clean - noise))[:, :, 5 * k : 5 * k + 5] ** 2).mean() for k in range(2)]
    torch.testing.assert_close(losses, torch.stack(expected))
    assert weighted_loss(losses, torch.tensor([0.0, 2.0])) == losses[1]
    torch.testing.assert_close(
        weighted_loss(losses, torch.ones(2)), (predicted - (clean - noise)).square().mean(), rtol=1e-6, atol=0
    )


def test_levels_spread_over_the_latents_of_their_chunk():
    spread = per_latent(torch.tensor([0.25, 0.5]), 5)
    assert spread.shape == (1, 1, 10, 1, 1)
    assert spread.flatten().tolist() == [0.25] * 5 + [0.5] * 5


def test_streams_are_named_and_counted():
    streams, twin = Streams(3), Streams(3)

    def number(generator: torch.Generator) -> float:
        return torch.rand(1, generator=generator).item()

    assert number(streams.own("noise", 7)) == number(twin.own("noise", 7))
    others = [
        twin.own("noise", 8), twin.own("levels", 7), twin.shared("noise", 7), Streams(4).own("noise", 7),
    ]  # fmt: skip
    values = {number(generator) for generator in others} | {number(streams.own("noise", 7))}
    assert len(values) == 5


def test_a_request_keeps_its_noise_in_any_batch():
    windows = [random_window(10, seed=seed) for seed in (0, 1, 2)]

    def generators() -> list[torch.Generator]:
        return [torch.Generator().manual_seed(seed) for seed in (10, 11, 12)]

    batch = stack(windows)
    together = SpanNoise.draw(batch, *generators())
    for index, (window, generator) in enumerate(zip(windows, generators(), strict=True)):
        alone = SpanNoise.draw(window, generator)
        for name in ("video", "proxy", "picture1"):
            assert torch.equal(getattr(together, name)[index : index + 1], getattr(alone, name))
            assert torch.equal(getattr(batch, name)[index : index + 1], getattr(window, name))
    with pytest.raises(ValueError, match="2 generators for a batch of 3"):
        SpanNoise.draw(batch, *generators()[:2])
    with pytest.raises(UserError, match="--batch needs windows of one layout"):
        stack([windows[0], replace(windows[1], text_tags=1 - windows[1].text_tags)])
