"""What follows from the size of a teacher's window: whether both scores share a pass, the memory of an iteration."""

from rtcwm.engine.base import shard_group_size
from rtcwm.engine.settings import AdapterSettings
from rtcwm.model.layout import TEACHER_LATENTS, audio_latents, frames_of
from rtcwm.model.lora import AdapterShape
from rtcwm.model.packing import Window, stock_layout
from rtcwm.train.config import DistillConfig
from rtcwm.train.memory import DistillNeeds
from rtcwm.train.preflight import Inputs
from rtcwm.train.teacher import window_chunks

HIDING_ROWS = 10_000
"""Rows behind whose products the next block's fetch hides. A block of w weights takes 2w bytes and 2w operations a row:
at 50 GB/s from host memory and 500 TFLOP/s, the time of 10,000 rows; between cards it is a quarter of that."""


def window_rows(config: DistillConfig, span: Window) -> int:
    """Packed rows of what teacher and critic see, for clips of the size of this span."""
    if config.teacher_kind == "causal":
        return span.layout(stream=True).rows
    picture = span.video if config.teacher_picture1 == "window" else span.picture1
    audio = audio_latents(frames_of(TEACHER_LATENTS))
    return stock_layout(span.geometry, tuple(picture.shape[-2:]), TEACHER_LATENTS, span.text_tags, audio).rows


def joint_scores(config: DistillConfig, inputs: Inputs) -> bool:
    """Whether teacher and critic score in one pass over the base.

    "auto" does so where blocks are fetched and a pass of its own would wait for them; elsewhere one pass over both
    costs the memory of twice the rows and spares no time.
    """
    if config.joint_scores != "auto":
        return config.joint_scores == "on"
    settings = inputs.base_settings
    fetched = settings.offload or shard_group_size(inputs.world, settings) > 1
    hidden = settings.prefetch and config.batch * window_rows(config, inputs.span) >= HIDING_ROWS
    return fetched and not hidden


def distill_needs(
    config: DistillConfig,
    inputs: Inputs,
    shapes: tuple[AdapterShape, AdapterShape | None, AdapterShape],
    engines: tuple[AdapterSettings, AdapterSettings],
) -> DistillNeeds:
    """Memory that an iteration of the longest rollout needs.

    Args:
        shapes: of student, teacher (None: the base alone) and critic; engines: settings of student and critic.
    """
    student, teacher, critic = shapes
    return DistillNeeds(
        **inputs.needs(config.batch), student=student, teacher=teacher, critic=critic, student_settings=engines[0],
        critic_settings=engines[1], window_rows=window_rows(config, inputs.span),
        shortest=window_chunks(config.teacher_kind), chunks=config.max_chunks,
        grad_chunks=config.grad_chunks, kv_reuse=config.kv_reuse, joint=joint_scores(config, inputs),
        ema=bool(config.ema),
    )  # fmt: skip
