"""Proxies: DUV pictures from a lossless video or from condition files, checked pixel by pixel.

A condition root holds `%06d.depth.f32` (headerless little-endian float32 metres along the optical axis) and
`%06d.semantic_id.png` (8-bit, ids 0..11), numbered from 0 without a gap at 24 a second. Metres have to be finite and
not negative; 0, like everything up to 1 mm, says that no surface was hit and becomes code 0.

A DUV video is a table of codes in the dress of a picture: other conventions look alike and train silently. Its colours
have to lie on the palette exactly, and its sky must not be near; what else is found is refused under its name.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rtcwm.data import duv
from rtcwm.errors import UserError
from rtcwm.model.layout import CLIP_FRAMES
from rtcwm.prepare.extra import missing
from rtcwm.prepare.video import Film, probe, read

try:
    from PIL import Image
except ImportError as error:
    raise missing("pillow", error) from error

CONDITIONS = DEPTH, IDS = ".depth.f32", ".semantic_id.png"
SKY = duv.CLASSES.index("sky")
NEAR_CODE = 128  # red of a surface at 8.7 m: sky that near has its depth the other way round
LOSSY_TOLERANCE = 12
FAR_AWAY = "near 0.1 m / far 8000 m, dark near, 255 = sky, classes that share colours"
FAR_AWAY_COLOURS = {(255, 255), (0, 255), (0, 128), (64, 0), (128, 0), (0, 0), (255, 0)}
"""Green and blue of the convention of that name: five of its eleven classes are (0, 0), sky and road are (255, 255)."""


@dataclass(frozen=True)
class Conditions:
    """A condition root: its folder, frames, and the size of its files in pixels."""

    path: Path
    frames: int
    height: int
    width: int
    notes: tuple[str, ...] = ()


def is_conditions(path: Path) -> bool:
    """Whether a folder holds condition files."""
    return path.is_dir() and any(name.name.endswith(CONDITIONS) for name in path.iterdir())


def condition_files(path: Path) -> list[Path]:
    """The numbered files of a condition root, by name.

    Raises:
        UserError: a number or one of its two files is missing, or there are none.
    """
    found = {suffix: set() for suffix in CONDITIONS}
    for name in (file.name for file in path.iterdir()):
        if match := re.fullmatch(r"(\d{6})(\.depth\.f32|\.semantic_id\.png)", name):
            found[match[2]].add(int(match[1]))
    every = found[DEPTH] | found[IDS]
    if not every:
        raise UserError(f"{path} holds no %06d{DEPTH} and %06d{IDS} files")
    for number in range(max(every) + 1):
        for suffix in CONDITIONS:
            if number not in found[suffix]:
                raise UserError(
                    f"{path}/{number:06d}{suffix} is missing, but the files run to {max(every):06d}: proxy frames are "
                    "numbered from 000000 without a gap, render it again"
                )
    return [path / f"{number:06d}{suffix}" for number in range(max(every) + 1) for suffix in CONDITIONS]


def open_conditions(path: Path) -> Conditions:
    """Check a condition root by its names and its first picture."""
    files = condition_files(path)
    height, width = read_ids(files[1]).shape
    return Conditions(path, len(files) // 2, height, width)


def read_ids(path: Path) -> np.ndarray:
    """Class ids uint8 `[H, W]` of an 8-bit grey PNG."""
    try:
        with Image.open(path) as picture:
            if picture.mode != "L":
                raise UserError(f"{path} is a picture of mode {picture.mode}, expected 8-bit grey (L) with ids 0..11")
            return np.asarray(picture)
    except (OSError, SyntaxError) as fault:
        raise UserError(f"{path} cannot be read as a PNG ({fault}): render it again") from fault


def read_condition(root: Conditions, number: int, height: int, width: int) -> np.ndarray:
    """The DUV picture of one pair of files, uint8 `[height, width, 3]`, reduced by median and majority.

    Raises:
        UserError: sizes that differ, depth that is no metre, ids outside 0..11; names the file.
    """
    depth_file, ids_file = root.path / f"{number:06d}{DEPTH}", root.path / f"{number:06d}{IDS}"
    ids = read_ids(ids_file)
    size = depth_file.stat().st_size
    if ids.shape != (root.height, root.width) or size != 4 * ids.size:
        raise UserError(
            f"{depth_file} has {size} bytes and {ids_file.name} is {ids.shape[1]}x{ids.shape[0]}; expected "
            f"{root.width}x{root.height} as in frame 0, that is {4 * root.height * root.width} bytes of float32"
        )
    depth = np.fromfile(depth_file, "<f4").reshape(ids.shape)
    try:
        return duv.encode(depth, ids, height, width)
    except UserError as fault:
        file = ids_file if "semantic ids" in str(fault) else depth_file
        raise UserError(f"{file}: {fault}") from fault


def open_proxy(path: Path) -> Film | Conditions:
    """A condition root or a DUV video, checked as far as its names and time stamps go."""
    return open_conditions(path) if path.is_dir() else probe(path)


def read_proxy(proxy: Film | Conditions, chunks: int, size: tuple[int, int]) -> Iterator[np.ndarray]:
    """DUV pictures of the first `chunks` chunks, uint8 `[17, height, width, 3]` each.

    Args:
        proxy: as :func:`open_proxy` gives it.
        size: height and width; condition files are reduced to it, a video must have it.

    Raises:
        UserError: what is wrong with which file.
    """
    if isinstance(proxy, Conditions):
        for chunk in range(chunks):
            numbers = range(chunk * CLIP_FRAMES, (chunk + 1) * CLIP_FRAMES)
            yield np.stack([read_condition(proxy, number, *size) for number in numbers])
        return
    for pictures in read(proxy, chunks):
        check_pictures(pictures, str(proxy.path))
        yield pictures


def frame_count(proxy: Film | Conditions) -> int:
    """Frames at 24 a second."""
    return proxy.frames if isinstance(proxy, Conditions) else len(proxy.picks)


def check_pictures(pictures: np.ndarray, name: str) -> None:
    """Raise UserError unless the pictures, uint8 `[..., 3]`, follow rtcwm's DUV convention, naming the one they follow
    where it is known."""
    try:
        ids = duv.decode_ids(pictures, name=name)
    except UserError as fault:
        raise UserError(f"{name} {named(pictures)}" if named(pictures) else str(fault)) from fault
    sky = pictures[..., 0][ids == SKY]
    if sky.size and (sky >= NEAR_CODE).mean() > 0.5:
        raise UserError(
            f"{name} follows another DUV convention (dark near, 255 = sky): most of its sky has a red of {NEAR_CODE} "
            "or more, which reads as nearer than 9 m here; encode the proxy again from depth and ids"
        )


def named(pictures: np.ndarray) -> str | None:
    """What pictures off the palette are, where that can be told."""
    colours = np.unique(pictures[..., 1:].reshape(-1, 2), axis=0)
    advice = "encode the proxy again from depth and ids (a condition root)"
    if fits(pictures[..., ::-1], 0):
        return "has red and blue swapped (BGR): its colours lie on the palette when read backwards; write it as rgb24"
    if {tuple(int(value) for value in colour) for colour in colours} <= FAR_AWAY_COLOURS:
        return f"follows another DUV convention ({FAR_AWAY}), which must not be mixed with this one: {advice}"
    if fits(pictures, LOSSY_TOLERANCE):
        return (
            f"is DUV that went through a lossy or YUV encoder (colours up to {LOSSY_TOLERANCE} off the palette): write "
            "it lossless in RGB (libx264rgb with crf 0, or ffv1)"
        )
    return None


def fits(pictures: np.ndarray, tolerance: int) -> bool:
    try:
        duv.decode_ids(pictures, tolerance)
    except UserError:
        return False
    return True


def check_report(report: Mapping, name: str) -> None:
    """Raise UserError where a clip's report says that its DUV video follows another convention.

    Ranges cannot be seen in the pixels, so the report's words are the only sign of them.
    """
    told = {key: report.get(key) for key in ("taxonomy", "near", "far", "duv_near", "duv_far") if key in report}
    for key, value in told.items():
        expected = duv.NEAR_METRES if "near" in key else duv.FAR_METRES
        if key == "taxonomy" and value == "standard11":
            raise UserError(f"{name} says that its DUV has taxonomy 'standard11', another convention ({FAR_AWAY})")
        if key != "taxonomy" and value != expected:
            raise UserError(
                f"{name} says that its DUV has {key} {value}, another convention; expected {expected} metres"
            )
