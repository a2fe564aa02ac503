"""The block driver against `model.forward`, in one precision and in the release's mix."""

import dataclasses

import pytest
import torch
from reference import build_row_timesteps
from small import random_window, small_model

from rtcwm.model import blocks
from rtcwm.model.attention import Full, install, resolve
from rtcwm.model.layout import VIDEO_TAG
from rtcwm.model.packing import Window, patchify, row_times, stock_layout

CPU = resolve("sdpa", "cpu")


def forward(model, window: Window, layout, times, index) -> torch.Tensor:
    """Velocity rows of the target by the class's own forward."""
    out = model(
        hidden_states=blocks.video_rows(window),
        audio_hidden_states=window.audio,
        encoder_hidden_states=window.text,
        timestep=times,
        timestep_indices=index,
        token_tags=layout.tags,
        position_ids=layout.position_ids,
        video_indices=layout.video_rows,
        audio_indices=layout.audio_rows,
        text_indices=layout.text_rows,
    )
    return out.sample[:, -len(layout.target_rows) :]


@pytest.fixture(scope="module")
def stock():
    """The weights of `model` with diffusers' own processor."""
    return small_model()


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text_time", ["pinned", "video"])
def test_driver_is_the_forward(stock, model, batch, stream, text_time):
    window = random_window(latents=10, batch=batch)
    layout = window.layout(stream)
    target_times = torch.tensor([0.2, 0.7]) if text_time == "pinned" else torch.tensor(0.3)
    expected = forward(stock, window, layout, *row_times(layout, target_times, text_time))
    velocity = blocks.predict_velocity(model, window, layout, target_times, None, text_time)
    assert velocity.dtype == torch.float32 and velocity.shape == window.video.shape
    assert torch.equal(patchify(velocity), expected)
    again = blocks.predict_velocity(model, window, layout, target_times, Full(CPU), text_time)
    assert torch.equal(again, velocity)


def test_stock_request_through_diffusers_builders(stock, model):
    """Distinct sorted times as diffusers stages them, 37 latents, an odd proxy: the teacher's request."""
    window = random_window(latents=37)
    layout = window.layout(stream=False)
    conditions = len(layout.picture_rows) + len(layout.proxy_rows)
    times, index = build_row_timesteps(
        layout.video_rows, layout.audio_rows, conditions, 0, len(layout.text_rows), 0.25, 1.0, 0.999, 1.0
    )
    expected = forward(stock, window, layout, times, index)
    velocity = blocks.predict_velocity(model, window, layout, torch.tensor(0.25), None, "video")
    torch.testing.assert_close(patchify(velocity), expected, rtol=1e-5, atol=1e-5)


def test_order_of_rows_does_not_matter(model):
    window = random_window(latents=10)
    times = torch.tensor([0.2, 0.7])
    both = [blocks.predict_velocity(model, window, window.layout(stream), times, None) for stream in (False, True)]
    torch.testing.assert_close(*both, rtol=1e-4, atol=1e-5)


def test_every_input_reaches_the_target(model):
    window = random_window(latents=5)
    layout = window.layout(stream=True)
    before = blocks.predict_velocity(model, window, layout, torch.tensor(0.5), None)
    for name in ("video", "proxy", "picture1", "text", "audio"):
        changed = dataclasses.replace(window, **{name: getattr(window, name) + 1.0})
        after = blocks.predict_velocity(model, changed, layout, torch.tensor(0.5), None)
        assert not torch.allclose(before, after), name
    assert not torch.allclose(before, blocks.predict_velocity(model, window, layout, torch.tensor(0.6), None))


def test_model_time_is_one_minus_sigma(model):
    """The time embedding of t: cosines first, then sines, of the unscaled t in [0, 1] (sigma = 1 - t is never fed)."""
    sigma = torch.tensor([0.75, 0.0])
    seen = []
    handle = model.time_embedder.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    layout = random_window(latents=10).layout(stream=True)
    blocks.modulate(model, *row_times(layout, 1.0 - sigma), layout.tags)
    handle.remove()
    times = torch.tensor([0.999, 0.999, 1.0, 0.25, 1.0])
    angles = times[:, None] * torch.exp(-torch.arange(16) / 16 * torch.log(torch.tensor(10000.0)))
    torch.testing.assert_close(seen[0], torch.cat([angles.cos(), angles.sin()], dim=1))


