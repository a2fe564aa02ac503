"""Evaluation: measures against formulas and libraries, streams against direct calls, the command and its faults."""

import json
import math
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image
from scipy.linalg import sqrtm
from scipy.ndimage import gaussian_filter
from small import CONFIG, random_window, small_model
from stream_reference import CPU, masked_velocity, noise, request, sample
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rtcwm import cli
from rtcwm.data.clips import open_clips
from rtcwm.data.codec import load_codec
from rtcwm.errors import UserError
from rtcwm.evaluate import film, metrics, models, picture, report
from rtcwm.evaluate.clips import Truth, choose
from rtcwm.evaluate.command import Settings
from rtcwm.evaluate.evaluate import decoder, evaluate, prepare, stream_all
from rtcwm.evaluate.measures import MEASURES, compare
from rtcwm.evaluate.models import read_model
from rtcwm.evaluate.streams import Maker, teacher_window
from rtcwm.model.adapter_files import save_adapter
from rtcwm.model.attention import install
from rtcwm.model.kernels import resolve
from rtcwm.model.loading import build_base, open_base
from rtcwm.model.lora import Adapter, AdapterShape, inject
from rtcwm.model.objectives import clean_from_velocity
from rtcwm.model.packing import patchify
from rtcwm.model.sampler import Stream, rollout
from rtcwm.model.schedule import SamplerConfig, euler
from rtcwm.train.inference import Sampling, clip_noise, conditions
from rtcwm.train.span import SpanNoise
from rtcwm.train.teacher import Teacher

close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)


def frames(count: int = 5, height: int = 32, width: int = 48, seed: int = 0) -> torch.Tensor:
    """Smooth random pictures in 0.1..0.9."""
    values = np.random.default_rng(seed).standard_normal((count, height, width, 3))
    values = gaussian_filter(values, (0.5, 3, 3, 0))
    low, high = values.min(), values.max()
    return torch.from_numpy(0.1 + 0.8 * (values - low) / (high - low)).float()


# Measures


def test_psnr():
    true = frames()
    close(metrics.psnr(true + 0.01, true), torch.full((5,), 40.0), rtol=1e-4, atol=1e-4)  # -20 log10(.01)
    loud = true + 0.05 * torch.randn(true.shape, generator=torch.Generator().manual_seed(1))
    close(metrics.psnr(loud, true), torch.full((5,), -20 * math.log10(0.05)), rtol=0, atol=0.3)
    assert metrics.psnr(true, true).tolist() == [metrics.PSNR_CAP] * 5
    one_step = true.clone()
    one_step[0, 0, 0, 0] += 1 / 255
    assert metrics.psnr(one_step, true)[0] < metrics.PSNR_CAP == metrics.psnr(one_step, true)[1]


def test_structural_similarity():
    """Wang et al. 2004, eq. 13, written out with scipy: Gaussian of 1.5 pixels over 11 x 11, inside the border."""
    true = frames(3)
    made = (true + 0.1 * frames(3, seed=1) - 0.05).clamp(0, 1)

    def mean(values):
        return gaussian_filter(values.double().numpy(), (0, 1.5, 1.5, 0), truncate=3.5)[:, 5:-5, 5:-5]

    mu_x, mu_y = mean(made), mean(true)
    var_x, var_y, cov = mean(made**2) - mu_x**2, mean(true**2) - mu_y**2, mean(made * true) - mu_x * mu_y
    ssim = (2 * mu_x * mu_y + 1e-4) * (2 * cov + 9e-4) / ((mu_x**2 + mu_y**2 + 1e-4) * (var_x + var_y + 9e-4))
    expected = torch.from_numpy(ssim.mean(axis=(1, 2, 3))).float()
    close(metrics.structural_similarity(made, true), expected, rtol=1e-3, atol=1e-3)
    close(metrics.structural_similarity(true, true), torch.ones(3))


def test_laplacian_energy():
    across = torch.arange(8.0)
    plane = (0.1 * across[:, None] + 0.05 * across)[None, :, :, None].expand(1, 8, 8, 3)
    close(metrics.laplacian_energy(plane), torch.zeros(1))
    checker = ((across[:, None] + across) % 2)[None, :, :, None].expand(1, 8, 8, 3)
    close(metrics.laplacian_energy(checker), torch.tensor([16.0]))  # four neighbours, each one step away
    true = frames()
    blurred = torch.from_numpy(gaussian_filter(true.numpy(), (0, 1, 1, 0)))
    assert (metrics.laplacian_energy(blurred) < 0.8 * metrics.laplacian_energy(true)).all()


