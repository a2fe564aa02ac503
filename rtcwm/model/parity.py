"""How far a kernel is from the rule it carries out: against the boolean mask in float32, for tests and benchmarks.

The reference computes every pair of rows in float32 from the same (rounded) q, k and v, with the mask and torch's plain
formula, so it holds several [H, S, S] float32 tensors: 50 MB each for 4 heads and 1,800 rows.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from rtcwm.model.attention import Attend, Masked, make_attend
from rtcwm.model.kernels import Kernel
from rtcwm.model.layout import SPAN_CHUNKS, TEXT_TAG, Geometry
from rtcwm.model.masks import Rule, boolean_mask
from rtcwm.model.packing import stream_layout

SMALL = Geometry(12, 16, 4, 4)  # 48 target rows a latent and 4 proxy rows


class Parity(NamedTuple):
    """Relative errors in the 2-norm, |x - reference| / |reference|, of the output and of the three gradients."""

    out: float
    dq: float
    dk: float
    dv: float


def parity(
    kernel: Kernel,
    device: torch.device | str,
    dtype: torch.dtype,
    rule: Rule = "E",
    chunks: int = SPAN_CHUNKS,
    geometry: Geometry = SMALL,
    heads: int = 4,
    width: int = 128,
    batch: int = 1,
    seed: int = 0,
) -> Parity:
    """Errors of `make_attend(kernel, ...)` in `dtype` on normal noise, as slices of one fused projection.

    With half precision expect a few 1e-3 (one rounding to bf16 is up to 4e-3 of a value), with float32 below 1e-5.
    Raises UserError for an unknown rule.
    """
    layout = stream_layout(geometry, (geometry.height, geometry.width), chunks, (TEXT_TAG,) * 5, 7).to(device)
    draw = torch.Generator(device).manual_seed(seed)
    fused = torch.randn(batch, layout.rows, 3 * heads * width, generator=draw, device=device).to(dtype)
    inputs = [x.unflatten(-1, (heads, width)) for x in fused.chunk(3, dim=-1)]
    gradient = torch.randn(inputs[0].shape, generator=draw, device=device).to(dtype)
    found = _out_and_gradients(make_attend(kernel, layout, rule), inputs, gradient)
    with sdpa_kernel(SDPBackend.MATH):
        exact = [x.float() if x.dtype != torch.float64 else x for x in inputs]
        mask = Masked(boolean_mask(layout, rule))
        reference = _out_and_gradients(mask, exact, gradient.to(exact[0].dtype))
    return Parity(*(((a - b).norm() / b.norm()).item() for a, b in zip(found, reference, strict=True)))


def _out_and_gradients(attend: Attend, inputs: list[Tensor], gradient: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = attend(*leaves, None)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]
