"""What a preparation did: the console's lines and `prepare_report.json`."""

import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rtcwm import progress
from rtcwm.prepare.sources import Refusal

NAME = "prepare_report.json"
NUMBER = re.compile(r"\d+(?:\.\d+)?")


@dataclass
class Report:
    """Clips by what became of them. `notes` are remarks on the clips made now or kept; `traces` tracebacks of faults
    that nobody foresaw; `stopped` is why it ended early, which was the user's wish where it was `interrupted`."""

    prepared: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    notes: dict[str, list[str]] = field(default_factory=dict)
    traces: dict[str, str] = field(default_factory=dict)
    stopped: str | None = None
    interrupted: bool = False

    def note(self, clip: str, notes: Sequence[str]) -> None:
        """Remember the remarks on a clip, if there are any."""
        if notes:
            self.notes[clip] = list(notes)

    def write(self, out: Path, **more: object) -> None:
        """Write the report; a full disk is told, not raised."""
        content = {
            "prepared": sorted(self.prepared),
            "kept": sorted(self.kept),
            "refused": [vars(refusal) for refusal in sorted(self.refused, key=lambda one: (one.clip, one.origin))],
            "notes": dict(sorted(self.notes.items())),
            "traces": dict(sorted(self.traces.items())),
            "stopped": self.stopped,
        }
        aside = out / f".{NAME}"
        try:
            aside.write_text(json.dumps(content | more, indent=1) + "\n")
            aside.replace(out / NAME)
        except OSError as fault:
            aside.unlink(missing_ok=True)
            print(f"prepare: cannot write {out / NAME}: {fault}", file=sys.stderr)

    def print(self, out: Path) -> None:
        """Remarks counted by kind, each with its first clip's numbers, refusals one a line, and the totals."""
        for found in self._by_kind().values():
            (clip, note), others = found[0], {note for _, note in found[1:]} - {found[0][1]}
            more = f" (other numbers in {NAME})" if others else ""
            print(f"prepare: {len(found)} clip(s), as {clip}: {note}{more}")
        for refusal in sorted(self.refused, key=lambda one: (one.clip, one.origin)):
            print(f"prepare: refused {refusal.clip} ({refusal.origin}): {refusal.reason}", file=sys.stderr)
        print(
            f"{out}: {len(self.prepared)} clips prepared, {len(self.kept)} already there, {len(self.refused)} refused"
        )

    def _by_kind(self) -> dict[str, list[tuple[str, str]]]:
        """Clips and their remarks, by the remark without its numbers."""
        kinds: dict[str, list[tuple[str, str]]] = {}
        for clip, notes in sorted(self.notes.items()):
            for note in notes:
                kinds.setdefault(NUMBER.sub("", note), []).append((clip, note))
        return kinds


class Progress:
    """One line on stderr as clips are done: rewritten on a terminal, some twenty lines in a log."""

    def __init__(self, weights: Mapping[str, int]):
        self.weights, self.done, self.share, self.started = dict(weights), 0, 0, time.monotonic()

    def step(self, clip: str) -> None:
        """Count one clip, whatever became of it. The time left is in proportion to the bytes of the targets."""
        self.done, self.share = self.done + 1, self.share + self.weights[clip]
        seconds, total = time.monotonic() - self.started, len(self.weights)
        left = seconds / max(self.share, 1) * (sum(self.weights.values()) - self.share)
        text = f"prepare: {self.done}/{total} clips, {progress.duration(seconds)}, {progress.duration(left)} left"
        progress.show(text, self.done, total)
