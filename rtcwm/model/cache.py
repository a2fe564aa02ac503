"""Keys and values of a stream, kept so that every chunk is attended to from the slot it holds now.

A forward of the sampler runs a few pieces of the packed sequence (static rows, the proxy or the target of a chunk)
against pieces of earlier forwards. A piece keeps the keys and values of all blocks as they were before rotation. When
the window slides, a chunk moves to an earlier slot and its keys are rotated anew, from the original, at every read:
rotating rotated keys would add up rounding errors chunk by chunk.

Memory: a piece is never written after it was made, and the cache is a tuple of pieces that is replaced, not changed.
A graph that reads a window therefore holds the same tensors as the live cache and owns none; a chunk that has left the
window is freed unless a graph still reads it. At the released size a row takes 1,433,600 bytes over 50 blocks, a
target chunk 6.73 GiB. Keys of a window are put together inside a block, so a graph stays free of copies only where the
blocks are checkpointed.

What reading costs: at 34,000 rows the keys of a block are 487 MB, and a step reads and writes them once to put them
together and once to rotate them, the values once: 2.9 GB, 0.7 ms at 4.3 TB/s beside 13 ms of products and attention,
5%. Keys and values of the window rotated and put together once a chunk would spare three of a chunk's five such reads
(four steps and the forward that fills the cache), 3% of a rollout, for a second window of 38.6 GiB; beside the graphs
of four chunks (60.1 GiB) and the base that fits no card of 141 GB, so it is not done.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from diffusers import MiniMaxH3Transformer3DModel
from torch import Tensor

from rtcwm.model.attention import Attend, Kernel, rotate
from rtcwm.model.blocks import dtype_of
from rtcwm.model.layout import SPAN_CHUNKS
from rtcwm.model.masks import Rule, sees
from rtcwm.model.packing import PROXY, STATIC, TARGET, Layout
from rtcwm.model.prefix import attention

STEADY = SPAN_CHUNKS
"""First chunk (from 0) that does what all later ones do: its window is full, and so was that of the chunk before it."""


def window_start(chunk: int) -> int:
    """First chunk of the window in which `chunk` is generated; the chunk's slot is the difference."""
    return max(0, chunk - SPAN_CHUNKS + 1)


@dataclass(frozen=True)
class Place:
    """Which rows a piece of a forward holds: `part` (STATIC, PROXY or TARGET) of `chunk` (-1 for static rows), run in
    the window that starts with chunk `first`."""

    part: int
    chunk: int
    first: int

    def slot_of(self, chunk: int) -> int:
        """Slot 0..5 of a chunk as these rows see it."""
        return max(0, chunk - self.first)

    def reads(self, part: int, chunk: int, rule: Rule) -> bool:
        """Whether these rows see a piece: the rule of `masks`, within the window."""
        return (part == STATIC or chunk >= self.first) and sees(self.part, self.chunk, part, chunk, rule)


@dataclass(frozen=True, eq=False)
class Piece:
    """Keys (normed, unrotated) and values of the rows of a `Place`, one tensor a block, each [B, rows, H, D]."""

    part: int
    chunk: int
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))


class Cache:
    """The live window of a stream: an immutable tuple of pieces, replaced whenever a piece comes or goes."""

    def __init__(self) -> None:
        self.pieces: tuple[Piece, ...] = ()

    def append(self, pieces: Sequence[Piece]) -> None:
        self.pieces = (*self.pieces, *pieces)

    def drop_before(self, chunk: int) -> None:
        """Lets go of proxies and targets of chunks before `chunk`; static rows stay."""
        self.pieces = tuple(piece for piece in self.pieces if piece.part == STATIC or piece.chunk >= chunk)

    @property
    def bytes(self) -> int:
        """Bytes of the keys and values of the live window."""
        return sum(piece.bytes for piece in self.pieces)


def merge(pieces: Iterable[slice]) -> list[slice]:
    """Slices in the given order, with touching neighbours joined."""
    merged: list[slice] = []
    for piece in pieces:
        touches = merged and merged[-1].stop == piece.start
        merged[-1:] = [slice(merged[-1].start, piece.stop)] if touches else [*merged[-1:], piece]
    return merged


