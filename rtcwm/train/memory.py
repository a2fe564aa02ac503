"""Memory of card and host that a run needs at its worst moments, by formula, before anything is built.

What lives on a card is known beforehand: the base or its part of it, adapters with their gradients and moments, keys
and values of a rollout and of its graphs, what blocks keep for their recompute, and one block at work. Each moment of a
step is such a sum, and the largest is held against the card. Not counted: latents, rotary tables and AdaLN rows (a few
0.1 GiB), the context of CUDA, and what the allocator loses in fragments. On an H200 training allocated 3 to 12% less
than is said here, distillation 1% more.

Sizes are bytes on one rank. Adapters of p numbers on N ranks hold 4p of weights; in a backward pass 4p of gradients and
4p / N of their means (ZeRO-2: the means alone) and the bucket they are averaged in; in the optimizer's step gradients,
moments and temporaries of 4p / N, 8p / N and 8p / N. Moments are on the card unless they are parked. What is sent away
from the card is in page-locked host memory, which cannot be swapped: a host that has too little kills the run.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch

from rtcwm.engine.copies import paged
from rtcwm.engine.memory import GIB
from rtcwm.engine.settings import ActivationSettings, AdapterSettings, BaseSettings
from rtcwm.model.cache import rollout_bytes
from rtcwm.model.layout import SPAN_CHUNKS
from rtcwm.model.lora import AdapterShape
from rtcwm.model.packing import Layout
from rtcwm.model.working import BlockSizes
from rtcwm.train.base_memory import card_bytes, host_bytes

BUCKET = 500_000_000
"""Numbers in the bucket that DeepSpeed averages gradients in, where a file says nothing."""


@dataclass(frozen=True)
class Moment:
    """A worst moment of a step: what it is called, and bytes on the card by what they are."""

    name: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def __str__(self) -> str:
        named = sorted(self.parts.items(), key=lambda part: -part[1])
        listed = ", ".join(f"{name} {size / GIB:.2f}" for name, size in named if size >= self.total / 1000)
        return f"{self.name} {self.total / GIB:.2f} GiB ({listed})"


@dataclass(frozen=True)
class Needs:
    """What both programs hold all the time, and how blocks run.

    Attributes:
        config: of the base; dtype: of its blocks; table: their AdaLN comes from a table; shard: ranks that share a
            copy.
        ranks: over which moments and means of gradients are divided.
        layout: of a six-chunk span; batch: samples of a forward.
    """

    config: Mapping
    dtype: torch.dtype
    table: bool
    shard: int
    ranks: int
    settings: BaseSettings
    layout: Layout
    batch: int

    @property
    def blocks(self) -> BlockSizes:
        return BlockSizes.of(self.config, self.dtype, self.settings.activations.ffn_rows)

    def base(self) -> int:
        """The base's share of a card."""
        return card_bytes(self.config, self.dtype, self.table, self.shard, self.settings)

    def kept(self, rows: int, activations: ActivationSettings, keys: int = 0) -> dict[str, int]:
        """What blocks keep of ``rows`` rows between a forward pass and its backward pass; ``keys``: put together in a
        block, which blocks without recompute keep as well."""
        sizes = self.blocks
        if activations.policy == "none":
            whole = sizes.layers * sizes.activations(rows) + 2 * sizes.outputs(keys)
            return {"blocks without recompute": whole}
        # Of those that are in host memory, the card holds one's that is recomputed and one's that come.
        with_outputs = replace(sizes, layers=min(2, sizes.layers)) if activations.offload_attention else sizes
        return {
            "block inputs": 0 if activations.cpu_checkpointing else sizes.inputs(rows),
            "attention outputs": with_outputs.outputs(rows) if activations.policy == "save_attention" else 0,
            # While all of them are there the last block is at work, and its own are counted with that.
            "outputs of linear layers": max(0, activations.kept_products(sizes.layers) - 1) * sizes.products(rows),
        }

    def away(self, rows: int) -> dict[str, int]:
        """What blocks keep of ``rows`` rows in pages of host memory, by the key that sends it there."""
        activations, one = self.settings.activations, replace(self.blocks, layers=1)
        inputs, outputs = paged(one.inputs(rows)), paged(one.outputs(rows))
        return {
            "cpu_checkpointing": self.blocks.layers * inputs if activations.cpu_checkpointing else 0,
            "offload_attention": self.blocks.layers * outputs if activations.offload_attention else 0,
        }

    def host_base(self) -> dict[str, int]:
        return {"offload_param": host_bytes(self.config, self.dtype, self.table, self.shard, self.settings, cpu=False)}

    def weights(self, shapes: Iterable[AdapterShape]) -> int:
        return sum(4 * shape.parameters for shape in shapes)

    def gradients(self, shape: AdapterShape, settings: AdapterSettings) -> int:
        """Of an adapter, in the backward pass."""
        zero = settings.deepspeed["zero_optimization"]
        means = 4 * shape.parameters // self.ranks
        buckets = (2 if zero.get("overlap_comm") else 1) if zero.get("contiguous_gradients", True) else 0
        bucket = buckets * 4 * zero.get("reduce_bucket_size", BUCKET)
        return means + (4 * shape.parameters if zero["stage"] == 1 else 0) + bucket

    def moments(self, shape: AdapterShape) -> int:
        return 8 * shape.parameters // self.ranks

    def update(self, shape: AdapterShape) -> dict[str, int]:
        """What an optimizer's step needs of an adapter beside its weights."""
        share = 4 * shape.parameters // self.ranks
        return {"gradients": share, "moments": self.moments(shape), "the optimizer's temporaries": 2 * share}


