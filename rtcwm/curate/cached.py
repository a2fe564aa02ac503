"""One sample of another trainer's cache: its tensors under one set of names, and packed rows unpacked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from rtcwm.errors import UserError
from rtcwm.model.layout import LATENT_CHANNELS, PATCH_FEATURES, frames_of, rows_per_latent
from rtcwm.model.packing import unpatchify

TENSORS = ("vae_latent", "proxy_latent", "anchor_latent", "text_embedding", "text_token_tags")
REFERENCE_KINDS = ("image", "video", "audio")


@dataclass(frozen=True)
class Cached:
    """One sample of a cache, as it was stored.

    Attributes:
        id: its name; source: file (and row) for messages.
        video: `[24, L, h, w]`; proxy: `[24, L, ph, pw]`; picture: `[24, 1, H, W]` or None.
        text: `[n, width]`; tags: `[n]`; caption: "" where there is none; told: what the cache says of how it was made.
    """

    id: str
    source: str
    video: Tensor
    proxy: Tensor
    picture: Tensor | None
    text: Tensor
    tags: Tensor
    caption: str
    told: Mapping[str, object] = field(default_factory=dict)


def named(name: str, source: str, held: Mapping[str, object], info: Mapping[str, object]) -> Cached:
    """A sample of tensors under the names of `TENSORS`."""
    kinds = list(info.get("proxy_references") or ["duv"])
    if kinds != ["duv"]:
        raise UserError(
            f"{source}: the proxies are {kinds}, expected one DUV: rtcwm takes depth and classes in one picture"
        )
    proxies = held.get("proxy_latents")
    if "proxy_latent" not in held and isinstance(proxies, Tensor) and proxies.ndim == 5 and len(proxies) == 1:
        held = {**held, "proxy_latent": proxies[0]}
    required = [key for key in TENSORS if key != "anchor_latent"]
    missing = [key for key in required if not isinstance(held.get(key), Tensor)]
    if missing:
        raise UserError(f"{source} lacks {', '.join(missing)}; it holds {sorted(map(str, held))}")
    picture = held.get("anchor_latent")
    frames = info.get("num_frames")
    latents = held["vae_latent"].shape[1] if held["vae_latent"].ndim == 4 else 0
    if isinstance(frames, int) and latents and frames_of(latents) != frames:
        raise UserError(f"{source}: {latents} latents cover {frames_of(latents)} frames, its info says {frames}")
    told = {key: value for key, value in info.items() if isinstance(value, str | int | float | bool)}
    caption = str(told.pop("prompt", ""))
    return Cached(
        name,
        source,
        held["vae_latent"],
        held["proxy_latent"],
        picture if isinstance(picture, Tensor) else None,
        held["text_embedding"],
        held["text_token_tags"],
        caption,
        told,
    )


def references(
    source: str, rows: Tensor, geometry: Sequence[tuple[str, int, int, int]]
) -> tuple[Tensor | None, Tensor]:
    """Picture 1 and the proxy of packed reference rows, given (kind, latents, height, width) of each."""
    found: dict[str, Tensor] = {}
    start = 0
    for kind, latents, height, width in geometry:
        if kind == "audio":
            continue
        if kind not in REFERENCE_KINDS or kind in found:
            kinds = [kind for kind, *_ in geometry]
            raise UserError(
                f"{source}: the references are {kinds}, expected one image at most and one video, the proxy"
            )
        count = latents * rows_per_latent(height, width)
        found[kind] = grid(source, rows[start : start + count], latents, height, width)
        start += count
    if start != len(rows):
        raise UserError(f"{source}: {len(rows)} reference rows, their geometry needs {start}")
    if "video" not in found:
        raise UserError(f"{source}: there is no reference video among the references: a stream follows a proxy")
    return found.get("image"), found["video"]


def grid(source: str, rows: Tensor, latents: int, height: int, width: int) -> Tensor:
    """Packed rows as latents `[24, L, h, w]`."""
    expected = latents * rows_per_latent(height, width)
    if rows.shape != (expected, PATCH_FEATURES) or not expected:
        raise UserError(
            f"{source}: rows of shape {list(rows.shape)}, expected [{expected}, {PATCH_FEATURES}] for {latents} "
            f"latents of {height} x {width}"
        )
    return unpatchify(rows[None], latents, height, width)[0].reshape(LATENT_CHANNELS, latents, height, width)
