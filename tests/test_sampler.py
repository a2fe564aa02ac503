"""Streams and rollouts against forwards without a cache: values, gradients, forwards run, and what stays alive."""

from functools import partial

import pytest
import torch
from small import CONFIG, drawn, small_model
from stream_reference import CPU, lockstep_velocity, masked_velocity, noise, request, sample
from torch.utils.checkpoint import checkpoint

from rtcwm.errors import UserError
from rtcwm.model.attention import install
from rtcwm.model.lora import Adapter, AdapterShape, inject
from rtcwm.model.sampler import Stream, rollout
from rtcwm.model.schedule import SamplerConfig, euler, renoise, schedule

close = partial(torch.testing.assert_close, rtol=2e-4, atol=2e-4)


@pytest.fixture(scope="module")
def shallow():
    """The same base with its first block alone."""
    model = small_model()
    del model.transformer_blocks[1:]
    install(model, CPU)
    return model


def adapted():
    """A base whose hooks read an adapter with both factors random."""
    model = small_model()
    install(model, CPU)
    slot = inject(model)
    adapter = Adapter(AdapterShape.of(CONFIG, rank=2))
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.normal_(0.0, 0.2, generator=draw)
    return model, slot, adapter


def bound(slot, adapter, checkpointed: bool = False):
    """Runs a block with the adapter bound, also when it is recomputed."""

    def run(block, hidden, *rest):
        def forward(hidden):
            with slot.bind(adapter):
                return block(hidden, *rest)

        return checkpoint(forward, hidden, use_reentrant=False) if checkpointed else forward(hidden)

    return run


# Schedule and solvers


def test_schedule():
    expected = [1.0, 15 / 16, 5 / 6, 5 / 8, 0.0]
    torch.testing.assert_close(schedule(4, 5.0), torch.tensor(expected), rtol=1e-6, atol=0)
    assert schedule(4, 5.0).dtype == torch.float32
    assert schedule(1, 12.0).tolist() == [1.0, 0.0]
    torch.testing.assert_close(schedule(8, 1.0), torch.linspace(1, 0, 9))


def test_solvers():
    clean, eps, fresh = (noise("target", k, 0, (3, 4)) for k in range(3))
    sigma, following = torch.tensor(0.8), torch.tensor(0.5)
    state = 0.2 * clean + 0.8 * eps
    # On the straight path Euler keeps the noise: exact for a velocity that does not change.
    torch.testing.assert_close(euler(state, clean, sigma, following), 0.5 * clean + 0.5 * eps)
    torch.testing.assert_close(
        euler(state, clean, sigma, following),
        state + (0.8 - 0.5) * (clean - eps),  # x + dt v
    )
    torch.testing.assert_close(renoise(clean, fresh, following), 0.5 * clean + 0.5 * fresh)
    assert torch.equal(euler(state, clean, sigma, torch.tensor(0.0)), clean)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(rule="ahead1"), "ahead1.*kv_reuse"),
        (dict(rule="behind"), "behind"),
        (dict(steps=0), "at least 1"),
        (dict(shift=0.0), "above 0"),
        (dict(steps=1), "history to clean"),
        (dict(history="noisy"), "last-step, clean"),
        (dict(solver="heun"), "renoise, euler"),
    ],
)
def test_settings_that_cannot_be(wrong, message):
    with pytest.raises(UserError, match=message):
        SamplerConfig(**wrong)


def test_requests_that_do_not_fit(model):
    conditions, proxy = request(2)
    run = partial(rollout, model, CPU, conditions, proxy, SamplerConfig(), noise)
    for stops, graphs in (([0], ()), ([0, 0], [2]), ([0, 4], ()), ([], ())):
        with pytest.raises(ValueError, match="expected"):
            run(stops, graphs)


# Values

HISTORIES = ["last-step", "clean"]


@pytest.mark.parametrize("reference", ["prefix", "mask"])
@pytest.mark.parametrize("kv_reuse", [True, False])
@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("rule", ["E", "own"])
def test_six_chunks_are_the_masked_forward(model, rule, history, kv_reuse, reference):
    config = SamplerConfig(steps=3, history=history, rule=rule, kv_reuse=kv_reuse)
    conditions, proxy = request(6, batch=2)
    stops = [0, 2, 1, 2, 0, 2]
    expected = sample(partial(masked_velocity, model, reference=reference), config, conditions, proxy, stops)
    close(rollout(model, CPU, conditions, proxy, config, noise, stops), tuple(expected))


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("rule", ["E", "own", "ahead1"])
def test_recomputed_is_the_window_at_any_length(model, rule, history):
    config = SamplerConfig(steps=2, history=history, rule=rule, kv_reuse=False)
    conditions, proxy = request(14)
    stops = [k % 2 for k in range(14)]
    expected = sample(partial(masked_velocity, model, reference="prefix"), config, conditions, proxy, stops)
    close(rollout(model, CPU, conditions, proxy, config, noise, stops), tuple(expected))


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("rule", ["E", "own"])
def test_cached_is_every_chunk_in_its_own_window(model, rule, history):
    """What reuse means beyond six chunks: keys come from the window a chunk was generated in, and are only moved."""
    config = SamplerConfig(steps=2, history=history, rule=rule)
    conditions, proxy = request(14)
    stops = [k % 2 for k in range(14)]
    expected = sample(partial(lockstep_velocity, model), config, conditions, proxy, stops)
    close(rollout(model, CPU, conditions, proxy, config, noise, stops), tuple(expected))


