"""One clip from its sources to its folder: what a worker process does."""

import json
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from rtcwm.data.duv import FAR_METRES
from rtcwm.data.headers import DESCRIPTION
from rtcwm.data.write import Start, write_clip
from rtcwm.errors import StorageFault, UserError
from rtcwm.model.layout import CLIP_FRAMES, FPS
from rtcwm.prepare.captions import from_start, read_caption
from rtcwm.prepare.extra import missing
from rtcwm.prepare.jobs import Job, Models, Outcome
from rtcwm.prepare.proxies import Conditions, check_report, frame_count, open_proxy, read_proxy
from rtcwm.prepare.settings import TARGET_MULTIPLE, VERSION, Settings, starts_of
from rtcwm.prepare.text import TextEncoder
from rtcwm.prepare.vae import VideoCodec, finite
from rtcwm.prepare.video import Film, probe, psnr, read, read_picture, scaled
from rtcwm.strict_json import read_object

try:
    from PIL import Image
except ImportError as error:
    raise missing("pillow", error) from error

SHORT_EDGE = 2048  # of a reference picture at the released model's own resolution
SLACK_FRAMES = 2  # by which a proxy and its target may differ in length
FAR_FROM_FRAME_DB = 20.0
EMPTY_SHARE = 0.95  # of a proxy's pixels: sky alone is rare, depth in other units is not


class Encoders:
    """The loaded models of one process."""

    def __init__(self, models: Models, settings: Settings, device: torch.device, decoder: bool = False):
        """`decoder`: keep the VAE's as well."""
        with loading(models.vae):
            self.codec = VideoCodec(models.vae, device, settings.tf32, decoder)
        with loading(models.text_encoder):
            self.text = TextEncoder(
                models.text_encoder, models.tokenizer, models.processor, settings.text_layer, device,
                getattr(torch, settings.text_dtype), settings.system_prompt,
            )  # fmt: skip
        self.models, self.settings = models, settings


@contextmanager
def loading(folder: Path) -> Iterator[None]:
    """Whatever the libraries raise over a damaged or foreign folder, as a UserError that names the folder."""
    try:
        yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as fault:
        raise UserError(
            f"{folder} cannot be loaded ({type(fault).__name__}: {fault}): copy it and the folders beside it again "
            "from a diffusers-format MiniMax-H3"
        ) from fault


def short_edge_size(height: int, width: int, edge: int) -> tuple[int, int]:
    """(height, width) with this short edge, sides rounded to 32, as diffusers scales a reference picture."""
    scale = edge / min(height, width)
    return tuple(
        max(TARGET_MULTIPLE, round(side * scale / TARGET_MULTIPLE) * TARGET_MULTIPLE) for side in (height, width)
    )


def prepare_clip(out: Path, job: Job, encoders: Encoders) -> tuple[str, ...]:
    """Encode one clip and write its folder; returns what there is to say about it.

    Raises:
        StorageFault: the folder cannot be written.
        UserError: what is wrong with the sources.
    """
    source, settings = job.source, encoders.settings
    film, proxy, chunks, notes = measure(job, settings)
    caption, said = read_caption(source, settings.episode_captions)
    starts = starts_of(settings.starts, chunks)
    if not starts:
        raise UserError(f"--starts {settings.starts} names no chunk of a clip of {chunks}: add an earlier one")
    video, conditions, openings, empty = [], [], {}, []
    size = settings.size or (film.height, film.width)
    for chunk, (frames, pictures) in enumerate(
        zip(read(film, chunks, settings.size), read_proxy(proxy, chunks, settings.proxy_of(size)), strict=True)
    ):
        video.append(encoders.codec.encode_target(frames))
        conditions.append(encoders.codec.encode_proxy(pictures))
        empty.append(float((pictures[..., 0] == 0).mean()))
        if chunk in starts:
            openings[chunk] = frames[0]
    if 0 in openings and source.anchor:
        openings[0], more = read_anchor(source.anchor, openings[0])
        said = (*said, *more)
    made = {start: encode_start(encoders, picture, size, caption, start) for start, picture in openings.items()}
    if (share := sum(empty) / chunks) > EMPTY_SHARE:
        said = (
            *said,
            f"{share:.0%} of the proxy's pixels show no surface within {FAR_METRES:g} m: is its depth in metres?",
        )
    notes = (*notes, *said)
    prepared = {
        "version": VERSION,
        "key": job.key,
        "sources": dict(job.hashes),
        "settings": settings.stored(),
        "notes": notes,
    }
    write_clip(
        out,
        source.id,
        finite(video, "target's"),
        finite(conditions, "proxy's"),
        made,
        source.episode,
        encoders.models.codec_identity,
        kept_flags(out / source.id, job.hashes),
        encoders.models.text_identity,
        prepared,
    )
    return notes


