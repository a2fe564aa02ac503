"""What the cache keeps: unrotated, unchanged, as little as stated, and read back in the right slots."""

import gc
import weakref

import pytest
import torch
from diffusers import MiniMaxH3Transformer3DModel
from small import CONFIG, random_window
from stream_reference import CPU, PROXY_ROWS, STATIC_ROWS, TARGET_ROWS, noise, positions, request, rotated
from torch.utils.checkpoint import checkpoint
from tracker import Tracker

from rtcwm.model.attention import Kernel, install
from rtcwm.model.cache import Piece, Place, Store, rollout_memory, window_start
from rtcwm.model.layout import RELEASED, Geometry
from rtcwm.model.masks import boolean_mask
from rtcwm.model.packing import PROXY, STATIC, TARGET, stream_layout
from rtcwm.model.sampler import Conditions, Stream, rollout
from rtcwm.model.schedule import SamplerConfig

ROW_BYTES = 2 * 2 * 64 * 4  # keys and values of two blocks, 2 heads x 32 channels, float32
CONFIGS = [SamplerConfig(steps=2), SamplerConfig(steps=2, kv_reuse=False)]


@pytest.fixture(scope="module")
def layout():
    return random_window(latents=30).layout(stream=True)


def opened(model, config, chunks, kernel=CPU):
    conditions, proxy = request(chunks)
    return Stream(model, kernel, conditions, config, noise), proxy.split(5, dim=2)


# Who reads what


def test_windows():
    assert [window_start(chunk) for chunk in (0, 4, 5, 6, 13)] == [0, 0, 0, 1, 8]


@pytest.mark.parametrize("rule", ["E", "own", "ahead1"])
def test_pieces_are_read_as_the_mask_says(layout, rule):
    """Within a span, piece by piece, against the boolean mask of its rows."""
    mask = boolean_mask(layout, rule)
    pieces = [(STATIC, -1), *((part, chunk) for chunk in range(6) for part in (PROXY, TARGET))]
    row = {piece: int(((layout.part == piece[0]) & (layout.chunk == piece[1])).nonzero()[0]) for piece in pieces}
    for query in pieces:
        for key in pieces:
            assert Place(*query, first=0).reads(*key, rule) == bool(mask[row[query], row[key]]), (query, key)


@pytest.mark.parametrize("rule", ["E", "own"])
def test_nothing_before_the_window_is_read(rule):
    for part in (PROXY, TARGET):
        place = Place(part, 9, first=4)
        assert place.slot_of(9) == 5 and place.slot_of(4) == 0 and place.slot_of(-1) == 0
        assert not any(place.reads(kind, chunk, rule) for kind in (PROXY, TARGET) for chunk in range(4))


# Keys in their slots


@pytest.mark.parametrize("config", CONFIGS)
def test_keys_are_rotated_to_their_slots(model, config):
    """The keys that reach the kernel after the window has slid twice, against unrotated keys moved by 85/3 a chunk."""
    seen = []

    def record(q, k, v):
        seen.append((q, k, v))
        return CPU.fn(q, k, v)

    stream, proxies = opened(model, config, 8, Kernel("recorded", record, ""))
    for proxy in proxies:
        del seen[:]
        stream.next_chunk(proxy)
    held = {(piece.part, piece.chunk) for piece in stream.cache.pieces}
    assert held == {(STATIC, -1), *((PROXY, k) for k in range(2, 8)), *((TARGET, k) for k in range(2, 7))}
    for block in range(2):
        _, keys, values = seen[block - 2]  # the last two calls: both blocks of the last step of chunk 7
        expected = [
            rotated(piece.keys[block], positions(piece.part, max(0, piece.chunk - 2)), model.rope.inv_freq)
            for piece in stream.cache.pieces
        ]
        torch.testing.assert_close(keys[:, :-TARGET_ROWS], torch.cat(expected, dim=1), rtol=1e-4, atol=1e-4)
        stored = torch.cat([piece.values[block] for piece in stream.cache.pieces], dim=1)
        assert torch.equal(values[:, :-TARGET_ROWS], stored)


