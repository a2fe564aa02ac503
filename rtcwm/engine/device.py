"""The device of a process: its description, the dtype of a base on it, waiting for it, and giving its memory back."""

import gc
import sys
from importlib.metadata import PackageNotFoundError, version

import torch

from rtcwm import __version__

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


def compute_dtype(device: torch.device) -> torch.dtype:
    """What a base computes in: float32 on the CPU, else bfloat16."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def synchronize(device: torch.device) -> None:
    """Waits until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    """Gives back what nothing refers to any more, so that what comes next finds an empty card."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
