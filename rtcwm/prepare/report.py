"""What a preparation did: the console's lines and `prepare_report.json`."""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rtcwm import progress
from rtcwm.prepare.sources import Refusal

NAME = "prepare_report.json"


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
        """Remarks counted by kind, refusals one a line, and the totals."""
        for note, clips in self._by_note().items():
            print(f"prepare: {len(clips)} clip(s), as {clips[0]}: {note}")
        for refusal in sorted(self.refused, key=lambda one: (one.clip, one.origin)):
            print(f"prepare: refused {refusal.clip} ({refusal.origin}): {refusal.reason}", file=sys.stderr)
        print(
            f"{out}: {len(self.prepared)} clips prepared, {len(self.kept)} already there, {len(self.refused)} refused"
        )

    def _by_note(self) -> dict[str, list[str]]:
        kinds: dict[str, list[str]] = {}
        for clip, notes in sorted(self.notes.items()):
            for note in notes:
                kinds.setdefault(note, []).append(clip)
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
