"""The output folder: one preparation at a time, nothing of others', nothing half done.

A clip is done when its folder is whole and carries the key of the same sources, settings and weights; all else is made
again. Folders are written aside and renamed, so a killed preparation leaves hidden folders at most, which the next one
removes.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TextIO

from rtcwm.data import manifest
from rtcwm.data.clips import clip_folders, read_clip
from rtcwm.data.headers import DESCRIPTION
from rtcwm.data.write import check_place
from rtcwm.errors import UserError
from rtcwm.lock import Locked, lock
from rtcwm.prepare.jobs import Models
from rtcwm.prepare.proxies import condition_files
from rtcwm.prepare.settings import Settings
from rtcwm.prepare.sources import Source

LOCK = ".prepare.lock"
ONE_A_FOLDER = ("system_prompt", "vision_picture")
"""Settings that shape the text rows of all clips of a folder alike."""


def open_folder(out: Path) -> TextIO:
    """Make the folder, keep other preparations out of it while the returned file is open, and clear what a killed one
    left.

    Raises:
        UserError: another one is at work in it, or it cannot be made.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        held = lock(out / LOCK)
    except OSError as fault:
        raise UserError(f"cannot make or write --out {out}: {fault}; name a folder that can be written") from fault
    except Locked as fault:
        raise UserError(
            f"another preparation is at work in --out {out}: wait for it, or choose another folder"
        ) from fault
    sweep(out)
    return held


def sweep(out: Path) -> None:
    """Remove what interrupted writes left."""
    for pattern in (".*.writing-*", ".*.replaced-*"):
        for path in out.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)
    for path in out.glob(f".{manifest.NAME}.*"):
        path.unlink(missing_ok=True)


def claim(out: Path, ids: set[str], models: Models, settings: Settings) -> None:
    """Raise UserError where the folder holds clips of another origin, or clips that would stay and were made otherwise,
    or where a clip would take the place of other files.

    Args:
        out: the folder.
        ids: clips of this preparation, which may replace their earlier versions.
        models: of this preparation; settings: likewise.
    """
    for clip_id in sorted(ids):
        check_place(out / clip_id)
    wanted = {"codec": dict(models.codec_identity), "text_encoder": dict(models.text_identity)}
    wanted |= {name: getattr(settings, name) for name in ONE_A_FOLDER}
    for folder in clip_folders(out):
        found = described(folder)
        if found is None and folder.name in ids:
            continue  # broken: made again
        if found is None or "prepared" not in found:
            raise UserError(
                f"--out {out} holds {folder.name}, which `rtcwm prepare` did not write or which is broken: choose "
                "another folder, or remove it"
            )
        told = found | found["prepared"]["settings"]
        for name, value in wanted.items():
            if folder.name not in ids and told.get(name) != value:
                raise UserError(
                    f"--out {out} holds {folder.name} with {name} {told.get(name)!r}, here it is {value!r}: clips made "
                    "otherwise cannot be mixed; choose another folder, remove the clip, or name all sources to "
                    "make all again"
                )


def described(folder: Path) -> dict | None:
    """A clip's description, None where it cannot be read."""
    try:
        found = json.loads((folder / DESCRIPTION).read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def notes_if_done(out: Path, clip_id: str, key: str) -> list[str] | None:
    """The remarks of a clip that is whole and was made with this key; None where it has to be made."""
    found = described(out / clip_id)
    if not found or not isinstance(found.get("prepared"), dict) or found["prepared"].get("key") != key:
        return None
    try:
        read_clip(out / clip_id)
    except UserError:
        return None
    return list(found["prepared"]["notes"])


def hash_sources(source: Source) -> dict[str, str]:
    """SHA-256 of a clip's files by role, all bytes of them; a condition root counts as one."""
    files = {"target": source.target, "anchor": source.anchor, "report": source.report}
    found = {role: hash_files([path]) for role, path in files.items() if path}
    root = source.proxy.is_dir()  # of conditions: other files and folders in it are no part of the proxy
    found["proxy"] = hash_files(condition_files(source.proxy) if root else [source.proxy], names=root)
    found |= {f"caption {path.name}": hash_files([path]) for path in source.captions}
    found["episode"] = source.episode
    if source.prompt is not None:
        found["prompt"] = hashlib.sha256(source.prompt.encode()).hexdigest()
    return dict(sorted(found.items()))


def hash_files(paths: list[Path], names: bool = False) -> str:
    digest = hashlib.sha256()
    for path in paths:
        if names:
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        for piece in pieces(path):
            digest.update(piece)
    return digest.hexdigest()


def pieces(path: Path, size: int = 1 << 20) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while piece := file.read(size):
            yield piece


def finish(out: Path, codec: Mapping[str, str]) -> None:
    """Write the manifest of all clips in the folder."""
    sweep(out)
    clips = {folder.name: manifest.clip_hash(folder) for folder in clip_folders(out)}
    manifest.write(out, {"codec": dict(codec), "clips": clips})
