"""The order in which ranks visit samples.

Every epoch is one permutation of the samples, common to all ranks and drawn from (seed, epoch). The ranks take its
places in turn, so each sample is visited once an epoch by exactly one rank; where the ranks do not divide the samples,
the last step's missing places wrap to the permutation's beginning. The whole state is one number: how many places have
been taken. It does not depend on the number of ranks, so a run resumes on another number of them.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from rtcwm.errors import UserError


class Visit(NamedTuple):
    """One sample's turn: its epoch, its `position` and the index of the sample.

    `position` numbers visits over the whole run whatever the number of ranks: callers seed a visit's noise from it. It
    is `2 * samples * epoch + place`; the wrapped places of an epoch lie in the second half of its numbers, so that a
    wrapped sample gets other noise than at its own place.
    """

    epoch: int
    position: int
    sample: int


class EpochSampler:
    """Hands each rank its next sample. All ranks advance together: one :meth:`next` a rank and step."""

    def __init__(self, samples: int, ranks: int, seed: int) -> None:
        """`samples` to visit, `ranks` that share them, `seed` of the permutations.

        Raises:
            UserError: fewer samples than ranks.
        """
        if samples < ranks:
            raise UserError(
                f"{samples} training samples cannot be shared by {ranks} ranks: every rank needs one a step; "
                "use fewer GPUs, more clips, or fewer held-out clips"
            )
        self.samples, self.ranks, self.seed = samples, ranks, seed
        self.cursor = 0  # places taken so far, wrapped ones not counted

    @property
    def epoch(self) -> int:
        """Epoch of the next visit."""
        return self.cursor // self.samples

    def next(self, rank: int) -> Visit:
        """The visit of `rank` in this step; moves on to the next step."""
        epoch, taken = divmod(self.cursor, self.samples)
        place = taken + rank
        order = permutation(self.samples, self.seed, epoch)
        self.cursor = min(self.cursor + self.ranks, (epoch + 1) * self.samples)
        return Visit(epoch, 2 * self.samples * epoch + place, int(order[place % self.samples]))

    def state_dict(self) -> dict[str, int]:
        """What resuming needs; equal on all ranks."""
        return {"cursor": self.cursor, "samples": self.samples, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where `state` stopped, on any number of ranks.

        Raises:
            UserError: the state belongs to another set of samples or another seed.
        """
        for name in ("samples", "seed"):
            if state[name] != getattr(self, name):
                raise UserError(
                    f"the saved run had {name} = {state[name]}, this one has {getattr(self, name)}: resume with "
                    "the same clips, --val-clips and --seed, or start a new run"
                )
        self.cursor = state["cursor"]


@lru_cache(maxsize=4)
def permutation(samples: int, seed: int, epoch: int) -> np.ndarray:
    """Order of the samples in one epoch, `[samples]`."""
    return np.random.default_rng([seed, 12, epoch]).permutation(samples)
