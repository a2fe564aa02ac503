"""Settings of the programs: one frozen dataclass a program, read from the command line and from ``--config FILE``.

jsonargparse does the typing, refuses unknown flags and keys, and prints the resolved settings (``--print_config``).
Relations between settings are checked here, before anything is started.
"""

import math
import os
from argparse import SUPPRESS
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar, get_type_hints

from jsonargparse import ArgumentParser

from rtcwm.errors import SharedError, UserError, at_least, require

Settings = TypeVar("Settings", bound="RunConfig")


def option(default: Any, text: str) -> Any:
    """A field with its help text."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Settings that both programs share."""

    out: str = option("", "folder of the run: adapters, logs, checkpoints")
    clips: str = option("embedded", "folder of prepared clips; 'embedded' makes the embedded world's")
    base: str = option("embedded", "diffusers H3 folder, a config .json (random weights), or 'embedded'")
    mask_rule: Literal["E", "own", "ahead1"] = option("E", "what the rows of a proxy chunk see; E: a causal proxy")
    picture1: Literal["native", "2048"] = option("native", "which encoding of the start frame to condition on")
    batch: int = option(
        1, "samples a rank and micro-step, of clips with equally many text rows; they share noise levels"
    )
    warmup: int = option(10, "steps (iterations) of linear warm-up; 0: none")
    save_every: int = option(150, "steps (iterations) between checkpoints; one is always written at the end")
    val_clips: int = option(2, "clips to hold out, by whole episodes; 0: none and no held-out loss")
    max_skips: int = option(10, "stop after so many skipped (non-finite) steps in a row")
    seed: int = option(0, "of everything random")
    attn: Literal["auto", "sdpa", "cudnn", "fa4", "fa3", "fa2", "flex"] = option("auto", "attention kernel")
    compile: Literal["auto", "on", "off"] = option(
        "auto", "compile what lies between a block's matrix products; auto: on GPUs, where it takes a minute once"
    )
    base_config: str | None = option(None, "DeepSpeed JSON of the base engine; default: ds_configs/ for the device")
    adaln: Literal["auto", "live", "table"] = option(
        "auto",
        "AdaLN of the blocks computed live, or read from a table made once for a base, which takes 39% of the weights "
        "off the card and puts noise levels on its grid; auto: a table for bases of over a billion parameters",
    )
    adaln_times: int = option(1000, "steps of the table's grid of noise levels")
    adaln_dir: str | None = option(None, "folder of tables (9.7 GB for the release); default: ~/.cache/rtcwm")

    def __post_init__(self):
        require(bool(self.out), "--out is required: the folder of the run")
        at_least(self, 1, "save_every", "max_skips", "batch")
        at_least(self, 0, "warmup", "val_clips", "seed")
        require(
            1 <= self.adaln_times <= 100_000,
            f"--adaln-times {self.adaln_times}: expected 1 to 100000 steps; more lie closer than float32 tells apart",
        )
        require(self.seed < 2**63, f"--seed {self.seed}: expected less than 2^63")

    def _learning_rates(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            require(0 < value < math.inf, f"--{name.replace('_', '-')} {value}: expected a positive learning rate")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RunConfig):
    """Settings of ``rtcwm.train.train``; every default but ``out`` trains on the embedded world."""

    init_lora: str | None = option(
        None, "adapter to start from; 'none': a new one; default: 'released' on the embedded base, a new one on others"
    )
    rank: int | None = option(None, "rank of a new adapter; default: 128, or a quarter of a narrower base's width")
    objective: Literal["df", "tf"] = option("df", "df: diffusion forcing; tf: teacher forcing (clean history)")
    steps: int | None = option(None, "optimizer steps; default: epochs x samples / (ranks x batch x accumulation)")
    epochs: float = option(3.0, "passes over the samples, where --steps is not given")
    lr: float = option(2e-5, "peak learning rate")
    lr_min: float = option(1e-6, "learning rate at the end of the cosine")
    level_shift: float = option(3.0, "shift of the noise levels of chunks")
    clean_first: bool = option(False, "keep chunk 0 clean, and out of the loss, in spans that begin at their Picture 1")
    val_every: int = option(150, "steps between held-out losses; 0: only at the start and the end")
    max_samples: int | None = option(None, "train on the first so many samples of the seed's order")
    adapter_config: str | None = option(None, "DeepSpeed JSON of the adapter engine; default: ds_configs/adapter.json")

    def __post_init__(self):
        super().__post_init__()
        at_least(self, 1, "steps", "max_samples", "rank")
        at_least(self, 0, "val_every")
        self._learning_rates("lr")
        require(0 <= self.lr_min <= self.lr, f"--lr-min {self.lr_min}: expected 0 <= lr-min <= lr ({self.lr})")
        require(0 < self.epochs < math.inf, f"--epochs {self.epochs}: expected a positive number")
        require(1 <= self.level_shift < math.inf, f"--level-shift {self.level_shift}: expected 1 (none) or more")
        require(
            self.rank is None or self.init_lora is None,
            "--rank is of a new adapter; --init-lora brings its own: drop one",
        )


