"""Which clips a run keeps from training, whether they give a loss, and whether the run it starts from kept them too.

Every adapter file of a run names its held-out episodes. A run that starts from such a file holds out episodes by its
own seed; those that the file does not name were trained on earlier, if the earlier run had their clips, and a loss on
them is not one of unseen clips. Names of episodes are all that is compared. What a file names is what no run up to it
was trained on: a run's own held-out episodes without those trained on earlier, and those of earlier runs that are not
among its clips.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rtcwm.data.clips import Clip
from rtcwm.errors import UserError
from rtcwm.model.adapter_files import read_metadata
from rtcwm.train.dataset import hold_out, spans

NAMED = 5
"""Names that a line lists before it breaks off."""


@dataclass(frozen=True)
class HeldOut:
    """The held-out clips of a run.

    Attributes:
        unseen: episodes that neither this run nor those before it were trained on, sorted; val_clips: as asked for.
        warnings: lines on clips that an earlier run was trained on.
    """

    clips: tuple[Clip, ...]
    val_clips: int
    unseen: tuple[str, ...]
    warnings: tuple[str, ...]

    @classmethod
    def of(cls, clips: Sequence[Clip], held: Sequence[Clip], val_clips: int, flag: str, start: str | None) -> "HeldOut":
        """The clips `held` of a run's `clips`.

        Args:
            start: the adapter file that training starts from, None for a new adapter; flag: which names it.
        """
        own = {clip.episode for clip in held}
        metadata = read_metadata(Path(start)) if start else {}
        before = unseen_episodes(metadata)
        if before is None:
            return cls(tuple(held), val_clips, tuple(sorted(own)), ())
        unseen = own & before | before - {clip.episode for clip in clips}
        warnings = ()
        if seen := sorted(own - before):
            warnings = (
                f"warning: {len(seen)} of {len(own)} held-out episodes ({some(seen)}) are not among those that the run "
                f"of {flag} {start} held out: it was trained on them if it had them, and the held-out loss is then not "
                f"one of unseen clips{_advice(clips, before, metadata)}",
            )
        return cls(tuple(held), val_clips, tuple(sorted(unseen)), warnings)

    def line(self) -> str:
        """Their number, and whether a loss can be measured on them."""
        told = f"held out: {len(self.clips)} clips ({len({clip.episode for clip in self.clips})} episodes)"
        if self.clips and not any(spans(clip) for clip in self.clips):
            told += ", none with a usable span: there will be no held-out loss"
        return told

    def metadata(self) -> dict[str, str]:
        """What the run's adapter files say of them."""
        return {"held_out": json.dumps(self.unseen), "val_clips": str(self.val_clips)}


def unseen_episodes(metadata: Mapping[str, str]) -> frozenset[str] | None:
    """The episodes that an adapter file says were held out; None where it does not say."""
    try:
        found = json.loads(metadata.get("held_out", "null"))
    except (ValueError, RecursionError):
        return None  # another trainer's entry of this name
    return frozenset(found) if isinstance(found, list) and all(isinstance(name, str) for name in found) else None


def some(names: Sequence[str]) -> str:
    """The first few names, for a line."""
    return ", ".join(names[:NAMED]) + (" ..." if len(names) > NAMED else "")


def _advice(clips: Sequence[Clip], before: frozenset[str], metadata: Mapping[str, str]) -> str:
    """The flags of the earlier run, where they hold out nothing that it was trained on."""
    seed, val_clips = metadata.get("seed", ""), metadata.get("val_clips", "")
    try:
        held = hold_out(clips, int(val_clips), int(seed))
    except (UserError, ValueError):
        return ""
    return f". Set --seed {seed} --val-clips {val_clips}, as in that run" if held and held <= before else ""
