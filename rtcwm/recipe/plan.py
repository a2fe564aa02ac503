"""The jobs of a recipe: real commands, what each has made when it is done, and what it waits for."""

import sys
from dataclasses import dataclass
from pathlib import Path

from rtcwm.engine.settings import shipped_config
from rtcwm.errors import UserError
from rtcwm.recipe.command import Settings

TRAIN_CHUNKS = 16
"""Chunks of a training clip: two more than the longest rollout."""
SHORT = 14
"""Chunks of the streams at which the model that nobody trained to stream is measured too: later it is noise."""

SMALL = {"base-config": shipped_config("base_small"), "compile": "off"}
"""Nothing of a small base needs recomputing, and compiling its blocks takes longer than it saves in minutes."""

DISTILL = {
    "gen-lr": "1e-4", "critic-lr": "4e-4", "teacher-picture1": "start", "score-shift": "3", "ema": "0.95",
    "stops": "late",
}  # fmt: skip
"""What the small world wants in place of the defaults: its adapters are small and its runs short (learning rates), its
latents few (noise levels as its base was trained with), a teacher that is shown the rollout's own first latent cannot
object to a colour that the rollout has drifted to (Picture 1), and random stopping steps alone sharpen beyond the
teacher, the last one alone blurs (three quarters are at the last)."""

ABLATIONS: dict[str, dict[str, str]] = {
    "no-reuse": {"kv-reuse": "false"},
    "clean-history": {"rollout-history": "clean"},
    "random-stop": {"stops": "random"},
    "last-stop": {"stops": "last"},
    "causal-teacher": {"teacher-kind": "causal", "teacher-picture1": "window"},
    "grad-chunks-1": {"grad-chunks": "1"},
    "grad-chunks-2": {"grad-chunks": "2"},
    "critic-1": {"critic-per-gen": "1"},
    "critic-5": {"critic-per-gen": "5"},
    "score-shift-12": {"score-shift": "12"},
    "window-picture1": {"teacher-picture1": "window"},
}
"""Variants of the distillation by name: what each changes in `DISTILL` or the defaults (reuse on, history at the last
step's level, released teacher, 4 gradient chunks, 7 critic updates)."""


