"""Adapters in the layouts of other programs: read by those programs themselves, and back, bit for bit."""

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command import rtcwm
from diffusers import MiniMaxH3Transformer3DModel
from diffusers.loaders import MiniMaxH3LoraLoaderMixin
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small import CONFIG, random_window, small_model
from test_blocks import forward

from rtcwm.adapters.export import export, fuse
from rtcwm.errors import UserError
from rtcwm.model import adapter_reader, tensor_files
from rtcwm.model.adapter_files import load_adapter, read_metadata, save_adapter, shape_metadata, to_file_tensors
from rtcwm.model.adapter_layouts import LAYOUTS
from rtcwm.model.adapter_reader import AdapterFile, open_adapter
from rtcwm.model.loading import SeededSource, read_config
from rtcwm.model.lora import SITES, Adapter, AdapterShape, adapted_layers, inject
from rtcwm.model.packing import row_times
from rtcwm.model.tensor_files import write_tensors
from rtcwm.train import preflight

RANK, ALPHA = 4, 6.0
SHAPE = AdapterShape.of(CONFIG, RANK, ALPHA)
METADATA = {"step": "7", "objective": "df", "base": "b" * 32, "shift": "3.0", "span": "6", "seed": "1", "note": "ä\n1"}
OTHERS = ("comfyui", "diffusers", "peft")


def adapter(seed: int = 0) -> Adapter:
    """Random in every number, in 64ths: bf16 holds them, and fp64 the sums of their products."""
    made, draw = Adapter(SHAPE, seed), torch.Generator().manual_seed(seed + 50)
    with torch.no_grad():
        for pair in made.pairs():
            pair.up.normal_(0, 0.2, generator=draw)
            pair.down.normal_(0, 0.2, generator=draw)
            for matrix in (pair.up, pair.down):
                matrix.copy_((matrix * 64).round() / 64)
    return made


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> dict[str, Path]:
    """One adapter in every layout."""
    root = tmp_path_factory.mktemp("layouts")
    paths = {name: root / ("peft" if name == "peft" else f"{name}.safetensors") for name in LAYOUTS}
    save_adapter(paths["musubi"], adapter(), METADATA)
    for name in OTHERS:
        export(paths["musubi"], name, paths[name])
    return paths


def unfused() -> MiniMaxH3Transformer3DModel:
    """The small base as diffusers loads it: q, k and v apart, diffusers' own attention."""
    model = small_model()
    for block in [*model.transformer_blocks, *model.token_refiner.refiner_blocks]:
        block.attn.unfuse_projections()
    return model


def output(model) -> torch.Tensor:
    """In fp64, so that what is left of a difference is the order of sums."""
    window = random_window(10)
    layout, tensors = window.layout(stream=True), vars(window)
    doubled = {name: value.double() for name, value in tensors.items() if value.is_floating_point()}
    times, index = row_times(layout, torch.tensor([0.2, 0.7]))
    with torch.no_grad():
        return forward(model.double(), replace(window, **doubled), layout, times.double(), index)


@pytest.fixture(scope="module")
def hooked() -> torch.Tensor:
    """What rtcwm's hooks make of the adapter."""
    model = small_model()
    slot, before = inject(model), output(model)
    with slot.bind(adapter()):
        after = output(model)
    assert after.dtype == torch.float64 and (after - before).abs().max() > 0.1
    return after


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """As close as fp64 rounds: thirteen digits of numbers of about 10."""
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def in_64ths(model):
    """The model with its base's weights rounded so that fp64 holds every sum of an adapted layer exactly."""
    with torch.no_grad():
        for name, parameter in model.double().named_parameters():
            if "lora_" not in name:
                parameter.copy_((parameter * 64).round() / 64)
    return model


