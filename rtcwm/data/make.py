"""Write clips of the embedded world to disk, in the form that users' prepared clips have.

A clip is rendered, coded and written chunk by chunk by one process; clips are spread over the cores. A clip's content
depends on (seed, episode, window) and the sizes only, never on which process made it, so that a run that was stopped is
finished by the same command: whole clips are kept, other settings are refused.
"""

import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from rtcwm import progress
from rtcwm.data import duv, manifest
from rtcwm.data.clips import Clip, clip_folders, open_clips
from rtcwm.data.codec import TEXT_ENCODER, embed_text, load_codec
from rtcwm.data.world import HUMAN, VERSION, Film, Scene, proxy_size
from rtcwm.data.write import Start, write_clip
from rtcwm.errors import UserError
from rtcwm.model.layout import CHUNK_LATENTS, CLIP_FRAMES, FPS, SPAN_CHUNKS

CLIPS_AN_EPISODE = 4
SEEN_SHARE = 0.004  # of the picture: what a caption mentions


@dataclass(frozen=True)
class Settings:
    """What the files of a world depend on; kept in the manifest. Sizes in pixels, starts in chunks."""

    clips: int
    chunks: int
    seed: int
    height: int
    width: int
    episodes: int
    starts: tuple[int, ...]
    version: int = VERSION

    def __post_init__(self) -> None:
        proxy_size(self.height, self.width)
        for name, least in (("clips", 1), ("chunks", 1), ("seed", 0), ("episodes", 1)):
            if getattr(self, name) < least:
                raise UserError(f"--{name} {getattr(self, name)}: expected {least} or more")
        if self.episodes > self.clips:
            raise UserError(f"--episodes {self.episodes} is more than --clips {self.clips}: every episode needs a clip")
        if not self.starts or min(self.starts) < 0 or max(self.starts) >= self.chunks:
            raise UserError(f"start frames {self.starts} must be chunks of the clip, 0..{self.chunks - 1}")

    def names(self) -> list[tuple[str, int, int]]:
        """(clip id, episode, window) of every clip; episodes take turns."""
        pairs = [(index % self.episodes, index // self.episodes) for index in range(self.clips)]
        return [(f"clip_{episode:06d}_{window}", episode, window) for episode, window in pairs]

    def stored(self) -> dict[str, object]:
        """The settings as JSON gives them back."""
        return asdict(self) | {"starts": list(self.starts)}


def describe(scene: Scene, seen: Sequence[set[int]]) -> str:
    """Caption of a start frame: what is in view there, and what comes into view at the later chunks of a span.

    Args:
        scene: gives light and ground their words.
        seen: classes in view at the first frame of the start's chunk and of the chunks after it.

    Returns:
        Lines joined by CRLF, each opened by the seconds since Picture 1.
    """
    red, _, blue = scene.light
    light = "warm" if red > blue + 0.05 else "cool" if blue > red + 0.05 else "neutral"
    tint = ("reddish", "greenish", "bluish")[int(np.argmax(scene.ground.mean(axis=0)))]
    view = ", ".join(duv.CLASSES[label] for label in sorted(seen[0]))
    lines = [f"[0.00s] A camera flies over a checkered {tint} field in {light} light.", f"[0.00s] In view: {view}."]
    known = set(seen[0])
    for later, labels in enumerate(seen[1:SPAN_CHUNKS], start=1):
        new = sorted(labels - known)
        known |= labels
        if new:
            seconds = later * CLIP_FRAMES / FPS
            lines.append(f"[{seconds:.2f}s] Comes into view: {', '.join(duv.CLASSES[label] for label in new)}.")
    return "\r\n".join(lines)


def in_view(ids: np.ndarray) -> set[int]:
    """Classes that cover a visible share of a picture `[H, W]`; moving solids are small, half the share will do."""
    share = np.bincount(ids.ravel(), minlength=len(duv.CLASSES)) / ids.size
    return {
        label
        for label in range(1, len(duv.CLASSES))
        if share[label] >= (SEEN_SHARE / 2 if label >= HUMAN else SEEN_SHARE)
    }


def make_clip(root: Path, settings: Settings, clip_id: str, episode: int, window: int) -> Path:
    """Render, code and write one clip; returns its folder."""
    codec = load_codec()
    film = Film(settings.seed, episode, window, settings.height, settings.width)
    video, proxy, seen = [], [], []
    for chunk in range(settings.chunks):
        frames, picture = film.chunk(chunk)
        video.append(codec.encode(frames.rgb))
        proxy.append(codec.encode(picture))
        seen.append(in_view(frames.ids[0]))
    latents = torch.cat(video, 1)
    starts = {}
    for start in settings.starts:
        # The codec codes a chunk's first frame alone, so Picture 1 is that latent of the stream.
        picture1 = latents[:, start * CHUNK_LATENTS : start * CHUNK_LATENTS + 1]
        caption = describe(film.scene, seen[start:])
        starts[start] = Start(picture1, *embed_text(caption, picture1), caption)
    return write_clip(
        root,
        clip_id,
        latents,
        torch.cat(proxy, 1),
        starts,
        f"world-{settings.seed}-{episode}",
        codec.identity,
        text_encoder=TEXT_ENCODER,
    )


def write_world(
    out: Path,
    clips: int,
    chunks: int,
    seed: int,
    height: int = 128,
    width: int = 192,
    starts: Sequence[int] | None = None,
    episodes: int | None = None,
    processes: int | None = None,
) -> list[Clip]:
    """Write clips of the embedded world, or finish them.

    Args:
        out: folder to make; may hold a part of the same clips.
        clips: number of clips.
        chunks: length of each clip (17 frames, 0.708 s a chunk).
        seed: names the world.
        height: of the video in pixels, a multiple of 32; likewise width. The proxy is about a quarter
            (:func:`rtcwm.data.world.proxy_size`).
        width: see height.
        starts: start frames of every clip; every second chunk when absent.
        episodes: scenes that the clips are spread over, so that held-out clips can show unseen ones; a quarter of the
            clips when absent.
        processes: at most so many; all cores when absent.

    Returns:
        The clips, checked.

    Raises:
        UserError: bad settings, or a folder that holds something else.
    """
    out = Path(out)
    settings = Settings(
        clips,
        chunks,
        seed,
        height,
        width,
        episodes or -(-clips // CLIPS_AN_EPISODE),
        tuple(range(0, chunks, 2)) if starts is None else tuple(sorted(set(starts))),
    )
    codec = load_codec().identity
    content = {"codec": codec, "clips": {}, "world": settings.stored()}
    claim(out, content)
    names = settings.names()
    todo = [name for name in names if not (out / name[0]).is_dir()]
    started = time.monotonic()
    print(
        f"world: {clips} clips x {chunks} chunks ({chunks * CLIP_FRAMES / FPS:.1f} s) of {width}x{height} in "
        f"{settings.episodes} episodes, {len(names) - len(todo)} already there",
        file=sys.stderr,
    )
    for done, _ in enumerate(spread(out, settings, todo, processes), start=1):
        show_progress(done, len(todo), time.monotonic() - started)
    content["clips"] = {clip_id: manifest.clip_hash(out / clip_id) for clip_id, _, _ in names}
    manifest.write(out, content)
    return open_clips(out)


def claim(out: Path, content: dict[str, object]) -> None:
    """Make the folder and note the settings in its manifest, or check that it holds a part of the same world."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make --out {out}: {error}; name a folder that can be written") from error
    listed = manifest.read(out)
    if listed is None:
        if clip_folders(out):
            raise UserError(f"--out {out} holds clips that were not written by this command: choose another folder")
        manifest.write(out, content)
        return
    wanted, found = content["world"], listed.get("world") or {}
    differing = {name: (found.get(name), wanted[name]) for name in wanted if found.get(name) != wanted[name]}
    if listed["codec"] != content["codec"]:
        differing["codec"] = (listed["codec"], content["codec"])
    if differing:
        told = "; ".join(f"{name} is {old!r} there, {new!r} was asked for" for name, (old, new) in differing.items())
        raise UserError(
            f"--out {out} holds a world of other settings ({told}): choose another folder, or ask for the same"
        )
    for path in out.glob(".clip_*.writing-*"):
        shutil.rmtree(path, ignore_errors=True)


def spread(out: Path, settings: Settings, todo: list[tuple[str, int, int]], processes: int | None) -> Iterator[Path]:
    """Make the clips, yielding each as it is done; in this process when there is little to do."""
    workers = min(processes or len(os.sched_getaffinity(0)), len(todo))
    little = (
        len(todo) * settings.chunks * settings.height * settings.width < 40 * 128 * 192
    )  # about the start-up's time
    if workers <= 1 or (little and processes is None):
        yield from (make_clip(out, settings, *name) for name in todo)
        return
    # spawn: a forked child of a process that has run torch can hang in its thread pool
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        futures = [pool.submit(make_clip, out, settings, *name) for name in todo]
        try:
            yield from (future.result() for future in as_completed(futures))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def show_progress(done: int, total: int, seconds: float) -> None:
    left = seconds / done * (total - done)
    progress.show(f"world: {done}/{total} clips, {seconds:.0f} s, {left:.0f} s left", done, total, lines=10)
