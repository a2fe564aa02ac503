"""The engines on real ranks against training of the same adapter in plain torch, in one process."""

import json
from dataclasses import replace

import pytest
import torch
from ranks import run_ranks
from small import CONFIG, random_adapter, random_window

from rtcwm.engine.adapter import AdapterEngine
from rtcwm.engine.base import BaseEngine
from rtcwm.engine.checkpoint import Checkpoints
from rtcwm.engine.copies import PAGE_BYTES
from rtcwm.engine.settings import read_adapter_settings, read_base_settings
from rtcwm.model.attention import Masked, install, make_attend, resolve
from rtcwm.model.blocks import predict_velocity
from rtcwm.model.loading import SeededSource, build_base, read_config
from rtcwm.model.lora import Adapter, AdapterShape, inject
from rtcwm.model.masks import boolean_mask

STEPS, LR, CLIP, RANK = 4, 3e-3, 0.5, 4
CHUNKS = 2


def source() -> SeededSource:
    return SeededSource(FULL_CONFIG, seed=3)


def sample(index: int) -> tuple:
    """The window and target of one sample, different for every index (other lengths of text change nothing here)."""
    window = random_window(5 * CHUNKS, seed=100 + index)
    target = torch.randn(window.video.shape, generator=torch.Generator().manual_seed(200 + index))
    times = torch.rand(CHUNKS, generator=torch.Generator().manual_seed(300 + index))
    return window, target, times


def loss_of(model, index: int, attend_of, **options) -> torch.Tensor:
    window, target, times = sample(index)
    layout = window.layout(stream=True)
    velocity = predict_velocity(model, window, layout, times, attend_of(layout), **options)
    return (velocity - target).square().mean()


def new_adapter(seed: int = 5) -> Adapter:
    return random_adapter(AdapterShape.of(FULL_CONFIG, RANK, alpha=8.0), seed)


FULL_CONFIG = None


def setup_module() -> None:
    _config()


def _config() -> dict:
    """CONFIG with every default, as `read_config` gives it; computed once a process."""
    global FULL_CONFIG
    if FULL_CONFIG is None:
        import tempfile
        from pathlib import Path

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(CONFIG))
            FULL_CONFIG = read_config(path)
    return FULL_CONFIG


