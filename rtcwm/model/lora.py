"""Low-rank adapters over the four linear layers of every H3 block, several on one frozen base.

An `Adapter` holds weights alone; it is what a DeepSpeed adapter engine trains. `inject` gives each adapted layer of the
base a forward that adds ``scale * up(down(x))`` of the adapter that the `Slot` names at that moment, so one base serves
teacher, student and critic, and its own weights are never touched. Whoever recomputes a block in the backward pass must
bind the same adapter again: a slot left at another adapter recomputes other activations, which torch reports only when
shapes differ.

Query, key and value share one down projection (the layer is the fused ``to_qkv``): splitting it would be another
model with another number of parameters.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rtcwm.model.adapted import Joint, Layer, adapted

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
        # The pairs as a plain table: module containers are slow to index, and every layer of every block asks.
        self.table = [dict(block.items()) for block in self.blocks]
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


Active = Adapter | None | tuple[Adapter | None, ...]


class Slot:
    """Names the adapter that the hooks of one base read; None leaves the base as released, and several have an equal
    part of the batch each, in their order."""

    def __init__(self):
        self.active: Active = None

    @contextmanager
    def bind(self, *adapters: Adapter | None):
        """Makes an adapter (or one for each part of the batch, without a graph) the active one, and puts the former one
        back, also after an exception."""
        former, self.active = self.active, adapters[0] if len(adapters) == 1 else adapters
        try:
            yield
        finally:
            self.active = former

    def runner(self, adapter: Adapter | None) -> Callable[..., Tensor]:
        """A function ``run(block, hidden, *rest) -> hidden`` that runs a block with this adapter, nothing around it."""

        def run(block: nn.Module, hidden: Tensor, *rest: object) -> Tensor:
            with self.bind(adapter):
                return block(hidden, *rest)

        return run


def adapted_layers(block: nn.Module) -> dict[str, nn.Linear]:
    """The four adapted layers of one H3 block with fused projections, by site."""
    layers = (block.attn.to_qkv, block.attn.to_out[0], block.ff.net[0].proj, block.ff.net[2])
    return dict(zip(SITES, layers, strict=True))


class Site:
    """The forward of one adapted layer."""

    def __init__(self, slot: Slot, linear: nn.Linear, index: int, site: str):
        self.slot, self.linear, self.index, self.site = slot, linear, index, site

    def layer(self) -> Layer | Joint:
        """The layer with what is active now; to be asked inside of the block's forward."""
        active = self.slot.active
        return Joint(tuple(map(self._with, active))) if isinstance(active, tuple) else self._with(active)

    def _with(self, adapter: Adapter | None) -> Layer:
        if adapter is None:
            return Layer(self.linear.weight)
        pair = adapter.table[self.index][self.site]
        return Layer(self.linear.weight, pair.down, pair.up, adapter.scale)

    def __call__(self, x: Tensor) -> Tensor:
        return adapted(x, self.layer())


def layer_of(linear: nn.Linear) -> Layer | Joint:
    """What a linear layer computes with at this moment, whether it was injected or not."""
    return linear.forward.layer() if isinstance(linear.forward, Site) else Layer(linear.weight)


def inject(model: nn.Module) -> Slot:
    """Gives every adapted layer of the base its forward; returns the slot that decides what is added there."""
    slot = Slot()
    for index, block in enumerate(model.transformer_blocks):
        for site, linear in adapted_layers(block).items():
            linear.forward = Site(slot, linear, index, site)
    return slot
