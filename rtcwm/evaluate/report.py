"""What an evaluation says: a table, a JSON file and TensorBoard scalars."""

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from rtcwm.engine.checkpoint import replace_file
from rtcwm.evaluate.measures import MEASURES, Comparison

JSON, EVENTS = "evaluate.json", "evaluate_events"

COLUMNS = (
    ("PSNR dB", "psnr", "all", "{:.2f}"),
    ("drift dB", "psnr", "drift", "{:+.3f}"),
    ("SSIM", "ssim", "all", "{:.3f}"),
    ("Frechet", "frechet", "all", "{:.3g}"),
    ("first half", "frechet", "first_half", "{:.3g}"),
    ("last half", "frechet", "last_half", "{:.3g}"),
    ("of means", "frechet_mean", "all", "{:.2g}"),
    ("sharp", "sharpness", "all", "{:.2f}"),
    ("motion", "motion", "all", "{:.2f}"),
    ("satur.", "saturation", "all", "{:.2f}"),
    ("jumps", "jumps", "all", "{:.2f}"),
    ("colour", "colour", "all", "{:.1f}"),
)


def summarise(comparison: Comparison) -> dict[str, dict]:
    """Every measure of a model, as `Comparison.summary` gives it."""
    return {name: comparison.summary(name) for name in MEASURES}


def table(rows: Mapping[str, Mapping]) -> str:
    """One line a model: its measures over all chunks, the Frechet distance over halves, the drift of PSNR a chunk."""
    lines = [["model", "kind", "steps", "chunks", *(title for title, *_ in COLUMNS), "ms a chunk"]]
    for name, row in rows.items():
        cells = [name, row["kind"], _steps(row), str(row["chunks"])]
        cells += [_cell(row["measures"][measure][part], form) for _, measure, part, form in COLUMNS]
        lines.append([*cells, _cell(row["seconds_a_chunk"] * 1000, "{:.0f}")])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths))
        )
        for line in lines
    )


def _steps(row: Mapping) -> str:
    return str(row["sampling"]["steps"]) if row["sampling"] else "-"


def _cell(value: float, form: str) -> str:
    return form.format(value) if math.isfinite(value) else "-"


def measures() -> dict[str, dict]:
    """What the measures' names stand for."""
    return {name: asdict(measure) for name, measure in MEASURES.items()}


def plain(value: object) -> object:
    """The same without NaN and infinities, which JSON has not: null in their place."""
    if isinstance(value, Mapping):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(out: Path, result: Mapping) -> None:
    """`evaluate.json`, complete or absent."""
    text = json.dumps(plain(result), indent=1, allow_nan=False) + "\n"
    replace_file(out / JSON, lambda path: path.write_text(text))


def write_events(out: Path, rows: Mapping[str, Mapping]) -> None:
    """TensorBoard: a run a model, steps are chunks; halves and drift stand at step 0. Replaces those of an earlier
    evaluation in this folder, and no other events."""
    shutil.rmtree(out / EVENTS, ignore_errors=True)
    for name, row in rows.items():
        with SummaryWriter(str(out / EVENTS / name)) as writer:
            for measure, found in row["measures"].items():
                for chunk, value in enumerate(found["chunks"]):
                    _scalar(writer, f"evaluate/{measure}", value, chunk)
                for part in ("all", "first_half", "last_half", "drift"):
                    _scalar(writer, f"evaluate_{part}/{measure}", found[part], 0)


def _scalar(writer: SummaryWriter, tag: str, value: float, step: int) -> None:
    if math.isfinite(value):
        writer.add_scalar(tag, value, step)