def same_layers(model) -> None:
    """Every layer that both programs have gives the same bits, where no sum is rounded: no term is missing, doubled or
    scaled otherwise."""
    mine, draw = in_64ths(small_model()), torch.Generator().manual_seed(3)
    slot, theirs = inject(mine), in_64ths(model).transformer_blocks

    def rows(width: int) -> torch.Tensor:
        return torch.randint(-8, 9, (3, width), generator=draw).double()

    with slot.bind(adapter()), torch.no_grad():
        for index, block in enumerate(mine.transformer_blocks):
            layers = (theirs[index].attn.to_out[0], theirs[index].ff.net[0].proj, theirs[index].ff.net[2])
            for own, other in zip(list(adapted_layers(block).values())[1:], layers, strict=True):
                x = rows(own.in_features)
                assert torch.equal(own(x), other(x))
            x = rows(CONFIG["hidden_size"])
            parts = [layer(x) for layer in (theirs[index].attn.to_q, theirs[index].attn.to_k, theirs[index].attn.to_v)]
            assert torch.equal(block.attn.to_qkv(x), torch.cat(parts, -1))


def test_diffusers_loads_its_layout(written, hooked):
    """The model's own loader, and the pipeline's, which puts the adapter into transformer_ref by its names."""
    model = unfused()
    model.load_lora_adapter(str(written["diffusers"]), prefix="transformer_ref", use_safetensors=True)
    close(output(model), hooked)
    assert not any("lora" in name for name, _ in model.token_refiner.named_modules())
    same_layers(model)
    model = unfused()
    state, metadata = MiniMaxH3LoraLoaderMixin.lora_state_dict(str(written["diffusers"]), return_lora_metadata=True)
    MiniMaxH3LoraLoaderMixin.load_lora_into_transformer_ref(state, model, "transformer_ref", metadata=metadata)
    close(output(model), hooked)


@pytest.fixture(scope="module")
def full(tmp_path_factory) -> Path:
    """The adapter in fp32, into which diffusers can fold alpha / rank without rounding."""
    path = tmp_path_factory.mktemp("full") / "musubi.safetensors"
    write_tensors(path, to_file_tensors(adapter(), torch.float32), shape_metadata(SHAPE))
    return path


def converted(path: Path) -> torch.Tensor:
    """Output of the base with a file that diffusers' own converter read."""
    model = unfused()
    MiniMaxH3LoraLoaderMixin.load_lora_into_transformer(MiniMaxH3LoraLoaderMixin.lora_state_dict(str(path)), model)
    return output(model)


def test_diffusers_converts_the_original_names(full, hooked, tmp_path):
    """diffusers' converter knows these layouts: order of qkv, of the feed-forward's halves, and alpha."""
    export(full, "comfyui", tmp_path / "comfyui.safetensors")
    for path in (full, tmp_path / "comfyui.safetensors"):
        close(converted(path), hooked)


@pytest.mark.parametrize("swapped", ["mlp_fc1", "attn_qkv_proj"])
def test_a_wrong_order_of_rows_is_another_model(full, hooked, tmp_path, swapped):
    """The comparison above sees the order: files with halves or thirds exchanged give other numbers."""
    tensors, parts = load_file(full), 2 if swapped == "mlp_fc1" else 3
    for name in [name for name in tensors if f"{swapped}.lora_up" in name]:
        tensors[name] = torch.cat(tensors[name].chunk(parts)[::-1])
    save_file(tensors, tmp_path / "wrong.safetensors")
    assert (converted(tmp_path / "wrong.safetensors") - hooked).abs().max() > 0.05


def test_peft_loads_its_folder(written, hooked):
    model = PeftModel.from_pretrained(unfused(), written["peft"])
    close(output(model.base_model.model), hooked)
    same_layers(model.base_model.model)
    again = get_peft_model(unfused(), LoraConfig.from_pretrained(written["peft"]))
    result = set_peft_model_state_dict(again, load_file(written["peft"] / "adapter_model.safetensors"))
    assert not result.unexpected_keys
    close(output(again.base_model.model), hooked)
    adapted = [name for name, _ in again.named_modules() if name.endswith("lora_A")]
    assert len(adapted) == 6 * CONFIG["num_layers"] and not any("refiner" in name for name in adapted)


