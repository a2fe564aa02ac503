"""Real media and a small MiniMax-H3 folder for the tests of preparation: the published classes with narrow configs and
random weights, saved in the release's layout; videos encoded by PyAV."""

from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import av
import numpy as np
import torch
from diffusers import AutoencoderKLMiniMaxH3
from PIL import Image
from tokenizers import pre_tokenizers
from transformers import Qwen2TokenizerFast, Qwen2VLImageProcessorPil, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from rtcwm.data import duv

HEIGHT, WIDTH, PROXY = 32, 64, (32, 32)
SPECIAL = ("im_start", "im_end", "vision_start", "vision_end", "image_pad", "video_pad")
CHAT = "{% for turn in messages %}<|im_start|>{{ turn.role }}\n{{ turn.content }}<|im_end|>\n{% endfor %}"


@lru_cache(maxsize=1)
def _kept() -> TemporaryDirectory:
    return TemporaryDirectory(prefix="rtcwm-h3-")  # removed when the interpreter ends


@lru_cache(maxsize=1)
def small_h3() -> Path:
    """A folder with vae/, text_encoder/ (52 layers, so that state 50 can be read), tokenizer/ and processor/."""
    root = Path(_kept().name) / "h3"
    torch.manual_seed(0)
    small_vae().save_pretrained(root / "vae")
    tokenizer = small_tokenizer()
    tokenizer.save_pretrained(root / "tokenizer")
    area = {"shortest_edge": 32 * 32, "longest_edge": 4096 * 4096}
    Qwen2VLImageProcessorPil(patch_size=16, merge_size=2, temporal_patch_size=2, size=area).save_pretrained(
        root / "processor"
    )
    small_qwen(tokenizer).save_pretrained(root / "text_encoder")
    return root


def small_vae() -> AutoencoderKLMiniMaxH3:
    vae = AutoencoderKLMiniMaxH3(
        block_out_channels=(4, 4, 8, 8), layers_per_block=1, spatial_downsample_factors=(2, 2, 2, 2),
        temporal_downsample_factors=(1, 2, 2, 1), norm_num_groups=2, decoder_num_layers=1,
        decoder_num_attention_heads=2, decoder_attention_head_dim=16,
        latents_mean=tuple(float(x) for x in np.linspace(-0.3, 0.3, 24)),
        latents_std=tuple(float(x) for x in np.linspace(0.4, 1.6, 24)),
    )  # fmt: skip
    for weight in vae.parameters():  # as trained ones: neither gates nor biases are zero
        if weight.ndim == 1:
            torch.nn.init.normal_(weight, 0.5, 0.1)
    return vae


def small_tokenizer() -> Qwen2TokenizerFast:
    """Byte-level, without merges, with Qwen3-VL's special tokens and a chat template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Qwen2TokenizerFast(vocab={letter: index for index, letter in enumerate(letters)}, merges=[])
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<|{name}|>" for name in SPECIAL]})
    tokenizer.chat_template = CHAT
    return tokenizer


def small_qwen(tokenizer: Qwen2TokenizerFast) -> Qwen3VLForConditionalGeneration:
    token = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in SPECIAL}
    rope = {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 1e4, "mrope_interleaved": True}
    text = dict(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=52, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, rope_parameters=rope, initializer_range=0.3,
    )  # fmt: skip
    vision = dict(
        depth=2, hidden_size=32, intermediate_size=32, num_heads=2, patch_size=16, spatial_merge_size=2,
        temporal_patch_size=2, out_hidden_size=32, num_position_embeddings=64, deepstack_visual_indexes=[0, 1],
        initializer_range=0.3,
    )  # fmt: skip
    config = Qwen3VLConfig(
        text_config=text, vision_config=vision, image_token_id=token["image_pad"], video_token_id=token["video_pad"],
        vision_start_token_id=token["vision_start"], vision_end_token_id=token["vision_end"],
    )  # fmt: skip
    return Qwen3VLForConditionalGeneration(config).eval().bfloat16()


def scene(count: int, height: int = HEIGHT, width: int = WIDTH, seed: int = 0) -> np.ndarray:
    """Frames of a moving gradient with a bright square, uint8 `[count, height, width, 3]`; all frames differ."""
    shift = np.arange(count)[:, None, None] * 2 + seed * 31
    rows, columns = np.arange(height)[None, :, None], np.arange(width)[None, None, :]
    frames = np.stack(
        [
            (columns + shift) % 256 + 0 * rows,
            (2 * rows + shift) % 256 + 0 * columns,
            (rows + columns + 0 * shift) % 256,
        ],
        -1,
    )
    for index, frame in enumerate(frames):
        left = (5 * index + 7 * seed) % (width - 16)
        frame[8:24, left : left + 16] = 255
    return frames.astype(np.uint8)


def write_video(
    path: Path,
    frames: np.ndarray,
    rate: Fraction | int = 24,
    codec: str = "libx264",
    pix_fmt: str = "yuv420p",
    stamps: list[int] | None = None,
    clock: Fraction | None = None,
    **options: str,
) -> Path:
    """Encode frames; `stamps` are time stamps in ticks of `clock` seconds for a variable rate."""
    path.parent.mkdir(parents=True, exist_ok=True)
    faststart = {"movflags": options.pop("movflags")} if "movflags" in options else {}
    with av.open(str(path), "w", options=faststart) as file:
        stream = file.add_stream(codec, rate=Fraction(rate), options=options)
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], pix_fmt
        if clock:
            stream.codec_context.time_base = clock
        for index, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            if stamps:
                frame.pts, frame.time_base = stamps[index], clock
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return path


def write_duv(path: Path, pictures: np.ndarray, **changed) -> Path:
    """A lossless DUV video as producers write it: H.264 in RGB, crf 0."""
    return write_video(path, pictures, **dict(codec="libx264rgb", pix_fmt="rgb24", crf="0") | changed)


def planes(count: int, height: int = PROXY[0], width: int = PROXY[1], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Depth in metres (sky 0) and ids of `count` pictures, in blobs as rendered ones are."""
    random = np.random.default_rng(seed)
    ids = np.kron(random.integers(0, 12, (count, height // 8, width // 8)), np.ones((8, 8))).astype(np.uint8)
    depth = random.uniform(0.2, 300, (count, height, width)).astype(np.float32)
    depth[ids == duv.CLASSES.index("sky")] = 0
    return depth, ids


def write_conditions(folder: Path, depth: np.ndarray, ids: np.ndarray) -> Path:
    """A condition root."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (metres, labels) in enumerate(zip(depth, ids, strict=True)):
        metres.astype("<f4").tofile(folder / f"{number:06d}.depth.f32")
        Image.fromarray(labels).save(folder / f"{number:06d}.semantic_id.png")
    return folder


def write_clip_folder(
    root: Path, name: str, frames: int = 36, prompt: str | None = "[0.00s-1.50s] A square moves.", seed: int = 0
) -> Path:
    """A clip folder of the published layout with a lossless DUV video and an anchor."""
    pictures = scene(frames, seed=seed)
    write_video(root / name / "target" / "rgb.mp4", pictures, crf="16")
    Image.fromarray(pictures[0]).save(root / name / "target" / "anchor.png")
    write_duv(root / name / "proxy" / "duv.mp4", duv.encode(*planes(frames, seed=seed)))
    if prompt is not None:
        (root / name / "prompt.txt").write_bytes(prompt.encode())
    return root / name
