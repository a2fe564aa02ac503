"""`rtcwm clips check`: everything that is wrong with a folder of clips, one line a fault.

Headers are checked as a run checks them, but every clip is looked at instead of stopping at the first fault, and then
the values are read. Chunks that `clip.json` flags are not: training leaves them out. With ``--flag`` the chunks that
`rtcwm.curate.quality` finds are written there, in the place of those that it wrote before; spans that others flagged
stay.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from rtcwm.curate.options import Limits
from rtcwm.curate.quality import BY, Measures, flagged_spans, measure, reasons, statistics_faults
from rtcwm.data import manifest
from rtcwm.data.clips import COMMON, STREAM, Clip, clip_folders, odd_clips, read_clip
from rtcwm.data.headers import DESCRIPTION, shapes
from rtcwm.errors import UserError
from rtcwm.model.layout import CHUNK_LATENTS, SPAN_CHUNKS
from rtcwm.train.dataset import sort_spans


@dataclass
class Findings:
    """What a check found: faults, chunks now flagged by reason, spans of six chunks that are left and that are not."""

    clips: int = 0
    chunks: int = 0
    faults: list[str] = field(default_factory=list)
    flagged: Counter[str] = field(default_factory=Counter)
    usable: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


def check(root: Path, limits: Limits, flag: bool) -> Findings:
    """Checks all clips under a root.

    Args:
        root: folder of clips; flag: write what the latents show into every `clip.json`.

    Raises:
        UserError: not a folder, or no clips in it.
    """
    folders = clip_folders(root)
    if not folders:
        raise UserError(f"{root} holds no clip folders ({DESCRIPTION}, {STREAM}, start_<m>.safetensors)")
    found, clips = Findings(clips=len(folders)), []
    for folder in folders:
        try:
            clip = read_clip(folder)
        except UserError as fault:
            found.faults.append(str(fault))
            continue
        video, proxy = measure_clip(clip)
        if flag:
            write_flags(clip, [reasons(*pair, limits) for pair in zip(video, proxy, strict=True)])
            clip = read_clip(folder)
        clips.append(clip)
        found.chunks += clip.chunks
        found.flagged.update(clip.flagged.values())
        found.faults += value_faults(clip, video, proxy, limits)
        kept, dropped = sort_spans(clip)
        found.usable += len(kept)
        found.dropped += dropped
    found.faults += common_faults(root, clips)
    return found


def measure_clip(clip: Clip) -> tuple[list[Measures], list[Measures]]:
    """Measures of every chunk's video and proxy; a chunk at a time is in memory."""
    both: tuple[list[Measures], list[Measures]] = ([], [])
    with safe_open(clip.path / STREAM, framework="pt") as file:
        for name, measures in zip(("video", "proxy"), both, strict=True):
            stored, before = file.get_slice(name), None
            for chunk in range(clip.chunks):
                latents = stored[:, chunk * CHUNK_LATENTS : (chunk + 1) * CHUNK_LATENTS]
                measures.append(measure(latents, before))
                before = latents[:, -1:]
    return both


def write_flags(clip: Clip, by_chunk: list[list[str]]) -> None:
    """Replaces the spans that this command flagged in a clip's description, in one step; no change, no write."""
    file = clip.path / DESCRIPTION
    description = json.loads(file.read_text())
    others = [span for span in description["flagged"] if span.get("by") != BY]
    text = json.dumps(description | {"flagged": others + flagged_spans(by_chunk)}, indent=1) + "\n"
    if text == file.read_text():
        return
    aside = file.with_name(f".{DESCRIPTION}.{os.getpid()}")
    try:
        aside.write_text(text)
        aside.chmod(file.stat().st_mode & 0o777)
        aside.replace(file)
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error}") from error
    finally:
        aside.unlink(missing_ok=True)


def value_faults(clip: Clip, video: list[Measures], proxy: list[Measures], limits: Limits) -> Iterator[str]:
    """Faults of a clip's numbers: the stream's chunks that are not flagged, then its start frames."""
    stream = clip.path / STREAM
    for name, measures in (("video", video), ("proxy", proxy)):
        used = {chunk: found for chunk, found in enumerate(measures) if chunk not in clip.flagged}
        for chunk, found in used.items():
            if found.bad:
                yield (
                    f"{stream}: `{name}` holds {found.bad} values that are not finite in chunk {chunk}, expected "
                    "none: encode the clip again, or flag the chunk (--flag)"
                )
            elif found.constant:
                yield (
                    f"{stream}: `{name}` is constant in chunk {chunk}, expected a picture: encode the clip again, or "
                    "flag the chunk (--flag)"
                )
        for fault in statistics_faults(name, [found for found in used.values() if not found.constant], limits):
            yield f"{stream}: {fault}"
    for start in clip.starts:
        yield from start_faults(clip.start_file(start))


def start_faults(path: Path) -> Iterator[str]:
    """Faults of the numbers of one start frame's file."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name).float() for name in shapes(path) if name != "text_tags"}
    except (OSError, SafetensorError) as error:
        yield f"{path}: cannot be read ({error}), expected a start frame: prepare the clip again"
        return
    for name, tensor in sorted(tensors.items()):
        if bad := int((~torch.isfinite(tensor)).sum()):
            yield f"{path}: `{name}` holds {bad} values that are not finite, expected none: encode it again"
        elif tensor.amax() == tensor.amin():
            yield f"{path}: `{name}` is constant, expected a picture or text: encode it again"


def common_faults(root: Path, clips: list[Clip]) -> Iterator[str]:
    """Clips that do not go with the others, and what the manifest says of them."""
    if not clips:
        return
    for what, key, advice in COMMON:
        usual, odd = odd_clips(clips, key)
        for clip in odd:
            yield (
                f"{clip.path / DESCRIPTION}: {what} {key(clip)}, expected {usual} as {len(clips) - len(odd)} of "
                f"{len(clips)} clips have: {advice}"
            )
    try:
        manifest.check(root, {clip.id: clip.path for clip in clips}, clips[0].codec)
    except UserError as fault:
        yield str(fault)


def summary(found: Findings) -> str:
    """One line on all clips."""
    flagged = ", ".join(f"{reason} {count}" for reason, count in found.flagged.most_common()) or "none"
    dropped = sum(found.dropped.values())
    return (
        f"{found.clips} clips, {found.chunks} chunks; faults: {len(found.faults)}; flagged chunks: {flagged}; spans of "
        f"{SPAN_CHUNKS} chunks: {found.usable} usable, {dropped} not"
        + ("" if found.usable else ": nothing to train on")
    )