@pytest.mark.parametrize("name", OTHERS)
def test_there_and_back_gives_the_same_file(written, tmp_path, name):
    export(written[name], "musubi", tmp_path / "back.safetensors")
    assert (tmp_path / "back.safetensors").read_bytes() == written["musubi"].read_bytes()
    loaded = load_adapter(written[name], CONFIG)
    assert loaded.shape == SHAPE
    assert all(torch.equal(x, y) for x, y in zip(loaded.parameters(), adapter().parameters(), strict=True))
    assert read_metadata(written[name]).items() >= METADATA.items()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_types_and_bits_stay(tmp_path, dtype):
    """An fp32 file keeps numbers that bf16 has not."""
    tensors = {}
    draw = torch.Generator().manual_seed(1)
    for block in range(2):
        for site, file in zip(SITES, ("attn_qkv_proj", "attn_out_proj", "mlp_fc1", "mlp_fc2"), strict=True):
            inputs, outputs = SHAPE.features(site)
            prefix = f"lora_unet_blocks_{block}_{file}"
            tensors[f"{prefix}.lora_down.weight"] = torch.randn(RANK, inputs, generator=draw).to(dtype)
            tensors[f"{prefix}.lora_up.weight"] = torch.randn(outputs, RANK, generator=draw).to(dtype)
            tensors[f"{prefix}.alpha"] = torch.tensor(2.5)
    write_tensors(tmp_path / "a.safetensors", tensors, {"rank": "4", "alpha": "2.5", "format": "pt"})
    for name in OTHERS:
        there = tmp_path / (name if name == "peft" else f"{name}.safetensors")
        export(tmp_path / "a.safetensors", name, there)
        export(there, "musubi", tmp_path / "b.safetensors")
        assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_the_same_adapter_is_the_same_file(tmp_path):
    """The library alone orders metadata anew in every file."""
    files = []
    for attempt in range(4):
        save_adapter(tmp_path / f"{attempt}.safetensors", adapter(), dict(reversed(METADATA.items())))
        files.append((tmp_path / f"{attempt}.safetensors").read_bytes())
    assert len(set(files)) == 1
    with safe_open(tmp_path / "0.safetensors", framework="pt") as file:
        assert file.metadata() == METADATA | {"rank": "4", "alpha": "6.0", "format": "pt"}
        assert len(file.keys()) == 24
    assert (tmp_path / "0.safetensors").stat().st_mode & 0o777 == 0o644


def peft_trained(tmp_path, **options) -> tuple[MiniMaxH3Transformer3DModel, Path]:
    """An adapter that PEFT itself made and saved: q, k and v each with a down projection of its own."""
    modules = r"transformer_blocks\.\d+\.(attn\.(to_q|to_k|to_v|to_out\.0)|ff\.net\.(0\.proj|2))"
    settings = dict(r=RANK, lora_alpha=ALPHA, target_modules=modules) | options
    model = get_peft_model(unfused(), LoraConfig(**settings))
    draw = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.2)
    model.save_pretrained(tmp_path / "peft")
    return model.base_model.model, tmp_path / "peft"


def test_q_k_and_v_of_their_own_are_fused_exactly_when_asked(tmp_path):
    model, folder = peft_trained(tmp_path)
    with pytest.raises(UserError, match=r"block 0 .*rank 4.* at rank 12 they can, exactly\. `rtcwm adapter fuse"):
        load_adapter(folder, CONFIG)
    with pytest.raises(UserError, match="at rank 12 they can"):
        export(folder, "comfyui", tmp_path / "x.safetensors")
    assert fuse(folder, "musubi", tmp_path / "fused.safetensors") == AdapterShape.of(CONFIG, 12, 18.0)
    fused = load_adapter(tmp_path / "fused.safetensors", CONFIG)
    mine = small_model()
    slot = inject(mine)
    with slot.bind(fused):
        close(output(mine), output(model))
    state = load_file(folder / "adapter_model.safetensors")
    for block in range(2):
        prefix = f"base_model.model.transformer_blocks.{block}."
        parts = [f"{prefix}attn.to_{part}.lora_" for part in "qkv"]
        whole = torch.cat([state[f"{part}B.weight"].double() @ state[f"{part}A.weight"].double() for part in parts])
        pair = fused.blocks[block]["attn_qkv"]
        # products of the same numbers, and zeros
        torch.testing.assert_close(pair.up.double() @ pair.down.double(), whole, rtol=1e-14, atol=1e-14)
        pair, part = fused.blocks[block]["ffn_in"], f"{prefix}ff.net.0.proj.lora_"
        whole = state[f"{part}B.weight"].double() @ state[f"{part}A.weight"].double()
        assert torch.equal(pair.up.double() @ pair.down.double(), whole)
        assert not pair.up[:, 4:].any() and (pair.down[4:].std(1) > 0).all(), "what fills up has to be trainable"
    assert fuse(folder, "peft", tmp_path / "again").rank == 12
    assert load_adapter(tmp_path / "again", CONFIG).shape.alpha == 18.0


