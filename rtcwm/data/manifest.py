"""The optional `manifest.json` of a folder of clips: which clips belong to it, by hash, and what made them.

`{"codec": {name, hash}, "clips": {id: hash}, "world": settings or absent}`. A clip's hash is cheap, for it is checked
at every start: it covers the names and sizes of the clip's files, their first 4 KiB (all of a small header), 64 pieces
of 64 bytes spread evenly over each file, and `clip.json` but for its flagged spans, which quality control may edit. So
it tells another codec, another seed, a swapped or a truncated file; it does not tell a single flipped byte.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from rtcwm.errors import UserError

NAME = "manifest.json"
HEAD_BYTES = 4096
PIECES = 64
PIECE_BYTES = 64


def clip_hash(path: Path) -> str:
    """First 32 hex digits of the SHA-256 described above; reads at most 8 KiB a file."""
    digest = hashlib.sha256()
    for file in sorted(path.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with open(file, "rb") as handle:
            digest.update(handle.read(HEAD_BYTES))
            for piece in range(PIECES if size > HEAD_BYTES else 0):
                handle.seek(HEAD_BYTES + (size - HEAD_BYTES) * piece // PIECES)
                digest.update(handle.read(PIECE_BYTES))
    description = json.loads((path / "clip.json").read_text())
    description.pop("flagged", None)
    digest.update(json.dumps(description, sort_keys=True).encode())
    return digest.hexdigest()[:32]


def write(root: Path, content: Mapping[str, object]) -> None:
    """Write the manifest, aside and then renamed."""
    aside = root / f".{NAME}.{os.getpid()}"
    aside.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    aside.replace(root / NAME)


def read(root: Path) -> dict | None:
    """The manifest of a folder, None without one.

    Raises:
        UserError: it is not valid JSON or lacks its fields.
    """
    path = root / NAME
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as fault:
        raise UserError(
            f"{path} is not valid JSON ({fault}): write the clips again, or delete it to use them unchecked"
        ) from fault
    if not isinstance(found, dict) or not all(isinstance(found.get(key), dict) for key in ("clips", "codec")):
        raise UserError(f"{path} lacks `clips` or `codec`: write the clips again, or delete it to use them unchecked")
    return found


def check(root: Path, clips: Mapping[str, Path], codec: Mapping[str, str]) -> None:
    """Compare the clips found (id -> folder) and their codec with the manifest, if there is one.

    Raises:
        UserError: names the first clip that is missing, not listed or changed, or the other codec.
    """
    listed = read(root)
    if listed is None:
        return
    path = root / NAME
    advice = "finish or repeat the command that wrote the clips, or delete the manifest to use them unchecked"
    if dict(listed["codec"]) != dict(codec):
        raise UserError(
            f"{path} was written for codec {listed['codec']}, but the clips were made with {dict(codec)}: {advice}"
        )
    for clip_id in sorted(set(listed["clips"]) | set(clips)):
        if clip_id not in clips:
            raise UserError(f"clip {clip_id} is listed in {path} but missing: {advice}")
        if clip_id not in listed["clips"]:
            raise UserError(f"clip {clip_id} is not listed in {path}: {advice}")
        found = clip_hash(clips[clip_id])
        if found != listed["clips"][clip_id]:
            raise UserError(
                f"clip {clip_id} has changed since {path} was written: hash {found}, expected "
                f"{listed['clips'][clip_id]}; {advice}"
            )
