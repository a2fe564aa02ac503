"""The plan of a diffusion-forcing run: its checked inputs and the numbers that follow from them."""

import json
from dataclasses import asdict, dataclass

from rtcwm.data.clips import Clip
from rtcwm.engine.settings import AdapterSettings
from rtcwm.engine.world import World
from rtcwm.model.lora import Adapter, AdapterShape
from rtcwm.train import preflight
from rtcwm.train.config import TrainConfig
from rtcwm.train.dataset import EpochSampler, list_samples
from rtcwm.train.held_out import HeldOut
from rtcwm.train.memory import TrainNeeds
from rtcwm.train.order import permutation
from rtcwm.train.preflight import Inputs
from rtcwm.train.room import check_memory


@dataclass(frozen=True)
class TrainPlan:
    """What a training run derives from its settings and inputs.

    Attributes:
        init_lora: the adapter file to start from, or None for a new one.
        samples: (clip, first chunk of the span); held: what is kept from training; dropped: spans left out, by reason.
        steps: planned optimizer steps; memory: lines on what card and host have to hold.
    """

    config: TrainConfig
    inputs: Inputs
    init_lora: str | None
    adapter_settings: AdapterSettings
    adapter_shape: AdapterShape
    samples: tuple[tuple[Clip, int], ...]
    held: HeldOut
    dropped: dict[str, int]
    steps: int
    memory: tuple[str, ...]

    @property
    def held_out(self) -> tuple[Clip, ...]:
        """The clips kept from training."""
        return self.held.clips

    def lines(self, steps: int) -> list[str]:
        """What is printed before the first step. steps: of the whole run, which a resumed one keeps on other ranks."""
        spans = self.inputs.world.size * self.config.batch * self.adapter_settings.accumulation
        dropped = sum(self.dropped.values())
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items())
        return [
            f"settings: {json.dumps(asdict(self.config))}",
            *self.inputs.lines(),
            f"trainable parameters: {self.adapter_shape.parameters:,} (rank {self.adapter_shape.rank}, from "
            f"{self.init_lora or 'a new adapter'})",
            f"samples: {len(self.samples)} spans of {len({clip.id for clip, _ in self.samples})} clips; "
            f"{self.held.line()}; dropped: {dropped} spans" + (f" ({reasons})" if dropped else ""),
            *self.held.warnings,
            f"steps: {steps} of {spans} spans ({steps * spans / len(self.samples):.2f} epochs)"
            + (f", planned at the start ({self.steps} would follow from --epochs now)" if steps != self.steps else "")
            + (f"; warm-up of {self.config.warmup}: the peak is not reached" if self.config.warmup > steps else ""),
            *self.memory,
        ]

    def metadata(self) -> dict[str, str]:
        """What the run's adapter files say of it; any few- or many-step sampler may use them."""
        config = self.config
        return self.inputs.metadata(config.mask_rule, config.picture1) | self.held.metadata() | {
            "objective": config.objective, "shift": str(config.level_shift), "steps": "any", "history_level": "any",
            "clean_first": str(config.clean_first), "seed": str(config.seed),
        }  # fmt: skip

    def initial_adapter(self) -> Adapter:
        """The adapter that training starts from. A collective."""
        if self.init_lora is None:
            return Adapter(self.adapter_shape, self.config.seed)
        return preflight.read_adapter(self.inputs.world, self.init_lora, self.inputs.source)


def prepare(world: World, config: TrainConfig) -> TrainPlan:
    """Checks all inputs and derives the plan; a collective. The embedded clips are made here where they are asked for.

    Raises:
        UserError: on all ranks, whatever rank found the fault.
    """

    def check_cheap():
        checked = preflight.check_settings(world, config)
        preflight.adapter_settings(config.adapter_config)
        if path := _init_lora(config):
            preflight.check_adapter(path, checked[0])
        return checked

    source, settings, kernel = world.on_all(check_cheap)
    root = preflight.clip_root(world, config.clips, config.out)
    plan = world.on_all(lambda: _plan(config, preflight.read_inputs(world, config, source, settings, kernel, root)))
    optimizer = {key: plan.adapter_settings.deepspeed[key] for key in ("optimizer", "gradient_clipping")}
    clips = [*{clip.id: clip for clip, _ in plan.samples}.values(), *plan.held_out]
    identity = {
        "base": source.fingerprint,
        "codec": plan.inputs.codec_hash,
        "clips": preflight.digest(clips, [(clip.id, first) for clip, first in plan.samples]),
        "adapter": optimizer,
        "init_lora": preflight.file_hash(plan.init_lora),
    }
    engines = {"shard_group": settings.shard_group, "accumulation": plan.adapter_settings.accumulation}
    preflight.claim(world, config, engines, identity, clips, plan.held_out)
    return plan


def _plan(config: TrainConfig, inputs: Inputs) -> TrainPlan:
    settings = preflight.adapter_settings(config.adapter_config)
    init_lora = _init_lora(config)
    shape = preflight.new_adapter_shape(inputs.source, config.rank)
    if init_lora:
        shape = preflight.check_adapter(init_lora, inputs.source, codec=inputs.codec_hash)
    listed = list_samples(inputs.clips, config.val_clips, config.seed)
    samples = tuple((inputs.clips[index], first) for index, first in listed.train)
    if config.max_samples is not None:
        order = permutation(len(samples), config.seed, epoch=0)
        samples = tuple(samples[index] for index in order[: config.max_samples])
    EpochSampler(len(samples), inputs.world.size, config.seed)  # fewer samples than ranks: an error now
    spans = inputs.world.size * config.batch * settings.accumulation
    steps = config.steps or max(1, round(config.epochs * len(samples) / spans))
    needs = TrainNeeds(**inputs.needs(config.batch), adapter=shape, adapter_settings=settings)
    memory = check_memory(needs, inputs.world)
    dropped = dict(listed.dropped)
    held = HeldOut.of(inputs.clips, listed.held_out, config.val_clips, "--init-lora", init_lora)
    return TrainPlan(config, inputs, init_lora, settings, shape, samples, held, dropped, steps, memory)


def _init_lora(config: TrainConfig) -> str | None:
    """The adapter file to start from; ``--rank`` asks for a new adapter."""
    return None if config.rank else preflight.adapter_path(config.init_lora, config.base, default="none")