def test_equal_downs_stand_once(tmp_path):
    """k and v share theirs: rank 8 holds them; all three share: the file is read as it is."""
    _, folder = peft_trained(tmp_path)
    file = folder / "adapter_model.safetensors"
    state = load_file(file)
    for block in range(2):
        prefix = f"base_model.model.transformer_blocks.{block}.attn."
        state[f"{prefix}to_v.lora_A.weight"] = state[f"{prefix}to_k.lora_A.weight"].clone()
    save_file(state, file)
    with pytest.raises(UserError, match="at rank 8 they can"):
        load_adapter(folder, CONFIG)
    assert fuse(folder, "musubi", tmp_path / "fused.safetensors").rank == 8
    for block in range(2):
        prefix = f"base_model.model.transformer_blocks.{block}.attn."
        for part in "qk":
            state[f"{prefix}to_{part}.lora_A.weight"] = state[f"{prefix}to_v.lora_A.weight"].clone()
    save_file(state, file)
    assert load_adapter(folder, CONFIG).shape == SHAPE


def test_files_that_other_programs_saved(written, hooked, tmp_path):
    """diffusers' `save_lora_adapter` and `save_lora_weights`, PEFT's `save_pretrained`, and a bare dump of its
    names."""
    model = unfused()
    model.load_lora_adapter(str(written["diffusers"]), prefix="transformer_ref", use_safetensors=True)
    model.save_lora_adapter(tmp_path / "model", adapter_name="default_0")
    PeftModel.from_pretrained(unfused(), written["peft"]).save_pretrained(tmp_path / "peft")
    state = load_file(written["peft"] / "adapter_model.safetensors")
    bare = {name.removeprefix("base_model.model."): value for name, value in state.items()}
    MiniMaxH3LoraLoaderMixin.save_lora_weights(
        tmp_path / "pipeline", transformer_ref_lora_layers=bare,
        transformer_ref_lora_adapter_metadata={"r": RANK, "lora_alpha": ALPHA},
    )  # fmt: skip
    dumped = {name.replace(".weight", ".default.weight"): value for name, value in bare.items()}
    save_file(dumped, tmp_path / "dump.safetensors", metadata={"alpha": str(ALPHA)})
    for name in ("model", "peft", "pipeline", "dump.safetensors"):
        loaded = load_adapter(tmp_path / name, CONFIG)
        assert loaded.shape == SHAPE, name
        assert all(torch.equal(x, y) for x, y in zip(loaded.parameters(), adapter().parameters(), strict=True)), name


def head_by_head(path: Path, config: dict) -> AdapterShape:
    """Writes a random adapter whose qkv rows stand head by head: the original names with PEFT's `.default.`."""
    shape, draw, tensors = AdapterShape.of(config, RANK), torch.Generator().manual_seed(2), {}
    names = dict(zip(SITES, ("attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2"), strict=True))
    for block in range(2):
        for site, name in names.items():
            inputs, outputs = shape.features(site)
            tensors[f"blocks.{block}.{name}.lora_A.default.weight"] = torch.randn(RANK, inputs, generator=draw)
            tensors[f"blocks.{block}.{name}.lora_B.default.weight"] = torch.randn(outputs, RANK, generator=draw)
    save_file(tensors, path)
    return shape


def test_qkv_that_stands_head_by_head(tmp_path):
    """The layout with PEFT's `.default.` over the original names, against diffusers' converter (which wants heads of
    128)."""
    config = CONFIG | {"attention_head_dim": 128}
    head_by_head(tmp_path / "a.safetensors", config)
    theirs = MiniMaxH3LoraLoaderMixin.lora_state_dict(str(tmp_path / "a.safetensors"))
    loaded = load_adapter(tmp_path / "a.safetensors", config)
    for block, pairs in enumerate(loaded.blocks):
        prefix = f"transformer.transformer_blocks.{block}."
        parts = [theirs[f"{prefix}attn.to_{part}.lora_B.weight"] for part in "qkv"]
        assert torch.equal(pairs["attn_qkv"].up, torch.cat(parts))
        assert torch.equal(pairs["ffn_in"].up, theirs[f"{prefix}ff.net.0.proj.lora_B.weight"])
    assert AdapterFile(tmp_path / "a.safetensors").layout == "diffsynth"
    with pytest.raises(UserError, match="expected q, k and v of heads of width 96 in turn"):
        AdapterFile(tmp_path / "a.safetensors").pair(0, "attn_qkv", head=96)


