"""Bases in other forms than a diffusers folder: each is told what it is, and the advice works."""

import json
import shutil

import pytest
import torch
from diffusers import MiniMaxH3Transformer3DModel
from safetensors.torch import load_file, save_file
from small import CONFIG

from rtcwm.errors import UserError
from rtcwm.model.loading import build_base, open_base

RENAMED = {
    "token_refiner.refiner_blocks.": "token_refiner.blocks.", "transformer_blocks.": "blocks.",
    "time_embedder.linear_1.": "time_embedder.proj_in.", "time_embedder.linear_2.": "time_embedder.proj_out.",
    "audio_proj_in.": "audio_patch_proj.", "context_embedder.": "condition_proj.", 
    "norm_out.norm.": "final_layer.norm.", "norm_out.linear.": "final_layer.adaln_proj.linear.",
    "audio_proj_out.": "final_layer.audio_out.",
    ".attn.norm_q.": ".attn.q_norm.", ".attn.norm_k.": ".attn.k_norm.", ".attn.to_out.0.": ".attn.out_proj.",
    ".ff.net.0.proj.": ".mlp.fc1.", ".ff.net.2.": ".mlp.fc2.",
}  # fmt: skip


def original(model: MiniMaxH3Transformer3DModel) -> dict[str, torch.Tensor]:
    """The model's tensors under the original names: qkv fused and stacked, fc1 [gate; value]."""
    given, found = model.state_dict(), {}
    for name, value in given.items():
        if ".attn.to_k." in name or ".attn.to_v." in name:
            continue
        new = name
        for ours, theirs in RENAMED.items():
            new = new.replace(ours, theirs) if not new.startswith("blocks.") or ours != "transformer_blocks." else new
        if new.startswith(("proj_in.", "proj_out.")):
            new = new.replace("proj_in.", "video_patch_proj.").replace("proj_out.", "final_layer.video_out.")
        if ".attn.to_q." in name:
            new = new.replace(".to_q.", ".qkv_proj.")
            value = torch.cat([given[name.replace("to_q", part)] for part in ("to_q", "to_k", "to_v")])
        if ".ff.net.0.proj." in name:
            value = torch.cat(value.chunk(2)[::-1])
        found[new] = value.contiguous()
    return found


@pytest.fixture(scope="module")
def model() -> MiniMaxH3Transformer3DModel:
    torch.manual_seed(4)
    return MiniMaxH3Transformer3DModel(**CONFIG).eval().requires_grad_(False)


@pytest.fixture
def single(model, tmp_path):
    """A single file as ComfyUI loads it, and a folder with the config alone."""
    save_file(original(model), tmp_path / "h3.safetensors")
    model.save_config(tmp_path / "config")
    return tmp_path / "h3.safetensors"


def test_the_advice_for_a_single_file_works(model, single, tmp_path):
    with pytest.raises(
        UserError, match=r"original layout's tensors .*from_single_file\(FILE, config=FOLDER, qkv_layout"
    ):
        open_base(str(single))
    converted = MiniMaxH3Transformer3DModel.from_single_file(
        str(single), config=str(tmp_path / "config"), qkv_layout="stacked", torch_dtype=torch.float32
    )
    converted.save_pretrained(tmp_path / "out", max_shard_size="200KB")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1 and list((tmp_path / "out").glob("*.index.json"))
    base = build_base(open_base(str(tmp_path / "out")), torch.device("cpu"), torch.float32)
    for name, value in base.named_parameters():
        if "to_qkv" in name:
            parts = [model.get_parameter(name.replace("to_qkv", part)) for part in ("to_q", "to_k", "to_v")]
            assert torch.equal(value, torch.cat(parts))
        else:
            assert torch.equal(value, model.get_parameter(name)), name


def shards(root, tensors, index: bool = True) -> None:
    root.mkdir(parents=True)
    (root / "config.json").write_text('{"model_type": "minimax_h3", "hidden": 48}')
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, root / file)
    if index:
        weights = {name: file for file, held in parts.items() for name in held}
        (root / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))


@pytest.mark.parametrize("where", ["", "Ref2VA/transformer", "transformer"])
def test_the_release_in_its_own_layout(model, tmp_path, where):
    shards(tmp_path / "h3" / where, original(model))
    with pytest.raises(UserError, match="original layout .*scripts/convert_minimax_h3_to_diffusers.py"):
        open_base(str(tmp_path / "h3"))


def test_one_shard_without_the_index(model, tmp_path):
    tensors = original(model)
    (tmp_path / "h3").mkdir()
    save_file(tensors, tmp_path / "h3" / "model-00001-of-00001.safetensors")
    with pytest.raises(UserError, match="in the original layout"):
        open_base(str(tmp_path / "h3"))


def test_a_single_file_of_any_name_in_a_folder(single):
    with pytest.raises(UserError, match=r"h3.safetensors holds the original layout's tensors .*from_single_file"):
        open_base(str(single.parent))


OTHERS = [
    (lambda root, model: save_file({f"model.diffusion_model.{n}": v for n, v in original(model).items()},
                                   root / "x.safetensors"),
     "x.safetensors", "original layout's tensors"),
    (lambda root, model: save_file(original(model) | {"adaln_t_table": torch.ones(2)}, root / "x.safetensors"),
     "x.safetensors", "is a pruned model"),
    (lambda root, model: save_file(dict(model.state_dict()), root / "x.safetensors"),
     "x.safetensors", "name its folder"),
    (lambda root, model: torch.save(model.state_dict(), root / "x.pt"), "x.pt", "is a pickle, which can run code"),
    (lambda root, model: (root / "x.gguf").write_bytes(b"GGUF"), "x.gguf", "is a GGUF file"),
    (lambda root, model: (root / "x.txt").write_text("no"), "x.txt", "expected 'embedded', a diffusers H3 folder"),
]  # fmt: skip


@pytest.mark.parametrize(("write", "name", "message"), OTHERS, ids=[message for *_, message in OTHERS])
def test_files_of_other_kinds(model, tmp_path, write, name, message):
    write(tmp_path, model)
    with pytest.raises(UserError, match=message):
        open_base(str(tmp_path / name))


@pytest.mark.parametrize("file", ["diffusion_pytorch_model.bin", "pytorch_model.bin", "h3.ckpt"])
def test_pickled_weights_in_a_folder(model, tmp_path, file):
    model.save_config(tmp_path / "transformer_ref")
    torch.save(model.state_dict(), tmp_path / "transformer_ref" / file)
    with pytest.raises(UserError, match=rf"pickled weights \({file}\), which can run code"):
        open_base(str(tmp_path))


def test_content_decides_and_not_the_name(model, tmp_path):
    """Original tensors and a pickle under diffusers' file names; an index that leads to a pickle."""
    folder = tmp_path / "transformer_ref"
    model.save_pretrained(folder)
    weights = folder / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    save_file(original(model), weights)
    with pytest.raises(UserError, match="original layout's tensors"):
        open_base(str(tmp_path))
    torch.save(tensors, weights)
    with pytest.raises(UserError, match="is a pickle, which can run code"):
        open_base(str(tmp_path))
    shutil.move(weights, folder / "x.bin")
    index = {"weight_map": dict.fromkeys(tensors, "x.bin")}
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="is a pickle, which can run code"):
        open_base(str(tmp_path))
