"""`rtcwm bench train`: one step of diffusion forcing, the obvious loop against the real training program.

Our side is `rtcwm.train.train.Trainer` with its plan, engines and data loading, as `python -m rtcwm.train.train` would
make it from the same flags. The obvious loop (`plain`) reads the same clip, with the same noise, levels and initial
adapter. Both make the same updates, so their losses have to agree; a speed-up of something else is an error.
"""

from collections.abc import Callable

from rtcwm.bench import measure, profile, report
from rtcwm.bench.command import TrainBench
from rtcwm.bench.inputs import Case, Files, files
from rtcwm.bench.plain import PlainModel, optimizer_of, span_loss, update
from rtcwm.bench.sides import Side, compare, plain_base, run_side, summary
from rtcwm.bench.work import WHOLE_BLOCKS, span_pairs
from rtcwm.engine.streams import Streams
from rtcwm.engine.world import World, program
from rtcwm.errors import UserError
from rtcwm.model.layout import SPAN_CHUNKS
from rtcwm.train.config import TrainConfig, learning_rate
from rtcwm.train.order import EpochSampler
from rtcwm.train.train import Trainer, draw_batch
from rtcwm.train.train_plan import TrainPlan, prepare

Step = Callable[[], dict[str, float]]
"""One optimizer step; returns its loss and the norm of its gradient."""


def bench(settings: TrainBench) -> None:
    """Runs the sides that were asked for, prints a table and writes the JSON file."""
    with program("rtcwm bench train") as world:
        case = Case.of(settings)
        with files(case, SPAN_CHUNKS, settings.seed) as made:
            plan = prepare(world, train_config(settings, case, made))
            result = measured(world, settings, case, plan)
        world.on_main(lambda: report.write(settings.out, result))
        compare(world.device, result)


def train_config(settings: TrainBench, case: Case, made: Files) -> TrainConfig:
    """The settings of the training program that the flags stand for."""
    return TrainConfig(
        out=str(made.run), clips=str(made.clips), base=str(made.base), rank=case.rank, val_clips=0, val_every=0,
        steps=settings.warmup + settings.steps + 1, seed=settings.seed, attn=settings.attn, batch=settings.batch,
        base_config=settings.base_config, adapter_config=settings.adapter_config,
    )  # fmt: skip


def measured(world: World, settings: TrainBench, case: Case, plan: TrainPlan) -> dict:
    """All that the JSON file holds."""
    if plan.adapter_settings.accumulation != 1:
        raise UserError(
            "--adapter-config: a step of the benchmark is one micro-step; set gradient_accumulation_steps 1"
        )
    device, rows, pairs = world.device, case.layout.rows, span_pairs(case.layout, plan.config.mask_rule)
    needed = case.sizes.trained(rows, pairs) * settings.batch
    result = report.opening("train", settings, case.as_dict() | {"pairs": pairs}, device)
    result["ceilings"] = measure.ceilings(device)
    result["work"] = {
        "forward": vars(case.sizes.forward(rows, pairs) * settings.batch), "needed": vars(needed),
    }  # fmt: skip
    world.print(f"{report.versions_line(result['machine'])}\n{case.line()}")
    repeated = {"plain": WHOLE_BLOCKS, "ours": case.sizes.repeated(plan.inputs.base_settings.activations)}
    starts = {"plain": lambda: plain_step(world, plan), "ours": lambda: our_step(world, plan)}
    sides: dict[str, Side] = {}
    for name in settings.chosen:
        world.print(f"{name}: {settings.warmup} + {settings.steps} steps")
        done = case.sizes.trained(rows, pairs, repeated[name]) * settings.batch
        sides[name] = run_side(world, name, starts[name], settings, needed, done)
    result["sides"] = {name: side.as_dict(result["ceilings"]) for name, side in sides.items()}
    result |= summary(result["sides"])
    world.print(step_table(result))
    for name, side in sides.items():
        if side.kernels:
            world.print(
                f"\n{name}, one step by kernel class (all of it in {settings.profile})\n{side.kernels.classes()}"
            )
    if settings.profile:
        world.on_main(lambda: profile.write(settings.profile, {name: side.kernels for name, side in sides.items()}))
    return result


