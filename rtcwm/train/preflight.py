"""Everything that can be wrong with a run's input, checked before anything heavy; and the numbers that follow from it.

Headers, configs and metadata are read here, never weights. Each node reads its own files; an error on any rank ends all
of them with one message.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rtcwm.data.clips import Clip, open_clips
from rtcwm.data.codec import load_codec
from rtcwm.data.make import write_world
from rtcwm.engine.base import shard_group_size
from rtcwm.engine.settings import (
    AdapterSettings,
    BaseSettings,
    default_base_config,
    read_adapter_settings,
    read_base_settings,
    shipped_config,
)
from rtcwm.engine.world import World
from rtcwm.errors import UserError
from rtcwm.model.adapter_files import file_shape, read_metadata
from rtcwm.model.kernels import Kernel, resolve
from rtcwm.model.layout import SPAN_CHUNKS
from rtcwm.model.loading import BaseSource, open_base
from rtcwm.model.lora import AdapterShape
from rtcwm.train.config import TrainConfig
from rtcwm.train.dataset import EpochSampler, list_samples, load_window, start_frames
from rtcwm.train.folder import RunFolder
from rtcwm.train.order import permutation

DEFAULT_RANK = 128
EMBEDDED_CLIPS, EMBEDDED_CHUNKS = 12, 16


@dataclass(frozen=True)
class Plan:
    """What a training run derives from its settings and inputs.

    Attributes:
        samples: (clip, first chunk of the span), in the seed's order; held_out: clips kept from training.
        steps: planned optimizer steps; dropped: spans left out, by reason.
        rows: rows of the first sample's packed span.
    """

    world: World
    source: BaseSource
    base_settings: BaseSettings
    adapter_settings: AdapterSettings
    adapter_shape: AdapterShape
    kernel: Kernel
    samples: tuple[tuple[Clip, int], ...]
    held_out: tuple[Clip, ...]
    dropped: dict[str, int]
    codec_hash: str
    rows: int
    steps: int

    def lines(self, shard_group: int) -> list[str]:
        """What is printed before the first step."""
        world, dropped = self.world, sum(self.dropped.values())
        visits = self.steps * world.size * self.adapter_settings.accumulation
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items())
        return [
            f"base: {self.source.description}, {self.source.fingerprint}",
            f"world: {world.size} ranks, {world.local_size} on this node, {world.device.type}; "
            f"shard group: {shard_group}",
            f"rows a span: {self.rows:,} (first sample); trainable parameters: {self.adapter_shape.parameters:,} "
            f"(rank {self.adapter_shape.rank})",
            f"samples: {len(self.samples)} spans of {len({clip.id for clip, _ in self.samples})} clips; held out: "
            f"{len(self.held_out)} clips; dropped: {dropped} spans" + (f" ({reasons})" if dropped else ""),
            f"steps: {self.steps} of {world.size * self.adapter_settings.accumulation} spans "
            f"({visits / len(self.samples):.2f} epochs)",
            self.kernel.why,
        ]


def prepare(world: World, config: TrainConfig) -> Plan:
    """Checks all inputs and derives the plan; a collective. The embedded clips are made here where they are asked for.

    Raises:
        UserError: on all ranks, whatever rank found the fault.
    """
    world.on_all(lambda: _check_cheap(world, config))
    root = clip_root(world, config)
    plan = world.on_all(lambda: _plan(world, config, root))
    identity = _identity(plan)
    world.same("base, clips or samples", identity)
    folder = RunFolder(config.out)
    if world.on_main(lambda: folder.claim(config, identity)):
        world.print(f"--out {config.out} holds this run")
    else:
        held = [{"clip": clip.id, "episode": clip.episode} for clip in plan.held_out]
        world.on_main(lambda: folder.write_json("val_samples.json", held))
    world.print(f"settings: {json.dumps(vars(config))}")
    return plan


def clip_root(world: World, config: TrainConfig) -> Path:
    """The folder of clips; the embedded world's clips are made once a node, in the run's folder."""
    if config.clips != "embedded":
        return Path(config.clips)
    root = Path(config.out) / "clips"

    def make() -> None:
        if world.local_rank == 0:
            write_world(root, EMBEDDED_CLIPS, EMBEDDED_CHUNKS, seed=0)

    world.on_all(make)
    return root


def _check_cheap(world: World, config: TrainConfig) -> None:
    """What needs no clips."""
    settings, _ = _settings(world, config)
    shard_group_size(world, settings)
    source = open_base(config.base)
    if config.init_lora:
        check_adapter(Path(config.init_lora), source)
    resolve(config.attn, world.device)


def _settings(world: World, config: TrainConfig) -> tuple[BaseSettings, AdapterSettings]:
    base = Path(config.base_config) if config.base_config else default_base_config(world.device)
    adapter = Path(config.adapter_config) if config.adapter_config else shipped_config("adapter")
    return read_base_settings(base), read_adapter_settings(adapter)


def check_adapter(path: Path, source: BaseSource) -> AdapterShape:
    """Holds an adapter file's shapes and metadata against a base; raises `UserError`."""
    shape = file_shape(path, source.config)
    made_on = read_metadata(path).get("base")
    if made_on is not None and made_on != source.fingerprint:
        raise UserError(f"{path} was trained on base {made_on}; --base is {source.description}, {source.fingerprint}")
    return shape


