"""A tiny base of the real class and random windows, for the tests of the model floor."""

import torch
from diffusers import MiniMaxH3Transformer3DModel

from rtcwm.model.layout import AUDIO_LATENT_CHANNELS, LATENT_CHANNELS, Geometry
from rtcwm.model.lora import Adapter, AdapterShape
from rtcwm.model.packing import Window
from rtcwm.model.sampler import Noise

CONFIG = dict(
    num_attention_heads=2,
    attention_head_dim=32,
    hidden_size=48,
    num_layers=2,
    num_refiner_layers=1,
    ffn_dim=64,
    text_dim=24,
    freq_dim=32,
    time_embed_hidden_dim=32,
    time_embed_dim=24,
    rope_freq_dim=4,
)
FP32_MODULES = ("proj_in", "audio_proj_in", "time_embedder", "proj_out", "audio_proj_out", "rope")
GEOMETRY = Geometry(4, 6, 3, 3)  # 6 target rows and, padded to 4 x 4, 4 proxy rows a latent
TEXT_TAGS = (1, 0, 0, 1, 1)


def small_model(mixed: bool = False) -> MiniMaxH3Transformer3DModel:
    """Fused qkv, every parameter random, all float32 or with the release's mix of dtypes."""
    torch.manual_seed(0)
    model = MiniMaxH3Transformer3DModel(**CONFIG).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(0.0, 0.2).add_(1.0 if parameter.ndim == 1 else 0.0)
    for block in [*model.transformer_blocks, *model.token_refiner.refiner_blocks]:
        block.attn.fuse_projections()
    if mixed:
        model.to(torch.bfloat16)
        for name in FP32_MODULES:
            getattr(model, name).float()
        model.rope.inv_freq = type(model.rope)(CONFIG["rope_freq_dim"]).inv_freq
    return model.requires_grad_(False)


def random_adapter(shape: AdapterShape, seed: int = 0, size: float = 0.1) -> Adapter:
    """An adapter that does something: its up projections are normal of this size instead of zero."""
    adapter, draw = Adapter(shape, seed), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for pair in adapter.pairs():
            pair.up.normal_(0, size, generator=draw)
    return adapter


def random_window(
    latents: int,
    geometry: Geometry = GEOMETRY,
    batch: int = 1,
    picture: tuple[int, int] = (4, 6),
    audio: int = 3,
    seed: int = 0,
) -> Window:
    """Normal noise of the right shapes; `audio` latents a channel."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(batch, *shape, generator=draw)

    return Window(
        video=normal(LATENT_CHANNELS, latents, geometry.height, geometry.width),
        proxy=normal(LATENT_CHANNELS, latents, geometry.proxy_height, geometry.proxy_width),
        picture1=normal(LATENT_CHANNELS, 1, *picture),
        text=normal(len(TEXT_TAGS), CONFIG["text_dim"]),
        text_tags=torch.tensor(TEXT_TAGS),
        audio=normal(2 * audio, AUDIO_LATENT_CHANNELS),
    )


def drawn(generator: torch.Generator) -> Noise:
    """Noise from one generator on the CPU, in the order in which the sampler asks."""
    return lambda kind, chunk, step, shape: torch.randn(shape, generator=generator)