def our_step(world: World, plan: TrainPlan) -> Step:
    """The real program, one step at a time."""
    trainer = Trainer(world, plan.config, plan)

    def step() -> dict[str, float]:
        outcome = trainer.train_step()
        trainer.step += 1
        return {key: outcome.row[key] for key in ("loss", "grad_norm")}

    return step


def plain_step(world: World, plan: TrainPlan) -> Step:
    """The obvious loop over the same samples, noise and learning rates."""
    config, device = plan.config, world.device
    model: PlainModel = plain_base(world, plan.inputs.source)
    adapter = plan.initial_adapter().to(device)
    settings = plan.adapter_settings
    optimizer = optimizer_of(adapter, settings.deepspeed["optimizer"]["params"])
    streams, sampler = Streams(config.seed), EpochSampler(len(plan.samples), world.size, config.seed)
    done = 0

    def step() -> dict[str, float]:
        nonlocal done
        batch = draw_batch(plan, streams, [sampler.next(world.rank) for _ in range(config.batch)])
        window, noise, levels = batch.window.to(device), batch.noise.to(device), batch.levels
        noises = (noise.video, noise.proxy, noise.picture1)
        sigma, weight = levels.sigma.to(device), levels.weight.to(device)
        loss = span_loss(model, adapter, config.mask_rule, window, noises, sigma, weight)
        lr = learning_rate(done, plan.steps, config.lr, config.lr_min, config.warmup)
        norm = update(adapter, optimizer, loss, lr, settings.clipping)
        done += 1
        return {"loss": loss.item(), "grad_norm": norm}

    return step


def step_table(result: dict) -> str:
    """Both sides next to each other."""
    ceilings, sides = result["ceilings"], result["sides"]
    rows = [["", *sides]]

    def line(label: str, cell: Callable[[dict], str]) -> None:
        rows.append([label, *(side["failed"] if "failed" in side else cell(side) for side in sides.values())])

    line("seconds a step, median", lambda side: report.number(side["seconds"]["median"]))
    line("  least to most", lambda s: f"{s['seconds']['least']:.3f} to {s['seconds']['most']:.3f}")
    line("work needed, PFLOP", lambda side: f"{side['needed_flop'] / 1e15:.4g}")
    line("work done, PFLOP", lambda side: f"{side['done_flop'] / 1e15:.4g}")
    for key, name in (("data_sheet_tflops", "data sheet"), ("matmul_tflops", "measured product")):
        if ceilings[key]:
            for kind in ("needed", "done"):
                label = f"MFU of the {name}, work {kind} ({ceilings[key]:.4g} TFLOP/s)"
                line(label, lambda side, key=key, kind=kind: report.number(side["share"][key][kind]))
    line("peak allocated, GiB", lambda side: report.number(side["peak"]["allocated_gib"], "{:.2f}"))
    line("peak reserved, GiB", lambda side: report.number(side["peak"]["reserved_gib"], "{:.2f}"))
    line("peak of the host, GiB", lambda side: report.number(side["peak"]["host_gib"], "{:.2f}"))
    line("first loss", lambda side: report.number(side["first"]["loss"], "{:.6f}"))
    line("first |grad|", lambda side: report.number(side["first"]["grad_norm"], "{:.6f}"))
    told = report.table(rows)
    if result.get("ratio") is not None:
        told += f"\nours / plain: {result['ratio']:.3f}"
    for what, difference in result.get("difference", {}).items():
        told += f"\nrelative difference of {what}: first step {difference['first']:.2e}, most {difference['most']:.2e}"
    return told
