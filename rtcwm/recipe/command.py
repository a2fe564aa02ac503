"""`rtcwm recipe`: its flags. The work is in `run.py`, imported when the command runs."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a recipe, as `main_recipe` explains them."""

    out: Path
    seeds: tuple[int, ...]
    ablations: tuple[str, ...]
    jobs: int
    clips: int
    test_clips: int
    chunks: int
    steps: int
    iters: int
    batch: int


def main_recipe(
    out: Path,
    seeds: list[int] | None = None,
    ablations: list[str] | None = None,
    jobs: int = 4,
    clips: int = 56,
    test_clips: int = 8,
    chunks: int = 40,
    steps: int = 800,
    iters: int = 80,
    batch: int = 8,
) -> None:
    """Train, distil and measure on the embedded world for several seeds; a table with spread, a plot, and the goals.

    Args:
        out: folder of all runs. The same command again goes on where it stopped.
        seeds: one whole recipe each, such as [1,2,3], which is the default.
        ablations: variants of the distillation to run as well, such as [clean-history,critic-1] or [all]; critic-1@2
            only with seed 2, all@1 all of them with seed 1.
        jobs: programs that run at the same time, over all cards there are.
        clips: clips of 16 chunks, four an episode; four are held out of training; at least 8.
        test_clips: unseen clips, each of an episode of its own, to measure on.
        chunks: their length, and that of the long streams; at least 14.
        steps: of diffusion forcing.
        iters: of distillation.
        batch: rollouts of an iteration; diffusion forcing takes twice as many spans.
    """
    from rtcwm.recipe.run import run

    run(
        Settings(
            out=out, seeds=tuple(seeds or (1, 2, 3)), ablations=tuple(ablations or ()), jobs=jobs, clips=clips,
            test_clips=test_clips, chunks=chunks, steps=steps, iters=iters, batch=batch,
        )
    )  # fmt: skip
