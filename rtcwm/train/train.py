"""Diffusion forcing on six-chunk spans: trains one streaming adapter on the frozen, partitioned base.

    deepspeed --num_gpus 2 --module rtcwm.train.train --out runs/a --steps 12

One step: every rank draws the next sample (clip, span) of a permutation common to all, a start frame, a noise level for
every chunk and noise; runs the span under the causal mask with the adapter on; and the adapter engine averages the
gradient over ranks. A visit's own randomness is indexed by its position in the run, so a resumed run, or one on another
number of ranks, sees the same numbers.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from rtcwm import __version__
from rtcwm.engine.adapter import AdapterEngine, Update
from rtcwm.engine.base import BaseEngine
from rtcwm.engine.checkpoint import Checkpoints
from rtcwm.engine.memory import peak_gib, resident_gib
from rtcwm.engine.streams import Streams
from rtcwm.engine.world import World, program
from rtcwm.errors import UserError
from rtcwm.model.adapter_files import load_adapter
from rtcwm.model.attention import install
from rtcwm.model.layout import SPAN_CHUNKS
from rtcwm.model.lora import Adapter
from rtcwm.model.objectives import OBJECTIVES, Levels, weighted_loss
from rtcwm.train.config import TrainConfig, learning_rate, parse
from rtcwm.train.dataset import EpochSampler, draw_start, load_window
from rtcwm.train.folder import RunFolder
from rtcwm.train.preflight import Plan, prepare
from rtcwm.train.record import Clock, Record, duration
from rtcwm.train.span import SpanNoise, span_losses
from rtcwm.train.validation import Grid

LOG = "train_log.jsonl"


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry of ``--module rtcwm.train.train``."""
    with program("rtcwm.train.train") as world:
        config = parse("rtcwm.train.train", TrainConfig, arguments)
        trainer = Trainer(world, config, prepare(world, config))
        trainer.run()


