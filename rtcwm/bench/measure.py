"""Clocks, peaks of memory, and the ceilings of the card that the figures are held against."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from rtcwm.engine import memory
from rtcwm.engine.device import compute_dtype, synchronize

DATA_SHEET = (("H200", 989.0), ("H100 80GB HBM3", 989.0), ("H100 PCIe", 756.0), ("A100", 312.0))
"""Dense bf16 TFLOP/s by a part of the card's name, from NVIDIA's data sheets."""

PRODUCT, PRODUCT_CPU = 8192, 512
"""Size of the square product whose rate is the measured ceiling; on the CPU a small one in fp32."""


@dataclass(frozen=True)
class Seconds:
    """Times of repeated steps."""

    each: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.each)

    def as_dict(self) -> dict:
        return {"median": self.median, "least": min(self.each), "most": max(self.each), "each": list(self.each)}


def timed(function: Callable[[], object], device: torch.device, warmup: int, steps: int, inner: int = 1) -> Seconds:
    """Seconds of a call, each the mean of ``inner`` calls in a row, after ``warmup`` such rounds."""
    each = []
    for turn in range(warmup + steps):
        synchronize(device)
        began = time.perf_counter()
        for _ in range(inner):
            function()
        synchronize(device)
        if turn >= warmup:
            each.append((time.perf_counter() - began) / inner)
    return Seconds(tuple(each))


def reset_peaks(device: torch.device) -> None:
    """Starts the peaks anew, the resident set's too where Linux allows it."""
    memory.reset_peaks(device)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass  # the peak is then that of the process


def peaks(device: torch.device) -> dict[str, float | None]:
    """GiB since `reset_peaks`: allocated and reserved by torch on the card (None without one), resident on the host,
    and page-locked there. And "outside": what the card's other users hold now, the communicators' buffers and CUDA's
    own among them."""
    found, card = memory.peaks(device), device.type == "cuda"
    outside = None
    if card:
        free, total = torch.cuda.mem_get_info(device)
        outside = (total - free - torch.cuda.memory_reserved(device)) / memory.GIB
    resident = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return {
        "allocated_gib": found.device_allocated if card else None,
        "reserved_gib": found.device_reserved if card else None,
        "host_gib": int(resident.split()[1]) * 1024 / memory.GIB,
        "pinned_gib": found.host_pinned if card else None,
        "outside_gib": outside,
    }


def data_sheet(device: torch.device) -> float | None:
    """Dense bf16 TFLOP/s of the card by its maker, None for a card that is not in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((rate for part, rate in DATA_SHEET if part in name), None)


def matmul_ceiling(device: torch.device) -> float:
    """Measured TFLOP/s of a large square product of random numbers: bf16 on a GPU, fp32 on the CPU."""
    cuda = device.type == "cuda"
    size, dtype = PRODUCT if cuda else PRODUCT_CPU, compute_dtype(device)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty(size, size, device=device, dtype=dtype)
    seconds = timed(lambda: torch.mm(a, b, out=out), device, warmup=2, steps=5, inner=50 if cuda else 2)
    return 2 * size**3 / seconds.median / 1e12


def ceilings(device: torch.device) -> dict[str, float | None]:
    return {"data_sheet_tflops": data_sheet(device), "matmul_tflops": matmul_ceiling(device)}