class Span:
    """Rows and rotary angles of the slots of a six-chunk span, the only positions that a streaming model knows.

    `layout` is a stream layout of SPAN_CHUNKS chunks on the model's device.
    """

    def __init__(self, model: MiniMaxH3Transformer3DModel, layout: Layout) -> None:
        self.layout = layout
        self._cos, self._sin = model.rope(layout.position_ids)

    def rows(self, part: int, slot: int) -> slice:
        """Rows of the static part, or of the proxy or the target in a slot."""
        layout = self.layout
        if part == STATIC:
            return slice(0, layout.static)
        start = layout.static + slot * (layout.proxy_chunk + layout.target_chunk)
        middle = start + layout.proxy_chunk
        return slice(start, middle) if part == PROXY else slice(middle, middle + layout.target_chunk)

    def rotary(self, rows: Sequence[slice]) -> tuple[Tensor, Tensor]:
        """(cos, sin) of these rows, one after the other, each [rows, rotated channels] float32. Rows that touch, as the
        keys of a target chunk do, are views of one table, so that no graph owns a table of its own."""
        merged = merge(rows)
        cos, sin = ([table[piece] for piece in merged] for table in (self._cos, self._sin))
        return (cos[0], sin[0]) if len(merged) == 1 else (torch.cat(cos), torch.cat(sin))


class Store:
    """Collects what a forward without a graph leaves in the cache: clones, so that a piece owns its memory and keeps
    neither the fused qkv nor its neighbours alive."""

    def __init__(self, places: Sequence[Place], sizes: Sequence[int], blocks: int) -> None:
        self.places = tuple(places)
        self.sizes = list(sizes)
        self._kept: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(blocks)]

    def put(self, block: int, keys: Tensor, values: Tensor) -> None:
        """Keeps the unrotated keys and the values of one block. Raises RuntimeError where a graph is being built."""
        if keys.requires_grad or values.requires_grad:
            raise RuntimeError("keys and values enter the cache detached: run this forward under torch.no_grad()")
        pairs = zip(keys.split(self.sizes, dim=1), values.split(self.sizes, dim=1))
        self._kept[block] = [tuple(x.clone(memory_format=torch.contiguous_format) for x in pair) for pair in pairs]

    def pieces(self) -> list[Piece]:
        """The pieces of the forward, in the order of its rows. Raises RuntimeError where a block left nothing."""
        if not all(self._kept):
            raise RuntimeError("a block of this forward did not go through the attention processor of rtcwm")
        found = []
        for place, blocks in zip(self.places, zip(*self._kept)):
            keys, values = zip(*blocks)
            found.append(Piece(place.part, place.chunk, keys, values))
        return found


@dataclass(frozen=True, eq=False)
class Call:
    """One dense call: queries `rows` of a forward against cached pieces, then rows `own` of the forward itself.
    `rotary` puts these keys into their slots, in that order."""

    rows: slice
    cached: tuple[Piece, ...]
    own: tuple[slice, ...]
    rotary: tuple[Tensor, Tensor]


class CachedAttend(Attend):
    """Attention of one block of a forward. It knows its block: checkpointing recomputes blocks in any order."""

    def __init__(self, kernel: Kernel, calls: Sequence[Call], block: int, store: Store | None) -> None:
        self.kernel = kernel
        self.calls = tuple(calls)
        self.block = block
        self.store = store

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        q = rotate(q, rotary, self.kernel.compiled)
        out = []
        for call in self.calls:
            keys = [*(piece.keys[self.block] for piece in call.cached), *(k[:, rows] for rows in call.own)]
            values = [*(piece.values[self.block] for piece in call.cached), *(v[:, rows] for rows in call.own)]
            keys_in_slots = rotate(torch.cat(keys, dim=1), call.rotary, self.kernel.compiled)
            out.append(attention(self.kernel, q[:, call.rows], keys_in_slots, torch.cat(values, dim=1)))
        if self.store is not None:
            self.store.put(self.block, k, v)
        return out[0] if len(out) == 1 else torch.cat(out, dim=1)


