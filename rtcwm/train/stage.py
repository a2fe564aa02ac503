"""A small training in plain torch on one device: AdamW, a cosine, an average of the weights, and exact resume.

Everything random of a step is named by the step's number, so the state of a stage is its weights, their average, the
optimizer's moments and the number of steps done. It is written aside and renamed; a stage that was killed goes on from
the last one and ends, on the CPU bit for bit, where it would have ended.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from rtcwm.engine.checkpoint import replace_file
from rtcwm.errors import UserError
from rtcwm.progress import duration
from rtcwm.train.config import learning_rate
from rtcwm.train.record import Record

AVERAGE_WARMUP = 10  # the average of n steps forgets with (1 + n) / (10 + n) until that reaches its decay
STATE = "state.pt"


@dataclass(frozen=True, kw_only=True)
class StageSettings:
    """How one stage trains.

    `lr` to `lr_min` by a cosine after `warmup` steps; weight decay on matrices alone; gradients clipped to norm `clip`;
    `average` is the decay of the weights' average a step; intervals are in steps.
    """

    steps: int
    lr: float
    lr_min: float
    warmup: int
    weight_decay: float
    clip: float
    average: float
    log_every: int
    val_every: int
    save_every: int


class Stage:
    """Trains the parameters of a module that want a gradient.

    Args:
        folder: of this stage's log, events and state.
        loss: mean loss of step k (0, 1, ...), a scalar with a graph; draws all that is random from k.
        held_out: losses on held-out data with the weights as they stand; called with the average in their place.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        settings: StageSettings,
        trained: nn.Module,
        loss: Callable[[int], Tensor],
        held_out: Callable[[], dict[str, float]],
    ):
        self.name, self.folder, self.settings = name, folder, settings
        self.loss, self.held_out = loss, held_out
        self.weights = {key: weight for key, weight in trained.named_parameters() if weight.requires_grad}
        self.average = {key: weight.detach().clone() for key, weight in self.weights.items()}
        matrices = [weight for weight in self.weights.values() if weight.ndim > 1]
        others = [weight for weight in self.weights.values() if weight.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": settings.weight_decay}]
        groups += [{"params": others, "weight_decay": 0.0}] if others else []
        fused = next(iter(self.weights.values())).is_cuda
        self.optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.999), fused=fused)
        self.step, self.seconds = 0, 0.0
        self.history: list[dict] = []

    def train(self) -> None:
        """Trains from the last saved state, or from the beginning, to the last step.

        Raises:
            UserError: the loss is no longer finite, or the disk refused.
        """
        self._resume()
        self.folder.mkdir(parents=True, exist_ok=True)
        steps = self.settings.steps
        if self.step >= steps:
            return
        record = Record(self.folder, "train_log.jsonl", self.step, steps)
        count = sum(weight.numel() for weight in self.weights.values())
        record.say(f"{self.name}: {steps} steps, {self.step} done, {count:,} weights")
        try:
            if self.step == 0:
                self._validate(record)
            self._loop(record)
        finally:
            record.close()

    def _loop(self, record: Record) -> None:
        settings, first, before = self.settings, self.step, self.seconds
        began, recent = time.perf_counter(), []
        while self.step < settings.steps:
            recent.append(self._advance())
            every = {"log": settings.log_every, "val": settings.val_every, "save": settings.save_every}
            last = self.step == settings.steps
            due = {name: last or (steps > 0 and self.step % steps == 0) for name, steps in every.items()}
            if due["log"] or due["save"]:
                self._require_finite(recent[-1].item())
                self.seconds = before + time.perf_counter() - began
            if due["log"]:
                self._log(record, torch.stack(recent), (self.seconds - before) / (self.step - first))
                recent.clear()
            if due["val"]:
                self._validate(record)
            if due["save"]:
                replace_file(self.folder / STATE, lambda path: torch.save(self._state(), path))

    def _require_finite(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise UserError(
                f"{self.name}: the loss is {loss} at step {self.step}: start again in another --out with a learning "
                f"rate below {self.settings.lr}"
            )

    def _log(self, record: Record, losses: Tensor, seconds: float) -> None:
        """One line for the steps since the last one."""
        mean, rate, steps = losses.mean().item(), self.optimizer.param_groups[0]["lr"], self.settings.steps
        row = {"loss": mean, "lr": rate, "seconds": round(self.seconds, 1)}
        left = duration(seconds * (steps - self.step))
        line = f"{self.name} {self.step}/{steps}: loss {mean:.4f}, lr {rate:.1e}, {seconds:.3f} s a step, {left} left"
        record.row(self.step, row, line, advance=len(losses))

    def _advance(self) -> Tensor:
        """One optimizer step; returns its loss, detached and still on the device."""
        settings = self.settings
        rate = learning_rate(self.step, settings.steps, settings.lr, settings.lr_min, settings.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self.loss(self.step)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.weights.values(), settings.clip)
        self.optimizer.step()
        decay = min(settings.average, (1 + self.step) / (AVERAGE_WARMUP + self.step))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.values()), list(self.weights.values()), 1 - decay)
        self.step += 1
        return loss.detach()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Puts the average in the place of the weights, and the weights back."""
        weights, average = list(self.weights.values()), list(self.average.values())
        with torch.no_grad():
            kept = [weight.clone() for weight in weights]
            torch._foreach_copy_(weights, average)
            try:
                yield
            finally:
                torch._foreach_copy_(weights, kept)

    def _validate(self, record: Record) -> None:
        with self.averaged():
            losses = self.held_out()
        self.history.append({"step": self.step, **losses})
        told = ", ".join(f"{key} {value:.4f}" for key, value in losses.items() if "/" not in key)
        record.row(self.step, {"held_out": losses}, f"{self.name} {self.step}: held-out loss: {told}")

    def _state(self) -> dict:
        return {
            "step": self.step, "seconds": self.seconds, "history": self.history, "average": self.average,
            "weights": {key: weight.detach() for key, weight in self.weights.items()},
            "optimizer": self.optimizer.state_dict(),
        }  # fmt: skip

    def _resume(self) -> None:
        path = self.folder / STATE
        if not path.is_file():
            return
        device = next(iter(self.weights.values())).device
        state = torch.load(path, map_location=device, weights_only=True)
        with torch.no_grad():
            for kept, saved in ((self.weights, state["weights"]), (self.average, state["average"])):
                for key, tensor in kept.items():
                    tensor.copy_(saved[key])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds, self.history = state["step"], state["seconds"], state["history"]