def test_mixed_precision_contract():
    """fp32 projections, time embedder and head; bf16 rows and blocks; and the forward's numbers to the last bit."""
    stock, model = small_model(mixed=True), small_model(mixed=True)
    install(model, CPU)
    window = random_window(latents=10)
    layout = window.layout(stream=True)
    times = torch.tensor([0.2, 0.7])
    seen: dict[str, tuple] = {}

    def watch(name: str):
        def hook(module, args, output):
            seen[name] = (args[0].dtype, output.dtype if torch.is_tensor(output) else output[0].dtype)

        return hook

    names = "proj_in audio_proj_in context_embedder token_refiner time_embedder norm_out proj_out rope".split()
    for name in names:
        getattr(model, name).register_forward_hook(watch(name))
    block = model.transformer_blocks[0]
    block.register_forward_hook(watch("block"))
    block.register_forward_hook(lambda module, args, output: seen.update(temb=args[1].dtype))
    block.adaln_proj.linear.register_forward_hook(watch("adaln"))
    velocity = blocks.predict_velocity(model, window, layout, times, None)

    fp32, bf16 = torch.float32, torch.bfloat16
    for name in ("proj_in", "audio_proj_in", "time_embedder", "proj_out"):
        assert seen[name] == (fp32, fp32), name
    for name in ("context_embedder", "token_refiner", "block", "adaln", "norm_out"):
        assert seen[name] == (bf16, bf16), name
    assert seen["temb"] == fp32 and seen["rope"] == (torch.float64, fp32)
    assert velocity.dtype == fp32
    assert torch.equal(patchify(velocity), forward(stock, window, layout, *row_times(layout, times)))


def test_bf16_window_equals_rounded_window(model):
    window = random_window(latents=5).to("cpu", torch.bfloat16)
    layout = window.layout(stream=True)
    rounded = window.to("cpu", torch.float32)
    velocities = [blocks.predict_velocity(model, w, layout, torch.tensor(0.5), None) for w in (window, rounded)]
    assert torch.equal(*velocities)


def test_weights_are_only_reached_inside_their_module(model):
    """ZeRO-3: parameters have shape [0] but for the time of their own module's forward, or of their block's, which is
    gathered as a whole."""
    window = random_window(latents=5)
    layout = window.layout(stream=True)
    expected = blocks.predict_velocity(model, window, layout, torch.tensor(0.5), None)
    handles, kept = [], {}
    whole = list(model.transformer_blocks)
    inside = {module for block in whole for module in block.modules()}
    for module in [*whole, *(module for module in model.modules() if module not in inside)]:
        own = list(module.parameters(recurse=module in whole))
        kept.update({parameter: parameter.data for parameter in own})

        def gather(module, args, own=own):
            for parameter in own:
                parameter.data = kept[parameter]

        def release(module, args, output, own=own):
            for parameter in own:
                parameter.data = torch.empty(0, dtype=parameter.dtype)

        handles += [module.register_forward_pre_hook(gather), module.register_forward_hook(release)]
        release(None, None, None)
    try:
        velocity = blocks.predict_velocity(model, window, layout, torch.tensor(0.5), None)
    finally:
        for handle in handles:
            handle.remove()
        for parameter, data in kept.items():
            parameter.data = data
    assert torch.equal(velocity, expected)


def test_run_hook_wraps_every_block_and_carries_gradients(model):
    window = random_window(latents=5)
    layout = window.layout(stream=True)
    ran = []

    def run(block, hidden, *rest):
        ran.append(block)
        return torch.utils.checkpoint.checkpoint(block, hidden, *rest, use_reentrant=False)

    gradients = []
    for hook in (blocks.call, run):
        video = window.video.clone().requires_grad_()
        velocity = blocks.predict_velocity(
            model, dataclasses.replace(window, video=video), layout, torch.tensor(0.5), None, run=hook
        )
        velocity.square().sum().backward()
        gradients.append(video.grad)
    assert ran == list(model.transformer_blocks)
    assert gradients[0].abs().sum() > 0 and torch.equal(*gradients)


def test_window_of_another_size_is_refused(model):
    layout = stock_layout(random_window(5).geometry, (4, 6), 10, (VIDEO_TAG,) * 5, 3)
    with pytest.raises(ValueError, match="window of .* rows for a layout of"):
        blocks.predict_velocity(model, random_window(latents=5), layout, torch.tensor(0.5), None)
