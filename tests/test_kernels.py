"""Dense kernels: their two halves against the formula, and no silent choice among them."""

import sys
import types

import pytest
import torch
from torch import Tensor

from rtcwm.errors import UserError
from rtcwm.model import dense, kernels
from rtcwm.model.kernels import Kernel, resolve

SDPA = resolve("sdpa", "cpu")
MATH = Kernel("math", SDPA.fn, "", dense.math_forward, dense.math_backward)
HALVES = [SDPA, MATH]


def random_qkv(queries: int, keys: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q [2, queries, 3, 8] and k, v [2, keys, 3, 8], v a slice of something wider."""
    draw = torch.Generator().manual_seed(queries)
    q, k, v = (torch.randn(2, rows, 3, 24, generator=draw, dtype=dtype) for rows in (queries, keys, keys))
    return [q[..., :8].contiguous(), k[..., :8].contiguous(), v[..., 8:16]]


def formula(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """softmax(q k^T / sqrt(D)) v and the logsumexp of the scores."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(dim=-1), v), torch.logsumexp(scores, dim=-1)


@pytest.mark.parametrize("kernel", HALVES, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("queries, keys", [(7, 7), (5, 19), (40, 3)])
def test_halves_equal_the_formula(kernel, queries, keys, monkeypatch):
    monkeypatch.setattr(dense, "MATH_SCORES", 2 * 3 * keys * 4)  # plain math in pieces of four queries
    inputs = [x.requires_grad_() for x in random_qkv(queries, keys)]
    expected, expected_lse = formula(*inputs)
    dout = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad(expected, inputs, dout)
    with torch.no_grad():
        out, lse = kernel.forward(*inputs)
        found = kernel.backward(dout, *inputs, out, lse)
    assert lse.shape == (2, 3, queries) and lse.is_contiguous() and lse.dtype == torch.float64
    torch.testing.assert_close([out, lse, *found], [expected, expected_lse, *gradients])
    torch.testing.assert_close(kernel.fn(*inputs), expected)


def test_halves_in_bf16_keep_a_float32_logsumexp():
    inputs = random_qkv(9, 30, torch.bfloat16)
    out, lse = SDPA.forward(*inputs)
    expected, expected_lse = formula(*(x.float() for x in inputs))
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    torch.testing.assert_close(out.float(), expected, rtol=0, atol=0.02)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=0.02)


def test_operators_of_cuda_take_what_they_are_given(monkeypatch):
    """cuDNN's and FlashAttention's operators run on CUDA alone; without it their shapes still run on meta tensors,
    which checks the arguments against torch's schemas, and that cuDNN's logsumexp has its fourth axis."""
    monkeypatch.setattr(dense, "_torch_flash", lambda q: True)
    q, k, v = (x.to("meta", torch.bfloat16) for x in random_qkv(5, 9))
    for forward, backward in (
        (dense.cudnn_forward, dense.cudnn_backward),
        (dense.sdpa_forward, dense.sdpa_backward),
    ):
        out, lse = forward(q, k, v)
        assert out.shape == q.shape and lse.shape == (2, 3, 5) and lse.dtype == torch.float32
        assert [x.shape for x in backward(out, q, k, v, out, lse)] == [q.shape, k.shape, v.shape]
    operator = torch.ops.aten._scaled_dot_product_cudnn_attention
    assert operator(*(x.transpose(1, 2) for x in (q, k, v)), None, True)[1].shape == (2, 3, 5, 1)


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
    """A machine that reports an H200 and has no flash attention package; kernels are chosen, not run."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    for module in ("flash_attn.flash_attn_interface", "flash_attn.cute.interface", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, module, None)
    return monkeypatch


def package(**functions) -> types.ModuleType:
    module = types.ModuleType("flash_attention_package")
    vars(module).update(functions)
    return module


def fa4(plain=SDPA.fn, **replaced) -> types.ModuleType:
    """The calls of flash-attn-4 with the argument names of 4.0.0b36, carried out by plain math."""

    def run(q, k, v, return_lse=False, **options):
        return (*dense.math_forward(q, k, v), None, None, None)

    def differentiate(q, k, v, out, dout, lse, **options):
        return dense.math_backward(dout, q, k, v, out, lse)

    return package(**{"flash_attn_func": plain, "_flash_attn_fwd": run, "_flash_attn_bwd": differentiate} | replaced)


def fa3() -> types.ModuleType:
    def flash_attn_func(q, k, v, softmax_scale=None, causal=False, return_attn_probs=False):
        out, lse = dense.math_forward(q, k, v)
        return (out, lse) if return_attn_probs else out

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, starts_q, starts_k, used_q, used_k, longest_q, longest_k, dq, dk, dv,
        softmax_scale, causal,
    ):  # fmt: skip
        assert (starts_q, starts_k, used_q, used_k, longest_q, longest_k, causal) == (*(None,) * 6, False)
        assert softmax_scale == q.shape[-1] ** -0.5
        for target, grad in zip((dq, dk, dv), dense.math_backward(dout, q, k, v, out, softmax_lse)):
            target.copy_(grad)

    return package(flash_attn_func=flash_attn_func, _flash_attn_backward=_flash_attn_backward)


def fa2() -> types.ModuleType:
    def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, return_attn_probs=False):
        out, lse = dense.math_forward(q, k, v)
        return (out, lse, None) if return_attn_probs else out

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
        window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        assert (dropout_p, softmax_scale, causal, window_size_left) == (0.0, q.shape[-1] ** -0.5, False, -1)
        assert (window_size_right, softcap, alibi_slopes, deterministic) == (-1, 0.0, None, False)
        for target, grad in zip((dq, dk, dv), dense.math_backward(dout, q, k, v, out, softmax_lse)):
            target.copy_(grad)

    return package(flash_attn_func=flash_attn_func, _flash_attn_backward=_flash_attn_backward)


PACKAGES = {
    "fa4": ("flash_attn.cute.interface", fa4),
    "fa3": ("flash_attn_interface", fa3),
    "fa2": ("flash_attn.flash_attn_interface", fa2),
}


@pytest.mark.parametrize("name", PACKAGES)
def test_arguments_reach_the_packages_in_their_order(name, hopper):
    """Stand-ins with the packages' own signatures; the packages themselves need CUDA."""
    module, make = PACKAGES[name]
    hopper.setitem(sys.modules, module, make())
    kernel = resolve(name, "cuda")
    inputs = [x.requires_grad_() for x in random_qkv(6, 11)]
    expected, expected_lse = formula(*inputs)
    dout = torch.randn(expected.shape, dtype=torch.float64)
    gradients = torch.autograd.grad(expected, inputs, dout)
    with torch.no_grad():
        out, lse = kernel.forward(*inputs)
        found = kernel.backward(dout, *inputs, out, lse)
    torch.testing.assert_close([out, lse, *found], [expected, expected_lse, *gradients])
    torch.testing.assert_close(kernel.fn(*inputs).detach(), expected.detach())


def test_a_missing_package_is_named(hopper):
    with pytest.raises(UserError, match="'fa4' cannot run here: package flash-attn-4 is not installed .*pip install"):
        resolve("fa4", "cuda")


def test_a_package_of_another_version_is_an_error_not_a_guess(hopper):
    module = fa4()
    del module._flash_attn_bwd
    hopper.setitem(sys.modules, "flash_attn.cute.interface", module)
    with pytest.raises(UserError, match="package flash-attn-4 .* has no _flash_attn_bwd; install another version"):
        resolve("fa4", "cuda")


def test_auto_goes_by_what_was_measured_on_the_card(hopper):
    kernel = resolve("auto", "cuda")
    assert kernel.name == "cudnn" and kernel.fn is dense.cudnn
    forward, both = kernels.MEASURED["H200"]["cudnn"]
    assert f"{forward} TFLOP/s forward, {both} with backward on H200" in kernel.why
    assert "fa4: package flash-attn-4 is not installed" in kernel.why and "no measurement" not in kernel.why
    hopper.setitem(sys.modules, "flash_attn.cute.interface", fa4())
    assert resolve("auto", "cuda").name == "fa4"


def test_auto_takes_the_fastest_of_another_table(hopper):
    hopper.setitem(kernels.MEASURED, "H200", {"sdpa": (2, 2), "cudnn": (3, 1), "flex": (9, 9)})
    kernel = resolve("auto", "cuda")
    assert kernel.name == "sdpa" and "the fastest of sdpa, cudnn that is there" in kernel.why


def test_auto_on_a_card_that_was_not_measured_says_so(hopper):
    hopper.setattr(torch.cuda, "get_device_name", lambda device=None: "Some other card")
    assert "no measurement on Some other card" in resolve("auto", "cuda").why


def test_a_kernel_for_newer_cards_is_refused(hopper):
    hopper.setitem(sys.modules, "flash_attn.cute.interface", fa4())
    hopper.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 6))
    with pytest.raises(UserError, match="runs on Hopper and newer, this device has compute capability 8.6"):
        resolve("fa4", "cuda")


def test_output_of_packages_that_return_the_logsumexp_too(hopper):
    q, k, v = random_qkv(7, 7)
    hopper.setitem(sys.modules, "flash_attn.cute.interface", fa4(lambda q, k, v: (SDPA.fn(q, k, v), None)))
    assert torch.equal(resolve("fa4", "cuda").fn(q, k, v), SDPA.fn(q, k, v))
