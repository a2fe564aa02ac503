"""What the latents of a chunk tell of its picture, without a decoder.

Latents are normalised, so a number means much the same in any codec: about 1 is usual, and a picture without content
has none of its own. Of a chunk ``x [24, 5, h, w]`` and of the latent before it:

- finite: whether every number is one;
- detail: root mean square of ``x - mean of x over the picture``, latent by latent: how much differs
  from place to place;
- motion: root mean square of the difference of neighbouring latents, over detail;
- alike: the least cosine of neighbouring latents less their means: 1 for a still picture, about 0 across a cut.

A chunk's first latent covers one frame and the others four, which some codecs normalise apart, so neighbours are taken
among the latents of four frames: the second of a chunk follows the last of the chunk before.

The defaults of `Limits` were set on the embedded world (detail 0.54 to 0.83, motion 0.30 and more, alike 0.27 and more;
pictures at 5 % brightness: detail 0.04; a still with noise of 2 grey levels: motion 0.025; two scenes joined: alike
0.13). Latents of the released VAE were not at hand: look at what would be flagged before you believe it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rtcwm.curate.options import Limits

REASONS = ("non-finite values", "constant latents", "missing proxies", "dark", "static", "scene cut")
"""Why chunks are flagged, the gravest first."""
BY = "rtcwm clips check"
"""Who flagged a span; what others flagged is left alone."""


@dataclass(frozen=True)
class Measures:
    """Of one chunk's video or proxy, as the module explains; the sums are for the statistics of the whole clip."""

    bad: int
    constant: bool
    detail: float
    motion: float
    alike: float
    squares: float
    sums: Tensor
    count: int


def measure(latents: Tensor, before: Tensor | None) -> Measures:
    """Measures of a chunk.

    Args:
        latents: `[24, 5, h, w]`; before: the latent before them, `[24, 1, h, w]`, None at the start of a clip.
    """
    x = latents.float()
    bad = int((~torch.isfinite(x)).sum())
    if bad:
        nothing = torch.zeros(x.shape[0], dtype=torch.float64)
        return Measures(bad, False, math.nan, math.nan, math.nan, 0.0, nothing, 0)
    centred = x - x.mean((2, 3), keepdim=True)
    detail = _rms(centred)
    change = _rms(x[:, 2:] - x[:, 1:-1])
    if before is not None and torch.isfinite(before).all():
        earlier = before.float()
        centred = torch.cat([earlier - earlier.mean((2, 3), keepdim=True), centred[:, 1:]], dim=1)
    else:
        centred = centred[:, 1:]
    flat = centred.transpose(0, 1).flatten(1)
    alike = torch.nn.functional.cosine_similarity(flat[:-1], flat[1:], dim=1)
    return Measures(
        bad=0,
        constant=bool((x.amax((1, 2, 3)) == x.amin((1, 2, 3))).all()),
        detail=detail,
        motion=change / detail if detail else 0.0,
        alike=float(alike.min()),
        squares=float(x.double().square().sum()),
        sums=x.double().sum((1, 2, 3)),
        count=x[0].numel(),
    )


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def reasons(video: Measures, proxy: Measures, limits: Limits) -> list[str]:
    """Why a chunk would be flagged; of a chunk that cannot be used or seen nothing more is said."""
    if video.bad or proxy.bad:
        return ["non-finite values"]
    if video.constant:
        return ["constant latents"]
    found = ["missing proxies"] if proxy.detail < limits.empty_proxy else []
    if video.detail < limits.dark:
        return [*found, "dark"]
    found += ["static"] if video.motion < limits.static else []
    return [*found, "scene cut"] if video.alike < limits.cut else found


def flagged_spans(by_chunk: Sequence[Sequence[str]]) -> list[dict[str, int | str]]:
    """Spans of neighbouring chunks with one reason, as `clip.json` lists them, the gravest reason first."""
    spans: list[dict[str, int | str]] = []
    for reason in REASONS:
        for chunk, found in enumerate(by_chunk):
            if reason not in found:
                continue
            if spans and spans[-1]["reason"] == reason and spans[-1]["last_chunk"] == chunk - 1:
                spans[-1]["last_chunk"] = chunk
            else:
                spans.append({"first_chunk": chunk, "last_chunk": chunk, "reason": reason, "by": BY})
    return spans


def statistics_faults(name: str, measures: Sequence[Measures], limits: Limits) -> Iterator[str]:
    """What is wrong with a clip's statistics over the chunks given, in words without the file's name."""
    count = sum(chunk.count for chunk in measures)
    if not count:
        return
    channels = len(measures[0].sums)
    rms = math.sqrt(sum(chunk.squares for chunk in measures) / (count * channels))
    means = sum(chunk.sums for chunk in measures) / count
    highest = limits.rms_high if name == "video" else 2 * limits.rms_high
    if not limits.rms_low <= rms <= highest:
        yield (
            f"`{name}` has a root mean square of {rms:.3g}, expected {limits.rms_low:g} to {highest:g}: normalise the "
            "latents, (z - mean) / std by channel"
        )
    channel = int(means.abs().argmax())
    if name == "video" and abs(means[channel]) > limits.mean_high:
        yield (
            f"`{name}` has mean {means[channel]:.3g} in channel {channel}, expected -{limits.mean_high:g} to "
            f"{limits.mean_high:g}: normalise the latents, (z - mean) / std by channel"
        )
