"""The embedded world's codec: a linear patch PCA with the shape of the H3 VAE, and a hashed caption encoder.

A 17-frame clip becomes 5 latents of (1, 4, 4, 4, 4) frames, 24 channels, one latent pixel for 16 x 16 image pixels.
Each group is projected on the 24 leading principal components of its patches: one basis for single frames (768 values a
patch), one for groups of four (3,072). Latents are normalised to mean 0 and standard deviation 1 a channel and
kind of group over the fitting set. The codec has no memory across groups: the first frame of a chunk coded alone equals
the chunk's first latent, and any leading latents of a stream decode to the frames they cover.

The weights ship with the package; :mod:`rtcwm.data.codec_fit` made them. Another linear algebra library may round
differently, so the identity that clips carry is a hash of the weights and not of the recipe.
"""

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rtcwm.errors import UserError
from rtcwm.model.layout import (
    CHUNK_LATENTS,
    CLIP_FRAMES,
    LATENT_CHANNELS,
    PIXELS_PER_LATENT,
    TEXT_TAG,
    VIDEO_TAG,
    frames_of,
)

NAME = "rtcwm-pca"
SHIPPED = Path(__file__).with_name("codec.safetensors")
PATCH_VALUES = 3 * PIXELS_PER_LATENT**2
GROUPS = (1, 4)  # frames of a group; suffix of the tensors' names

TEXT_DIM = 64
TEXT_ROWS = 40  # every caption is cut or padded to it, so that the windows of a batch share one layout
PICTURE_ROWS = 4
TEXT_ENCODER = {"name": "rtcwm-words", "hash": "1"}  # the hash is a version: the encoder has no weights


