"""`rtcwm evaluate`: its flags. The work is in `evaluate.py`, imported when the command runs: it brings DeepSpeed along,
which takes seconds that other commands need not spend."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rtcwm.errors import at_least


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Which models stream which clips.

    Args:
        out: folder to write; files of an earlier evaluation in it are replaced.
        model: NAME=ADAPTER[:KIND][,key=value...], may stand several times. ADAPTER is a file, 'base' for none,
            or 'released' for the adapter of the embedded base; KIND is teacher (one window of 37 latents), many (a
            stream of many Euler steps, also called causal) or few (few steps with fresh noise); keys are steps, shift,
            history (clean, last-step or a noise level), kv_reuse and forced (history replaced by the truth). What is
            not given follows from the adapter's metadata: dmd few, df and tf many, others teacher.
        run: folder of a run: its held-out clips are taken, and its base and clips unless they are given.
        clips: folder of clips; all of them without --run.
        base: diffusers H3 folder, a config .json (random weights) or 'embedded', which is the default.
        chunks: chunks of a stream from the clip's first start frame; default: what the shortest clip has.
        max_clips: take the first so many clips.
        seed: of all noise; every model gets the same.
        batch: clips of a forward; default: up to 16, as far as 8 GiB hold their keys and values.
        attn: attention kernel.
        compile: compile what lies between a block's matrix products; auto: on GPUs.
        device: cpu, cuda, or auto: cuda where there is one.
        picture_clip: id of the clip in the picture and the film; default: the first.
        video: write evaluate.mp4.
    """

    out: Path
    model: list[str]
    run: Path | None = None
    clips: Path | None = None
    base: str | None = None
    chunks: int | None = None
    max_clips: int | None = None
    seed: int = 0
    batch: int | None = None
    attn: Literal["auto", "sdpa", "cudnn", "fa4", "fa3", "fa2", "flex"] = "auto"
    compile: Literal["auto", "on", "off"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    picture_clip: str | None = None
    video: bool = True

    def __post_init__(self) -> None:
        at_least(self, 1, "batch")


def main_evaluate(**settings) -> None:
    """Stream clips with several models and measure them against the truth: evaluate.json, .png, .mp4, TensorBoard."""
    from rtcwm.evaluate.evaluate import evaluate

    evaluate(Settings(**settings))
