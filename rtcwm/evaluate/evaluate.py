"""An evaluation from start to end: checks, streams, measures, reports."""

import importlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from rtcwm import __version__
from rtcwm.data.codec import Codec
from rtcwm.engine.device import compute_dtype
from rtcwm.errors import UserError
from rtcwm.evaluate import report
from rtcwm.evaluate.clips import Run, Truth, choose, codec_of
from rtcwm.evaluate.command import Settings
from rtcwm.evaluate.measures import MEASURES, compare
from rtcwm.evaluate.metrics import missing
from rtcwm.evaluate.models import Model, read_models
from rtcwm.evaluate.streams import TEACHER_CHUNKS, Maker
from rtcwm.model.adapter_files import load_adapter
from rtcwm.model.attention import install
from rtcwm.model.kernels import Kernel, resolve
from rtcwm.model.layout import CHUNK_LATENTS, CLIP_FRAMES, FPS
from rtcwm.model.loading import BaseSource, build_base, open_base
from rtcwm.model.lora import inject
from rtcwm.train.base_memory import check_base_room
from rtcwm.train.held_out import some
from rtcwm.train.inference import chosen_device

CODEC_ROW = "codec"
REFERENCE = "frames decoded from the clip's own latents, 8 bits a value"
PLOTS = ("psnr", "frechet", "sharpness")
PICTURE_COLUMNS = 8