def test_queries_sit_in_the_last_slot(model):
    """Own keys and queries of chunk 9 are at slot 5, not at the ninth."""
    seen = []

    def record(q, k, v):
        seen.append((q, k))
        return CPU.fn(q, k, v)

    unrotated = []
    stream, proxies = opened(model, SamplerConfig(steps=1, history="clean"), 10, Kernel("recorded", record, ""))
    attn = model.transformer_blocks[0].attn

    def normed(module, args, qkv):
        unrotated.append(attn.norm_q(qkv.chunk(3, dim=-1)[0].unflatten(-1, (attn.heads, -1))))

    handle = attn.to_qkv.register_forward_hook(normed)
    for proxy in proxies:
        stream.next_chunk(proxy)
    handle.remove()
    expected = rotated(unrotated[-1], positions(TARGET, 5), model.rope.inv_freq)
    torch.testing.assert_close(seen[-2][0], expected, rtol=1e-4, atol=1e-4)


# Nothing is written in place


@pytest.mark.parametrize("config", CONFIGS)
def test_pieces_never_change(model, config):
    stream, proxies = opened(model, config, 12)
    known: dict[int, tuple[Piece, list[torch.Tensor], list[int]]] = {}
    for proxy in proxies:
        stream.next_chunk(proxy)
        for piece in stream.cache.pieces:
            tensors = [*piece.keys, *piece.values]
            known.setdefault(id(piece), (piece, [x.clone() for x in tensors], [x._version for x in tensors]))
    made = 1 + (12 + 11 if config.kv_reuse else sum(2 * min(k, 5) + 1 for k in range(12)))
    assert len(known) == made
    for piece, contents, versions in known.values():
        for tensor, content, version in zip((*piece.keys, *piece.values), contents, versions, strict=True):
            assert tensor._version == version and torch.equal(tensor, content)


def test_a_piece_owns_its_memory(model):
    """No piece is a view of fused projections or of a neighbour, which it would keep alive."""
    stream, proxies = opened(model, SamplerConfig(steps=1, history="clean"), 3)
    for proxy in proxies:
        stream.next_chunk(proxy)
    tensors = [x for piece in stream.cache.pieces for x in (*piece.keys, *piece.values)]
    assert len({x.untyped_storage().data_ptr() for x in tensors}) == len(tensors)
    assert all(x.untyped_storage().nbytes() == x.nbytes for x in tensors)


def test_stored_keys_carry_no_graph():
    store = Store([Place(STATIC, -1, 0)], [3], blocks=1)
    x = torch.zeros(1, 3, 2, 4)
    with pytest.raises(RuntimeError, match="no_grad"):
        store.put(0, x.clone().requires_grad_(), x)
    with pytest.raises(RuntimeError, match="attention processor"):
        store.pieces()


# Memory


def test_window_of_the_live_cache(model):
    """Static rows, the proxies of the window and its finished targets; nothing grows with the stream."""
    stream, proxies = opened(model, SamplerConfig(steps=1, history="clean"), 14)
    for chunk, proxy in enumerate(proxies):
        stream.next_chunk(proxy)
        history = min(chunk, 5)
        rows = STATIC_ROWS + (history + 1) * PROXY_ROWS + history * TARGET_ROWS
        assert stream.cache.bytes == rows * ROW_BYTES


def test_dropped_pieces_are_freed(model):
    stream, proxies = opened(model, SamplerConfig(steps=1, history="clean"), 9)
    alive = {}
    for proxy in proxies:
        stream.next_chunk(proxy)
        alive |= {(piece.part, piece.chunk): weakref.ref(piece.keys[0]) for piece in stream.cache.pieces}
    gc.collect()
    left = {label for label, reference in alive.items() if reference() is not None}
    assert left == {(STATIC, -1), *((PROXY, k) for k in range(3, 9)), *((TARGET, k) for k in range(3, 8))}


HEADS = (2, 32)  # keys and values, pieces or copies, are the tensors [B, rows, 2, 32]
WIDE = dict(geometry=Geometry(8, 12, 3, 3), picture=(4, 6))  # 24 target rows a latent: a chunk outweighs small things


def plain(block, *args):
    return block(*args)


def kept(block, hidden, *rest):
    return block(hidden if hidden.requires_grad else hidden.detach().requires_grad_(), *rest)


def checkpointed(block, hidden, *rest):
    return checkpoint(kept, block, hidden, *rest, use_reentrant=False)


