"""`rtcwm bench distill`: one iteration of distribution matching by part, the obvious loop against the real program.

Our side is `rtcwm.train.distill.Distiller` with its plan and engines. The obvious loop (`plain_distill`,
`plain_stream`) draws the same rollout length, stopping steps, windows, levels and noise, from the same adapters.
"""

from abc import abstractmethod
from dataclasses import replace

import torch
from torch import Tensor

from rtcwm.bench import measure, profile, report
from rtcwm.bench.chunks import StreamCase, attention_ceiling, chunk_work, steady, stream_case
from rtcwm.bench.command import DistillBench
from rtcwm.bench.inputs import Case, Files, random_adapter, rank_files, shared_settings
from rtcwm.bench.plain_distill import PlainDistillation
from rtcwm.bench.plain_stream import PlainStream, plain_rollout
from rtcwm.bench.sides import Did, Plan, Runner, compare, plain_base, plain_kernel, run_both, sized_case, summary
from rtcwm.bench.work import NOTHING, WHOLE_BLOCKS, Repeated, Work, rollout_work, span_pairs
from rtcwm.engine.streams import Streams
from rtcwm.engine.world import World, program
from rtcwm.errors import require
from rtcwm.model.adapter_files import save_adapter
from rtcwm.model.cache import STEADY
from rtcwm.model.kernels import Kernel
from rtcwm.model.layout import CHUNK_LATENTS, TEACHER_LATENTS, TEXT_TAG, audio_latents, frames_of
from rtcwm.model.matching import score_level
from rtcwm.model.packing import Window, stock_layout
from rtcwm.train.config import DistillConfig
from rtcwm.train.dataset import EpochSampler, load_window
from rtcwm.train.distill import Distiller, Timed
from rtcwm.train.distill_plan import DistillPlan, prepare
from rtcwm.train.draws import Draws
from rtcwm.train.inference import span_silence
from rtcwm.train.order import Visit
from rtcwm.train.span import SpanNoise, batch_noise, stack
from rtcwm.train.teacher import Rolled, Teacher, window_chunks

ROUNDING = {"cuda": 0.05, "cpu": 1e-3}
"""Largest relative difference of the critic's first loss: it sees a whole rollout, whose chunks build on each other."""

STEADY_CHUNKS = STEADY + 3
"""Chunks of the stream without a graph whose last three are timed."""


def bench(settings: DistillBench) -> None:
    """Runs the sides that were asked for, prints a table and writes the JSON file."""
    with program("rtcwm bench distill") as world:
        case = sized_case(world, settings)
        least = window_chunks(settings.teacher_kind)
        require(
            settings.chunks >= least,
            f"--chunks {settings.chunks}: a {settings.teacher_kind} teacher's window takes {least}: set at least that",
        )
        with rank_files(world, case, settings.chunks, settings.seed) as made:
            result = measured(world, settings, case, prepare(world, distill_config(settings, case, made)))
        world.on_main(lambda: report.write(settings.out, result))
        compare(world.device, result, "critic", ROUNDING)


def distill_config(settings: DistillBench, case: Case, made: Files) -> DistillConfig:
    """The settings of the program that the flags stand for; writes the adapters that it reads. The critic starts from
    the student's, so that teacher and critic differ from the first iteration on."""
    paths = {name: made.root / f"{name}.safetensors" for name in ("student", "teacher")}
    # Adapters that do not say what they were trained for pass as bidirectional ones.
    metadata = {"objective": "df", "shift": "3.0"} if settings.teacher_kind == "causal" else {}
    for index, path in enumerate(paths.values()):
        save_adapter(path, random_adapter(case, settings.seed + 10 * index), metadata)
    return DistillConfig(
        student_lora=str(paths["student"]), teacher_lora=str(paths["teacher"]), critic_lora=str(paths["student"]),
        teacher_kind=settings.teacher_kind, steps=settings.denoise_steps, min_chunks=settings.chunks,
        max_chunks=settings.chunks, stops=settings.stops, grad_chunks=settings.grad_chunks,
        critic_per_gen=settings.critic_per_gen, iters=settings.warmup + settings.steps + 1,
        joint_scores=settings.joint_scores, student_config=settings.student_config,
        critic_config=settings.critic_config,
        **shared_settings(settings, made),
    )  # fmt: skip


