"""A look at what was encoded: some chunks decoded back, next to their source."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from rtcwm.data.clips import STREAM, read_clip
from rtcwm.errors import UserError
from rtcwm.model.layout import CHUNK_LATENTS, PIXELS_PER_LATENT
from rtcwm.prepare.extra import missing
from rtcwm.prepare.proxies import open_proxy, read_proxy
from rtcwm.prepare.settings import Settings
from rtcwm.prepare.sources import Source
from rtcwm.prepare.vae import LOOK_AHEAD, VideoCodec
from rtcwm.prepare.video import probe, psnr, read

try:
    from PIL import Image, ImageDraw, ImageFont
except ImportError as error:
    raise missing("pillow", error) from error

NAME = "prepare_check.png"
SHOWN = (0, 8, 16)  # frames of a chunk
HEADER, GAP = 20, 4  # pixels


def check(
    out: Path, sources: Mapping[str, Source], vae: Path, settings: Settings, count: int, device: torch.device
) -> dict[str, dict[str, float]]:
    """Decode chunks spread over the clips and draw them next to their source, as `out/prepare_check.png`.

    Args:
        out: folder of clips; sources: theirs, by id.
        count: chunks.

    Returns:
        By `clip:chunk`, the PSNR in dB of the 17 target frames (`target`) and of the proxy pictures (`proxy`).
    """
    codec = VideoCodec(vae, device, settings.tf32, decoder=True)
    measured, strips = {}, []
    for clip_id, chunk in chosen(out, sorted(sources), count):
        pairs = {
            "target": source_frames(sources[clip_id], settings, chunk),
            "proxy": source_pictures(sources[clip_id], out, chunk),
        }
        found, rows = {}, []
        for kind, given in pairs.items():
            made = codec.decode(latents(out / clip_id / STREAM, "video" if kind == "target" else "proxy", chunk))
            found[kind] = psnr(given, made)
            rows += [(f"{clip_id} chunk {chunk}: {kind}", given), (f"decoded, PSNR {found[kind]:.2f} dB", made)]
        measured[f"{clip_id}:{chunk}"] = found
        strips += rows
    draw(strips, out / NAME)
    return measured


def chosen(out: Path, clips: list[str], count: int) -> list[tuple[str, int]]:
    """(clip, chunk) of `count` chunks spread evenly over all chunks of all clips, but the last of a clip: its decoding
    lacks the next chunk's latents."""
    every = [(clip, chunk) for clip in clips for chunk in range(max(1, read_clip(out / clip).chunks - 1))]
    count = min(count, len(every))
    return [every[(2 * index + 1) * len(every) // (2 * count)] for index in range(count)]


def latents(file: Path, name: str, chunk: int) -> torch.Tensor:
    """The chunk's latents and the two after them, as far as there are any."""
    begin = chunk * CHUNK_LATENTS
    with safe_open(file, framework="pt") as stream:
        return stream.get_slice(name)[:, begin : begin + CHUNK_LATENTS + LOOK_AHEAD]


def source_frames(source: Source, settings: Settings, chunk: int) -> np.ndarray:
    """The target's frames of a chunk, uint8 `[17, H, W, 3]`."""
    *_, frames = read(probe(source.target), chunk + 1, settings.size)
    return frames


def source_pictures(source: Source, out: Path, chunk: int) -> np.ndarray:
    """The proxy's pictures of a chunk."""
    geometry = read_clip(out / source.id).geometry
    size = tuple(PIXELS_PER_LATENT * side for side in (geometry.proxy_height, geometry.proxy_width))
    *_, pictures = read_proxy(open_proxy(source.proxy), chunk + 1, size)
    return pictures


def draw(strips: list[tuple[str, np.ndarray]], path: Path) -> None:
    """Rows of frames under their titles.

    Raises:
        UserError: the file cannot be written.
    """
    width = max(len(SHOWN) * (frames.shape[2] + GAP) for _, frames in strips)
    height = sum(HEADER + frames.shape[1] + GAP for _, frames in strips)
    picture = Image.new("RGB", (width, height), (255, 255, 255))
    pen, font, top = ImageDraw.Draw(picture), ImageFont.load_default(12), 0
    for title, frames in strips:
        pen.text((GAP, top + 3), title, (32, 32, 32), font)
        for column, index in enumerate(SHOWN):
            picture.paste(Image.fromarray(frames[index]), (column * (frames.shape[2] + GAP), top + HEADER))
        top += HEADER + frames.shape[1] + GAP
    try:
        picture.save(path, format="PNG")
    except OSError as fault:
        raise UserError(f"cannot write {path}: {fault}") from fault
