"""Frames of the VAE of MiniMax-H3, one chunk behind their latents.

A chunk is decoded from its five latents and the next one's first two, so its frames can be told one chunk (0.708 s of
the stream) later. Of those seven latents the VAE makes 22 frames: the chunk's 17, and five that it foresees of the
next, over which the next chunk's own first five are faded in. `VaePixels` keeps the latents that wait and the five
frames, and gives, chunk by chunk, exactly what the class makes of the whole stream at once.

Where the two cannot agree: the whole stream's decoder pads its end with copies of the last latent. A chunk that was the
last one of a shorter stream therefore looks different (mostly in its last frames) once another follows it, and a chunk
whose next one never came, as after a kill, has no frames yet.
"""

import numpy as np
import torch
from torch import Tensor

from rtcwm.model.layout import CLIP_FRAMES
from rtcwm.prepare.vae import LOOK_AHEAD, VideoCodec
from rtcwm.stream.pixels import Pixels, no_frames


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
