"""What a run says: a line a step on the console, the same in ``train_log.jsonl`` and in TensorBoard.

The jsonl file is the record; TensorBoard's events are written from it. On resume the file is cut back to the checkpoint
and the events are written anew, so no step appears twice in either, whatever killed the run.
"""

import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


class Record:
    """The console, the jsonl file and TensorBoard of a run, on rank 0; on other ranks every method does nothing.

    Args:
        folder: the run's ``--out``, or None on other ranks.
        first_step: steps below it are kept from an earlier start, later ones are cut off.
        steps: planned, for the progress bar, and what one of them is called.
    """

    def __init__(self, folder: Path | None, name: str, first_step: int, steps: int, unit: str = "step"):
        self.folder = folder
        if folder is None:
            return
        self.path = folder / name
        self.last_said = time.monotonic()
        kept = keep_steps(self.path, first_step)
        events = folder / "tensorboard"
        for old in events.glob("events.out.tfevents.*"):
            old.unlink()
        self.writer = SummaryWriter(str(events))
        for row in kept:
            self._scalars(row)
        self.file = self.path.open("a", buffering=1)
        self.bar = tqdm(
            total=steps, initial=first_step, unit=unit, disable=not sys.stderr.isatty(), dynamic_ncols=True, leave=False
        )

    def say(self, text: str) -> None:
        """Prints a line without breaking the progress bar."""
        if self.folder is not None:
            self.last_said = time.monotonic()
            self.bar.clear()
            with suppress(BrokenPipeError):  # a reader such as head that has left is no reason to stop
                print(text, flush=True)
            self.bar.refresh()

    def progress(self, text: str, every: float = 30.0) -> None:
        """What is going on inside a step: on the bar of a terminal, else a line at most every so many seconds."""
        if self.folder is None:
            return
        if not self.bar.disable:
            self.bar.set_postfix_str(text)
        elif time.monotonic() - self.last_said > every:
            self.say(f"  ... {text}")

    def row(self, step: int, values: dict, line: str, advance: int = 0) -> None:
        """Records one row.

        Args:
            step: counted from 1; values: plain numbers, lists, dicts or strings, under "tag/name" keys for TensorBoard.
            line: for the console; advance: steps that the progress bar moves on.
        """
        if self.folder is None:
            return
        row = {"step": step, "time": round(time.time(), 3), **values}
        self.file.write(json.dumps(row) + "\n")
        self._scalars(row)
        self.say(line)
        self.bar.update(advance)

    def close(self) -> None:
        if self.folder is not None:
            self.bar.close()
            self.file.close()
            self.writer.close()

    def _scalars(self, row: dict) -> None:
        """Every number of a row: top-level ones under ``train/``, nested ones under their own names."""
        plain = {key: value for key, value in row.items() if not isinstance(value, dict)}
        nested = {key: value for key, value in row.items() if isinstance(value, dict)}
        for tag, number in _numbers("", {"train": plain} | nested):
            if tag not in ("train/step", "train/time"):
                self.writer.add_scalar(tag, number, row["step"], walltime=row["time"])


def _numbers(tag: str, value: object) -> Iterator[tuple[str, float]]:
    """The numbers inside dicts and lists, with the path to each."""
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from _numbers(f"{tag}/{key}".lstrip("/"), entry)
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            yield from _numbers(f"{tag}/{index}", entry)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield tag, value


def keep_steps(path: Path, first_step: int) -> list[dict]:
    """Cuts a jsonl file back to rows of steps up to ``first_step`` (steps done when the checkpoint was written), drops
    a half-written last line, and returns the rows that stay."""
    kept = []
    if path.is_file():
        for line in path.read_text().splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if row["step"] <= first_step:
                kept.append(row)
    aside = path.with_name(f".{path.name}")
    aside.write_text("".join(json.dumps(row) + "\n" for row in kept))
    aside.rename(path)
    return kept


def finite_or_none(value: float) -> float | None:
    """JSON has no infinities."""
    return value if math.isfinite(value) else None


class Clock:
    """Seconds a step and time left, over the last steps (the first of a start is left out: it warms up)."""

    def __init__(self, memory: int = 20):
        self.memory = memory
        self.seconds: list[float] = []
        self.last = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap."""
        now = time.perf_counter()
        took, self.last = now - self.last, now
        self.seconds.append(took)
        return took

    def restart(self) -> None:
        """Leaves out what happened since the last lap (validation, saving)."""
        self.last = time.perf_counter()

    def left(self, steps: int) -> float:
        """Expected seconds for so many more steps."""
        recent = self.seconds[1:][-self.memory :] or self.seconds
        return steps * sum(recent) / max(1, len(recent))
