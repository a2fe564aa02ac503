"""A small embedded world on disk, made once a session, and what tests do with copies of it."""

import json
import shutil
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rtcwm.data.make import write_world

SIZES = dict(clips=6, chunks=8, seed=3, height=64, width=96, episodes=3)
STARTS = (0, 2, 5)


@lru_cache(maxsize=1)
def _kept() -> TemporaryDirectory:
    return TemporaryDirectory(prefix="rtcwm-world-")  # removed when the interpreter ends


@lru_cache(maxsize=1)
def small_world() -> Path:
    """6 clips of 8 chunks in 3 episodes, 96 x 64; not to be written to (see :func:`copy_world`)."""
    root = Path(_kept().name) / "clips"
    write_world(root, **SIZES, starts=STARTS, processes=1)
    return root


def copy_world(out: Path, manifest: bool = False) -> Path:
    """A copy that a test may damage, with or without its manifest."""
    shutil.copytree(small_world(), out)
    if not manifest:
        (out / "manifest.json").unlink()
    return out


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a safetensors file, as stored."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}


def change(path: Path, **changed: torch.Tensor | None) -> None:
    """Replace tensors of a safetensors file; None removes one."""
    found = tensors(path)
    found = {name: tensor.clone() for name, tensor in (found | changed).items() if tensor is not None}
    save_file(found, path)


def edit(path: Path, **changed: object) -> None:
    """Replace fields of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