@dataclass(frozen=True)
class Job:
    """One command.

    Attributes:
        done: the file that stands when it has finished; needs: names of jobs before it.
    """

    name: str
    words: tuple[str, ...]
    done: Path
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """All jobs of a recipe, and where their results lie."""

    settings: Settings
    on_card: bool

    def variants(self, seed: int) -> tuple[str, ...]:
        """The variants that were asked for with this seed, in the order of `ABLATIONS`.

        Raises:
            UserError: an unknown one, or one for a seed that is not run.
        """
        asked = set()
        for text in self.settings.ablations:
            name, at, only = text.partition("@")
            if name not in (*ABLATIONS, "all") or (at and only not in map(str, self.settings.seeds)):
                raise UserError(
                    f"--ablations {text!r}: expected one of all, {', '.join(ABLATIONS)}, and after an @ one of the "
                    f"seeds {list(self.settings.seeds)}"
                )
            if not at or int(only) == seed:
                asked |= set(ABLATIONS) if name == "all" else {name}
        return tuple(name for name in ABLATIONS if name in asked)

    @property
    def ablations(self) -> tuple[str, ...]:
        """The variants of any seed."""
        every = {name for seed in self.settings.seeds for name in self.variants(seed)}
        return tuple(name for name in ABLATIONS if name in every)

    def folder(self, *parts: object) -> Path:
        return self.settings.out.joinpath(*map(str, parts))

    def jobs(self) -> list[Job]:
        """Every job after those that it needs; those that all seeds wait for come first."""
        seeds = self.settings.seeds
        jobs = [self._clips("clips", self.settings.clips, TRAIN_CHUNKS, 0), *(self._train(seed) for seed in seeds)]
        jobs += [self._distill(seed, "default") for seed in seeds]
        jobs += [self._distill(seed, name) for seed in seeds for name in self.variants(seed)]
        jobs.append(self._test_clips())
        jobs += [self._evaluate_short(seed) for seed in seeds]
        return jobs + [self._evaluate_long(seed, name) for seed in seeds for name in self.long_models(seed)]

    def df_adapter(self, seed: int) -> Path:
        return self.folder(f"seed{seed}", "df", f"lora_step{self.settings.steps:05d}.safetensors")

    def student(self, seed: int, variant: str) -> Path:
        """The running mean of a variant's student."""
        return self.folder(f"seed{seed}", variant, f"student_ema_iter{self.settings.iters:05d}.safetensors")

    def short(self, seed: int) -> Path:
        return self.folder(f"seed{seed}", "short", "evaluate.json")

    def long(self, seed: int, model: str) -> Path:
        return self.folder(f"seed{seed}", "long", model, "evaluate.json")

    def long_models(self, seed: int) -> dict[str, str]:
        """Models of the long streams as `rtcwm evaluate` takes them, by name; each is a job of its own, so that one
        more variant is one more stream."""
        return self._models(seed) | {name: str(self.student(seed, name)) for name in self.variants(seed)}

    def _clips(self, name: str, clips: int, chunks: int, seed: int, *more: str) -> Job:
        out = self.folder(name)
        words = ("world", "--clips", str(clips), "--chunks", str(chunks), "--seed", str(seed), "--out", str(out), *more)
        return Job(name, command("rtcwm.cli", *words), out / "manifest.json")

    def _test_clips(self) -> Job:
        clips = self.settings.test_clips
        return self._clips("test_clips", clips, self.settings.chunks, 5, "--episodes", str(clips))

    def _train(self, seed: int) -> Job:
        settings = self.settings
        words = flags(
            {
                "out": self.folder(f"seed{seed}", "df"), "clips": self.folder("clips"), "batch": 2 * settings.batch,
                "steps": settings.steps, "val-clips": 4, "val-every": 0, "save-every": settings.steps, "lr": "1e-3",
                "lr-min": "1e-5", "warmup": min(20, settings.steps // 2), "seed": seed,
                "attn": "flex" if self.on_card else "sdpa", **SMALL,
            }
        )  # fmt: skip
        return Job(f"seed{seed}/df", command("rtcwm.train.train", *words), self.df_adapter(seed), ("clips",))

    def _distill(self, seed: int, variant: str) -> Job:
        settings = self.settings
        changes = ABLATIONS.get(variant, {})
        if variant == "causal-teacher":
            changes = changes | {"teacher-lora": str(self.df_adapter(seed))}
        words = flags(
            {
                "out": self.folder(f"seed{seed}", variant), "clips": self.folder("clips"), "batch": settings.batch,
                "iters": settings.iters, "val-clips": 4, "save-every": settings.iters, "seed": seed,
                "student-lora": self.df_adapter(seed), "attn": "sdpa", **SMALL, **DISTILL, **changes,
            }
        )  # fmt: skip
        done, name = self.student(seed, variant), f"seed{seed}/{variant}"
        return Job(name, command("rtcwm.train.distill", *words), done, (f"seed{seed}/df",))

    def _evaluate_short(self, seed: int) -> Job:
        models = {"naive": "base:many", "released": "released:teacher"} | self._models(seed)
        return self._evaluate(f"seed{seed}/short", SHORT, models, self.short(seed), f"seed{seed}/default")

    def _evaluate_long(self, seed: int, model: str) -> Job:
        trained = {"df20": "df", "df4": "df", "distilled": "default"}.get(model, model)
        models = {model: self.long_models(seed)[model]}
        name, done = f"seed{seed}/long/{model}", self.long(seed, model)
        return self._evaluate(name, self.settings.chunks, models, done, f"seed{seed}/{trained}")

    def _models(self, seed: int) -> dict[str, str]:
        df = self.df_adapter(seed)
        return {
            "df20": f"{df}:many,history=0.1",
            "df4": f"{df}:few",
            "distilled": str(self.student(seed, "default")),
        }

    def _evaluate(self, name: str, chunks: int, models: dict[str, str], done: Path, trained: str) -> Job:
        named = [word for name, model in models.items() for word in ("--model+", f"{name}={model}")]
        words = flags(
            {"out": done.parent, "clips": self.folder("test_clips"), "chunks": chunks, "attn": "sdpa", "compile": "off"}
        )
        words = command("rtcwm.cli", "evaluate", *words, "--video", "false", *named)
        return Job(name, words, done, ("test_clips", trained))


def command(module: str, *words: str) -> tuple[str, ...]:
    return (sys.executable, "-m", module, *words)


def flags(values: dict[str, object]) -> tuple[str, ...]:
    return tuple(word for name, value in values.items() for word in (f"--{name}", str(value)))
