"""Running the two sides of a benchmark one after the other in one process, and holding them against each other."""

import math
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from rtcwm.bench import measure, profile
from rtcwm.bench.command import TwoSides
from rtcwm.bench.inputs import Case
from rtcwm.bench.measure import Seconds
from rtcwm.bench.plain import PlainModel
from rtcwm.bench.traffic import Traffic
from rtcwm.bench.work import Work
from rtcwm.engine.base import BaseEngine
from rtcwm.engine.device import compute_dtype, release, synchronize
from rtcwm.engine.host import check_host_room
from rtcwm.engine.world import World
from rtcwm.errors import UserError, require
from rtcwm.model.kernels import Kernel, resolve
from rtcwm.model.loading import BaseSource, build_base, parameter_count


@dataclass(frozen=True)
class Did:
    """What a step gave: numbers that both sides must agree on, and the seconds of its parts, if it has any."""

    numbers: dict[str, float]
    parts: dict[str, float] = field(default_factory=dict)


class Runner(ABC):
    """One side, built and ready.

    Attributes:
        base: its base on engines; None on the obvious side.
    """

    base: BaseEngine | None = None

    @abstractmethod
    def step(self) -> Did:
        """One repetition of what is measured."""

    def extra(self) -> dict:
        """More to measure once the steps are timed; goes into the report as it is."""
        return {}


@dataclass(frozen=True)
class Plan:
    """What is known of a side before it runs.

    Attributes:
        start: builds it.
        needed, done: work of a step by part, or under "step" alone; where steps differ, the mean of the timed ones.
        even: every step has the same work, so that its median time stands for it; else the mean does.
    """

    start: Callable[[], Runner]
    needed: Mapping[str, Work]
    done: Mapping[str, Work]
    even: bool = True


def check_ranks(world: World, settings: TwoSides) -> None:
    """Raises UserError where the obvious loop is asked for on several ranks: it knows one device."""
    require(
        world.size == 1 or settings.chosen == ("ours",),
        f"the obvious loop runs on one device, and {world.size} ranks were started: set --sides ours",
    )


def run_side(world: World, name: str, plan: Plan, settings: TwoSides, ceilings: Mapping[str, float | None]) -> dict:
    """Builds a side, takes its steps, lets go of it, and returns its part of the report. A card that is too small is a
    result, not an error: under "failed". With other ranks it is an error: they would wait for this one."""
    device = world.device
    world.print(f"{name}: {settings.warmup} + {settings.steps} times")
    needed, done = (sum(works.values(), Work()) for works in (plan.needed, plan.done))
    found = {"needed_flop": needed.total, "done_flop": done.total, "done": vars(done)}
    release(device)
    measure.reset_peaks(device)
    try:
        found |= _take_steps(world, plan, settings, ceilings)
    except torch.OutOfMemoryError as error:
        if world.size > 1:
            raise
        found |= {"failed": "out of memory", "peak": measure.peaks(device)}
        world.print(f"{name}: {str(error).splitlines()[0]}")
    release(device)
    return found


def check_room(world: World, case: Case, copies: int = 1) -> None:
    """Raises UserError where a CPU's memory cannot hold so many copies of the base in fp32, before they are filled."""
    if world.device.type == "cpu":
        check_host_room(
            4 * copies * parameter_count(case.config),
            f"{case.described} in fp32" + (f", whole on each of {copies} ranks," if copies > 1 else ""),
            "there is no GPU; use --layers, or a smaller base: --base embedded --height 64 --width 96 --text-rows 16",
        )


def sized_case(world: World, settings: TwoSides, copies: int = 1) -> Case:
    """The size to measure, once both checks and `Case.of` have nothing against it; `copies`: of the base, on this
    machine."""
    check_ranks(world, settings)
    case = Case.of(settings)
    check_room(world, case, copies)
    return case


class Shared:
    """What several ranks make of a side: its base and the gathers of it.

    Args:
        build_seconds: that the side took to be built.
    """

    def __init__(self, world: World, base: BaseEngine, build_seconds: float):
        self.world, self.traffic = world, Traffic(base)
        began = time.perf_counter()
        digests = world.gather(base.digest())
        self.weights = {
            "digest": digests[0], "equal": len(set(digests)) == 1, "build_seconds": build_seconds,
            "digest_seconds": time.perf_counter() - began, "shard_group": base.shard_group,
        }  # fmt: skip

    def report(self, seconds: Seconds) -> dict:
        """Of the base; of a timed step: what is gathered, and the share of it that computation waited, on the rank that
        waited longest; and of every rank its seconds and peaks."""
        steps, total = len(seconds.each), self.traffic.total()
        mine = {
            "seconds": seconds.as_dict(), "peak": measure.peaks(self.world.device),
            "gathers": {key: value / steps for key, value in total.items()},
            "waited_share": (total["block_waited"] + total["other_waited"]) / sum(seconds.each),
        }  # fmt: skip
        ranks = self.world.gather(mine)
        worst = max(ranks, key=lambda rank: rank["waited_share"])
        gathers = worst["gathers"] | {"waited_share": worst["waited_share"]}
        return {"weights": self.weights, "gathers": gathers, "ranks": ranks}