def test_chroma_change_and_colour():
    red = torch.zeros(2, 4, 4, 3)
    red[..., 0] = 0.5
    assert metrics.chroma(red).tolist() == [0.5, 0.5] and metrics.chroma(torch.full((1, 4, 4, 3), 0.3)).item() == 0
    true = frames()
    assert metrics.change(true[:1].expand(3, -1, -1, -1)).tolist() == [0.0, 0.0]
    close(metrics.change(torch.stack([true[0], true[0] + 0.02, true[0] - 0.01])), torch.tensor([0.02, 0.03]))
    shifted = true + torch.tensor([0.1, 0.0, 0.0])
    close(metrics.colour_error(shifted, true), torch.tensor(255 * 0.1 / math.sqrt(3)), rtol=1e-4, atol=1e-4)


def test_frechet_distance():
    draw = np.random.default_rng(0)
    mix = draw.standard_normal((2, 6, 6))
    first, second = (draw.standard_normal((500, 6)) @ mix[k] + k for k in range(2))
    cov1, cov2 = (np.cov(rows.T, bias=True) for rows in (first, second))
    gap = ((first.mean(0) - second.mean(0)) ** 2).sum()
    expected = gap + np.trace(cov1 + cov2 - 2 * sqrtm(cov1 @ cov2).real)
    a, b = (metrics.moments(torch.from_numpy(rows)) for rows in (first, second))
    distance, of_means = metrics.frechet(a, b)
    assert distance == pytest.approx(expected, rel=1e-5) and of_means == pytest.approx(gap)
    halves = metrics.moments(torch.from_numpy(first.reshape(2, 250, 6)))
    close(halves.sum(dim=0), a)
    same, none = metrics.frechet(a, a)
    assert same == pytest.approx(0, abs=1e-9) and none == 0


def test_frechet_distance_of_known_gaussians():
    """Independent coordinates: sum of (m1 - m2)^2 + (s1 - s2)^2. Moments of 2 points m - s, m + s."""
    mean, spread = torch.tensor([[0.0, 1.0], [2.0, -1.0]]), torch.tensor([[1.0, 3.0], [0.5, 0.5]])
    sign = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
    made, true = (metrics.moments(mean[k] + sign * spread[k]) for k in range(2))
    distance, of_means = metrics.frechet(made, true, ridge=0)
    assert of_means == pytest.approx(4 + 4) and distance == pytest.approx(8 + 0.25 + 6.25)
    few = metrics.moments(torch.randn(3, 50, generator=torch.Generator().manual_seed(0)))  # fewer samples than values
    assert metrics.frechet(few, few)[0] == pytest.approx(0, abs=1e-3)


def test_slope():
    assert metrics.slope([1.0, 3.0, 5.0, 7.0]) == pytest.approx(2)
    assert metrics.slope([math.nan, 3.0, 5.0, math.inf, 9.0]) == pytest.approx(2)
    values = np.random.default_rng(0).standard_normal(9)
    assert metrics.slope(values) == pytest.approx(np.polyfit(range(9), values, 1)[0])
    assert math.isnan(metrics.slope([1.0])) and math.isnan(metrics.slope([math.nan, 2.0]))


# Comparisons; a "decoder" that shows the first channels of the latents, 17 frames a chunk


def show(latents):
    repeats = torch.tensor((1, 4, 4, 4, 4))
    for chunk in latents.split(5, dim=1):
        yield chunk[:3].repeat_interleave(repeats, dim=1).permute(1, 2, 3, 0)


def latents(clips: int = 2, chunks: int = 4, seed: int = 0) -> torch.Tensor:
    return torch.rand(clips, 24, 5 * chunks, 16, 16, generator=torch.Generator().manual_seed(seed))


def test_the_truth_is_perfect():
    true = latents()
    summary = report.summarise(compare(true, true, show))
    for name, measure in MEASURES.items():
        found = summary[name]
        for value in (found["all"], found["first_half"], found["last_half"], *found["chunks"][1:], *found["clips"]):
            assert value == pytest.approx(measure.perfect, abs=1e-6), name
        assert found["drift"] == pytest.approx(0, abs=1e-6)
    assert math.isnan(summary["jumps"]["chunks"][0])
    assert report.plain(summary)["jumps"]["chunks"][0] is None