@dataclass(frozen=True)
class Plan:
    """Checked inputs of an evaluation."""

    settings: Settings
    source: BaseSource
    kernel: Kernel
    device: torch.device
    truth: Truth
    codec: Codec
    models: tuple[Model, ...]
    shown: int  # index of the clip in the picture

    def lines(self) -> list[str]:
        """What is printed before the first stream."""
        truth, geometry = self.truth, self.truth.clips[0].geometry
        frames = truth.chunks * CLIP_FRAMES
        rows = len(truth.clips) * (truth.chunks // 2 or 1) * CHUNK_LATENTS * geometry.target_rows
        lines = [
            f"base: {self.source.description}, {self.source.fingerprint}",
            f"clips: {len(truth.clips)} of {truth.root}, {truth.chunks} chunks each ({frames} frames, "
            f"{frames / FPS:.1f} s), latents {geometry.height} x {geometry.width}",
            f"truth: {REFERENCE}; Frechet distances over {rows:,} patches a half",
            f"device: {self.device.type}; {self.kernel.why}",
            *(model.line() for model in self.models),
            *self.seen(),
        ]
        if rows < 10 * 96:
            lines.append(
                f"note: {rows} patches for 96 dimensions are few, Frechet distances come out high; take more clips"
            )
        return lines

    def seen(self) -> Iterator[str]:
        """A warning for every model whose file names held-out episodes, where not all clips are of these."""
        for model in self.models:
            seen = [
                clip.id for clip in self.truth.clips if model.unseen is not None and clip.episode not in model.unseen
            ]
            if seen:
                yield (
                    f"warning: {len(seen)} of {len(self.truth.clips)} clips ({some(seen)}) are not among those that "
                    f"the run of {model.name} held out: it was trained on them if it had them. --run with that run's "
                    "folder takes the clips that it held out"
                )


def prepare(settings: Settings) -> Plan:
    """Checks everything that headers, configs and metadata can tell, before a weight is read.

    Raises:
        UserError: any of it does not fit.
    """
    for package in ("torchmetrics", "PIL", *(["av"] if settings.video else [])):
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise missing({"PIL": "pillow"}.get(package, package), error) from error
    device = chosen_device(settings.device)
    run = Run.read(settings.run) if settings.run else None
    if run is None and settings.clips is None:
        raise UserError("no clips: give a folder with --clips, or a run's folder with --run for the clips it held out")
    source = open_base(settings.base or (run.base if run else "embedded"))
    check_base_room(source, device, None, table=False)
    kernel = resolve(settings.attn, device, settings.compile)
    truth = choose(settings.clips or run.clips, run and run.held_out, settings.chunks, settings.max_clips)
    codec = codec_of(truth, source)
    models = read_models(settings.model, source, codec.identity["hash"])
    for model in models:
        if model.kind == "teacher":
            truth.fit(TEACHER_CHUNKS + 1, f"the window of teacher {model.name}")
    ids = [clip.id for clip in truth.clips]
    if settings.picture_clip not in (None, *ids):
        raise UserError(
            f"--picture_clip {settings.picture_clip} is not among the clips evaluated: {', '.join(ids[:8])}"
        )
    if settings.out.exists() and not settings.out.is_dir():
        raise UserError(f"--out {settings.out} is a file; name a folder")
    shown = ids.index(settings.picture_clip) if settings.picture_clip else 0
    return Plan(settings, source, kernel, device, truth, codec, models, shown)


def evaluate(settings: Settings) -> dict:
    """Runs an evaluation, writes its files and prints its table; returns what `evaluate.json` holds.

    Raises:
        UserError: as `prepare`.
    """
    plan = prepare(settings)
    print("\n".join(plan.lines()), flush=True)
    made, seconds = stream_all(plan)
    rows = measure_all(plan, made, seconds)
    result = {
        "rtcwm": __version__,
        "base": {"description": plan.source.description, "fingerprint": plan.source.fingerprint},
        "clips": [{"clip": clip.id, "start": clip.starts[0]} for clip in plan.truth.clips],
        "chunks": plan.truth.chunks,
        "seed": settings.seed,
        "device": torch.cuda.get_device_name(plan.device) if plan.device.type == "cuda" else "cpu",
        "dtype": str(compute_dtype(plan.device)).removeprefix("torch."),
        "truth": REFERENCE,
        "measures": report.measures(),
        "models": rows,
    }
    settings.out.mkdir(parents=True, exist_ok=True)
    report.write_json(settings.out, result)
    report.write_events(settings.out, rows)
    show(plan, made, rows)
    print(report.table(rows), flush=True)
    files = f"{report.JSON}, evaluate.png{', evaluate.mp4' if settings.video else ''}, {report.EVENTS}/ (TensorBoard)"
    print(f"{settings.out}: {files}", flush=True)
    return json.loads(json.dumps(report.plain(result)))


def stream_all(plan: Plan) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Latents [clips, 24, 5 n, h, w] by model, and the seconds that each took."""
    base = build_base(plan.source, plan.device, compute_dtype(plan.device))
    install(base, plan.kernel)
    slot = inject(base)
    made, seconds = {}, {}
    total = sum(len(plan.truth.clips) * chunks_of(model, plan.truth) for model in plan.models)
    with tqdm(total=total, unit="chunk", disable=not sys.stderr.isatty(), leave=False) as bar:
        maker = Maker(
            base, slot, plan.kernel, plan.truth, plan.settings.seed, plan.device, plan.settings.batch, bar.update
        )
        for model in plan.models:
            bar.set_postfix_str(model.name)
            adapter = load_adapter(Path(model.adapter), plan.source.config) if model.adapter else None
            if adapter is not None:
                adapter.requires_grad_(False).to(plan.device)
            began = time.perf_counter()
            made[model.name] = maker.latents(model, adapter)  # on the CPU: the device's work is done
            seconds[model.name] = time.perf_counter() - began
    return made, seconds


def chunks_of(model: Model, truth: Truth) -> int:
    """Chunks that a model makes of every clip."""
    return min(TEACHER_CHUNKS, truth.chunks) if model.kind == "teacher" else truth.chunks


def measure_all(plan: Plan, made: dict[str, Tensor], seconds: dict[str, float]) -> dict[str, dict]:
    """Rows of the report: the codec's own loss, then the models."""
    decode = decoder(plan)
    true = plan.truth.latents.to(plan.device)
    again = torch.stack([recoded(plan.codec, clip) for clip in true])
    rows = {CODEC_ROW: row(CODEC_ROW, None, {}, again, report.summarise(compare(again, true, decode)), 0.0)}
    for model in plan.models:
        latents = made[model.name]
        measures = report.summarise(compare(latents.to(plan.device), true, decode))
        rows[model.name] = row(model.kind, model, asdict(model.sampling), latents, measures, seconds[model.name])
    return rows


def row(kind: str, model: Model | None, sampling: dict, latents: Tensor, measures: dict, seconds: float) -> dict:
    """One model of the report."""
    chunks = latents.shape[2] // CHUNK_LATENTS
    return {
        "kind": kind,
        "adapter": model and model.adapter,
        "objective": model and model.objective,
        "forced": bool(model and model.forced),
        "sampling": sampling,
        "chunks": chunks,
        "seconds": seconds,
        "seconds_a_chunk": seconds / (chunks * len(latents)),
        "measures": measures,
    }


def decoder(plan: Plan):
    """Frames of a clip's latents chunk by chunk, rounded to 8 bits; the codec has no memory across chunks."""

    def decode(latents: Tensor) -> Iterator[Tensor]:
        for chunk in latents.split(CHUNK_LATENTS, dim=1):
            yield (plan.codec.pixels(chunk) * 255).round() / 255

    return decode


def recoded(codec: Codec, latents: Tensor) -> Tensor:
    """Latents [24, 5 n, h, w] decoded to 8-bit frames and encoded again, chunk by chunk."""
    chunks = latents.split(CHUNK_LATENTS, dim=1)
    frames = ((codec.pixels(chunk) * 255).round().to(torch.uint8) for chunk in chunks)
    return torch.cat([codec.encode_clip(part) for part in frames], dim=1)


def show(plan: Plan, made: dict[str, Tensor], rows: dict[str, dict]) -> None:
    """The picture and the film of one clip: the truth, then every model."""
    from rtcwm.evaluate import picture

    streams = {"truth": plan.truth.latents[plan.shown]} | {name: latents[plan.shown] for name, latents in made.items()}
    columns = sorted({round(k) for k in np.linspace(0, plan.truth.chunks - 1, min(PICTURE_COLUMNS, plan.truth.chunks))})
    middle = CLIP_FRAMES // 2

    def frame(latents: Tensor, chunk: int) -> np.ndarray | None:
        piece = latents[:, chunk * CHUNK_LATENTS : (chunk + 1) * CHUNK_LATENTS]
        return plan.codec.decode(piece)[middle] if piece.shape[1] else None

    shown = {name: [frame(latents, chunk) for chunk in columns] for name, latents in streams.items()}
    labels = [f"chunk {k}, {(k * CLIP_FRAMES + middle) / FPS:.1f} s" for k in columns]
    plots = [
        picture.Plot(
            f"{name}{f' ({measure.unit})' if measure.unit else ''} by chunk",
            {key: entry["measures"][name]["chunks"] for key, entry in rows.items() if key != CODEC_ROW},
            measure.perfect,
        )
        for name in PLOTS
        for measure in [MEASURES[name]]
    ]
    picture.draw(shown, labels, plots, plan.settings.out / "evaluate.png")
    if plan.settings.video:
        from rtcwm.evaluate import film

        pieces = {
            name: (plan.codec.decode(piece) for piece in latents.split(CHUNK_LATENTS, dim=1))
            for name, latents in streams.items()
        }
        film.write(pieces, *shown["truth"][0].shape[:2], plan.settings.out / "evaluate.mp4")
