"""The memory that is stated beforehand against bytes that are counted while real parts run."""

import gc
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ranks import run_ranks
from small import CONFIG, random_window
from stream_reference import noise
from torch.utils.checkpoint import checkpoint
from tracker import Peak

from rtcwm.engine.adapter import AdapterEngine
from rtcwm.engine.base import BaseEngine
from rtcwm.engine.memory import GIB
from rtcwm.engine.settings import ActivationSettings, read_adapter_settings, read_base_settings, shipped_config
from rtcwm.errors import UserError
from rtcwm.model import glue
from rtcwm.model.attention import install, resolve
from rtcwm.model.cache import rollout_bytes
from rtcwm.model.layout import RELEASED, SPAN_CHUNKS, TEACHER_LATENTS, audio_latents, frames_of
from rtcwm.model.loading import SeededSource, build_base, read_config
from rtcwm.model.lora import Adapter, AdapterShape, inject
from rtcwm.model.packing import stock_layout, stream_layout
from rtcwm.model.sampler import Conditions, rollout
from rtcwm.model.schedule import SamplerConfig
from rtcwm.model.working import BlockSizes
from rtcwm.train.base_memory import host_bytes
from rtcwm.train.memory import DistillNeeds, TrainNeeds
from rtcwm.train.room import check_card, check_host, largest

KERNEL = replace(resolve("sdpa", "cpu"), compiled=True)
RANK = 2
FEW = 1.05
"""What else lives, such as low-rank products and logsumexps, is a few percent of rows like these."""