def test_a_frozen_stream():
    true = latents()
    frozen = true[:, :, :1].expand_as(true)
    comparison = compare(frozen, true, show)
    assert comparison.value("motion") == 0 and math.isnan(comparison.value("jumps"))
    assert comparison.value("sharpness") == pytest.approx(1, abs=0.2) and comparison.value("frechet") > 0.5
    json.dumps(report.plain(report.summarise(comparison)), allow_nan=False)


def test_ratios_and_jumps():
    """A stream that moves half as much and jumps at borders by as much as the truth: jumps are twice the truth's."""
    steps = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0])
    border = 10.0

    def ramp(step):
        return torch.cat([k * (4 * step + border) + steps * step for k in range(3)])[None, None, :, None, None]

    made, true = (0.01 * ramp(step).expand(1, 24, 15, 12, 12) for step in (0.5, 1.0))
    comparison = compare(made, true, show)
    assert comparison.value("motion") == pytest.approx(0.5, rel=1e-5)
    assert comparison.value("jumps") == pytest.approx(2, rel=1e-5)
    assert comparison.value("jumps", [0, 1]) == pytest.approx(2, rel=1e-5)
    assert comparison.value("colour", [0]) == pytest.approx(255 * 0.01 * 0.5 * 4 * (1 + 2 + 3 + 4) / 17, rel=1e-5)


def test_halves_chunks_and_clips():
    true = latents(clips=3, chunks=5)
    made = true + 0.1 * torch.arange(1, 6).repeat_interleave(5)[:, None, None]
    made[2] += 0.2
    comparison = compare(made, true, show)
    found = comparison.summary("psnr")
    by_clip = torch.tensor(
        [[-20 * math.log10(0.1 * k + (0.2 if clip == 2 else 0)) for k in range(1, 6)] for clip in range(3)]
    )
    close(torch.tensor(found["chunks"]), by_clip.mean(0), rtol=1e-4, atol=1e-4)
    close(torch.tensor(found["clips"]), by_clip.mean(1), rtol=1e-4, atol=1e-4)
    assert found["first_half"] == pytest.approx(by_clip[:, :2].mean().item(), rel=1e-4)
    assert found["last_half"] == pytest.approx(by_clip[:, 3:].mean().item(), rel=1e-4)
    assert found["drift"] == pytest.approx(np.polyfit(range(5), by_clip.mean(0), 1)[0], rel=1e-4)
    rows = [patchify(side[:, :, 15:]).reshape(-1, 96).double().numpy() for side in (made, true)]
    cov1, cov2 = (np.cov(side.T, bias=True) + 1e-6 * np.eye(96) for side in rows)
    gap = ((rows[0].mean(0) - rows[1].mean(0)) ** 2).sum()
    expected = gap + np.trace(cov1 + cov2 - 2 * sqrtm(cov1 @ cov2).real)
    found = comparison.summary("frechet")
    assert found["last_half"] == pytest.approx(expected, rel=1e-4)
    assert comparison.value("frechet_mean", [3, 4]) == pytest.approx(gap, rel=1e-5)
    single = compare(made[:, :, :5], true, show).summary("psnr")
    assert single["first_half"] == single["last_half"] == single["all"] and math.isnan(single["drift"])


# Streams


def test_replaced_history():
    """The next chunks see the given latents in the place of the chunk: the masked forward of the window says so."""
    model = small_model()
    install(model, CPU)
    given, proxy = request(7)
    truth = random_window(latents=35, seed=5).video
    for kv_reuse in (False, True):
        config = SamplerConfig(steps=2, kv_reuse=kv_reuse)
        stream = Stream(model, CPU, given, config, noise)
        with pytest.raises(ValueError, match="None"):
            stream.replace_history(truth[:, :, :5])
        made = []
        for piece, true in zip(proxy.split(5, dim=2), truth.split(5, dim=2), strict=True):
            made.append(stream.next_chunk(piece))
            stream.replace_history(true)
        with pytest.raises(ValueError, match="shape"):
            stream.replace_history(truth)
        for chunk in (1, 5) if kv_reuse else (1, 5, 6):  # beyond six chunks reuse differs from a fresh window by design
            expected = sample_one(model, config, given, proxy, truth, chunk)
            torch.testing.assert_close(made[chunk], expected, rtol=2e-4, atol=2e-4)


