"""What is evaluated: a model's adapter and how it is sampled, read from one line on the command line.

    NAME=ADAPTER[:KIND][,key=value...]        df4=runs/a/lora_step00150.safetensors:few,history=clean

ADAPTER is a file, "base" for the base alone, or "released" for the adapter that
ships with the embedded base. KIND is how the model is sampled:

- teacher: one 37-latent window, every row sees every row, stock layout, many Euler steps from pure noise;
- many: a stream, many Euler steps a chunk (also called causal);
- few: a stream, a few steps with fresh noise between them, as distillation trains it.

Whatever is not given comes from the adapter's metadata, and then from `rtcwm.train.inference.DEFAULTS`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rtcwm.errors import UserError
from rtcwm.model.adapter_files import read_metadata
from rtcwm.model.layout import SPAN_CHUNKS
from rtcwm.model.loading import BaseSource, embedded_adapter
from rtcwm.train.held_out import unseen_episodes
from rtcwm.train.inference import KINDS, Sampling, read_boolean, read_sampling, usual_kind
from rtcwm.train.preflight import check_adapter

ALIASES = {"causal": "many"}
ALONE, RELEASED = "base", "released"
TAKEN = ("truth", "codec")
KEYS = ("steps", "shift", "history", "kv_reuse", "forced")


@dataclass(frozen=True)
class Model:
    """One row of the evaluation.

    Attributes:
        adapter: its file, None for the base alone; objective: what the file says it was trained for.
        forced: the history is the truth after every chunk (a stream of the teacher-forced kind).
        picture1: which encoding of Picture 1 it was trained with.
        unseen: episodes that its file says were held out; None where it does not say.
    """

    name: str
    adapter: str | None
    kind: str
    sampling: Sampling
    forced: bool = False
    picture1: str = "native"
    objective: str = ""
    unseen: frozenset[str] | None = None

    def line(self) -> str:
        """The model in words."""
        told = f"{self.sampling.steps} steps, shift {self.sampling.shift:g}"
        if self.kind != "teacher":
            told = self.sampling.line(self.forced)
        source = f"{self.adapter or 'no adapter'}{f' ({self.objective})' if self.objective else ''}"
        return f"{self.name}: {self.kind}, {told}; {source}"


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
    kind = kind or usual_kind(objective)
    where = f"--model+ {text}: "
    sampling = read_sampling(where, kind, given, metadata, source)
    forced = read_boolean(where, "forced", given.get("forced", "false"))
    if kind == "teacher" and forced:
        raise UserError(f"--model+ {text}: a teacher has no history of its own chunks to replace; drop forced")
    picture1, unseen = metadata.get("picture1", "native"), unseen_episodes(metadata)
    return Model(name, adapter, kind, sampling, forced, picture1, objective, unseen)


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
