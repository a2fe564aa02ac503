"""The dense attention kernels themselves, each in three forms.

`fn(q, k, v)` is the plain differentiable call. `forward(q, k, v) -> (out, lse)` and `backward(dout, q, k, v, out, lse)
-> (dq, dk, dv)` are its two halves without autograd, so that an operator can keep `out` and `lse` from one forward to a
later backward instead of computing them again, and can collect the gradients of several calls in one buffer.

q, out and dout are [B, Sq, H, D], k and v [B, Sk, H, D]; rows may be strided views, the last axis may not. `lse` is the
natural logarithm of the sum of exp(q k^T / sqrt(D)), [B, H, Sq] and contiguous, float32 (float64 for float64 inputs):
every kernel here computes it so, but for cuDNN's trailing axis of one. Gradients own their memory.
"""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

DenseAttention = Callable[[Tensor, Tensor, Tensor], Tensor]
Forward = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]

MATH_SCORES = 1 << 26  # scores that `math_forward` holds at a time: 256 MiB in float32


@dataclass(frozen=True)
class Dense:
    """A kernel that was opened on a device; flex attention has no halves of its own."""

    fn: DenseAttention
    forward: Forward | None
    backward: Backward | None
    description: str


class Unavailable(Exception):
    """A kernel cannot run here; the message says what is missing."""


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """torch's own choice of scaled dot product attention; `mask` [Sq, Sk] bool."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


def sdpa_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """torch's fused operator for the CPU, its FlashAttention-2 for half precision on CUDA, plain math elsewhere."""
    if q.device.type == "cpu":
        operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    elif _torch_flash(q):
        operator = torch.ops.aten._scaled_dot_product_flash_attention
    else:
        return math_forward(q, k, v)
    out, lse, *_ = operator(*(x.transpose(1, 2) for x in (q, k, v)))
    return out.transpose(1, 2), lse.contiguous()


def sdpa_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of `sdpa_forward`."""
    tensors = [x.transpose(1, 2) for x in (dout, q, k, v, out)]
    if q.device.type == "cpu":
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, lse, 0.0, False)
    elif _torch_flash(q):
        # No sequence starts: all are of one length. The random state is read by dropout alone.
        seed = torch.empty(2, dtype=torch.uint64, device=q.device)
        sizes = (None, None, q.shape[1], k.shape[1])
        operator = torch.ops.aten._scaled_dot_product_flash_attention_backward
        grads = operator(*tensors, lse, *sizes, 0.0, False, seed, seed.new_empty(()))
    else:
        return math_backward(dout, q, k, v, out, lse)
    return tuple(grad.transpose(1, 2) for grad in grads)


def _torch_flash(q: Tensor) -> bool:
    half = q.dtype in (torch.bfloat16, torch.float16)
    return q.is_cuda and half and torch.cuda.get_device_capability(q.device) >= (8, 0)


def math_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The formula itself, over pieces of the queries: for dtypes and devices that no fused operator takes."""
    out, lse = q.new_empty(q.shape), q.new_empty(q.shape[0], q.shape[2], q.shape[1])
    for rows in _pieces(q, k):
        scores = _scores(q[:, rows], k)
        lse[:, :, rows] = scores.logsumexp(dim=-1)
        out[:, rows] = torch.einsum("bhqk,bkhd->bqhd", (scores - lse[:, :, rows, None]).exp(), v)
    return out, lse


def math_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of `math_forward`: with P = exp(scores - lse), dS = P (dout v^T - rowsum(dout out))."""
    dq, dk, dv = q.new_empty(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    scale = q.shape[-1] ** -0.5
    inner = (dout * out).sum(dim=-1).transpose(1, 2)
    for rows in _pieces(q, k):
        weights = (_scores(q[:, rows], k) - lse[:, :, rows, None]).exp()
        dv += torch.einsum("bhqk,bqhd->bkhd", weights, dout[:, rows])
        weights *= torch.einsum("bqhd,bkhd->bhqk", dout[:, rows], v) - inner[:, :, rows, None]
        dq[:, rows] = torch.einsum("bhqk,bkhd->bqhd", weights, k) * scale
        dk += torch.einsum("bhqk,bqhd->bkhd", weights, q[:, rows]) * scale
    return dq, dk, dv


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("bqhd,bkhd->bhqk", q * q.shape[-1] ** -0.5, k)


def _pieces(q: Tensor, k: Tensor) -> list[slice]:
    size = max(1, MATH_SCORES // (q.shape[0] * q.shape[2] * k.shape[1]))
    return [slice(start, min(start + size, q.shape[1])) for start in range(0, q.shape[1], size)]


def cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """SDPA restricted to cuDNN, which fails rather than take another kernel."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return sdpa(q, k, v)


def cudnn_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """cuDNN through torch's operator, which gives the logsumexp as [B, H, Sq, 1]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)
    return out.transpose(1, 2), lse.reshape(q.shape[:3])


def cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of `cudnn_forward`.

    torch keeps one compiled graph for all calls with these shapes and strides of q, k and v, and does not look at the
    strides of the other tensors again: out and dout have to be contiguous in every call, as the forward leaves out.
    """
    dout, out = dout.contiguous(), out.contiguous()
    tensors = [x.transpose(1, 2) for x in (dout, q, k, v, out)]
    seed = torch.empty((), dtype=torch.int64, device=q.device)  # read by dropout alone
    sizes = (None, None, None, q.shape[1], k.shape[1])  # no bias, no sequence starts: all are of one length
    operator = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    grads = operator(*tensors, lse.contiguous().unsqueeze(-1), seed, seed, *sizes, 0.0, False)
    return tuple(grad.transpose(1, 2) for grad in grads)


