"""Clip folders: what rtcwm trains on, one folder a clip.

`<clips>/<clip id>/` holds `stream.safetensors` (`video [24, L, h, w]`, `proxy [24, L, ph, pw]`, L = 5 x chunks),
`start_<m>.safetensors` for every start frame m (`picture1_native [24, 1, h, w]`, optionally `picture1_2048`,
`text [n, width]`, `text_tags [n]`, the caption in the metadata) and `clip.json`
(:data:`rtcwm.data.headers.CLIP_FIELDS`). Latents are normalised and stored as fp16 or bf16.

:func:`open_clips` checks everything that headers can tell, before a GPU is touched and without reading tensor data.
A root `manifest.json` (:mod:`rtcwm.data.manifest`) is optional.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rtcwm.data import manifest
from rtcwm.data.headers import DESCRIPTION, flagged_chunks, latent_shape, read_description, read_start, shapes
from rtcwm.errors import UserError
from rtcwm.model.layout import CHUNK_LATENTS, CLIP_FRAMES, Geometry

STREAM = "stream.safetensors"


@dataclass(frozen=True)
class Clip:
    """One checked clip folder.

    `flagged` maps a chunk to the reason why quality control excluded it; `starts` are its start frames, ascending;
    `codec` is {name, hash} of what made the latents; `text_width` the width of its text rows.
    """

    id: str
    path: Path
    chunks: int
    episode: str
    flagged: Mapping[int, str] = field(hash=False)
    geometry: Geometry
    codec: Mapping[str, str] = field(hash=False)
    starts: tuple[int, ...]
    text_width: int

    def start_file(self, start: int) -> Path:
        """File of start frame `start`."""
        return self.path / f"start_{start}.safetensors"


def read_clip(path: Path) -> Clip:
    """Check one clip folder by its description and headers.

    Raises:
        UserError: names the file, what it holds and what was expected.
    """
    description = read_description(path)
    stream = path / STREAM
    found = shapes(stream)
    latents, height, width = latent_shape(stream, found, "video")
    proxy_latents, proxy_height, proxy_width = latent_shape(stream, found, "proxy")
    if proxy_latents != latents:
        raise UserError(
            f"{stream}: the video has {latents} latents and the proxy {proxy_latents}; both must cover the same frames"
        )
    if latents == 0 or latents % CHUNK_LATENTS:
        raise UserError(
            f"{stream}: {latents} latents are not whole chunks of {CHUNK_LATENTS}: encode {CLIP_FRAMES} frames "
            "at a time and keep all latents of each clip"
        )
    chunks, geometry = latents // CHUNK_LATENTS, Geometry(height, width, proxy_height, proxy_width)
    told = {"chunks": description["chunks"], "frames": description["frames"], "geometry": description["geometry"]}
    seen = {"chunks": chunks, "frames": chunks * CLIP_FRAMES, "geometry": vars(geometry)}
    for name in told:
        if told[name] != seen[name]:
            raise UserError(
                f"{path / DESCRIPTION}: {name} is {told[name]!r}, but {STREAM} holds {seen[name]!r}: one of the two "
                "is from another run, prepare the clip again"
            )
    starts = sorted(
        int(match[1]) for name in os.listdir(path) if (match := re.fullmatch(r"start_(0|[1-9]\d*)\.safetensors", name))
    )
    if not starts:
        raise UserError(
            f"{path} has no start_<m>.safetensors: a stream needs a start frame (Picture 1 and text); prepare "
            "the clip again"
        )
    if starts[-1] >= chunks:
        raise UserError(
            f"{path}/start_{starts[-1]}.safetensors starts at chunk {starts[-1]}, but the clip has chunks "
            f"0..{chunks - 1}"
        )
    widths = {start: read_start(path / f"start_{start}.safetensors", geometry) for start in starts}
    if len(set(widths.values())) > 1:
        raise UserError(f"{path}: the start frames' text rows have different widths {widths}: use one text encoder")
    return Clip(
        path.name,
        path,
        chunks,
        str(description["episode"]),
        flagged_chunks(path / DESCRIPTION, description["flagged"], chunks),
        geometry,
        description["codec"],
        tuple(starts),
        widths[starts[0]],
    )


def clip_folders(root: Path) -> list[Path]:
    """Folders of clips under a root, by name: those with any of a clip's files; hidden ones are unfinished writes."""
    if not root.is_dir():
        raise UserError(
            f"--clips {root} is not a folder: give the folder that holds one folder a clip (`rtcwm world` makes one)"
        )
    kept = (DESCRIPTION, STREAM)
    return sorted(
        path
        for path in root.iterdir()
        if path.is_dir()
        and not path.name.startswith(".")
        and (any((path / name).exists() for name in kept) or any(path.glob("start_*.safetensors")))
    )


COMMON = (
    (
        "codec",
        lambda clip: f"{clip.codec['name']} {clip.codec['hash']}",
        "latents of two codecs cannot be mixed, encode them again with one",
    ),
    ("geometry", lambda clip: clip.geometry, "train one geometry at a time, from separate folders"),
    ("text width", lambda clip: clip.text_width, "encode all captions with one text encoder"),
)
"""What all clips of a folder share: its name, its value, what to do about a clip that differs."""


def odd_clips(clips: Sequence[Clip], key: Callable[[Clip], Hashable]) -> tuple[Hashable, list[Clip]]:
    """The value of `key` that most clips have, and the clips with another."""
    usual = Counter(key(clip) for clip in clips).most_common(1)[0][0]
    return usual, [clip for clip in clips if key(clip) != usual]


def require_equal(clips: Sequence[Clip], what: str, key: Callable[[Clip], Hashable], advice: str) -> None:
    """UserError naming a clip that differs from the majority in `key`, and both values."""
    usual, odd = odd_clips(clips, key)
    if odd:
        raise UserError(
            f"clip {odd[0].id} has {what} {key(odd[0])}, but {len(clips) - len(odd)} of {len(clips)} clips have "
            f"{usual} ({len(odd)} clips differ): {advice}"
        )


def open_clips(root: Path) -> list[Clip]:
    """All clips under `root`, sorted by id, checked by their headers and against the manifest where there is one.

    Raises:
        UserError: no clips; a broken clip (see :func:`read_clip`); clips of different codecs, geometries or text
            widths; a clip that the manifest contradicts.
    """
    root = Path(root)
    folders = clip_folders(root)
    if not folders:
        raise UserError(
            f"--clips {root} holds no clip folders ({DESCRIPTION}, {STREAM}, start_<m>.safetensors): prepare "
            "clips or run `rtcwm world`"
        )
    clips = [read_clip(path) for path in folders]
    for what, key, advice in COMMON:
        require_equal(clips, what, key, advice)
    manifest.check(root, {clip.id: clip.path for clip in clips}, clips[0].codec)
    return clips
