"""The plan of a distillation run: three adapters that go together, clips long enough to roll out, and what follows."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rtcwm.data.clips import Clip
from rtcwm.engine.settings import AdapterSettings, read_adapter_settings, shipped_config
from rtcwm.engine.world import World
from rtcwm.errors import UserError, require
from rtcwm.model.adapter_reader import open_adapter
from rtcwm.model.lora import Adapter, AdapterShape
from rtcwm.model.schedule import SamplerConfig
from rtcwm.train import preflight
from rtcwm.train.config import DistillConfig
from rtcwm.train.dataset import EpochSampler, hold_out
from rtcwm.train.distill_adapters import check_adapters, level_shift
from rtcwm.train.distill_needs import distill_needs
from rtcwm.train.held_out import HeldOut, some
from rtcwm.train.preflight import Inputs
from rtcwm.train.room import check_memory
from rtcwm.train.teacher import window_chunks


@dataclass(frozen=True)
class DistillPlan:
    """What a distillation run derives from its settings and inputs.

    Attributes:
        level_shift: of the noise levels that the student's held-out loss is measured at: those it was trained with.
        starts: (clip, start frame) whose longest rollout lies in training chunks; too_short: clips without one;
            held: what is kept from training.
        teacher_lora, critic_lora: the files of the teacher and of the critic's start, or None.
        joint: teacher and critic score in one pass; memory: lines on what card and host have to hold.
    """

    config: DistillConfig
    inputs: Inputs
    sampler: SamplerConfig
    student_settings: AdapterSettings
    critic_settings: AdapterSettings
    student_shape: AdapterShape
    teacher_lora: str | None
    critic_lora: str | None
    level_shift: float
    starts: tuple[tuple[Clip, int], ...]
    held: HeldOut
    too_short: tuple[str, ...]
    joint: bool
    memory: tuple[str, ...]

    @property
    def held_out(self) -> tuple[Clip, ...]:
        """The clips kept from training."""
        return self.held.clips

    def lines(self) -> list[str]:
        """What is printed before the first iteration."""
        config, world = self.config, self.inputs.world
        sigmas = " ".join(f"{sigma:.4f}" for sigma in self.sampler.sigmas.tolist())
        named = some(self.too_short)
        short = f"; too short for {config.max_chunks} chunks: {len(self.too_short)} clips ({named})" if named else ""
        return [
            f"settings: {json.dumps(asdict(config))}",
            *self.inputs.lines(),
            f"student: {config.student_lora}, {self.student_shape.parameters:,} parameters (rank "
            f"{self.student_shape.rank}); teacher: {self.teacher_lora or 'the base alone'}, {config.teacher_kind}; "
            f"critic: {self.critic_lora or self.teacher_lora or 'new'}",
            f"schedule: {sigmas}; history: {config.rollout_history}; rollouts of {config.min_chunks} to "
            f"{config.max_chunks} chunks, the last {config.grad_chunks} with a graph",
            f"start frames: {len(self.starts)} of {len({clip.id for clip, _ in self.starts})} clips; "
            f"{self.held.line()}{short}",
            *self.held.warnings,
            f"iterations: {config.iters} of {world.size * config.batch} rollouts, "
            f"{config.critic_per_gen} critic updates each; teacher and critic score "
            f"{'in one pass over the base' if self.joint else 'one after the other'}",
            *self.memory,
        ]

    def metadata(self, role: str) -> dict[str, str]:
        """What the run's files say: ``role`` is "dmd" for the student, "critic" for the critic."""
        config = self.config
        return self.inputs.metadata(config.mask_rule, config.picture1) | self.held.metadata() | {
            "objective": role, "steps": str(config.steps), "shift": str(config.shift),
            "history": config.rollout_history, "history_level": str(round(self.sampler.history_level(1).item(), 6)),
            "kv_reuse": str(config.kv_reuse), "teacher_kind": config.teacher_kind,
            "teacher_picture1": config.teacher_picture1, "seed": str(config.seed),
        }  # fmt: skip

    def adapters(self) -> tuple[Adapter, Adapter | None, Adapter]:
        """Student, teacher (None: the base alone) and critic as they begin. A collective."""
        world, source = self.inputs.world, self.inputs.source
        student = preflight.read_adapter(world, self.config.student_lora, source)
        teacher = preflight.read_adapter(world, self.teacher_lora, source) if self.teacher_lora else None
        begins_as = self.critic_lora or self.teacher_lora
        if begins_as is None:
            return student, None, Adapter(student.shape, self.config.seed)
        return student, teacher, preflight.read_adapter(world, begins_as, source)


