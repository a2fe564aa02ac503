"""Diffusion forcing on six-chunk spans: trains one streaming adapter on the frozen, partitioned base.

    deepspeed --num_gpus 2 --module rtcwm.train.train --out runs/a --steps 12

One step: every rank draws the next sample (clip, span) of a permutation common to all, a start frame, a noise level for
every chunk and noise; runs the span under the causal mask with the adapter on; and the adapter engine averages the
gradient over ranks. A visit's own randomness is indexed by its position in the run, so a resumed run, or one on another
number of ranks, sees the same numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from rtcwm.engine.adapter import AdapterEngine
from rtcwm.engine.memory import resident_gib
from rtcwm.engine.streams import Streams
from rtcwm.engine.world import World, program
from rtcwm.model.layout import SPAN_CHUNKS
from rtcwm.model.objectives import OBJECTIVES, Levels, keep_first_clean, on_grid, weighted_loss
from rtcwm.model.packing import Window
from rtcwm.train.config import TrainConfig, learning_rate, parse
from rtcwm.train.dataset import EpochSampler, draw_start, load_window
from rtcwm.train.folder import RunFolder
from rtcwm.train.loop import Loop, Outcome
from rtcwm.train.order import Visit
from rtcwm.train.record import finite_or_none
from rtcwm.train.span import SpanNoise, span_losses, stack
from rtcwm.train.train_plan import TrainPlan, prepare
from rtcwm.train.validation import Grid


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry of ``--module rtcwm.train.train``."""
    with program("rtcwm.train.train") as world:
        config = parse("rtcwm.train.train", TrainConfig, arguments)
        Trainer(world, config, prepare(world, config)).run()


class Trainer(Loop):
    """Diffusion forcing (or another objective of the registry) of one adapter."""

    def __init__(self, world: World, config: TrainConfig, plan: TrainPlan):
        self.config, self.plan = config, plan
        self.streams = Streams(config.seed)
        inputs = plan.inputs
        self.base = inputs.open_base(config, levels=torch.empty(0))
        self.engine = AdapterEngine(world, plan.initial_adapter(), plan.adapter_settings)
        self.run_with_adapter = self.base.activations.runner(self.engine.adapter)
        self.grid = Grid(plan.held_out, self.streams, config.level_shift, config.picture1, inputs.grid)
        sampler = EpochSampler(len(plan.samples), world.size, config.seed)
        folder = RunFolder(config.out)
        super().__init__(
            world, folder, {"adapter": self.engine}, sampler, plan.steps, config.save_every, config.max_skips
        )
        for line in plan.lines(self.steps):
            self.record.say(line)
        self.record.say(f"memory after sharding: {resident_gib(world.device):.2f} GiB on rank 0")

    def train_step(self) -> Outcome:
        losses = [self._forward_backward() for _ in range(self.engine.accumulation)]
        if line := self.base.activations.report_once():
            self.record.say(line)
        lr = learning_rate(self.step, self.steps, self.config.lr, self.config.lr_min, self.config.warmup)
        update = self.engine.step(lr)
        loss = self.world.mean(torch.stack(losses).mean()).item()
        row = {"loss": finite_or_none(loss), "grad_norm": finite_or_none(update.grad_norm), "lr": lr}
        norm = "skipped (non-finite)" if update.skipped else f"{update.grad_norm:.4f}"
        return Outcome(row, f"loss {loss:.5f}  |grad| {norm}  lr {lr:.2e}", update.skipped)

    def evaluate(self) -> dict:
        every = self.config.val_every
        due = self.step == 0 or self.is_last or (every and self.step % every == 0)
        return {"val": self.grid.evaluate(self.world, self._span_losses)} if due and self.grid.cells else {}

    def write_adapters(self) -> list[str]:
        name = f"lora_step{self.step:05d}.safetensors"
        metadata = self.plan.metadata() | {"step": str(self.step)}
        self.folder.write_adapter(name, self.engine.adapter, self.plan.inputs.source.config, metadata)
        return [name]

    def _forward_backward(self) -> torch.Tensor:
        """One micro-step: the loss of a batch of samples and its gradient. Returns the loss, detached."""
        batch = draw_batch(
            self.plan, self.streams, [self.sampler.next(self.world.rank) for _ in range(self.config.batch)]
        )
        window, noise = batch.window.to(self.world.device), batch.noise.to(self.world.device)
        losses = self._span_losses(window, noise, batch.levels.sigma)
        loss = weighted_loss(losses, batch.levels.weight.to(self.world.device))
        self.engine.backward(loss)
        self.base.finish_backward()
        return loss.detach()

    def _span_losses(self, window: Window, noise: SpanNoise, sigma: torch.Tensor) -> torch.Tensor:
        return span_losses(
            self.base.model, window, noise, sigma, self.plan.inputs.kernel, self.config.mask_rule, self.run_with_adapter
        )


@dataclass(frozen=True)
class Batch:
    """What one micro-step learns from, on the CPU: clean windows of one layout, their noise, the levels they share."""

    window: Window
    noise: SpanNoise
    levels: Levels


def draw_batch(plan: TrainPlan, streams: Streams, visits: Sequence[Visit]) -> Batch:
    """Loads the samples of these visits and draws all that is random of them, by their positions in the run."""
    config, windows, at_start = plan.config, [], True
    for visit in visits:
        clip, first = plan.samples[visit.sample]
        start = draw_start(clip, first, streams.own("start frame", visit.position))
        windows.append(load_window(clip, first, start, picture1=config.picture1))
        at_start &= first == start
    window = stack(windows)
    noise = SpanNoise.draw(window, *(streams.own("noise", visit.position) for visit in visits))
    # A packed layout has one time a row, whatever the batch.
    levels = OBJECTIVES[config.objective](SPAN_CHUNKS, config.level_shift, streams.own("levels", visits[0].position))
    levels = replace(levels, sigma=on_grid(levels.sigma, plan.inputs.grid))
    return Batch(window, noise, keep_first_clean(levels) if config.clean_first and at_start else levels)


if __name__ == "__main__":
    main()
