"""Samples, windows and the order they are visited in.

A sample is a span (clip, j): six chunks from chunk j. The set of samples, the held-out clips and the order are
functions of the clips and the seed alone, equal on every rank and for every number of ranks.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rtcwm.data.clips import STREAM, Clip
from rtcwm.errors import UserError
from rtcwm.model.layout import (
    AUDIO_CHANNELS,
    AUDIO_LATENT_CHANNELS,
    CHUNK_LATENTS,
    SPAN_CHUNKS,
    audio_latents,
    frames_of,
)
from rtcwm.model.packing import Window
from rtcwm.train.order import EpochSampler, Visit

__all__ = [
    "EpochSampler",
    "Samples",
    "Visit",
    "draw_start",
    "list_samples",
    "load_window",
    "silence",
    "spans",
    "start_frames",
    "stream_chunks",
]

SILENCE = "silence.safetensors"


@dataclass(frozen=True)
class Samples:
    """Training spans as (index into the clips given, first chunk j), the held-out clips, and how many spans of the
    training clips were dropped, by reason."""

    train: tuple[tuple[int, int], ...]
    held_out: tuple[Clip, ...]
    dropped: Mapping[str, int]


def start_frames(clip: Clip) -> tuple[int, ...]:
    """Start frames (chunks) of a clip, ascending."""
    return clip.starts


def stream_chunks(clip: Clip) -> int:
    """Chunks of a clip's stream."""
    return clip.chunks


def sort_spans(clip: Clip, chunks: int = SPAN_CHUNKS) -> tuple[list[int], Counter[str]]:
    """First chunks of the usable spans of a clip, and the number of others by reason."""
    kept, dropped = [], Counter()
    if clip.chunks < chunks:
        dropped[f"the clip is shorter than {chunks} chunks"] += 1
    for first in range(clip.chunks - chunks + 1):
        flagged = [clip.flagged[chunk] for chunk in range(first, first + chunks) if chunk in clip.flagged]
        if flagged:
            dropped[f"flagged: {flagged[0]}"] += 1
        elif not openings(clip, first):
            dropped["no start frame at or before the span can open it"] += 1
        else:
            kept.append(first)
    return kept, dropped


def openings(clip: Clip, first: int) -> list[int]:
    """Start frames m <= `first` that can open a span there: their own chunk, whose picture they are, is not flagged,
    and no scene ends between them and the span."""
    cuts = [chunk for chunk, reason in clip.flagged.items() if chunk < first and "cut" in reason]
    return [m for m in clip.starts if m <= first and m not in clip.flagged and all(chunk < m for chunk in cuts)]


def spans(clip: Clip, chunks: int = SPAN_CHUNKS) -> tuple[int, ...]:
    """First chunks j of the spans none of whose chunks is flagged and that a start frame can open (`openings`)."""
    return tuple(sort_spans(clip, chunks)[0])


def hold_out(clips: Sequence[Clip], val_clips: int, seed: int) -> set[str]:
    """Episodes to hold out: drawn one by one from the seed until they hold `val_clips` clips or more.

    Raises:
        UserError: fewer clips than that, or no episode left to train on.
    """
    sizes = Counter(clip.episode for clip in clips)
    if val_clips < 0 or val_clips > len(clips):
        raise UserError(f"--val-clips {val_clips}: expected 0 to {len(clips)} (the clips found)")
    order = np.random.default_rng([seed, 11]).permutation(sorted(sizes))
    held: set[str] = set()
    for episode in order:
        if sum(sizes[name] for name in held) >= val_clips:
            break
        held.add(str(episode))
    if held and len(held) == len(sizes):
        raise UserError(
            f"--val-clips {val_clips} would hold out every clip: the {len(clips)} clips belong to {len(sizes)} "
            f"episode(s), and the clips of one episode share a scene and move together; ask for fewer, use "
            "--val-clips 0, or add clips of other episodes"
        )
    return held


def list_samples(clips: Sequence[Clip], val_clips: int, seed: int) -> Samples:
    """Training spans and held-out clips.

    Args:
        clips: as `open_clips` gives them (sorted, so that the result depends on the folder alone).
        val_clips: clips to hold out; whole episodes move together, so there may be more.
        seed: chooses the episodes.

    Raises:
        UserError: too many held-out clips, or no span left to train on.
    """
    episodes = hold_out(clips, val_clips, seed)
    train, dropped = [], Counter()
    for index, clip in enumerate(clips):
        if clip.episode not in episodes:
            kept, others = sort_spans(clip)
            train += [(index, first) for first in kept]
            dropped += others
    if not train:
        why = ", ".join(f"{reason} {count}" for reason, count in dropped.most_common()) or "none"
        raise UserError(
            f"no span of {SPAN_CHUNKS} chunks is left to train on in {len(clips)} clips (dropped: {why}): use longer "
            "clips, fewer flags or start frames nearer the beginning"
        )
    return Samples(tuple(train), tuple(clip for clip in clips if clip.episode in episodes), dict(dropped))


