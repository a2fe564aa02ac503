"""Frames to latents and back, chunk by chunk.

The embedded world's codec has no memory across chunks: frames come with their latents. The VAE of MiniMax-H3 decodes a
chunk from its five latents and the next one's first two, so frames follow their latents by one chunk (0.708 s of the
stream). Of those seven latents it makes 22 frames: the chunk's 17, and five that it foresees of the next, over which the
next chunk's own first five are faded in. `VaePixels` keeps the latents that wait and the five frames, and gives, chunk by
chunk, exactly what the class makes of the whole stream at once.

Where the two cannot agree: the whole stream's decoder pads its end with copies of the last latent. A chunk that was the
last one of a shorter stream therefore looks different (mostly in its last frames) once another follows it, and a chunk
whose next one never came, as after a kill, has no frames yet.
"""

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from rtcwm.data.codec import Codec
from rtcwm.model.layout import CLIP_FRAMES, PIXELS_PER_LATENT
from rtcwm.prepare.vae import LOOK_AHEAD, VideoCodec


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


class VaePixels(Pixels):
    """Those of MiniMax-H3; `codec` with its decoder."""

    late = 1

    def __init__(self, codec: VideoCodec, size: tuple[int, int]):
        self.codec, self.size = codec, size
        self._waiting: Tensor | None = None  # latents of the last chunk, whose frames need the next one's
        self._foreseen: Tensor | None = None  # the first frames of the waiting chunk, as the one before sees them

    def encode_proxy(self, pictures: np.ndarray) -> Tensor:
        return self.codec.encode_proxy(pictures)

    def push(self, latents: Tensor) -> np.ndarray:
        latents = latents.cpu()
        frames = self._decode(latents[:, :LOOK_AHEAD]) if self._waiting is not None else no_frames(self.size)
        self._waiting = latents
        return frames

    def finish(self) -> np.ndarray:
        if self._waiting is None:
            return no_frames(self.size)
        frames = self._decode(self._waiting[:, :0])
        self._waiting = None
        return frames

    @torch.inference_mode()
    def _decode(self, ahead: Tensor) -> np.ndarray:
        """Frames of the waiting chunk, from it and the latents ahead."""
        pixels = self.codec.decode_pixels(torch.cat([self._waiting, ahead], dim=1))
        own, foreseen = pixels[:, :, :CLIP_FRAMES], pixels[:, :, CLIP_FRAMES:]
        if self._foreseen is not None:
            vae = self.codec.vae
            own = vae._blend(self._foreseen, own, vae.frame_overlap, dim=-3)
        self._foreseen = foreseen
        return self.codec.frames(own)


def no_frames(size: tuple[int, int]) -> np.ndarray:
    """Frames of a stream of this height and width in latents, none of them."""
    return np.empty((0, size[0] * PIXELS_PER_LATENT, size[1] * PIXELS_PER_LATENT, 3), np.uint8)