def test_heads_are_as_wide_as_the_base_s(tmp_path, monkeypatch, capsys):
    """12 heads of 32 fit heads of 128 by their number of rows: what is written is what a run would load."""
    config = CONFIG | {"num_attention_heads": 12, "attention_head_dim": 32}
    source, base, out = tmp_path / "a.safetensors", tmp_path / "base.json", tmp_path / "b.safetensors"
    shape = head_by_head(source, config)
    base.write_text(json.dumps(config))
    loaded = load_adapter(source, config)
    for words in (("export", source, "--to", "comfyui"), ("adapter", "fuse", source)):
        assert rtcwm(monkeypatch, *words, "--out", out) == 2
        assert "the width of a head cannot be told: name the base" in capsys.readouterr().err and not out.exists()
        assert rtcwm(monkeypatch, *words, "--out", out, "--base", "embedded") == 2  # not of its sizes
        assert not out.exists() and capsys.readouterr().err.count("\n") == 1
        assert rtcwm(monkeypatch, *words, "--out", out, "--base", base) == 0
        again = load_adapter(out, config)
        assert again.shape == shape
        assert all(torch.equal(x, y) for x, y in zip(again.parameters(), loaded.parameters(), strict=True))
        assert rtcwm(monkeypatch, "adapter", "diff", source, out) == 2
        assert rtcwm(monkeypatch, "adapter", "diff", source, out, "--base", base) == 0
        out.unlink()


def test_show_needs_no_width_of_heads(tmp_path, monkeypatch, capsys):
    """Norms are the same in any order of rows; 4 heads of 16 are no whole number of heads of 128."""
    head_by_head(tmp_path / "a.safetensors", CONFIG)
    pairs = load_adapter(tmp_path / "a.safetensors", CONFIG).blocks
    assert rtcwm(monkeypatch, "adapter", "show", tmp_path / "a.safetensors") == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("attn_qkv")).split()
    norms = [float((block["attn_qkv"].up @ block["attn_qkv"].down).detach().norm()) for block in pairs]
    assert [float(cell) for cell in row[2:4]] == pytest.approx([min(norms), max(norms)], rel=1e-3)


def test_heads_of_the_release_are_known(tmp_path, monkeypatch):
    """A file of the release's sizes needs no base; sizes are all that is compared, so small ones stand for them."""
    config = CONFIG | {"num_attention_heads": 3, "attention_head_dim": 128}
    shape = head_by_head(tmp_path / "a.safetensors", config)
    with pytest.raises(UserError, match="name the base"):
        export(tmp_path / "a.safetensors", "musubi", tmp_path / "b.safetensors")
    monkeypatch.setattr(adapter_reader, "RELEASED_SIZES", (shape.layers, shape.hidden, shape.inner, shape.ffn))
    export(tmp_path / "a.safetensors", "musubi", tmp_path / "b.safetensors")
    one, two = (load_adapter(tmp_path / f"{name}.safetensors", config) for name in "ab")
    assert all(torch.equal(x, y) for x, y in zip(one.parameters(), two.parameters(), strict=True))


ALPHAS = [
    ("musubi", lambda state, metadata: metadata.update(alpha="2.0"), 6.0),  # the tensors win
    ("diffusers", lambda state, metadata: metadata.pop("lora_adapter_metadata"), 6.0),  # then metadata alpha
    ("diffusers", lambda state, metadata: metadata.clear(), 4.0),  # then the rank
    ("diffusers", lambda state, metadata: (metadata.clear(), metadata.update(alpha="")), 4.0),
]