def patches(frames: Tensor, group: int) -> Tensor:
    """Values of each patch: uint8 `[n * group, H, W, 3]` -> float32 `[n, H/16, W/16, group * 768]` in -0.5..0.5."""
    count, height, width, _ = frames.shape
    side = PIXELS_PER_LATENT
    cut = frames.reshape(count // group, group, height // side, side, width // side, side, 3)
    return (
        cut.permute(0, 2, 4, 1, 3, 5, 6)
        .reshape(count // group, height // side, width // side, group * PATCH_VALUES)
        .float()
        / 255
        - 0.5
    )


def unpatches(values: Tensor, group: int) -> Tensor:
    """Inverse of :func:`patches` without rounding: `[n, h, w, group * 768]` -> float32 `[n * group, H, W, 3]`, 0..1."""
    count, rows, columns, _ = values.shape
    side = PIXELS_PER_LATENT
    cut = values.reshape(count, rows, columns, group, side, side, 3).permute(0, 3, 1, 4, 2, 5, 6)
    return cut.reshape(count * group, rows * side, columns * side, 3) + 0.5


@dataclass(frozen=True)
class Codec:
    """Weights by group of frames (1 and 4), float32: `basis` [group * 768, 24], `centre` [group * 768], `mean` and
    `std` [24]; `identity` {name, hash} names them in clips."""

    basis: dict[int, Tensor]
    centre: dict[int, Tensor]
    mean: dict[int, Tensor]
    std: dict[int, Tensor]
    identity: dict[str, str]

    def encode(self, frames: np.ndarray | Tensor) -> Tensor:
        """Latents of whole clips.

        Args:
            frames: uint8 `[17 n, H, W, 3]`, H and W multiples of 16.

        Returns:
            float32 `[24, 5 n, H/16, W/16]`, normalised, on the frames' device.

        Raises:
            UserError: another number of frames, another size or type.
        """
        frames = checked(frames)
        if len(frames) == 0 or len(frames) % CLIP_FRAMES:
            raise UserError(
                f"found {len(frames)} frames; a stream is coded in clips of {CLIP_FRAMES}: cut the video to "
                f"{len(frames) // CLIP_FRAMES * CLIP_FRAMES} frames"
            )
        clips = frames.unflatten(0, (-1, CLIP_FRAMES))
        first = self._project(clips[:, 0], 1)[:, None]
        rest = self._project(clips[:, 1:].flatten(0, 1), 4).unflatten(0, (-1, CHUNK_LATENTS - 1))
        return torch.cat((first, rest), 1).flatten(0, 1).permute(3, 0, 1, 2).contiguous()

    def encode_clip(self, frames: np.ndarray | Tensor) -> Tensor:
        """Latents `[24, 5, h, w]` of one clip, uint8 `[17, H, W, 3]`; UserError for another number of frames."""
        if len(frames) != CLIP_FRAMES:
            raise UserError(f"a clip has {CLIP_FRAMES} frames, found {len(frames)}")
        return self.encode(frames)

    def encode_picture(self, picture: np.ndarray | Tensor) -> Tensor:
        """Latent `[24, 1, h, w]` of one picture, uint8 `[H, W, 3]`."""
        return self._project(checked(picture[None]), 1).permute(3, 0, 1, 2).contiguous()

    def pixels(self, latents: np.ndarray | Tensor) -> Tensor:
        """Decoded frames before rounding: `[24, L, h, w]` -> float32 `[F, H, W, 3]` clipped to 0..1, on the latents'
        device; latent 0 must open a chunk, L need not fill the last one.

        Raises:
            UserError: not 24 channels.
        """
        latents = torch.as_tensor(latents).float()
        if latents.ndim != 4 or latents.shape[0] != LATENT_CHANNELS:
            raise UserError(
                f"latents of shape {tuple(latents.shape)} were given; expected [{LATENT_CHANNELS}, L, h, w]"
            )
        rows = latents.permute(1, 2, 3, 0)
        count = len(rows)
        opening = torch.arange(0, count, CHUNK_LATENTS)
        other = torch.tensor([index for index in range(count) if index % CHUNK_LATENTS], dtype=torch.long)
        starts = torch.tensor([frames_of(index) for index in range(count)])
        size = (rows.shape[1] * PIXELS_PER_LATENT, rows.shape[2] * PIXELS_PER_LATENT, 3)
        frames = torch.empty((frames_of(count), *size), dtype=torch.float32, device=rows.device)
        frames[starts[opening].to(rows.device)] = self._restore(rows[opening.to(rows.device)], 1)
        places = (starts[other][:, None] + torch.arange(4)).flatten()
        frames[places.to(rows.device)] = self._restore(rows[other.to(rows.device)], 4)
        return frames.clamp_(0, 1)

    def decode(self, latents: np.ndarray | Tensor) -> np.ndarray:
        """Decoded frames: `[24, L, h, w]` -> uint8 `[F, H, W, 3]` on the CPU (see :meth:`pixels`)."""
        return (self.pixels(latents) * 255).round().to(torch.uint8).cpu().numpy()

    def _project(self, frames: Tensor, group: int) -> Tensor:
        """uint8 `[n * group, H, W, 3]` -> normalised `[n, h, w, 24]`."""
        device = frames.device
        values = (patches(frames, group) - self.centre[group].to(device)) @ self.basis[group].to(device)
        return (values - self.mean[group].to(device)) / self.std[group].to(device)

    def _restore(self, rows: Tensor, group: int) -> Tensor:
        """Inverse of :meth:`_project`, up to what the basis leaves out."""
        device = rows.device
        values = rows * self.std[group].to(device) + self.mean[group].to(device)
        return unpatches(values @ self.basis[group].to(device).T + self.centre[group].to(device), group)


def checked(frames: np.ndarray | Tensor) -> Tensor:
    """Frames as a tensor; UserError unless uint8 `[F, H, W, 3]` with H and W multiples of 16."""
    frames = torch.as_tensor(frames)
    shape = tuple(frames.shape)
    if frames.dtype != torch.uint8 or len(shape) != 4 or shape[3] != 3:
        raise UserError(f"frames of type {frames.dtype} and shape {shape} were given; expected uint8 [F, H, W, 3]")
    if shape[1] % PIXELS_PER_LATENT or shape[2] % PIXELS_PER_LATENT:
        raise UserError(
            f"frames of {shape[2]}x{shape[1]} pixels were given; width and height must be multiples of "
            f"{PIXELS_PER_LATENT}: crop or render again"
        )
    return frames


def weights_hash(tensors: dict[str, Tensor]) -> str:
    """First 16 hex digits of the SHA-256 over names, types, shapes and bytes of the tensors, in the names' order."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()[:16]


@lru_cache(maxsize=4)
def load_codec(path: Path = SHIPPED) -> Codec:
    """The codec of a file, the shipped one by default.

    Raises:
        UserError: the file is missing, damaged or not a codec.
    """
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (OSError, SafetensorError) as fault:
        raise UserError(
            f"{path}: cannot be read as a codec ({fault}); write it with `python -m rtcwm.data.codec_fit --out {path}`"
        ) from fault
    expected = {f"{part}_{group}" for part in ("basis", "centre", "mean", "std") for group in GROUPS}
    if set(tensors) != expected:
        raise UserError(f"{path}: holds {sorted(tensors)}, expected a codec with {sorted(expected)}")
    parts = (
        {group: tensors[f"{part}_{group}"].float() for group in GROUPS} for part in ("basis", "centre", "mean", "std")
    )
    return Codec(*parts, identity={"name": NAME, "hash": weights_hash(tensors)})


@lru_cache(maxsize=4096)
def word_vector(word: str) -> Tensor:
    """A fixed unit-variance vector `[64]` seeded by the word's hash; float32."""
    seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:8], "little")
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(TEXT_DIM).astype(np.float32))


def embed_text(caption: str, picture1: Tensor) -> tuple[Tensor, Tensor]:
    """Text rows of a request, in the order of the release: the picture's mark, the picture, the caption.

    Args:
        caption: any text; words beyond the 35th are cut.
        picture1: latent `[24, 1, h, w]` of Picture 1, pooled to 2 x 2 vision rows.

    Returns:
        text float32 `[40, 64]` and tags `[40]` (0 on the vision rows, 1 elsewhere).
    """
    pooled = torch.nn.functional.adaptive_avg_pool2d(picture1[:, 0].float(), 2).flatten(1).T
    vision = torch.nn.functional.pad(pooled, (0, TEXT_DIM - LATENT_CHANNELS))
    room = TEXT_ROWS - 1 - PICTURE_ROWS
    words = caption.split()[:room]
    words += ["<pad>"] * (room - len(words))
    text = torch.cat((word_vector("<Picture 1>:")[None], vision, torch.stack([word_vector(word) for word in words])))
    tags = torch.full((TEXT_ROWS,), TEXT_TAG)
    tags[1 : 1 + PICTURE_ROWS] = VIDEO_TAG
    return text, tags
