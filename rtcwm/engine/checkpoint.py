"""Checkpoints that are complete or absent.

``state/step00150/`` holds one safetensors file for every engine and ``state.json``: the program's own counters, and
size and hash of each file. It is written aside as ``state/.step00150``, checked, flushed and then renamed, so a death
at any moment leaves the newest complete one in place. Rank 0 alone touches the disk.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rtcwm.engine.world import World
from rtcwm.errors import UserError

KEEP = 2
"""Checkpoints that stay in ``state/``; older ones are removed once a new one is in place."""


class Stateful(Protocol):
    """What a checkpoint holds one file of: its state whole on rank 0, empty elsewhere. Both are collectives."""

    def state_dict(self) -> dict[str, torch.Tensor]: ...

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None: ...


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: ``<out>/state``.
    """

    def __init__(self, world: World, folder: Path):
        self.world = world
        self.folder = folder

    def save(self, step: int, engines: Mapping[str, Stateful], counters: dict) -> None:
        """Writes the state of all engines and the program's counters; a collective.

        Raises:
            UserError: the disk refused (full, read-only), or the state is not finite. What was on disk is intact.
        """
        states = {name: engine.state_dict() for name, engine in engines.items()}
        self.world.on_main(lambda: self._write(step, states, counters))

    def load(self, engines: Mapping[str, Stateful], step: int) -> dict:
        """Restores all engines from a complete checkpoint; returns the counters. A collective."""
        folder = self.path(step)
        for name, engine in engines.items():
            engine.load_state_dict(load_file(folder / f"{name}.safetensors") if self.world.is_main else {})
        return self.world.on_main(lambda: json.loads((folder / "state.json").read_text())["counters"])

    def newest(self) -> int | None:
        """Step of the newest complete checkpoint, or None; damaged ones are named and passed over. A collective.

        Raises:
            UserError: there are checkpoints and all are damaged.
        """
        return self.world.on_main(self._newest)

    def path(self, step: int) -> Path:
        return self.folder / f"step{step:05d}"

    def _newest(self) -> int | None:
        if not self.folder.is_dir():
            return None
        matches = [re.fullmatch(r"step(\d{5,})", entry.name) for entry in self.folder.iterdir()]
        steps = sorted((int(match[1]) for match in matches if match), reverse=True)
        for step in steps:
            fault = find_fault(self.path(step))
            if fault is None:
                return step
            print(f"checkpoint {self.path(step)} is damaged ({fault}); trying the one before", flush=True)
        if steps:
            raise UserError(
                f"every checkpoint in {self.folder} is damaged, so the run cannot continue. Its adapters and its log "
                "are untouched: start anew in another --out, with --init-lora (or --student-lora) from here"
            )
        return None

    def _write(self, step: int, states: dict[str, dict[str, torch.Tensor]], counters: dict) -> None:
        for name, state in states.items():
            for key, tensor in state.items():
                if not torch.isfinite(tensor).all():
                    raise UserError(
                        f"{name} {key} is not finite at step {step}: nothing was saved. The checkpoint before is "
                        "intact; lower the learning rate and start the command again"
                    )

        def fill(folder: Path) -> None:
            files = {}
            for name, state in states.items():
                path = folder / f"{name}.safetensors"
                save_file(state, path)
                files[path.name] = {"bytes": path.stat().st_size, "hash": _hash(path)}
            text = json.dumps({"step": step, "files": files, "counters": counters}, indent=1)
            (folder / "state.json").write_text(text)

        replace_folder(self.path(step), fill)
        kept = sorted(entry for entry in self.folder.iterdir() if re.fullmatch(r"step\d{5,}", entry.name))
        for old in kept[:-KEEP]:
            shutil.rmtree(old)


def find_fault(folder: Path) -> str | None:
    """What is wrong with a checkpoint folder, or None: every file that its ``state.json`` names, in size and hash."""
    try:
        files = json.loads((folder / "state.json").read_text())["files"]
        for name, expected in files.items():
            size = (folder / name).stat().st_size
            if size != expected["bytes"]:
                return f"{name} has {size} bytes of {expected['bytes']}"
            if _hash(folder / name) != expected["hash"]:
                return f"{name} has other contents than were written"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def replace_folder(target: Path, fill: Callable[[Path], None]) -> None:
    """Makes a folder complete or absent: filled aside, flushed to disk, then renamed over what was there.

    Raises:
        UserError: the disk refused; the temporary folder is removed.
    """
    aside = target.with_name(f".{target.name}")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        fill(aside)
        for path in aside.iterdir():
            _flush(path)
        if target.exists():
            shutil.rmtree(target)
        aside.rename(target)
        _flush(target.parent)
    except (OSError, SafetensorError) as error:  # safetensors has its own name for a full disk
        raise UserError(f"cannot write {target}: {error}. Make room, then start the same command again") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def replace_file(
    target: Path, write: Callable[[Path], None], check: Callable[[Path], None] = lambda path: None
) -> None:
    """Makes a file complete or absent: written aside, checked, flushed, then renamed.

    Raises:
        UserError: the disk refused.
    """
    aside = target.with_name(f".{target.name}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write(aside)
        check(aside)
        _flush(aside)
        aside.rename(target)
        _flush(target.parent)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write {target}: {error}. Make room, then start the same command again") from error
    finally:
        aside.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
