"""`rtcwm clips import`: clip folders of other trainers' caches, and what those cannot give.

A cache's sample is one window, usually of 37 latents: seven whole chunks (35 latents, 119 frames) and two latents that
begin an eighth. Its one start frame is the window's own beginning, with the cache's text rows. So diffusion forcing
gets two six-chunk spans of each clip, and distillation, whose rollouts are longer, gets none.

Latents are taken as they are: normalised, in fp16 or bf16, whichever loses less. Which VAE made them is not told by any
cache; without ``--codec`` they carry an identity of their own, so that they are never mixed with others unnoticed.
"""

import re
from collections import Counter
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
from torch import Tensor

from rtcwm.curate.cached import Cached
from rtcwm.curate.caches import Read, open_cache
from rtcwm.curate.options import EPISODE
from rtcwm.data import manifest
from rtcwm.data.clips import clip_folders, read_clip
from rtcwm.data.write import Start, checked_id, write_clip
from rtcwm.errors import StorageFault, UserError
from rtcwm.model.layout import CHUNK_LATENTS, LATENT_CHANNELS, PIXELS_PER_LATENT, SPAN_CHUNKS, TEXT_TAG, VIDEO_TAG
from rtcwm.train.config import DistillConfig

SHORT_EDGE_2048 = 2048 // PIXELS_PER_LATENT


@dataclass
class Imported:
    """What became of a cache; `whole` are the ids of its clips that are there, made or kept."""

    made: int = 0
    kept: int = 0
    refused: list[str] = field(default_factory=list)
    chunks: Counter[int] = field(default_factory=Counter)
    left: Counter[int] = field(default_factory=Counter)
    episodes: set[str] = field(default_factory=set)
    whole: set[str] = field(default_factory=set)
    notes: Counter[str] = field(default_factory=Counter)


def import_cache(source: Path, out: Path, codec: dict[str, str], episode: str = EPISODE) -> Imported:
    """Writes a clip for every sample of a cache; a sample that cannot be used is named and left out.

    Args:
        source: as `open_cache`; out: folder to make, or one that an import of the same kind began.
        codec: {name, hash} of what made the latents; episode: a pattern whose first group names a clip's episode.

    Raises:
        UserError: nothing to import, a folder of other clips, or a pattern that is none.
        StorageFault: the folder cannot be written.
    """
    try:
        pattern = re.compile(episode)
    except re.error as error:
        raise UserError(f"--episode {episode!r} is not a pattern: {error}") from error
    if pattern.groups < 1:
        raise UserError(f"--episode {episode!r} has no group: put the part that names the episode in parentheses")
    kind, samples = open_cache(source)
    claim(out, kind, codec)
    found, taken = Imported(), {}
    for name, read in samples:
        clip_id = re.sub(r"[^A-Za-z0-9._-]", "_", name).lstrip(".-") or "clip"
        try:
            if clip_id in taken:
                raise UserError(f"{source}: {name} and {taken[clip_id]} are both {clip_id} as a folder; rename one")
            taken[clip_id] = name
            one_clip(out, checked_id(clip_id), read, codec, pattern, found)
        except StorageFault:
            raise
        except UserError as fault:
            found.refused.append(str(fault))
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as fault:
            # one odd sample must not end an import of thousands
            found.refused.append(f"{source}: {name} cannot be used, for a reason that nobody foresaw ({fault!r})")
    if not found.made and not found.kept:
        raise UserError(
            f"nothing of {source} can be used; first: {found.refused[0] if found.refused else 'it is empty'}"
        )
    listed = [path for path in clip_folders(out) if path.name in found.whole or whole(path)]
    clips = {path.name: manifest.clip_hash(path) for path in listed}
    manifest.write(out, {"codec": codec, "clips": clips, "imported": kind})
    return found


