"""What running a trained model takes, for every tool that does: the device, how the adapter's file says to sample,
what a stream starts from, and noise by name.

Noise is named by clip, chunk, kind and step, so every model starts a chunk of a clip from the same noise, a clip's
streams do not depend on which clips share its batch, and longer streams begin like shorter ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rtcwm.engine.streams import Streams
from rtcwm.errors import UserError
from rtcwm.model.layout import CHUNK_LATENTS, SPAN_CHUNKS, audio_latents, frames_of
from rtcwm.model.loading import BaseSource
from rtcwm.model.objectives import CAUSAL_OBJECTIVES, OBJECTIVES
from rtcwm.model.packing import Window
from rtcwm.model.sampler import Conditions, Noise
from rtcwm.model.schedule import SamplerConfig
from rtcwm.train.dataset import silence

KINDS = ("teacher", "many", "few")
"""How a model is sampled: one bidirectional window; a stream of many Euler steps a chunk; a stream of few steps with
fresh noise between them, as distillation trains it."""

DEFAULTS: dict[str, dict[str, str]] = {
    "teacher": {"steps": "20", "shift": "3.0", "history": "clean"},
    "many": {"steps": "20", "shift": "3.0", "history": "clean"},
    "few": {"steps": "4", "shift": "5.0", "history": "last-step"},
}
RELEASED_WIDTH, RELEASED_SHIFT = 5376, "12.0"
"""Hidden width of the released H3, and the shift of its video schedule, which its teachers take in place of 3."""


def chosen_device(name: str) -> torch.device:
    """The device of ``--device``: cpu, cuda, or auto. Raises UserError for cuda where torch sees no GPU."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no GPU here; take --device cpu or a build of torch for CUDA")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def clip_noise(seed: int, ids: Sequence[str]) -> Noise:
    """Noise for a batch of clips: the sampler's kinds, by clip, chunk and step. Drawn on the CPU."""
    streams = Streams(seed)

    def noise(kind: str, chunk: int, step: int, shape: tuple[int, ...]) -> Tensor:
        generators = (streams.own(f"evaluate/{kind}/{step}/{clip_id}", chunk) for clip_id in ids)
        return torch.stack([torch.randn(shape[1:], generator=generator) for generator in generators])

    return noise


def span_silence(clips_root: Path | None) -> Tensor:
    """Silence (`dataset.silence`) as long as a span, which is what a stream hears all along."""
    return silence(clips_root, audio_latents(frames_of(SPAN_CHUNKS * CHUNK_LATENTS)))


def conditions(window: Window, clips_root: Path | None) -> Conditions:
    """What a stream of a batch of requests starts from."""
    audio = span_silence(clips_root).to(window.text.device).expand(len(window.text), -1, -1)
    return Conditions(window.picture1, window.text, window.text_tags, audio, window.geometry)


@dataclass(frozen=True, kw_only=True)
class Sampling(SamplerConfig):
    """A `SamplerConfig` whose history may also be attended to at a noise level of one's own, `sigma` in 0..1."""

    sigma: float | None = None

    def history_level(self, chunk: int) -> Tensor:
        return super().history_level(chunk) if self.sigma is None or chunk == 0 else torch.tensor(self.sigma)

    def line(self, forced: bool = False) -> str:
        """The sampling of a stream in words; `forced`: its history is replaced by the truth."""
        level = f"{self.history} ({self.history_level(1):.4g})" if self.sigma is None else f"at {self.sigma:g}"
        history = f"history {'true, ' if forced else ''}{level}, kv_reuse {str(self.kv_reuse).lower()}"
        return f"{self.steps} steps, shift {self.shift:g}, {history}"


def usual_kind(objective: str) -> str:
    """One of `KINDS` by what an adapter's file says that it was trained for ("" where it does not)."""
    return "few" if objective == "dmd" else "many" if objective in OBJECTIVES else "teacher"


def read_sampling(
    where: str, kind: str, given: Mapping[str, str], metadata: Mapping[str, str], source: BaseSource
) -> Sampling:
    """How an adapter is sampled: as given, else as its file says, else by `DEFAULTS`.

    A student knows its history at one noise level, which "last-step" names in its own schedule alone: with other steps
    or another shift the level is the file's number.

    Args:
        where: what stands before a key's name in an error.
        kind: one of `KINDS`.
        given: values by key, of steps, shift, history and kv_reuse; others are left alone.
        metadata: of the adapter's file.

    Raises:
        UserError: values that cannot be read or do not go together.
    """
    usual = DEFAULTS[kind] | _trained(kind, metadata, source)
    settings = usual | dict(given)
    steps, shift = _schedule(where, settings)
    history, sigma = settings["history"], None
    if "history" not in given and "history_level" in usual and (steps, shift) != _schedule(where, usual):
        history = _trained_history(where, history, usual["history_level"])
    if history not in ("clean", "last-step"):
        sigma, history = _number(where, "history", history, float), "clean"
        if not 0 <= sigma <= 1:
            raise UserError(f"{where}history {sigma:g}: expected clean, last-step or a noise level of 0 to 1")
    return Sampling(
        steps=steps,
        shift=shift,
        history=history,
        sigma=sigma,
        kv_reuse=read_boolean(where, "kv_reuse", settings.get("kv_reuse", "true")),
        rule=metadata.get("mask_rule", "E"),
        solver="renoise" if kind == "few" else "euler",
    )


def _trained(kind: str, metadata: Mapping[str, str], source: BaseSource) -> dict[str, str]:
    """What the adapter was trained for, where it is meant for this kind of sampling."""
    objective = metadata.get("objective", "")
    if kind == "few" and objective == "dmd":
        keys = ("steps", "shift", "history", "history_level", "kv_reuse")
        return {key: metadata[key] for key in keys if key in metadata}
    if kind == "many" and objective in OBJECTIVES:
        return {key: metadata[key] for key in ("shift",) if key in metadata}
    if kind == "teacher":
        shift = {"shift": RELEASED_SHIFT} if source.config["hidden_size"] == RELEASED_WIDTH else {}
        causal = objective in (*CAUSAL_OBJECTIVES, "critic")
        return shift if causal or "shift" not in metadata else {"shift": metadata["shift"]}
    return {}


def _schedule(where: str, settings: Mapping[str, str]) -> tuple[int, float]:
    """Steps and shift."""
    return _number(where, "steps", settings["steps"], int), _number(where, "shift", settings["shift"], float)


def _trained_history(where: str, history: str, level: str) -> str:
    """The history of a student in another schedule than its own: `level`, of its file, for "last-step"."""
    if history != "last-step":
        return history
    try:
        known = 0 <= float(level) <= 1
    except ValueError:
        known = False
    if not known:
        raise UserError(
            f"{where}history has to be given with other steps or another shift than the adapter's own: its file says "
            f"history_level {level!r}, expected a noise level of 0 to 1"
        )
    return level


def _number(where: str, key: str, value: str, kind: type) -> float | int:
    try:
        return kind(value)
    except ValueError as error:
        word = "a whole number" if kind is int else "a number"
        also = ", clean or last-step" if key == "history" else ""
        raise UserError(f"{where}{key} is {value!r}, expected {word}{also}") from error


def read_boolean(where: str, key: str, value: str) -> bool:
    """A flag's value as text. Raises UserError unless it is true, on, false or off."""
    known = {"true": True, "on": True, "false": False, "off": False}
    if value.lower() not in known:
        raise UserError(f"{where}{key} is {value!r}, expected true or false")
    return known[value.lower()]
