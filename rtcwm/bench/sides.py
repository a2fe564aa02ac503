"""Running the two sides of a benchmark one after the other in one process, and holding them against each other."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from rtcwm.bench import measure, profile
from rtcwm.bench.command import TwoSides
from rtcwm.bench.measure import Seconds
from rtcwm.bench.plain import PlainModel
from rtcwm.bench.work import Work
from rtcwm.engine.world import World
from rtcwm.errors import UserError
from rtcwm.model.kernels import resolve
from rtcwm.model.loading import BaseSource, build_base

TOLERANCE = {"cuda": 0.01, "cpu": 1e-4}
"""Largest relative difference of the first step's loss that passes for rounding: bf16 on a GPU, fp32 on the CPU."""


@dataclass
class Side:
    """What one side did.

    Attributes:
        seconds: of the timed steps; numbers: what every step returned, warm-up included.
        failed: why there are no numbers, where the card was too small.
    """

    needed: Work
    done: Work
    seconds: Seconds | None = None
    numbers: list[dict[str, float]] = field(default_factory=list)
    peak: dict[str, float | None] = field(default_factory=dict)
    kernels: profile.Kernels | None = None
    failed: str | None = None

    def as_dict(self, ceilings: Mapping[str, float | None]) -> dict:
        """Plain numbers for the report; ``share`` is of the ceilings, by work needed and by work done."""
        found = {"needed_flop": self.needed.total, "done_flop": self.done.total, "done": vars(self.done)}
        if self.failed is not None:
            return found | {"failed": self.failed, "peak": self.peak}
        kinds = {"needed": self.needed.total, "done": self.done.total}
        share = {
            name: {kind: flop / self.seconds.median / (rate * 1e12) for kind, flop in kinds.items()}
            for name, rate in ceilings.items()
            if rate
        }
        found |= {"seconds": self.seconds.as_dict(), "share": share, "peak": self.peak, "first": self.numbers[0]}
        found["numbers"] = {key: [row[key] for row in self.numbers] for key in self.numbers[0]}
        return found | ({"kernels": self.kernels.as_dict()} if self.kernels else {})


def run_side(
    world: World, name: str, start: Callable[[], Callable[[], dict]], settings: TwoSides, needed: Work, done: Work
) -> Side:
    """Builds a side, takes its steps, and lets go of it. A card that is too small is a result, not an error."""
    side, device = Side(needed, done), world.device
    measure.release(device)
    measure.reset_peaks(device)
    try:
        _take_steps(world, side, start(), settings)
    except torch.OutOfMemoryError as error:
        side.failed, side.peak = "out of memory", measure.peaks(device)
        world.print(f"{name}: {str(error).splitlines()[0]}")
    measure.release(device)
    return side


def _take_steps(world: World, side: Side, step: Callable[[], dict], settings: TwoSides) -> None:
    each = []
    for turn in range(settings.warmup + settings.steps):
        measure.synchronize(world.device)
        began = time.perf_counter()
        side.numbers.append(step())
        measure.synchronize(world.device)
        each.append(time.perf_counter() - began)
    side.seconds = Seconds(tuple(each[settings.warmup :]))
    side.peak = measure.peaks(world.device)
    if settings.profile:
        side.kernels = profile.record(step, world.device)


def plain_base(world: World, source: BaseSource) -> PlainModel:
    """The base as the obvious loop holds it: whole, on the device, with cuDNN's attention on a GPU."""
    device = world.device
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    kernel = resolve("sdpa" if device.type == "cpu" else "cudnn", device)
    return PlainModel(build_base(source, device, dtype), kernel.fn)


def summary(sides: Mapping[str, dict]) -> dict:
    """Ratio of the times, and relative differences of what the steps returned, where both sides ran."""
    if any(name not in sides or "failed" in sides[name] for name in ("plain", "ours")):
        return {}
    plain, ours = sides["plain"], sides["ours"]
    difference = {}
    for key, reference in plain["numbers"].items():
        relative = [abs(a - b) / max(abs(b), 1e-30) for a, b in zip(ours["numbers"][key], reference, strict=True)]
        difference[key] = {"first": relative[0], "most": max(relative)}
    return {"ratio": ours["seconds"]["median"] / plain["seconds"]["median"], "difference": difference}


def compare(device: torch.device, result: Mapping) -> None:
    """Raises UserError where the first step's losses differ by more than rounding."""
    found, most = result.get("difference", {}).get("loss", {}).get("first", 0.0), TOLERANCE[device.type]
    if not found <= most:
        raise UserError(
            f"the two sides do not compute the same: their first losses differ by {found:.2e} of the loss, at most {most:g} "
            "is rounding; the ratio says nothing. Try --attn sdpa, and a --base-config without options"
        )
