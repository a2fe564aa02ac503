"""Low-rank adapters over the four linear layers of every H3 block, several on one frozen base.

An `Adapter` holds weights alone; it is what a DeepSpeed adapter engine trains. `inject` puts one forward hook on each
adapted layer of the base. A hook adds ``scale * up(down(x))`` of the adapter that the `Slot` names at that moment, so
one base serves teacher, student and critic, and its own weights are never touched. Whoever recomputes a block in the
backward pass must bind the same adapter again: a slot left at another adapter recomputes other activations, which
torch reports only when shapes differ.

Query, key and value share one down projection (the layer is the fused ``to_qkv``): splitting it would be another
model with another number of parameters.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

SITES = ("attn_qkv", "attn_out", "ffn_in", "ffn_out")


@dataclass(frozen=True)
class AdapterShape:
    """What an adapter has to fit: sizes of the base's blocks, and the rank.

    ``scale`` of the adapter's output is ``alpha / rank``.
    """

    layers: int
    hidden: int
    inner: int
    ffn: int
    rank: int
    alpha: float

    @classmethod
    def of(cls, config: Mapping, rank: int, alpha: float | None = None) -> "AdapterShape":
        """From the config of `MiniMaxH3Transformer3DModel`; alpha defaults to the rank."""
        inner = config["num_attention_heads"] * config["attention_head_dim"]
        sizes = (config["num_layers"], config["hidden_size"], inner, config["ffn_dim"])
        return cls(*sizes, rank, float(rank if alpha is None else alpha))

    def features(self, site: str) -> tuple[int, int]:
        """Input and output width of an adapted layer."""
        return {
            "attn_qkv": (self.hidden, 3 * self.inner),
            "attn_out": (self.inner, self.hidden),
            "ffn_in": (self.hidden, 2 * self.ffn),
            "ffn_out": (self.ffn, self.hidden),
        }[site]

    @property
    def parameters(self) -> int:
        """Trainable numbers of the whole adapter."""
        return self.layers * sum(self.rank * sum(self.features(site)) for site in SITES)


class LowRank(nn.Module):
    """One pair of projections: ``down [rank, in]`` and ``up [out, rank]``."""

    def __init__(self, inputs: int, outputs: int, rank: int):
        super().__init__()
        self.down = nn.Parameter(torch.empty(rank, inputs))
        self.up = nn.Parameter(torch.empty(outputs, rank))


class Adapter(nn.Module):
    """The weights of one adapter, fp32: ``blocks[i][site].down`` and ``.up``.

    A new adapter draws its down projections (He et al. 2015, as `nn.Linear` does) from the seed and starts its up
    projections at zero, so it changes nothing until it has been trained.
    """

    def __init__(self, shape: AdapterShape, seed: int = 0):
        super().__init__()
        self.shape = shape
        self.blocks = nn.ModuleList(
            nn.ModuleDict({site: LowRank(*shape.features(site), shape.rank) for site in SITES})
            for _ in range(shape.layers)
        )
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for pair in self.pairs():
                bound = 1 / math.sqrt(pair.down.shape[1])
                pair.down.uniform_(-bound, bound, generator=generator)
                pair.up.zero_()

    @property
    def scale(self) -> float:
        return self.shape.alpha / self.shape.rank

    def pairs(self) -> Iterator[LowRank]:
        """Every pair of projections, block by block in the order of `SITES`."""
        for block in self.blocks:
            yield from (block[site] for site in SITES)

    def delta(self, block: int, site: str, x: torch.Tensor) -> torch.Tensor:
        """What the adapter adds to a layer's output: ``scale * up(down(x))`` in x's dtype; x ``[..., in]``."""
        pair = self.blocks[block][site]
        low = functional.linear(x, pair.down.to(x.dtype))
        return functional.linear(low, pair.up.to(x.dtype)) * self.scale


class Slot:
    """Names the adapter that the hooks of one base read; None leaves the base as released."""

    def __init__(self):
        self.active: Adapter | None = None

    @contextmanager
    def bind(self, adapter: Adapter | None):
        """Makes an adapter the active one, and puts the former one back, also after an exception."""
        former, self.active = self.active, adapter
        try:
            yield
        finally:
            self.active = former


def adapted_layers(block: nn.Module) -> dict[str, nn.Linear]:
    """The four adapted layers of one H3 block with fused projections, by site."""
    layers = (block.attn.to_qkv, block.attn.to_out[0], block.ff.net[0].proj, block.ff.net[2])
    return dict(zip(SITES, layers, strict=True))


def inject(model: nn.Module) -> Slot:
    """Hooks every adapted layer of the base; returns the slot that decides what the hooks add."""
    slot = Slot()

    def hook(index: int, site: str):
        def add(_module: nn.Module, inputs: tuple, output: torch.Tensor) -> torch.Tensor | None:
            adapter = slot.active
            return None if adapter is None else output + adapter.delta(index, site, inputs[0])

        return add

    for index, block in enumerate(model.transformer_blocks):
        for site, layer in adapted_layers(block).items():
            layer.register_forward_hook(hook(index, site))
    return slot
