"""The plan of a distillation run: three adapters that go together, clips long enough to roll out, and what follows."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rtcwm.data.clips import Clip
from rtcwm.engine.settings import AdapterSettings, read_adapter_settings, shipped_config
from rtcwm.engine.world import World
from rtcwm.errors import UserError
from rtcwm.model.adapter_files import read_metadata
from rtcwm.model.layout import SPAN_CHUNKS
from rtcwm.model.loading import BaseSource
from rtcwm.model.lora import Adapter, AdapterShape
from rtcwm.model.sampler import SamplerConfig
from rtcwm.train import preflight
from rtcwm.train.config import DistillConfig, require
from rtcwm.train.dataset import EpochSampler, hold_out
from rtcwm.train.preflight import Inputs
from rtcwm.train.teacher import window_chunks

DF_LEVEL_SHIFT = 3.0
"""Shift of the levels of diffusion forcing, where a student's file does not tell it."""

CAUSAL_OBJECTIVES = ("df", "tf", "dmd")
"""Objectives of adapters that know the causal layout alone."""


@dataclass(frozen=True)
class DistillPlan:
    """What a distillation run derives from its settings and inputs.

    Attributes:
        level_shift: of the noise levels that the student's held-out loss is measured at: those it was trained with.
        starts: (clip, start frame) whose longest rollout lies in training chunks; too_short: clips without one.
        teacher_lora, critic_lora: the files of the teacher and of the critic's start, or None.
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
    held_out: tuple[Clip, ...]
    too_short: tuple[str, ...]

    def lines(self) -> list[str]:
        """What is printed before the first iteration."""
        config, world = self.config, self.inputs.world
        sigmas = " ".join(f"{sigma:.4f}" for sigma in self.sampler.sigmas.tolist())
        named = ", ".join(self.too_short[:5]) + (" ..." if len(self.too_short) > 5 else "")
        short = f"; too short for {config.max_chunks} chunks: {len(self.too_short)} clips ({named})" if named else ""
        return [
            f"settings: {json.dumps(asdict(config))}",
            *self.inputs.lines(),
            f"student: {config.student_lora}, {self.student_shape.parameters:,} parameters (rank "
            f"{self.student_shape.rank}); teacher: {self.teacher_lora or 'the base alone'}, {config.teacher_kind}; "
            f"critic: {self.critic_lora or self.teacher_lora or 'new'}",
            f"schedule: {sigmas}; history: {config.rollout_history}; rollouts of {config.min_chunks} to "
            f"{config.max_chunks} chunks, the last {config.grad_chunks} with a graph",
            f"start frames: {len(self.starts)} of {len({clip.id for clip, _ in self.starts})} clips; held out: "
            f"{len(self.held_out)} clips ({len({clip.episode for clip in self.held_out})} episodes){short}",
            f"iterations: {config.iters} of {world.size * config.batch} rollouts, "
            f"{config.critic_per_gen} critic updates each",
        ]

    def metadata(self, role: str) -> dict[str, str]:
        """What the run's files say: ``role`` is "dmd" for the student, "critic" for the critic."""
        config = self.config
        return self.inputs.metadata(config.mask_rule, config.picture1) | {
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
    _check_adapters(config, checked[0], None)
    return checked


def _plan(config: DistillConfig, inputs: Inputs) -> DistillPlan:
    student_shape, teacher_lora, critic_lora = _check_adapters(config, inputs.source, inputs.codec_hash)
    episodes = hold_out(inputs.clips, config.val_clips, config.seed)
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
    return DistillPlan(
        config=config,
        inputs=inputs,
        sampler=_sampler(config),
        student_settings=_adapter_settings(config.student_config),
        critic_settings=_adapter_settings(config.critic_config),
        student_shape=student_shape,
        teacher_lora=teacher_lora,
        critic_lora=critic_lora,
        level_shift=_level_shift(config.student_lora),
        starts=starts,
        held_out=tuple(clip for clip in inputs.clips if clip.episode in episodes),
        too_short=too_short,
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


def _check_adapters(
    config: DistillConfig, source: BaseSource, codec: str | None
) -> tuple[AdapterShape, str | None, str | None]:
    """Student, teacher and critic against the base and each other; returns the student's shape and the files of the
    teacher and of the critic's start."""
    student = read_metadata(Path(config.student_lora))
    distilled = student.get("objective") == "dmd"
    schedule = {"steps": str(config.steps), "shift": str(config.shift), "history": config.rollout_history}
    shape = preflight.check_adapter(
        config.student_lora, source, codec=codec, span=str(SPAN_CHUNKS), mask_rule=config.mask_rule,
        picture1=config.picture1, **(schedule if distilled else {}),
    )  # fmt: skip
    if student.get("objective") == "critic":
        raise UserError(f"--student-lora {config.student_lora} is a critic; name the student_iter file beside it")
    if student.get("objective") == "released" or student.get("text_time", "pinned") != "pinned":
        raise UserError(
            f"--student-lora {config.student_lora} is a bidirectional adapter; the student starts from one that "
            "diffusion forcing (rtcwm.train.train) made of it"
        )
    teacher = _check_teacher(config, source, codec)
    critic = config.critic_lora or (_pair(config.student_lora) if distilled else None)
    if critic:
        released = {"teacher_picture1": config.teacher_picture1} if config.teacher_kind == "released" else {}
        layout = _causal_layout(config)
        preflight.check_adapter(critic, source, codec=codec, teacher_kind=config.teacher_kind, **layout, **released)
        objective = read_metadata(Path(critic)).get("objective")
        if config.teacher_kind == "causal" and objective not in ("critic", *CAUSAL_OBJECTIVES):
            raise UserError(
                f"--critic-lora {critic} was not trained causally ({objective}) and cannot score a causal teacher's "
                "span; start the critic from the teacher's adapter"
            )
        if objective == "dmd":
            raise UserError(
                f"--critic-lora {critic} is a student; the critic starts from a critic_iter file or the teacher's"
            )
        if objective in CAUSAL_OBJECTIVES and config.teacher_kind == "released":
            raise UserError(
                f"--critic-lora {critic} was trained causally ({objective}) and cannot score a released teacher's "
                "bidirectional window; start the critic from the teacher's adapter or set --teacher-kind causal"
            )
    return shape, teacher, critic


def _check_teacher(config: DistillConfig, source: BaseSource, codec: str | None) -> str | None:
    """The teacher's file, checked. On a base of the user's own it has to be named: a default would distil from the
    wrong model without a word."""
    path = preflight.adapter_path(config.teacher_lora, config.base, default="")
    if path == "":
        raise UserError("--teacher-lora is required on this --base: the released adapter, or 'none' for the base alone")
    if path is None:
        return None
    preflight.check_adapter(path, source, codec=codec, **_causal_layout(config))
    objective = read_metadata(Path(path)).get("objective")
    if objective == "critic":
        raise UserError(
            f"--teacher-lora {path} is a critic, the score of a student's samples; name a teacher's adapter"
        )
    if config.teacher_kind == "causal" and objective not in CAUSAL_OBJECTIVES:
        raise UserError(
            f"--teacher-lora {path} was not trained causally ({objective}); a causal teacher is an adapter of "
            "rtcwm.train.train: name one with --teacher-lora"
        )
    if objective in CAUSAL_OBJECTIVES and config.teacher_kind == "released":
        raise UserError(
            f"--teacher-lora {path} was trained causally ({objective}); a released teacher sees 37 latents "
            "in both directions. Set --teacher-kind causal, or name the released adapter"
        )
    return path


def _level_shift(student: str) -> float:
    metadata = read_metadata(Path(student))
    return float(metadata["shift"]) if metadata.get("objective") in ("df", "tf") else DF_LEVEL_SHIFT


def _causal_layout(config: DistillConfig) -> dict[str, str]:
    """What the files of a causal teacher and its critic have to agree on with the run."""
    if config.teacher_kind != "causal":
        return {}
    return {"span": str(SPAN_CHUNKS), "mask_rule": config.mask_rule, "picture1": config.picture1}


def _pair(student: str) -> str:
    """The critic that was saved with a distilled student.

    Raises:
        UserError: it is not there.
    """
    path = Path(student)
    pair = path.with_name(path.name.replace("student_", "critic_", 1))
    if pair == path:
        raise UserError(
            f"--student-lora {student} was distilled together with a critic, and its name does not tell the critic's "
            "(student_iter00200 goes with critic_iter00200): name it with --critic-lora"
        )
    if not pair.is_file():
        raise UserError(
            f"--student-lora {student} was distilled together with a critic, and {pair.name} is not beside it: copy it "
            "there, or name one with --critic-lora"
        )
    return str(pair)