def measured(world: World, settings: DistillBench, case: Case, plan: DistillPlan) -> dict:
    """All that the JSON file holds."""
    rows, pairs = window_size(case, plan.config)
    told = {"window_rows": rows, "window_pairs": pairs, "rollout_chunks": settings.chunks}
    result = report.opening("distill", settings, case.as_dict() | told, world)
    result["ceilings"] = measure.ceilings(world.device)
    world.print(f"{report.versions_line(result['machine'])}\n{case.line()}")
    needed = works(settings, case, plan.config, NOTHING, NOTHING)
    activations = plan.inputs.base_settings.activations
    repeated = {"plain": WHOLE_BLOCKS, "ours": case.sizes.repeated(activations)}
    graphs = repeated | {"ours": case.sizes.repeated(activations.lasting)}
    given = no_grad_stream(settings, plan, world.device) if settings.steady else None
    starts = {
        "plain": lambda: PlainDistilling(world, case, plan, given),
        "ours": lambda: OurDistilling(world, case, plan, given),
    }
    even = settings.stops == "last"
    plans = {
        name: Plan(start, needed, works(settings, case, plan.config, repeated[name], graphs[name]), even)
        for name, start in starts.items()
    }
    result["sides"] = run_both(world, settings, plans, result["ceilings"])
    for side in result["sides"].values():
        if "no_grad_chunk" in side:
            work = chunk_work(case, STEADY, settings.denoise_steps, settings.batch)
            side["no_grad_chunk"] = steady(*side.pop("no_grad_chunk"), work, result["ceilings"]["matmul_tflops"])
    result |= summary(result["sides"])
    world.print(report.comparison(result))
    for name, side in result["sides"].items():
        if "parts" in side:
            rollout = side["parts"]["rollout"]["seconds"]["median"] / settings.chunks
            world.print(f"{name}: {rollout:.3f} s a chunk of a rollout")
        if "no_grad_chunk" in side:
            world.print(f"{name}: {report.chunk_line(side['no_grad_chunk'])}")
    profile.finish(world, settings.profile, result["sides"])
    return result


def window_size(case: Case, config: DistillConfig) -> tuple[int, int]:
    """Rows and (query, key) pairs of what teacher and critic see."""
    if config.teacher_kind == "causal":
        return case.layout.rows, span_pairs(case.layout, config.mask_rule)
    picture = (case.geometry.height, case.geometry.width)
    audio = audio_latents(frames_of(TEACHER_LATENTS))
    rows = stock_layout(case.geometry, picture, TEACHER_LATENTS, (TEXT_TAG,) * case.text_rows, audio).rows
    return rows, rows * rows


def works(
    settings: DistillBench, case: Case, config: DistillConfig, repeated: Repeated, of_graphs: Repeated
) -> dict[str, Work]:
    """Work of an iteration by part, the mean of the timed ones: they stop at other steps. ``repeated`` by the critic's
    backward passes, ``of_graphs`` by the student's."""
    rows, pairs = window_size(case, config)
    streams, sizes = Streams(config.seed), case.sizes
    forward, backward = Work(), Work()
    for iteration in range(settings.warmup, settings.warmup + settings.steps):
        draws = Draws.of(config, streams, iteration)
        graphs = range(draws.chunks - config.grad_chunks, draws.chunks)
        once = rollout_work(sizes, case.layout, draws.stops, graphs, config.mask_rule, of_graphs)
        forward, backward = forward + once[0], backward + once[1]
    share = settings.batch / settings.steps
    return {
        "rollout": forward * share,
        "scores": sizes.forward(rows, pairs) * (2 * config.score_draws * settings.batch),
        "student": backward * share,
        "critic": sizes.trained(rows, pairs, repeated) * (config.critic_per_gen * settings.batch),
    }


