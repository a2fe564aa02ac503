"""`rtcwm bench stream`: seconds a chunk of a few-step stream, as its window fills and once it slides.

A chunk plays 17 frames, 0.708 s; a stream that makes one in less runs in real time. Our side is `rtcwm.model.sampler`
on a base that is whole on the device, as `rtcwm evaluate` streams; with a base configuration it is on training's
`BaseEngine`, which decides where weights are and has its hooks around every block.
"""

from abc import abstractmethod
from dataclasses import dataclass

from rtcwm.bench import measure, profile, report
from rtcwm.bench.chunks import StreamCase, Streamed, attention_ceiling, chunk_work, steady, stream_case
from rtcwm.bench.command import StreamBench
from rtcwm.bench.inputs import Case, random_adapter, rank_files, shared_settings
from rtcwm.bench.sides import Did, Plan, Runner, compare, plain_base, plain_kernel, run_both, sized_case, summary
from rtcwm.bench.work import Work
from rtcwm.data.clips import open_clips
from rtcwm.engine.base import BaseEngine
from rtcwm.engine.device import compute_dtype
from rtcwm.engine.settings import BaseSettings
from rtcwm.engine.world import World, program
from rtcwm.model.attention import install
from rtcwm.model.blocks import Run
from rtcwm.model.cache import STEADY
from rtcwm.model.kernels import Kernel
from rtcwm.model.layout import CHUNK_SECONDS, SPAN_CHUNKS
from rtcwm.model.loading import BaseSource, build_base
from rtcwm.model.lora import Adapter, inject
from rtcwm.model.schedule import SamplerConfig
from rtcwm.train.adaln import level_grid, open_table
from rtcwm.train.config import TrainConfig
from rtcwm.train.dataset import load_window
from rtcwm.train.preflight import check_settings

ROUNDING = {"cuda": 0.05, "cpu": 1e-3}
"""Largest relative difference of the mean square of the latents: chunks build on each other."""


def bench(settings: StreamBench) -> None:
    """Streams on both sides, prints a table and writes the JSON file."""
    with program("rtcwm bench stream") as world:
        case = sized_case(world, settings, copies=1 if settings.base_config else world.local_size)
        with rank_files(world, case, SPAN_CHUNKS, settings.seed) as made:
            config = TrainConfig(**shared_settings(settings, made))
            source, base, kernel = world.on_all(lambda: check_settings(world, config))
            clip = open_clips(made.clips)[0]
            sampling = SamplerConfig(steps=settings.denoise_steps)
            given = stream_case(
                load_window(clip, 0, 0), sampling, settings.chunks, settings.batch, settings.seed, world.device
            )
            start = OurStart(config, source, base if settings.base_config else None, kernel)
            result = measured(world, settings, case, given, start)
        world.on_main(lambda: report.write(settings.out, result))
        compare(world.device, result, "mean_square", ROUNDING)


@dataclass(frozen=True)
class OurStart:
    """What our side is built from; without settings of a base engine the base is whole on the device."""

    config: TrainConfig
    source: BaseSource
    settings: BaseSettings | None
    kernel: Kernel


def measured(world: World, settings: StreamBench, case: Case, given: StreamCase, ours: OurStart) -> dict:
    """All that the JSON file holds."""
    result = report.opening("stream", settings, case.as_dict() | {"chunk_plays": CHUNK_SECONDS}, world)
    result["ceilings"] = measure.ceilings(world.device)
    world.print(f"{report.versions_line(result['machine'])}\n{case.line()}\n{ours.kernel.why}")
    works = {
        f"chunk {chunk}": chunk_work(case, chunk, settings.denoise_steps, settings.batch)
        for chunk in range(settings.chunks)
    }
    adapter = random_adapter(case, settings.seed)
    starts = {
        "plain": lambda: PlainStreaming(world, case, given, ours.source, adapter),
        "ours": lambda: OurStreaming(world, case, given, ours, adapter),
    }
    plans = {name: Plan(start, works, works) for name, start in starts.items()}
    result["sides"] = run_both(world, settings, plans, result["ceilings"])
    for side in result["sides"].values():
        if "attention_tflops" in side:
            side["steady"] = steady_chunk(side, works[f"chunk {STEADY}"], result["ceilings"]["matmul_tflops"])
    result |= summary(result["sides"])
    world.print(report.comparison(result))
    for name, side in result["sides"].items():
        if "steady" in side:
            world.print(f"{name}: {report.chunk_line(side['steady'])}")
    profile.finish(world, settings.profile, result["sides"])
    return result


def steady_chunk(side: dict, work: Work, matmul: float) -> dict[str, float]:
    """The chunks of the timed streams that come after their window is full."""
    parts = [part["seconds"]["each"] for name, part in side["parts"].items() if int(name.split()[1]) >= STEADY]
    return steady([seconds for each in parts for seconds in each], side["attention_tflops"], work, matmul)


class _Streaming(Runner):
    """One whole stream a step."""

    def __init__(self, world: World, case: Case, given: StreamCase, kernel: Kernel):
        self.world, self.case, self.given, self.kernel = world, case, given, kernel

    @abstractmethod
    def stream(self) -> Streamed:
        """All chunks, from the beginning."""

    def step(self) -> Did:
        made = self.stream()
        parts = {f"chunk {chunk}": seconds for chunk, seconds in enumerate(made.seconds)}
        return Did({"mean_square": made.latents.square().mean().item()}, parts)

    def extra(self) -> dict:
        return {"attention_tflops": attention_ceiling(self.case, self.kernel, self.world.device)}


class OurStreaming(_Streaming):
    """`rtcwm.model.sampler` on a whole base, or (with settings) on training's engine."""

    def __init__(self, world: World, case: Case, given: StreamCase, start: OurStart, adapter: Adapter):
        super().__init__(world, case, given, start.kernel)
        self.adapter = adapter.to(world.device, compute_dtype(world.device))
        config, source, settings = start.config, start.source, start.settings
        table = open_table(world, config, source, level_grid(config, source), given.config.sigmas)
        if settings is None:
            stand_in = table and table.stand_in
            self.model = build_base(source, world.device, compute_dtype(world.device), adaln=stand_in)
            self.run: Run = inject(self.model).runner(self.adapter)
        else:
            base = BaseEngine(world, source, settings, table)
            base.activations.measure(False)  # nobody asks for the waits of a stream
            self.model, self.run = base.model, base.activations.runner(self.adapter)
        install(self.model, start.kernel, ffn_rows=settings.activations.ffn_rows if settings else 0)

    def stream(self) -> Streamed:
        return self.given.ours(self.model, self.kernel, self.run)


class PlainStreaming(_Streaming):
    """The obvious stream."""

    def __init__(self, world: World, case: Case, given: StreamCase, source: BaseSource, adapter: Adapter):
        super().__init__(world, case, given, plain_kernel(world.device))
        self.model, self.adapter = plain_base(world, source), adapter.to(world.device)

    def stream(self) -> Streamed:
        return self.given.plain(self.model, self.adapter)
