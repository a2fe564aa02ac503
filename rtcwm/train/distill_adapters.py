"""The three adapters of a distillation, held against the base, the settings, each other: files and metadata alone."""

from pathlib import Path

from rtcwm.errors import UserError
from rtcwm.model.adapter_files import read_metadata
from rtcwm.model.layout import SPAN_CHUNKS
from rtcwm.model.loading import BaseSource
from rtcwm.model.lora import AdapterShape
from rtcwm.model.objectives import CAUSAL_OBJECTIVES, OBJECTIVES
from rtcwm.train import preflight
from rtcwm.train.config import DistillConfig

DF_LEVEL_SHIFT = 3.0
"""Shift of the levels of diffusion forcing, where a student's file does not tell it."""


def check_adapters(
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


def level_shift(student: str) -> float:
    metadata = read_metadata(Path(student))
    return float(metadata["shift"]) if metadata.get("objective") in OBJECTIVES else DF_LEVEL_SHIFT


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
