"""Names of an adapter's tensors in the files of other programs.

Two vocabularies are in use. The original model's: ``blocks.{i}.`` and ``attn.qkv_proj`` (fused, rows [q; k; v]),
``attn.out_proj``, ``mlp.fc1`` (rows [gate; value]), ``mlp.fc2``. And diffusers': ``transformer_blocks.{i}.`` and
``attn.to_q``, ``to_k``, ``to_v`` (``attn.to_qkv`` once fused), ``attn.to_out.0``, ``ff.net.0.proj`` (rows [value;
gate]), ``ff.net.2``. A file adds a prefix, may write the dots as underscores, and ends a name in ``lora_down.weight``
and ``lora_up.weight``, or ``lora_A.weight`` and ``lora_B.weight``.

============  =========================================================  ==========  ==============================
layout        first name of a block                                      qkv         alpha
============  =========================================================  ==========  ==============================
musubi        ``lora_unet_blocks_0_attn_qkv_proj.lora_down.weight``      fused       a tensor a layer
comfyui       ``diffusion_model.blocks.0.attn.qkv_proj.lora_A.weight``   fused       a tensor a layer
diffusers     ``transformer_ref.transformer_blocks.0.attn.to_q.lora_A``  split       ``lora_adapter_metadata``
peft          ``base_model.model.transformer_blocks.0.attn.to_q.lora_A`` split       ``adapter_config.json``
============  =========================================================  ==========  ==============================

A fifth is read and not written: "diffsynth", the original names with PEFT's ``.default.``; its qkv rows stand head by
head, [q; k; v] of each. By shape it cannot be told from the stacked order, by its names it can. The
width of a head, which it takes to stack them, no file says: it is the base's.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from rtcwm.model.lora import SITES

ORIGINAL = dict(zip(SITES, ("attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2"), strict=True))
DIFFUSERS = dict(zip(SITES, ("attn.to_qkv", "attn.to_out.0", "ff.net.0.proj", "ff.net.2"), strict=True))
SHARES = ("attn.to_q", "attn.to_k", "attn.to_v")
PEFT_PREFIX = "base_model.model."
RELEASED_HEAD = 128
"""Width of an attention head of the release."""
RELEASED_SIZES = (50, 5376, 7168, 14336)
"""Blocks, hidden, inner and feed-forward width of the release."""

_NAME = re.compile(
    r"(?P<prefix>lora_unet_|(?:model\.)?diffusion_model\.|transformer_ref\.|transformer\.|base_model\.model\.)?"
    r"(?P<blocks>transformer_blocks|blocks)[._](?P<block>\d+)[._](?P<module>[a-z_.0-9]+?)"
    r"\.(?:(?P<down>lora_down|lora_A)|(?P<up>lora_up|lora_B)|(?P<alpha>alpha))(?P<default>\.default)?(?:\.weight)?"
)


@dataclass(frozen=True)
class Layout:
    """How a file that is written names things."""

    prefix: str
    blocks: str
    modules: dict[str, str]
    down: str
    up: str
    flat: bool = False
    split: bool = False

    def modules_of(self, block: int, site: str) -> tuple[str, ...]:
        """Names of the layers of a site: one, or those of q, k and v."""
        names = SHARES if self.split and site == "attn_qkv" else (self.modules[site],)
        dotted = [f"{self.blocks}.{block}.{name}" for name in names]
        return tuple(name.replace(".", "_") if self.flat else name for name in dotted)


LAYOUTS = {
    "musubi": Layout("lora_unet_", "blocks", ORIGINAL, "lora_down.weight", "lora_up.weight", flat=True),
    "comfyui": Layout("diffusion_model.", "blocks", ORIGINAL, "lora_A.weight", "lora_B.weight"),
    "diffusers": Layout(
        "transformer_ref.", "transformer_blocks", DIFFUSERS, "lora_A.weight", "lora_B.weight", split=True
    ),
    "peft": Layout(PEFT_PREFIX, "transformer_blocks", DIFFUSERS, "lora_A.weight", "lora_B.weight", split=True),
}


@dataclass
class Entry:
    """One adapted layer of a file: the names of its tensors ("" where one is missing) and the module's dotted name."""

    module: str
    down: str = ""
    up: str = ""
    alpha: str = ""

    def missing(self) -> str:
        """Name of the tensor that is missing, after the one that is there; "" for none."""
        if self.down and self.up:
            return ""
        given = self.down or self.up or self.alpha
        pairs = (("lora_down", "lora_up"), ("lora_A", "lora_B"))
        for down, up in pairs:
            given_down, given_up = f".{down}.", f".{up}."
            if given_down in given:
                return given.replace(given_down, given_up)
            if given_up in given:
                return given.replace(given_up, given_down)
        return f"the weights that belong to {given}"


