"""Where clips come from: trees of clip folders and condition roots, and JSONL manifests.

A folder is walked, since such trees have no list of their own. A clip is a folder with a target video and a proxy:

    target/rgb.mp4, rgb.mp4, video.mp4 or target.mp4
    duv/, conditions/, proxy/ or the folder itself with condition files; else proxy/duv.mp4 or duv.mp4
    target/anchor.png, prompt.txt, annotations/{prompt,caption}.json, clip_report.json, each of which may be missing

A manifest has a JSON object a line: `id` or `name`, `target`, exactly one of `proxy`, `proxy_duv`, `proxy_duv_video`
(a condition root or a DUV video, told apart by what is there), and optionally `anchor`, `prompt`, `episode`. Paths are
relative to `root`. Other keys are passed over, and told once: one of them may be a slip of the pen.

Every file has to lie under `root` once symbolic links are resolved: a link that leads out of the tree is refused, not
followed. What is refused is listed with its reason and never ends the search.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rtcwm.data.clips import STREAM
from rtcwm.data.write import checked_id
from rtcwm.errors import UserError
from rtcwm.prepare.proxies import CONDITIONS, is_conditions

TARGETS = ("target/rgb.mp4", "rgb.mp4", "video.mp4", "target.mp4")
CONDITION_ROOTS = ("duv", "conditions", "proxy", ".")
DUV_VIDEOS = ("proxy/duv.mp4", "duv.mp4")
CAPTIONS = ("prompt.txt", "annotations/prompt.json", "annotations/caption.json")
PROXY_KEYS = ("proxy", "proxy_duv", "proxy_duv_video")
KNOWN_KEYS = ("id", "name", "target", *PROXY_KEYS, "anchor", "prompt", "episode")
CLIP_NAME = re.compile(r"clip_(\d+)_\d+")


@dataclass(frozen=True)
class Source:
    """Files of one clip. `proxy` is a condition root or a video; `prompt` is the manifest's text, if it came from one;
    `captions` are files to read one from, best first; `origin` says where the clip was found; `unread` are keys of its
    manifest line that mean nothing here."""

    id: str
    episode: str
    origin: str
    target: Path
    proxy: Path
    anchor: Path | None = None
    prompt: str | None = None
    captions: tuple[Path, ...] = ()
    report: Path | None = None
    unread: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refusal:
    """A clip that is not prepared, where it was found, and why."""

    clip: str
    origin: str
    reason: str


def find(paths: list[Path], root: Path | None = None) -> tuple[list[Source], list[Refusal]]:
    """All clips of folders and manifests, sorted by id, and what was refused.

    Args:
        paths: folders to walk and `.jsonl` manifests.
        root: folder that manifests' paths are relative to and that no file may lie outside of; by default each
            manifest's own folder and each folder itself.

    Raises:
        UserError: a path that is neither, or nothing found at all.
    """
    found: list[Source | Refusal] = []
    for path in paths:
        if path.is_dir():
            found += walk(path, (root or path).resolve())
        elif path.is_file() and path.suffix == ".jsonl":
            found += read_manifest(path, (root or path.parent).resolve())
        else:
            raise UserError(f"--source {path} is neither a folder nor a .jsonl manifest")
    if not found:
        raise UserError(
            f"--source {', '.join(map(str, paths))} holds no clips: expected folders with {TARGETS[0]} and a proxy, or "
            "manifest lines"
        )
    times = Counter(entry.id for entry in found if isinstance(entry, Source))
    sources, refused = [], [entry for entry in found if isinstance(entry, Refusal)]
    for entry in found:
        if isinstance(entry, Source) and times[entry.id] == 1:
            sources.append(entry)
        elif isinstance(entry, Source):
            others = [other.origin for other in found if isinstance(other, Source) and other.id == entry.id]
            reason = f"{times[entry.id]} clips have this id ({', '.join(others)}): rename all but one"
            refused.append(Refusal(entry.id, entry.origin, reason))
    return sorted(sources, key=lambda source: source.id), sorted(refused, key=lambda entry: (entry.clip, entry.origin))


def episode_of(clip_id: str) -> str:
    """Episode of `clip_<episode>_<window>`, whose windows share scene and light; else the id itself."""
    match = CLIP_NAME.fullmatch(clip_id)
    return match[1] if match else clip_id


def checked_text(text: str, name: object) -> str:
    """The text; UserError, opened by `name`, where it holds half a character, as JSON can and no file can."""
    try:
        text.encode()
    except UnicodeEncodeError as fault:
        raise UserError(f"{name} holds half a character ({fault}): write it whole") from fault
    return text


def within(path: Path, root: Path, what: str) -> Path:
    """The resolved path; UserError where it is missing or where it, or any file in it, lies outside of `root` or is
    something else than a file or a folder: reading a pipe would wait for ever."""
    real = path.resolve()
    inner = sorted(os.scandir(real), key=lambda entry: entry.name) if real.is_dir() else ()
    for file in (real, *(real / entry.name for entry in inner if entry.is_symlink())):
        if not file.resolve().is_relative_to(root):
            raise UserError(
                f"{what} {path if file == real else file} leads out of {root} (to {file.resolve()}): copy it into the "
                "tree, or name a folder that holds both as --root"
            )
    if not real.exists():
        raise UserError(f"{what} {path} does not exist")
    odd = [real / entry.name for entry in inner if entry.name.endswith(CONDITIONS) and not entry.is_file()]
    if not (real.is_file() or real.is_dir()) or odd:
        raise UserError(f"{what} {(odd or [path])[0]} is no file")
    return real


def walk(folder: Path, root: Path) -> Iterator[Source | Refusal]:
    """Clips of a tree. Folders behind links are not entered: those inside are found at their own place. Nor are clips
    that were prepared: `--out` may lie in the tree that it is made of."""
    if (folder / STREAM).exists():
        return
    if looks_like_clip(folder):
        name = folder.resolve().name
        try:
            yield folder_clip(folder, checked_id(name), root)
        except (UserError, OSError) as fault:
            yield Refusal(name, str(folder), str(fault))
        return
    for inner in sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")):
        if not inner.is_symlink():
            yield from walk(inner, root)
        elif not inner.resolve().is_relative_to(root):
            reason = (
                f"is a symbolic link out of {root} (to {inner.resolve()}): copy it, or name a folder above as --root"
            )
            yield Refusal(inner.name, str(inner), reason)


def looks_like_clip(folder: Path) -> bool:
    signs = (*TARGETS, *DUV_VIDEOS, "clip_report.json")
    return (
        bool(CLIP_NAME.fullmatch(folder.name))
        or any((folder / sign).exists() for sign in signs)
        or is_conditions(folder)
    )


def folder_clip(folder: Path, clip_id: str, root: Path) -> Source:
    """The files of a clip folder.

    Raises:
        UserError: no target, no proxy, or a file outside of `root`.
    """

    def first(names: tuple[str, ...]) -> Path | None:
        # lexists: a link to nowhere is named as missing, not passed over
        return next((folder / name for name in names if (folder / name).exists() or (folder / name).is_symlink()), None)

    target = first(TARGETS)
    if target is None:
        raise UserError(
            f"{folder} has no target video ({', '.join(TARGETS)}): a stream needs one; put it there, or name it "
            "in a manifest"
        )
    proxy = next((folder / name for name in CONDITION_ROOTS if is_conditions(folder / name)), first(DUV_VIDEOS))
    if proxy is None:
        raise UserError(f"{folder} has no proxy: expected condition files in duv/ or proxy/, or {DUV_VIDEOS[0]}")
    anchor, report = first(("target/anchor.png",)), first(("clip_report.json",))
    captions = [folder / name for name in CAPTIONS if first((name,))]
    return Source(
        clip_id,
        episode_of(clip_id),
        str(folder),
        within(target, root, "the target"),
        within(proxy, root, "the proxy"),
        within(anchor, root, "the anchor") if anchor else None,
        captions=tuple(within(caption, root, "the caption") for caption in captions),
        report=within(report, root, "the report") if report else None,
    )


def read_manifest(path: Path, root: Path) -> Iterator[Source | Refusal]:
    """Clips of a manifest, line by line; UserError where it is no text."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as fault:
        raise UserError(f"--source {path} cannot be read as UTF-8 text: {fault}") from fault
    for number, line in enumerate(text.split("\n"), start=1):  # JSON's strings may hold other line ends
        if not line.strip():
            continue
        origin, name = f"{path} line {number}", "?"
        try:
            entry = json.loads(line)
            if not isinstance(entry, dict):
                raise UserError(f"a line holds {type(entry).__name__}, expected an object")
            name = str(entry.get("id") or entry.get("name") or "?")
            yield manifest_clip(entry, origin, root)
        except (json.JSONDecodeError, RecursionError) as fault:
            yield Refusal(name, origin, f"is not valid JSON ({fault})")
        except (UserError, OSError) as fault:
            yield Refusal(name, origin, str(fault))