@pytest.mark.parametrize(("name", "change", "expected"), ALPHAS)
def test_where_alpha_comes_from(written, tmp_path, name, change, expected):
    state, metadata = load_file(written[name]), read_metadata(written[name])
    change(state, metadata)
    save_file(state, tmp_path / "a.safetensors", metadata=metadata)
    assert load_adapter(tmp_path / "a.safetensors", CONFIG).shape.alpha == expected


def test_alpha_patterns_of_peft(tmp_path):
    _, folder = peft_trained(tmp_path, alpha_pattern={"ff.net.2": 3.0})
    with pytest.raises(UserError, match="alpha differs between layers"):
        AdapterFile(folder).shape(CONFIG)
    with pytest.raises(UserError, match=r"alpha / rank differs between layers \(.*: 1.5; .*ff.net.2: 0.75\)"):
        fuse(folder, "musubi", tmp_path / "x.safetensors")


def test_ranks_that_differ_are_brought_to_one(tmp_path):
    model, folder = peft_trained(tmp_path, rank_pattern={"ff.net.2": 2}, alpha_pattern={"ff.net.2": 3.0})
    with pytest.raises(UserError, match=r"has layers of ranks 2, 4; .*`rtcwm adapter fuse"):
        load_adapter(folder, CONFIG)
    fuse(folder, "musubi", tmp_path / "fused.safetensors")
    mine = small_model()
    slot = inject(mine)
    with slot.bind(load_adapter(tmp_path / "fused.safetensors", CONFIG)):
        close(output(mine), output(model))


def first_of(state: dict, ending: str) -> str:
    return next(name for name in sorted(state) if ending in name)


BAD = [
    ("diffusers", lambda s: s.pop(first_of(s, "0.attn.to_k.lora_A")), r"lacks .*0\.attn\.to_k\.lora_A\.weight"),
    ("diffusers", lambda s: [s.pop(n) for n in list(s) if "1.attn.to_v" in n],
     "adapts .*to_q, .*to_k: expected q, k and v"),
    ("diffusers", lambda s: s.update({"transformer.transformer_blocks.0.attn.to_q.lora_A.weight": torch.ones(4, 48)}),
     r"mixes several layouts .*transformer\.transformer_blocks"),
    ("comfyui", lambda s: s.update({"diffusion_model.blocks.0.adaln_proj.linear.lora_A.weight": torch.ones(4, 24)}),
     "no layer for, such as diffusion_model.blocks.0.adaln_proj"),
    ("comfyui", lambda s: s.update({first_of(s, "mlp.fc1.lora_B"): torch.ones(96, 4)}), "need .128, 4."),
    ("comfyui", lambda s: s.update({first_of(s, "mlp.fc1.lora_B"): torch.full((128, 4), float("inf"))}), "non-finite"),
    ("comfyui", lambda s: s.update({first_of(s, "fc1.lora_A"): torch.ones(0, 48)}),
     r"is \[0, 48\], expected \[rank, width\]"),
    ("comfyui", lambda s: [s.update({n.replace("diffusion_model", "base_model.model"): s.pop(n)}) for n in list(s)],
     "does not tell the order of its qkv rows"),
    ("musubi", lambda s: [s.update({n.replace("lora_unet_blocks", "lora_te"): s.pop(n)}) for n in list(s)],
     "not an adapter of MiniMax-H3's blocks"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "edit", "message"), BAD)
def test_bad_files_are_named_in_every_layout(written, tmp_path, name, edit, message):
    state = load_file(written[name])
    edit(state)
    save_file(state, tmp_path / "bad.safetensors", metadata=read_metadata(written[name]))
    with pytest.raises(UserError, match=message):
        load_adapter(tmp_path / "bad.safetensors", CONFIG)


CONFIGS = [
    (lambda config: config.update(use_rslora=True), "use_rslora is True; rtcwm reads plain LoRA alone"),
    (lambda config: config.update(bias="all"), "bias is 'all'"),
    (lambda config: config.update(lora_alpha=None), "lora_alpha is None, expected a finite number"),
    (lambda config: config.update(peft_type="LOHA"), "peft_type is 'LOHA'"),
    (lambda config: config.update(alpha_pattern=[1]), r"alpha_pattern is \[1\], expected an object"),
    (lambda config: config.update(alpha_pattern={"(": 2}), r"alpha_pattern '\(' is no pattern"),
]