class Trainer:
    """The state of a run and its loop.

    Attributes:
        step: optimizer steps done, skipped ones included.
        skipped, skips_in_row: steps without an update, in all and since the last good one.
        good: the counters as they were after the last good step; what is saved when the run stops on bad numbers.
    """

    def __init__(self, world: World, config: TrainConfig, plan: Plan):
        self.world, self.config, self.plan = world, config, plan
        self.streams = Streams(config.seed)
        self.folder = RunFolder(config.out)
        self.base = BaseEngine(world, plan.source, plan.base_settings)
        install(self.base.model, plan.kernel)
        self.engine = AdapterEngine(world, self._initial_adapter(), plan.adapter_settings)
        self.sampler = EpochSampler(len(plan.samples), world.size, config.seed)
        self.grid = Grid(plan.held_out, self.streams, config.level_shift, config.picture1)
        self.checkpoints = Checkpoints(world, self.folder.path / "state")
        self.run_with_adapter = self.base.activations.runner(self.engine.adapter)
        self.steps = plan.steps
        self.step = self.skipped = self.skips_in_row = 0
        self._resume()
        self.good = self.state_dict()
        self.record = Record(self.folder.path if world.is_main else None, LOG, self.step, self.steps)
        self.clock = Clock()

    def run(self) -> None:
        """Trains to the last step, or to the step after a SIGTERM."""
        self._announce()
        if self.step == 0:
            self._validate_start()
        self.clock.restart()
        while self.step < self.steps:
            self._train_step()
            if self.world.any(self.world.stop_requested):
                self._save()
                self.record.say(f"stopped by SIGTERM after step {self.step}; the same command continues from there")
                break
        self.record.close()

    def state_dict(self) -> dict:
        """Everything that resume needs besides the engine: counters alone, since all random streams count by them."""
        return {
            "step": self.step,
            "steps": self.steps,
            "skipped": self.skipped,
            "skips_in_row": self.skips_in_row,
            "seed": self.streams.seed,
            "sampler": self.sampler.state_dict(),
        }

    def load_state_dict(self, state: dict) -> None:
        self.step, self.steps = state["step"], state["steps"]
        self.skipped, self.skips_in_row = state["skipped"], state["skips_in_row"]
        self.sampler.load_state_dict(state["sampler"])

    def _train_step(self) -> None:
        losses = [self._forward_backward() for _ in range(self.engine.accumulation)]
        if self.step == 0 or not self.clock.seconds:
            self._announce_offload()
        lr = learning_rate(self.step, self.steps, self.config.lr, self.config.lr_min, self.config.warmup)
        update = self.engine.step(lr)
        loss = self.world.mean(torch.stack(losses).mean()).item()
        self.step += 1
        self._count(update)
        seconds = self.clock.lap()
        row = self._row(loss, update, lr, seconds)
        last = self.step == self.steps
        if last or (self.config.val_every and self.step % self.config.val_every == 0):
            row |= self._validate()
        self.record.row(self.step, row, self._line(row, loss), advance=1)
        if self.skips_in_row >= self.config.max_skips:
            self._stop_on_bad_numbers()
        if last or self.step % self.config.save_every == 0:
            self._save()
        self.clock.restart()

    def _forward_backward(self) -> torch.Tensor:
        """One micro-step: a sample's loss and its gradient. Returns the loss, detached."""
        visit = self.sampler.next(self.world.rank)
        clip, first = self.plan.samples[visit.sample]
        start = draw_start(clip, first, self.streams.own("start frame", visit.position))
        window = load_window(clip, first, start, picture1=self.config.picture1).to(self.world.device)
        noise = SpanNoise.draw(window, self.streams.own("noise", visit.position))
        levels = self._levels(visit.position, at_start=first == start)
        losses = self._span_losses(window, noise, levels.sigma.to(self.world.device))
        loss = weighted_loss(losses, levels.weight.to(self.world.device))
        self.engine.backward(loss)
        self.base.finish_backward()
        return loss.detach()

    def _levels(self, position: int, at_start: bool) -> Levels:
        levels = OBJECTIVES[self.config.objective](
            SPAN_CHUNKS, self.config.level_shift, self.streams.own("levels", position)
        )
        if not (self.config.clean_first and at_start):
            return levels
        sigma, weight = levels.sigma.clone(), levels.weight.clone()
        sigma[0] = weight[0] = 0
        # Teacher forcing may have drawn chunk 0 as the only one it learns; then chunk 1 is learnt in its place.
        if not weight.any():
            weight[1], sigma[1] = 1.0, levels.sigma[0]
        return replace(levels, sigma=sigma, weight=weight)

    def _span_losses(self, window, noise: SpanNoise, sigma: torch.Tensor) -> torch.Tensor:
        return span_losses(
            self.base.model, window, noise, sigma, self.plan.kernel, self.config.mask_rule, self.run_with_adapter
        )

    def _count(self, update: Update) -> None:
        self.skipped += update.skipped
        self.skips_in_row = self.skips_in_row + 1 if update.skipped else 0
        if not update.skipped:
            self.good = self.state_dict()

    def _stop_on_bad_numbers(self) -> None:
        """Keeps the last good state on disk and ends the run."""
        bad_since, step = self.good["step"], self.step
        self.load_state_dict(self.good)
        if self.step and self.step != self.checkpoints.newest():
            self._save()
        self.record.close()
        raise UserError(
            f"{self.config.max_skips} steps in a row had a non-finite loss or gradient (steps {bad_since + 1} to {step}). "
            f"The state after step {bad_since} is on disk. Check the clips that these steps read, lower --lr, or start "
            "from another adapter"
        )

    def _validate_start(self) -> None:
        row = self._validate()
        if row:
            self.record.row(0, row, f"step 0/{self.steps}" + self._validation_text(row))

    def _validate(self) -> dict:
        if not self.grid.cells:
            return {}
        return {"val": self.grid.evaluate(self.world, self._span_losses)}

    def _save(self) -> None:
        """One checkpoint, and the adapter as users load it."""
        self.world.on_main(self._write_adapter)
        self.checkpoints.save(self.step, {"adapter": self.engine}, self.state_dict())
        self.record.say(f"saved {self.checkpoints.path(self.step)} and {self._adapter_name()}")

    def _adapter_name(self) -> str:
        return f"lora_step{self.step:05d}.safetensors"

    def _write_adapter(self) -> None:
        self.folder.write_adapter(self._adapter_name(), self.engine.adapter, self.plan.source.config, self._metadata())

    def _metadata(self) -> dict[str, str]:
        config, plan = self.config, self.plan
        values = {
            "rtcwm": __version__, "base": plan.source.fingerprint, "base_description": plan.source.description,
            "step": self.step, "objective": config.objective, "shift": config.level_shift, "steps": "any",
            "history_level": "any", "span": SPAN_CHUNKS, "mask_rule": config.mask_rule, "text_time": "pinned",
            "clean_first": config.clean_first, "picture1": config.picture1, "codec": plan.codec_hash, "seed": config.seed,
        }  # fmt: skip
        return {key: str(value) for key, value in values.items()}

    def _initial_adapter(self) -> Adapter:
        if self.config.init_lora is None:
            return Adapter(self.plan.adapter_shape, self.config.seed)
        return self.world.on_all(lambda: load_adapter(self.config.init_lora, self.plan.source.config))

    def _resume(self) -> None:
        step = self.checkpoints.newest()
        if step is not None:
            self.load_state_dict(self.checkpoints.load({"adapter": self.engine}, step))
            self.world.print(f"resumed from {self.checkpoints.path(step)}")

    def _announce(self) -> None:
        for line in self.plan.lines(self.base.shard_group):
            self.record.say(line)
        self.record.say(f"memory after sharding: {resident_gib(self.world.device):.2f} GiB on rank 0")
        if self.step >= self.steps:
            self.record.say(f"finished already: {self.step} of {self.steps} steps; a longer run needs another --out")
        elif self.step:
            self.record.say(f"continuing with step {self.step + 1} of {self.steps}")

    def _announce_offload(self) -> None:
        activations = self.base.activations
        if activations.settings.cpu_checkpointing:
            moved = activations.offloaded_bytes
            if not moved:
                raise UserError("cpu_checkpointing is on and moved nothing to host memory: no block input was kept")
            self.record.say(f"activation offload: {moved:,} bytes of block inputs went to host memory in this step")

    def _row(self, loss: float, update: Update, lr: float, seconds: float) -> dict:
        return {
            "loss": finite_or_none(loss),
            "grad_norm": finite_or_none(update.grad_norm),
            "lr": lr,
            "seconds": round(seconds, 4),
            "memory_gib": round(peak_gib(self.world.device), 3),
            "eta_seconds": round(self.clock.left(self.steps - self.step), 1),
            "epoch": self.sampler.epoch,
            "skipped": self.skipped,
        }

    def _line(self, row: dict, loss: float) -> str:
        norm = "skipped (non-finite)" if row["grad_norm"] is None else f"{row['grad_norm']:.4f}"
        return (
            f"step {self.step}/{self.steps}  loss {loss:.5f}  |grad| {norm}  lr {row['lr']:.2e}  "
            f"mem {row['memory_gib']:.2f} GiB  {row['seconds']:.2f} s/step  ETA {duration(row['eta_seconds'])}"
            + self._validation_text(row)
        )

    @staticmethod
    def _validation_text(row: dict) -> str:
        if "val" not in row:
            return ""
        levels = " ".join(f"{value:.4f}" for value in row["val"]["by_level"])
        return f"  held-out {row['val']['loss']:.5f} (by level {levels})"


def finite_or_none(value: float) -> float | None:
    """JSON has no infinities."""
    return value if math.isfinite(value) else None


if __name__ == "__main__":
    main()