@dataclass(frozen=True)
class TrainNeeds(Needs):
    """A step of diffusion forcing."""

    adapter: AdapterShape = field(kw_only=True)
    adapter_settings: AdapterSettings = field(kw_only=True)

    def worst(self) -> tuple[Moment, ...]:
        rows, activations = self.batch * self.layout.rows, self.settings.activations
        always = {"base": self.base(), "adapter": self.weights([self.adapter])}
        backward = always | self.kept(rows, activations) | {
            "gradients": self.gradients(self.adapter, self.adapter_settings),
            "moments": 0 if self.adapter_settings.park_moments else self.moments(self.adapter),
            "a block at work": self.blocks.backward(rows),
        }  # fmt: skip
        return Moment("backward pass", backward), Moment("optimizer's step", always | self.update(self.adapter))

    def host(self) -> dict[str, int]:
        """Host memory of a rank with a card, by the key or the part of the program that takes it."""
        parked = self.moments(self.adapter) if self.adapter_settings.park_moments else 0
        return self.host_base() | self.away(self.batch * self.layout.rows) | {"park_moments": parked}

    def saved(self) -> int:
        """Bytes that rank 0 holds on the host while a checkpoint is written: weights and both moments."""
        return 12 * self.adapter.parameters

    def alternatives(self) -> list[tuple[str, "Needs"]]:
        return _engine_alternatives(self, ["adapter_settings"])


