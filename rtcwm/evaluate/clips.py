"""The clips that streams are held against: which ones, from which start frame, and in what batches."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from rtcwm.data.clips import Clip, open_clips
from rtcwm.data.codec import Codec, load_codec
from rtcwm.errors import UserError
from rtcwm.model.layout import CHUNK_LATENTS
from rtcwm.model.loading import BaseSource
from rtcwm.model.packing import Window
from rtcwm.train.dataset import load_window


@dataclass(frozen=True)
class Run:
    """What a run's folder says of itself: its base, its clips' folder and the ids of its held-out clips."""

    base: str
    clips: Path
    held_out: tuple[str, ...]

    @classmethod
    def read(cls, folder: Path) -> "Run":
        """Raises UserError where the folder is not a run's or the run held nothing out."""
        found = {}
        for name in ("args.json", "val_samples.json"):
            try:
                found[name] = json.loads((folder / name).read_text())
            except (OSError, json.JSONDecodeError) as error:
                raise UserError(
                    f"--run {folder}: {name} cannot be read ({error}); name the --out folder of a run"
                ) from error
        settings = found["args.json"]["settings"]
        held_out = tuple(entry["clip"] for entry in found["val_samples.json"])
        if not held_out:
            raise UserError(f"--run {folder} held no clips out (--val-clips 0): name other clips with --clips alone")
        clips = folder / "clips" if settings["clips"] == "embedded" else Path(settings["clips"])
        return cls(settings["base"], clips, held_out)


@dataclass(frozen=True, eq=False)
class Truth:
    """Clips of one geometry, each from its first start frame, over the same number of chunks."""

    root: Path
    clips: tuple[Clip, ...]
    chunks: int

    @cached_property
    def latents(self) -> Tensor:
        """What the streams should be, [clips, 24, 5 * chunks, h, w] float32 on the CPU."""
        return torch.cat([self.window(clip, self.chunks * CHUNK_LATENTS).video for clip in self.clips])

    def window(self, clip: Clip, latents: int, picture1: str = "native") -> Window:
        """Latents of a clip from its first start frame on, and its conditions."""
        return load_window(clip, clip.starts[0], clip.starts[0], picture1=picture1, latents=latents)

    def batches(self, latents: int, picture1: str, size: int) -> Iterator[tuple[list[int], Window]]:
        """Up to `size` clips at a time whose requests share one packed layout: their indices, and one window."""
        groups: dict[tuple, list[int]] = {}
        windows: dict[int, Window] = {}
        for index, clip in enumerate(self.clips):
            window = self.window(clip, latents, picture1)
            key = (tuple(window.text_tags.tolist()), tuple(window.picture1.shape))
            members = groups.setdefault(key, [])
            members.append(index)
            windows[index] = window
            if len(members) == size:
                yield members, joined([windows.pop(member) for member in groups.pop(key)])
        for members in groups.values():
            yield members, joined([windows.pop(member) for member in members])

    def fit(self, chunks: int, who: str) -> None:
        """Raises UserError unless every clip has so many chunks from its first start frame."""
        for clip in self.clips:
            if available(clip) < chunks:
                raise UserError(
                    f"clip {clip.id} has {available(clip)} chunks from its start frame {clip.starts[0]}, {who} needs "
                    f"{chunks}: take longer clips, or leave it out"
                )


def joined(windows: Sequence[Window]) -> Window:
    """Windows of one layout as one batch."""
    parts = {
        name: torch.cat([getattr(w, name) for w in windows]) for name in ("video", "proxy", "picture1", "text", "audio")
    }
    return Window(text_tags=windows[0].text_tags, **parts)


def available(clip: Clip) -> int:
    """Chunks from the first start frame to the end of the clip."""
    return clip.chunks - clip.starts[0]


def choose(root: Path, held_out: Sequence[str] | None, chunks: int | None, most: int | None) -> Truth:
    """The clips to evaluate on.

    Args:
        held_out: ids to keep, None for all clips of the folder; chunks: None for what the shortest clip has.
        most: take the first so many.

    Raises:
        UserError: held-out clips that are not there, clips too short, or none without flagged chunks.
    """
    clips = open_clips(root)
    if held_out is not None:
        by_id = {clip.id: clip for clip in clips}
        if lost := [clip_id for clip_id in held_out if clip_id not in by_id]:
            raise UserError(
                f"{root} has no clip {lost[0]}, which the run held out: name the run's own clips with --clips"
            )
        clips = [by_id[clip_id] for clip_id in sorted(held_out)]
    if chunks is not None and chunks < 1 or most is not None and most < 1:
        raise UserError(f"--chunks {chunks}, --max_clips {most}: expected at least 1")
    wanted = chunks or min(available(clip) for clip in clips)
    whole = [clip for clip in clips if not flagged(clip, wanted)][:most]
    if not whole:
        raise UserError(
            f"every one of {len(clips)} clips has flagged chunks among its first {wanted}: take other clips"
        )
    truth = Truth(root, tuple(whole), wanted)
    truth.fit(wanted, f"--chunks {wanted}")
    return truth


def flagged(clip: Clip, chunks: int) -> bool:
    """Whether a chunk of the stream is flagged: what is in the file is not the truth there."""
    return any(clip.starts[0] <= chunk < clip.starts[0] + chunks for chunk in clip.flagged)


def codec_of(truth: Truth, source: BaseSource) -> Codec:
    """The codec that turns these clips into pixels.

    Raises:
        UserError: the clips were made by another one, or have other text than the base takes.
    """
    codec, clip = load_codec(), truth.clips[0]
    if clip.codec["hash"] != codec.identity["hash"]:
        raise UserError(
            f"clip {clip.id} was made by codec {dict(clip.codec)}; pixels are measured through {codec.identity}, the "
            "embedded world's: make the clips with `rtcwm world`"
        )
    if clip.text_width != source.config["text_dim"]:
        raise UserError(
            f"clip {clip.id} has text of width {clip.text_width}, the base takes {source.config['text_dim']}: name the "
            "base that goes with the clips with --base"
        )
    return codec
