"""Trains the embedded base: a small H3 that knows the embedded world, and the "released" adapter that goes with it.

Stage 1 trains all weights bidirectionally on the teacher's windows (37 latents, stock layout, one noise level a
window). Half of the windows carry a proxy that is not theirs, so that the base learns the world but trusts a proxy
little. Stage 2 freezes the base as it was written (bf16) and trains a low-rank adapter with true proxies: what the
released adapter is to the release. Both ship the average of their weights.

Result: ``embedded_base/`` (a diffusers H3 folder), ``released.safetensors`` and ``recipe.json``.
"""

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

import diffusers
import torch
from safetensors.torch import save_file
from torch import Tensor

from rtcwm import __version__
from rtcwm.data.clips import Clip, open_clips
from rtcwm.data.codec import load_codec
from rtcwm.data.make import write_world
from rtcwm.engine.checkpoint import replace_folder
from rtcwm.engine.device import compute_dtype
from rtcwm.engine.streams import Streams
from rtcwm.errors import UserError
from rtcwm.model.attention import install
from rtcwm.model.blocks import call
from rtcwm.model.kernels import Kernel, resolve
from rtcwm.model.layout import TEACHER_LATENTS
from rtcwm.model.loading import (
    EMBEDDED,
    FP32_ISLAND,
    WEIGHTS_FILE,
    FolderSource,
    SeededSource,
    build_base,
    parameter_count,
    read_config,
)  # fmt: skip
from rtcwm.model.lora import Adapter, AdapterShape, inject
from rtcwm.model.objectives import shift
from rtcwm.train.bank import Bank, Conditions
from rtcwm.train.bidirectional import Grid, draw_noise, in_bf16, on_device, window_losses
from rtcwm.train.dataset import hold_out
from rtcwm.train.folder import RunFolder
from rtcwm.train.stage import Stage, StageSettings
from rtcwm.train.world_base import WorldBaseConfig

BASE_FOLDER, ADAPTER_FILE, RECIPE = "embedded_base", "released.safetensors", "recipe.json"
NO_SETTINGS = ("out", "clips", "model", "processes")  # of the machine, not of the recipe
BYTES = 16 * 2**20  # base and adapter together, for the package
NOT_HASHED = ("out", "clips", "log_every", "val_every", "save_every", "device", "attn", "compile", "processes",
              "val_windows", "sample_steps")  # fmt: skip


