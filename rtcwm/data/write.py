"""Writing clips: one folder a clip, as `rtcwm.data.clips` reads it, that is whole or not there."""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rtcwm.data.clips import STREAM, read_clip
from rtcwm.data.headers import DESCRIPTION
from rtcwm.errors import StorageFault, UserError
from rtcwm.model.layout import CHUNK_LATENTS, CLIP_FRAMES, FPS, Geometry

SAFE_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
LONGEST_ID = 200  # characters: names have 255, and a folder's is longer while it is written
OWN_ENDS = (".json", ".png")  # of files that lie beside the clips


@dataclass(frozen=True)
class Start:
    """What one start frame gives: Picture 1 `[24, 1, h, w]` (and at a 2048 short edge), text `[n, width]`, tags `[n]`
    (0 vision rows, 1 words) and the caption."""

    picture1: Tensor
    text: Tensor
    text_tags: Tensor
    caption: str
    picture1_2048: Tensor | None = None


def checked_id(clip_id: str) -> str:
    """The id; UserError unless it can name a clip's folder."""
    if not SAFE_ID.fullmatch(clip_id):
        raise UserError(f"the id {clip_id!r} cannot name a folder: use letters, digits, dot, dash and underscore")
    if len(clip_id) > LONGEST_ID or clip_id.endswith(OWN_ENDS):
        raise UserError(
            f"the id {clip_id!r} cannot name a clip's folder: use at most {LONGEST_ID} characters, and no end of "
            f"{' or '.join(OWN_ENDS)}"
        )
    return clip_id


def write_clip(
    root: Path,
    clip_id: str,
    video: Tensor,
    proxy: Tensor,
    starts: Mapping[int, Start],
    episode: str,
    codec: Mapping[str, str],
    flagged: Sequence[Mapping[str, int | str]] = (),
    text_encoder: Mapping[str, str] | None = None,
    prepared: Mapping[str, object] | None = None,
) -> Path:
    """Write a clip folder: aside first, then renamed, so that a folder of that name is always whole, also where the
    process is killed while it replaces an earlier one.

    Args:
        root: folder of clips, made if needed.
        clip_id: name of the folder.
        video: `[24, L, h, w]` normalised latents, L a multiple of 5; stored as bf16 if it is bf16, else as fp16.
        proxy: `[24, L, ph, pw]`.
        starts: by start frame (chunk index).
        episode: clips of one episode are never split between training and held-out clips.
        codec: {name, hash} of what made the latents.
        flagged: spans that training must avoid, as in `clip.json`: {first_chunk, last_chunk (inclusive), reason}.
        text_encoder: {name, hash} of what made the text rows.
        prepared: what the clip was made from (hashes of its sources, settings, remarks), kept as it is.

    Returns:
        The clip's folder; one of the same name is replaced.

    Raises:
        UserError: parts that :func:`rtcwm.data.clips.open_clips` would refuse, or a folder in its place that holds
            other files.
        StorageFault: the folder cannot be written; what was there stays.
    """
    final = root / clip_id
    check_place(final)
    chunks, geometry = video.shape[1] // CHUNK_LATENTS, Geometry(*video.shape[-2:], *proxy.shape[-2:])
    description = {
        "frames": chunks * CLIP_FRAMES,
        "fps": FPS,
        "chunks": chunks,
        "episode": episode,
        "flagged": [dict(span) for span in flagged],
        "codec": dict(codec),
        "text_encoder": dict(text_encoder) if text_encoder else None,
        "geometry": vars(geometry),
    }
    if prepared is not None:
        description["prepared"] = dict(prepared)
    with replacing(final) as aside:
        save_file({"video": stored(video), "proxy": stored(proxy)}, aside / STREAM)
        for start, given in starts.items():
            save_start(aside / f"start_{start}.safetensors", given)
        (aside / DESCRIPTION).write_text(json.dumps(description, indent=1) + "\n")
        read_clip(aside)
    return final


@contextmanager
def replacing(final: Path) -> Iterator[Path]:
    """An empty folder aside, which takes the place of `final` once the block that fills it has ended well.

    Raises:
        StorageFault: the disk refused; what was there stays.
    """
    aside, replaced = (final.with_name(f".{final.name}.{what}-{os.getpid()}") for what in ("writing", "replaced"))
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        yield aside
        for file in aside.iterdir():  # safetensors writes for the owner alone; other nodes' users must read too
            file.chmod(aside.stat().st_mode & 0o666)
        if final.exists():
            final.rename(replaced)
        aside.rename(final)
    except (OSError, SafetensorError) as fault:  # safetensors has its own name for a full disk
        raise StorageFault(f"cannot write {final}: {fault}; make room, then start the same command again") from fault
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)


def save_start(path: Path, start: Start) -> None:
    """The file of one start frame."""
    tensors = {
        "picture1_native": stored(start.picture1),
        "text": stored(start.text),
        "text_tags": start.text_tags.contiguous(),
    }
    if start.picture1_2048 is not None:
        tensors["picture1_2048"] = stored(start.picture1_2048)
    save_file(tensors, path, metadata={"caption": start.caption})


def check_place(folder: Path) -> None:
    """UserError where a clip's folder would take the place of files that are no clip's, such as the videos it is made
    of: they would be gone."""
    own = re.compile(rf"{re.escape(DESCRIPTION)}|{re.escape(STREAM)}|start_\d+\.safetensors|\..*")
    try:
        others = sorted(name for name in os.listdir(folder) if not own.fullmatch(name))
    except FileNotFoundError:
        return
    except OSError as fault:
        raise UserError(f"{folder} is in the place of a clip's folder ({fault}): move it away") from fault
    if others:
        raise UserError(
            f"{folder} holds {others[0]}, which is no part of a clip and would be lost: write clips into a folder of "
            "their own, or move it away"
        )


def stored(tensor: Tensor) -> Tensor:
    """The tensor as it goes to disk: bf16 stays, everything else becomes fp16."""
    return (tensor if tensor.dtype == torch.bfloat16 else tensor.half()).contiguous()