def sample_one(model, config, given, proxy, truth, chunk):
    """A chunk after true history, by the reference of the sampler's tests."""
    done = list(truth[:, :, : 5 * chunk].split(5, dim=2))
    velocity = partial(masked_velocity, model, reference="prefix")

    def forced(request, state, sigma):
        return velocity(replace(request, done=done), state, sigma)

    return sample(forced, config, given, proxy[:, :, : 5 * (chunk + 1)], [1] * (chunk + 1))[chunk]


@pytest.fixture(scope="module")
def source(base_config):
    return open_base(str(base_config))


@pytest.fixture(scope="module")
def truth(clips_root):
    return choose(clips_root, None, 8, 3)


@pytest.fixture(scope="module")
def maker(source, truth):
    kernel = resolve("sdpa", "cpu")
    base = build_base(source, torch.device("cpu"), torch.float32)
    install(base, kernel)
    return Maker(base, inject(base), kernel, truth, seed=0, device=torch.device("cpu"))


NOISY = {"objective": "dmd", "steps": "4", "shift": "5.0", "history": "last-step", "history_level": "0.625"}


@pytest.fixture(scope="module")
def adapters(source, tmp_path_factory) -> dict[str, Path]:
    """Adapter files by what they say of themselves, each with weights of its own."""
    folder = tmp_path_factory.mktemp("adapters")
    codec = load_codec().identity["hash"]
    common = {"base": source.fingerprint, "span": "6", "codec": codec}
    schedule = {"steps": "2", "shift": "4.0", "history": "clean", "kv_reuse": "False"}
    said = {
        "df": common | {"objective": "df", "shift": "2.0", "steps": "any", "mask_rule": "own"},
        "dmd": common | {"objective": "dmd"} | schedule,
        "critic": common | {"objective": "critic"} | schedule,
        "foreign": common | {"base": "0" * 32},
        "recoded": common | {"codec": "other"},
        "silent": {},
        "noisy": common | NOISY,
        "unleveled": common | NOISY | {"history_level": "any"},
    }
    for seed, (name, metadata) in enumerate(said.items()):
        save_adapter(folder / f"{name}.safetensors", random_adapter(source.config, seed), metadata)
    return {name: folder / f"{name}.safetensors" for name in said}


def random_adapter(config, seed):
    adapter = Adapter(AdapterShape.of(config, rank=2))
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.normal_(0.0, 0.2, generator=draw)
    return adapter.requires_grad_(False)


def model_of(text, source):
    return read_model(text, source, load_codec().identity["hash"])


@pytest.mark.parametrize("text", ["x=base:few,steps=2", "x=base:many,steps=2,history=0.3,kv_reuse=false"])
def test_streams_are_rollouts(maker, source, truth, text):
    model = model_of(text, source)
    adapter = random_adapter(source.config, 7)
    found = maker.latents(model, adapter)
    clip = truth.clips[1]
    window = truth.window(clip, 40)
    config = SamplerConfig(
        steps=2, shift=model.sampling.shift, solver=model.sampling.solver, kv_reuse=model.sampling.kv_reuse
    )
    if model.kind == "many":  # a history level that no schedule has
        object.__setattr__(config, "history_level", lambda chunk: torch.tensor(0.3 if chunk else 0.0))
    run = maker.slot.runner(adapter)
    with torch.no_grad():
        given = conditions(window, truth.root)
        expected = rollout(
            maker.model, maker.kernel, given, window.proxy, config, clip_noise(0, [clip.id]), [1] * 8, run=run
        )
    close(found[1:2], torch.cat(expected, dim=2))
    assert not torch.allclose(found[1:2], maker.latents(model, None)[1:2], atol=0.01)


def test_forced_streams(maker, source, truth):
    """With true history every chunk but the first differs from the free stream's; the first is the same."""
    free, forced = (maker.latents(model_of(f"x=base:few,steps=2{more}", source), None) for more in ("", ",forced=true"))
    close(free[:, :, :5], forced[:, :, :5])
    gap = (free - forced).abs().unflatten(2, (8, 5)).amax(dim=(0, 1, 3, 4, 5))
    assert (gap[1:] > 1e-3).all()