def reference(samples_a_step: int, steps: int = STEPS) -> tuple[list, list, dict]:
    """Losses, gradient norms and final weights of plain AdamW on unpartitioned weights, with the boolean mask."""
    _config()
    model = build_base(source(), torch.device("cpu"), torch.float32)
    install(model, resolve("sdpa", "cpu"))
    adapter, slot = new_adapter(), inject(model)
    slot.active = adapter
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    losses, norms = [], []
    for step in range(steps):
        indices = range(step * samples_a_step, (step + 1) * samples_a_step)
        loss = torch.stack(
            [loss_of(model, index, lambda layout: Masked(boolean_mask(layout, "E"))) for index in indices]
        )
        loss.mean().backward()
        norms.append(torch.nn.utils.clip_grad_norm_(adapter.parameters(), CLIP).item())
        losses.append(loss.mean().item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {name: value.detach().clone() for name, value in adapter.named_parameters()}


def configs(tmp_path, base: dict | None = None, adapter: dict | None = None) -> tuple:
    base_path, adapter_path = tmp_path / "base.json", tmp_path / "adapter.json"
    base_path.write_text(json.dumps(base or {}))
    adapter_path.write_text(json.dumps({"gradient_clipping": CLIP} | (adapter or {})))
    return read_base_settings(base_path), read_adapter_settings(adapter_path)


def train(world, base_settings, adapter_settings, steps=STEPS, checkpoint=None, resume=None, digest=False) -> dict:
    """The same training through the engines. Each rank's micro-step takes the next sample."""
    _config()
    base = BaseEngine(world, source(), base_settings)
    kernel = resolve("sdpa", "cpu")
    install(base.model, kernel)
    engine = AdapterEngine(world, new_adapter(5 if world.is_main else 6), adapter_settings)
    run = base.activations.runner(engine.adapter)
    before = base.digest() if digest else None
    losses, norms, gathered, first = [], [], [], 0
    if resume:
        checkpoints = Checkpoints(world, resume)
        first = checkpoints.load({"adapter": engine}, checkpoints.newest())["step"]
    for step in range(first, steps):
        parts = []
        for micro in range(engine.accumulation):
            index = (step * engine.accumulation + micro) * world.size + world.rank
            loss = loss_of(base.model, index, lambda layout: make_attend(kernel, layout, "E"), run=run)
            engine.backward(loss)
            base.finish_backward()
            gathered.append(base.gathered())
            parts.append(loss.detach())
        update = engine.step(LR)
        norms.append(update.grad_norm)
        losses.append(world.mean(torch.stack(parts).mean()).item())
        if checkpoint and step + 1 == checkpoint[1]:
            Checkpoints(world, checkpoint[0]).save(step + 1, {"adapter": engine}, {"step": step + 1})
    return {
        "losses": losses,
        "norms": norms,
        "weights": {name: value.detach().clone() for name, value in engine.adapter.named_parameters()},
        "gathered": gathered,
        "offloaded": base.activations.offloaded_bytes,
        "digests": (before, base.digest() if digest else None),
        "dtypes": {str(p.dtype) for p in base.model.parameters()},
        "shard": max(p.ds_tensor.numel() / p.ds_numel for p in base.model.parameters() if p.ds_numel > 1000),
    }


def assert_equals_reference(result: dict, expected: tuple, tolerance: float = 2e-6) -> None:
    losses, norms, weights = expected
    assert result["losses"] == pytest.approx(losses, rel=tolerance)
    assert result["norms"] == pytest.approx(norms, rel=tolerance)
    # AdamW divides a gradient by its own size: rounding of a small one moves a weight by a part of the learning rate.
    for name, value in weights.items():
        torch.testing.assert_close(result["weights"][name], value, rtol=0, atol=1e-3 * LR)


def assert_same_weights(first: dict, second: dict) -> None:
    for name, value in first["weights"].items():
        assert torch.equal(value, second["weights"][name]), name


@pytest.fixture(scope="module")
def reference_of_two():
    return reference(samples_a_step=2)


def test_two_ranks_that_share_the_base_equal_plain_torch(tmp_path, reference_of_two):
    results = run_ranks(2, train, *configs(tmp_path, {"shard_group": 2}), STEPS, None, None, True)
    for result in results:
        assert_equals_reference(result, reference_of_two)
        assert set(result["gathered"]) == {0}, "weights stayed gathered after a backward pass"
        assert result["digests"][0] == result["digests"][1] == results[0]["digests"][0]
        assert result["shard"] == pytest.approx(0.5, abs=0.01)
        assert result["dtypes"] == {"torch.float32"}


def test_groups_of_one_and_a_second_zero_stage_equal_plain_torch(tmp_path, reference_of_two):
    stage2 = {"zero_optimization": {"stage": 2}}
    results = run_ranks(2, train, *configs(tmp_path, {"shard_group": 1}, stage2))
    for result in results:
        assert_equals_reference(result, reference_of_two)
        assert result["shard"] == 1.0


def test_two_groups_of_two_equal_plain_torch(tmp_path):
    expected = reference(samples_a_step=4, steps=2)
    for result in run_ranks(4, train, *configs(tmp_path, {"shard_group": 2}), 2):
        assert_equals_reference(result, expected)
        assert result["shard"] == pytest.approx(0.5, abs=0.01)


def test_accumulation_on_one_rank_equals_two_ranks(tmp_path, reference_of_two):
    (result,) = run_ranks(1, train, *configs(tmp_path, None, {"gradient_accumulation_steps": 2}))
    assert_equals_reference(result, reference_of_two)


def test_offload_and_checkpointing_change_nothing(tmp_path):
    """On one rank, so that blocks may also be left without recompute. Bit for bit."""
    plain = {"activation_checkpointing": {"policy": "none"}}
    offload = {"activation_checkpointing": {"cpu_checkpointing": True}}
    runs = {}
    for name, base in {"recompute": {}, "none": plain, "offload": offload}.items():
        (tmp_path / name).mkdir()
        (runs[name],) = run_ranks(1, train, *configs(tmp_path / name, base), 2)
    assert_same_weights(runs["recompute"], runs["none"])
    assert_same_weights(runs["recompute"], runs["offload"])
    assert runs["recompute"]["losses"] == runs["none"]["losses"] == runs["offload"]["losses"]
    layout = random_window(5 * CHUNKS).layout(stream=True)
    input_bytes = layout.rows * CONFIG["hidden_size"] * 4
    assert runs["offload"]["offloaded"] == 2 * CONFIG["num_layers"] * input_bytes  # two steps
    assert runs["recompute"]["offloaded"] == runs["none"]["offloaded"] == 0


def test_resume_is_exact_and_carries_over_to_another_world(tmp_path):
    settings = configs(tmp_path, {"shard_group": 0})
    whole = run_ranks(2, train, *settings, 4)[0]
    run_ranks(2, train, *settings, 2, (tmp_path / "state", 2))
    resumed = run_ranks(2, train, *settings, 4, None, tmp_path / "state")
    for result in resumed:
        assert_same_weights(whole, result)
        assert result["losses"] == whole["losses"][2:]
    # One rank that accumulates two samples does the same work; only the order of sums differs.
    (alone,) = run_ranks(
        1, train, *configs(tmp_path, None, {"gradient_accumulation_steps": 2}), 4, None, tmp_path / "state"
    )
    for name, value in whole["weights"].items():
        torch.testing.assert_close(alone["weights"][name], value, rtol=0, atol=1e-6)


def skip_one(world, base_settings, adapter_settings) -> tuple:
    """A step whose loss is not finite on one rank alone, then a good one."""
    _config()
    engine = AdapterEngine(world, new_adapter(), adapter_settings)
    before = {name: value.detach().clone() for name, value in engine.adapter.named_parameters()}
    loss = sum(pair.up.square().sum() + pair.down.square().sum() for pair in engine.adapter.pairs())
    engine.backward(loss * (float("inf") if world.rank == 1 else 1.0))
    bad = engine.step(LR)
    unchanged = all(torch.equal(value, before[name]) for name, value in engine.adapter.named_parameters())
    engine.backward(sum(pair.up.square().sum() + pair.down.square().sum() for pair in engine.adapter.pairs()))
    good = engine.step(LR)
    moved = not any(torch.equal(value, before[name]) for name, value in engine.adapter.named_parameters())
    return bad.skipped, unchanged, good.skipped, good.grad_norm, moved


def test_a_loss_that_is_not_finite_on_one_rank_skips_the_step_on_all(tmp_path):
    _config()
    total = sum(float(p.square().sum()) for p in new_adapter().parameters())
    for bad, unchanged, good, norm, moved in run_ranks(2, skip_one, *configs(tmp_path)):
        assert bad and unchanged and not good and moved
        assert norm == pytest.approx(2 * total**0.5, rel=1e-5)  # the gradient of sum(w^2) is 2 w


def park(world, base_settings, adapter_settings) -> tuple:
    """Three updates, with the moments kept, parked by hand in between, or parked by the engine but for its steps."""
    _config()
    states, steps, held = [], [], []
    for way in ("kept", "by hand", "by setting"):
        engine = AdapterEngine(world, new_adapter(), replace(adapter_settings, park_moments=way == "by setting"))
        moments = engine.engine.optimizer.optimizer.state
        for factor in (1.0, 3.0, 2.0):
            if way == "by hand":
                engine.park()  # nothing to park before the first update
                mappings = [p._hp_mapping for p in engine.adapter.parameters() if p._hp_mapping is not None]
                assert factor == 1.0 or all(mapping.optim_fragment is None for mapping in mappings)
            if way != "kept":
                assert all(state["exp_avg"] is None and state["exp_avg_sq"] is None for state in moments.values())
            engine.backward(
                factor * sum(pair.up.square().sum() + pair.down.square().sum() for pair in engine.adapter.pairs())
            )
            engine.step(LR)
        states.append(engine.state_dict())
        steps += [float(state["step"]) for state in moments.values()]
        held.append(engine._host.bytes)
    return states, steps, held


def test_parked_moments_come_back_and_checkpoints_see_them(tmp_path):
    states, steps, held = run_ranks(2, park, *configs(tmp_path))[0]
    assert set(steps) == {3.0}
    # Two moments of half an adapter, a page each, and the same pages at every step.
    assert held == [0, 2 * PAGE_BYTES, 2 * PAGE_BYTES]
    kept, *others = states
    assert len(kept) > 10
    for other in others:
        assert kept.keys() == other.keys()
        for name, value in kept.items():
            assert torch.equal(value, other[name]), name
