"""`rtcwm bench train`: one step of diffusion forcing, the obvious loop against the real training program.

Our side is `rtcwm.train.train.Trainer` with its plan, engines and data loading, as `python -m rtcwm.train.train` would
make it from the same flags. The obvious loop (`plain`) reads the same clip, with the same noise, levels and initial
adapter. Both make the same updates, so their losses have to agree; a speed-up of something else is an error.
"""

from rtcwm.bench import measure, profile, report
from rtcwm.bench.command import TrainBench
from rtcwm.bench.inputs import Case, Files, rank_files, shared_settings
from rtcwm.bench.plain import optimizer_of, span_loss, update
from rtcwm.bench.sides import Did, Plan, Runner, compare, plain_base, run_both, sized_case, summary
from rtcwm.bench.work import WHOLE_BLOCKS, span_pairs
from rtcwm.engine.streams import Streams
from rtcwm.engine.world import World, program
from rtcwm.errors import UserError
from rtcwm.model.layout import SPAN_CHUNKS
from rtcwm.train.config import TrainConfig, learning_rate
from rtcwm.train.order import EpochSampler
from rtcwm.train.train import Trainer, draw_batch
from rtcwm.train.train_plan import TrainPlan, prepare

ROUNDING = {"cuda": 0.01, "cpu": 1e-4}
"""Largest relative difference of the first losses."""


def bench(settings: TrainBench) -> None:
    """Runs the sides that were asked for, prints a table and writes the JSON file."""
    with program("rtcwm bench train") as world:
        case = sized_case(world, settings)
        with rank_files(world, case, SPAN_CHUNKS, settings.seed) as made:
            result = measured(world, settings, case, prepare(world, train_config(settings, case, made)))
        world.on_main(lambda: report.write(settings.out, result))
        compare(world.device, result, "loss", ROUNDING)


def train_config(settings: TrainBench, case: Case, made: Files) -> TrainConfig:
    """The settings of the training program that the flags stand for."""
    return TrainConfig(
        rank=case.rank, steps=settings.warmup + settings.steps + 1, val_every=0,
        adapter_config=settings.adapter_config, **shared_settings(settings, made),
    )  # fmt: skip


def measured(world: World, settings: TrainBench, case: Case, plan: TrainPlan) -> dict:
    """All that the JSON file holds."""
    if plan.adapter_settings.accumulation != 1:
        raise UserError(
            "--adapter-config: a step of the benchmark is one micro-step; set gradient_accumulation_steps 1"
        )
    rows, pairs = case.layout.rows, span_pairs(case.layout, plan.config.mask_rule)
    result = report.opening("train", settings, case.as_dict() | {"pairs": pairs}, world)
    result["ceilings"] = measure.ceilings(world.device)
    world.print(f"{report.versions_line(result['machine'])}\n{case.line()}")
    needed = case.sizes.trained(rows, pairs) * settings.batch
    result["work"] = {"forward": vars(case.sizes.forward(rows, pairs) * settings.batch), "needed": vars(needed)}
    repeated = {"plain": WHOLE_BLOCKS, "ours": case.sizes.repeated(plan.inputs.base_settings.activations)}
    starts = {"plain": lambda: PlainTraining(world, plan), "ours": lambda: OurTraining(world, plan)}
    plans = {
        name: Plan(start, {"step": needed}, {"step": case.sizes.trained(rows, pairs, repeated[name]) * settings.batch})
        for name, start in starts.items()
    }
    result["sides"] = run_both(world, settings, plans, result["ceilings"])
    result |= summary(result["sides"])
    world.print(report.comparison(result))
    profile.finish(world, settings.profile, result["sides"])
    return result


class OurTraining(Runner):
    """The real program, one step at a time."""

    def __init__(self, world: World, plan: TrainPlan):
        self.trainer = Trainer(world, plan.config, plan)
        self.base = self.trainer.base

    def step(self) -> Did:
        outcome = self.trainer.train_step()
        self.trainer.step += 1
        return Did({key: outcome.row[key] for key in ("loss", "grad_norm")})


class PlainTraining(Runner):
    """The obvious loop over the same samples, noise and learning rates."""

    def __init__(self, world: World, plan: TrainPlan):
        self.world, self.plan, self.done = world, plan, 0
        self.model = plain_base(world, plan.inputs.source)
        self.adapter = plan.initial_adapter().to(world.device)
        self.optimizer = optimizer_of(self.adapter, plan.adapter_settings.deepspeed["optimizer"]["params"])
        self.streams = Streams(plan.config.seed)
        self.sampler = EpochSampler(len(plan.samples), world.size, plan.config.seed)

    def step(self) -> Did:
        plan, config, device = self.plan, self.plan.config, self.world.device
        visits = [self.sampler.next(self.world.rank) for _ in range(config.batch)]
        batch = draw_batch(plan, self.streams, visits)
        window, noise = batch.window.to(device), batch.noise.to(device)
        sigma, weight = batch.levels.sigma.to(device), batch.levels.weight.to(device)
        noises = (noise.video, noise.proxy, noise.picture1)
        loss = span_loss(self.model, self.adapter, config.mask_rule, window, noises, sigma, weight)
        lr = learning_rate(self.done, plan.steps, config.lr, config.lr_min, config.warmup)
        norm = update(self.adapter, self.optimizer, loss, lr, plan.adapter_settings.clipping)
        self.done += 1
        return Did({"loss": loss.item(), "grad_norm": norm})