class Recipe:
    """Both stages of one run, from clips to files.

    Args:
        config: checked settings.

    Raises:
        UserError: settings, clips or a device that do not go together; ``--out`` holds another run.
    """

    def __init__(self, config: WorldBaseConfig):
        self.config, self.folder = config, RunFolder(config.out)
        self.device = torch.device(config.device if config.device != "auto" else _best_device())
        self.architecture = read_config(Path(config.model) if config.model else EMBEDDED / "world_base.json")
        self.kernel: Kernel = resolve(config.attn, self.device)
        clips = self._clips()
        self.codec = clips[0].codec["hash"]
        self.hash = self._hash(clips)
        self.folder.claim(config, {"recipe": self.hash})
        self.streams = Streams(config.seed)
        held = hold_out(clips, config.val_clips, config.seed)
        self.bank = Bank.load([clip for clip in clips if clip.episode not in held], self.device)
        unseen = Bank.load([clip for clip in clips if clip.episode in held], self.device)
        self.grid = Grid.over(unseen, config.val_windows, self.streams)
        self.samples: dict[str, dict[str, float]] = {}
        if self.device.type == "cuda":
            torch.set_float32_matmul_precision("high")  # TF32: stage 1 keeps fp32 weights and sums
            self.kernel = in_bf16(self.kernel)

    def run(self) -> None:
        """Both stages, or what is left of them; then ``recipe.json``."""
        print("\n".join(self._lines()), flush=True)
        base = self._train_base()
        source = FolderSource(self.folder.path / BASE_FOLDER, description="embedded base")
        adapter = self._train_adapter(source)
        files = [*(self.folder.path / BASE_FOLDER).iterdir(), self.folder.path / ADAPTER_FILE]
        size = sum(path.stat().st_size for path in files)
        self.folder.write_json(RECIPE, self._report(source, {"base": base, "adapter": adapter}, size))
        print(f"{self.folder.path}: {size:,} bytes of base and adapter, recipe {self.hash}", flush=True)
        if size > BYTES:
            print(f"more than the {BYTES:,} bytes that the package takes: use a smaller --model", flush=True)

    def _train_base(self) -> Stage:
        """Stage 1; writes ``embedded_base/``."""
        config = self.config
        model = build_base(SeededSource(self.architecture, config.seed), self.device, torch.float32)
        # The kernel of the text refiner, in fp32; the blocks are given theirs.
        install(model, resolve("sdpa", self.device), frozen=False)
        model.requires_grad_(True)
        model.audio_proj_out.requires_grad_(False)  # nothing asks it: the loss is of video alone
        run = torch.compile(call) if config.compile else call
        conditions = Conditions(config.foreign_proxy, config.stale_text, config.stale_picture)
        stage = Stage(
            "base", self.folder.path / "base", self._settings("base"), model,
            partial(self._loss, model, conditions, "base", run), partial(self.grid.losses, model, self.kernel, call),
        )  # fmt: skip
        stage.train()
        folder = self.folder.path / BASE_FOLDER
        if not folder.is_dir():
            with stage.averaged():
                write_base(folder, model, self.architecture, {"recipe": self.hash, "rtcwm": __version__})
        return stage

    def _train_adapter(self, source: FolderSource) -> Stage:
        """Stage 2, on the base as it was written and as later programs run it; writes ``released.safetensors``."""
        config = self.config
        model = build_base(source, self.device, compute_dtype(self.device))
        install(model, resolve("sdpa", self.device))
        shape = AdapterShape.of(self.architecture, config.rank)
        adapter = Adapter(shape, config.seed).to(self.device)
        conditions = Conditions(0.0, config.stale_text, config.stale_picture)
        stage = Stage(
            "adapter", self.folder.path / "adapter", self._settings("adapter"), adapter,
            partial(self._loss, model, conditions, "adapter", call),
            partial(self.grid.losses, model, self.kernel, call),
        )  # fmt: skip
        slot = inject(model)
        with slot.bind(adapter):
            stage.train()
        with stage.averaged():
            self.folder.write_adapter(ADAPTER_FILE, adapter, self.architecture, self._metadata(source))
            for name, bound in (("base", None), ("adapter", adapter)) if config.sample_steps else ():
                with slot.bind(bound):
                    self.samples[name] = self.grid.sampled(
                        model, self.kernel, call, config.sample_steps, config.level_shift
                    )  # fmt: skip
                print(f"{name}, {config.sample_steps} steps, true proxies: {self.samples[name]}", flush=True)
        return stage

    def _loss(self, model, conditions: Conditions, stage: str, run, step: int) -> Tensor:
        """Mean loss of one batch; all of its draws are named by stage and step."""
        generator = on_device(self.streams.own(f"{stage} batch", step), self.device)
        window = self.bank.batch(self.bank.draw(self.config.batch, conditions, generator))
        # One level in each of `batch` equal parts of [0, 1): independent levels with less spread of their mean.
        parts = torch.arange(self.config.batch, device=self.device)
        chance = torch.rand(self.config.batch, generator=generator, device=self.device)
        sigma = shift((parts + chance) / self.config.batch, self.config.level_shift)
        return window_losses(model, window, draw_noise(window, generator), sigma, self.kernel, run).mean()

    def _settings(self, name: str) -> StageSettings:
        """Settings of stage "base" or "adapter"."""
        config = self.config
        steps, lr = (config.steps, config.lr) if name == "base" else (config.adapter_steps, config.adapter_lr)
        return StageSettings(
            steps=steps, lr=lr, lr_min=config.lr_min, warmup=min(config.warmup, steps // 2),
            weight_decay=config.weight_decay, clip=config.clip, average=config.average,
            log_every=config.log_every, val_every=config.val_every, save_every=config.save_every,
        )  # fmt: skip

    def _clips(self) -> list[Clip]:
        config = self.config
        if config.clips != "embedded":
            clips = open_clips(Path(config.clips))
        else:
            clips = write_world(
                Path(config.out) / "clips", config.world_clips, config.world_chunks, seed=config.world_seed,
                starts=range(config.world_chunks), processes=config.processes,
            )  # fmt: skip
        if clips[0].text_width != self.architecture["text_dim"]:
            raise UserError(
                f"clips have text of width {clips[0].text_width}, the model takes {self.architecture['text_dim']}: "
                "change text_dim in --model"
            )
        if clips[0].codec["hash"] != load_codec().identity["hash"]:
            raise UserError(f"clips were made by codec {clips[0].codec}, the package has {load_codec().identity}")
        return clips

    def _hash(self, clips: list[Clip]) -> str:
        """Of all that decides the result but hardware and library versions."""
        settings = {key: value for key, value in asdict(self.config).items() if key not in (*NOT_HASHED, "model")}
        seen = [(clip.id, clip.chunks, clip.episode, clip.starts, sorted(clip.flagged)) for clip in clips]
        text = json.dumps([settings, self.architecture, self.codec, seen], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def _lines(self) -> list[str]:
        config, weights = self.config, parameter_count(self.architecture)
        rank = AdapterShape.of(self.architecture, config.rank).parameters
        return [
            f"settings: {json.dumps(asdict(config))}",
            f"base: {weights:,} parameters; adapter: {rank:,} (rank {config.rank}); recipe {self.hash}",
            f"windows: {self.bank.windows} of {TEACHER_LATENTS} latents, {self.grid.bank.windows} held out; "
            f"{config.steps * config.batch / self.bank.windows:.1f} epochs, then "
            f"{config.adapter_steps * config.batch / self.bank.windows:.1f} for the adapter",
            f"device: {_device_name(self.device)}; {self.kernel.why}",
        ]

    def _metadata(self, source: FolderSource) -> dict[str, str]:
        """What the adapter's file says of it, under the names that training programs use."""
        config = self.config
        return {
            "rtcwm": __version__, "base": source.fingerprint, "base_description": source.description,
            "codec": self.codec, "objective": "released", "latents": str(TEACHER_LATENTS), "picture1": "native",
            "text_time": "video", "shift": str(config.level_shift), "steps": "any", "step": str(config.adapter_steps),
            "seed": str(config.seed), "recipe": self.hash,
        }  # fmt: skip

    def _report(self, source: FolderSource, stages: Mapping[str, Stage], size: int) -> dict:
        return {
            "recipe": self.hash,
            "settings": {key: value for key, value in asdict(self.config).items() if key not in NO_SETTINGS},
            "architecture": self.architecture,
            "codec": self.codec,
            "base": source.fingerprint,
            "parameters": parameter_count(self.architecture),
            "bytes": size,
            "windows": {"trained": self.bank.windows, "held_out": self.grid.bank.windows},
            "held_out": {name: stage.history for name, stage in stages.items()},
            "sampled": self.samples,
            "seconds": {name: round(stage.seconds, 1) for name, stage in stages.items()},
            "device": _device_name(self.device),
            "attention": self.kernel.name,
            "versions": {
                "rtcwm": __version__, "torch": torch.__version__, "diffusers": diffusers.__version__,
                "python": platform.python_version(),
            },
        }  # fmt: skip


def write_base(folder: Path, model: torch.nn.Module, config: Mapping, metadata: Mapping[str, str]) -> None:
    """Writes a base as a diffusers H3 folder, complete or absent: unfused names, bf16 but for the fp32 island.

    Raises:
        UserError: the disk refused.
    """
    tensors = {}
    for name, weight in model.named_parameters():
        dtype = torch.float32 if name.split(".")[0] in FP32_ISLAND else torch.bfloat16
        weight = weight.detach().to("cpu", dtype)
        names = [name.replace(".to_qkv.", f".to_{part}.") for part in "qkv"] if ".to_qkv." in name else [name]
        tensors |= {key: rows.clone() for key, rows in zip(names, weight.chunk(len(names)), strict=True)}

    def fill(path: Path) -> None:
        described = {"_class_name": type(model).__name__, "_diffusers_version": diffusers.__version__, **config}
        (path / "config.json").write_text(json.dumps(described, indent=2) + "\n")
        save_file(tensors, path / WEIGHTS_FILE, metadata={"format": "pt", **metadata})
        (path / WEIGHTS_FILE).chmod(0o644)

    replace_folder(folder, fill)


def _best_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