def claim(out: Path, kind: str, codec: dict[str, str]) -> None:
    """Makes the folder, or checks that it holds a part of the same import."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make --out {out}: {error}") from error
    listed = manifest.read(out)
    if listed is None and clip_folders(out):
        raise UserError(f"--out {out} holds clips that were not imported: choose another folder")
    if listed is not None and (listed.get("imported") != kind or listed["codec"] != codec):
        raise UserError(
            f"--out {out} holds clips of {listed.get('imported', 'another origin')} and codec {listed['codec']}, "
            f"these are of {kind} and {codec}: choose another folder"
        )
    manifest.write(out, {"codec": codec, "clips": {}, "imported": kind})


def one_clip(out: Path, clip_id: str, read: Read, codec: dict[str, str], pattern: re.Pattern, found: Imported) -> None:
    """Makes one clip, unless it is there and whole."""
    match = pattern.fullmatch(clip_id)
    episode = match[1] if match else clip_id
    if whole(out / clip_id):
        found.kept += 1
        found.episodes.add(episode)
        found.whole.add(clip_id)
        return
    sample = read()
    check(sample)
    chunks = sample.video.shape[1] // CHUNK_LATENTS
    if chunks < SPAN_CHUNKS:
        raise UserError(
            f"{sample.source}: {sample.video.shape[1]} latents are {chunks} whole chunks, a span takes {SPAN_CHUNKS}"
        )
    picture, large, note = pictures(sample)
    start = Start(picture, sixteen(sample.text), sample.tags.long(), sample.caption, large)
    latents = slice(0, chunks * CHUNK_LATENTS)
    told = {"cache": sample.source, **sample.told}
    try:
        write_clip(
            out, clip_id, sixteen(sample.video[:, latents]), sixteen(sample.proxy[:, latents]), {0: start}, episode,
            codec, prepared={"imported": told, "picture1": note},
        )  # fmt: skip
    except StorageFault:
        raise
    except UserError as fault:
        raise UserError(f"{sample.source}: {fault}") from fault
    found.made += 1
    found.episodes.add(episode)
    found.whole.add(clip_id)
    found.chunks[chunks] += 1
    found.left[sample.video.shape[1] % CHUNK_LATENTS] += 1
    found.notes[note] += 1
    found.notes["no caption: the cache's text rows are all there is" if not sample.caption else "captions kept"] += 1


def whole(folder: Path) -> bool:
    """Whether a clip is there that can be read."""
    try:
        read_clip(folder)
    except UserError:
        return False
    return True


def check(sample: Cached) -> None:
    """Holds a sample's tensors against each other; raises `UserError` with its source."""
    video, proxy, source = sample.video, sample.proxy, sample.source
    named = {"vae_latent": video, "proxy_latent": proxy, "text_embedding": sample.text}
    if sample.picture is not None:
        named["anchor_latent"] = sample.picture
    for name, tensor in named.items():
        if not tensor.is_floating_point():
            raise UserError(f"{source}: {name} is {tensor.dtype}, expected floating point")
        if not tensor.numel() or not torch.isfinite(tensor.float()).all():
            raise UserError(f"{source}: {name} is empty or holds values that are not finite")
        if name != "text_embedding" and (tensor.ndim != 4 or tensor.shape[0] != LATENT_CHANNELS):
            raise UserError(f"{source}: {name} is {list(tensor.shape)}, expected [{LATENT_CHANNELS}, L, h, w]")
    if proxy.shape[1] != video.shape[1]:
        raise UserError(
            f"{source}: vae_latent has {video.shape[1]} latents and proxy_latent {proxy.shape[1]}, expected the same "
            "frames"
        )
    if sample.picture is not None and sample.picture.shape[1] != 1:
        raise UserError(f"{source}: anchor_latent has {sample.picture.shape[1]} latents, expected 1")
    text, tags = sample.text, sample.tags
    if text.ndim != 2 or tags.shape != text.shape[:1]:
        raise UserError(
            f"{source}: text_embedding is {list(text.shape)} and text_token_tags {list(tags.shape)}, expected "
            "[n, width], [n]"
        )
    if tags.is_floating_point() or not set(tags.tolist()) <= {VIDEO_TAG, TEXT_TAG}:
        raise UserError(
            f"{source}: text_token_tags holds {sorted(set(tags.tolist()))}, expected {VIDEO_TAG} and {TEXT_TAG}"
        )


def pictures(sample: Cached) -> tuple[Tensor, Tensor | None, str]:
    """Picture 1 in the video's size, at a short edge of 2048 where the cache has it, and where they are from.

    The VAE codes a clip's first frame alone, so the first latent of the window is the coding of its first frame.
    """
    first = sixteen(sample.video[:, :1])
    if sample.picture is None:
        return first, None, "Picture 1 is the window's first latent: the cache has no anchor"
    given = sixteen(sample.picture)
    size = tuple(given.shape[-2:])
    if size == tuple(sample.video.shape[-2:]):
        return given, None, "Picture 1 is the cache's anchor"
    if min(size) == SHORT_EDGE_2048:
        return first, given, "Picture 1 native is the window's first latent, 2048 is the cache's anchor"
    return (
        first,
        None,
        f"Picture 1 is the window's first latent: the anchor of {size[0]} x {size[1]} latents has no place",
    )


def sixteen(tensor: Tensor) -> Tensor:
    """A tensor in 16 bits: bf16 where that loses nothing or fp16 overflows, else fp16."""
    if tensor.dtype in (torch.bfloat16, torch.float16):
        return tensor
    wide = tensor.bfloat16()
    return (
        wide if torch.equal(wide.to(tensor.dtype), tensor) or not torch.isfinite(tensor.half()).all() else tensor.half()
    )


def report(found: Imported, codec: dict[str, str]) -> list[str]:
    """What was made, and what these clips cannot give."""
    lines = [f"{found.made} clips made, {found.kept} already there, {len(found.refused)} refused"]
    for chunks, count in sorted(found.chunks.items()):
        spans = chunks - SPAN_CHUNKS + 1
        lines.append(
            f"{count} clips of {chunks} chunks: {spans} spans of {SPAN_CHUNKS} chunks each, one start frame (0)"
        )
    if any(found.left):
        lines.append(
            "left out: the last "
            + ", ".join(f"{left} latents of {count} clips" for left, count in sorted(found.left.items()) if left)
            + ", which are no whole chunk"
        )
    defaults = {option.name: option.default for option in fields(DistillConfig)}
    if found.chunks and max(found.chunks) < defaults["max_chunks"]:
        lines.append(
            f"no rollouts for distillation: its defaults ask for {defaults['min_chunks']} to {defaults['max_chunks']} "
            f"chunks from a start frame, the longest clip has {max(found.chunks)}; train on these clips, distil on "
            "longer ones"
        )
    lines += [f"{note}: {count} clips" for note, count in found.notes.items()]
    lines.append(f"{len(found.episodes)} episodes (--episode); clips of one are held out together")
    lines.append(
        "not told by a cache: whether targets are the posterior's mode or a sample of it, and other start frames"
    )
    lines.append(f"codec: {codec['name']} {codec['hash']}")
    return lines