@dataclass(frozen=True, kw_only=True)
class DistillConfig(RunConfig):
    """Settings of ``rtcwm.train.distill``; all defaults but ``out`` and ``student_lora`` run on the embedded world."""

    save_every: int = option(20, "iterations between checkpoints; one is always written at the end")
    student_lora: str = option("", "adapter that the student starts from, of a diffusion-forcing or distillation run")
    teacher_lora: str | None = option(
        None, "frozen teacher; 'none': the base alone; default: 'released' on the embedded base, required on others"
    )
    critic_lora: str | None = option(None, "the critic's start; default: the student's pair, or the teacher's adapter")
    teacher_kind: Literal["released", "causal"] = option(
        "released", "37 latents bidirectional, or the student's own span"
    )
    teacher_picture1: Literal["window", "start"] = option("window", "Picture 1 of a released teacher's window")
    score_shift: float = option(12.0, "shift of the noise levels that teacher and critic score at")
    score_draws: int = option(1, "levels at which a rollout is scored for the student; their mean is less noisy")
    steps: int = option(4, "steps of the student's schedule")
    shift: float = option(5.0, "shift of the student's schedule")
    iters: int = option(200, "iterations: one student update and the critic's updates each")
    min_chunks: int = option(8, "shortest rollout")
    max_chunks: int = option(14, "longest rollout")
    kv_reuse: bool = option(True, "keep keys and values of the history; false: recompute the window for every chunk")
    rollout_history: Literal["last-step", "clean"] = option("last-step", "noise level at which history is attended to")
    stops: Literal["random", "late", "last"] = option(
        "random",
        "step at which a chunk of a rollout stops: a random one of the schedule, always the last, or late: the last "
        "with probability 3/4, else a random one",
    )
    joint_scores: Literal["auto", "on", "off"] = option(
        "auto",
        "score with teacher and critic in one pass over the base, each on a copy of the batch; auto: where blocks of "
        "the base are fetched, and a window of under 10,000 rows does not hide that",
    )
    ema: float = option(0.0, "decay of the student's running mean, saved as student_ema_iter files; 0: none")
    gen_lr: float = option(2e-6, "the student's learning rate")
    critic_lr: float = option(4e-6, "the critic's learning rate")
    critic_per_gen: int = option(7, "critic updates an iteration")
    grad_chunks: int = option(4, "last chunks of the teacher window that keep a graph")
    student_config: str | None = option(None, "DeepSpeed JSON of the student; default: ds_configs/distill.json")
    critic_config: str | None = option(None, "DeepSpeed JSON of the critic; default: ds_configs/distill.json")

    def __post_init__(self):
        super().__post_init__()
        require(bool(self.student_lora), "--student-lora is required: an adapter that diffusion forcing trained")
        at_least(self, 1, "steps", "iters", "critic_per_gen", "grad_chunks", "score_draws")
        require(1 <= self.score_shift < math.inf, f"--score-shift {self.score_shift}: expected 1 (none) or more")
        require(0 <= self.ema < 1, f"--ema {self.ema}: expected a decay from 0 (none) to below 1")
        self._learning_rates("gen_lr", "critic_lr")
        require(
            self.min_chunks <= self.max_chunks, f"--min-chunks {self.min_chunks} is over --max-chunks {self.max_chunks}"
        )


def parse(program: str, settings: type[Settings], arguments: Sequence[str] | None = None) -> Settings:
    """Reads a program's settings from its command line (``sys.argv`` by default) and its ``--config`` file.

    The command line wins over the file. Unknown flags and keys end the program with code 2, as do values of a wrong
    type; only rank 0 prints.

    Raises:
        UserError: values that do not go together.
    """
    quiet = int(os.environ.get("RANK", "0")) != 0
    parser = ArgumentParser(prog=program, description=settings.__doc__.splitlines()[0], exit_on_error=True)
    if quiet:
        parser.error = lambda message, error=None: os._exit(2)
    parser.add_argument("--config", action="config", help="YAML or JSON file with any of these settings")
    # The DeepSpeed launcher appends it; the ranks read their environment.
    parser.add_argument("--local_rank", type=int, default=0, help=SUPPRESS)
    hints = get_type_hints(settings)
    for item in fields(settings):
        flag = f"--{item.name.replace('_', '-')}"
        parser.add_argument(flag, type=hints[item.name], default=item.default, help=item.metadata["help"])
    values = parser.parse_args(arguments).as_dict()
    try:
        return settings(**{item.name: values[item.name] for item in fields(settings)})
    except UserError as error:
        raise SharedError(str(error)) from error  # every rank reads the same command line


def learning_rate(step: int, steps: int, lr: float, lr_min: float, warmup: int) -> float:
    """Learning rate of step 0, 1, ...: linear warm-up to lr, then a cosine that ends at lr_min with the last step.

    ``lr (k + 1) / warmup`` for k < warmup, then ``lr_min + (lr - lr_min) (1 + cos(pi p)) / 2`` with p from 0 to 1. It
    depends on the step alone, so a resumed run needs no state of a scheduler.
    """
    if step < warmup:
        return lr * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
    return lr_min + (lr - lr_min) * (1 + math.cos(math.pi * progress)) / 2
