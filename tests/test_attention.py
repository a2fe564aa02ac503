"""Kernels and the ways to carry out a rule: equal outputs and gradients, and no silent choice."""

import sys
import types

import pytest
import torch
from diffusers import MiniMaxH3Transformer3DModel
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3RotaryPosEmbed
from small import CONFIG, random_window, small_model
from torch.nn.functional import scaled_dot_product_attention

from rtcwm.errors import UserError
from rtcwm.model import attention, blocks, kernels
from rtcwm.model.attention import Attend, Flex, Full, Kernel, Masked, Prefix, install, make_attend, resolve, rotate
from rtcwm.model.layout import Geometry
from rtcwm.model.masks import RULES, boolean_mask, groups
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


def test_span_keys_are_views():
    """Six chunks need no copy of keys and values but the compact one, which the causal rule shares."""
    layout = layout_of(6)
    starts = []

    def spy(q, k, v):
        starts.append(v.data_ptr())
        return CPU.fn(q, k, v)

    q, k, v = random_qkv(layout.rows)
    Prefix(Kernel("spy", spy, ""), groups(layout, "E"))(q, k, v, None)
    compact, *targets = starts[0], *starts[2::2]
    assert len(starts) == 13 and set(targets) == {v.data_ptr()}
    assert set(starts[1::2]) == {compact} and compact != v.data_ptr()


def test_shared_views_have_the_gradient_of_slices():
    x = torch.randn(2, 9, 3, requires_grad=True)
    rows = (slice(0, 5), slice(2, 9), slice(0, 9), slice(4, 6))
    weights = [torch.randn(2, piece.stop - piece.start, 3) for piece in rows]
    (expected,) = torch.autograd.grad(sum((x[:, piece] * w).sum() for piece, w in zip(rows, weights)), x)
    views = attention._SharedViews.apply(x, *rows)
    (found,) = torch.autograd.grad(sum((view * w).sum() for view, w in zip(views, weights)), x)
    torch.testing.assert_close(found, expected)
    (only_last,) = torch.autograd.grad(attention._SharedViews.apply(x, *rows)[3].sum(), x)
    assert only_last.sum() == 2 * 2 * 3


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


def test_auto_on_the_cpu_says_what_it_takes():
    kernel = resolve("auto", "cpu")
    assert kernel.name == "sdpa"
    assert kernel.why.startswith("attention: sdpa") and torch.__version__ in kernel.why


@pytest.mark.parametrize("name", ["fa4", "fa3", "fa2", "cudnn"])
def test_a_named_kernel_that_is_not_there_is_an_error(name):
    with pytest.raises(
        UserError, match=f"attention kernel '{name}' cannot run here: it needs a CUDA device, .* is cpu"
    ):
        resolve(name, "cpu")


def test_an_unknown_kernel_is_an_error():
    with pytest.raises(UserError, match="'xformers' is not one of auto, fa4, fa3, cudnn, fa2, sdpa, flex"):
        resolve("xformers", "cpu")


@pytest.fixture
def hopper(monkeypatch):
    """A machine that reports a Hopper card and has no flash attention package; kernels are chosen, not run."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    for module in ("flash_attn", "flash_attn.cute", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, module, None)
    return monkeypatch


def test_a_missing_package_is_named(hopper):
    with pytest.raises(UserError, match="'fa4' cannot run here: package flash-attn-4 is not installed .*pip install"):
        resolve("fa4", "cuda")


def test_auto_on_cuda_goes_by_speed_and_tells_what_it_passed_over(hopper):
    kernel = resolve("auto", "cuda")
    assert kernel.name == "cudnn" and kernel.fn is kernels.cudnn
    assert "fa4: package flash-attn-4 is not installed" in kernel.why and "fa3: package" in kernel.why
    hopper.setitem(sys.modules, "flash_attn_interface", package(lambda q, k, v: kernels.sdpa(q, k, v)))
    assert resolve("auto", "cuda").name == "fa3"


def test_a_kernel_for_newer_cards_is_refused(hopper):
    hopper.setitem(sys.modules, "flash_attn.cute", package(kernels.sdpa))
    hopper.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 6))
    with pytest.raises(UserError, match="runs on Hopper and newer, this device has compute capability 8.6"):
        resolve("fa4", "cuda")


def test_output_of_packages_that_return_the_logsumexp_too(hopper):
    q, k, v = random_qkv(7)
    hopper.setitem(sys.modules, "flash_attn.cute", package(lambda q, k, v: (kernels.sdpa(q, k, v), None)))
    expected = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    assert torch.equal(resolve("fa4", "cuda").fn(q, k, v), expected)


def package(function) -> types.ModuleType:
    """A module with a flash_attn_func."""
    module = types.ModuleType("flash_attention_package")
    module.flash_attn_func = function
    return module