@pytest.mark.parametrize(("edit", "message"), CONFIGS)
def test_configs_that_mean_something_else(written, tmp_path, edit, message):
    export(written["musubi"], "peft", tmp_path / "peft")
    file = tmp_path / "peft" / "adapter_config.json"
    config = json.loads(file.read_text())
    edit(config)
    file.write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        load_adapter(tmp_path / "peft", CONFIG)


def test_what_cannot_be_read(written, tmp_path):
    torch.save(load_file(written["musubi"]), tmp_path / "a.pt")
    (tmp_path / "a.pt").rename(tmp_path / "b.safetensors")  # a pickle is one by its content
    torch.save({}, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    for name in ("b.safetensors", "old.bin"):
        with pytest.raises(UserError, match="is a pickle, which can run code"):
            load_adapter(tmp_path / name, CONFIG)
    with pytest.raises(UserError, match=r"folder without adapter_model.safetensors .*b.safetensors"):
        load_adapter(tmp_path, CONFIG)
    export(written["musubi"], "peft", tmp_path / "peft")
    for text, message in (("{", "is not valid JSON"), ("[]", "expected the config of a LoRA")):
        (tmp_path / "peft" / "adapter_config.json").write_text(text)
        with pytest.raises(UserError, match=message):
            load_adapter(tmp_path / "peft", CONFIG)
    (tmp_path / "peft" / "adapter_config.json").write_bytes(b"\xff{}")
    with pytest.raises(UserError, match="that cannot be read .*utf-8"):
        load_adapter(tmp_path / "peft", CONFIG)
    (tmp_path / "peft" / "adapter_config.json").unlink()
    with pytest.raises(UserError, match="alpha stands in adapter_config.json, and that cannot be read"):
        load_adapter(tmp_path / "peft", CONFIG)
    with pytest.raises(UserError, match="expected a name that ends in .safetensors"):
        export(written["musubi"], "diffusers", tmp_path)
    with pytest.raises(UserError, match="PEFT's layout is a folder"):
        export(written["musubi"], "peft", tmp_path / "x.safetensors")


@pytest.mark.parametrize("name", ["musubi", "peft"])
def test_one_read_serves_a_whole_start(written, tmp_path, monkeypatch, name):
    """What a run asks of an adapter before its first step: twice the checks of its plan, its hash, its weights."""
    path = tmp_path / ("peft" if name == "peft" else "a.safetensors")
    save_adapter(tmp_path / "plain.safetensors", adapter(), {"objective": "df"})
    export(tmp_path / "plain.safetensors", name, path)
    source, maps, real = SeededSource(read_config_of(tmp_path)), [], tensor_files.mmap.mmap

    def counting(number: int, *arguments, **options):
        maps.append(os.readlink(f"/proc/self/fd/{number}"))
        return real(number, *arguments, **options)

    monkeypatch.setattr(tensor_files.mmap, "mmap", counting)
    for _ in range(2):
        assert preflight.check_adapter(str(path), source, objective="df") == SHAPE
    identity = preflight.file_hash(str(path))
    loaded = load_adapter(path, source.config)
    file = path / "adapter_model.safetensors" if name == "peft" else path
    assert maps == [str(file)]
    assert torch.equal(next(loaded.parameters()), next(adapter().parameters()))
    monkeypatch.undo()
    if name == "musubi":  # the identity of runs that were started before
        assert identity == hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    else:  # PEFT's config decides too
        config = path / "adapter_config.json"
        config.write_text(config.read_text().replace("6.0", "12.0"))
        assert preflight.file_hash(str(path)) != identity and load_adapter(path, source.config).shape.alpha == 12.0


def read_config_of(folder: Path) -> dict:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return read_config(folder / "config.json")


def test_a_file_that_changed_is_read_again(written, tmp_path):
    path = tmp_path / "a.safetensors"
    save_adapter(path, adapter(), METADATA)
    first, before = open_adapter(path), open_adapter(path).hash
    assert open_adapter(path) is first
    save_adapter(tmp_path / "b.safetensors", adapter(1), METADATA)
    (tmp_path / "b.safetensors").replace(path)
    assert open_adapter(path).hash != before
    assert torch.equal(first.pair(0, "attn_out")[0].float(), adapter().blocks[0]["attn_out"].down), (
        "the old file is kept"
    )
