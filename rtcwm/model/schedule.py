"""Noise schedule, solvers and settings of the sampler."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from rtcwm.errors import UserError
from rtcwm.model.masks import Rule, check_rule
from rtcwm.model.objectives import add_noise, shift

History = Literal["last-step", "clean"]
Solver = Literal["renoise", "euler"]


def schedule(steps: int, shift_amount: float) -> Tensor:
    """Noise levels [steps + 1] float32 from 1 to 0: linspace, shifted (4 steps, shift 5: 1, .9375, .8333, .625, 0)."""
    return shift(torch.linspace(1.0, 0.0, steps + 1), shift_amount)


def renoise(clean: Tensor, noise: Tensor, following: Tensor) -> Tensor:
    """Next state of a few-step x0 student: x_next = (1 - sigma_next) x0 + sigma_next eps, eps fresh (consistency
    sampling, Song et al. 2023, algorithm 1)."""
    return add_noise(clean, noise, following)


def euler(state: Tensor, clean: Tensor, sigma: Tensor, following: Tensor) -> Tensor:
    """Next state of the ordinary differential equation: x_next = r x + (1 - r) x0, r = sigma_next / sigma."""
    ratio = following / sigma
    return ratio * state + (1 - ratio) * clean


@dataclass(frozen=True, kw_only=True)
class SamplerConfig:
    """How a stream is sampled; training and inference must agree on all of it.

    Attributes:
        steps, shift: the schedule.
        history: level at which a finished chunk is attended to: "last-step", the schedule's last level above 0 (the
            least noise that the student ever denoised from), or "clean". The first chunk is always clean.
        kv_reuse: keep keys and values of the history, or compute the window's anew for every chunk.
        rule: what proxy rows see (`masks`).
        solver: "renoise" for few-step x0 students, "euler" for models trained by diffusion forcing alone.

    Raises UserError for values that are none of these, and for reuse under a rule that looks ahead.
    """

    steps: int = 4
    shift: float = 5.0
    history: History = "last-step"
    kv_reuse: bool = True
    rule: Rule = "E"
    solver: Solver = "renoise"

    def __post_init__(self) -> None:
        check_rule(self.rule)
        if self.steps < 1 or not 0 < self.shift < math.inf:
            raise UserError(f"a schedule of {self.steps} steps and shift {self.shift}: expected at least 1 and above 0")
        for name, value, known in (("history", self.history, History), ("solver", self.solver, Solver)):
            if value not in get_args(known):
                raise UserError(f"{name} {value!r} is not one of {', '.join(get_args(known))}")
        if self.steps == 1 and self.history == "last-step":
            raise UserError("a schedule of 1 step has no level below pure noise for its history: set history to clean")
        if self.kv_reuse and self.rule == "ahead1":
            raise UserError(
                "rule 'ahead1' cannot reuse keys and values: the proxy of a chunk sees the next one, which has not "
                "arrived when its keys are stored; set kv_reuse to off, or take rule 'E' or 'own'"
            )

    @property
    def sigmas(self) -> Tensor:
        """Noise levels [steps + 1] float32."""
        return schedule(self.steps, self.shift)

    def history_level(self, chunk: int) -> Tensor:
        """Noise level (scalar, float32) at which a finished chunk is attended to."""
        noisy = self.history == "last-step" and chunk > 0
        return self.sigmas[-2] if noisy else torch.zeros(())
