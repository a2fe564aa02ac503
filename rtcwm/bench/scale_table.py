"""What `rtcwm bench scale` prints: one table from the results of its parts, beside what they should be.

Weak scaling is the time on one rank over the time on n, each with one span (or rollout): 1 is what is wanted. Gathers
count as hidden but for the time that computation waited for them.
"""

import math
from collections.abc import Mapping, Sequence

from rtcwm.bench.report import number, table, versions_line

HIDDEN = 0.03
"""Most of a step that computation may wait for gathers."""
DISTILL_SCALING = 0.90
BEYOND = 1.05
"""A higher weak scaling says that the time on one rank is wrong."""
ROUNDING = {"cuda": 2**-8, "cpu": 1e-4}
"""Largest relative difference that several ranks' numbers may have from one's: that of a bf16 number; fp32 on the CPU,
over some steps."""


def train_scaling(ranks: int) -> float:
    """Weak scaling that training should reach: 0.95 on 2 ranks, 0.92 on 8, between and beyond by doublings."""
    return 0.95 - 0.015 * (math.log2(ranks) - 1)


def describe(results: Mapping[str, dict], left: Sequence[str]) -> str:
    """The table.

    Args:
        results: of every part that ran, by name; left: names of parts that there was no time for.
    """
    good = {name: found for name, found in results.items() if "failed" not in found}
    told = []
    for family, what in (("train", "A step of diffusion forcing"), ("distill", "An iteration of distillation")):
        timed = {name: found for name, found in good.items() if found["part"]["family"] == family}
        if timed:
            first = next(iter(timed.values()))
            told += [_opening(first, what), table(_speed(family, timed))]
            told += [table(_parts(timed))] if family == "distill" else []
    told += _same(good)
    told += [f"{name}: FAILED: {found['failed']}" for name, found in results.items() if "failed" in found]
    if left:
        told.append(f"left for the next time: {', '.join(left)}")
    return "\n\n".join(told)


def _opening(found: dict, what: str) -> str:
    case, machine = found["case"], found["machine"] | {"ranks": 1}
    part = "" if case["layers"] == case["whole_layers"] else f" ONLY {case['layers']} of {case['whole_layers']} blocks,"
    return (
        f"{what}: {case['base']},{part} {case['width']}x{case['height']}, {case['rows']:,} rows a span, rank "
        f"{case['rank']}, one a rank; {versions_line(machine)}"
    )


def _speed(family: str, timed: Mapping[str, dict]) -> list[list[str]]:
    """Time, memory and gathers of every part, the worst rank's."""
    head = ["part", "seconds", "t(1) / t(n)", "target", "GiB", "reserved", "outside", "GiB gathered", "not hidden"]
    rows = [[*head, "target", "weights", "built in", "took"]]
    one = timed.get(f"{family}-1")
    for name, found in timed.items():
        part, ours = found["part"], found["ours"]
        several, shared = part["ranks"] > 1, ours["weights"]["shard_group"] > 1
        scaling = _seconds(one) / _seconds(found) if several and one else None
        wanted = (DISTILL_SCALING if family == "distill" else train_scaling(part["ranks"])) if several else None
        if part["live"]:
            wanted = None  # one rank had a table
        waited = ours["gathers"]["waited_share"] if shared else None
        gathered = sum(ours["gathers"][f"{what}_bytes"] for what in ("block", "other")) / 2**30
        rows.append([
            name, number(_seconds(found)), number(scaling), _reached(scaling, wanted),
            *(number(_peak(ours, f"{what}_gib"), "{:.2f}") for what in ("allocated", "reserved", "outside")),
            number(gathered if shared else None, "{:.2f}"), number(waited, "{:.2%}"),
            _target(waited, HIDDEN if shared else None, "< ", "{:.0%}"), _weights(part, ours, one),
            f"{ours['weights']['build_seconds']:.1f} s", f"{found['took']:.0f} s",
        ])  # fmt: skip
    return rows


