"""Distribution-matching distillation: a student learns few steps from its own long rollouts.

    deepspeed --num_gpus 2 --module rtcwm.train.distill --out runs/d --student-lora runs/a/lora_step00150.safetensors

Three adapters share one frozen, partitioned base: the student and the critic (the score of what the student makes) are
trained, each by an engine of its own; the teacher (the score of real video) is not. One iteration: the student rolls
out R chunks from a clip's start frame, chunk by chunk on its own history; teacher and critic score the noised end of
it, and the student follows their difference; then the critic learns to denoise windows of the same rollout.

R and the stopping steps decide which forwards run, so they come from a stream that all ranks share, and a digest of
them is compared before the rollout. Clip, start frame and noise are a rank's own.
"""

import time
from collections.abc import Callable, Sequence

import torch

from rtcwm.engine.adapter import AdapterEngine, Update
from rtcwm.engine.average import Average
from rtcwm.engine.device import synchronize
from rtcwm.engine.memory import resident_gib
from rtcwm.engine.streams import Streams
from rtcwm.engine.world import World, program
from rtcwm.model.blocks import dtype_of
from rtcwm.model.layout import CHUNK_LATENTS
from rtcwm.model.matching import Matching, matching_loss, score_level
from rtcwm.model.objectives import clean_from_velocity, velocity
from rtcwm.model.packing import Window
from rtcwm.model.sampler import rollout
from rtcwm.train.config import DistillConfig, parse
from rtcwm.train.dataset import EpochSampler, load_window
from rtcwm.train.distill_plan import DistillPlan, prepare
from rtcwm.train.draws import Draws
from rtcwm.train.folder import RunFolder
from rtcwm.train.inference import conditions
from rtcwm.train.loop import Loop, Outcome
from rtcwm.train.order import Visit
from rtcwm.train.record import finite_or_none
from rtcwm.train.span import SpanNoise, batch_noise, span_losses, stack
from rtcwm.train.teacher import Rolled, Teacher
from rtcwm.train.validation import Grid

LEVEL_BINS = 4
"""Quarters of the uniform noise level by which the critic's loss is reported."""

SPOKEN_ITERATIONS = 3
"""Iterations of a start whose seconds a chunk are printed."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry of ``--module rtcwm.train.distill``."""
    with program("rtcwm.train.distill") as world:
        config = parse("rtcwm.train.distill", DistillConfig, arguments)
        Distiller(world, config, prepare(world, config)).run()


