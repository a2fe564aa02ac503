"""Checks of one clip's files by what their headers and its `clip.json` say, without reading latents."""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from rtcwm.errors import UserError
from rtcwm.model.layout import FPS, LATENT_CHANNELS, TEXT_TAG, VIDEO_TAG, Geometry

DESCRIPTION = "clip.json"
CLIP_FIELDS = ("frames", "fps", "chunks", "episode", "flagged", "codec", "geometry")  # text_encoder may be absent
STORED = ("F16", "BF16")


def shapes(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Stored type and shape of every tensor of a safetensors file, from its header.

    Raises:
        UserError: the file is missing, truncated or not safetensors.
    """
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}
            return {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
    except FileNotFoundError as fault:
        raise UserError(f"{path} is missing: prepare the clip again or remove its folder") from fault
    except (OSError, SafetensorError) as fault:
        raise UserError(f"{path} is truncated or not a safetensors file ({fault}): prepare the clip again") from fault


def latent_shape(path: Path, found: Mapping[str, tuple[str, tuple[int, ...]]], name: str) -> tuple[int, int, int]:
    """(L, h, w) of latents `name` in a file's header; UserError unless fp16 or bf16 `[24, L, h, w]`."""
    if name not in found:
        raise UserError(f"{path} holds {sorted(found)} but no tensor `{name}`: prepare the clip again")
    dtype, shape = found[name]
    if len(shape) != 4 or shape[0] != LATENT_CHANNELS:
        raise UserError(
            f"{path}: `{name}` has shape {list(shape)}, expected [{LATENT_CHANNELS}, L, h, w]: these are not "
            "latents of this codec"
        )
    if dtype not in STORED:
        raise UserError(f"{path}: `{name}` is stored as {dtype}, expected one of {', '.join(STORED)}")
    return shape[1:]


def read_description(path: Path) -> dict:
    """The clip's `clip.json`; UserError when it is missing, broken or lacks a field."""
    file = path / DESCRIPTION
    try:
        found = json.loads(file.read_text())
    except FileNotFoundError as fault:
        raise UserError(f"{file} is missing: prepare the clip again or remove its folder") from fault
    except (json.JSONDecodeError, UnicodeDecodeError) as fault:
        raise UserError(f"{file} is not valid JSON ({fault}): prepare the clip again") from fault
    missing = [name for name in CLIP_FIELDS if not isinstance(found, dict) or name not in found]
    if missing:
        raise UserError(f"{file} lacks {', '.join(missing)}; a clip needs {', '.join(CLIP_FIELDS)}")
    codec = found["codec"]
    if not isinstance(codec, dict) or not all(isinstance(codec.get(key), str) for key in ("name", "hash")):
        raise UserError(f'{file}: codec is {found["codec"]!r}, expected {{"name": ..., "hash": ...}}')
    if found["fps"] != FPS:
        raise UserError(
            f"{file}: fps is {found['fps']}, expected {FPS}: convert the video's frame rate before encoding"
        )
    return found


def flagged_chunks(file: Path, spans: object, chunks: int) -> dict[int, str]:
    """Chunk -> reason of the `flagged` list of a clip.json; where spans overlap the first reason stays."""
    reasons: dict[int, str] = {}
    for span in spans if isinstance(spans, list) else [spans]:
        try:
            first, last, reason = span["first_chunk"], span["last_chunk"], span["reason"]
            valid = type(first) is int and type(last) is int and 0 <= first <= last < chunks
        except (KeyError, TypeError):
            valid = False
        if not valid:
            raise UserError(
                f'{file}: flagged span {span!r} is not of the form {{"first_chunk": a, "last_chunk": b, '
                f'"reason": text}} with 0 <= a <= b < {chunks} (the clip\'s chunks)'
            )
        for chunk in range(first, last + 1):
            reasons.setdefault(chunk, str(reason))
    return reasons


def read_start(path: Path, geometry: Geometry) -> int:
    """Check the header of one start frame's file; returns the width of its text rows."""
    found = shapes(path)
    size = latent_shape(path, found, "picture1_native")
    if size != (1, geometry.height, geometry.width):
        raise UserError(
            f"{path}: `picture1_native` is {list(size)} latents x height x width, but the clip's video needs "
            f"[1, {geometry.height}, {geometry.width}]"
        )
    if "picture1_2048" in found and latent_shape(path, found, "picture1_2048")[0] != 1:
        raise UserError(f"{path}: `picture1_2048` holds {found['picture1_2048'][1][1]} latents, expected 1")
    text, tags = found.get("text"), found.get("text_tags")
    if text is None or tags is None or len(text[1]) != 2 or text[1][:1] != tags[1] or not tags[1][0]:
        raise UserError(
            f"{path}: expected `text [n, width]` and `text_tags [n]` with n >= 1, found "
            f"{ {name: list(shape) for name, (_, shape) in found.items()} }"
        )
    with safe_open(path, framework="pt") as file:  # a few bytes, and a wrong tag would train silently
        values = set(file.get_tensor("text_tags").tolist())
    if not values <= {VIDEO_TAG, TEXT_TAG}:
        raise UserError(
            f"{path}: `text_tags` holds {sorted(values)}, expected {VIDEO_TAG} (vision rows) and {TEXT_TAG} "
            "(words) only"
        )
    return text[1][1]
