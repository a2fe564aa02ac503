"""`rtcwm bench`: its commands and their flags. The work is in modules that are imported when a command runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rtcwm.errors import at_least, require

SIDES = ("plain", "ours")
Attn = Literal["auto", "sdpa", "cudnn", "fa4", "fa3", "fa2", "flex"]


@dataclass(frozen=True, kw_only=True)
class Sized:
    """A base of random weights, and the size of its input.

    Args:
        base: config .json of a base, 'embedded' for the embedded base's, default: the released 33.1B; its weights are
            random.
        layers: use only so many blocks of the base; the report says so.
        height: of the picture, pixels.
        width: of the picture, pixels.
        text_rows: rows of text.
        rank: of the adapters; default: 128, or a quarter of a narrower base's width.
        attn: attention kernel of our side.
        seed: of everything random.
    """

    base: str | None = None
    layers: int | None = None
    height: int = 768
    width: int = 1344
    text_rows: int = 400
    rank: int | None = None
    attn: Attn = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        at_least(self, 1, "layers", "text_rows", "rank")


@dataclass(frozen=True, kw_only=True)
class Settings(Sized):
    """What is measured, and how often.

    Args:
        out: JSON file to write.
        steps: repetitions that are timed.
        warmup: repetitions before them.
    """

    out: Path | None = None
    steps: int = 5
    warmup: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "steps")
        at_least(self, 0, "warmup")
        if self.out is not None:
            require(self.out.suffix == ".json", f"--out {self.out}: expected the name of a .json file")
            require(self.out.parent.is_dir(), f"--out {self.out}: there is no folder {self.out.parent}; make it first")


@dataclass(frozen=True, kw_only=True)
class TwoSides(Settings):
    """A measurement of both sides.

    Args:
        sides: plain (the obvious loop), ours, or both: plain,ours.
        profile: text file for the kernels of one more step of each side, summed by class and by name.
        batch: spans, rollouts or streams of a step.
        base_config: DeepSpeed JSON of our side's base engine; default: training's for the device, in a stream none (the
            base whole on the device).
        compile: on our side, compile what lies between a block's matrix products; auto: on GPUs.
        adaln: on our side, AdaLN of the blocks live or from a table; auto: a table for large bases.
        adaln_times: steps of the table's grid of noise levels, which both sides then draw on.
        adaln_dir: folder that keeps the table for the next time; default: it is made for this time alone.
    """

    sides: str = "plain,ours"
    profile: Path | None = None
    batch: int = 1
    base_config: str | None = None
    compile: Literal["auto", "on", "off"] = "auto"
    adaln: Literal["auto", "live", "table"] = "auto"
    adaln_times: int = 1000
    adaln_dir: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.sides.split(",")
        at_least(self, 1, "batch")
        known = set(given) <= set(SIDES) and len(set(given)) == len(given)
        require(known, f"--sides {self.sides}: expected plain, ours, or plain,ours")
        if self.profile is not None:
            folder = self.profile.parent
            require(folder.is_dir(), f"--profile {self.profile}: there is no folder {folder}; make it first")

    @property
    def chosen(self) -> tuple[str, ...]:
        """The sides to run; the plain one first, whose memory is known to be given back."""
        return tuple(side for side in SIDES if side in self.sides.split(","))


@dataclass(frozen=True, kw_only=True)
class TrainBench(TwoSides):
    """A step of diffusion forcing.

    Args:
        adapter_config: DeepSpeed JSON of the adapter engine, as in training.
    """

    adapter_config: str | None = None


@dataclass(frozen=True, kw_only=True)
class DistillBench(TwoSides):
    """An iteration of distribution matching.

    Args:
        steps: iterations that are timed.
        warmup: iterations before them.
        chunks: length of every rollout.
        denoise_steps: steps of the student's schedule.
        stops: step at which a chunk of a rollout stops: a random one, always the last, or late (three of four at
            the last).
        grad_chunks: last chunks that keep a graph.
        critic_per_gen: critic updates an iteration.
        teacher_kind: released (37 latents in both directions) or causal (a span).
        joint_scores: on our side teacher and critic score in one pass, as in distillation.
        steady: after the iterations, time a stream without a graph as well.
        student_config: DeepSpeed JSON of the student.
        critic_config: DeepSpeed JSON of the critic.
    """

    steps: int = 2
    warmup: int = 1
    chunks: int = 14
    denoise_steps: int = 4
    stops: Literal["random", "late", "last"] = "random"
    grad_chunks: int = 4
    critic_per_gen: int = 7
    teacher_kind: Literal["released", "causal"] = "released"
    joint_scores: Literal["auto", "on", "off"] = "auto"
    steady: bool = True
    student_config: str | None = None
    critic_config: str | None = None


@dataclass(frozen=True, kw_only=True)
class StreamBench(TwoSides):
    """A stream of a few-step student.

    Args:
        steps: streams that are timed.
        warmup: streams before them.
        chunks: of a stream; from the sixth on the window is full, and from the seventh it slides.
        denoise_steps: steps of the schedule.
    """

    steps: int = 3
    warmup: int = 1
    chunks: int = 9
    denoise_steps: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.chunks >= 7, f"--chunks {self.chunks}: a steady stream needs 7 or more, for its window to slide")


@dataclass(frozen=True, kw_only=True)
class ScaleBench(Sized):
    """Several ranks of one machine.

    Args:
        out: folder of results and logs; parts that it holds are not run again.
        ranks: processes, one a GPU; default: all GPUs there are.
        only: parts to run, or families of them (train, distill, same), such as [same,train-1]; default: all.
        minutes: after which the command ends; what did not fit is left for the next time.
        part_minutes: most that one part may take.
        steps: of training that are timed, after one.
        iters: iterations of distillation that are timed, after one.
        chunks: of a rollout.
        critic_per_gen: critic updates an iteration.
        distill_layers: blocks of the base in distillation, where they are to be fewer.
        same_layers: blocks of the base where numbers of several ranks are held against those of one.
        same_height: height of the picture there; default: as elsewhere.
        same_width: width of the picture there; default: as elsewhere.
        same_steps: steps that are compared; a rank is killed after a quarter of them.
        timeout: seconds in which the others have to end when a rank is killed; also how long ranks of that run wait for
            each other in a collective, while one of them compiles.
        kill_rank: rank to kill; default: the last.
        launcher: of the run whose rank is killed.
        base_config: DeepSpeed JSON of the base engine; its shard_group is set by every part.
        compile: compile what lies between a block's matrix products; auto: on GPUs.
        adaln: live or from a table, but in the part that is live in any case; auto: a table for large bases.
        adaln_times: steps of the table's grid of noise levels.
        adaln_dir: folder that keeps the table; default: in --out.
    """

    out: Path
    ranks: int | None = None
    only: list[str] | None = None
    minutes: float = 9.0
    part_minutes: float = 4.0
    steps: int = 2
    iters: int = 1
    chunks: int = 8
    critic_per_gen: int = 2
    distill_layers: int | None = None
    same_layers: int | None = 4
    same_height: int | None = None
    same_width: int | None = None
    same_steps: int = 20
    timeout: int = 90
    kill_rank: int | None = None
    launcher: Literal["deepspeed", "torchrun"] = "deepspeed"
    base_config: str | None = None
    compile: Literal["auto", "on", "off"] = "auto"
    adaln: Literal["auto", "live", "table"] = "auto"
    adaln_times: int = 100
    adaln_dir: Path | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "steps", "iters", "critic_per_gen", "distill_layers", "same_layers", "adaln_times")
        at_least(self, 2, "ranks")
        at_least(self, 4, "same_steps")
        at_least(self, 5, "timeout")
        at_least(self, 8, "chunks")
        at_least(self, 0, "kill_rank")
        require(self.minutes > 0 and self.part_minutes > 0, "--minutes and --part-minutes: expected more than 0")


def bench_attention(**settings) -> None:
    """Attention of a span: every kernel's speed at full size, and its error against the boolean mask at a small one."""
    from rtcwm.bench import attention

    attention.bench(Settings(**settings))


def bench_train(**settings) -> None:
    """One step of diffusion forcing: the obvious loop and ours, in one process, on the same data and noise."""
    from rtcwm.bench import train

    train.bench(TrainBench(**settings))


def bench_distill(**settings) -> None:
    """One iteration of distillation by part: the obvious loop and ours, in one process, on the same data and noise."""
    from rtcwm.bench import distill

    distill.bench(DistillBench(**settings))


def bench_stream(**settings) -> None:
    """Seconds a chunk of a few-step stream, by how full its window is, against the time that a chunk plays."""
    from rtcwm.bench import stream

    stream.bench(StreamBench(**settings))


def bench_scale(**settings) -> int:
    """Several GPUs of one machine: speed, memory, gathers, the same numbers as on one, a rank that dies; one table."""
    from rtcwm.bench import scale

    return scale.bench(ScaleBench(**settings))


BENCH = {
    "_help": "Measure attention, training, distillation and streams against the loop one would write first; scale.",
    "attention": bench_attention,
    "train": bench_train,
    "distill": bench_distill,
    "stream": bench_stream,
    "scale": bench_scale,
}
