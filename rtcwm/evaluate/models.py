"""What is evaluated: a model's adapter and how it is sampled, read from one line on the command line.

    NAME=ADAPTER[:KIND][,key=value...]        df4=runs/a/lora_step00150.safetensors:few,history=clean

ADAPTER is a file, "base" for the base alone, or "released" for the adapter that
ships with the embedded base. KIND is how the model is sampled:

- teacher: one 37-latent window, every row sees every row, stock layout, many Euler steps from pure noise;
- many: a stream, many Euler steps a chunk (also called causal);
- few: a stream, a few steps with fresh noise between them, as distillation trains it.

Whatever is not given comes from the adapter's metadata, and then from `DEFAULTS`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rtcwm.errors import UserError
from rtcwm.model.adapter_files import read_metadata
from rtcwm.model.layout import SPAN_CHUNKS
from rtcwm.model.loading import BaseSource, embedded_adapter
from rtcwm.model.schedule import SamplerConfig
from rtcwm.train.preflight import check_adapter

KINDS = ("teacher", "many", "few")
ALIASES = {"causal": "many"}
ALONE, RELEASED = "base", "released"
TAKEN = ("truth", "codec")
CAUSAL_OBJECTIVES = ("df", "tf")

DEFAULTS: dict[str, dict[str, str]] = {
    "teacher": {"steps": "20", "shift": "3.0", "history": "clean"},
    "many": {"steps": "20", "shift": "3.0", "history": "clean"},
    "few": {"steps": "4", "shift": "5.0", "history": "last-step"},
}
RELEASED_WIDTH, RELEASED_SHIFT = 5376, "12.0"
"""Hidden width of the released H3, and the shift of its video schedule, which its teachers take in place of 3."""

KEYS = ("steps", "shift", "history", "kv_reuse", "forced")


@dataclass(frozen=True, kw_only=True)
class Sampling(SamplerConfig):
    """A `SamplerConfig` whose history may also be attended to at a noise level of one's own, `sigma` in 0..1."""

    sigma: float | None = None

    def history_level(self, chunk: int) -> Tensor:
        return super().history_level(chunk) if self.sigma is None or chunk == 0 else torch.tensor(self.sigma)


@dataclass(frozen=True)
class Model:
    """One row of the evaluation.

    Attributes:
        adapter: its file, None for the base alone; objective: what the file says it was trained for.
        forced: the history is the truth after every chunk (a stream of the teacher-forced kind).
        picture1: which encoding of Picture 1 it was trained with.
    """

    name: str
    adapter: str | None
    kind: str
    sampling: Sampling
    forced: bool = False
    picture1: str = "native"
    objective: str = ""

    def line(self) -> str:
        """The model in words."""
        sampling, history = self.sampling, ""
        if self.kind != "teacher":
            level = sampling.history if sampling.sigma is None else f"at {sampling.sigma:g}"
            history = f", history {'true, ' if self.forced else ''}{level}, kv_reuse {str(sampling.kv_reuse).lower()}"
        source = f"{self.adapter or 'no adapter'}{f' ({self.objective})' if self.objective else ''}"
        return f"{self.name}: {self.kind}, {sampling.steps} steps, shift {sampling.shift:g}{history}; {source}"


def read_models(given: Sequence[str], source: BaseSource, codec: str) -> tuple[Model, ...]:
    """All models of the command line, checked against the base and the clips' codec by their headers.

    Raises:
        UserError: none, two of one name, or a fault of `read_model`.
    """
    if not given:
        raise UserError("no model to evaluate: name one with --model+ NAME=ADAPTER[:KIND], such as --model+ base=base")
    models = tuple(read_model(text, source, codec) for text in given)
    names = [model.name for model in models]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(
            f"--model+ {twice[0]}=... is given {names.count(twice[0])} times: give every model its own name"
        )
    return models