def draw_start(clip: Clip, first: int, generator: torch.Generator) -> int:
    """A start frame m <= `first` that can open a span there, uniformly (one number is drawn from a CPU generator).

    Raises:
        UserError: the clip has none.
    """
    fitting = openings(clip, first)
    if not fitting:
        raise UserError(
            f"clip {clip.id} has no start frame at or before chunk {first} that is not flagged and in the same scene "
            f"(it has {clip.starts})"
        )
    return fitting[int(torch.randint(len(fitting), (), generator=generator))]


def finite(tensor: Tensor, clip: Clip, path: Path, name: str) -> Tensor:
    """The tensor as fp32 with a batch axis; UserError when a value is not finite."""
    tensor = tensor.float()[None]
    if not torch.isfinite(tensor).all():
        bad = int((~torch.isfinite(tensor)).sum())
        raise UserError(
            f"clip {clip.id}: {bad} of {tensor.numel()} values of `{name}` read from {path} are not finite: "
            "encode the clip again, or flag these chunks in its clip.json"
        )
    return tensor


def read(path: Path, names: Sequence[str], latents: slice = slice(None)) -> list[Tensor]:
    """Tensors of a safetensors file; of those with four axes only `latents`, and only their bytes are read.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        with safe_open(path, framework="pt") as file:
            parts = {name: file.get_slice(name) for name in names}
            return [part[:, latents] if len(part.get_shape()) == 4 else part[:] for part in parts.values()]
    except (OSError, SafetensorError) as fault:
        raise UserError(f"{path} cannot be read ({fault}): it was moved or changed since the run started") from fault


@lru_cache(maxsize=16)
def silence(clips_root: Path | None, latents: int) -> Tensor:
    """Rows of silent audio, channel-major: `[1, 2 * latents, 32]` fp32 (shared: not to be written to).

    Args:
        clips_root: folder whose `silence.safetensors` (`audio [2, n, 32]`, n >= latents) is used; zeros without one.
        latents: audio latents a channel.

    Raises:
        UserError: the file holds something else or is too short.
    """
    path = clips_root / SILENCE if clips_root is not None else None
    if path is None or not path.exists():
        return torch.zeros(1, AUDIO_CHANNELS * latents, AUDIO_LATENT_CHANNELS)
    try:
        with safe_open(path, framework="pt") as file:
            audio = file.get_tensor("audio").float()
    except (OSError, SafetensorError) as fault:
        raise UserError(
            f"{path} cannot be read ({fault}); expected `audio [{AUDIO_CHANNELS}, n, {AUDIO_LATENT_CHANNELS}]`"
        ) from fault
    if audio.ndim != 3 or audio.shape[::2] != (AUDIO_CHANNELS, AUDIO_LATENT_CHANNELS) or audio.shape[1] < latents:
        raise UserError(
            f"{path}: `audio` has shape {list(audio.shape)}, expected [{AUDIO_CHANNELS}, n, "
            f"{AUDIO_LATENT_CHANNELS}] with n >= {latents}: encode a longer silence"
        )
    if not torch.isfinite(audio).all():
        raise UserError(f"{path}: `audio` holds values that are not finite: encode the silence again")
    return audio[:, :latents].reshape(1, -1, AUDIO_LATENT_CHANNELS)


def load_window(
    clip: Clip, first: int, start: int, chunks: int = SPAN_CHUNKS, picture1: str = "native", latents: int | None = None
) -> Window:
    """Clean latents and conditions of one window, batch 1, fp32, on the CPU. Reads only the window's bytes.

    Args:
        clip: its clip.
        first: first chunk of the window.
        start: start frame m that gives Picture 1 and text (it may also lie after `first`: a teacher's window may).
        chunks: length of the window; a rollout may be longer or shorter than a span.
        picture1: "native" (the video's size) or "2048" (short edge of 2048 pixels, if it was encoded).
        latents: latents of the window instead of whole chunks (37 for the released teacher's).

    Raises:
        UserError: a window outside the clip, no such start frame or picture, values that are not finite.
    """
    count = chunks * CHUNK_LATENTS if latents is None else latents
    begin = first * CHUNK_LATENTS
    if first < 0 or count < 1 or begin + count > clip.chunks * CHUNK_LATENTS:
        raise UserError(
            f"clip {clip.id}: a window of {count} latents from chunk {first} does not fit its {clip.chunks} chunks"
        )
    if start not in clip.starts:
        raise UserError(f"clip {clip.id} has no start frame {start}, only {clip.starts}")
    if picture1 not in ("native", "2048"):
        raise UserError(f'picture1 is {picture1!r}, expected "native" or "2048"')
    stream, opening = clip.path / STREAM, clip.start_file(start)
    video, proxy = read(stream, ("video", "proxy"), slice(begin, begin + count))
    name = f"picture1_{picture1}"
    with safe_open(opening, framework="pt") as file:
        if name not in file.keys():
            raise UserError(
                f"clip {clip.id}: {opening.name} has no `{name}`: prepare the clips with it, or choose picture1 native"
            )
    picture, text, tags = read(opening, (name, "text", "text_tags"))
    return Window(
        video=finite(video, clip, stream, "video"),
        proxy=finite(proxy, clip, stream, "proxy"),
        picture1=finite(picture, clip, opening, name),
        text=finite(text, clip, opening, "text"),
        text_tags=tags.long(),
        audio=silence(clip.path.parent, audio_latents(frames_of(count))),
    )