class Distiller(Loop):
    """The alternation of student and critic."""

    def __init__(self, world: World, config: DistillConfig, plan: DistillPlan):
        self.config, self.plan = config, plan
        self.streams = Streams(config.seed)
        inputs = plan.inputs
        self.base = inputs.open_base(config, levels=plan.sampler.sigmas)
        student, self.teacher_adapter, critic = plan.adapters()
        self.student = AdapterEngine(world, student, plan.student_settings)
        self.critic = AdapterEngine(world, critic, plan.critic_settings)
        self.average = Average(world, self.student.adapter, config.ema) if config.ema else None
        if self.teacher_adapter is not None:
            # In the base's dtype, to which every use of fp32 weights would cast them.
            self.teacher_adapter.requires_grad_(False).to(world.device, dtype_of(self.base.model.transformer_blocks[0]))
        runner = self.base.activations.runner
        self.run_student, self.run_critic = runner(self.student.adapter), runner(self.critic.adapter)
        # Graphs of a rollout live as long as its keys and values do, and a chunk has a tenth of a window's attention.
        self.run_graph = runner(self.student.adapter, save_attention=False)
        scorers = (self.teacher_adapter, self.critic.adapter)
        # Who scores in which pass over the base.
        self.run_scores = [(runner(*scorers), 2)] if plan.joint else [(runner(scorer), 1) for scorer in scorers]
        self.clips_root = plan.starts[0][0].path.parent
        self.teacher = Teacher(
            self.base.model,
            inputs.kernel,
            config.mask_rule,
            config.teacher_kind,
            config.teacher_picture1,
            self.clips_root,
        )
        self.grid = Grid(plan.held_out, self.streams, plan.level_shift, config.picture1, inputs.grid)
        self.seconds: dict[str, float] = {}
        super().__init__(
            world, RunFolder(config.out), {"student": self.student, "critic": self.critic},
            EpochSampler(len(plan.starts), world.size, config.seed), config.iters, config.save_every, config.max_skips,
            unit="iteration", averages={"student_ema": self.average} if self.average else {},
        )  # fmt: skip
        self.spoken_until = self.step + SPOKEN_ITERATIONS
        for line in plan.lines():
            self.record.say(line)
        self.record.say(f"memory after sharding: {resident_gib(world.device):.2f} GiB on rank 0")

    def train_step(self) -> Outcome:
        self.seconds = {}
        draws = Draws.of(self.config, self.streams, self.step)
        self.world.same("iteration, rollout length or stopping steps", (self.step, draws))
        visits = [self.sampler.next(self.world.rank) for _ in range(self.config.batch)]
        with self._timed("rollout"):
            self.student.park()
            self.critic.park()
            latents, rolled = self._roll_out(visits, draws)
        with self._timed("scores"):
            matching = self._match(visits, latents, rolled)
        with self._timed("student"):
            self.student.backward(matching.loss)
            self.base.finish_backward()
            del latents
            self.student.unpark()
            updated = self.student.step(self._warm(self.config.gen_lr))
            self.student.park()  # until its next step
            if self.average and not updated.skipped:
                self.average.update(self.student.updates)
        with self._timed("critic"):
            self.critic.unpark()
            updates, losses, bins = self._train_critic(visits, rolled)
        if line := self.base.activations.report_once():
            self.record.say(line)
        return self._outcome(draws, matching, rolled, updated, updates, losses, bins)

    def evaluate(self) -> dict:
        """The held-out diffusion-forcing loss of the student that distillation starts from; a weak one shows here."""
        if self.step or not self.grid.cells:
            return {}
        return {"val": self.grid.evaluate(self.world, self._span_losses)}

    def write_adapters(self) -> list[str]:
        names = []
        # The critic first: a student's file never stands without its pair.
        for role, objective, engine in (("critic", "critic", self.critic), ("student", "dmd", self.student)):
            name = f"{role}_iter{self.step:05d}.safetensors"
            metadata = self.plan.metadata(objective) | {"step": str(self.step)}
            self.folder.write_adapter(name, engine.adapter, self.plan.inputs.source.config, metadata)
            names.append(name)
        if self.average:
            name = f"student_ema_iter{self.step:05d}.safetensors"
            metadata = self.plan.metadata("dmd") | {"step": str(self.step), "ema": str(self.config.ema)}
            self.folder.write_adapter(name, self.average.adapter, self.plan.inputs.source.config, metadata)
            names.append(name)
        return names

    def _roll_out(self, visits: list[Visit], draws: Draws) -> tuple[torch.Tensor, Rolled]:
        """The student's rollouts: latents ``[B, 24, 5 R, h, w]``, whose last chunks carry a graph, and what they
        followed."""
        windows = []
        for visit in visits:
            clip, start = self.plan.starts[visit.sample]
            windows.append(load_window(clip, start, start, chunks=draws.chunks, picture1=self.config.picture1))
        truth = stack(windows).to(self.world.device)
        generators = self._own("rollout noise", visits)
        chunks = rollout(
            self.base.model, self.plan.inputs.kernel, conditions(truth, self.clips_root), truth.proxy,
            self.plan.sampler, lambda kind, chunk, step, shape: batch_noise(shape, generators), draws.stops,
            graph_chunks=range(draws.chunks - self.config.grad_chunks, draws.chunks),
            run=self.run_student, graph_run=self.run_graph, progress=self._progress_of_rollout(draws.chunks),
        )  # fmt: skip
        latents = torch.cat(chunks, dim=2)
        return latents, Rolled(latents.detach(), truth)

    def _match(self, visits: list[Visit], latents: torch.Tensor, rolled: Rolled) -> Matching:
        """The student's loss on the window at the end of its rollout."""
        first = self.teacher.last(rolled.chunks)
        window = self.teacher.window(rolled, first)
        scores = [self._score(visits, window, draw) for draw in range(self.config.score_draws)]
        cut = latents[:, :, first * CHUNK_LATENTS : first * CHUNK_LATENTS + self.teacher.latents]
        live = cut.shape[2] - (rolled.chunks - self.config.grad_chunks - first) * CHUNK_LATENTS
        return matching_loss(cut, scores, min(live, cut.shape[2]))

    @torch.no_grad()
    def _score(self, visits: list[Visit], window: Window, draw: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Clean predictions of teacher and critic for the window, noised once to one level."""
        self.record.progress(f"scores {draw + 1}/{self.config.score_draws}")
        generators = self._own(f"student score {draw}", visits)
        sigma, _ = score_level(generators[0], self.config.score_shift, self.plan.inputs.grid)
        noise = SpanNoise.draw(window, *generators)
        noisy = (1 - sigma) * window.video + sigma * noise.video
        made = [self.teacher.velocity(window, noise, sigma, run, copies) for run, copies in self.run_scores]
        real, fake = (clean_from_velocity(noisy, one, sigma) for one in torch.cat(made).chunk(2))
        return real, fake

    def _train_critic(self, visits: list[Visit], rolled: Rolled) -> tuple[list[Update], torch.Tensor, torch.Tensor]:
        """The critic's updates: flow matching on random windows of the detached rollout.

        Returns:
            Updates, their losses ``[updates]``, and sums of losses and counts by level ``[2, LEVEL_BINS]``.
        """
        updates, losses, levels = [], [], []
        for turn in range(self.config.critic_per_gen):
            self.record.progress(f"critic {turn + 1}/{self.config.critic_per_gen}")
            generators = self._own(f"critic {turn}", visits)
            sigma, uniform = score_level(generators[0], self.config.score_shift, self.plan.inputs.grid)
            window = self.teacher.window(rolled, self.teacher.draw(rolled.chunks, generators[0]))
            noise = SpanNoise.draw(window, *generators)
            predicted = self.teacher.velocity(window, noise, sigma, self.run_critic)
            loss = (predicted - velocity(window.video, noise.video)).square().mean()
            self.critic.backward(loss)
            self.base.finish_backward()
            updates.append(self.critic.step(self._warm(self.config.critic_lr)))
            losses.append(loss.detach())
            levels.append(min(LEVEL_BINS - 1, int(uniform * LEVEL_BINS)))
        losses, levels, bins = torch.stack(losses), torch.tensor(levels), torch.zeros(2, LEVEL_BINS)
        bins[0].index_add_(0, levels, losses.cpu())
        bins[1].index_add_(0, levels, torch.ones(len(levels)))
        return updates, losses, bins

    def _outcome(
        self, draws: Draws, matching: Matching, rolled: Rolled, updated: Update, updates: list[Update],
        losses: torch.Tensor, bins: torch.Tensor,
    ) -> Outcome:  # fmt: skip
        health = [matching.loss.detach(), matching.gradient, matching.cosine, matching.gap, losses.mean()]
        numbers = self.world.mean(torch.stack([*health, *likeness(rolled)])).tolist()
        dmd, gradient, cosine, gap, critic, motion, spread = numbers
        sums = self.world.mean(bins.to(self.world.device)).tolist()
        by_level = [total / count if count else None for total, count in zip(*sums, strict=True)]
        norm = sum(update.grad_norm for update in updates) / len(updates)
        skipped = updated.skipped or any(update.skipped for update in updates)
        row = {
            "chunks": draws.chunks, "stops": list(draws.stops), "dmd": dmd, "critic": critic, "gradient": gradient,
            "cosine": cosine, "gap": gap, "motion": motion, "spread": spread, "student_norm": updated.grad_norm,
            "critic_norm": norm,
        }  # fmt: skip
        row = {key: finite_or_none(value) if isinstance(value, float) else value for key, value in row.items()}
        parts = {f"{name}_seconds": round(value, 3) for name, value in self.seconds.items()}
        row |= {"critic_by_level": [None if v is None else finite_or_none(v) for v in by_level], "timing": parts}
        stops = "".join(str(stop) for stop in draws.stops)
        text = (
            f"R {draws.chunks} stops {stops}  dmd {dmd:.5f}  critic {critic:.5f}  |grad| {gradient:.4f}  "
            f"cos {cosine:.3f}  norms {updated.grad_norm:.4f} {norm:.4f}  "
            + " ".join(f"{name} {value:.2f} s" for name, value in self.seconds.items())
            + ("  skipped (non-finite)" if skipped else "")
        )
        if self.step < self.spoken_until:
            self.record.say(f"rollout: {self.seconds['rollout'] / draws.chunks:.3f} s a chunk, {draws.chunks} chunks")
        return Outcome(row, text, skipped)

    def _own(self, name: str, visits: list[Visit]) -> list[torch.Generator]:
        """One generator of an own stream for every rollout of the batch; levels and windows come from the first."""
        return [self.streams.own(name, visit.position) for visit in visits]

    def _warm(self, lr: float) -> float:
        """Learning rate of this iteration: linear warm-up, then constant."""
        return lr * min(1.0, (self.step + 1) / self.config.warmup) if self.config.warmup else lr

    def _progress_of_rollout(self, chunks: int) -> Callable[[int], None]:
        return lambda chunk: self.record.progress(f"rollout chunk {chunk + 1}/{chunks}")

    def _timed(self, name: str) -> "Timed":
        return Timed(self.seconds, name, self.world)

    def _span_losses(self, window, noise: SpanNoise, sigma: torch.Tensor) -> torch.Tensor:
        return span_losses(
            self.base.model, window, noise, sigma, self.plan.inputs.kernel, self.config.mask_rule, self.run_student
        )


class Timed:
    """Adds the seconds of a with block, the device's work included, under a name."""

    def __init__(self, seconds: dict[str, float], name: str, world: World):
        self.seconds, self.name, self.world = seconds, name, world

    def __enter__(self) -> None:
        self.began = time.perf_counter()

    def __exit__(self, *_error: object) -> None:
        synchronize(self.world.device)
        self.seconds[self.name] = time.perf_counter() - self.began


def likeness(rolled: Rolled) -> tuple[torch.Tensor, torch.Tensor]:
    """Motion and spread of a rollout over those of the truth: 1 is alike, towards 0 a rollout freezes or fades, far
    above 1 it flickers or saturates. Motion is the mean |difference| of neighbouring latents, spread the
    standard deviation."""
    made, true = rolled.latents, rolled.truth.video

    def motion(latents: torch.Tensor) -> torch.Tensor:
        return latents.diff(dim=2).abs().mean()

    return motion(made) / motion(true), made.std() / true.std()


if __name__ == "__main__":
    main()
