"""What the jobs of a recipe say together: tables with the spread over seeds, the goals seed by seed, one plot."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from rtcwm.engine.checkpoint import replace_file
from rtcwm.evaluate.picture import COLOURS, INK, PAPER, Plot, plot
from rtcwm.recipe.plan import SHORT, Plan

LENGTHS = (6, 14, 40)
"""Chunks over which the mean PSNR of a long stream is given, as far as it goes."""

COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("drift dB/chunk", "drift", "{:+.3f}"), ("Frechet", "frechet", "{:.2f}"), ("first half", "first_half", "{:.2f}"),
    ("last half", "last_half", "{:.2f}"), ("sharpness", "sharpness", "{:.2f}"), ("motion", "motion", "{:.2f}"),
)  # fmt: skip

NAMES = {
    "naive": "base used causally, 20 steps", "released": "released adapter, bidirectional window, 20 steps",
    "df20": "DF, 20 steps, history at 0.1", "df4": "DF, 4 steps", "distilled": "distilled, 4 steps",
}  # fmt: skip

Numbers = dict[str, float]


def collect(plan: Plan) -> dict:
    """Numbers of every model by seed, of the short and the long streams, seconds of every job, and the goals."""
    short, long, curves = ({} for _ in range(3))
    for seed in plan.settings.seeds:
        short[str(seed)] = {name: numbers(row) for name, row in models(plan.short(seed)).items()}
        rows = {name: models(plan.long(seed, name))[name] for name in plan.long_models(seed)}
        long[str(seed)] = {name: numbers(row) for name, row in rows.items()}
        curves[str(seed)] = {name: row["measures"]["psnr"]["chunks"] for name, row in rows.items()}
    seconds = {
        job.name: json.loads(log.read_text())["seconds"]
        for job in plan.jobs()
        if (log := plan.settings.out / "logs" / f"{job.name.replace('/', '_')}.json").is_file()
    }
    return {"short": short, "long": long, "psnr_by_chunk": curves, "seconds": seconds, "goals": goals(short, long)}


def models(path: Path) -> dict[str, dict]:
    """The models of an evaluation, without its reference row."""
    rows = json.loads(path.read_text())["models"]
    return {name: row for name, row in rows.items() if row["kind"] != "codec"}


def numbers(row: Mapping) -> Numbers:
    """What a table shows of a model."""
    psnr, frechet = row["measures"]["psnr"], row["measures"]["frechet"]
    found = {f"psnr_{count}": sum(psnr["chunks"][:count]) / count for count in LENGTHS if count <= len(psnr["chunks"])}
    return found | {
        "psnr": psnr["all"], "drift": psnr["drift"], "frechet": frechet["all"], "first_half": frechet["first_half"],
        "last_half": frechet["last_half"], "sharpness": row["measures"]["sharpness"]["all"],
        "motion": row["measures"]["motion"]["all"],
    }  # fmt: skip


def goals(short: Mapping, long: Mapping) -> dict[str, dict[str, bool]]:
    """Whether each goal holds, by seed."""
    tests: dict[str, Callable[[Mapping, Mapping], bool]] = {
        f"DF streams 3.5 dB better than the base used causally ({SHORT} chunks)":
            lambda few, _: few["df20"]["psnr"] - few["naive"]["psnr"] >= 3.5,
        "|drift| of DF under 0.03 dB a chunk": lambda _, many: abs(many["df20"]["drift"]) < 0.03,
        "distilled: Frechet distance at most 0.6 of DF's at 4 steps":
            lambda _, many: many["distilled"]["frechet"] <= 0.6 * many["df4"]["frechet"],
        "distilled: sharpness 0.8 to 1.1": lambda _, many: 0.8 <= many["distilled"]["sharpness"] <= 1.1,
        "distilled: PSNR within 0.5 dB of DF at 20 steps":
            lambda _, many: many["distilled"]["psnr"] >= many["df20"]["psnr"] - 0.5,
        "distilled: Frechet distance of the last half at most 1.3 of the first":
            lambda _, many: many["distilled"]["last_half"] <= 1.3 * many["distilled"]["first_half"],
    }  # fmt: skip
    return {text: {seed: test(short[seed], long[seed]) for seed in short} for text, test in tests.items()}


def report(plan: Plan, found: Mapping) -> str:
    """Tables and goals as Markdown."""
    seeds, chunks = list(found["long"]), plan.settings.chunks
    spread = f"mean [least..most] over seeds {', '.join(seeds)}" if len(seeds) > 1 else f"seed {seeds[0]}"
    parts = [
        f"Streams of {chunks} chunks, {plan.settings.test_clips} unseen clips, {spread}:",
        table(found["long"], ("df20", "df4", "distilled")),
        f"Streams of {SHORT} chunks:",
        table(found["short"], tuple(NAMES)),
    ]
    if plan.ablations:
        parts += [
            f"Variants of the distillation, {chunks} chunks:",
            table(found["long"], ("distilled", *plan.ablations)),
        ]
    parts += ["Goals, by seed:", goal_lines(found["goals"]), "Seconds of the jobs:", seconds_line(found["seconds"])]
    return "\n\n".join(parts) + "\n"


def table(by_seed: Mapping[str, Mapping[str, Numbers]], names: Sequence[str]) -> str:
    """One line a model."""
    first = next(iter(by_seed.values()))
    lengths = [int(key[5:]) for key in first[names[0]] if key.startswith("psnr_")]
    columns = [(f"PSNR dB, {count} chunks", f"psnr_{count}", "{:.2f}") for count in lengths] + list(COLUMNS)
    lines = [["model", *(title for title, _, _ in columns)], ["---"] * (len(columns) + 1)]
    for name in names:
        cells = []
        for _, key, form in columns:
            values = [rows[name][key] for rows in by_seed.values() if key in rows.get(name, {})]
            cells.append(spread_of(values, form) if values else "-")
        lines.append([NAMES.get(name, name), *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def spread_of(values: Sequence[float], form: str) -> str:
    mean = form.format(sum(values) / len(values))
    return mean if len(values) == 1 else f"{mean} [{form.format(min(values))}..{form.format(max(values))}]"


def goal_lines(goals: Mapping[str, Mapping[str, bool]]) -> str:
    words = {True: "yes", False: "NO"}
    lines = []
    for text, by_seed in goals.items():
        lines.append(f"- {text}: " + ", ".join(f"{seed} {words[held]}" for seed, held in by_seed.items()))
    return "\n".join(lines)


def seconds_line(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.0f}" for name, value in seconds.items())


def draw(found: Mapping, path: Path) -> None:
    """PSNR by chunk of the long streams, mean over seeds, as a PNG."""
    seeds = list(found["psnr_by_chunk"])
    shown = [name for name in ("df20", "df4", "distilled") if name in found["psnr_by_chunk"][seeds[0]]]
    lines = {
        NAMES[name]: [sum(values) / len(values) for values in zip(*(found["psnr_by_chunk"][s][name] for s in seeds))]
        for name in shown
    }
    colours = dict(zip(lines, COLOURS))
    picture = Image.new("RGB", (720, 400), PAPER)
    pen, font = ImageDraw.Draw(picture), ImageFont.load_default(12)
    plot(pen, font, (0, 40, 720, 400), Plot("PSNR of a chunk, dB, against the truth", lines), colours)
    for index, name in enumerate(lines):
        pen.text((60 + index * 210, 14), name, colours.get(name, INK), font)
    replace_file(path, lambda aside: picture.save(aside, format="PNG"))
