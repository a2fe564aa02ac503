"""The video VAE of MiniMax-H3, a chunk at a time.

`encode` of the published class drops the last three latents of what it is given. A chunk stream needs all five of every
chunk, so it is built with the class's `_encode_clip`, 17 frames at a time: the VAE never looks beyond such a clip, so
that 37 consecutive latents of a stream are what `encode` makes of those 124 frames.

Targets are the mode of the posterior. Conditions (Picture 1 and proxies) follow the released recipe: a sample of the
posterior under a CPU generator seeded 42, rounded to fp16, then normalised. The generator starts anew for each chunk of
a proxy, so that a chunk's latents depend on nothing but the chunk and are the same in every window and at inference.

The encoder is fp32 whatever the folder is loaded in (the class pins it), and tiled as released.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rtcwm.errors import UserError
from rtcwm.model.layout import CHUNK_LATENTS, CLIP_FRAMES, LATENT_CHANNELS, PIXELS_PER_LATENT
from rtcwm.prepare.extra import missing
from rtcwm.prepare.weights import weight_files

try:  # diffusers asks for these when its H3 blocks are imported
    from diffusers import AutoencoderKLMiniMaxH3
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
    from diffusers.modular_pipelines.minimax_h3.encoders import encode_vae_condition
except ImportError as error:
    raise missing("transformers", error) from error

PIXEL_MEAN, PIXEL_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's
CONDITION_SEED = 42
LOOK_AHEAD = 2  # latents of the next chunk that decoding a chunk reads


class VideoCodec:
    """A loaded VAE. Frames are uint8 RGB `[n, H, W, 3]`, H and W multiples of 16; latents fp32 on the CPU."""

    def __init__(self, folder: Path, device: torch.device, tf32: bool = True, decoder: bool = False):
        """Load it.

        Args:
            folder: `vae/` of a diffusers-format folder.
            device: where to encode.
            tf32: let convolutions round their inputs to ten bits on a GPU, as PyTorch does by default; several times
                faster, and less than the rounding of latents to fp16.
            decoder: keep the decoder, which only :meth:`decode` needs.

        Raises:
            UserError: pickles, or a VAE of another shape.
        """
        weight_files(folder)
        # bf16 reaches the decoder alone
        vae = AutoencoderKLMiniMaxH3.from_pretrained(
            folder, torch_dtype=torch.bfloat16, use_safetensors=True, local_files_only=True
        )
        found = (
            vae.config.clip_length,
            vae.tokens_chunk_size,
            vae.config.latent_channels,
            vae.spatial_compression_ratio,
        )
        expected = (CLIP_FRAMES, CHUNK_LATENTS, LATENT_CHANNELS, PIXELS_PER_LATENT)
        if found != expected:
            raise UserError(
                f"{folder}: frames of a clip, latents of a clip, channels and pixels a latent are {found}, "
                f"expected {expected}"
            )
        if not decoder:
            vae.decoder = None
        torch.backends.cudnn.allow_tf32 = tf32
        # The same kernels in every run: clips have to come out the same after an interruption.
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
        self.vae, self.device = vae.eval().requires_grad_(False).to(device), device
        self.mean, self.std = (
            torch.tensor(values).view(-1, 1, 1, 1) for values in (vae.config.latents_mean, vae.config.latents_std)
        )

    def posterior(self, frames: np.ndarray) -> DiagonalGaussianDistribution:
        """Posterior of one 17-frame clip, five latents."""
        return DiagonalGaussianDistribution(self.vae._encode_clip(self._pixels(frames)))

    @torch.inference_mode()
    def encode_target(self, frames: np.ndarray) -> Tensor:
        """Latents of one chunk, `[17, H, W, 3]` -> `[24, 5, H/16, W/16]`: mode, normalised."""
        return self._normalised(self.posterior(frames).mode())

    @torch.inference_mode()
    def encode_proxy(self, frames: np.ndarray) -> Tensor:
        """Latents of one chunk as a condition, same shapes: sample, fp16, normalised."""
        sample = self.posterior(frames).sample(generator=torch.Generator().manual_seed(CONDITION_SEED))
        return self._normalised(sample.half())

    @torch.inference_mode()
    def encode_picture(self, picture: np.ndarray) -> Tensor:
        """Latent of one picture as a condition, `[H, W, 3]` -> `[24, 1, H/16, W/16]`, by diffusers' own recipe."""
        pixels = torch.from_numpy(picture.copy()).to(self.device).permute(2, 0, 1)[None, :, None]
        return encode_vae_condition(self.vae, pixels, PIXEL_MEAN, PIXEL_STD, CONDITION_SEED)[0]

    @torch.inference_mode()
    def decode(self, latents: Tensor) -> np.ndarray:
        """Frames of one chunk alone: `[24, 5 or 7, h, w]` -> uint8 `[17, 16h, 16w, 3]`; see :meth:`decode_pixels`."""
        return self.frames(self.decode_pixels(latents)[:, :, :CLIP_FRAMES])

    @torch.inference_mode()
    def decode_pixels(self, latents: Tensor) -> Tensor:
        """What the class makes of latents `[24, L, h, w]` on the CPU: `[1, 3, n, 16h, 16w]` on the device, as it counts
        pixels.

        A chunk is decoded from its five latents and two of the next one; of seven, the frames after the 17th are the
        next chunk's first five as this one foresees them. Without the two (the last chunk of a clip) the class repeats
        the last latent.
        """
        wanted = (self.mean + self.std * latents.float())[None].to(self.device)
        return self.vae.decode(wanted, return_dict=False)[0]

    @staticmethod
    def frames(pixels: Tensor) -> np.ndarray:
        """Pixels as the class counts them, `[1, 3, n, H, W]`, as uint8 `[n, H, W, 3]` on the CPU."""
        mean, std = (torch.tensor(values, device=pixels.device).view(3, 1, 1, 1) for values in (PIXEL_MEAN, PIXEL_STD))
        shown = ((pixels[0].float() * std + mean).clamp(0, 1) * 255).round().byte()
        return shown.permute(1, 2, 3, 0).cpu().numpy()

    def _pixels(self, frames: np.ndarray) -> Tensor:
        """ImageNet-normalised `[1, 3, n, H, W]` on the device."""
        pixels = torch.from_numpy(frames).to(self.device).permute(3, 0, 1, 2)[None].float().div(255.0)
        mean, std = (torch.tensor(values, device=self.device).view(1, 3, 1, 1, 1) for values in (PIXEL_MEAN, PIXEL_STD))
        return (pixels - mean) / std

    def _normalised(self, latents: Tensor) -> Tensor:
        return (latents[0].float().cpu() - self.mean) / self.std


def finite(parts: Iterable[Tensor], what: str) -> Tensor:
    """Chunks of latents `[24, 5, h, w]` as one stream; UserError where fp16 cannot hold a value."""
    stream = torch.cat(list(parts), dim=1)
    bad = int((~torch.isfinite(stream.half())).sum())
    if bad:
        raise UserError(f"{bad} values of the {what} latents are not finite in fp16: the VAE's weights are damaged")
    return stream
