"""Dense attention kernels by name, and the choice among those that are there.

A kernel takes q [B, Sq, H, D] and k, v [B, Sk, H, D], computes softmax(q k^T / sqrt(D)) v without a mask, and is
differentiable. Nothing falls back in silence: a kernel asked for by name is used or is an error, and "auto" says what
it took and what it passed over.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from rtcwm.errors import UserError

DenseAttention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Kernel:
    """A dense kernel, its name, and a line for people: which one, of what version, why."""

    name: str
    fn: DenseAttention
    why: str


class Unavailable(Exception):
    """A kernel cannot run here; the message says what is missing."""


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """torch's own choice of scaled dot product attention; `mask` [Sq, Sk] bool."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


def cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """SDPA restricted to cuDNN, which fails rather than take another kernel."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return sdpa(q, k, v)


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


def _flash(module: str, package: str, capability: Callable[[tuple[int, int]], bool], cards: str):
    """Opens a flash attention package: its function and version, or Unavailable."""

    def open_package(device: torch.device) -> tuple[DenseAttention, str]:
        try:
            function = importlib.import_module(module).flash_attn_func
        except (ImportError, AttributeError, OSError) as error:
            raise Unavailable(f"package {package} is not installed ({error}); pip install {package}") from error
        found = torch.cuda.get_device_capability(device)
        if not capability(found):
            raise Unavailable(f"it runs on {cards}, this device has compute capability {found[0]}.{found[1]}")

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = function(q, k, v)
            return out[0] if isinstance(out, tuple) else out  # some versions return (out, logsumexp)

        return attention, f"{package} {_version(package)}"

    return open_package


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # built from source under another name
        return "of unknown version"


def _open_cudnn(device: torch.device) -> tuple[DenseAttention, str]:
    if not torch.backends.cudnn.is_available() or torch.cuda.get_device_capability(device) < (8, 0):
        raise Unavailable("it needs a torch build with cuDNN and compute capability 8.0 or newer")
    return cudnn, f"torch {torch.__version__} SDPA, cuDNN {torch.backends.cudnn.version()} only"


def _open_sdpa(device: torch.device) -> tuple[DenseAttention, str]:
    return sdpa, f"torch {torch.__version__} scaled_dot_product_attention"


def _open_flex(device: torch.device) -> tuple[DenseAttention, str]:
    how = "compiled" if device.type == "cuda" else "eager, scores materialised"
    return flex, f"torch {torch.__version__} flex_attention, {how}"


KERNELS: dict[str, Callable[[torch.device], tuple[DenseAttention, str]]] = {
    "fa4": _flash("flash_attn.cute", "flash-attn-4", lambda c: c >= (9, 0), "Hopper and newer"),
    "fa3": _flash("flash_attn_interface", "flash-attn-3", lambda c: c[0] == 9, "Hopper"),
    "cudnn": _open_cudnn,
    "fa2": _flash("flash_attn", "flash-attn", lambda c: c >= (8, 0), "Ampere and newer"),
    "sdpa": _open_sdpa,
    "flex": _open_flex,
}
# By measured speed of prefix calls of 56 heads x 128 on an H200, TFLOP/s forward / with backward: fa4 683 / 620,
# cuDNN 625 / 580, fa2 360 / 330. flex (429 / 385) is a reference and only taken by name.
AUTO = {"cuda": ("fa4", "fa3", "cudnn", "fa2", "sdpa"), "cpu": ("sdpa",)}
_ON_ANY_DEVICE = ("sdpa", "flex")


def resolve(name: str, device: torch.device | str) -> Kernel:
    """The kernel `name` ("auto", fa4, fa3, cudnn, fa2, sdpa, flex) for a device.

    Raises UserError for an unknown name and for a named kernel that cannot run there, with what to install or change.
    """
    device = torch.device(device)
    if name == "auto":
        return _first_available(AUTO.get(device.type, ("sdpa",)), device)
    if name not in KERNELS:
        raise UserError(f"attention kernel {name!r} is not one of auto, {', '.join(KERNELS)}")
    try:
        function, description = _open(name, device)
    except Unavailable as missing:
        raise UserError(f"attention kernel {name!r} cannot run here: {missing}; or ask for 'auto'") from missing
    return Kernel(name, function, f"attention: {name}, as asked for ({description})")


def _open(name: str, device: torch.device) -> tuple[DenseAttention, str]:
    if device.type != "cuda" and name not in _ON_ANY_DEVICE:
        raise Unavailable(f"it needs a CUDA device, this one is {device.type}")
    return KERNELS[name](device)


def _first_available(names: tuple[str, ...], device: torch.device) -> Kernel:
    passed_over = []
    for name in names:
        try:
            function, description = _open(name, device)
        except Unavailable as missing:
            passed_over.append(f"{name}: {missing}")
            continue
        why = f"attention: {name}, the fastest of {', '.join(names)} that is there on {device.type} ({description})"
        return Kernel(name, function, "; ".join([why, *passed_over]))
    raise UserError(f"no attention kernel for {device}: {'; '.join(passed_over)}")
