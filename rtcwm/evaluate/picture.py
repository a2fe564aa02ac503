"""One picture of an evaluation: streams of a clip as rows, chunks as columns, and measures by chunk below."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rtcwm.engine.checkpoint import replace_file
from rtcwm.evaluate.metrics import missing

try:
    from PIL import Image, ImageDraw, ImageFont
except ImportError as error:
    raise missing("pillow", error) from error

LABEL, HEADER, GAP = 168, 24, 4  # pixels: width of a row's label, height of a column's, space between cells
CELL = (192, 128)  # pixels: a frame is shrunk to fit, never enlarged
PLOT_HEIGHT, PLOT_GAP = 240, 24
LEAST_WIDTH = 960  # pixels: room for three plots

PAPER, INK, FAINT = (255, 255, 255), (32, 32, 32), (216, 216, 216)
COLOURS = (
    (31, 119, 180), (255, 127, 14), (44, 160, 44), (214, 39, 40),
    (148, 103, 189), (140, 86, 75), (227, 119, 194), (127, 127, 127),
)  # fmt: skip


@dataclass(frozen=True)
class Plot:
    """Lines over chunks, by model; values that are None or not finite are left out. `mark` is a level drawn across."""

    title: str
    lines: Mapping[str, Sequence[float | None]]
    mark: float | None = None


def cell_size(height: int, width: int) -> tuple[int, int]:
    """Height and width of a frame in the picture."""
    share = min(1.0, CELL[0] / width, CELL[1] / height)
    return max(1, round(height * share)), max(1, round(width * share))


def size(rows: int, columns: int, height: int, width: int) -> tuple[int, int]:
    """Width and height of the picture (pixels) for so many rows and columns of frames of this size."""
    tall, wide = cell_size(height, width)
    across = max(LEAST_WIDTH, LABEL + columns * (wide + GAP))
    return across, HEADER + rows * (tall + GAP) + PLOT_GAP + PLOT_HEIGHT


def draw(
    rows: Mapping[str, Sequence[np.ndarray | None]], columns: Sequence[str], plots: Sequence[Plot], path: Path
) -> None:
    """Writes the picture as a PNG.

    Args:
        rows: by label, one uint8 frame [H, W, 3] a column, None where a stream has ended.
        columns: their labels.
    """
    frame = next(frame for frames in rows.values() for frame in frames if frame is not None)
    tall, wide = cell_size(*frame.shape[:2])
    picture = Image.new("RGB", size(len(rows), len(columns), *frame.shape[:2]), PAPER)
    pen, font = ImageDraw.Draw(picture), ImageFont.load_default(12)
    named = {name for plot in plots for name in plot.lines}
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(name for name in rows if name in named)}
    for column, label in enumerate(columns):
        pen.text((LABEL + column * (wide + GAP), 6), label, INK, font)
    for row, (name, frames) in enumerate(rows.items()):
        top = HEADER + row * (tall + GAP)
        pen.text((8, top + tall // 2 - 7), shortened(pen, name, LABEL - 16, font), colours.get(name, INK), font)
        for column, frame in enumerate(frames):
            if frame is not None:
                small = Image.fromarray(frame).resize((wide, tall), Image.Resampling.BOX)
                picture.paste(small, (LABEL + column * (wide + GAP), top))
    top = picture.height - PLOT_HEIGHT
    for index, chart in enumerate(plots):
        left = index * picture.width // len(plots)
        plot(pen, font, (left, top, left + picture.width // len(plots), picture.height), chart, colours)
    replace_file(path, lambda aside: picture.save(aside, format="PNG"))


def shortened(pen: "ImageDraw.ImageDraw", text: str, width: int, font) -> str:
    """The text, cut at the end where it is wider than so many pixels."""
    while len(text) > 1 and pen.textlength(text, font) > width:
        text = text[:-2] + "\u2026"
    return text


def plot(pen: "ImageDraw.ImageDraw", font, box: tuple[int, int, int, int], chart: Plot, colours: Mapping) -> None:
    """Draws one chart into a box (left, top, right, bottom)."""
    left, top, right, bottom = box[0] + 52, box[1] + 22, box[2] - 16, box[3] - 34
    lines = {name: [finite(value) for value in values] for name, values in chart.lines.items()}
    heights = [value for values in lines.values() for value in values if value is not None]
    pen.text((left, box[1] + 2), chart.title, INK, font)
    if not heights:
        return
    marks = ticks(min(heights), max(heights))
    count = max(len(values) for values in lines.values())
    low, high = marks[0], marks[-1]

    def at(chunk: float, value: float) -> tuple[float, float]:
        across = chunk / max(1, count - 1)
        return left + across * (right - left), bottom - (value - low) / (high - low) * (bottom - top)

    for mark in marks:
        level = at(0, mark)[1]
        pen.line([(left, level), (right, level)], FAINT)
        pen.text((left - 6, level), f"{mark:g}", INK, font, anchor="rm")
    if chart.mark is not None and low <= chart.mark <= high:
        pen.line([at(0, chart.mark), at(max(1, count - 1), chart.mark)], INK)
    for chunk in range(0, count, max(1, math.ceil(count / 10))):
        pen.text((at(chunk, low)[0], bottom + 4), str(chunk), INK, font, anchor="mt")
    pen.text((right, bottom + 18), "chunk", INK, font, anchor="rt")
    for name, values in lines.items():
        points = [at(chunk, value) for chunk, value in enumerate(values) if value is not None]
        pen.line(points, colours[name], 2)
        for x, y in points if count <= 20 or len(points) == 1 else ():
            pen.ellipse((x - 2, y - 2, x + 2, y + 2), colours[name])


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round levels, evenly spaced, that enclose low and high: multiples of 1, 2 or 5 times a power of ten."""
    spread = max(high - low, 1e-6 * max(1.0, abs(high)))
    raw = spread / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(index * step, 12) for index in range(first, max(last, first + 1) + 1)]