@pytest.mark.parametrize("rule", ["E", "own"])
def test_where_cached_and_recomputed_part(model, shallow, rule):
    """Unrotated keys and values of the first block depend on a row's own input and time alone, so with one block both
    are the same at any length. From the second block on they depend on what the chunk saw: from chunk 6 on reuse keeps
    keys computed with a chunk that has left the window, and from other slots."""
    conditions, proxy = request(14)
    chunks = {}
    for name, base in (("deep", model), ("shallow", shallow)):
        for kv_reuse in (True, False):
            config = SamplerConfig(steps=2, rule=rule, kv_reuse=kv_reuse)
            chunks[name, kv_reuse] = rollout(base, CPU, conditions, proxy, config, noise, [1] * 14)
    close(chunks["shallow", True], chunks["shallow", False])
    close(chunks["deep", True][:6], chunks["deep", False][:6])
    for cached, recomputed in zip(chunks["deep", True][6:], chunks["deep", False][6:]):
        assert (cached - recomputed).abs().max() > 0.01


def test_euler(model):
    config = SamplerConfig(steps=4, shift=3.0, solver="euler")
    conditions, proxy = request(3)
    expected = sample(partial(masked_velocity, model, reference="prefix"), config, conditions, proxy, [3, 2, 3])
    close(rollout(model, CPU, conditions, proxy, config, noise, [3, 2, 3]), tuple(expected))


@pytest.mark.parametrize("kv_reuse", [True, False])
def test_stream_is_the_rollout_that_never_stops_early(model, kv_reuse):
    config = SamplerConfig(steps=2, kv_reuse=kv_reuse)
    conditions, proxy = request(8)
    finished = []
    draws = [drawn(torch.Generator().manual_seed(5)) for _ in range(2)]
    chunks = rollout(model, CPU, conditions, proxy, config, draws[0], [1] * 8, progress=finished.append)
    stream = Stream(model, CPU, conditions, config, draws[1])
    live = [chunk for chunk in stream.over(iter(proxy.split(5, dim=2)))]
    assert all(torch.equal(a, b) for a, b in zip(chunks, live, strict=True))
    assert finished == list(range(8)) and stream.chunk == 8


def test_batch_is_replication(model):
    config = SamplerConfig(steps=2)
    conditions, proxy = request(7, batch=2)

    def alone(kind, chunk, step, shape, entry=0):
        return noise(kind, chunk, step, (2, *shape[1:]))[entry : entry + 1]

    both = rollout(model, CPU, conditions, proxy, config, noise, [1] * 7)
    for entry in range(2):
        keep = slice(entry, entry + 1)
        mine = type(conditions)(
            conditions.picture1[keep],
            conditions.text[keep],
            conditions.text_tags,
            conditions.audio[keep],
            conditions.geometry,
        )
        one = rollout(model, CPU, mine, proxy[keep], config, partial(alone, entry=entry), [1] * 7)
        close(one, tuple(chunk[keep] for chunk in both))


def test_mixed_precision():
    """fp32 state and result, bf16 cache, and the numbers of a masked forward up to bf16 rounding."""
    base = small_model(mixed=True)
    install(base, CPU)
    config = SamplerConfig(steps=1, history="clean")
    conditions, proxy = request(4)
    stream = Stream(base, CPU, conditions, config, noise)
    chunks = tuple(stream.over(proxy.split(5, dim=2)))
    assert {chunk.dtype for chunk in chunks} == {torch.float32}
    assert {x.dtype for piece in stream.cache.pieces for x in (*piece.keys, *piece.values)} == {torch.bfloat16}
    expected = sample(partial(masked_velocity, base, reference="prefix"), config, conditions, proxy, [0] * 4)
    for found, wanted in zip(chunks, expected):
        assert (found - wanted).norm() < 0.03 * wanted.norm()


# Forwards


