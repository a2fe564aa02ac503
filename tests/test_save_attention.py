"""What the policies of activations keep and compute again, on real engines: the same bits, and no attention twice."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from ranks import run_ranks
from small import CONFIG, random_adapter, random_window

from rtcwm.engine.activations import Activations
from rtcwm.engine.adapter import AdapterEngine
from rtcwm.engine.base import BaseEngine, shard_group_size
from rtcwm.engine.settings import (
    ActivationSettings,
    AdapterSettings,
    BaseSettings,
    read_adapter_settings,
    read_base_settings,
)
from rtcwm.errors import UserError
from rtcwm.model.attention import install, make_attend, resolve
from rtcwm.model.blocks import predict_velocity
from rtcwm.model.loading import SeededSource, read_config
from rtcwm.model.lora import AdapterShape, Slot
from rtcwm.model.masks import groups
from rtcwm.train.preflight import check_settings

CHUNKS, BLOCKS, PASSES = 2, CONFIG["num_layers"], 3


def base_settings(tmp_path, activations: dict, **others: object) -> BaseSettings:
    path = tmp_path / "base.json"
    path.write_text(json.dumps({"activation_checkpointing": activations} | others))
    return read_base_settings(path)


def adapter_settings(tmp_path) -> AdapterSettings:
    path = tmp_path / "adapter.json"
    path.write_text("{}")
    return read_adapter_settings(path)


def one_step(world, config: dict, settings: BaseSettings, adapter: AdapterSettings) -> dict:
    """Three forward passes of two adapters whose graphs live at once, one backward pass; what was run and left."""
    cpu, calls = resolve("sdpa", "cpu"), {"forward": 0, "backward": 0}

    def counted(name: str):
        def run(*tensors):
            calls[name] += 1
            return getattr(cpu, name)(*tensors)

        return run

    kernel = replace(cpu, name="counted", forward=counted("forward"), backward=counted("backward"))
    base = BaseEngine(world, SeededSource(config, seed=3), settings)
    install(base.model, kernel, settings.activations.ffn_rows)
    shape = AdapterShape.of(config, 4, alpha=8.0)
    engine, other = AdapterEngine(world, random_adapter(shape, 5), adapter), random_adapter(shape, 6)
    runners = [base.activations.runner(which) for which in (engine.adapter, other)]
    window = random_window(5 * CHUNKS, batch=2)
    layout = window.layout(stream=True)
    attend = make_attend(kernel, layout, "E")
    loss = 0
    for order, which in enumerate((0, 1, 0)):
        times = torch.tensor([0.2, 0.3]) + 0.1 * order
        velocity = predict_velocity(base.model, window, layout, times, attend, run=runners[which])
        loss = loss + (order + 1) * velocity.square().mean()
    in_forward = calls["forward"]
    engine.backward(loss)
    base.finish_backward()
    result = {
        "loss": loss.item(),
        "norm": engine.step(1e-3).grad_norm,
        "weights": [x.detach().clone() for x in engine.adapter.parameters()],
        "gradients": [x.grad.clone() for x in other.parameters()],
        "again": calls["forward"] - in_forward,
        "backwards": calls["backward"],
        "kept": base.activations.kept_bytes["attention"],
        "products": base.activations.kept_bytes["products"],
        "offloaded": base.activations.offloaded_bytes,
        "gathered": base.gathered(),
        "report": base.activations.report_once() or "",
        "calls": in_forward,
    }
    base.close()
    return result


def assert_same_bits(results: dict[str, dict]) -> None:
    first = results["recompute"]
    for name, result in results.items():
        assert (result["loss"], result["norm"]) == (first["loss"], first["norm"]), name
        for key in ("weights", "gradients"):
            assert all(torch.equal(a, b) for a, b in zip(result[key], first[key], strict=True)), name
    assert first["norm"] > 0 and all(x.abs().sum() > 0 for x in first["gradients"])


LAYOUT = random_window(5 * CHUNKS).layout(stream=True)
CALLS = BLOCKS * len(groups(LAYOUT, "E"))  # of one forward pass, without the text refiner
KEPT = 2 * LAYOUT.rows * CONFIG["num_attention_heads"] * (CONFIG["attention_head_dim"] + 1) * 4  # a block, batch of 2
OUTPUT = 2 * LAYOUT.rows * CONFIG["num_attention_heads"] * CONFIG["attention_head_dim"] * 4  # without the logsumexp
INPUT = 2 * LAYOUT.rows * CONFIG["hidden_size"] * 4
FIRST = 2 * LAYOUT.rows * 2 * CONFIG["ffn_dim"] * 4  # output of a feed-forward's first layer
PRODUCTS = 3 * OUTPUT + INPUT + FIRST  # qkv, attention's last layer, and that


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> dict:
    path = tmp_path_factory.mktemp("base") / "config.json"
    path.write_text(json.dumps(CONFIG))
    return read_config(path)


def steps(world, config: dict, settings: dict[str, BaseSettings], adapter: AdapterSettings) -> dict[str, dict]:
    return {name: one_step(world, config, each, adapter) for name, each in settings.items()}


def test_policies_differ_in_work_alone(tmp_path, config):
    save, offload, keep = {"policy": "save_attention"}, {"cpu_checkpointing": True}, {"keep_products": 1}
    sections = {
        "recompute": {},
        "save": save,
        "save, offload": save | offload,
        "save, offload both": save | offload | {"offload_attention": True},
        "save, keep": save | keep,
        "save, keep, offload both": save | keep | offload | {"offload_attention": True},
        "none": {"policy": "none"},
    }
    settings = {name: base_settings(tmp_path, section) for name, section in sections.items()}
    (results,) = run_ranks(1, steps, config, settings, adapter_settings(tmp_path))
    assert_same_bits(results)
    kept, both = PASSES * BLOCKS * KEPT, PASSES * BLOCKS * (INPUT + OUTPUT)
    expected = {  # attention calls again, bytes of its outputs kept, of products, and bytes moved
        "recompute": (PASSES * CALLS, 0, 0, 0),
        "save": (0, kept, 0, 0),
        "save, offload": (0, kept, 0, PASSES * BLOCKS * INPUT),
        "save, offload both": (0, kept, 0, both),
        "save, keep": (0, kept, PASSES * PRODUCTS, 0),
        "save, keep, offload both": (0, kept, PASSES * PRODUCTS, both),
        "none": (0, 0, 0, 0),
    }
    for name, result in results.items():
        found = tuple(result[key] for key in ("again", "kept", "products", "offloaded"))
        assert found == expected[name], name
        assert result["backwards"] == PASSES * CALLS and result["calls"] == PASSES * (CALLS + 1)  # one refiner block
        assert (f"attention outputs: {result['kept']:,} bytes" in result["report"]) == name.startswith("save")


def test_a_feed_forward_in_parts_keeps_the_products_of_attention_alone(tmp_path, config):
    parts = {"ffn_rows": 7}
    keep = parts | {"policy": "save_attention"}
    sections = {
        "recompute": parts,
        "keep": keep | {"keep_products": BLOCKS},
        "keep, more than there are": keep | {"keep_products": BLOCKS + 18},
    }
    settings = {name: base_settings(tmp_path, section) for name, section in sections.items()}
    (results,) = run_ranks(1, steps, config, settings, adapter_settings(tmp_path))
    assert_same_bits(results)
    assert results["keep"]["products"] == PASSES * BLOCKS * (PRODUCTS - FIRST)
    assert results["keep, more than there are"]["products"] == results["keep"]["products"]
    assert f"outputs of linear layers: {results['keep']['products']:,} bytes" in results["keep"]["report"]


def test_ranks_that_share_the_base_keep_outputs_but_no_weights(tmp_path, config):
    """With weights brought ahead in one pass and not in the other, and inputs from host memory."""
    save = {"policy": "save_attention"}
    offload = save | {"cpu_checkpointing": True, "offload_attention": True}
    settings = {
        "recompute": base_settings(tmp_path, {}, shard_group=2),
        "save": base_settings(tmp_path, save, shard_group=2),
        "save, offload": base_settings(tmp_path, offload, shard_group=2),
        "save, no prefetch": base_settings(tmp_path, save, shard_group=2, prefetch=False),
        "save, keep": base_settings(tmp_path, save | {"keep_products": 1}, shard_group=2),
        "save, keep, offload": base_settings(tmp_path, offload | {"keep_products": BLOCKS}, shard_group=2),
    }
    results = run_ranks(2, steps, config, settings, adapter_settings(tmp_path))[-1]
    assert_same_bits(results)
    for name, result in results.items():
        assert result["gathered"] == 0
        assert result["again"] == (PASSES * CALLS if name == "recompute" else 0), name


def test_blocks_are_kept_whole_on_an_unshared_base_alone(tmp_path):
    node = SimpleNamespace(size=2, local_size=2)
    settings = base_settings(tmp_path, {"policy": "none"}, shard_group=2)
    with pytest.raises(UserError, match="'none' needs shard_group 1: blocks that are not recomputed keep their"):
        shard_group_size(node, settings)
    zero = {"zero_optimization": {"offload_param": {"device": "cpu"}}}
    with pytest.raises(UserError, match="offload_param excludes .* 'none'"):
        base_settings(tmp_path, {"policy": "none"}, shard_group=1, **zero)


@pytest.mark.parametrize(
    "section, message",
    [
        ({"keep_products": -1}, "keep_products is -1, expected a number of blocks"),
        ({"keep_products": True}, "keep_products is True, expected a number of blocks"),
        ({"keep_products": 1}, "keep_products keeps outputs .* set policy 'save_attention', or remove it"),
        ({"keep_blocks": 1}, r"unknown keys \['keep_blocks'\]"),
        ({"policy": "save_attentions"}, r"expected one of \('recompute', 'save_attention', 'none'\)"),
    ],
)
def test_sections_that_make_no_sense(tmp_path, section, message):
    with pytest.raises(UserError, match=message):
        base_settings(tmp_path, section)


def test_what_cannot_be_kept_is_said_before_the_base_is_built(tmp_path):
    base, file = tmp_path / "config.json", tmp_path / "base.json"
    base.write_text(json.dumps(CONFIG))
    file.write_text(json.dumps({"activation_checkpointing": {"policy": "save_attention"}}))
    world = SimpleNamespace(device=torch.device("cpu"), size=1, local_size=1)
    asked = SimpleNamespace(
        base_config=str(file), base=str(base), clips="clips", attn="flex", compile="auto", adaln="live"
    )
    with pytest.raises(UserError, match="'save_attention' cannot keep outputs of --attn flex"):
        check_settings(world, asked)


def test_a_policy_that_kept_nothing_is_an_error():
    activations = Activations(ActivationSettings(policy="save_attention"), Slot())
    run = activations.runner(None)
    run(torch.nn.Linear(2, 2), torch.ones(1, 1, 2)).sum().backward()
    with pytest.raises(UserError, match="'save_attention' is on and no attention output was kept"):
        activations.report_once()