def test_the_teachers_window(maker, source, truth):
    """Euler's method with the velocity of the teacher that distillation uses."""
    model = model_of("x=base:teacher,steps=3", source)
    adapter = random_adapter(source.config, 8)
    found = maker.latents(model, adapter)
    assert found.shape[2] == 35
    clip = truth.clips[2]
    window, draw = truth.window(clip, 37), clip_noise(0, [clip.id])

    def noise_of(kind, like):
        shape = (1, 24, 5, *like.shape[-2:])
        return torch.cat([draw(kind, chunk, 0, shape) for chunk in range(8)], dim=2)[:, :, :37]

    teacher = Teacher(maker.model, maker.kernel, "E", "released", "start", truth.root)
    state = noise_of("target", window.video)
    of_proxy, of_picture = noise_of("proxy", window.proxy), draw("picture1", 0, 0, tuple(window.picture1.shape))
    sigmas = model.sampling.sigmas
    with torch.no_grad():
        for sigma, following in zip(sigmas[:-1], sigmas[1:]):
            # a window of zeros under noise state / sigma is the state itself at that level
            empty = replace(window, video=torch.zeros_like(state))
            noised = SpanNoise(state / sigma, of_proxy, of_picture)
            velocity = teacher.velocity(empty, noised, sigma.item(), maker.slot.runner(adapter))
            state = euler(state, clean_from_velocity(state, velocity, sigma), sigma, following)
        close(teacher_window(maker.model, window, model, draw, maker.slot.runner(adapter)), state)
    close(found[2:3], state[:, :, :35])


@pytest.mark.parametrize("text", ["x=base:few,steps=2", "x=base:teacher,steps=2"])
def test_a_batch_is_one_by_one(maker, source, text):
    model = model_of(text, source)
    together = maker.latents(model, None)
    for size in (1, 2):
        close(replace(maker, batch=size).latents(model, None), together)


def test_longer_streams_begin_like_shorter_ones(maker, source, truth):
    model = model_of("x=base:few,steps=2", source)
    short = replace(maker, truth=Truth(truth.root, truth.clips[:1], 3)).latents(model, None)
    close(short, maker.latents(model, None)[:1, :, :15])


def test_noise_is_named_by_clip_and_chunk():
    shape = (2, 24, 5, 2, 3)
    both = clip_noise(0, ["a", "b"])("target", 3, 0, shape)
    assert torch.equal(both[1:], clip_noise(0, ["b"])("target", 3, 0, (1, *shape[1:])))
    others = [("b", "target", 3, 0, 1), ("b", "target", 4, 0, 0), ("b", "target", 3, 1, 0), ("b", "renoise", 3, 0, 0)]
    for clip, kind, chunk, step, seed in others:
        other = clip_noise(seed, [clip])(kind, chunk, step, (1, *shape[1:]))
        assert not torch.allclose(other, both[1:], atol=0.1)


# Models as they are named


def test_defaults_come_from_the_adapter(source, adapters):
    df, dmd, silent = (model_of(f"m={adapters[name]}", source) for name in ("df", "dmd", "silent"))
    assert (df.kind, df.sampling.steps, df.sampling.shift, df.sampling.history) == ("many", 20, 2.0, "clean")
    assert (df.sampling.rule, df.sampling.solver, df.objective) == ("own", "euler", "df")
    assert (dmd.kind, dmd.sampling.steps, dmd.sampling.shift, dmd.sampling.history) == ("few", 2, 4.0, "clean")
    assert (dmd.sampling.kv_reuse, dmd.sampling.solver) == (False, "renoise")
    assert (silent.kind, silent.sampling.steps, silent.sampling.shift) == ("teacher", 20, 3.0)
    few = model_of(f"m={adapters['df']}:few", source)
    assert (few.sampling.steps, few.sampling.shift, few.sampling.history) == (4, 5.0, "last-step")
    own = model_of(f"m={adapters['dmd']}:causal,steps=7,shift=1.5,history=0.25,kv_reuse=on,forced=true", source)
    assert (own.kind, own.sampling.steps, own.sampling.shift, own.sampling.kv_reuse, own.forced) == (
        "many",
        7,
        1.5,
        True,
        True,
    )
    assert [own.sampling.history_level(chunk).item() for chunk in (0, 1, 9)] == [0, 0.25, 0.25]
    assert "0.25" in own.line() and "dmd" in own.line()


