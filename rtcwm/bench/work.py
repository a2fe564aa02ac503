"""Floating point operations by formula: what a step needs, and what it does.

A multiplication with an addition counts two. Three kinds of work count, all of it in the blocks:

- linear layers: ``2 x rows x weights`` a pass; the input's gradient costs another pass, and with a frozen base there is
  no gradient of the weights;
- attention: ``4 x pairs x heads x head width`` forward (two products) over the pairs (query, key) that the mask leaves,
  and 2.5 times that backward (five products, one of which repeats the scores);
- adapters: ``2 x rows x weights`` a pass, and two passes backward, since their weights are trained.

Left out, as under 0.1% of the released model: text refiner, embeddings, AdaLN (a few rows) and heads. At 33,248 rows the
released base has 1.28 PFLOP a linear pass and 0.91 an attention pass; a training step needs 2 and 3.5 of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rtcwm.errors import UserError
from rtcwm.model.layout import SPAN_CHUNKS
from rtcwm.model.lora import AdapterShape
from rtcwm.model.masks import Rule, groups
from rtcwm.model.packing import Layout

RECOMPUTED = {"recompute": (1, 1), "selective": (1, 0), "none": (0, 0)}
"""By activation policy: passes of linear layers (adapters included) and of attention that the backward pass repeats."""


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
class Sizes:
    """What the formulas need of a base and its adapter.

    Attributes:
        layers: blocks; weights: of the linear layers of one block; width: heads x head width; adapter: weights of the
            adapter in all blocks.
    """

    layers: int
    weights: int
    width: int
    adapter: int

    @classmethod
    def of(cls, config: Mapping, rank: int) -> "Sizes":
        """From the config of `MiniMaxH3Transformer3DModel` and the adapter's rank."""
        shape = AdapterShape.of(config, rank)
        weights = 4 * shape.hidden * shape.inner + 3 * shape.hidden * shape.ffn
        return cls(shape.layers, weights, shape.inner, shape.parameters)

    def forward(self, rows: int, pairs: int) -> Work:
        """One forward pass of all blocks over this many rows and (query, key) pairs."""
        return Work(
            linear=2.0 * rows * self.weights * self.layers,
            attention=4.0 * pairs * self.width * self.layers,
            adapter=2.0 * rows * self.adapter,
        )

    def trained(self, rows: int, pairs: int, policy: str | None = None) -> Work:
        """Forward and backward; with what the backward pass repeats under an activation policy, or (None) without: the
        work needed.

        Raises:
            UserError: a policy whose repeated work is not known here.
        """
        if policy not in (None, *RECOMPUTED):
            raise UserError(f"activation policy {policy!r}: what it repeats is known for {', '.join(RECOMPUTED)} alone")
        linear, attention = RECOMPUTED[policy] if policy else (0, 0)
        once = self.forward(rows, pairs)
        return Work(once.linear * (2 + linear), once.attention * (3.5 + attention), once.adapter * (3 + linear))


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

    The first prepares static rows and its own proxy; a later one the chunk before it, in that chunk's own window, and its
    own proxy. ``layout`` is any stream layout of the geometry and conditions; ``chunk`` counts from 0.
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
    policy: str | None = None,
) -> tuple[Work, Work]:
    """Work of a rollout with these stopping steps: of its forwards, and of the backward pass of its graph chunks (with
    what the policy repeats; None: the work needed)."""
    forward, backward, graphs = Work(), Work(), set(graph_chunks)
    for chunk, stop in enumerate(stops):
        prepare, step = chunk_passes(layout, chunk, rule)
        once = sizes.forward(step.rows, step.pairs)
        forward = forward + sizes.forward(prepare.rows, prepare.pairs) + once * (stop + 1)
        if chunk in graphs:
            backward = backward + sizes.trained(step.rows, step.pairs, policy) + once * -1
    return forward, backward
