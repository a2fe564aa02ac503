"""An adapter on disk, in any of the layouts that are read: what it holds, checked, and its values where they lie.

A run looks at an adapter several times before it starts: header, values, hash, weights. `open_adapter` gives all of
them one map of the file, and what was found out about its values stays with it.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cached_property, lru_cache
from pathlib import Path

import torch

from rtcwm.errors import UserError
from rtcwm.model.adapter_config import DIFFUSERS_METADATA, PEFT_CONFIG, PEFT_WEIGHTS, config_alpha, number, read_config
from rtcwm.model.adapter_layouts import (
    LAYOUTS,
    PEFT_PREFIX,
    RELEASED_HEAD,
    RELEASED_SIZES,
    SHARES,
    Entry,
    stack_heads,
    swap_halves,
    understand,
)
from rtcwm.model.lora import SITES, AdapterShape
from rtcwm.model.tensor_files import TensorFile

STORED = ("F32", "BF16", "F16")
FOLDER_FILES = (PEFT_WEIGHTS, "pytorch_lora_weights.safetensors")
"""What an adapter's folder may hold: PEFT's file, or diffusers'."""


class AdapterFile:
    """An adapter on disk in any layout that is read: its names understood, its values where they lie.

    Attributes:
        path: as given, a file or a folder; weights: its safetensors file; metadata: that file's.
        layout: a name of `adapter_layouts`; names: which tensors belong to which layer.

    Raises:
        UserError: no such file, a pickle, a damaged file, no adapter of these blocks, several in one file, or a config
            of PEFT that is missing or means something else.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        self.weights = TensorFile(weights_file(self.path))
        self.metadata = self.weights.metadata
        self.names = understand(self.weights.shapes)
        if not self.names.entries:
            some = sorted(self.weights.shapes)[:2]
            raise UserError(
                f"{path} holds {len(self.weights.shapes)} tensors, such as {some}: not an adapter of MiniMax-H3's "
                "blocks in the layout of musubi, ComfyUI, diffusers or PEFT"
            )
        if self.names.layout is None:
            kinds = ", ".join(f"{prefix}{blocks}..." for blocks, prefix in self.names.kinds)
            raise UserError(f"{path} mixes several layouts or models ({kinds}): expected one adapter a file, split it")
        if self.names.kinds == (("blocks", PEFT_PREFIX),):
            raise UserError(
                f"{path} names the original model's layers under PEFT's prefix, which does not tell the order of its "
                f"qkv rows: if they are stacked [q; k; v], rename {PEFT_PREFIX}blocks to diffusion_model.blocks"
            )
        self.layout = self.names.layout
        self.config = read_config(self.weights, self.names)

    def entries(self) -> Iterator[tuple[int, str, Entry]]:
        """Every adapted layer of the file: block, site, names."""
        for (block, site), held in sorted(self.names.entries.items()):
            yield from ((block, site, entry) for entry in held)

    @cached_property
    def hash(self) -> str:
        """Hash over the file, and over PEFT's config where there is one: 32 hex digits."""
        if self.layout != "peft":
            return self.weights.hash
        text = self.weights.hash + json.dumps(self.config, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @cached_property
    def has_alpha(self) -> bool:
        """Whether any layer has a tensor of its own for alpha."""
        return any(entry.alpha for _, _, entry in self.entries())

    @property
    def alpha_source(self) -> str:
        """Where alpha comes from, in words."""
        if self.has_alpha:
            return "a tensor a layer"
        if self.config is not None:
            return PEFT_CONFIG if self.layout == "peft" else f"metadata {DIFFUSERS_METADATA}"
        return "metadata alpha" if number(self.metadata.get("alpha")) else "the rank: the file gives none"

    def rank(self, entry: Entry) -> int:
        """Rank of a layer whose tensors are there."""
        return self.weights.shapes[entry.down][0]

    def alpha(self, entry: Entry) -> float:
        """alpha of a layer: its tensor's, else the LoRA config's, else the metadata's, else its rank (as diffusers)."""
        if entry.alpha:
            value = self.weights.tensor(entry.alpha)
            if value.numel() != 1 or number(value.item()) is None:
                found = value.tolist()
                raise UserError(f"{self.path}: {entry.alpha} is {found}, expected one finite number other than 0")
            return float(value.item())
        if self.config is not None:
            return config_alpha(self.config, entry.module)
        told = None if self.has_alpha else number(self.metadata.get("alpha"))
        return float(self.rank(entry)) if told is None else told

    def sizes(self, config: Mapping | None = None) -> AdapterShape:
        """The blocks that the adapter is made for, with the rank and alpha of its first layer; headers and alphas alone
        are read. Ranks and alphas of other layers may differ.

        Args:
            config: of the base that it has to fit; None: it only has to agree with itself.

        Raises:
            UserError: tensors that are missing, left over, of another type, or of a size that does not fit.
        """
        first = self._complete(0, "attn_qkv", "made for another base, or for other layers than rtcwm's")[0]
        rank = self.rank(first)
        own = self._own_sizes(rank) if config is None else AdapterShape.of(config, rank)
        for block in range(own.layers):
            for site in SITES:
                self._check_layer(own, block, site)
        beyond = [entry.down for block, _, entry in self.entries() if block >= own.layers]
        if extra := sorted([*self.names.foreign, *beyond]):
            raise UserError(
                f"{self.path} holds {len(extra)} tensors that this base has no layer for, such as {extra[0]}; rtcwm "
                f"adapts {', '.join(SITES)} of {own.layers} blocks"
            )
        return AdapterShape(own.layers, own.hidden, own.inner, own.ffn, rank, self.alpha(first))

    def shape(self, config: Mapping | None = None) -> AdapterShape:
        """As `sizes`, and of one rank and one alpha in all layers, which is what rtcwm runs.

        Raises:
            UserError: also ranks or alphas that differ between layers.
        """
        shape = self.sizes(config)
        ranks = sorted({self.rank(entry) for _, _, entry in self.entries()})
        if len(ranks) > 1:
            raise UserError(
                f"{self.path} has layers of ranks {', '.join(map(str, ranks))}; rtcwm runs one rank. `rtcwm adapter "
                f"fuse {self.path} --out OUT` writes the same adapter at one rank"
            )
        if len({self.alpha(entry) for _, _, entry in self.entries()}) > 1:
            raise UserError(f"{self.path}: alpha differs between layers; one alpha for all is expected")
        return shape

    def check_values(self) -> None:
        """Reads the file through, once.

        Raises:
            UserError: the first tensor with a non-finite value, or down projections of q, k and v that differ.
        """
        if self._fault is not None:
            raise UserError(self._fault)

    def non_finite(self) -> Iterator[tuple[str, int]]:
        """Tensors with non-finite values, and how many."""
        for name in sorted(self.weights.shapes):
            bad = int((~torch.isfinite(self.weights.tensor(name))).sum())
            if bad:
                yield name, bad

    def stacked_rank(self, block: int) -> int:
        """Rank at which a fused layer holds the block's q, k and v exactly: the sum over their distinct downs."""
        distinct: list[torch.Tensor] = []
        for entry in self.names.entries[block, "attn_qkv"]:
            down = self.weights.tensor(entry.down)
            if not any(torch.equal(down, other) for other in distinct):
                distinct.append(down)
        return sum(down.shape[0] for down in distinct)

    def pair(self, block: int, site: str, head: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Down and up of a site, in the file's type and in the order of the base's fused layers: qkv [q; k; v], the
        feed-forward's input [value; gate]. Of q, k and v that are split, the first one's down stands for all.

        Args:
            head: width of an attention head of the base, for files whose qkv rows stand head by head. None: the
                release's, for a file of its sizes.

        Raises:
            UserError: qkv rows head by head, and a width of heads that is not known or does not fit.
        """
        held = self.names.entries[block, site]
        ups = [self.weights.tensor(entry.up) for entry in held]
        up = torch.cat(ups) if len(ups) > 1 else ups[0]
        original = self.names.kinds[0][0] == "blocks"
        if original and site == "ffn_in":
            up = swap_halves(up)
        if self.layout == "diffsynth" and site == "attn_qkv":
            head = self._head if head is None else head
            if up.shape[0] % (3 * head):
                raise UserError(
                    f"{self.path}: {held[0].up} has {up.shape[0]} rows, expected q, k and v of heads of width {head} "
                    "in turn"
                )
            up = stack_heads(up, head)
        return self.weights.tensor(held[0].down), up

    @cached_property
    def _head(self) -> int:
        """Width of a head where only the file is known: the release's, if the file is for a base of its sizes."""
        own = self._own_sizes(1)
        sizes = own.layers, own.hidden, own.inner, own.ffn
        if sizes != RELEASED_SIZES:
            raise UserError(
                f"{self.path}: its qkv rows stand head by head, and its sizes are not those of the released H3 "
                f"(blocks, hidden, inner, feed-forward: {sizes}, not {RELEASED_SIZES}), so the width of a head cannot "
                "be told: name the base that it was made for with --base"
            )
        return RELEASED_HEAD

    @cached_property
    def _fault(self) -> str | None:
        """What is wrong with the values, None if nothing is."""
        if found := next(self.non_finite(), None):
            return f"{self.path}: {found[0]} holds non-finite values; use an earlier file"
        for (block, site), held in self.names.entries.items():
            if len(held) < 2:
                continue
            rank, stacked = self.rank(held[0]), self.stacked_rank(block)
            if stacked != rank:
                return (
                    f"{self.path}: q, k and v of block {block} have down projections of their own ({site}, rank "
                    f"{rank}), and rtcwm trains one for the fused layer: at rank {rank} they cannot be fused, at rank "
                    f"{stacked} they can, exactly. `rtcwm adapter fuse {self.path} --out OUT` does that, and brings "
                    "all other layers to its rank"
                )
        return None

    def _complete(self, block: int, site: str, why: str) -> list[Entry]:
        """The layers of a site with all their tensors, matrices each; `why` explains one that is not there."""
        held = self.names.entries.get((block, site), [])
        broken = next((entry.missing() for entry in held if entry.missing()), "")
        if not held or broken:
            layout = LAYOUTS.get(self.layout, LAYOUTS["comfyui"])
            prefix = self.names.kinds[0][1]
            name = broken or f"{prefix}{layout.modules_of(block, site)[0]}.{layout.down}"
            raise UserError(f"{self.path} lacks {name}: {why}")
        if len(held) not in (1, 3) or (len(held) == 1 and held[0].module.endswith(SHARES)):
            found = ", ".join(entry.module for entry in held)
            raise UserError(f"{self.path} adapts {found}: expected q, k and v, or one fused layer")
        for entry in held:
            for name, form in ((entry.down, "[rank, width]"), (entry.up, "[width, rank]")):
                if len(self.weights.shapes[name]) != 2 or 0 in self.weights.shapes[name]:
                    raise UserError(f"{self.path}: {name} is {list(self.weights.shapes[name])}, expected {form}")
        return held

    def _own_sizes(self, rank: int) -> AdapterShape:
        """Sizes of the blocks as the first one's tensors give them."""
        held = {site: self._complete(0, site, "rtcwm adapts every site") for site in SITES}
        rows = {site: sum(self.weights.shapes[entry.up][0] for entry in held[site]) for site in SITES}
        hidden = self.weights.shapes[held["attn_qkv"][0].down][1]
        layers = max(block for block, _, _ in self.entries()) + 1
        return AdapterShape(layers, hidden, rows["attn_qkv"] // 3, rows["ffn_in"] // 2, rank, float(rank))

    def _check_layer(self, own: AdapterShape, block: int, site: str) -> None:
        held = self._complete(
            block, site, f"made for a base with other layers than this one's {own.layers}, or trained on fewer sites"
        )
        inputs, outputs = own.features(site)
        for entry in held:
            rank = self.rank(entry)
            for name, size in ((entry.down, (rank, inputs)), (entry.up, (outputs // len(held), rank))):
                found = self.weights.shapes[name]
                if found != size:
                    raise UserError(
                        f"{self.path}: {name} is {list(found)}, but this base and rank {rank} need {list(size)}"
                    )
                if self.weights.dtypes[name] not in STORED:
                    raise UserError(f"{self.path}: {name} is {self.weights.dtypes[name]}, expected one of {STORED}")


def open_adapter(path: Path) -> AdapterFile:
    """An adapter on disk, the same object for as long as the file stays the same."""
    path = Path(path)
    weights = weights_file(path)
    parts = [part.stat() for part in (weights, weights.with_name(PEFT_CONFIG)) if part.is_file()]
    return _opened(path, tuple((part.st_ino, part.st_size, part.st_mtime_ns) for part in parts))


@lru_cache(maxsize=4)
def _opened(path: Path, _identity: tuple) -> AdapterFile:
    return AdapterFile(path)


def weights_file(path: Path) -> Path:
    """The safetensors file that a path names: itself, or that of a PEFT or diffusers folder."""
    if not path.is_dir():
        return path
    for name in FOLDER_FILES:
        if (path / name).is_file():
            return path / name
    held = sorted(file.name for file in path.iterdir())[:5]
    raise UserError(
        f"{path} is a folder without {' or '.join(FOLDER_FILES)} (it holds {held}): name the adapter's file"
    )