def plan(places: Sequence[Place], cached: Sequence[Piece], span: Span, rule: Rule) -> tuple[Call, ...]:
    """The dense calls of a forward of `places`, in the order of its rows, against a snapshot of the cache."""
    calls, where, end = [], [], 0
    for place in places:
        rows = span.rows(place.part, place.slot_of(place.chunk))
        start, end = end, end + rows.stop - rows.start
        where.append(slice(start, end))
    for place, rows in zip(places, where):
        pieces = tuple(piece for piece in cached if place.reads(piece.part, piece.chunk, rule))
        own = [(other, at) for other, at in zip(places, where) if place.reads(other.part, other.chunk, rule)]
        keys = [*pieces, *(other for other, _ in own)]
        rotary = span.rotary([span.rows(key.part, place.slot_of(key.chunk)) for key in keys])
        calls.append(Call(rows, pieces, tuple(at for _, at in own), rotary))
    return tuple(calls)


@dataclass(frozen=True)
class RolloutMemory:
    """Bytes that a rollout has to hold on the device besides weights and one block's working set.

    `live`: keys and values of the live window of the last chunk, at its largest. `peak`: keys and values at the worst
    moment, graphs and the forward that fills the cache included. `graphs`: keys and values that the graphs alone keep
    after the rollout. `inputs`: inputs of the checkpointed blocks of the graph chunks, where they stay on the device.
    """

    live: int
    peak: int
    graphs: int
    inputs: int


def _read_by(chunk: int, kv_reuse: bool) -> set[tuple[int, int, int]]:
    """Pieces (part, chunk, chunk at which they were computed) that the denoising of a chunk reads."""
    window = range(window_start(chunk), chunk + 1)
    pieces = {(PROXY, k, k if kv_reuse else chunk) for k in window}
    # With reuse the keys of a finished chunk are computed when the next one begins.
    pieces |= {(TARGET, k, k + 1 if kv_reuse else chunk) for k in window if k < chunk}
    return pieces | {(STATIC, -1, 0)}


def rollout_memory(
    model: MiniMaxH3Transformer3DModel,
    layout: Layout,
    chunks: int,
    graph_chunks: Collection[int],
    kv_reuse: bool,
    batch: int = 1,
) -> RolloutMemory:
    """What a rollout of `chunks` chunks must hold; `layout` is any stream layout of its geometry and conditions."""
    dtype = dtype_of(model.transformer_blocks[0])
    return rollout_bytes(model.config, dtype, layout, chunks, graph_chunks, kv_reuse, batch)


def rollout_bytes(
    config: Mapping,
    dtype: torch.dtype,
    layout: Layout,
    chunks: int,
    graph_chunks: Collection[int],
    kv_reuse: bool,
    batch: int = 1,
) -> RolloutMemory:
    """`rollout_memory` from the config of a base whose blocks are of this dtype."""
    inner = config["num_attention_heads"] * config["attention_head_dim"]
    row = batch * config["num_layers"] * dtype.itemsize
    rows = {STATIC: layout.static, PROXY: layout.proxy_chunk, TARGET: layout.target_chunk}

    def size(pieces: set[tuple[int, int, int]]) -> int:
        return sum(2 * inner * row * rows[part] for part, _, _ in pieces)

    graphs: set[tuple[int, int, int]] = set()
    before: set[tuple[int, int, int]] = set()
    peak = 0
    for chunk in range(chunks):
        now = _read_by(chunk, kv_reuse)
        peak = max(peak, size(graphs | now | (before if kv_reuse else set())))
        graphs |= now if chunk in graph_chunks else set()
        before = now
    inputs = len(set(graph_chunks)) * row * config["hidden_size"] * layout.target_chunk
    return RolloutMemory(live=size(before), peak=peak, graphs=size(graphs), inputs=inputs)
