"""Adapters: what they add, who is active, and their files."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from small import CONFIG, random_adapter, random_window, small_model

from rtcwm.errors import UserError
from rtcwm.model.adapter_files import file_shape, load_adapter, read_metadata, save_adapter
from rtcwm.model.attention import install, make_attend, resolve
from rtcwm.model.blocks import predict_velocity
from rtcwm.model.lora import SITES, Adapter, AdapterShape, adapted_layers, inject

RANK = 4
SHAPE = AdapterShape.of(CONFIG, RANK, alpha=6.0)


def trained(seed: int = 0, shape: AdapterShape = SHAPE) -> Adapter:
    return random_adapter(shape, seed, size=0.2)


def velocity_of(model, window) -> torch.Tensor:
    layout = window.layout(stream=True)
    return predict_velocity(
        model, window, layout, torch.tensor([0.3, 0.8]), make_attend(resolve("sdpa", "cpu"), layout, "E")
    )


def test_an_adapter_equals_its_merged_weights():
    window, adapter = random_window(10), trained()
    hooked, merged = small_model(), small_model()
    for model in (hooked, merged):
        install(model, resolve("sdpa", "cpu"))
    with torch.no_grad():
        for block, pairs in zip(merged.transformer_blocks, adapter.blocks, strict=True):
            for site, layer in adapted_layers(block).items():
                layer.weight += 6.0 / RANK * pairs[site].up @ pairs[site].down
    slot = inject(hooked)
    base = velocity_of(hooked, window)
    with slot.bind(adapter):
        adapted = velocity_of(hooked, window)
    torch.testing.assert_close(adapted, velocity_of(merged, window), rtol=1e-4, atol=1e-4)
    assert (adapted - base).abs().max() > 1e-2
    assert torch.equal(velocity_of(hooked, window), base), "an adapter stayed bound"


def test_a_new_adapter_changes_nothing_and_several_share_one_base():
    model, window = small_model(), random_window(10)
    install(model, resolve("sdpa", "cpu"))
    slot, first, second = inject(model), trained(1), trained(2)
    outputs = {}
    for name, adapter in {"base": None, "new": Adapter(SHAPE), "first": first, "second": second}.items():
        with slot.bind(adapter):
            outputs[name] = velocity_of(model, window)
    assert torch.equal(outputs["base"], outputs["new"])
    assert not torch.allclose(outputs["first"], outputs["second"])
    with slot.bind(first):
        with pytest.raises(RuntimeError), slot.bind(second):
            raise RuntimeError
        assert slot.active is first
    assert slot.active is None


def test_the_released_size():
    released = {
        "num_layers": 50,
        "hidden_size": 5376,
        "num_attention_heads": 56,
        "attention_head_dim": 128,
        "ffn_dim": 14336,
    }
    assert AdapterShape.of(released, 128).parameters == 596_377_600
    assert 3 * 50 * len(SITES) == 600  # tensors with alpha


def test_files_reload_to_the_same_outputs(tmp_path):
    model, window, adapter = small_model(), random_window(10), trained()
    install(model, resolve("sdpa", "cpu"))
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.copy_(parameter.bfloat16())  # what a bf16 file can hold
    path = tmp_path / "lora.safetensors"
    save_adapter(path, adapter, {"step": "7"})
    loaded, slot = load_adapter(path, CONFIG), inject(model)
    outputs = []
    for candidate in (adapter, loaded):
        with slot.bind(candidate):
            outputs.append(velocity_of(model, window))
    assert torch.equal(*outputs)
    assert read_metadata(path) | {"step": "7", "rank": "4", "alpha": "6.0"} == read_metadata(path)


def test_file_layout_is_the_released_one(tmp_path):
    adapter, path = trained(), tmp_path / "lora.safetensors"
    save_adapter(path, adapter, {})
    tensors = load_file(path)
    assert len(tensors) == CONFIG["num_layers"] * 4 * 3
    assert all(value.dtype == torch.bfloat16 for name, value in tensors.items() if not name.endswith("alpha"))
    fc1 = tensors["lora_unet_blocks_1_mlp_fc1.lora_up.weight"]
    value, gate = adapter.blocks[1]["ffn_in"].up.bfloat16().chunk(2)  # diffusers: value, then gate
    assert torch.equal(fc1, torch.cat([gate, value]))
    assert torch.equal(
        tensors["lora_unet_blocks_0_attn_qkv_proj.lora_up.weight"], adapter.blocks[0]["attn_qkv"].up.bfloat16()
    )
    assert tensors["lora_unet_blocks_0_mlp_fc2.alpha"] == 6.0


def test_fp32_files_and_files_without_alpha_load(tmp_path):
    adapter, path = trained(), tmp_path / "lora.safetensors"
    save_adapter(path, adapter, {})
    tensors = {name: value.float() for name, value in load_file(path).items() if not name.endswith("alpha")}
    save_file(tensors, path)
    assert load_adapter(path, CONFIG).shape.alpha == RANK


def edited(tmp_path, edit) -> object:
    path = tmp_path / "bad.safetensors"
    save_adapter(path, trained(), {})
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)
    return path


ALPHA = "lora_unet_blocks_0_attn_qkv_proj.alpha"
DOWN, UP = "lora_unet_blocks_0_attn_qkv_proj.lora_down.weight", "lora_unet_blocks_1_mlp_fc2.lora_up.weight"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.update({UP: t[UP] * float("nan")}), "lora_up.weight holds non-finite"),
        (lambda t: t.update({UP: t[UP].to(torch.int8)}), "is I8, expected one of"),
        (lambda t: t.update({DOWN: torch.tensor(1.0)}), r"is \[\], expected \[rank, width\]"),
        (lambda t: t.update({ALPHA: torch.tensor(float("inf"))}), "expected one finite number other than 0"),
        (lambda t: t.update({ALPHA: torch.tensor(0.0)}), "expected one finite number other than 0"),
        (lambda t: t.update({ALPHA: torch.ones(2)}), "expected one finite number other than 0"),
        (lambda t: t.pop(UP), "lacks lora_unet_blocks_1_mlp_fc2.lora_up.weight"),
        (lambda t: t.pop(DOWN), "lacks lora_unet_blocks_0_attn_qkv_proj.lora_down.weight"),
        (lambda t: t.update({UP: t[UP][:-1].clone()}), r"is \[47, 4\], but this base and rank 4 need \[48, 4\]"),
        (lambda t: t.update({"extra": torch.ones(1)}), "no layer for, such as extra"),
        (lambda t: t.update({UP.replace("lora_up.weight", "alpha"): torch.tensor(3.0)}), "alpha differs"),
    ],
)
def test_bad_files_are_named(tmp_path, edit, message):
    with pytest.raises(UserError, match=message):
        load_adapter(edited(tmp_path, edit), CONFIG)


def test_another_base_and_damage(tmp_path):
    path = tmp_path / "lora.safetensors"
    save_adapter(path, trained(), {})
    with pytest.raises(UserError, match=r"is \[4, 48\], but this base and rank 4 need \[4, 64\]"):
        file_shape(path, CONFIG | {"hidden_size": 64})
    with pytest.raises(UserError, match="made for a base with other layers"):
        file_shape(path, CONFIG | {"num_layers": 3})
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match="truncated"):
        load_adapter(path, CONFIG)
    with pytest.raises(UserError, match="no adapter file"):
        load_adapter(tmp_path / "none.safetensors", CONFIG)


@pytest.mark.parametrize(("value", "message"), [(0.0, "zero everywhere"), (float("inf"), "non-finite")])
def test_unhealthy_weights_are_not_saved(tmp_path, value, message):
    adapter = trained()
    with torch.no_grad():
        adapter.blocks[1]["ffn_in"].up.fill_(value)
    with pytest.raises(UserError, match=message):
        save_adapter(tmp_path / "lora.safetensors", adapter, {})
    assert not list(tmp_path.iterdir())