@pytest.mark.parametrize(
    "more, level, told",
    [
        ("", 0.625, "last-step (0.625)"),
        (",steps=4,shift=5", 0.625, "last-step (0.625)"),
        (",steps=8", 0.625, "at 0.625"),
        (",shift=3", 0.625, "at 0.625"),
        (",steps=1", 0.625, "at 0.625"),
        (",steps=8,history=last-step", 5 / 12, "last-step (0.4167)"),
        (",shift=3,history=last-step", 0.5, "last-step (0.5)"),
        (",steps=8,history=clean", 0, "clean (0)"),
        (",steps=8,history=0.25", 0.25, "at 0.25"),
    ],
)
def test_a_student_attends_at_the_level_it_knows(source, adapters, more, level, told):
    """Whatever schedule is asked for; levels of "last-step" by shift t / (1 + (shift - 1) t) at t = 1 / steps."""
    model = model_of(f"m={adapters['noisy']}{more}", source)
    assert model.sampling.history_level(0) == 0 and model.sampling.history_level(3).item() == pytest.approx(level)
    assert f"history {told}, kv_reuse" in model.line()
    own = told == "last-step (0.625)"  # the schedule's own number: no bit differs from training
    assert own == (model.sampling == Sampling(steps=4, shift=5.0))
    assert not own or torch.equal(model.sampling.history_level(3), SamplerConfig(steps=4, shift=5.0).sigmas[-2])


@pytest.mark.parametrize(
    "text, message",
    [
        ("base", "NAME=ADAPTER"),
        ("=base", "NAME=ADAPTER"),
        ("a/b=base", "NAME=ADAPTER"),
        ("truth=base", "reference"),
        ("m=base:some", "teacher, many, few, causal"),
        ("m=base,step=4", "steps, shift, history"),
        ("m=base:few,steps", "steps"),
        ("m=base:few,steps=4.5", "whole number"),
        ("m=base:few,shift=x", "number"),
        ("m=base:few,history=soft", "clean or last-step"),
        ("m=base:few,history=2", "0 to 1"),
        ("m=base:few,kv_reuse=maybe", "true or false"),
        ("m=base:few,steps=1", "history to clean"),
        ("m=base:teacher,forced=true", "drop forced"),
        ("m={folder}/none.safetensors", "no adapter file"),
        ("m={folder}/foreign.safetensors", "trained on base 0000"),
        ("m={folder}/recoded.safetensors", "codec other"),
        ("m={folder}/critic.safetensors", "critic"),
        ("m={folder}/unleveled.safetensors,steps=8", "history has to be given .* history_level 'any'"),
    ],
)
def test_models_that_cannot_be(source, adapters, text, message):
    with pytest.raises(UserError, match=message):
        model_of(text.format(folder=adapters["df"].parent), source)


def test_the_released_adapter(source, adapters, monkeypatch):
    monkeypatch.setattr(models, "embedded_adapter", lambda: adapters["silent"])
    model = model_of("m=released", source)
    assert (model.adapter, model.kind) == (str(adapters["silent"]), "teacher")


# The command