def prepare(world: World, config: DistillConfig) -> DistillPlan:
    """Checks all inputs and derives the plan; a collective.

    Raises:
        UserError: on all ranks, whatever rank found the fault.
    """
    source, settings, kernel = world.on_all(lambda: _check_cheap(world, config))
    root = preflight.clip_root(world, config.clips, config.out)
    plan = world.on_all(lambda: _plan(config, preflight.read_inputs(world, config, source, settings, kernel, root)))
    identity = {
        "base": source.fingerprint,
        "codec": plan.inputs.codec_hash,
        "files": {
            name: preflight.file_hash(path)
            for name, path in (
                ("student", config.student_lora),
                ("teacher", plan.teacher_lora),
                ("critic", plan.critic_lora),
            )
        },  # fmt: skip
        "clips": preflight.digest(_clips(plan), [(clip.id, start) for clip, start in plan.starts]),
        "adapters": {
            name: {key: settings.deepspeed[key] for key in ("optimizer", "gradient_clipping")}
            for name, settings in (("student", plan.student_settings), ("critic", plan.critic_settings))
        },
    }
    preflight.claim(world, config, {"shard_group": settings.shard_group}, identity, _clips(plan), plan.held_out)
    return plan


def _clips(plan: DistillPlan) -> list[Clip]:
    """The clips of a run, for training and held out."""
    return [*{clip.id: clip for clip, _ in plan.starts}.values(), *plan.held_out]


def _check_cheap(world: World, config: DistillConfig):
    """What needs no clips."""
    checked = preflight.check_settings(world, config)
    for path in (config.student_config, config.critic_config):
        _adapter_settings(path)
    _sampler(config)
    window = window_chunks(config.teacher_kind)
    require(
        config.min_chunks >= window,
        f"--min-chunks {config.min_chunks}: a {config.teacher_kind} teacher's window takes {window} chunks; set at "
        "least that many",
    )
    require(
        config.grad_chunks <= window,
        f"--grad-chunks {config.grad_chunks} is over the {window} chunks of a {config.teacher_kind} teacher's window: "
        "chunks outside of it would get no gradient; set at most that many",
    )
    check_adapters(config, checked[0], None)
    return checked


def _plan(config: DistillConfig, inputs: Inputs) -> DistillPlan:
    student_shape, teacher_lora, critic_lora = check_adapters(config, inputs.source, inputs.codec_hash)
    episodes = hold_out(inputs.clips, config.val_clips, config.seed)
    held = [clip for clip in inputs.clips if clip.episode in episodes]
    training = [clip for clip in inputs.clips if clip.episode not in episodes]
    starts = tuple((clip, start) for clip in training for start in rollout_starts(clip, config.max_chunks))
    fitting = {clip.id for clip, _ in starts}
    too_short = tuple(clip.id for clip in training if clip.id not in fitting)
    if not starts:
        longest = max(training, key=lambda clip: clip.chunks)
        raise UserError(
            f"no clip holds a rollout of --max-chunks {config.max_chunks} from a start frame without flagged chunks: 0 "
            f"of {len(training)} training clips remain, such as {too_short[0]}; the longest, {longest.id}, has "
            f"{longest.chunks} chunks. Lower --max-chunks or prepare longer clips"
        )
    EpochSampler(len(starts), inputs.world.size, config.seed)  # fewer start frames than ranks: an error now
    engines = _adapter_settings(config.student_config), _adapter_settings(config.critic_config)
    of_files = (
        open_adapter(Path(path)).shape(inputs.source.config) if path else None for path in (teacher_lora, critic_lora)
    )
    teacher_shape, critic_shape = of_files
    shapes = student_shape, teacher_shape, critic_shape or teacher_shape or student_shape
    needs = distill_needs(config, inputs, shapes, engines)
    memory = check_memory(needs, inputs.world)
    return DistillPlan(
        config=config,
        inputs=inputs,
        sampler=_sampler(config),
        student_settings=engines[0],
        critic_settings=engines[1],
        student_shape=student_shape,
        teacher_lora=teacher_lora,
        critic_lora=critic_lora,
        level_shift=level_shift(config.student_lora),
        starts=starts,
        held=HeldOut.of(inputs.clips, held, config.val_clips, "--student-lora", config.student_lora),
        too_short=too_short,
        joint=needs.joint,
        memory=memory,
    )


def rollout_starts(clip: Clip, chunks: int) -> list[int]:
    """Start frames of a clip from which so many chunks follow, none of them flagged."""
    return [
        start
        for start in clip.starts
        if start + chunks <= clip.chunks and not any(start <= chunk < start + chunks for chunk in clip.flagged)
    ]


def _sampler(config: DistillConfig) -> SamplerConfig:
    return SamplerConfig(
        steps=config.steps, shift=config.shift, history=config.rollout_history, kv_reuse=config.kv_reuse,
        rule=config.mask_rule, solver="renoise",
    )  # fmt: skip


def _adapter_settings(config: str | None) -> AdapterSettings:
    path = Path(config) if config else shipped_config("distill")
    settings = read_adapter_settings(path)
    if settings.accumulation != 1:
        raise UserError(
            f"{path}: gradient_accumulation_steps is {settings.accumulation}; an iteration of distillation is one "
            "rollout a rank: set 1"
        )
    return settings
