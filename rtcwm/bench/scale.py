"""`rtcwm bench scale`: what several GPUs of one machine do, as one table from one command.

Every part is a launch of a real program through a real launcher (`scale_parts`), with a hard limit, its own log and its
own result on disk, so that a part that fails, hangs or finds no time takes nothing from the others, and the same
command goes on where it stopped. One part runs at a time: side by side, each on a GPU of its own, two slowed each other
down.
"""

import json
import signal
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from rtcwm.bench.command import ScaleBench
from rtcwm.bench.scale_parts import FAMILIES, Part, Place, case_of, check_base, parts_of, run_part
from rtcwm.bench.scale_table import describe
from rtcwm.engine.checkpoint import replace_file
from rtcwm.errors import require

LEAST_SECONDS = 15.0
"""A part is not begun with less time left."""
RESERVE_SECONDS = 5.0
"""Of the time given, what is kept for ending the last part and printing."""
APART = ("out", "ranks", "only", "minutes", "part_minutes", "adaln_dir")
"""Settings that do not change what a part finds."""


def bench(settings: ScaleBench) -> int:
    """Runs the parts that are lacking, and prints what there is; 1 where a part failed, was left out or found ranks
    that differ."""
    end = time.monotonic() + settings.minutes * 60
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    ranks = settings.ranks or cards
    require(ranks >= 2, f"--ranks: found {cards} GPUs; several ranks are needed (on the CPU, say how many)")
    require(not cards or ranks <= cards, f"--ranks {ranks}: found {cards} GPUs")
    require(settings.kill_rank is None or settings.kill_rank < ranks, f"--kill-rank: expected less than {ranks}")
    for family in FAMILIES:
        case_of(settings, family)  # a base or a size that is not there: an error now
    wanted = chosen(parts_of(ranks), settings.only)
    check_base(settings, wanted)
    settings.out.mkdir(parents=True, exist_ok=True)
    results = Results(settings)
    schedule = Schedule(settings, results, end)
    lacking = [part for part in wanted if not results.is_done(part)]
    print(f"{len(wanted)} parts, {len(wanted) - len(lacking)} done before; {settings.minutes:g} minutes", flush=True)
    left = schedule.run(lacking)
    text = describe(results.all(), [part.name for part in left])
    replace_file(settings.out / "scale.txt", lambda path: path.write_text(text + "\n"))
    print(text, flush=True)
    return int(bool(left) or any("failed" in results.read(part) for part in wanted if part not in left))


def chosen(parts: Iterable[Part], only: list[str] | None) -> list[Part]:
    """The parts that were asked for by name or family.

    Raises:
        UserError: a name that is neither.
    """
    parts = list(parts)
    if only is None:
        return parts
    known = [*FAMILIES, *(part.name for part in parts)]
    for name in only:
        require(name in known, f"--only {name}: expected some of {', '.join(known)}")
    return [part for part in parts if part.name in only or part.family in only]


@dataclass
class Results:
    """What the parts found, a JSON file each, in ``--out``.

    A result counts only for the settings that it was found with.
    """

    settings: ScaleBench

    def __post_init__(self) -> None:
        given = asdict(self.settings)
        self._key = json.loads(json.dumps({key: value for key, value in given.items() if key not in APART}))

    def path(self, name: str) -> Path:
        return self.settings.out / f"{name}.json"

    def read(self, part: Part) -> dict:
        """What is known of a part; empty if it never ran with these settings."""
        return self._load(self.path(part.name))

    def is_done(self, part: Part) -> bool:
        found = self.read(part)
        return bool(found) and "failed" not in found

    def write(self, part: Part, found: dict) -> None:
        whole = {"part": asdict(part) | {"name": part.name}, "settings": self._key} | found
        text = json.dumps(whole, indent=1) + "\n"
        replace_file(self.path(part.name), lambda path: path.write_text(text))

    def all(self) -> dict[str, dict]:
        """Every part of any number of ranks, by name."""
        found = {path.stem: self._load(path) for path in sorted(self.settings.out.glob("*.json"))}
        return {name: result for name, result in found.items() if result}

    def _load(self, path: Path) -> dict:
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) and found.get("settings") == self._key else {}


class Schedule:
    """Runs parts one after the other, until the time is up or a signal comes.

    Args:
        end: by the monotonic clock.
    """

    def __init__(self, settings: ScaleBench, results: Results, end: float):
        self.settings, self.results, self.end = settings, results, end - RESERVE_SECONDS
        self._stop = threading.Event()

    def run(self, parts: list[Part]) -> list[Part]:
        """Runs them; returns those that there was no time for."""
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        waiting = deque(parts)
        try:
            while waiting and not self._stop.is_set() and time.monotonic() + LEAST_SECONDS < self.end:
                self._run_part(waiting.popleft())
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return list(waiting)

    def _on_signal(self, _number: int, _frame: object) -> None:
        self._stop.set()  # the part that runs is ended, and the table is printed

    def _run_part(self, part: Part) -> None:
        began = time.monotonic()
        deadline = min(self.end, began + self.settings.part_minutes * 60)
        print(f"{part.name}: begins on {part.ranks} rank(s)", flush=True)
        try:
            found = run_part(part, Place(self.settings, part, deadline, self._stop))
        except Exception as error:  # noqa: BLE001 - one part that fails does not lose the others
            found = {"failed": f"{type(error).__name__}: {error}"}
        found["took"] = time.monotonic() - began
        self.results.write(part, found)
        print(f"{part.name}: {found.get('failed', 'done')} ({found['took']:.0f} s)", flush=True)
