"""Video files as frames at exactly 24 a second.

A file is read twice. :func:`probe` decodes it once for its time stamps alone, which finds truncated and damaged files
before anything is encoded and decides which of its frames stand at k / 24 s; :func:`read` then decodes it again and
yields those frames a chunk at a time, so that memory does not grow with the length of a film.

Output frame k is the frame whose time stamp is nearest to k / 24 s after the first one, the earlier of two equally near
ones. Times are compared in whole ticks of the file's clock, so that rounding decides nothing. A file whose stamps are
k / 24 s within a millisecond (some containers count in milliseconds) is taken frame by frame.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np

from rtcwm.errors import UserError
from rtcwm.model.layout import CLIP_FRAMES, FPS
from rtcwm.prepare.extra import missing

try:
    import av
    from PIL import Image
except ImportError as error:
    raise missing("av and pillow", error) from error

EXACT_SECONDS = Fraction(1, 1000)
MENDED = "copy or encode the file again"


@dataclass(frozen=True)
class Film:
    """A checked video file: size in pixels as shown (turned upright), `frames` in the file, `picks` the file's frame
    for each frame at 24 a second, and what there is to say about it."""

    path: Path
    height: int
    width: int
    frames: int
    picks: tuple[int, ...]
    notes: tuple[str, ...]


def shown_size(path: Path) -> tuple[int, int]:
    """Height and width in pixels as players show it, by its header and first frame.

    Raises:
        UserError: it cannot be opened or holds no video.
    """
    with opened(path) as file:
        stream = file.streams.video[0]
        try:
            turn = next(file.decode(stream)).rotation
        except (av.FFmpegError, OSError, StopIteration):
            turn = 0  # what is wrong with its frames is told by `probe`
        return turned(stream.height, stream.width, turn)


def turned(height: int, width: int, degrees: float) -> tuple[int, int]:
    """Height and width once turned by so many degrees, to the nearest quarter."""
    return (width, height) if round(degrees / 90) % 2 else (height, width)


def opened(path: Path) -> "av.container.InputContainer":
    """The open container; UserError where it is no video file."""
    try:
        file = av.open(str(path))
    except (av.FFmpegError, OSError, ValueError) as fault:
        raise UserError(
            f"{path} cannot be opened as a video ({fault}): it is truncated or no video; {MENDED}"
        ) from fault
    if not file.streams.video:
        file.close()
        raise UserError(f"{path} holds no video stream")
    file.streams.video[0].thread_type = "AUTO"
    return file


def probe(path: Path) -> Film:
    """Decode a file for its time stamps.

    Raises:
        UserError: it cannot be opened, is truncated or damaged, or its time stamps do not increase.
    """
    stamps, packets, damaged, turn = [], 0, 0, 0.0
    with opened(path) as file:
        stream = file.streams.video[0]
        promised, clock = stream.frames, stream.time_base
        told = file.duration if len(file.streams) == 1 else None  # of the longest stream, in microseconds
        try:
            for packet in file.demux(stream):
                packets += packet.size > 0
                damaged += packet.is_corrupt
                for frame in packet.decode():
                    damaged += frame.is_corrupt
                    stamps.append(frame.pts)
                    height, width, turn = frame.height, frame.width, frame.rotation
        except (av.FFmpegError, OSError) as fault:
            raise UserError(f"{path} breaks off after {len(stamps)} frames ({fault}): {MENDED}") from fault
    if not stamps:
        raise UserError(f"{path} holds no frame that can be decoded: {MENDED}")
    if packets < promised or damaged:
        raise UserError(
            f"{path} is truncated or damaged: its header promises {promised} frames, {packets} are there and "
            f"{damaged} are damaged; {MENDED}"
        )
    if None in stamps:
        raise UserError(f"{path} has frames without a time stamp: put it into a container with time stamps (mp4, mkv)")
    if any(later <= earlier for earlier, later in zip(stamps, stamps[1:], strict=False)):
        raise UserError(f"{path} has time stamps that do not increase: {MENDED}")
    picks, notes = to_24(stamps, clock)
    seconds = float((stamps[-1] - stamps[0]) * clock)
    if not promised and told is not None and told / av.time_base > seconds + 2 * (seconds / len(stamps) + 1 / FPS):
        raise UserError(
            f"{path} is truncated: its header promises {told / av.time_base:.2f} s, its frames end at "
            f"{seconds:.2f} s; {MENDED}"
        )
    return Film(path, *turned(height, width, turn), len(stamps), picks, notes)


def to_24(stamps: list[int], clock: Fraction) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Which frame stands at k / 24 s, for every k that the film covers, and what was done.

    Args:
        stamps: time stamps, increasing, in ticks of `clock` seconds.
        clock: seconds a tick.
    """
    count = len(stamps)
    ticks = [stamp - stamps[0] for stamp in stamps]
    if all(abs(tick * clock - Fraction(index, FPS)) <= EXACT_SECONDS for index, tick in enumerate(ticks)):
        return tuple(range(count)), ()
    steps = np.diff(ticks)
    stay = Fraction(int(np.sort(steps)[len(steps) // 2]))  # how long the last frame is shown: as the median one
    covered = int((ticks[-1] + stay) * clock * FPS + Fraction(1, 1000))
    # The border between frames i and i + 1 lies half way: (t_i + t_i+1) / 2 ticks, against k / 24 s.
    borders = np.array([(a + b) * clock.numerator * FPS for a, b in zip(ticks, ticks[1:], strict=False)])
    picks = np.searchsorted(borders, np.arange(max(covered, 1)) * 2 * clock.denominator, side="left")
    times = np.bincount(picks, minlength=count)
    even = steps.max() - steps.min() <= max(2, float(2 * EXACT_SECONDS / clock))
    rate = float((count - 1) / (ticks[-1] * clock))
    found = f"{rate:.3f} frames a second" if even else (
        f"a variable frame rate ({float(steps.min() * clock) * 1000:.1f} to {float(steps.max() * clock) * 1000:.1f} ms "
        "a frame)"
    )  # fmt: skip
    note = (
        f"{found} resampled to {FPS} by nearest time: {len(picks)} frames of {count}, {int((times == 0).sum())} left "
        f"out, {int(np.maximum(times - 1, 0).sum())} repeated"
    )
    return tuple(int(pick) for pick in picks), (note,)


def read(film: Film, chunks: int, size: tuple[int, int] | None = None) -> Iterator[np.ndarray]:
    """The first `chunks` chunks at 24 frames a second, uint8 `[17, H, W, 3]` RGB each.

    Args:
        film: as :func:`probe` gives it.
        chunks: at most `len(film.picks) // 17`.
        size: height and width to scale to (Lanczos), as diffusers scales references; as they are when absent.

    Raises:
        UserError: the file changed since it was probed.
    """
    wanted = iter(film.picks[: chunks * CLIP_FRAMES])
    pick, gathered, left = next(wanted, None), [], chunks
    with opened(film.path) as file:
        for index, frame in enumerate(file.decode(file.streams.video[0])):
            picture = None
            while pick == index:
                picture = upright(frame, size) if picture is None else picture
                gathered.append(picture)
                pick = next(wanted, None)
                if len(gathered) == CLIP_FRAMES:
                    yield np.stack(gathered)
                    gathered, left = [], left - 1
            if pick is None:
                break
    if left:
        raise UserError(f"{film.path} has fewer frames than when it was first read: it changed while it was prepared")


def upright(frame: "av.VideoFrame", size: tuple[int, int] | None) -> np.ndarray:
    """One frame as uint8 RGB `[H, W, 3]`, turned as players show it (counterclockwise by its `rotation`) and scaled
    where a size is given."""
    picture = np.rot90(frame.to_ndarray(format="rgb24"), k=round(frame.rotation / 90))
    return scaled(picture, size) if size else np.ascontiguousarray(picture)


def read_picture(path: Path, advice: str) -> np.ndarray:
    """A picture file as uint8 RGB `[H, W, 3]`; UserError with this advice where it is none."""
    try:
        with Image.open(path) as picture:
            return np.asarray(picture.convert("RGB"))
    except (OSError, SyntaxError) as fault:
        raise UserError(f"{path} cannot be read as a picture ({fault}): {advice}") from fault


def scaled(picture: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """A picture, uint8 `[H, W, 3]`, scaled to (height, width) by Lanczos; itself where it has that size."""
    if picture.shape[:2] == size:
        return np.ascontiguousarray(picture)
    return np.asarray(Image.fromarray(np.ascontiguousarray(picture)).resize(size[::-1], Image.Resampling.LANCZOS))


def psnr(one: np.ndarray, other: np.ndarray) -> float:
    """Peak signal to noise ratio of uint8 pictures in dB, infinite for equal ones."""
    error = np.square(one.astype(np.float64) - other).mean()
    return float("inf") if error == 0 else float(10 * np.log10(255**2 / error))