def no_grad_stream(settings: DistillBench, plan: DistillPlan, device: torch.device) -> StreamCase:
    """A stream whose window is full at its end, sampled as a rollout whose chunks stop at the last step."""
    clip, start = plan.starts[0]
    window = load_window(clip, start, start, chunks=min(settings.chunks, clip.chunks))
    window = replace(window, audio=span_silence(clip.path.parent))  # a stream hears a span, not a rollout
    return stream_case(window, plan.sampler, STEADY_CHUNKS, settings.batch, settings.seed, device)


class _Distilling(Runner):
    """What both sides share: the seconds of chunks without a graph, after the iterations."""

    def __init__(self, world: World, case: Case, given: StreamCase | None, kernel: Kernel):
        self.world, self.case, self.given, self.kernel = world, case, given, kernel

    @abstractmethod
    def chunk_seconds(self) -> tuple[float, ...]:
        """Seconds of every chunk of a stream without a graph."""

    def extra(self) -> dict:
        if self.given is None:
            return {}
        self.chunk_seconds()  # compiles and chooses kernels for these shapes
        seconds = self.chunk_seconds()[STEADY:]
        return {"no_grad_chunk": (seconds, attention_ceiling(self.case, self.kernel, self.world.device))}


class OurDistilling(_Distilling):
    """The real program, one iteration at a time."""

    def __init__(self, world: World, case: Case, plan: DistillPlan, given: StreamCase | None):
        super().__init__(world, case, given, plan.inputs.kernel)
        self.distiller = Distiller(world, plan.config, plan)
        self.base = self.distiller.base

    def extra(self) -> dict:
        distiller = self.distiller
        parked = distiller.student.host_bytes + distiller.critic.host_bytes
        return super().extra() | {"parked_gib": parked / 2**30}

    def step(self) -> Did:
        outcome = self.distiller.train_step()
        self.distiller.step += 1
        names = ("dmd", "critic", "student_norm", "critic_norm")
        return Did({name: outcome.row[name] for name in names}, dict(self.distiller.seconds))

    def chunk_seconds(self) -> tuple[float, ...]:
        distiller = self.distiller
        distiller.student.park()  # as in a rollout; the next iteration brings the moments back
        distiller.critic.park()
        return self.given.ours(distiller.base.model, self.kernel, distiller.run_student).seconds