def tracked(model, config, chunks, graphs, graph_run=checkpointed):
    """A rollout of wide chunks; what is alive after it, and what is stated."""
    conditions = Conditions.of(random_window(30, **WIDE))
    proxy = random_window(5 * chunks, **WIDE, seed=2).proxy
    layout = random_window(30, **WIDE).layout(stream=True)
    stated = rollout_memory(model, layout, chunks, graphs, config.kv_reuse)
    with Tracker() as tracker:
        hooks = (tracker.hook(plain, *HEADS), tracker.hook(graph_run, *HEADS))
        latents = rollout(model, CPU, conditions, proxy, config, noise, [1] * chunks, graphs, *hooks)
        gc.collect()
    return tracker, latents, stated, layout


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("graphs", [(), (3,), (6, 7, 8), (2, 9)])
def test_what_a_rollout_keeps_alive(model, config, graphs):
    """Measured keys and values equal what is stated, to the byte, at the worst moment and after the rollout; a backward
    pass frees them although the chunks live on."""
    tracker, latents, stated, _ = tracked(model, config, 10, graphs)
    assert tracker.bytes(*HEADS) == stated.graphs
    assert tracker.peak == stated.peak
    if graphs:
        sum(latents[k].sum() for k in graphs).backward()
        gc.collect()
        assert tracker.bytes(*HEADS) == 0


def test_everything_else_is_small():
    """All memory after a rollout: keys, values, block inputs, chunks, angles; a tenth of a chunk's cache a graph."""
    torch.manual_seed(1)
    deep = MiniMaxH3Transformer3DModel(**CONFIG | {"num_layers": 8}).requires_grad_(False)
    for block in [*deep.transformer_blocks, *deep.token_refiner.refiner_blocks]:
        block.attn.fuse_projections()
    install(deep, CPU)
    tracker, latents, stated, layout = tracked(deep, SamplerConfig(steps=2), 10, (6, 7, 8))
    a_chunk = 4 * ROW_BYTES * layout.target_chunk
    angles = 2 * layout.rows * 24 * 4
    expected = stated.graphs + stated.inputs + sum(chunk.nbytes for chunk in latents) + angles
    assert 0 <= tracker.bytes() - expected < 0.35 * a_chunk


def test_the_measure_sees_copies(model):
    """Without checkpointing a graph owns copies of what it read, and the measure tells."""
    tracker, _, stated, layout = tracked(model, SamplerConfig(steps=2), 10, (8,), graph_run=kept)
    assert tracker.bytes(*HEADS) >= stated.graphs + ROW_BYTES * layout.target_chunk


def test_a_leak_of_one_chunk_shows(model):
    held = []

    def leaking(block, hidden, temb, adaln_index, rotary, attend):
        out = block(hidden, temb, adaln_index, rotary, attend)
        if not held and len(attend.calls[0].cached) > 8:
            held.append(attend.calls[0].cached[2])
        return out

    config, chunks = SamplerConfig(steps=2), 10
    with Tracker() as tracker:
        conditions, proxy = request(chunks)
        rollout(model, CPU, conditions, proxy, config, noise, [1] * chunks, (), leaking)
        gc.collect()
    assert (held[0].part, tracker.bytes(*HEADS)) == (TARGET, held[0].bytes) and held[0].bytes == ROW_BYTES * TARGET_ROWS


def test_stated_is_the_live_cache(model, layout):
    for config in CONFIGS:
        for chunks in (1, 4, 6, 11):
            stream, proxies = opened(model, config, chunks)
            for proxy in proxies:
                stream.next_chunk(proxy)
            assert stream.cache.bytes == rollout_memory(model, layout, chunks, (), config.kv_reuse).live


def test_released_size():
    """1,433,600 bytes a row over 50 blocks: 6.73 GiB a target chunk, 33.6 GiB for five chunks of history."""
    with torch.device("meta"):
        base = MiniMaxH3Transformer3DModel(num_layers=1).to(torch.bfloat16)
    base.register_to_config(num_layers=50)
    layout = stream_layout(RELEASED, (48, 84), 6, [1] * 100, 170)
    static = 100 + 1008 + 340
    one = rollout_memory(base, layout, 1, [0], kv_reuse=True)
    assert one.live == one.peak == one.graphs == 1_433_600 * (static + 330)
    assert one.inputs == 5040 * 5376 * 2 * 50
    full = rollout_memory(base, layout, 14, range(10, 14), kv_reuse=True)
    assert full.live == 1_433_600 * (static + 6 * 330 + 5 * 5040)
    assert round(1_433_600 * 5 * 5040 / 2**30, 1) == 33.6
    # Four graph chunks at the end share one window of 9: chunks 5..12 as targets, 5..13 as proxies.
    assert full.graphs == 1_433_600 * (static + 9 * 330 + 8 * 5040)
