"""The loop that training and distillation share: resume, steps, skipped steps, records, checkpoints, preemption.

A program says what one step does and what it writes for users; the order of things around it is here, once. The
resumable state is ``state_dict`` and the engines' own; all of it is counters and tensors, since random streams count.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from rtcwm.engine.adapter import AdapterEngine
from rtcwm.engine.average import Average
from rtcwm.engine.checkpoint import Checkpoints
from rtcwm.engine.memory import peak_gib
from rtcwm.engine.world import World
from rtcwm.errors import UserError
from rtcwm.progress import duration
from rtcwm.train.folder import RunFolder
from rtcwm.train.order import EpochSampler
from rtcwm.train.record import Clock, Record

LOG = "train_log.jsonl"


@dataclass(frozen=True)
class Outcome:
    """What a step gave.

    Attributes:
        row: plain numbers for the log; text: its part of the console line.
        skipped: an engine did not step, because a loss or a gradient was not finite.
    """

    row: dict
    text: str
    skipped: bool


class Loop(ABC):
    """A run of ``steps`` steps over named adapter engines.

    Attributes:
        step: steps done, skipped ones included.
        skipped, skips_in_row: steps without an update, in all and since the last good one.
        good: the counters as they were after the last good step; what is saved when the run stops on bad numbers.
    """

    def __init__(
        self,
        world: World,
        folder: RunFolder,
        engines: Mapping[str, AdapterEngine],
        sampler: EpochSampler,
        steps: int,
        save_every: int,
        max_skips: int,
        unit: str = "step",
        averages: Mapping[str, Average] = MappingProxyType({}),
    ):
        self.world, self.folder, self.engines, self.sampler = world, folder, engines, sampler
        self.stateful = {**engines, **averages}
        self.steps, self.save_every, self.max_skips, self.unit = steps, save_every, max_skips, unit
        self.step = self.skipped = self.skips_in_row = 0
        self.checkpoints = Checkpoints(world, folder.path / "state")
        newest = self.checkpoints.newest()
        if newest is not None:
            self.load_state_dict(self.checkpoints.load(self.stateful, newest))
            world.on_main(self.write_adapters)  # a death between the checkpoint and its adapters leaves the latter out
        self.saved = newest
        self._remember_good()
        self.record = Record(folder.path if world.is_main else None, LOG, self.step, self.steps, unit)
        self.clock = Clock()

    @abstractmethod
    def train_step(self) -> Outcome:
        """One step, from drawing samples to the engines' updates; ``self.step`` still counts the steps before it."""

    @abstractmethod
    def evaluate(self) -> dict:
        """Held-out numbers to add to the row of the step just done, or nothing."""

    @abstractmethod
    def write_adapters(self) -> list[str]:
        """Writes the files that users load, on rank 0; returns their names."""

    def run(self) -> None:
        """Goes to the last step, or to the step after a SIGTERM."""
        self.world.hear_signals()
        if self.step >= self.steps:
            self.record.say(
                f"finished already: {self.step} of {self.steps} {self.unit}s; a longer run needs another --out, "
                "from this one's adapters"
            )
        elif self.step:
            self.record.say(
                f"resumed from {self.checkpoints.path(self.step)}: continuing with {self.unit} {self.step + 1}"
            )
        elif start := self.evaluate():
            self.record.row(0, start, f"{self.unit} 0/{self.steps}{describe_held_out(start)}")
        while self.step < self.steps:
            self.clock.restart()
            self._advance()
            if self.world.any(self.world.stop_requested):
                self._save()
                self.record.say(
                    f"stopped by a signal (SIGTERM or SIGINT) after {self.unit} {self.step}; the same command "
                    "continues from there"
                )
                break
        self.record.close()
        if self.step == self.steps and self.skips_in_row:
            raise UserError(
                f"the last {self.skips_in_row} of {self.steps} {self.unit}s had a non-finite loss or gradient: the "
                f"adapters are those of the last good {self.unit}. Lower the learning rate, or start from another "
                "adapter"
            )

    def state_dict(self) -> dict:
        """Everything that resume needs besides the engines."""
        return {
            "step": self.step,
            "steps": self.steps,
            "skipped": self.skipped,
            "skips_in_row": self.skips_in_row,
            "sampler": self.sampler.state_dict(),
        }

    def load_state_dict(self, state: dict) -> None:
        self.step, self.steps = state["step"], state["steps"]
        self.skipped, self.skips_in_row = state["skipped"], state["skips_in_row"]
        self.sampler.load_state_dict(state["sampler"])

    def _advance(self) -> None:
        outcome = self.train_step()
        self.step += 1
        self.skipped += outcome.skipped
        self.skips_in_row = self.skips_in_row + 1 if outcome.skipped else 0
        if not outcome.skipped:
            self._remember_good()
        row = outcome.row | {
            "seconds": round(self.clock.lap(), 4),
            "memory_gib": round(peak_gib(self.world.device), 3),
            "eta_seconds": round(self.clock.left(self.steps - self.step), 1),
            "epoch": self.sampler.epoch,
            "skipped": self.skipped,
        }
        row |= self.evaluate()
        line = (
            f"{self.unit} {self.step}/{self.steps}  {outcome.text}  mem {row['memory_gib']:.2f} GiB  "
            f"{row['seconds']:.2f} s/{self.unit}  ETA {duration(row['eta_seconds'])}{describe_held_out(row)}"
        )
        self.record.row(self.step, row, line, advance=1)
        if self.skips_in_row >= self.max_skips:
            self._stop_on_bad_numbers()
        if self.is_last or self.step % self.save_every == 0:
            self._save()

    @property
    def is_last(self) -> bool:
        return self.step == self.steps

    def _save(self) -> None:
        """One checkpoint, and the adapters as users load them."""
        if not any(self._updates()):
            self.record.say(f"nothing to save after {self.unit} {self.step}: no {self.unit} has made an update yet")
            return
        if self.saved == self.step:
            return
        self.checkpoints.save(self.step, self.stateful, self.state_dict())
        self.saved = self.step
        names = self.world.on_main(self.write_adapters)
        self.record.say(f"saved {self.checkpoints.path(self.step)} and {', '.join(names)}")

    def _remember_good(self) -> None:
        self.good, self.good_updates = self.state_dict(), self._updates()

    def _updates(self) -> list[int]:
        """Optimizer steps that each engine has really made."""
        return [engine.updates for engine in self.engines.values()]

    def _stop_on_bad_numbers(self) -> None:
        """Keeps the last good state on disk and ends the run."""
        last = self.step
        if self._updates() == self.good_updates:
            self.load_state_dict(self.good)  # no engine has moved since
        self._save()
        self.record.close()
        kept = f"The state after {self.unit} {self.step} is on disk" if self.saved else "Nothing was worth saving"
        raise UserError(
            f"{self.max_skips} {self.unit}s in a row had a non-finite loss or gradient ({self.unit}s "
            f"{last - self.max_skips + 1} to {last}). {kept}. Check the clips that they read, lower the "
            "learning rate, or start from another adapter"
        )


def describe_held_out(row: dict) -> str:
    """The held-out loss of a row for the console, or nothing."""
    if "val" not in row:
        return ""
    levels = " ".join(f"{value:.4f}" for value in row["val"]["by_level"])
    return f"  held-out {row['val']['loss']:.5f} (by level {levels})"