@dataclass(frozen=True)
class DistillNeeds(Needs):
    """An iteration of distillation.

    Attributes:
        student, teacher (None: none), critic: of the adapters; the teacher's weights are of the base's dtype.
        window_rows: rows of a teacher's window, shortest: its chunks; chunks: of the longest rollout; joint: both
            scores in one pass; ema: rank 0 averages the student's weights.
    """

    student: AdapterShape = field(kw_only=True)
    teacher: AdapterShape | None = field(kw_only=True)
    critic: AdapterShape = field(kw_only=True)
    student_settings: AdapterSettings = field(kw_only=True)
    critic_settings: AdapterSettings = field(kw_only=True)
    window_rows: int = field(kw_only=True)
    shortest: int = field(kw_only=True)
    chunks: int = field(kw_only=True)
    grad_chunks: int = field(kw_only=True)
    kv_reuse: bool = field(kw_only=True)
    joint: bool = field(kw_only=True)
    ema: bool = field(default=False, kw_only=True)

    def worst(self) -> tuple[Moment, ...]:
        layout, batch, sizes = self.layout, self.batch, self.blocks
        graph_chunks = range(self.chunks - self.grad_chunks, self.chunks)
        held = rollout_bytes(self.config, self.dtype, layout, self.chunks, graph_chunks, self.kv_reuse, batch)
        chunk, keys = batch * layout.target_chunk, batch * layout.rows
        # With reuse the forward that fills the cache takes one finished chunk and a proxy, else all of the history.
        filled = 1 if self.kv_reuse else SPAN_CHUNKS - 1
        filling = batch * filled * (layout.target_chunk + layout.proxy_chunk)
        activations = self.settings.activations
        one = self.kept(chunk, activations.lasting, keys)
        graphs = {name: self.grad_chunks * size for name, size in one.items()}
        teacher = self.dtype.itemsize * self.teacher.parameters if self.teacher else 0
        always = {"base": self.base(), "adapters": self.weights([self.student, self.critic]) + teacher}
        after, window = always | graphs | {"keys and values": held.graphs}, batch * self.window_rows
        return (
            Moment("rollout", always | graphs | {
                "keys and values": held.peak, "a block at work": sizes.forward(max(chunk, filling), keys),
            }),
            Moment("scores", after | {"a block at work": sizes.forward(window * (2 if self.joint else 1))}),
            Moment("student's backward pass", after | {
                "gradients": self.gradients(self.student, self.student_settings),
                "a block at work": sizes.backward(chunk, keys),
            }),
            Moment("critic's backward pass", always | self.kept(window, activations) | {
                "gradients": self.gradients(self.critic, self.critic_settings),
                "moments": 0 if self.critic_settings.park_moments else self.moments(self.critic),
                "a block at work": sizes.backward(window),
            }),
            Moment("critic's step", always | self.update(self.critic)),
        )  # fmt: skip

    def host(self) -> dict[str, int]:
        """As of `TrainNeeds`; moments of student and critic are parked while they are not in use."""
        graphs = replace(self.settings, activations=self.settings.activations.lasting)
        a_chunk = replace(self, settings=graphs).away(self.batch * self.layout.target_chunk)
        rollout = {key: self.grad_chunks * size for key, size in a_chunk.items()}
        critic = self.away(self.batch * self.window_rows)
        parked = self.moments(self.student) + self.moments(self.critic)
        worst = max(rollout, critic, key=lambda parts: sum(parts.values()))
        return self.host_base() | worst | {"parked moments": parked}

    def saved(self) -> int:
        """As of `TrainNeeds`, with the average of the student's weights."""
        return 12 * (self.student.parameters + self.critic.parameters) + (
            4 * self.student.parameters if self.ema else 0
        )

    def alternatives(self) -> list[tuple[str, "Needs"]]:
        fewer = [(f"--grad-chunks {k}", replace(self, grad_chunks=k)) for k in range(self.grad_chunks - 1, 0, -1)]
        short = [(f"--max-chunks {self.shortest}", replace(self, chunks=self.shortest))]
        apart = [("--joint-scores off", replace(self, joint=False))] if self.joint else []
        return fewer + short + apart + _engine_alternatives(self, ["student_settings", "critic_settings"])


def _engine_alternatives(needs: Needs, adapters: list[str]) -> list[tuple[str, Needs]]:
    """What the engines' files could say instead, one change at a time."""
    settings, activations = needs.settings, needs.settings.activations

    def acting(**changes: object) -> Needs:
        return replace(needs, settings=replace(settings, activations=replace(activations, **changes)))

    found = [("--batch 1", replace(needs, batch=1))] if needs.batch > 1 else []
    if activations.policy != "recompute":
        recompute = acting(policy="recompute", keep_products=0, offload_attention=False)
        found.append(("policy 'recompute' in --base-config", recompute))
    if activations.keep_products:
        found.append(("keep_products 0 in --base-config", acting(keep_products=0)))
    if not activations.cpu_checkpointing and activations.policy != "none":
        found.append(("cpu_checkpointing in --base-config", acting(cpu_checkpointing=True)))
    if activations.policy == "save_attention" and activations.cpu_checkpointing and not activations.offload_attention:
        found.append(("offload_attention in --base-config", acting(offload_attention=True)))
    if not activations.ffn_rows:
        found.append(("ffn_rows 4096 in --base-config", acting(ffn_rows=4096)))
    if not settings.offload and activations.policy != "none":
        found.append(("offload_param in --base-config", replace(needs, settings=replace(settings, offload=True))))
    small = {}
    for name in adapters:
        engine: AdapterSettings = getattr(needs, name)
        zero = engine.deepspeed["zero_optimization"] | {"stage": 2, "reduce_bucket_size": 20_000_000}
        small[name] = replace(engine, park_moments=True, deepspeed=engine.deepspeed | {"zero_optimization": zero})
    found.append(
        ("stage 2, reduce_bucket_size 20000000 and park_moments in the adapters' files", replace(needs, **small))
    )
    return found
