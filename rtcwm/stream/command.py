"""`rtcwm stream`: its flags. The work is in `run.py`, imported when the command runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rtcwm.errors import at_least, require


@dataclass(frozen=True, kw_only=True)
class Opening:
    """What a stream is opened with: its weights, how it is sampled, and what it starts from.

    Args:
        adapter: file or folder of an adapter in any layout that is read; 'released' for the embedded base's own, 'none'
            for the base alone.
        base: diffusers H3 folder, a config .json (random weights) or 'embedded'; default: --model, else 'embedded'.
        model: diffusers-format MiniMax-H3 folder: its vae/ decodes, and where there is a --picture its text encoder
            reads the prompt; default: --base where that is such a folder, else the embedded world's codec.
        vae: folder of the VAE, instead of the model's.
        text_encoder: folder of the text encoder, instead of the model's.
        clip: folder of one prepared clip: Picture 1, caption and proxies come from it.
        start: start frame of the clip (a chunk); default: its first one.
        picture: picture file of the first frame, in place of a clip.
        prompt: caption of the stream that begins with the picture, or a .txt or .json file that holds it.
        size: WIDTHxHEIGHT of the frames, to which the picture is scaled; default: the picture's own.
        proxy_size: WIDTHxHEIGHT of proxies; default: a quarter of the frames'.
        system_prompt: text file, if clips were prepared with one.
        vision_picture: which Picture 1 the text encoder sees, as clips were prepared.
        text_layer: hidden state of the text encoder that is read.
        text_dtype: of the text encoder's weights.
        tf32: let the VAE's convolutions round to TF32 on a GPU.
        kind: many (many Euler steps a chunk) or few (few steps with fresh noise); auto: as the adapter's file says.
        steps: of a chunk's schedule; this and the next three follow from the adapter's file by default.
        shift: of the schedule.
        history: level at which finished chunks are attended to: clean, last-step or a noise level; by default the one
            that the adapter was trained with, also in another schedule.
        kv_reuse: keep keys and values of the history; false: recompute the window for every chunk.
        seed: of all noise.
        attn: attention kernel.
        compile: compile what lies between a block's matrix products; auto: on GPUs.
        device: cpu, cuda, or auto: cuda where there is one.
        adaln: AdaLN of the blocks computed live, or from a table of the schedule's levels, which takes 39% of the
            weights off the card; auto: a table for bases of over a billion parameters.
        adaln_dir: folder of tables; default: ~/.cache/rtcwm.
        base_config: DeepSpeed JSON of a base engine, such as one that keeps the base in host memory; default: none, the
            base is whole on the device.
    """

    adapter: str
    base: str | None = None
    model: Path | None = None
    vae: Path | None = None
    text_encoder: Path | None = None
    clip: Path | None = None
    start: int | None = None
    picture: Path | None = None
    prompt: str | None = None
    size: str | None = None
    proxy_size: str | None = None
    system_prompt: Path | None = None
    vision_picture: Literal["native", "2048"] = "native"
    text_layer: int = 50
    text_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    tf32: bool = True
    kind: Literal["auto", "many", "few"] = "auto"
    steps: int | None = None
    shift: float | None = None
    history: str | None = None
    kv_reuse: bool | None = None
    seed: int = 0
    attn: Literal["auto", "sdpa", "cudnn", "fa4", "fa3", "fa2", "flex"] = "auto"
    compile: Literal["auto", "on", "off"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    adaln: Literal["auto", "live", "table"] = "auto"
    adaln_dir: str | None = None
    base_config: Path | None = None

    def __post_init__(self) -> None:
        require(
            (self.clip is None) != (self.picture is None),
            "a stream starts from a prepared clip (--clip) or from a picture (--picture with --prompt): "
            "name one of them",
        )
        require(self.picture is None or self.prompt is not None, "--picture needs --prompt: the caption of the stream")
        require(self.clip is None or self.prompt is None, "--prompt goes with --picture; a clip has its own caption")
        require(self.start is None or self.clip is not None, f"--start {self.start}: only a clip has start frames")
        require(0 <= self.seed < 2**63, f"--seed {self.seed}: expected 0 to 2^63 - 1")

    @property
    def base_name(self) -> str:
        """``--base``, or what stands for it."""
        return str(self.base or self.model or "embedded")

    @property
    def model_folder(self) -> Path | None:
        """The folder that VAE and text encoder come from; None for the embedded world's codec."""
        if self.model is not None:
            return Path(self.model)
        base = Path(self.base_name)
        return base if (base / "vae").is_dir() else None


@dataclass(frozen=True, kw_only=True)
class Settings(Opening):
    """A stream as a file.

    Args:
        out: mp4 to write. It plays while it grows, a fragment a chunk, and after a kill; once finished it is an
            ordinary file.
        conditions: condition root with the stream's proxies (%06d.depth.f32, %06d.semantic_id.png, from 000000 on);
            with a picture.
        chunks: length of the stream (17 frames, 0.708 s a chunk); default: all proxies.
        overwrite: replace an existing --out.
        follow: wait for the frames of a condition root that is still growing. A frame is taken once its PNG is whole
            and its depth has its full size.
        follow_seconds: end when no new frame came for so long; a file END in the condition root ends it at once.
        report: JSON file for the seconds of every chunk.
    """

    out: Path
    conditions: Path | None = None
    chunks: int | None = None
    overwrite: bool = False
    follow: bool = False
    follow_seconds: float = 30.0
    report: Path | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.out.suffix == ".mp4", f"--out {self.out}: expected the name of an .mp4 file")
        at_least(self, 1, "chunks")
        require(
            (self.conditions is None) == (self.picture is None),
            "--picture and --conditions go together: the first frame, and the proxies of all of them",
        )
        require(not self.follow or self.conditions is not None, "--follow waits for files of --conditions: name it")
        require(self.follow_seconds > 0, f"--follow-seconds {self.follow_seconds}: expected more than 0")
        if self.report is not None:
            require(self.report.suffix == ".json", f"--report {self.report}: expected the name of a .json file")
            parent = self.report.parent
            require(parent.is_dir(), f"--report {self.report}: there is no folder {parent}; make it first")


def main_stream(**settings) -> int:
    """Stream a clip, or a picture with a caption and proxies, to an mp4 of any length, chunk by chunk with the cache.

    Prints the seconds of every chunk against the 0.708 s that it plays. Ctrl-C ends the stream and finishes the file.
    """
    from rtcwm.stream import run

    return run.stream(Settings(**settings))
