"""The ways to carry out a rule: equal outputs and gradients."""

import pytest
import torch
from diffusers import MiniMaxH3Transformer3DModel
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3RotaryPosEmbed
from small import CONFIG, random_window, small_model

from rtcwm.model import blocks
from rtcwm.model.attention import Attend, Flex, Full, Masked, Prefix, install, make_attend, resolve, rotate
from rtcwm.model.layout import Geometry
from rtcwm.model.masks import RULES, boolean_mask
from rtcwm.model.packing import stream_layout

CPU = resolve("sdpa", "cpu")
FLEX = resolve("flex", "cpu")


def layout_of(chunks: int, geometry: Geometry = Geometry(2, 6, 3, 1)):
    return stream_layout(geometry, (2, 4), chunks, (1, 0, 1, 1, 1), 3)


def random_qkv(rows: int, batch: int = 2, heads: int = 2, width: int = 32) -> list[torch.Tensor]:
    """q, k, v as the processor makes them: slices of one fused projection."""
    fused = torch.randn(batch, rows, 3 * heads * width, generator=torch.Generator().manual_seed(rows))
    return [x.unflatten(-1, (heads, -1)).detach().requires_grad_() for x in fused.chunk(3, dim=-1)]


def outputs_and_gradients(attend: Attend, layout) -> list[torch.Tensor]:
    q, k, v = random_qkv(layout.rows)
    rotary = MiniMaxH3RotaryPosEmbed(rope_freq_dim=4)(layout.position_ids)
    out = attend(q, k, v, rotary)
    assert out.shape == q.shape
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(1)))
    return [out.detach(), q.grad, k.grad, v.grad]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("chunks", [1, 2, 6, 8])
def test_prefix_calls_equal_the_mask_and_flex(rule, chunks):
    layout = layout_of(chunks)
    reference = outputs_and_gradients(Masked(boolean_mask(layout, rule)), layout)
    for kernel, kind in ((CPU, Prefix), (FLEX, Flex)):
        attend = make_attend(kernel, layout, rule)
        assert type(attend) is kind
        torch.testing.assert_close(outputs_and_gradients(attend, layout), reference, rtol=1e-4, atol=2e-5)


def test_masked_is_softmax_over_what_is_seen():
    """The reference itself, against the formula."""
    layout = layout_of(2)
    mask = boolean_mask(layout, "own")
    q, k, v = (x.detach().double() for x in random_qkv(layout.rows))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 32**0.5
    weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
    torch.testing.assert_close(Masked(mask)(q, k, v, None), torch.einsum("bhqk,bkhd->bqhd", weights, v))


@pytest.mark.parametrize("kernel", [CPU, FLEX], ids=lambda kernel: kernel.name)
def test_full_attention(kernel):
    layout = layout_of(2)
    everything = Masked(torch.ones(layout.rows, layout.rows, dtype=torch.bool))
    reference = outputs_and_gradients(everything, layout)
    torch.testing.assert_close(outputs_and_gradients(Full(kernel), layout), reference, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("rule", RULES)
def test_whole_model_with_prefix_calls_mask_and_flex(rule):
    model = small_model()
    window = random_window(10, batch=2)
    layout = window.layout(stream=True)
    times = torch.tensor([0.2, 0.7])
    install(model, CPU)
    mask = Masked(boolean_mask(layout, rule))
    expected = blocks.predict_velocity(model, window, layout, times, mask)
    for kernel in (CPU, FLEX):
        install(model, kernel)
        velocity = blocks.predict_velocity(model, window, layout, times, make_attend(kernel, layout, rule))
        torch.testing.assert_close(velocity, expected, rtol=1e-3, atol=1e-4)


def test_attend_gets_normed_unrotated_keys():
    """A cache keeps what it is given and rotates on reading: q and k must come without rope."""
    model = small_model()
    window = random_window(5)
    layout = window.layout(stream=True)
    install(model, CPU)
    seen = {}

    class Spy(Full):
        takes_rotated = False

        def __call__(self, q, k, v, rotary):
            seen.setdefault("k", k)
            return super().__call__(q, k, v, rotary)

    attn = model.transformer_blocks[0].attn
    inputs = []
    handle = attn.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    blocks.predict_velocity(model, window, layout, torch.tensor(0.5), Spy(CPU))
    handle.remove()
    _, k, _ = attn.to_qkv(inputs[0]).chunk(3, dim=-1)
    assert torch.equal(seen["k"], attn.norm_k(k.unflatten(-1, (2, -1))))


def test_rotation_is_by_halves_over_the_three_axes():
    """x_i, x_{i+n} of the rotated channels turn by t f_i, h f_i, w f_i with f = 10000^(-i/4); the rest passes."""
    positions = torch.tensor([[1.5, 2.0, -3.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    x = torch.randn(1, 2, 2, 32)
    frequencies = 10000.0 ** (-torch.arange(4) / 4)
    angle = (positions.float()[:, :, None] * frequencies).flatten(1)[:, None]  # [S, 1, 12]
    a, b = x[..., :12], x[..., 12:24]
    turned = [a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), x[..., 24:]]
    rotary = MiniMaxH3RotaryPosEmbed(rope_freq_dim=4)(positions)
    torch.testing.assert_close(rotate(x, rotary), torch.cat(turned, dim=-1))
    assert rotate(x, None) is x


def test_install_needs_fused_projections():
    model = MiniMaxH3Transformer3DModel(**CONFIG)
    with pytest.raises(ValueError, match="refiner_blocks.0.attn has no fused to_qkv"):
        install(model, CPU)
