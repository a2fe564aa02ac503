"""What all ranks draw alike for an iteration of distillation: how long the rollout is, and where its chunks stop."""

from dataclasses import dataclass

import torch

from rtcwm.engine.streams import Streams
from rtcwm.train.config import DistillConfig

LATE_SHARE = 0.75
"""Share of chunks that stop at the last step without a draw, under ``--stops late``."""


@dataclass(frozen=True)
class Draws:
    """What all ranks share of one iteration: rollout length and the stopping step of every chunk.

    Stops are uniform over the schedule, or always its last step, or "late": with probability 3/4 the last step, else
    uniform. A stream shows the last step's prediction alone, but a critic learns the mixture that rollouts give it:
    where that holds as many early, blurred predictions as late, sharp ones, it asks late ones to be sharper than the
    teacher's samples are.
    """

    chunks: int
    stops: tuple[int, ...]

    @classmethod
    def of(cls, config: DistillConfig, streams: Streams, iteration: int) -> "Draws":
        generator = streams.shared("rollout", iteration)
        chunks = int(torch.randint(config.min_chunks, config.max_chunks + 1, (), generator=generator))
        last = config.steps - 1
        if config.stops == "last":
            return cls(chunks, (last,) * chunks)
        stops = torch.randint(config.steps, (chunks,), generator=generator)
        if config.stops == "late":
            stops[torch.rand(chunks, generator=generator) < LATE_SHARE] = last
        return cls(chunks, tuple(stops.tolist()))