@pytest.fixture(scope="module")
def settings(tmp_path_factory, clips_root, base_config):
    out = tmp_path_factory.mktemp("evaluation") / "out"
    return Settings(out=out, model=["base=base:few,steps=2"], clips=clips_root, base=str(base_config), device="cpu")


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(model=[]), "name one with --model"),
        (dict(model=["a=base", "a=base:few"]), "given 2 times"),
        (dict(chunks=9), "has 8 chunks.*--chunks 9 needs 9"),
        (dict(chunks=0), "at least 1"),
        (dict(batch=0), "--batch 0"),
        (dict(clips=None), "--clips, or a run's folder with --run"),
        (dict(picture_clip="clip"), "not among the clips"),
        (dict(run=Path("nowhere")), "--out folder of a run"),
        (dict(base="wide.json"), "text of width 64, the base takes 32"),
        (dict(base="huge.json"), r"--base .* huge.json .* in fp32 takes [\d.]+ GiB of host memory, .*--base embedded"),
    ],
)
def test_settings_that_cannot_be(settings, change, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("wide.json").write_text(json.dumps(CONFIG | {"text_dim": 32}))
    Path("huge.json").write_text('{"ffn_dim": 1000000000}')  # all else is the release's
    with pytest.raises(UserError, match=message):
        prepare(replace(settings, **change))


def test_clips_that_cannot_be(settings, tmp_path, clips_root):
    short = [clip for clip in open_clips(clips_root)][:1]
    with pytest.raises(UserError, match="window of teacher t needs 8"):
        prepare(replace(settings, model=["t=base:teacher"], clips=late_start(tmp_path / "late", short[0])))
    run = write_run(tmp_path / "run", clips_root, [])
    with pytest.raises(UserError, match="held no clips out"):
        prepare(replace(settings, run=run, clips=None))
    run = write_run(tmp_path / "run", clips_root, ["lost"])
    with pytest.raises(UserError, match="no clip lost"):
        prepare(replace(settings, run=run, clips=None))


def late_start(root: Path, clip) -> Path:
    """A folder with one clip whose only start frame is chunk 2: six chunks follow."""
    folder = root / clip.id
    folder.mkdir(parents=True)
    for file in clip.path.iterdir():
        if not file.name.startswith("start_") or file.name == "start_2.safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    return root


def write_run(folder: Path, clips: Path, held_out: list[str], base: str = "embedded") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "args.json").write_text(json.dumps({"settings": {"base": base, "clips": str(clips)}, "identity": {}}))
    (folder / "val_samples.json").write_text(json.dumps([{"clip": clip, "episode": "e"} for clip in held_out]))
    return folder


def test_a_run_brings_its_base_and_clips(settings, tmp_path, clips_root, base_config):
    ids = [clip.id for clip in open_clips(clips_root)]
    run = write_run(tmp_path / "run", clips_root, [ids[4], ids[1]], str(base_config))
    plan = prepare(replace(settings, run=run, clips=None, base=None))
    assert [clip.id for clip in plan.truth.clips] == [ids[1], ids[4]] and plan.truth.chunks == 8
    assert plan.source.fingerprint == open_base(str(base_config)).fingerprint
    assert [clip.id for clip in prepare(replace(settings, run=run, max_clips=1)).truth.clips] == [ids[1]]


def test_the_command(settings, adapters, monkeypatch, capsys):
    out = settings.out
    named = {
        "start": "base:teacher,steps=2",
        "df": f"{adapters['df']},steps=2",
        "distilled": str(adapters["dmd"]),
        "true-history": f"{adapters['dmd']},forced=true",
    }
    flags = [flag for name, text in named.items() for flag in ("--model+", f"{name}={text}")]
    where = ["--out", str(out), "--clips", str(settings.clips), "--base", settings.base, "--max_clips", "2"]
    monkeypatch.setattr(sys, "argv", ["rtcwm", "evaluate", *where, *flags])
    cli.main()
    said = capsys.readouterr().out
    assert all(f"\n{name}" in said for name in ("codec", *named)) and "PSNR dB" in said

    result = json.loads((out / "evaluate.json").read_text())
    rows = result["models"]
    assert list(rows) == ["codec", *named] and len(result["clips"]) == 2 and result["chunks"] == 8
    assert [rows[name]["chunks"] for name in rows] == [8, 7, 8, 8, 8]
    for row in rows.values():
        assert set(row["measures"]) == set(MEASURES)
        assert all(
            len(found["chunks"]) == row["chunks"] and len(found["clips"]) == 2 for found in row["measures"].values()
        )
    assert rows["codec"]["measures"]["psnr"]["all"] > 45 and rows["codec"]["measures"]["frechet"]["all"] < 0.01
    same = [rows[name]["measures"]["psnr"]["chunks"][0] for name in ("distilled", "true-history")]
    assert same[0] == pytest.approx(same[1]) and rows["true-history"]["forced"]

    with Image.open(out / "evaluate.png") as image:
        assert image.size == (168 + 8 * (96 + 4), 24 + 5 * (64 + 4) + 24 + 240)  # truth and four models, 96 x 64 frames
    with av.open(str(out / "evaluate.mp4")) as video:
        stream = video.streams.video[0]
        assert stream.average_rate == 24 and (stream.width, stream.height) == (3 * 96, 2 * (64 + 20))
        assert sum(1 for _ in video.decode(stream)) == 8 * 17
    events = EventAccumulator(str(out / "evaluate_events" / "df")).Reload()
    logged = events.Scalars("evaluate/psnr")
    assert [entry.step for entry in logged] == list(range(8))
    assert [entry.value for entry in logged] == pytest.approx(rows["df"]["measures"]["psnr"]["chunks"], rel=1e-5)
    assert len(events.Scalars("evaluate/jumps")) == 7
    assert events.Scalars("evaluate_drift/frechet")[0].value == pytest.approx(
        rows["df"]["measures"]["frechet"]["drift"]
    )


