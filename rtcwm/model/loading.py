"""The frozen base, built on meta and filled unit by unit.

A unit is one transformer block, one refiner block or one of the small layers around them. Each is allocated, filled
and handed to ``place`` before the next one exists, so a process never holds more than what ``place`` keeps of the
model and one whole unit. Under ZeRO-3 ``place`` partitions the unit over the ranks of a shard group, and only the
group's first rank fills it: `build_base` is told by ``reads``.

Where the weights come from is a `BaseSource`: a diffusers H3 folder, or a config alone, whose weights are drawn from a
seed (the embedded base, tests, benchmarks). Each source knows its fingerprint without reading the weights.
"""

import hashlib
import inspect
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch
from diffusers import MiniMaxH3Transformer3DModel
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3RotaryPosEmbed
from safetensors import SafetensorError, safe_open
from torch import nn

from rtcwm.errors import UserError
from rtcwm.model import foreign_base
from rtcwm.model.tensor_files import refuse_pickle, weight_map
from rtcwm.strict_json import is_whole, read_object

FP32_ISLAND = ("proj_in", "audio_proj_in", "time_embedder", "proj_out", "audio_proj_out")
"""Top-level modules that stay fp32 in a bf16 base: 17.2M parameters of the release."""

WEIGHTS_INDEX = "diffusion_pytorch_model.safetensors.index.json"
WEIGHTS_FILE = "diffusion_pytorch_model.safetensors"
EMBEDDED = Path(__file__).parents[1] / "data"
"""Where the package keeps the embedded base (`embedded_base/`) and its released adapter, made by `rtcwm world-base`."""
SEEDED_ON_HOST = 10**9
"""Bases of up to this many parameters draw seeded weights on the CPU: the same numbers on every device."""


class BaseSource(Protocol):
    """Where a base comes from: its config, its identity, and the values of any of its tensors."""

    config: dict
    fingerprint: str
    description: str

    def fill(self, name: str, target: torch.Tensor) -> None:
        """Writes the values of the released (unfused) tensor ``name`` into ``target``, which has its shape."""