def read_model(text: str, source: BaseSource, codec: str) -> Model:
    """One model.

    Raises:
        UserError: a line that cannot be read, an unknown kind or key, a file that is not there or belongs to another
            base or codec, values that do not go together.
    """
    name, adapter, kind, given = split(text)
    metadata: dict[str, str] = {}
    if adapter == RELEASED:
        adapter = str(embedded_adapter())
    if adapter is not None:
        if not Path(adapter).exists():
            raise UserError(f"--model+ {text}: there is no adapter file at {adapter}; name a file, or 'base' for none")
        check_adapter(adapter, source, codec=codec, span=str(SPAN_CHUNKS))
        metadata = read_metadata(Path(adapter))
    objective = metadata.get("objective", "")
    if kind is None and objective == "critic":
        raise UserError(
            f"--model+ {text}: {adapter} is a critic; name the student beside it, or a kind ({', '.join(KINDS)})"
        )
    kind = kind or ("few" if objective == "dmd" else "many" if objective in CAUSAL_OBJECTIVES else "teacher")
    settings = DEFAULTS[kind] | _trained(kind, objective, metadata, source) | given
    sampling = _sampling(text, kind, settings, metadata.get("mask_rule", "E"))
    forced = _boolean(text, "forced", settings.get("forced", "false"))
    if kind == "teacher" and forced:
        raise UserError(f"--model+ {text}: a teacher has no history of its own chunks to replace; drop forced")
    return Model(name, adapter, kind, sampling, forced, metadata.get("picture1", "native"), objective)


def split(text: str) -> tuple[str, str | None, str | None, dict[str, str]]:
    """Name, adapter (None for the base alone), kind if any, and key=value pairs of one line."""
    form = "expected NAME=ADAPTER[:KIND][,key=value...]"
    name, equals, rest = text.partition("=")
    adapter, *pairs = rest.split(",")
    path, colon, kind = adapter.rpartition(":")
    if not colon or "/" in kind or kind.endswith(".safetensors"):  # a path may hold a colon
        path, kind = adapter, ""
    if not equals or not path or not all(char.isalnum() or char in "-_." for char in name) or not name.strip("."):
        raise UserError(f"--model+ {text}: {form}, with a name of letters, digits, '-', '_' and '.'")
    if name in TAKEN:
        raise UserError(f"--model+ {text}: the name {name!r} is the reference row's; choose another")
    kind = ALIASES.get(kind, kind)
    if kind not in (*KINDS, ""):
        raise UserError(f"--model+ {text}: kind {kind!r} is not one of {', '.join((*KINDS, *ALIASES))}")
    given: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or key not in KEYS or not value:
            raise UserError(f"--model+ {text}: found {pair!r}; {form}, key one of {', '.join(KEYS)}")
        given[key] = value
    return name, None if path == ALONE else path, kind or None, given


def _trained(kind: str, objective: str, metadata: Mapping[str, str], source: BaseSource) -> dict[str, str]:
    """What the adapter was trained for, where it is meant for this kind of sampling."""
    if kind == "few" and objective == "dmd":
        return {key: metadata[key] for key in ("steps", "shift", "history", "kv_reuse") if key in metadata}
    if kind == "many" and objective in CAUSAL_OBJECTIVES:
        return {key: metadata[key] for key in ("shift",) if key in metadata}
    if kind == "teacher":
        shift = {"shift": RELEASED_SHIFT} if source.config["hidden_size"] == RELEASED_WIDTH else {}
        causal = objective in (*CAUSAL_OBJECTIVES, "dmd", "critic")
        return shift if causal or "shift" not in metadata else {"shift": metadata["shift"]}
    return {}


def _sampling(text: str, kind: str, settings: Mapping[str, str], rule: str) -> Sampling:
    history, sigma = settings["history"], None
    if history not in ("clean", "last-step"):
        sigma, history = _number(text, "history", history, float), "clean"
        if not 0 <= sigma <= 1:
            raise UserError(f"--model+ {text}: history {sigma:g}: expected clean, last-step or a noise level of 0 to 1")
    return Sampling(
        steps=_number(text, "steps", settings["steps"], int),
        shift=_number(text, "shift", settings["shift"], float),
        history=history,
        sigma=sigma,
        kv_reuse=_boolean(text, "kv_reuse", settings.get("kv_reuse", "true")),
        rule=rule,
        solver="renoise" if kind == "few" else "euler",
    )


def _number(text: str, key: str, value: str, kind: type) -> float | int:
    try:
        return kind(value)
    except ValueError as error:
        word = "a whole number" if kind is int else "a number"
        also = ", clean or last-step" if key == "history" else ""
        raise UserError(f"--model+ {text}: {key} is {value!r}, expected {word}{also}") from error


def _boolean(text: str, key: str, value: str) -> bool:
    known = {"true": True, "on": True, "false": False, "off": False}
    if value.lower() not in known:
        raise UserError(f"--model+ {text}: {key} is {value!r}, expected true or false")
    return known[value.lower()]
