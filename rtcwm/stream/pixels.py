"""Frames to latents and back, chunk by chunk.

The embedded world's codec has no memory across chunks: frames come with their latents (`CodecPixels`). Those of the VAE
of MiniMax-H3 follow by one chunk (`rtcwm.stream.vae`).
"""

from abc import ABC, abstractmethod

import numpy as np
from torch import Tensor

from rtcwm.data.codec import Codec
from rtcwm.model.layout import PIXELS_PER_LATENT


class Pixels(ABC):
    """One stream's way between latents and frames.

    Attributes:
        late: chunks by which frames follow their latents.
    """

    late: int

    @abstractmethod
    def encode_proxy(self, pictures: np.ndarray) -> Tensor:
        """Latents `[24, 5, ph, pw]` float32 on the CPU of a chunk's DUV pictures, uint8 `[17, 16 ph, 16 pw, 3]`."""

    @abstractmethod
    def push(self, latents: Tensor) -> np.ndarray:
        """Takes a chunk's latents `[24, 5, h, w]`; frames that can be told now, uint8 `[17 or 0, 16h, 16w, 3]`."""

    @abstractmethod
    def finish(self) -> np.ndarray:
        """The frames that were still to come, as the end of the stream."""


class CodecPixels(Pixels):
    """Those of the embedded world."""

    late = 0

    def __init__(self, codec: Codec, size: tuple[int, int]):
        self.codec, self.size = codec, size

    def encode_proxy(self, pictures: np.ndarray) -> Tensor:
        return self.codec.encode_clip(pictures)

    def push(self, latents: Tensor) -> np.ndarray:
        return self.codec.decode(latents)

    def finish(self) -> np.ndarray:
        return no_frames(self.size)


def no_frames(size: tuple[int, int]) -> np.ndarray:
    """Frames of a stream of this height and width in latents, none of them."""
    return np.empty((0, size[0] * PIXELS_PER_LATENT, size[1] * PIXELS_PER_LATENT, 3), np.uint8)
