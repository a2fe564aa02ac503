"""Layout steps of diffusers' modular MiniMax-H3 pipeline, which rtcwm's packing must equal.

diffusers hides the pipelines' LoRA mixin where transformers is not installed, and the module of the layout steps does
not import then, though it uses none of it. An empty class stands in for the mixin.
"""

import diffusers.loaders

if not hasattr(diffusers.loaders, "MiniMaxH3LoraLoaderMixin"):
    diffusers.loaders.MiniMaxH3LoraLoaderMixin = type("MiniMaxH3LoraLoaderMixin", (), {})

from diffusers.modular_pipelines.minimax_h3.before_denoise import (  # noqa: E402
    MiniMaxH3PrepareLayoutStep,
    MiniMaxH3Ref2VAPrepareLayoutStep,
    MiniMaxH3SetTimestepsStep,
    patchify_video_latents,
)
from diffusers.modular_pipelines.minimax_h3.modular_pipeline import (  # noqa: E402
    audio_latent_num_frames,
    video_latent_num_frames,
)
from diffusers.modular_pipelines.minimax_h3.references import (  # noqa: E402
    MiniMaxH3ImageReference,
    MiniMaxH3VideoReference,
)

build_packed_sequence = MiniMaxH3PrepareLayoutStep.build_packed_sequence
build_ref2va_packed_sequence = MiniMaxH3Ref2VAPrepareLayoutStep.build_ref2va_packed_sequence
build_row_timesteps = MiniMaxH3SetTimestepsStep.build_row_timesteps

__all__ = [
    "MiniMaxH3ImageReference",
    "MiniMaxH3VideoReference",
    "audio_latent_num_frames",
    "build_packed_sequence",
    "build_ref2va_packed_sequence",
    "build_row_timesteps",
    "patchify_video_latents",
    "video_latent_num_frames",
]
