"""What a benchmark says: the machine, a table, and the same as JSON."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from rtcwm import __version__
from rtcwm.bench.command import Settings
from rtcwm.engine.checkpoint import replace_file

PACKAGES = ("deepspeed", "diffusers", "flash-attn-4", "flash-attn-3", "flash-attn", "triton")


def machine(device: torch.device) -> dict:
    """The card and the versions that decide speed; packages that are not there are left out."""
    cuda = device.type == "cuda"
    found = {
        "card": torch.cuda.get_device_name(device) if cuda else "cpu",
        "memory_gib": torch.cuda.get_device_properties(device).total_memory / 2**30 if cuda else None,
        "python": sys.version.split()[0],
        "rtcwm": __version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def opening(command: str, settings: Settings, case: Mapping, device: torch.device) -> dict:
    """The part of a result that all commands share."""
    given = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(settings).items()}
    return {"command": command, "machine": machine(device), "settings": given, "case": dict(case)}


def versions_line(found: Mapping) -> str:
    names = [f"{name} {value}" for name, value in found.items() if name not in ("card", "memory_gib") and value]
    memory = f" ({found['memory_gib']:.0f} GiB)" if found["memory_gib"] else ""
    return f"{found['card']}{memory}; {', '.join(names)}"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns: the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width) for column, (cell, width) in enumerate(zip(row, widths))
        )
        for row in rows
    )


def number(value: float | None, form: str = "{:.3f}") -> str:
    """A number for a table; a dash for none."""
    return "-" if value is None else form.format(value)


def write(path: Path | None, result: Mapping) -> None:
    """The JSON file, complete or absent."""
    if path is None:
        return
    text = json.dumps(result, indent=1, allow_nan=False) + "\n"
    replace_file(path, lambda aside: aside.write_text(text))
    print(f"written: {path}", flush=True)