class PlainDistilling(_Distilling):
    """The obvious loop over the same rollouts, windows and noise."""

    def __init__(self, world: World, case: Case, plan: DistillPlan, given: StreamCase | None):
        super().__init__(world, case, given, plain_kernel(world.device))
        config, settings = plan.config, plan.student_settings
        self.plan, self.config, self.done = plan, config, 0
        student, teacher, critic = (adapter.to(world.device) for adapter in plan.adapters())
        self.loop = PlainDistillation(
            plain_base(world, plan.inputs.source), student, teacher.requires_grad_(False), critic,
            config.teacher_kind == "released", config.mask_rule, settings.deepspeed["optimizer"]["params"],
            settings.clipping,
        )  # fmt: skip
        # It cuts windows; its model is not asked.
        self.windows = Teacher(
            self.loop.model.model, self.kernel, config.mask_rule, config.teacher_kind, config.teacher_picture1,
            plan.starts[0][0].path.parent,
        )  # fmt: skip
        self.streams = Streams(config.seed)
        self.sampler = EpochSampler(len(plan.starts), world.size, config.seed)

    def chunk_seconds(self) -> tuple[float, ...]:
        return self.given.plain(self.loop.model, self.loop.student).seconds

    def step(self) -> Did:
        config, seconds = self.config, {}
        draws = Draws.of(config, self.streams, self.done)
        visits = [self.sampler.next(self.world.rank) for _ in range(config.batch)]
        warm = min(1.0, (self.done + 1) / config.warmup) if config.warmup else 1.0
        with Timed(seconds, "rollout", self.world):
            latents, rolled = self._roll_out(visits, draws)
        with Timed(seconds, "scores", self.world):
            loss = self._student_loss(visits, latents, rolled)
        with Timed(seconds, "student", self.world):
            norm = self.loop.update_student(loss, config.gen_lr * warm)
            del latents
        with Timed(seconds, "critic", self.world):
            losses, norms = self._train_critic(visits, rolled, config.critic_lr * warm)
        self.done += 1
        means = {"critic": torch.stack(losses).mean().item(), "critic_norm": sum(norms) / len(norms)}
        return Did({"dmd": loss.item(), "student_norm": norm} | means, seconds)

    def _own(self, name: str, visits: list[Visit]) -> list[torch.Generator]:
        return [self.streams.own(name, visit.position) for visit in visits]

    def _roll_out(self, visits: list[Visit], draws: Draws) -> tuple[Tensor, Rolled]:
        windows = []
        for visit in visits:
            clip, start = self.plan.starts[visit.sample]
            windows.append(load_window(clip, start, start, chunks=draws.chunks, picture1=self.config.picture1))
        truth = stack(windows).to(self.world.device)
        span = stack([load_window(*self._start(visit), picture1=self.config.picture1) for visit in visits])
        generators = self._own("rollout noise", visits)
        stream = PlainStream(
            self.loop.model, self.loop.student, span.to(self.world.device), self.plan.sampler,
            lambda kind, chunk, step, shape: batch_noise(shape, generators),
        )  # fmt: skip
        graphs = range(draws.chunks - self.config.grad_chunks, draws.chunks)
        latents = plain_rollout(stream, truth.proxy, draws.stops, graphs)
        return latents, Rolled(latents.detach(), truth)

    def _start(self, visit: Visit) -> tuple:
        clip, start = self.plan.starts[visit.sample]
        return clip, start, start

    def _noised(self, visits: list[Visit], name: str) -> tuple[list[torch.Generator], float]:
        """Generators of a draw, and its level."""
        generators = self._own(name, visits)
        return generators, score_level(generators[0], self.config.score_shift, self.plan.inputs.grid)[0]

    def _noises(self, window: Window, generators: list[torch.Generator]) -> tuple[Tensor, Tensor, Tensor]:
        noise = SpanNoise.draw(window, *generators)
        return noise.video, noise.proxy, noise.picture1

    def _student_loss(self, visits: list[Visit], latents: Tensor, rolled: Rolled) -> Tensor:
        first, windows = self.windows.last(rolled.chunks), self.windows
        window, scores = windows.window(rolled, first), []
        for draw in range(self.config.score_draws):
            generators, sigma = self._noised(visits, f"student score {draw}")
            scores.append(self.loop.scores(window, self._noises(window, generators), sigma))
        cut = latents[:, :, first * CHUNK_LATENTS : first * CHUNK_LATENTS + windows.latents]
        live = cut.shape[2] - (rolled.chunks - self.config.grad_chunks - first) * CHUNK_LATENTS
        return self.loop.student_loss(cut, scores, min(live, cut.shape[2]))

    def _train_critic(self, visits: list[Visit], rolled: Rolled, lr: float) -> tuple[list[Tensor], list[float]]:
        losses, norms = [], []
        for turn in range(self.config.critic_per_gen):
            generators, sigma = self._noised(visits, f"critic {turn}")
            window = self.windows.window(rolled, self.windows.draw(rolled.chunks, generators[0]))
            loss, norm = self.loop.update_critic(window, self._noises(window, generators), sigma, lr)
            losses.append(loss)
            norms.append(norm)
        return losses, norms
