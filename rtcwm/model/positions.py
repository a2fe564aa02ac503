"""Rotary positions (t, h, w) of every part of the packed sequence, in float64.

The numbers must equal those of diffusers' layout steps to the last bit, which is why grids come from `numpy.linspace`
(torch's rounds differently) and sums are taken in the same order.
"""

import numpy as np

from rtcwm.model.layout import AUDIO_CHANNELS, CHUNK_LATENTS, LATENT_FRAMES, PATCH, Geometry, padded

_FRAME_UNITS = 5.0 / 3.0  # rotary time of one frame: 24 fps on a clock of 40 units a second
_SPATIAL_SCALE = 32


def _frame_grid(height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """(h, w) of every row of one latent frame [rows, 2], and its w axis. Along an axis of d latent pixels in a frame of
    area A: linspace((1 - d / sqrt(A)) / 2, (1 + d / sqrt(A)) / 2, d / 2, endpoint=False) * 32."""
    axes = []
    for size, patch in ((height, PATCH[1]), (width, PATCH[2])):
        ratio = size / np.sqrt(height * width)
        left = (1.0 - ratio) / 2.0
        axes.append(np.linspace(left, left + ratio, size // patch, endpoint=False) * _SPATIAL_SCALE)
    grid = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1)
    return grid.reshape(-1, 2), axes[1]


def _spans(latents: int) -> np.ndarray:
    """Rotary time that each of `latents` latents of a chunk stream takes."""
    return np.array([_FRAME_UNITS * LATENT_FRAMES[i % CHUNK_LATENTS] for i in range(latents)])


def _video_positions(latents: int, height: int, width: int, origin: float) -> np.ndarray:
    """Positions [latents * rows, 3] of a video block that starts at rotary time `origin`."""
    grid, _ = _frame_grid(height, width)
    times = origin + np.concatenate([[0.0], _spans(latents)[:-1].cumsum()])
    return np.concatenate([times.repeat(len(grid))[:, None], np.tile(grid, (latents, 1))], axis=1)


def stock_positions(
    geometry: Geometry, picture_size: tuple[int, int], latents: int, text: int, audio_latents: int
) -> dict[str, np.ndarray]:
    """Positions of every part, in the order of the stock sequence. The media clock starts at the number of text rows;
    Picture 1 takes one unit, the proxy the sum of its spans; audio and target start together after both."""
    blocks = {"text": np.zeros((text, 3))}
    blocks["text"][:, 0] = np.arange(text)
    clock = float(text)
    blocks["picture"] = _video_positions(1, *(padded(size) for size in picture_size), clock)
    clock += 1.0
    blocks["proxy"] = _video_positions(latents, *geometry.padded_proxy, clock)
    clock += sum(_spans(latents).tolist())  # one by one, as diffusers: a pairwise sum differs in the last bit
    _, across = _frame_grid(geometry.height, geometry.width)
    audio = np.zeros((AUDIO_CHANNELS, audio_latents, 3))  # left at the target's first column, right at its last
    audio[:, :, 0] = clock + np.arange(audio_latents)
    audio[:, :, 2] = across[[0, -1], None]
    blocks["audio"] = audio.reshape(-1, 3)
    blocks["target"] = _video_positions(latents, geometry.height, geometry.width, clock)
    return blocks