@pytest.mark.parametrize("kv_reuse", [True, False])
def test_stops_decide_the_forwards(model, kv_reuse):
    """One forward prepares a chunk, one follows for every step up to its stop; graphs only at stopping steps."""
    config = SamplerConfig(steps=4, kv_reuse=kv_reuse)
    conditions, proxy = request(8)
    stops, graphs = [0, 3, 1, 2, 0, 0, 3, 1], {2, 6, 7}
    seen = []

    def count(kind, block, hidden, *rest):
        if block is model.transformer_blocks[0]:
            seen.append((kind, torch.is_grad_enabled(), hidden.shape[1]))
        return block(hidden, *rest)

    hooks = dict(run=partial(count, "plain"), graph_run=partial(count, "graph"))
    with torch.no_grad():  # whatever the caller's mode
        rollout(model, CPU, conditions, proxy, config, noise, stops, graphs, **hooks)
    expected = []
    for chunk, stop in enumerate(stops):
        history = min(chunk, 5) if not kv_reuse else min(chunk, 1)
        proxies = 1 if kv_reuse else history + 1
        expected.append(("plain", False, 20 * proxies + 30 * history + (17 if chunk == 0 else 0)))
        expected += [("plain", False, 30)] * stop
        expected.append(("graph", True, 30) if chunk in graphs else ("plain", False, 30))
    assert seen == expected
    assert len(seen) == 8 + sum(stops) + 8


# Gradients

STOPS = [1, 0, 1, 1, 0, 1, 0, 1, 0]
GRAPHS = (4, 6, 7)  # chunk 8 has slid the window of all of them


def leaf_noise(leaves):
    """The noise of the tests, with the starting noise of graph chunks as leaves."""

    def draw(kind, chunk, step, shape):
        if kind == "target" and chunk in GRAPHS:
            return leaves.setdefault(chunk, noise(kind, chunk, step, shape).requires_grad_())
        return noise(kind, chunk, step, shape)

    return draw


def weights(chunk):
    return noise("weights", chunk, 0, (1, 24, 5, 4, 6))


@pytest.mark.parametrize("kv_reuse", [True, False])
@pytest.mark.parametrize("rule", ["E", "own"])
def test_gradients_of_graph_chunks(rule, kv_reuse):
    """Against autograd through forwards without cache or checkpointing, in which all history is detached."""
    model, slot, adapter = adapted()
    config = SamplerConfig(steps=2, rule=rule, kv_reuse=kv_reuse)
    conditions, proxy = request(len(STOPS))
    results = {}
    for name in ("plain", "checkpointed"):
        leaves: dict[int, torch.Tensor] = {}
        chunks = rollout(
            model,
            CPU,
            conditions,
            proxy,
            config,
            leaf_noise(leaves),
            STOPS,
            GRAPHS,
            run=bound(slot, adapter),
            graph_run=bound(slot, adapter, checkpointed=name == "checkpointed"),
        )
        assert [chunk.requires_grad for chunk in chunks] == [k in GRAPHS for k in range(len(STOPS))]
        loss = sum((chunks[k] * weights(k)).sum() for k in GRAPHS)
        inputs = [*adapter.parameters(), *(leaves[k] for k in GRAPHS)]
        results[name] = (chunks, torch.autograd.grad(loss, inputs, allow_unused=True))

    leaves = {}

    def velocity(given, state, sigma):
        with slot.bind(adapter):
            return lockstep_velocity(model, given, state, sigma)

    expected = sample(velocity, config, conditions, proxy, STOPS, GRAPHS, leaf_noise(leaves))
    loss = sum((expected[k] * weights(k)).sum() for k in GRAPHS)
    inputs = [*adapter.parameters(), *(leaves[k] for k in GRAPHS)]
    wanted = torch.autograd.grad(loss, inputs, allow_unused=True)
    close(results["plain"][0], tuple(expected))
    # Starting noise reaches a chunk that stops at its first step; later steps start from a detached state.
    reaches = [STOPS[k] == 0 for k in GRAPHS]
    for name, (_, found) in results.items():
        assert [gradient is not None for gradient in found[-len(GRAPHS) :]] == reaches, name
        for mine, reference in zip(found, wanted, strict=True):
            if mine is not None:
                assert mine.abs().max() > 0
                scale = reference.abs().max().item()
                torch.testing.assert_close(mine, reference, rtol=1e-3, atol=2e-4 * scale)
    for plain, again in zip(results["plain"][1], results["checkpointed"][1]):
        assert (plain is None and again is None) or torch.equal(plain, again)


def test_history_passes_no_gradient():
    model, slot, adapter = adapted()
    conditions, proxy = request(7)
    leaves: dict[int, torch.Tensor] = {}

    def draw(kind, chunk, step, shape):
        leaves[kind, chunk] = noise(kind, chunk, step, shape).requires_grad_()
        return leaves[kind, chunk]

    proxy.requires_grad_()
    hook = bound(slot, adapter)
    config = SamplerConfig(steps=1, history="clean")
    chunks = rollout(model, CPU, conditions, proxy, config, draw, [0] * 7, {5, 6}, hook, hook)
    found = torch.autograd.grad(chunks[6].sum(), [*leaves.values(), proxy], allow_unused=True)
    reached = [key for key, gradient in zip(leaves, found) if gradient is not None]
    assert reached == [("target", 6)] and found[-1] is None