@dataclass(frozen=True)
class Names:
    """The names of a file, understood.

    Attributes:
        layout: as in the table above; None where no name, or not all of one layout, is of an adapted layer.
        kinds: every (vocabulary, prefix) found; entries: by (block, site), one, or those of q, k and v in that order.
        foreign: names that belong to no adapted layer.
    """

    layout: str | None
    kinds: tuple[tuple[str, str], ...]
    entries: dict[tuple[int, str], list[Entry]]
    foreign: tuple[str, ...]


def _vocabulary() -> dict[tuple[str, str], tuple[str, str]]:
    """(vocabulary, layer name with underscores) -> site, dotted name."""
    found = {}
    for vocabulary, names in (("blocks", ORIGINAL), ("transformer_blocks", DIFFUSERS)):
        found |= {(vocabulary, name.replace(".", "_")): (site, name) for site, name in names.items()}
    return found | {("transformer_blocks", name.replace(".", "_")): ("attn_qkv", name) for name in SHARES}


_LAYERS = _vocabulary()


def understand(names: Iterable[str]) -> Names:
    """Sorts the names of a file by layer, whatever its prefix."""
    entries: dict[tuple[int, str], dict[str, Entry]] = {}
    foreign, kinds, by_head = [], set(), False
    for name in sorted(names):
        match = _NAME.fullmatch(name)
        layer = match and _LAYERS.get((match["blocks"], match["module"].replace(".", "_")))
        if not layer:
            foreign.append(name)
            continue
        site, module = layer
        kinds.add((match["blocks"], match["prefix"] or ""))
        by_head |= match["blocks"] == "blocks" and bool(match["default"])
        held = entries.setdefault((int(match["block"]), site), {})
        entry = held.setdefault(module, Entry(f"{match['blocks']}.{match['block']}.{module}"))
        part = next(part for part in ("down", "up", "alpha") if match[part])
        if getattr(entry, part):
            foreign.append(name)  # a layer that is named twice
        else:
            setattr(entry, part, name)
    layout = _layout(*next(iter(kinds)), by_head) if len(kinds) == 1 else None
    modules = (*ORIGINAL.values(), *DIFFUSERS.values(), *SHARES)  # in this order: q, k, v
    ordered = {key: [held[module] for module in modules if module in held] for key, held in entries.items()}
    return Names(layout, tuple(sorted(kinds)), ordered, tuple(foreign))


def _layout(vocabulary: str, prefix: str, by_head: bool) -> str:
    if vocabulary == "transformer_blocks":
        return "peft" if prefix == PEFT_PREFIX else "diffusers"
    return "musubi" if prefix == "lora_unet_" else "diffsynth" if by_head else "comfyui"


def layout_tensors(
    layout: str, pairs: Iterable[tuple[int, str, torch.Tensor, torch.Tensor]], alpha: float
) -> dict[str, torch.Tensor]:
    """An adapter's tensors under the names of a layout that is written.

    Args:
        layout: a key of `LAYOUTS`; alpha: of all layers.
        pairs: (block, site, down, up) in the order of the base's fused layers: qkv [q; k; v], the feed-forward's input
            [value; gate].
    """
    names, tensors = LAYOUTS[layout], {}
    for block, site, down, up in pairs:
        if site == "ffn_in" and names.modules is ORIGINAL:
            up = swap_halves(up)
        modules = names.modules_of(block, site)
        for module, rows in zip(modules, up.chunk(len(modules)), strict=True):
            # A copy each: a file's tensors may not share memory.
            tensors[f"{names.prefix}{module}.{names.down}"] = down.clone(memory_format=torch.contiguous_format)
            tensors[f"{names.prefix}{module}.{names.up}"] = rows.clone(memory_format=torch.contiguous_format)
            if not names.split:
                tensors[f"{names.prefix}{module}.alpha"] = torch.tensor(alpha, dtype=torch.float32)
    return tensors


def swap_halves(up: torch.Tensor) -> torch.Tensor:
    """[value; gate] to [gate; value] and back: rows of the fused feed-forward input's up projection."""
    return torch.cat(up.chunk(2)[::-1])


def stack_heads(up: torch.Tensor, head: int) -> torch.Tensor:
    """Rows [q; k; v] of head after head, as [q; k; v] of all heads; ``head``: the width of one."""
    return up.unflatten(0, (-1, 3, head)).transpose(0, 1).flatten(0, 2)