def _take_steps(world: World, plan: Plan, settings: TwoSides, ceilings: Mapping[str, float | None]) -> dict:
    began = time.perf_counter()
    runner, steps, each = plan.start(), [], []
    shared = None if runner.base is None else Shared(world, runner.base, time.perf_counter() - began)
    for turn in range(settings.warmup + settings.steps):
        if shared and turn == settings.warmup:
            shared.traffic.start()
        synchronize(world.device)
        began = time.perf_counter()
        steps.append(runner.step())
        synchronize(world.device)
        each.append(time.perf_counter() - began)
    timed = steps[settings.warmup :]
    seconds = Seconds(tuple(each[settings.warmup :]))
    whole = {"step": sum(plan.needed.values(), Work())}, {"step": sum(plan.done.values(), Work())}
    found = {"seconds": seconds.as_dict(), "share": _shares(plan, *whole, {"step": seconds}, ceilings)["step"]}
    found |= {"peak": measure.peaks(world.device), "first": steps[0].numbers}
    found["numbers"] = {key: [did.numbers[key] for did in steps] for key in steps[0].numbers}
    if shared:
        found |= shared.report(seconds)
    if timed[0].parts:
        parts = {name: Seconds(tuple(did.parts[name] for did in timed)) for name in timed[0].parts}
        shares = _shares(plan, plan.needed, plan.done, parts, ceilings)
        found["parts"] = {
            name: {
                "seconds": parts[name].as_dict(), "needed_flop": plan.needed[name].total,
                "done_flop": plan.done[name].total, "share": shares[name],
            }
            for name in parts
        }  # fmt: skip
    try:
        found |= runner.extra()
    except torch.OutOfMemoryError as error:  # what was timed stands
        if world.size > 1:
            raise
        world.print(f"no further measurement: {str(error).splitlines()[0]}")
    release(world.device)
    if settings.profile:
        found["kernels"] = profile.record(runner.step, world.device)
    return found


def _shares(
    plan: Plan, needed: Mapping[str, Work], done: Mapping[str, Work], seconds: Mapping[str, Seconds],
    ceilings: Mapping[str, float | None],
) -> dict[str, dict]:  # fmt: skip
    """Of every part: its rate over each ceiling, by work needed and by work done."""
    found = {}
    for name, times in seconds.items():
        typical = times.median if plan.even else statistics.mean(times.each)
        works = {"needed": needed[name].total, "done": done[name].total}
        found[name] = {
            ceiling: {kind: flop / typical / (rate * 1e12) for kind, flop in works.items()}
            for ceiling, rate in ceilings.items()
            if rate
        }
    return found


def run_both(
    world: World, settings: TwoSides, plans: Mapping[str, Plan], ceilings: Mapping[str, float | None]
) -> dict[str, dict]:
    """The sides that were asked for, by name; the parts of the report."""
    return {name: run_side(world, name, plans[name], settings, ceilings) for name in settings.chosen}


def plain_kernel(device: torch.device) -> Kernel:
    """Attention of the obvious loop: cuDNN on a GPU."""
    return resolve("sdpa" if device.type == "cpu" else "cudnn", device)


def plain_base(world: World, source: BaseSource) -> PlainModel:
    """The base as the obvious loop holds it: whole, on the device."""
    device = world.device
    return PlainModel(build_base(source, device, compute_dtype(device)), plain_kernel(device).fn)


def summary(sides: Mapping[str, dict]) -> dict:
    """Ratio of the times (of steps, and of parts), and relative differences of what the steps returned, where both
    sides ran."""
    if any(name not in sides or "failed" in sides[name] for name in ("plain", "ours")):
        return {}
    plain, ours = sides["plain"], sides["ours"]
    difference = {}
    for key, reference in plain["numbers"].items():
        relative = [_relative(*pair) for pair in zip(ours["numbers"][key], reference, strict=True)]
        difference[key] = {"first": relative[0], "most": max(relative)}
    found = {"ratio": _ratio(ours, plain), "difference": difference}
    if "parts" in plain:
        found["part_ratios"] = {name: _ratio(ours["parts"][name], part) for name, part in plain["parts"].items()}
    return found


def _relative(found: float | None, expected: float | None) -> float:
    """Relative difference; not a number where one of them is none, which logs tell as None."""
    pair = [math.nan if value is None else value for value in (found, expected)]
    return abs(pair[0] - pair[1]) / max(abs(pair[1]), 1e-30)


def _ratio(ours: Mapping, plain: Mapping) -> float:
    return ours["seconds"]["median"] / plain["seconds"]["median"]


def compare(device: torch.device, result: Mapping, key: str, rounding: Mapping[str, float]) -> None:
    """Holds the first step's number of both sides against each other.

    Args:
        rounding: largest relative difference that passes for it, by type of device (bf16 on a GPU, fp32 on the CPU).

    Raises:
        UserError: it is larger, or not a number.
    """
    found, most = result.get("difference", {}).get(key, {}).get("first", 0.0), rounding[device.type]
    if not found <= most:
        raise UserError(
            f"the two sides do not compute the same: {key} of their first steps differs by {found:.2e} of it, at most "
            f"{most:g} is rounding; the ratio says nothing. Try --attn sdpa, and a --base-config without options"
        )