def manifest_clip(entry: dict, origin: str, root: Path) -> Source:
    """One line of a manifest; UserError for what it lacks."""
    clip_id = next((entry[key] for key in ("id", "name") if entry.get(key) not in (None, "")), None)
    if not isinstance(clip_id, str | int) or isinstance(clip_id, bool):
        raise UserError("has neither `id` nor `name`, a text or a whole number")
    proxies = [key for key in PROXY_KEYS if entry.get(key) is not None]
    if len(proxies) != 1:
        held = "" if proxies else f" (it holds {', '.join(sorted(entry))})"
        raise UserError(
            f"has {' and '.join(proxies) or 'no proxy'}; expected exactly one of {', '.join(PROXY_KEYS)}{held}"
        )
    for key in ("target", *proxies, "anchor", "prompt"):
        if not isinstance(entry.get(key), str) and (key == "target" or entry.get(key) is not None):
            raise UserError(f"`{key}` is {entry.get(key)!r}, expected text")
        if key != "prompt" and "\0" in (entry.get(key) or ""):
            raise UserError(f"`{key}` is {entry[key]!r}, which no file can be called")
    clip_id = checked_id(str(clip_id))
    anchor = entry.get("anchor")
    return Source(
        clip_id,
        str(entry.get("episode") or episode_of(clip_id)),
        origin,
        within(root / entry["target"], root, "the target"),
        within(root / entry[proxies[0]], root, "the proxy"),
        within(root / anchor, root, "the anchor") if anchor else None,
        prompt=checked_text(entry.get("prompt") or "", "`prompt`"),
        unread=tuple(sorted(set(entry) - set(KNOWN_KEYS))),
    )


def unread_keys(sources: list[Source]) -> str | None:
    """A line on the keys of manifests that mean nothing here, None where there are none."""
    found = Counter(key for source in sources for key in source.unread)
    if not found:
        return None
    told = ", ".join(f"{key} ({count})" for key, count in sorted(found.items()))
    return f"keys of manifests that are passed over, with their clips: {told}; known are {', '.join(KNOWN_KEYS)}"