def _reached(scaling: float | None, wanted: float | None) -> str:
    """Weak scaling beside its target; several ranks are not faster than one, unless that one was held up."""
    if scaling is not None and wanted is not None and scaling > BEYOND:
        return f"{wanted:.3f} to {BEYOND}: ONE RANK WAS HELD UP, time it again"
    return _target(scaling, wanted, ">= ", "{:.3f}")


def _parts(timed: Mapping[str, dict]) -> list[list[str]]:
    """Seconds of an iteration by part, and each over what it takes on one rank."""
    names = list(next(iter(timed.values()))["ours"]["parts"])
    rows = [["part", *(f"{name}, s" for name in names), *(f"{name} t(1)/t(n)" for name in names), "parked GiB"]]
    one = timed.get("distill-1")
    for name, found in timed.items():
        seconds = [found["ours"]["parts"][part]["seconds"]["median"] for part in names]
        ratios = [None] * len(names)
        if one and found is not one:
            ratios = [one["ours"]["parts"][part]["seconds"]["median"] / t for part, t in zip(names, seconds)]
        parked = f"{found['ours']['parked_gib']:.2f}"
        rows.append([name, *map(number, seconds), *map(number, ratios), parked])
    return rows


def _same(good: Mapping[str, dict]) -> list[str]:
    """Several ranks' numbers against one's, and how the others ended when one was killed."""
    told = []
    for name, found in good.items():
        if found["part"]["family"] != "same" or found["part"]["of"]:
            continue
        ranks, death, one = found["part"]["ranks"], found["death"], good.get(f"same-1x{found['part']['ranks']}")
        if one:
            case = found["case"]
            told.append(
                f"{name}: {len(found['numbers'])} steps on {ranks} ranks, one killed and all resumed, against one rank "
                f"that accumulates {ranks} ({case['layers']} blocks, {case['rows']:,} rows): largest relative "
                + ", ".join(_difference(key, found, one) for key in ("loss", "grad_norm"))
            )
        ended = f"the other ranks were gone after {death['ranks_gone']:.1f} s, the launcher after"
        told.append(
            f"{name}: rank {death['rank']} killed under {death['launcher']}: {ended} {death['launcher_gone']:.1f} s "
            f"with exit code {death['code']} [{'ok' if death['within'] else 'TOO LATE'}]; "
            + (f"said: {death['named']}" if death["named"] else "the rank was NOT NAMED: " + " | ".join(death["told"]))
        )
    return told


def _difference(key: str, found: dict, one: dict) -> str:
    pairs = [(row[key], other[key], row["step"]) for row, other in zip(found["numbers"], one["numbers"], strict=True)]
    if any(a is None or b is None for a, b, _ in pairs):
        return f"difference of {key}: NOT FINITE"
    worst, step = max((abs(a - b) / max(abs(b), 1e-30), step) for a, b, step in pairs)
    most = ROUNDING[found["device"]]
    verdict = "ok" if worst <= most else "MISSED"
    return f"difference of {key} {worst:.1e} (step {step}; at most {most:.1e}: {verdict})"


def _weights(part: dict, ours: dict, one: dict | None) -> str:
    """Whether all ranks hold the same base, and that of one rank."""
    if not ours["weights"]["equal"]:
        return "DIFFER"
    if one is None or part["ranks"] == 1 or part["live"]:
        return "equal"
    return "equal, as on 1" if ours["weights"]["digest"] == one["ours"]["weights"]["digest"] else "NOT AS ON 1"


def _target(value: float | None, wanted: float | None, sign: str, form: str) -> str:
    """What a value should be, and whether it is."""
    if wanted is None:
        return ""
    text = f"{sign}{form.format(wanted)}"
    if value is None:
        return text
    met = value >= wanted if sign.startswith(">") else value < wanted
    return f"{text} {'ok' if met else 'MISSED'}"


def _seconds(found: dict) -> float:
    return found["ours"]["seconds"]["median"]


def _peak(ours: dict, key: str) -> float | None:
    found = [rank["peak"][key] for rank in ours["ranks"] if rank["peak"][key] is not None]
    return max(found) if found else None
