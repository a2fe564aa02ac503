"""`rtcwm prepare`: its flags. The work is in `run.py`, imported when the command runs: it brings PyAV and
PyTorch along, and its workers transformers."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rtcwm.errors import INTERRUPTED, UserError

if TYPE_CHECKING:
    from rtcwm.prepare.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is encoded, by which models, and how.

    Args:
        out: folder to write, one folder a clip, manifest.json and prepare_report.json.
        source: a folder to walk for clip folders and condition roots, or a .jsonl manifest; may stand several
            times.
        model: diffusers-format MiniMax-H3 folder with vae/, text_encoder/, tokenizer/ and processor/.
        root: folder that manifests' paths are relative to, and that no file may lie outside of; default: each source's
            own folder.
        vae: folder of the VAE, instead of the model's.
        text_encoder: folder of the text encoder, instead of the model's.
        starts: start frames of each clip: first, every:N, or chunk indices as 0,3,7.
        size: WIDTHxHEIGHT to scale targets to (Lanczos); default: as they are, in multiples of 32.
        proxy_size: WIDTHxHEIGHT of proxies; default: a quarter of the target's.
        picture1_2048: encode Picture 1 at a short edge of 2048 pixels as well.
        vision_picture: which Picture 1 the text encoder sees: a vision block of 1,010 rows at 1344x768, of 7,170 at
            2048.
        system_prompt: text file; the presentation becomes the user's turn of a chat with this system turn.
        text_layer: hidden state of the text encoder that is read.
        text_dtype: of the text encoder's weights.
        episode_captions: whether caption.json, which describes a whole episode, will do where a clip has no other text.
        tf32: let the VAE's convolutions round to TF32 on a GPU, as PyTorch does by default.
        workers: processes, each with the models on a GPU of its own; default: one a GPU.
        device: cpu, cuda, or auto: all GPUs where there are any.
        check: decode so many chunks back and draw them next to their source (prepare_check.png).
    """

    out: Path
    source: list[str]
    model: Path
    root: Path | None = None
    vae: Path | None = None
    text_encoder: Path | None = None
    starts: str = "first"
    size: str | None = None
    proxy_size: str | None = None
    picture1_2048: bool = False
    vision_picture: Literal["native", "2048"] = "native"
    system_prompt: Path | None = None
    text_layer: int = 50
    text_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    episode_captions: bool = True
    tf32: bool = True
    workers: int | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    check: int = 0

    def __post_init__(self) -> None:
        for name, value, least in (("workers", self.workers, 1), ("check", self.check, 0)):
            if value is not None and value < least:
                raise UserError(f"--{name} {value}: expected {least} or more")

    def settings(self) -> "Settings":
        """What prepared files depend on. Raises UserError for sizes that are none, or a prompt that cannot be read."""
        from rtcwm.prepare.settings import Settings, parse_size

        try:
            prompt = self.system_prompt.read_text(encoding="utf-8").strip() if self.system_prompt else ""
        except (OSError, UnicodeDecodeError) as fault:
            raise UserError(f"--system-prompt {self.system_prompt} cannot be read: {fault}") from fault
        return Settings(
            starts=self.starts, size=parse_size(self.size, "--size"),
            proxy_size=parse_size(self.proxy_size, "--proxy-size"), picture1_2048=self.picture1_2048,
            vision_picture=self.vision_picture, system_prompt=prompt, text_layer=self.text_layer,
            text_dtype=self.text_dtype, episode_captions=self.episode_captions, tf32=self.tf32,
        )  # fmt: skip


def main_prepare(**options) -> None:
    """Encode videos, proxies and captions into clips to train on; the same command finishes what a stopped one left.

    Exit code 0: all clips are there; 1: some were refused, each with a line that says why; 2: it could not start or had
    to stop; 130: Ctrl-C.
    """
    prepare(Options(**options))


def prepare(options: Options) -> None:
    """`main_prepare`, with its flags read."""
    from rtcwm.prepare.run import device_of, open_models, run

    settings = options.settings()
    models = open_models(options.model, options.vae, options.text_encoder, options.text_layer)
    folders = [Path(one) for one in options.source]
    report, sources = run(options.out, folders, options.root, models, settings, options.workers, options.device)
    report.print(options.out)
    if options.check and sources and not report.stopped:
        import torch

        from rtcwm.prepare.check import check

        device = device_of(0, torch.cuda.device_count() if options.device != "cpu" else 0)
        for chunk, found in check(options.out, sources, models.vae, settings, options.check, device).items():
            print(f"check: {chunk} target {found['target']:.2f} dB, proxy {found['proxy']:.2f} dB")
    if report.interrupted:
        print(f"rtcwm: {report.stopped}", file=sys.stderr)
        sys.exit(INTERRUPTED)
    if report.stopped:
        raise UserError(report.stopped)
    if report.refused:
        sys.exit(1)
