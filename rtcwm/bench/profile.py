"""Where the time of a step goes, kernel by kernel: torch.profiler over one step, summed by class and by name.

On a GPU the rows are kernels and copies of the device; "idle" is the time in which none of them ran, and what runs
beside others (copies on a side stream) is counted under its class and taken off as "overlapped", so that a column
adds up to the step. On the CPU the rows are torch's operators, by their own time.
"""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from rtcwm.bench import report
from rtcwm.engine.checkpoint import replace_file
from rtcwm.engine.device import synchronize
from rtcwm.engine.world import World

TOP = 25
"""Names in a listing."""

_ATTENTION, _BACKWARD = r"(flash|sdpa|attention|attn|fmha)", r"(bwd|bprop|backward)"
CLASSES = (
    ("NCCL", r"nccl|c10d::|gloo"),
    ("attention backward", f"{_ATTENTION}.*{_BACKWARD}|{_BACKWARD}.*{_ATTENTION}"),
    ("attention forward", _ATTENTION),
    ("optimizer", r"multi_tensor_apply|adam|_foreach"),
    ("matmul", r"gemm|nvjet|cutlass|cublas|splitk|aten::(mm|addmm|bmm|baddbmm|linear)\b"),
    ("compiled glue", r"^triton_"),
    ("copies", r"memcpy|memset|copy_|catarray|aten::(cat|fill_|zero_)\b|fillfunctor"),
    ("elementwise", r"elementwise|reduce|norm|index|gather|scatter|aten::(mul|add|sub|silu|div|pow|mean|sum|neg)"),
)
"""Classes of kernels and operators, by a pattern of their names in lower case; the first that matches counts."""

OTHER, IDLE, OVERLAPPED = "other", "idle", "overlapped"


@dataclass(frozen=True)
class Kernels:
    """Seconds of one step.

    Attributes:
        wall: of the step, under the profiler; by_name: seconds and calls of every kernel; idle: with nothing running;
            overlapped: of kernels that ran beside others.
    """

    wall: float
    by_name: dict[str, tuple[float, int]]
    idle: float
    overlapped: float

    def by_class(self) -> dict[str, float]:
        """Seconds of every class; with what is idle, less what is overlapped, they add up to the step."""
        sums: Counter[str] = Counter({name: 0.0 for name, _ in CLASSES} | {OTHER: 0.0})
        for name, (seconds, _) in self.by_name.items():
            sums[classify(name)] += seconds
        return {**sums, IDLE: self.idle, OVERLAPPED: -self.overlapped}

    def top(self) -> list[tuple[str, str, float, int]]:
        """The longest kernels: name, class, seconds, calls."""
        longest = sorted(self.by_name.items(), key=lambda entry: -entry[1][0])[:TOP]
        return [(name, classify(name), seconds, calls) for name, (seconds, calls) in longest]

    def classes(self) -> str:
        """Table by class."""
        rows = [["class", "seconds", "share"]]
        rows += [[name, f"{value:.4f}", f"{value / self.wall:.1%}"] for name, value in self.by_class().items()]
        return report.table([*rows, ["step", f"{self.wall:.4f}", "100.0%"]])

    def names(self) -> str:
        """Table of the longest kernels."""
        rows = [["kernel", "class", "seconds", "share", "calls"]]
        for name, kind, seconds, calls in self.top():
            rows.append([name[:110], kind, f"{seconds:.4f}", f"{seconds / self.wall:.1%}", str(calls)])
        return report.table(rows)

    def as_dict(self) -> dict:
        top = [dict(zip(("name", "class", "seconds", "calls"), row, strict=True)) for row in self.top()]
        return {"wall": self.wall, "by_class": self.by_class(), "top": top}


def classify(name: str) -> str:
    """Class of a kernel or operator."""
    return next((kind for kind, pattern in CLASSES if re.search(pattern, name.lower())), OTHER)


def record(step: Callable[[], object], device: torch.device) -> Kernels:
    """Runs one step under the profiler."""
    cuda = device.type == "cuda"
    activity = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
    synchronize(device)
    with torch.profiler.profile(activities=[activity]) as profiler:
        began = time.perf_counter()
        step()
        synchronize(device)
        wall = time.perf_counter() - began
    sums: dict[str, tuple[float, int]] = {}
    if not cuda:
        for row in profiler.key_averages():
            sums[row.key] = (row.self_cpu_time_total / 1e6, row.count)
        return Kernels(wall, sums, max(0.0, wall - sum(seconds for seconds, _ in sums.values())), 0.0)
    spans = []
    for event in profiler.events():
        # An annotation spans the kernels that it names; they would count twice.
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            span = (event.time_range.start / 1e6, event.time_range.end / 1e6)
            seconds, calls = sums.get(event.name, (0.0, 0))
            sums[event.name] = (seconds + span[1] - span[0], calls + 1)
            spans.append(span)
    busy, total = covered(spans), sum(seconds for seconds, _ in sums.values())
    return Kernels(wall, sums, max(0.0, wall - busy), total - busy)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds in which at least one of the (start, end) spans runs."""
    total, reach = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return total


def finish(world: World, path: Path | None, sides: dict[str, dict]) -> None:
    """Prints the tables of the sides' kernels, writes them to a file, and leaves plain numbers in their place."""
    texts = []
    for name, side in sides.items():
        kernels: Kernels | None = side.get("kernels")
        if kernels is None:
            continue
        side["kernels"] = kernels.as_dict()
        world.print(f"\n{name}, one step by class of kernel\n{kernels.classes()}")
        texts.append(f"{name}: one step of {kernels.wall:.4f} s\n\n{kernels.classes()}\n\n{kernels.names()}\n")
    if path is not None:
        world.on_main(lambda: replace_file(path, lambda aside: aside.write_text("\n".join(texts))))
        world.print(f"written: {path}, with the names of kernels")
