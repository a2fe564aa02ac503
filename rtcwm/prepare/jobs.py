"""What passes between the process that plans a preparation and those that encode. Free of the models' libraries, which
take seconds to import."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rtcwm.prepare.sources import Source


@dataclass(frozen=True)
class Models:
    """Folders of the parts, and the {name, hash} that clips carry of what made them."""

    vae: Path
    text_encoder: Path
    tokenizer: Path
    processor: Path
    codec_identity: Mapping[str, str]
    text_identity: Mapping[str, str]


@dataclass(frozen=True)
class Job:
    """A clip to prepare: its files' hashes by role, its key, the size its target has to have (height, width), and the
    bytes of its target, for the estimate of the time left."""

    source: Source
    hashes: Mapping[str, str]
    key: str
    size: tuple[int, int]
    weight: int


@dataclass(frozen=True)
class Outcome:
    """What became of one clip: its remarks, or why it was refused (`trace` where nobody foresaw that)."""

    clip: str
    notes: tuple[str, ...] = ()
    reason: str | None = None
    trace: str | None = None