def _plan(world: World, config: TrainConfig, root: Path) -> Plan:
    base_settings, adapter_settings = _settings(world, config)
    source = open_base(config.base)
    clips = open_clips(root)
    codec_hash = check_codec(config, clips)
    listed = list_samples(clips, config.val_clips, config.seed)
    samples = tuple((clips[index], first) for index, first in listed.train)
    if config.max_samples is not None:
        order = permutation(len(samples), config.seed, epoch=0)
        samples = tuple(samples[index] for index in order[: config.max_samples])
    EpochSampler(len(samples), world.size, config.seed)
    first_clip, first = samples[0]
    window = load_window(first_clip, first, start_frames(first_clip)[0], picture1=config.picture1)
    if window.text.shape[2] != source.config["text_dim"]:
        raise UserError(
            f"clip {first_clip.id} has text of width {window.text.shape[2]}, the base takes {source.config['text_dim']}: "
            "the clips were prepared with another text encoder than this base's"
        )
    spans_a_step = world.size * adapter_settings.accumulation
    return Plan(
        world=world,
        source=source,
        base_settings=base_settings,
        adapter_settings=adapter_settings,
        adapter_shape=_adapter_shape(config, source),
        kernel=resolve(config.attn, world.device),
        samples=samples,
        held_out=listed.held_out,
        dropped=listed.dropped,
        codec_hash=codec_hash,
        rows=window.layout(stream=True).rows,
        steps=config.steps or max(1, round(config.epochs * len(samples) / spans_a_step)),
    )


def _adapter_shape(config: TrainConfig, source: BaseSource) -> AdapterShape:
    if config.init_lora:
        return check_adapter(Path(config.init_lora), source)
    rank = config.rank or min(DEFAULT_RANK, source.config["hidden_size"] // 4)
    return AdapterShape.of(source.config, rank)


def check_codec(config: TrainConfig, clips: Sequence[Clip]) -> str:
    """The hash of the codec that made the clips, held against the base's and the initial adapter's; `UserError`."""
    codec = clips[0].codec
    embedded = load_codec().identity
    if config.base == "embedded" and codec["hash"] != embedded["hash"]:
        raise UserError(
            f"clip {clips[0].id} was made by codec {codec}, the embedded base reads {embedded}: make the clips again with "
            "`rtcwm world`, or name the base that goes with them with --base"
        )
    if config.init_lora:
        expected = read_metadata(Path(config.init_lora)).get("codec")
        if expected is not None and expected != codec["hash"]:
            raise UserError(
                f"{config.init_lora} was trained on latents of codec {expected}, these clips hold codec {codec['hash']}"
            )
    return codec["hash"]


def _identity(plan: Plan) -> dict:
    """What decides a run besides its settings; equal on every rank, and on resume."""
    clips = sorted({clip.id: clip for clip, _ in plan.samples}.values(), key=lambda clip: clip.id)
    digest = hashlib.blake2b(digest_size=16)
    for clip in [*clips, *plan.held_out]:
        digest.update(repr((clip.id, clip.chunks, clip.episode, clip.starts, sorted(clip.flagged))).encode())
    digest.update(repr([(clip.id, first) for clip, first in plan.samples]).encode())
    training = {key: plan.adapter_settings.deepspeed[key] for key in ("optimizer", "gradient_clipping")}
    return {
        "base": plan.source.fingerprint,
        "codec": plan.codec_hash,
        "clips": digest.hexdigest(),
        "span_chunks": SPAN_CHUNKS,
        "adapter": training,
    }