def flex(q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask | None = None) -> Tensor:
    """Flex attention, compiled on CUDA. On the CPU, where torch offers it for inference only, a block mask goes through
    the operator behind it, whose eager form materialises the scores and has a gradient."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if q.is_cuda:
        out = _compiled_flex()(q, k, v, block_mask=block_mask)
    elif block_mask is None:
        out = scaled_dot_product_attention(q, k, v)
    else:
        from torch._higher_order_ops.flex_attention import flex_attention as operator

        out = operator(q, k, v, _unchanged, block_mask.as_tuple(), q.shape[-1] ** -0.5, {})[0]
    return out.transpose(1, 2)


def _unchanged(score: Tensor, *index: Tensor) -> Tensor:
    return score


@lru_cache(maxsize=1)
def _compiled_flex() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=False)


def open_sdpa(device: torch.device) -> Dense:
    return Dense(sdpa, sdpa_forward, sdpa_backward, f"torch {torch.__version__} scaled_dot_product_attention")


def open_cudnn(device: torch.device) -> Dense:
    if not torch.backends.cudnn.is_available() or torch.cuda.get_device_capability(device) < (8, 0):
        raise Unavailable("it needs a torch build with cuDNN and compute capability 8.0 or newer")
    description = f"torch {torch.__version__} SDPA, cuDNN {torch.backends.cudnn.version()} only"
    return Dense(cudnn, cudnn_forward, cudnn_backward, description)


def open_flex(device: torch.device) -> Dense:
    how = "compiled" if device.type == "cuda" else "eager, scores materialised"
    return Dense(flex, None, None, f"torch {torch.__version__} flex_attention, {how}")


def open_fa4(device: torch.device) -> Dense:
    """FlashAttention-4: its own autograd function consists of these two calls and nothing else."""
    module = _package("flash_attn.cute.interface", "flash-attn-4")
    _require(device, lambda capability: capability >= (9, 0), "Hopper and newer")
    function, run, differentiate = _take(
        module, "flash-attn-4", "flash_attn_func", "_flash_attn_fwd", "_flash_attn_bwd"
    )

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return run(q, k, v, return_lse=True)[:2]

    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        return differentiate(q, k, v, out, dout, lse)[:3]

    return Dense(_plain(function), forward, backward, f"flash-attn-4 {_version('flash-attn-4')}")


def open_fa3(device: torch.device) -> Dense:
    """FlashAttention-3, built from source. Older builds always return the logsumexp, newer ones when asked."""
    module = _package("flash_attn_interface", "flash-attn-3")
    _require(device, lambda capability: capability[0] == 9, "Hopper")
    function, differentiate = _take(module, "flash-attn-3", "flash_attn_func", "_flash_attn_backward")
    asked = {"return_attn_probs": True} if "return_attn_probs" in inspect.signature(function).parameters else {}

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return function(q, k, v, **asked)[:2]

    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        grads = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
        lengths = (None,) * 6  # sequence starts, used lengths and longest lengths of q and k: all are of one length
        differentiate(dout, q, k, v, out, lse, *lengths, *grads, q.shape[-1] ** -0.5, False)
        return grads

    return Dense(_plain(function), forward, backward, f"flash-attn-3 {_version('flash-attn-3')}")


def open_fa2(device: torch.device) -> Dense:
    """FlashAttention-2's package, 2.7 or newer (its backward took other arguments before)."""
    module = _package("flash_attn.flash_attn_interface", "flash-attn")
    _require(device, lambda capability: capability >= (8, 0), "Ampere and newer")
    function, differentiate = _take(module, "flash-attn", "flash_attn_func", "_flash_attn_backward")

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return function(q, k, v, return_attn_probs=True)[:2]

    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        grads = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
        # dropout, scale, causal, window to the left and to the right, softcap, slopes, deterministic
        differentiate(dout, q, k, v, out, lse, *grads, 0.0, q.shape[-1] ** -0.5, False, -1, -1, 0.0, None, False)
        return grads

    return Dense(_plain(function), forward, backward, f"flash-attn {_version('flash-attn')}")


def _package(module: str, package: str):
    try:
        return importlib.import_module(module)
    except (ImportError, AttributeError, OSError) as error:
        raise Unavailable(f"package {package} is not installed ({error}); pip install {package}") from error


def _take(module: object, package: str, *names: str) -> list[Callable]:
    """Functions of a package's module; of an unknown version that lacks one, say which."""
    if missing := [name for name in names if not hasattr(module, name)]:
        raise Unavailable(f"package {package} {_version(package)} has no {', '.join(missing)}; install another version")
    return [getattr(module, name) for name in names]


def _require(device: torch.device, fits: Callable[[tuple[int, int]], bool], cards: str) -> None:
    found = torch.cuda.get_device_capability(device)
    if not fits(found):
        raise Unavailable(f"it runs on {cards}, this device has compute capability {found[0]}.{found[1]}")


def _plain(function: Callable) -> DenseAttention:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = function(q, k, v)
        return out[0] if isinstance(out, tuple) else out  # some versions return (out, logsumexp)

    return attention


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # built from source under another name
        return "of unknown version"