def full(tmp_path: Path, **changes: object) -> dict:
    """A base's config with every default."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(changes))
    return read_config(path)


def base_of(config: dict, ffn_rows: int = 0):
    """A base with an adapter bound for good, whose elementwise pieces count as compiled ones: without temporaries."""
    model = build_base(SeededSource(config, 1), torch.device("cpu"), torch.float32)
    install(model, KERNEL, ffn_rows=ffn_rows)
    inject(model).active = Adapter(AdapterShape.of(config, RANK), 0)
    return model


@pytest.fixture
def peak(monkeypatch) -> Peak:
    tracker = Peak()
    monkeypatch.setattr(glue, "_compiled", tracker.as_one)
    return tracker


@pytest.mark.parametrize("ffn_rows", [0, 40])
@pytest.mark.parametrize("widths", [(64, 96, 192), (64, 96, 512), (32, 128, 32)])
def test_one_block_at_work(peak, widths, ffn_rows, tmp_path):
    """Where the feed-forward is the worst moment, and where attention is."""
    hidden, inner, ffn = widths
    changes = {"num_layers": 1, "hidden_size": hidden, "num_attention_heads": inner // 32, "ffn_dim": ffn}
    config = full(tmp_path, **CONFIG | changes | {"attention_head_dim": 32})
    model, rows = base_of(config, ffn_rows), 200
    block, sizes = model.transformer_blocks[0], BlockSizes.of(config, torch.float32, ffn_rows)
    rest = (
        torch.randn(2, block.adaln_proj.linear.in_features), torch.zeros(rows, dtype=torch.long),
        model.rope(torch.zeros(rows, 3, dtype=torch.float64)), None,
    )  # fmt: skip
    with peak:
        given = torch.randn(1, rows, hidden)
        with torch.no_grad():
            block(given, *rest)
        stated = sizes.forward(rows)
        assert stated <= peak.peak <= FEW * stated
        out = checkpoint(lambda x: block(x, *rest), given.requires_grad_(), use_reentrant=False)
        gradient = torch.ones_like(out)
        gc.collect()
        peak.peak = 0
        out.backward(gradient)
        stated = sizes.backward(rows)
        assert stated <= peak.peak <= FEW * stated


WIDE = {"num_layers": 8, "hidden_size": 64, "ffn_dim": 48}  # caches, kept inputs and a block at work, all of a size


def test_a_rollout_and_its_backward_pass(peak, tmp_path):
    """Of every kind of memory together: keys and values, inputs of blocks, one block at work."""
    graphs = 3
    config = full(tmp_path, **CONFIG | WIDE)
    model, chunks = base_of(config), 10
    layout = random_window(30).layout(stream=True)
    sizes, graph_chunks = BlockSizes.of(config, torch.float32, 0), range(chunks - graphs, chunks)
    held = rollout_bytes(config, torch.float32, layout, chunks, graph_chunks, kv_reuse=True)
    window, proxy = random_window(30), random_window(5 * chunks, seed=2).proxy

    def kept(block, hidden, *rest):
        given = hidden if hidden.requires_grad else hidden.detach().requires_grad_()
        return checkpoint(block, given, *rest, use_reentrant=False)

    with peak:
        latents = rollout(
            model, KERNEL, Conditions.of(window), proxy, SamplerConfig(steps=2), noise, [1] * chunks,
            graph_chunks, graph_run=kept,
        )  # fmt: skip
        inputs = graphs * sizes.inputs(layout.target_chunk)
        stated = held.peak + inputs + sizes.forward(layout.target_chunk + layout.proxy_chunk, layout.rows)
        assert 0.95 * stated <= peak.peak <= 1.15 * stated
        loss = sum(latents[chunk].sum() for chunk in graph_chunks)
        gc.collect()
        peak.peak = 0
        loss.backward()
    stated = held.graphs + inputs + sizes.backward(layout.target_chunk, layout.rows)
    assert 0.9 * stated <= peak.peak <= 1.15 * stated


def adapter_bytes(world, stage: int, config: dict) -> tuple:
    """Peaks of a backward pass and of a step, what is left afterwards and while parked; above the weights, in bytes."""
    settings = read_adapter_settings(shipped_config("distill"))
    settings.deepspeed["zero_optimization"] |= {"stage": stage, "reduce_bucket_size": 20_000}
    engine = AdapterEngine(world, Adapter(AdapterShape.of(config, 32)), settings)
    found = []
    with Peak() as peak:

        def at_most() -> int:
            gc.collect()
            most, peak.peak = peak.peak, 0
            return most

        for _ in range(2):
            loss = sum(pair.up.square().sum() + pair.down.square().sum() for pair in engine.adapter.pairs())
            at_most()
            engine.backward(loss)
            del loss
            backward = at_most()
            before = peak.bytes()
            engine.step(1e-3)
            found.append((backward, at_most(), peak.bytes(), before))
        moments = sum(state["exp_avg"].nbytes + state["exp_avg_sq"].nbytes for state in _states(engine))
        engine.park()
        gone = all(state["exp_avg"] is None and state["exp_avg_sq"] is None for state in _states(engine))
        weights = [parameter.grad for parameter in engine.adapter.parameters()]
    return found, moments, gone and weights == [None] * len(weights)


def _states(engine: AdapterEngine) -> list[dict]:
    return list(engine.engine.optimizer.optimizer.state.values())


@pytest.mark.parametrize(("ranks", "stage"), [(1, 1), (2, 2)])
def test_gradients_and_moments_of_an_adapter(ranks, stage, tmp_path):
    config = full(tmp_path, **CONFIG | {"num_layers": 4})
    shape = AdapterShape.of(config, 32)
    settings = read_adapter_settings(shipped_config("distill"))
    settings.deepspeed["zero_optimization"] |= {"stage": stage, "reduce_bucket_size": 20_000}
    needs = train_needs(config, ranks, settings, shape)
    for found, moments, clean in run_ranks(ranks, adapter_bytes, stage, config):
        (backward, step, left, _), (backward_again, step_again, left_again, _) = found
        assert moments == needs.moments(shape) and clean
        few = 0.35 * 4 * shape.parameters  # gradients on their way, of one block
        few += 80_000 * (ranks > 1)  # now and then a bucket is still being averaged while the next one fills
        stated = needs.gradients(shape, settings)
        assert stated - 80_000 <= backward <= stated + few
        assert left == left_again == pytest.approx(needs.moments(shape), rel=0.01)
        assert stated - 80_000 <= backward_again - left <= stated + few
        stated = sum(needs.update(shape).values())
        assert 0.9 * stated <= step_again <= stated + few and step <= stated + few


def train_needs(
    config: dict, ranks: int, settings, shape: AdapterShape, base: str = "base_cpu", shard: int = 1
) -> TrainNeeds:
    return TrainNeeds(
        config, torch.float32, False, shard, ranks, read_base_settings(shipped_config(base)),
        random_window(30).layout(stream=True), 1, adapter=shape, adapter_settings=settings,
    )  # fmt: skip


def shared_base(world, config: dict, device_blocks: int) -> tuple[int, int]:
    settings = replace(read_base_settings(shipped_config("base_cpu")), device_blocks=device_blocks)
    base = BaseEngine(world, SeededSource(config, 1), settings)
    buffers = sum(buffer.memory.nbytes for buffer in base.carrier._buffers)
    return sum(p.ds_tensor.nbytes for p in base.model.parameters()), buffers


def shared_bases(world, config: dict, *device_blocks: int) -> list[tuple[int, int]]:
    return [shared_base(world, config, blocks) for blocks in device_blocks]


def test_the_base_whole_and_in_parts(tmp_path):
    config = full(tmp_path, **CONFIG | {"num_layers": 4})
    needs = train_needs(config, 1, None, None)
    model = build_base(SeededSource(config, 1), torch.device("cpu"), torch.float32)
    assert needs.base() == sum(p.nbytes for p in model.parameters())
    adaln = sum(p.nbytes for block in model.transformer_blocks for p in block.adaln_proj.parameters())
    assert replace(needs, table=True).base() == needs.base() - adaln
    mixed = build_base(SeededSource(config, 1), torch.device("cpu"), torch.bfloat16)
    assert replace(needs, dtype=torch.bfloat16).base() == sum(p.nbytes for p in mixed.parameters())
    for (part, buffers), (_, all_blocks) in run_ranks(2, shared_bases, config, 2, 100):
        assert part + buffers == pytest.approx(train_needs(config, 2, None, None, shard=2).base(), rel=0.03)
        shared = (config, torch.float32, False, 2, needs.settings)
        assert host_bytes(*shared, cpu=True) == pytest.approx(part + buffers, rel=0.03)
    host = replace(needs, settings=replace(needs.settings, offload=True))
    assert host.base() == pytest.approx(buffers, rel=0.03)
    # More blocks than the base has are all of them: four of its four, and two.
    assert all_blocks == 2 * buffers
    many = replace(host, settings=replace(host.settings, device_blocks=100))
    assert many.base() == 2 * host.base() == replace(many, settings=replace(many.settings, device_blocks=4)).base()
    assert host_bytes(*shared, cpu=False) == 0
    assert host_bytes(*shared[:4], host.settings, cpu=False) == pytest.approx(part, rel=0.03)
    assert host_bytes(*shared[:4], host.settings, cpu=True) == pytest.approx(part + buffers, rel=0.03)


# At the released size


def released(base: str, tmp_path: Path, ranks: int = 1, **changes: object) -> DistillNeeds:
    """An iteration of 14 chunks, 4 of them with a graph, of the released base with adapters of rank 128."""
    config, picture = full(tmp_path), (RELEASED.height, RELEASED.width)
    audio = [audio_latents(frames_of(latents)) for latents in (30, TEACHER_LATENTS)]
    window = stock_layout(RELEASED, picture, TEACHER_LATENTS, (1,) * 400, audio[1])
    shape, engine = AdapterShape.of(config, 128), read_adapter_settings(shipped_config("distill"))
    needs = DistillNeeds(
        config, torch.bfloat16, True, ranks, ranks, read_base_settings(shipped_config(base)),
        stream_layout(RELEASED, picture, SPAN_CHUNKS, (1,) * 400, audio[0]), 1, student=shape, teacher=shape,
        critic=shape, student_settings=engine, critic_settings=engine, window_rows=window.rows, shortest=8, chunks=14,
        grad_chunks=4, kv_reuse=True, joint=False,
    )  # fmt: skip
    return replace(needs, **changes)


@pytest.mark.parametrize(
    ("base", "ranks", "grad_chunks", "gigabytes"),
    [
        ("base_1x141gb_distill", 1, 4, 130), ("base_8x141gb", 1, 4, 130),
        ("base_1x80gb_distill", 1, 4, 80), ("base_1x80gb_distill", 1, 3, 72),
        ("base_8x80gb", 8, 3, 76),
    ],
)  # fmt: skip
def test_shipped_settings_fit(base, ranks, grad_chunks, gigabytes, tmp_path):
    needs = released(base, tmp_path, ranks, grad_chunks=grad_chunks)
    assert largest(needs).total < gigabytes * 10**9
    limit = needs.settings.memory_limit_gib
    assert check_card(needs, None if limit is None else int(limit * GIB))


def test_what_cannot_fit_is_refused_with_what_would(tmp_path):
    needs, room = released("base_1x80gb", tmp_path), int(74.5 * GIB)
    with pytest.raises(
        UserError, match="needs about 108.7 GiB on a card.*and memory_limit_gib .* leaves it 74.5"
    ) as raised:
        check_card(needs, room)
    fits = replace(needs, settings=replace(needs.settings, offload=True))
    what_fits, others = str(raised.value).split("Not enough alone: ")
    assert f"offload_param in --base-config: {largest(fits).total / GIB:.1f} GiB" in what_fits
    assert "base_1x80gb_distill.json of ds_configs: 72.6 GiB" in what_fits and "base_1x141gb" not in what_fits
    for fewer in (1, 2, 3):
        total = largest(replace(needs, grad_chunks=fewer)).total
        assert f"--grad-chunks {fewer}: {total / GIB:.1f} GiB" in others
    assert "--max-chunks 8: " in str(raised.value) and "cpu_checkpointing" not in str(raised.value)
    with pytest.raises(
        UserError, match=r"and this one has 40.0 GiB. Not enough alone: .* together: 54.3 GiB, more than"
    ):
        check_card(needs, 40 * GIB)
    first, *moments = check_card(fits, room)
    assert "of 74.5 GiB, in the student's backward pass; tight" in first and len(moments) == 5
    # Each chunk less with a graph is a target chunk less, and its inputs are in host memory.
    a_chunk = 1_433_600 * (RELEASED.target_chunk + RELEASED.proxy_chunk)
    assert largest(fits).total - largest(replace(fits, grad_chunks=3)).total == a_chunk


def test_training_as_it_was_measured(tmp_path):
    """On an H200, in plain torch without the engines' 4.1 GiB: 57 GiB with block inputs in host memory, 93 with them
    and attention outputs on the card."""
    needs = released("base_8x141gb", tmp_path)
    host = ActivationSettings(cpu_checkpointing=True)
    needs = replace(needs, settings=replace(needs.settings, activations=host))
    settings = read_adapter_settings(shipped_config("adapter"))
    train = TrainNeeds(
        needs.config, torch.bfloat16, True, 1, 1, needs.settings, needs.layout, 1, adapter=needs.student,
        adapter_settings=settings,
    )  # fmt: skip
    extra = train.gradients(needs.student, settings) - 4 * needs.student.parameters
    assert (largest(train).total - extra) / GIB == pytest.approx(57, rel=0.05)
    fast = replace(train, settings=read_base_settings(shipped_config("base_8x141gb")))
    assert (largest(fast).total - extra) / GIB == pytest.approx(93, rel=0.05)
    away = replace(needs.settings.activations, policy="save_attention", offload_attention=True)
    moved = replace(train, settings=replace(needs.settings, activations=away))
    # The card holds those of two blocks, in bf16.
    assert largest(moved).total - largest(train).total == 2 * needs.layout.rows * 56 * 128 * 2
    one, four, fifty, more = (
        largest(replace(moved, settings=replace(moved.settings, activations=replace(away, keep_products=n))))
        for n in (1, 4, 50, 99)
    )
    # Those of the block at work are there anyway.
    assert one.total == largest(moved).total
    assert fifty.total == more.total, "a base of 50 blocks has no more"
    assert four.total - one.total == 3 * needs.layout.rows * (3 * 56 * 128 + 5376 + 2 * 14336) * 2


def test_host_memory_as_it_was_measured(tmp_path):
    """Page-locked peaks on an H200, in GiB, of which about 1 is not counted (latents, rows of the AdaLN table)."""
    needs, world = released("base_1x80gb", tmp_path), SimpleNamespace(device=torch.device("cuda"), local_size=1)

    def train(base: str, adapter: str) -> TrainNeeds:
        return TrainNeeds(
            needs.config, torch.bfloat16, True, 1, 1, read_base_settings(shipped_config(base)), needs.layout, 1,
            adapter=needs.student, adapter_settings=read_adapter_settings(shipped_config(adapter)),
        )  # fmt: skip

    runs = {
        41.1: train("base_1x80gb", "adapter"),
        87.1: train("base_1x24gb", "adapter_24gb"),
        10.0: released("base_8x141gb", tmp_path),
        68.0: released("base_1x80gb_distill", tmp_path, grad_chunks=3),
    }
    for measured, each in runs.items():
        assert -1 < measured - sum(each.host().values()) / GIB < 0.07 * measured + 1, measured
    assert not check_host(train("base_gpu", "adapter"), world), "nothing leaves the card"
    crowd = SimpleNamespace(device=torch.device("cuda"), local_size=10**6)
    with pytest.raises(
        UserError, match="offload_param 37.49, offload_attention 23.44, cpu_checkpointing 17.19"
    ) as raised:
        check_host(runs[87.1], crowd)
    assert "share a copy of the base, shard_group 0: 49.07 GiB a rank" in str(raised.value)
    assert check_host(runs[87.1], SimpleNamespace(device=torch.device("cpu"), local_size=1)) == []
