"""What a benchmark says: the machine, a table, and the same as JSON."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rtcwm.bench.command import Settings
from rtcwm.engine.checkpoint import replace_file
from rtcwm.engine.device import machine
from rtcwm.engine.world import World
from rtcwm.train.record import finite_or_none


def opening(command: str, settings: Settings, case: Mapping, world: World) -> dict:
    """The part of a result that all commands share."""
    given = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(settings).items()}
    found = machine(world.device) | {"ranks": world.size}
    return {"command": command, "machine": found, "settings": given, "case": dict(case)}


def versions_line(found: Mapping) -> str:
    """The machine in words."""
    apart = ("card", "memory_gib", "ranks")
    names = [f"{name} {value}" for name, value in found.items() if name not in apart and value]
    memory = f" ({found['memory_gib']:.0f} GiB)" if found["memory_gib"] else ""
    ranks = f"{found['ranks']} ranks, each on " if found["ranks"] > 1 else ""
    return f"{ranks}{found['card']}{memory}; {', '.join(names)}"


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


def comparison(result: Mapping) -> str:
    """The sides next to each other, with their parts where a step has some."""
    ceilings, sides = result["ceilings"], result["sides"]
    both = "ratio" in result
    rows = [["", *sides, *(["ours / plain"] if both else [])]]

    def line(label: str, cell: Callable[[Mapping], str], ratio: float | None = None) -> None:
        cells = [side["failed"] if "failed" in side else cell(side) for side in sides.values()]
        rows.append([label, *cells, *(["" if ratio is None else f"{ratio:.3f}"] if both else [])])

    line("seconds, median", lambda side: number(side["seconds"]["median"]), result.get("ratio"))
    line("  least to most", lambda s: f"{s['seconds']['least']:.3f} to {s['seconds']['most']:.3f}")
    ran = [side for side in sides.values() if "failed" not in side]
    for part in ran[0].get("parts", {}) if ran else ():
        ratio = result.get("part_ratios", {}).get(part)
        line(f"  {part}, seconds", lambda side, part=part: number(side["parts"][part]["seconds"]["median"]), ratio)
    for kind in ("needed", "done"):
        line(f"work {kind}, PFLOP", lambda side, kind=kind: f"{side[f'{kind}_flop'] / 1e15:.4g}")
    for key, name in (("data_sheet_tflops", "the data sheet"), ("matmul_tflops", "the measured product")):
        for kind in ("needed", "done") if ceilings[key] else ():
            label = f"MFU of {name} ({ceilings[key]:.4g} TFLOP/s), work {kind}"
            line(label, lambda side, key=key, kind=kind: number(side["share"][key][kind]))
    for key in ("allocated", "reserved", "host", "pinned"):
        line(f"peak {key}, GiB", lambda side, key=key: number(side["peak"][f"{key}_gib"], "{:.2f}"))
    for key in ran[0]["first"] if ran else ():
        line(f"first {key}", lambda side, key=key: number(side["first"][key], "{:.6f}"))
    told = [table(rows)]
    for what, difference in result.get("difference", {}).items():
        told.append(
            f"relative difference of {what}: {difference['first']:.2e} at first, {difference['most']:.2e} at most"
        )
    return "\n".join(told)


def chunk_line(found: Mapping[str, float]) -> str:
    """A steady chunk of a stream without a graph, as `chunks.steady` gives it."""
    return (
        f"a steady chunk without a graph takes {found['seconds_a_chunk']:.3f} s and plays {found['plays']:.3f} s "
        f"({found['speed']:.2f} of real time); {found['share_of_ceilings']:.1%} of the ceilings of products and "
        f"attention ({found['attention_tflops']:.4g} TFLOP/s), by which it takes {found['least_by_ceilings']:.3f} s"
    )


def write(path: Path | None, result: Mapping) -> None:
    """The JSON file, complete or absent. JSON has no numbers that are not finite: null stands for them, since a loss
    that is none must not cost what was measured beside it."""
    if path is None:
        return
    text = json.dumps(_finite(result), indent=1, allow_nan=False) + "\n"
    replace_file(path, lambda aside: aside.write_text(text))
    print(f"written: {path}", flush=True)


def _finite(value: object) -> object:
    """The same with None in the place of numbers that are not finite."""
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return finite_or_none(value) if isinstance(value, float) else value
