"""The streams of one clip as a film: all models at once, each under its name."""

import math
from collections.abc import Iterable, Mapping
from fractions import Fraction
from itertools import zip_longest
from pathlib import Path

import numpy as np

from rtcwm.engine.checkpoint import replace_file
from rtcwm.errors import UserError
from rtcwm.evaluate.metrics import missing
from rtcwm.evaluate.picture import shortened
from rtcwm.model.layout import FPS

try:
    import av
    from PIL import Image, ImageDraw, ImageFont
except ImportError as error:
    raise missing("pillow and av", error) from error

BAR = 20  # pixels: height of the name above each film; even, as the encoder asks
ENCODER = "libx264"


def grid(films: int) -> tuple[int, int]:
    """Rows and columns for so many films: side by side up to three, then in the squarest grid."""
    columns = films if films <= 3 else math.ceil(math.sqrt(films))
    return -(-films // columns), columns


def write(films: Mapping[str, Iterable[np.ndarray]], height: int, width: int, path: Path) -> int:
    """Writes films as an H.264 mp4 at 24 frames a second, read piece by piece in step.

    Args:
        films: by name, pieces of uint8 frames [n, height, width, 3]; one that ends early goes black. Sizes are even.

    Returns:
        The number of frames. Raises UserError where av cannot encode H.264.
    """
    if ENCODER not in av.codecs_available:
        raise UserError(f"this build of av has no {ENCODER}: pip install --force-reinstall av, or pass --video false")
    rows, columns = grid(len(films))
    bars = [bar(name, width) for name in films]

    def encode(aside: Path) -> None:
        nonlocal count
        with av.open(str(aside), "w", format="mp4") as file:
            stream = file.add_stream(ENCODER, rate=Fraction(FPS), options={"crf": "18"})
            stream.width, stream.height, stream.pix_fmt = columns * width, rows * (height + BAR), "yuv420p"
            for pieces in zip_longest(*films.values()):
                length = max(len(piece) for piece in pieces if piece is not None)
                for index in range(length):
                    canvas = np.zeros((rows * (height + BAR), columns * width, 3), np.uint8)
                    for place, (piece, name) in enumerate(zip(pieces, bars, strict=True)):
                        top, left = place // columns * (height + BAR), place % columns * width
                        canvas[top : top + BAR, left : left + width] = name
                        if piece is not None:
                            canvas[top + BAR : top + BAR + height, left : left + width] = piece[index]
                    file.mux(stream.encode(av.VideoFrame.from_ndarray(canvas, format="rgb24")))
                    count += 1
            file.mux(stream.encode())

    count = 0
    replace_file(path, encode)
    return count


def bar(name: str, width: int) -> np.ndarray:
    """A name in white on black, uint8 [BAR, width, 3]."""
    picture = Image.new("RGB", (width, BAR))
    pen, font = ImageDraw.Draw(picture), ImageFont.load_default(12)
    pen.text((4, 3), shortened(pen, name, width - 8, font), (255, 255, 255), font)
    return np.asarray(picture)