class SeededSource:
    """A base of this config with weights drawn from a seed: it runs like the real one and knows nothing.

    Linear layers are normal with variance 1 / inputs, norms one, biases zero but for the gates of AdaLN, which are one,
    so that every block passes a signal on.
    """

    def __init__(self, config: Mapping, seed: int = 0, description: str = "seeded random weights"):
        self.config, self.seed = dict(config), seed
        self.on_host = parameter_count(self.config) <= SEEDED_ON_HOST
        self.description = f"{description} (seed {seed})"
        self.fingerprint = _digest(json.dumps([self.config, seed], sort_keys=True).encode())

    def fill(self, name: str, target: torch.Tensor) -> None:
        values = torch.empty(target.shape, device="cpu" if self.on_host else target.device)
        generator = torch.Generator(values.device).manual_seed(int(_digest(f"{self.seed}/{name}".encode()), 16) % 2**63)
        if name.endswith("adaln_proj.linear.bias"):
            # [modality][shift, scale, gate of attention; shift, scale, gate of the ffn][hidden]
            per_tag = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, 1.0], device=values.device)
            hidden = self.config["hidden_size"]
            values = per_tag.repeat(target.numel() // (6 * hidden)).repeat_interleave(hidden)
        elif name.endswith(".bias"):
            values.zero_()
        elif target.ndim == 1:
            values.fill_(1.0)
        else:
            values.normal_(generator=generator).div_(math.sqrt(target.shape[1]))
            if "adaln_proj" in name or "norm_out" in name:
                values.mul_(0.1)
        target.copy_(values)


class FolderSource:
    """A diffusers H3 folder: the component itself, or a pipeline folder that holds ``transformer_ref``."""

    def __init__(self, folder: Path, description: str | None = None):
        inner = folder / "transformer_ref"
        self.folder = inner if (inner / "config.json").is_file() else folder
        index = self.folder / WEIGHTS_INDEX
        there = index.is_file() or (self.folder / WEIGHTS_FILE).is_file()
        if not there and (told := foreign_base.explain(self.folder)):
            raise UserError(told)
        self.config = read_config(self.folder / "config.json")
        self.description = description or str(folder)
        if index.is_file():
            self.files = weight_map(index)
        elif (self.folder / WEIGHTS_FILE).is_file():
            with _open_weights(self.folder / WEIGHTS_FILE) as file:
                self.files = dict.fromkeys(file.keys(), WEIGHTS_FILE)
        else:
            raise UserError(
                f"{self.folder} has a config but neither {WEIGHTS_FILE} nor {WEIGHTS_INDEX}; "
                "a base in another layout is converted with diffusers first"
            )
        if told := foreign_base.explain_names(self.folder, self.files):
            raise UserError(told)
        self._check_shapes()
        self.fingerprint = self._fingerprint()

    def fill(self, name: str, target: torch.Tensor) -> None:
        # Opened anew for every tensor, so that no mapping of the file outlives the copy in this rank's memory.
        with _open_weights(self.folder / self.files[name]) as file:
            target.copy_(file.get_tensor(name))

    def _check_shapes(self) -> None:
        """Every tensor that the config asks for is there in its shape; headers alone are read."""
        wanted = {
            name: list(tensor.shape) for name, tensor in meta_model(self.config, fused=False).state_dict().items()
        }
        if missing := sorted(set(wanted) - set(self.files)):
            raise UserError(f"{self.folder} lacks {len(missing)} tensors of its own config, such as {missing[0]}")
        for path, names in self._by_file():
            with _open_weights(path) as file:
                held = set(file.keys())
                for name in names & set(wanted):
                    if name not in held:
                        raise UserError(f"{path} lacks {name}, which the index says it holds; copy the file again")
                    found = list(file.get_slice(name).get_shape())
                    if found != wanted[name]:
                        raise UserError(f"{path}: {name} is {found}, its config.json asks for {wanted[name]}")

    def _fingerprint(self) -> str:
        """Hash over the config and, of every tensor, its name and its first and last row: cheap, and other weights
        give another hash. It does not notice a change that spares those rows."""
        parts = [json.dumps(self.config, sort_keys=True).encode()]
        for path, names in self._by_file():
            with _open_weights(path) as file:
                for name in sorted(names):
                    rows = file.get_slice(name)
                    ends = torch.cat([rows[:1].flatten(), rows[-1:].flatten()])
                    parts += [name.encode(), ends.to(torch.float32).numpy().tobytes()]
        return _digest(*parts)

    def _by_file(self) -> Iterator[tuple[Path, set[str]]]:
        for file in sorted(set(self.files.values())):
            yield self.folder / file, {name for name, holder in self.files.items() if holder == file}


def open_base(base: str) -> BaseSource:
    """The source that ``--base`` names.

    Args:
        base: "embedded" (the small base that ships with the package), a diffusers H3 folder, or a ``.json`` config
            whose weights are then random (for benchmarks).

    Raises:
        UserError: nothing there, or files that do not fit the config.
    """
    if base == "embedded":
        return FolderSource(EMBEDDED / "embedded_base", description="embedded base")
    path = Path(base)
    if path.suffix == ".json" and path.is_file():
        return SeededSource(read_config(path), description=f"random weights for {path}")
    if path.is_dir():
        return FolderSource(path)
    if path.is_file() and (told := foreign_base.explain(path)):
        raise UserError(f"--base {base}: {told}")
    raise UserError(
        f"--base {base}: expected 'embedded', a diffusers H3 folder or a config .json, and found none of them"
    )


def embedded_adapter() -> Path:
    """The released adapter that ships with the embedded base."""
    return EMBEDDED / "released.safetensors"


def read_config(path: Path) -> dict:
    """The architecture part of a `MiniMaxH3Transformer3DModel` config file, with defaults filled in."""
    if not path.is_file():
        raise UserError(f"no {path.name} in {path.parent}: expected a diffusers H3 folder (or its parent)")
    given = read_object(path, "the config of a MiniMaxH3Transformer3DModel")
    class_name = given.get("_class_name", "MiniMaxH3Transformer3DModel")
    if class_name != "MiniMaxH3Transformer3DModel":
        raise UserError(f"{path} describes a {class_name}, expected MiniMaxH3Transformer3DModel")
    given = {key: value for key, value in given.items() if not key.startswith("_")}
    parameters = inspect.signature(MiniMaxH3Transformer3DModel.__init__).parameters.values()
    known = {parameter.name: parameter.default for parameter in parameters if parameter.name != "self"}
    if unknown := sorted(set(given) - set(known)):
        raise UserError(f"{path} has unknown keys {unknown}; this version of diffusers knows {sorted(known)}")
    merged = known | given
    for key, default in known.items():
        value = merged[key]
        if key == "patch_size":
            fits = isinstance(value, list | tuple) and tuple(value) == (1, 2, 2)
        elif isinstance(default, float):
            fits = isinstance(value, int | float) and value > 0
        else:
            fits = is_whole(value) and value >= (0 if key == "num_refiner_layers" else 1)
        if not fits:
            raise UserError(f"{path}: {key} is {value!r}; the release has {default!r}")
    return merged | {"patch_size": list(merged["patch_size"])}


def meta_model(config: Mapping, fused: bool = True) -> MiniMaxH3Transformer3DModel:
    """The base without storage, frozen, in eval mode; with one fused ``to_qkv`` an attention unless told otherwise."""
    with torch.device("meta"):
        model = MiniMaxH3Transformer3DModel(**config)
        if fused:
            for block in [*model.transformer_blocks, *model.token_refiner.refiner_blocks]:
                fuse(block.attn)
    return model.requires_grad_(False).eval()


def fuse(attention: nn.Module) -> None:
    """Puts one layer ``to_qkv`` (rows [q; k; v]) in the place of the three, without weights of its own to copy."""
    attention.to_qkv = nn.Linear(attention.to_q.in_features, 3 * attention.inner_dim, bias=False)
    del attention.to_q, attention.to_k, attention.to_v
    attention.fused_projections = True


def parameter_count(config: Mapping) -> int:
    """Parameters of a base of this config."""
    return sum(parameter.numel() for parameter in meta_model(config).parameters())


def build_base(
    source: BaseSource,
    device: torch.device,
    dtype: torch.dtype,
    reads: bool = True,
    place: Callable[[nn.Module], None] = lambda unit: None,
    adaln: Callable[[int], nn.Module] | None = None,
) -> MiniMaxH3Transformer3DModel:
    """Builds the base of a source, unit by unit.

    Args:
        device: where units are filled; dtype: of everything but the fp32 island (`FP32_ISLAND`).
        reads: whether this process fills the units, or leaves them uninitialised for ``place`` to broadcast into.
        place: called with every filled unit; may partition it.
        adaln: gives what stands in the place of a block's AdaLN, whose weights are then not there at all
            (`modulation.AdalnTable.stand_in`).
    """
    model = meta_model(source.config)
    if adaln is not None:
        for index, block in enumerate(model.transformer_blocks):
            block.adaln_proj = adaln(index)
    for name, module in model.named_children():
        module.to(torch.float32 if name in FP32_ISLAND else dtype)
    # Its only tensor is a computed fp32 buffer, which no file holds.
    model.rope = MiniMaxH3RotaryPosEmbed(source.config["rope_freq_dim"], source.config["rope_theta"]).to(device)
    for prefix, unit in units(model):
        unit.to_empty(device=device)
        if reads:
            with torch.no_grad():
                for name, tensor in unit.named_parameters():
                    _fill(source, f"{prefix}.{name}", tensor)
        place(unit)
    return model


def units(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The base cut into parts that are loaded one at a time, with the name of each."""
    for name, module in model.named_children():
        if name == "transformer_blocks":
            yield from ((f"{name}.{index}", block) for index, block in enumerate(module))
        elif name == "token_refiner":
            for index, block in enumerate(module.refiner_blocks):
                yield f"{name}.refiner_blocks.{index}", block
            yield f"{name}.final_norm", module.final_norm
        elif next(module.parameters(), None) is not None:
            yield name, module


def _fill(source: BaseSource, name: str, target: torch.Tensor) -> None:
    """Fills one tensor, a fused one from its three released parts."""
    if ".to_qkv." in name:
        for part, rows in zip("qkv", target.chunk(3), strict=True):
            source.fill(name.replace(".to_qkv.", f".to_{part}."), rows)
    else:
        source.fill(name, target)


def _open_weights(path: Path):
    try:
        refuse_pickle(path)
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"base weights {path} cannot be read ({error}); copy the file again") from error


def _digest(*parts: bytes) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
