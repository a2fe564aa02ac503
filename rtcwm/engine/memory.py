"""Memory of this process: what the allocator holds on a GPU, the resident set and page-locked memory on the host."""

import os
import resource
from dataclasses import asdict, dataclass

import psutil
import torch

from rtcwm.engine.host import GIB
from rtcwm.engine.world import NCCL_HEADROOM_BYTES, World


@dataclass(frozen=True)
class Peaks:
    """Highest use, in GiB.

    Attributes:
        device_allocated, device_reserved: by torch's allocator since `reset_peaks`; what it handed out, and what it
            took from the card. Zero on the CPU.
        host_resident: resident set of this process since it began.
        host_pinned: page-locked memory that torch took since `reset_peaks`. Drivers differ in whether the resident set
            counts it, so the process uses at least the larger and at most the sum of the two.
    """

    device_allocated: float
    device_reserved: float
    host_resident: float
    host_pinned: float

    def row(self) -> dict[str, float]:
        """Rounded numbers by name, for a log."""
        return {f"{name}_gib": round(value, 3) for name, value in asdict(self).items()}

    def __str__(self) -> str:
        return (
            f"device {self.device_allocated:.2f} GiB ({self.device_reserved:.2f} reserved), host "
            f"{self.host_resident:.2f} GiB resident, {self.host_pinned:.2f} GiB page-locked"
        )


def peaks(device: torch.device) -> Peaks:
    """Highest use of device and host."""
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
    if device.type != "cuda":
        return Peaks(0.0, 0.0, host, 0.0)
    pinned = torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0)
    allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return Peaks(allocated / GIB, reserved / GIB, host, pinned / GIB)


def reset_peaks(device: torch.device) -> None:
    """Starts the device's peaks, and that of page-locked memory, anew. The resident set's cannot be."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.reset_peak_host_memory_stats()


def room_for_tensors(world: World, gib: float | None) -> int | None:
    """Bytes of this rank's card that torch's allocator may take, under a limit if there is one; None on the CPU."""
    if world.device.type != "cuda":
        return None
    total = torch.cuda.get_device_properties(world.device).total_memory
    room = total - (NCCL_HEADROOM_BYTES if world.size > 1 else 0)
    return room if gib is None else int(min(gib * GIB, room))


def limit_memory(world: World, gib: float | None) -> None:
    """Caps torch's allocator on this rank's card, so that what needs more fails as it would on a smaller card. None, or
    more than the card has, changes nothing, and so does any limit on the CPU."""
    if gib is None or world.device.type != "cuda":
        return
    total = torch.cuda.get_device_properties(world.device).total_memory
    torch.cuda.set_per_process_memory_fraction(room_for_tensors(world, gib) / total, world.device)


def resident_gib(device: torch.device) -> float:
    """Memory in use now, in GiB: of the device's allocator, or on the CPU of the process."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / GIB
    return psutil.Process(os.getpid()).memory_info().rss / GIB


def peak_gib(device: torch.device) -> float:
    """Highest use in GiB: of the device's allocator, or on the CPU of the process."""
    found = peaks(device)
    return found.device_allocated if device.type == "cuda" else found.host_resident
