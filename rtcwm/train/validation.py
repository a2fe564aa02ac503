"""Held-out loss on a fixed grid: clips x span positions x noise levels, and chunk slots within a span.

Every cell has noise of its own, drawn from the run's seed and the cell's index, and cells are dealt out to the ranks
and put together again in one order, so the figure does not depend on the number of ranks. Ranks with fewer cells than
others repeat one: all run the same number of forwards.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rtcwm.data.clips import Clip
from rtcwm.engine.streams import Streams
from rtcwm.engine.world import World
from rtcwm.model.layout import SPAN_CHUNKS
from rtcwm.model.objectives import on_grid, shift
from rtcwm.train.dataset import draw_start, load_window, spans
from rtcwm.train.span import SpanNoise

UNIFORM_LEVELS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Levels before the shift: the quantiles of what training draws."""

POSITIONS = 2
"""Span positions a clip: its first span and one of its last half."""


@dataclass(frozen=True)
class Cell:
    """One forward of the grid: span ``first`` of a clip with start frame ``start``, all chunks at ``sigma``."""

    clip: Clip
    first: int
    start: int
    sigma: float


class Grid:
    """The held-out grid of a run.

    Args:
        clips: held-out clips; those without a usable span are passed over.
        picture1: as the run's setting; grid: of its noise levels, as `Inputs.grid`.
    """

    def __init__(
        self, clips: Sequence[Clip], streams: Streams, level_shift: float, picture1: str, grid: int | None = None
    ):
        self.streams = streams
        self.picture1 = picture1
        levels = on_grid(shift(torch.tensor(UNIFORM_LEVELS), level_shift), grid).tolist()
        self.cells: list[Cell] = []
        for clip in clips:
            firsts = spans(clip)
            chosen = sorted({firsts[0], firsts[(3 * len(firsts)) // 4]}) if firsts else []
            for first in chosen[:POSITIONS]:
                start = draw_start(clip, first, streams.own("validation start", len(self.cells)))
                self.cells += [Cell(clip, first, start, sigma) for sigma in levels]

    def evaluate(self, world: World, losses: Callable[..., torch.Tensor]) -> dict:
        """Runs the grid; a collective.

        Args:
            losses: ``(window, noise, sigma [chunks]) -> [chunks]``, as `span_losses` with all else bound.

        Returns:
            Plain numbers: ``loss`` (mean over the grid), ``by_level`` (a list, from low to high noise) and ``by_slot``
            (mean over the grid for every chunk of the span).
        """
        share = -(-len(self.cells) // world.size)
        mine = []
        for turn in range(share):
            index = min(turn * world.size + world.rank, len(self.cells) - 1)
            cell = self.cells[index]
            window = load_window(cell.clip, cell.first, cell.start, picture1=self.picture1).to(world.device)
            noise = SpanNoise.draw(window, self.streams.own("validation noise", index))
            sigma = torch.full((SPAN_CHUNKS,), cell.sigma)
            with torch.no_grad():
                mine.append((index, losses(window, noise, sigma).tolist()))
        results = dict(entry for entries in world.gather(mine) for entry in entries)
        table = torch.tensor([results[index] for index in range(len(self.cells))], dtype=torch.float64)
        by_level = table.view(-1, len(UNIFORM_LEVELS), SPAN_CHUNKS).mean(dim=(0, 2))
        return {
            "loss": table.mean().item(),
            "by_level": by_level.tolist(),
            "by_slot": table.mean(dim=0).tolist(),
        }