def measure(job: Job, settings: Settings) -> tuple[Film, Film | Conditions, int, tuple[str, ...]]:
    """Open a clip's target and proxy and hold one against the other: both, their whole chunks, and remarks.

    Raises:
        UserError: sizes or lengths that do not fit.
    """
    source = job.source
    film, proxy = probe(source.target), open_proxy(source.proxy)
    notes = tuple(f"target: {note}" for note in film.notes) + tuple(f"proxy: {note}" for note in proxy.notes)
    found = (film.height, film.width)
    if settings.size and found != settings.size:
        notes = (*notes, f"target scaled from {film.width}x{film.height}")
    elif found != job.size:
        raise UserError(f"{source.target} is shown {film.width}x{film.height}, other clips {job.size[1]}x{job.size[0]}")
    height, width = settings.proxy_of(job.size)
    if isinstance(proxy, Film):
        if (proxy.height, proxy.width) != (height, width):
            raise UserError(
                f"{source.proxy} is {proxy.width}x{proxy.height}, expected {width}x{height} (a quarter of the target, "
                "or --proxy-size); DUV cannot be scaled as a picture: encode it again from depth and ids"
            )
        if source.report:
            told = read_object(source.report, "an object, the clip's report: mend or remove it", blank=True)
            check_report(told, str(source.report))
            notes = notes if told else (*notes, f"{source.report.name} is empty: passed over")
    elif proxy.height % height or proxy.width % width:
        raise UserError(
            f"{source.proxy} is {proxy.width}x{proxy.height}, no whole multiple of {width}x{height} (a quarter "
            "of the target, or --proxy-size): render it at one"
        )
    target_frames, proxy_frames = len(film.picks), frame_count(proxy)
    if abs(target_frames - proxy_frames) > SLACK_FRAMES:
        raise UserError(
            f"the target has {target_frames} frames at {FPS} a second and the proxy {proxy_frames}: they have to cover "
            f"the same time, and condition files count as {FPS} a second ({source.target}, {source.proxy})"
        )
    frames = min(target_frames, proxy_frames)
    chunks, rest = divmod(frames, CLIP_FRAMES)
    whole = chunks * CLIP_FRAMES
    if not chunks:
        raise UserError(
            f"{source.target} and its proxy have {frames} frames at {FPS} a second, less than one chunk of "
            f"{CLIP_FRAMES}"
        )
    if rest or target_frames != proxy_frames:
        notes = (
            *notes,
            f"cut to {chunks} whole chunks ({whole} frames): {target_frames - whole} frames of the target and "
            f"{proxy_frames - whole} of the proxy left over",
        )
    return film, proxy, chunks, notes


def encode_start(encoders: Encoders, picture: np.ndarray, size: tuple[int, int], caption: str, start: int) -> Start:
    """Picture 1 and text of a start frame.

    Args:
        picture: uint8 `[H, W, 3]`, of any size (an anchor's) or the target's.
        size: height and width of the target.
        caption: of the clip, counted from its first frame.
        start: chunk.
    """
    settings = encoders.settings
    native = scaled(picture, size)
    large = None
    if settings.picture1_2048 or settings.vision_picture == "2048":
        large = scaled(picture, short_edge_size(*size, SHORT_EDGE))
    text = from_start(caption, start * CLIP_FRAMES / FPS)
    rows, tags = encoders.text.encode(text, Image.fromarray(native if settings.vision_picture == "native" else large))
    return Start(
        encoders.codec.encode_picture(native),
        rows.bfloat16(),  # hidden states of large language models leave fp16's range
        tags,
        text,
        encoders.codec.encode_picture(large) if settings.picture1_2048 else None,
    )


def read_anchor(path: Path, frame: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
    """The anchor picture, uint8 `[H, W, 3]`, which stands for frame 0 as Picture 1; a note where it looks unlike it."""
    anchor = read_picture(path, "mend it, or remove it to use frame 0")
    notes = []
    if anchor.shape != frame.shape:
        notes.append(f"anchor scaled from {anchor.shape[1]}x{anchor.shape[0]}")
    decibels = psnr(scaled(anchor, frame.shape[:2]), frame)
    if decibels < FAR_FROM_FRAME_DB:
        notes.append(f"the anchor is unlike frame 0 (PSNR {decibels:.1f} dB)")
    return anchor, tuple(notes)


def kept_flags(folder: Path, hashes: Mapping[str, str]) -> list[dict]:
    """Spans that quality control flagged in an earlier version of the clip, where it shows the same frames."""
    try:
        old = json.loads((folder / DESCRIPTION).read_text())
        same = all(old["prepared"]["sources"][role] == hashes[role] for role in ("target", "proxy"))
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return old.get("flagged", []) if same else []


def attempt(out: Path, job: Job, encoders: Encoders) -> Outcome:
    """Prepare a clip; what is wrong with it is its own affair, what is wrong with the machine is raised."""
    try:
        return Outcome(job.source.id, prepare_clip(out, job, encoders))
    except (StorageFault, torch.OutOfMemoryError):
        raise
    except (UserError, OSError) as fault:
        return Outcome(job.source.id, reason=str(fault))
    except Exception as fault:  # one odd clip must not end a preparation of thousands
        reason = f"unforeseen {type(fault).__name__}: {fault} (traceback in the report)"
        return Outcome(job.source.id, reason=reason, trace=traceback.format_exc())