def test_the_report_is_of_these_streams(settings):
    """What `evaluate` says of a model equals the measures of its latents, decoded whole."""
    one = replace(settings, out=settings.out.with_name("second"), max_clips=2, chunks=3, video=False)
    result = evaluate(one)
    plan = prepare(one)
    made = stream_all(plan)[0]["base"]
    codec, expected = load_codec(), []
    for clip, true in zip(made, plan.truth.latents, strict=True):
        difference = codec.decode(clip).astype(float) - codec.decode(true)
        expected.append((-10 * np.log10((difference**2).mean(axis=(1, 2, 3)) / 255**2)).reshape(3, 17).mean(1))
    found = result["models"]["base"]["measures"]["psnr"]["chunks"]
    assert found == pytest.approx(np.mean(expected, axis=0), rel=1e-4)
    pieces = torch.cat(list(decoder(plan)(made[0])))
    close(pieces, torch.from_numpy(codec.decode(made[0])).float() / 255)
    assert not (one.out / "evaluate.mp4").exists() and (one.out / "evaluate.json").exists()


def test_faults_end_the_command(settings, monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "argv", ["rtcwm", "evaluate", "--out", "x", "--clips", str(settings.clips), "--model+", "m=no:few"]
    )
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2 and "no adapter file at no" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["torchmetrics", "PIL", "av"])
def test_what_is_not_installed(settings, monkeypatch, package):
    prepare(settings)  # nothing is left half imported by what follows
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=r"pip install 'rtcwm\[evaluate\]'"):
        prepare(settings)


# Picture and film


def test_ticks():
    assert picture.ticks(10.3, 11.9) == [10, 10.5, 11, 11.5, 12]
    assert picture.ticks(0, 97) == [0, 20, 40, 60, 80, 100]
    for low, high in ((3.0, 3.0), (0.0, 0.0), (-7.0, 12345.6), (1e-4, 2e-4)):
        marks = picture.ticks(low, high)
        assert marks[0] <= low <= high <= marks[-1] and 2 <= len(marks) <= 8


def test_picture_of_streams_that_end(tmp_path):
    grey = np.full((64, 96, 3), 90, np.uint8)
    rows = {"truth": [grey] * 3, "a model with a name that is far too long for its place": [grey, None, None]}
    plots = [picture.Plot("nothing", {"truth": [None, math.nan]}), picture.Plot("one", {"truth": [1.0]}, mark=1.0)]
    picture.draw(rows, ["0", "1", "2"], plots, tmp_path / "p.png")
    with Image.open(tmp_path / "p.png") as image:
        assert image.size == picture.size(2, 3, 64, 96) == (960, 24 + 2 * 68 + 24 + 240)
        assert image.getpixel((168 + 10, 24 + 68 + 10)) == (90, 90, 90)
        assert image.getpixel((168 + 110, 24 + 68 + 10)) == (255, 255, 255)
    assert picture.cell_size(768, 1344) == (110, 192)


def test_film_of_streams_that_end(tmp_path):
    light = np.full((17, 64, 96, 3), 200, np.uint8)
    count = film.write({"long": iter([light, light]), "short": iter([light])}, 64, 96, tmp_path / "f.mp4")
    with av.open(str(tmp_path / "f.mp4")) as video:
        shown = [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]
    assert count == len(shown) == 34 and shown[0].shape == (84, 192, 3)
    assert abs(int(shown[33][50, 48, 0]) - 200) < 8 and shown[33][50, 144, 0] < 8 and shown[16][50, 144, 0] > 190
    assert [film.grid(count) for count in (1, 3, 4, 5, 7)] == [(1, 1), (1, 3), (2, 2), (2, 3), (3, 3)]
