"""The command that trains the embedded base: its settings. What it does is :mod:`rtcwm.train.world_base_recipe`'s."""

import math
import time
from dataclasses import dataclass
from pathlib import Path

from rtcwm.errors import require


@dataclass(frozen=True, kw_only=True)
class WorldBaseConfig:
    """Settings of ``rtcwm world-base``, described there."""

    out: str
    clips: str
    model: str | None
    world_clips: int
    world_chunks: int
    val_clips: int
    steps: int
    adapter_steps: int
    batch: int
    lr: float
    adapter_lr: float
    lr_min: float
    warmup: int
    weight_decay: float
    clip: float
    average: float
    level_shift: float
    foreign_proxy: float
    stale_text: float
    stale_picture: float
    rank: int
    seed: int
    world_seed: int
    log_every: int
    val_every: int
    save_every: int
    val_windows: int
    sample_steps: int
    device: str
    attn: str
    compile: bool
    processes: int | None

    def __post_init__(self):
        for name in ("steps", "adapter_steps", "batch", "rank", "log_every", "save_every", "val_clips", "val_windows"):
            require(getattr(self, name) >= 1, f"--{name} {getattr(self, name)}: expected at least 1")
        for name in ("lr", "adapter_lr", "clip"):
            value = getattr(self, name)
            require(0 < value < math.inf, f"--{name} {value}: expected a positive number")
        require(0 <= self.lr_min <= min(self.lr, self.adapter_lr), f"--lr_min {self.lr_min}: expected 0 to the peaks")
        require(0 <= self.average < 1, f"--average {self.average}: expected a decay in [0, 1)")
        require(self.level_shift >= 1, f"--level_shift {self.level_shift}: expected 1 (none) or more")
        require(0 <= self.foreign_proxy <= 1, f"--foreign_proxy {self.foreign_proxy}: expected a chance in [0, 1]")
        chances = (self.stale_text, self.stale_picture)
        require(
            min(chances) >= 0 and sum(chances) <= 1,
            f"--stale_text and --stale_picture are {chances}: expected chances that add up to at most 1",
        )


def main_world_base(
    out: Path,
    clips: str = "embedded",
    model: str | None = None,
    world_clips: int = 384,
    world_chunks: int = 12,
    val_clips: int = 16,
    steps: int = 2400,
    adapter_steps: int = 600,
    batch: int = 16,
    lr: float = 1e-3,
    adapter_lr: float = 1e-3,
    lr_min: float = 1e-5,
    warmup: int = 100,
    weight_decay: float = 0.01,
    clip: float = 1.0,
    average: float = 0.998,
    level_shift: float = 3.0,
    foreign_proxy: float = 0.5,
    stale_text: float = 0.2,
    stale_picture: float = 0.2,
    rank: int = 32,
    seed: int = 0,
    world_seed: int = 1000,
    log_every: int = 50,
    val_every: int = 300,
    save_every: int = 600,
    val_windows: int = 16,
    sample_steps: int = 20,
    device: str = "auto",
    attn: str = "auto",
    compile: bool = False,
    processes: int | None = None,
) -> None:
    """Train the embedded base and its released adapter on one device.

    Args:
        out: folder of the run; the same command goes on with what a stopped one left.
        clips: folder of clips; 'embedded' makes the embedded world's in the run's folder.
        model: config .json of the base; the shipped one when absent.
        world_clips: clips to make.
        world_chunks: chunks a clip to make (17 frames, 0.708 s each); at least 8.
        val_clips: clips to hold out, by whole episodes.
        steps: optimizer steps of the base.
        adapter_steps: optimizer steps of the adapter.
        batch: windows of 37 latents a step.
        lr: peak learning rate of the base.
        adapter_lr: peak learning rate of the adapter.
        lr_min: learning rate at the end of the cosine.
        warmup: steps of linear warm-up, at most half of a stage's.
        weight_decay: of AdamW, on matrices.
        clip: norm that gradients are clipped to.
        average: decay of the average of the weights, which is what is written.
        level_shift: shift of the noise levels.
        foreign_proxy: share of the base's windows whose proxy is another clip's (one half) or zeros (the other).
        stale_text: share of windows with the text of an earlier start frame and the own first latent as Picture 1.
        stale_picture: share of windows with text and Picture 1 of an earlier start frame.
        rank: of the adapter.
        seed: of everything random but the clips.
        world_seed: names the embedded world; another than the programs' own clips have (0), which stay unseen.
        log_every: steps between lines.
        val_every: steps between held-out losses; 0 for the start and the end alone.
        save_every: steps between saved states.
        val_windows: held-out windows that the losses and samples are of.
        sample_steps: Euler steps of the samples at the end; 0: none.
        device: auto, cpu, cuda or cuda:<index>.
        attn: attention kernel, or auto.
        compile: compile the blocks of the base's stage.
        processes: that make the clips; all cores when absent.
    """
    config = WorldBaseConfig(**locals() | {"out": str(out)})
    from rtcwm.train.world_base_recipe import Recipe  # here, so that the other commands start without these libraries

    began = time.monotonic()
    Recipe(config).run()
    print(f"{time.monotonic() - began:.0f} s in all", flush=True)
