"""Floating point operations by formula: what a step needs, and what it does.

A multiplication with an addition counts two. Three kinds of work count, all of it in the blocks:

- linear layers: ``2 x rows x weights`` a pass; the input's gradient costs another pass, and with a frozen base there is
  no gradient of the weights;
- attention: ``4 x pairs x heads x head width`` forward (two products) over the pairs (query, key) that the mask leaves,
  and 2.5 times that backward (five products, one of which repeats the scores);
- adapters: ``2 x rows x weights`` a pass, and two passes backward, since their weights are trained.

Left out, as under 0.1% of the released model: text refiner, embeddings, AdaLN (a few rows) and heads. At 33,248 rows
the released base has 1.28 PFLOP a linear pass and 0.91 an attention pass; a training step needs 2 and 3.5 of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rtcwm.engine.settings import ActivationSettings
from rtcwm.model.layout import SPAN_CHUNKS
from rtcwm.model.lora import AdapterShape
from rtcwm.model.masks import Rule, groups
from rtcwm.model.packing import Layout


@dataclass(frozen=True)
class Work:
    """FLOP by kind; works add, and scale by a number."""

    linear: float = 0.0
    attention: float = 0.0
    adapter: float = 0.0

    @property
    def total(self) -> float:
        return self.linear + self.attention + self.adapter

    def __add__(self, other: "Work") -> "Work":
        return Work(self.linear + other.linear, self.attention + other.attention, self.adapter + other.adapter)

    def __mul__(self, times: float) -> "Work":
        return Work(self.linear * times, self.attention * times, self.adapter * times)


@dataclass(frozen=True)
class Repeated:
    """Passes of each kind that a backward pass repeats because activations were not kept."""

    linear: float = 0.0
    attention: float = 0.0
    adapter: float = 0.0


NOTHING, WHOLE_BLOCKS = Repeated(), Repeated(1.0, 1.0, 1.0)


@dataclass(frozen=True)
class Sizes:
    """What the formulas need of a base and its adapter.

    Attributes:
        layers: blocks; weights: of the linear layers of one block, and last: of the last of them.
        width: heads x head width.
        adapter: weights of the adapter in all blocks; in one block last_up: of its last product, ffn_adapter: of its
            feed-forward, attention_downs and ffn_downs: of its products of the layers' inputs.
    """

    layers: int
    weights: int
    width: int
    adapter: int
    last: int
    last_up: int
    ffn_adapter: int
    attention_downs: int
    ffn_downs: int

    @classmethod
    def of(cls, config: Mapping, rank: int) -> "Sizes":
        """From the config of `MiniMaxH3Transformer3DModel` and the adapter's rank."""
        shape = AdapterShape.of(config, rank)
        weights = 4 * shape.hidden * shape.inner + 3 * shape.hidden * shape.ffn
        return cls(
            layers=shape.layers, weights=weights, width=shape.inner, adapter=shape.parameters,
            last=shape.hidden * shape.ffn, last_up=shape.hidden * rank,
            ffn_adapter=rank * (2 * shape.hidden + 3 * shape.ffn),
            attention_downs=rank * (shape.hidden + shape.inner), ffn_downs=rank * (shape.hidden + shape.ffn),
        )  # fmt: skip

    def forward(self, rows: int, pairs: int) -> Work:
        """One forward pass of all blocks over this many rows and (query, key) pairs."""
        return Work(
            linear=2.0 * rows * self.weights * self.layers,
            attention=4.0 * pairs * self.width * self.layers,
            adapter=2.0 * rows * self.adapter,
        )

    def trained(self, rows: int, pairs: int, repeated: Repeated = NOTHING) -> Work:
        """Forward and backward, with what the backward pass repeats; by default the work needed."""
        once = self.forward(rows, pairs)
        return Work(
            once.linear * (2 + repeated.linear),
            once.attention * (3.5 + repeated.attention),
            once.adapter * (3 + repeated.adapter),
        )

    def repeated(self, settings: ActivationSettings) -> Repeated:
        """What rtcwm's own blocks repeat under an ``activation_checkpointing`` section: all but each block's last
        product (its recompute ends with the last tensor that the gradient needs), less attention where its outputs are
        kept; of blocks whose products are kept, the adapter's small products of the layers' inputs. A feed-forward in
        parts repeats its first layer in any case."""
        kept = settings.kept_products(self.layers) / self.layers
        again, parts = (0.0, 1.0) if settings.policy == "none" else (1.0 - kept, kept)
        parts = parts if settings.ffn_rows else 0.0
        downs = kept * (self.attention_downs + (0 if settings.ffn_rows else self.ffn_downs))
        block_adapter = self.adapter / self.layers
        return Repeated(
            linear=again * (1 - self.last / self.weights) + parts * 2 * self.last / self.weights,
            attention=again if settings.policy == "recompute" else 0.0,
            adapter=again * (1 - self.last_up / block_adapter)
            + (parts * (self.ffn_adapter - self.last_up) + downs) / block_adapter,
        )


def span_pairs(layout: Layout, rule: Rule) -> int:
    """Pairs (query, key) that the rule leaves in a stream layout."""
    return sum(length(group.rows) * sum(map(length, group.keys)) for group in groups(layout, rule))


def length(rows: slice) -> int:
    return rows.stop - rows.start


@dataclass(frozen=True)
class Pass:
    """One forward of a stream: its rows and its (query, key) pairs."""

    rows: int
    pairs: int


def chunk_passes(layout: Layout, chunk: int, rule: Rule) -> tuple[Pass, Pass]:
    """What a chunk of a stream with reused keys runs: the forward that prepares the cache, and one denoising step.

    The first prepares static rows and its own proxy; a later one the chunk before it, in that chunk's own window, and
    its own proxy. ``layout`` is any stream layout of the geometry and conditions; ``chunk`` counts from 0.
    """
    static, proxy, target = layout.static, layout.proxy_chunk, layout.target_chunk

    def of_target(index: int) -> int:
        return target * (static + min(index + 1, SPAN_CHUNKS) * (proxy + target))

    seen = 1 if rule == "own" else min(chunk + 1, SPAN_CHUNKS)
    of_proxy = proxy * (static + seen * proxy)
    if chunk == 0:
        prepare = Pass(static + proxy, static * static + of_proxy)
    else:
        prepare = Pass(target + proxy, of_target(chunk - 1) + of_proxy)
    return prepare, Pass(target, of_target(chunk))


def rollout_work(
    sizes: Sizes,
    layout: Layout,
    stops: Sequence[int],
    graph_chunks: Iterable[int],
    rule: Rule,
    repeated: Repeated = NOTHING,
) -> tuple[Work, Work]:
    """Work of a rollout with these stopping steps: of its forwards, and of the backward pass of its graph chunks."""
    forward, backward, graphs = Work(), Work(), set(graph_chunks)
    for chunk, stop in enumerate(stops):
        prepare, step = chunk_passes(layout, chunk, rule)
        once = sizes.forward(step.rows, step.pairs)
        forward = forward + sizes.forward(prepare.rows, prepare.pairs) + once * (stop + 1)
        if chunk in graphs:
            backward = backward + sizes.trained(step.rows, step.pairs, repeated) + once * -1
    return forward, backward
