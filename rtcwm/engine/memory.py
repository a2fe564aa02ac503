"""Memory of this process: on a GPU what the allocator holds, on the CPU the resident set."""

import os
import resource

import psutil
import torch

GIB = 2**30


def resident_gib(device: torch.device) -> float:
    """Memory in use now, in GiB."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / GIB
    return psutil.Process(os.getpid()).memory_info().rss / GIB


def peak_gib(device: torch.device) -> float:
    """Highest use since the process began, in GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
