"""Bases from folders and seeds: the same model as diffusers', unit by unit, in little host memory."""

import ctypes
import json
import shutil
import threading

import pytest
import torch
from diffusers import MiniMaxH3Transformer3DModel
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from small import CONFIG, FP32_MODULES, random_window

from rtcwm.engine.base import BaseEngine
from rtcwm.engine.settings import read_base_settings
from rtcwm.errors import UserError
from rtcwm.model.attention import install, resolve
from rtcwm.model.blocks import predict_velocity
from rtcwm.model.loading import (
    FolderSource,
    SeededSource,
    build_base,
    meta_model,
    open_base,
    parameter_count,
    read_config,
    units,
)

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A base that diffusers itself saved, in several shards, inside a pipeline folder."""
    model = saved_model()
    root = tmp_path_factory.mktemp("h3")
    model.save_pretrained(root / "transformer_ref", max_shard_size="200KB")
    assert len(list((root / "transformer_ref").glob("*.safetensors"))) > 2
    return root


def saved_model() -> MiniMaxH3Transformer3DModel:
    torch.manual_seed(1)
    return MiniMaxH3Transformer3DModel(**CONFIG).eval().requires_grad_(False)


def test_a_folder_gives_the_model_that_diffusers_gives(folder):
    source = open_base(str(folder))
    model = build_base(source, CPU, torch.float32)
    theirs = saved_model()
    for block in [*theirs.transformer_blocks, *theirs.token_refiner.refiner_blocks]:
        block.attn.fuse_projections()
        del block.attn.to_q, block.attn.to_k, block.attn.to_v
    ours, expected = dict(model.named_parameters()), dict(theirs.named_parameters())
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], expected[name]) for name in ours)
    assert torch.equal(model.rope.inv_freq, theirs.rope.inv_freq)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    window, outputs = random_window(5), []
    for candidate in (model, theirs):
        install(candidate, resolve("sdpa", "cpu"))
        outputs.append(predict_velocity(candidate, window, window.layout(stream=False), torch.tensor(0.4), None))
    assert torch.equal(*outputs)


def test_bf16_keeps_the_fp32_island(folder):
    model = build_base(open_base(str(folder)), CPU, torch.bfloat16)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if name.split(".")[0] in FP32_MODULES else torch.bfloat16), name
    assert model.rope.inv_freq.dtype == torch.float32


def test_units_cover_every_parameter_once():
    model = meta_model(CONFIG)
    names = [f"{prefix}.{name}" for prefix, unit in units(model) for name, _ in unit.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def test_the_released_config_counts_its_parameters():
    assert parameter_count(read_defaults()) == 33_122_992_896
    with torch.device("meta"):
        block = MiniMaxH3Transformer3DModel(num_layers=1, num_refiner_layers=0).transformer_blocks[0]
    assert sum(p.numel() for p in block.parameters()) == 645_571_840


def read_defaults() -> dict:
    """The config of the release: an empty file leaves every default of the class."""
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text("{}")
        return read_config(path)


def test_fingerprints_tell_bases_apart(folder, tmp_path):
    first = open_base(str(folder)).fingerprint
    assert first == open_base(str(folder / "transformer_ref")).fingerprint
    other = shutil.copytree(folder, tmp_path / "other")
    shard = sorted((other / "transformer_ref").glob("*.safetensors"))[-1]
    tensors = load_file(shard)
    name = sorted(tensors)[0]
    tensors[name].view(-1)[0] += 1
    save_file(tensors, shard, metadata={"format": "pt"})
    assert open_base(str(other)).fingerprint != first
    seeds = {SeededSource(CONFIG, seed).fingerprint for seed in (0, 1)}
    assert len(seeds) == 2


def test_seeded_bases_are_the_same_everywhere_and_pass_a_signal_on():
    full = {**read_defaults(), **CONFIG}
    first, second = (build_base(SeededSource(full, 4), CPU, torch.float32) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    install(first, resolve("sdpa", "cpu"))
    window = random_window(5)
    velocity = predict_velocity(first, window, window.layout(stream=False), torch.tensor(0.4), None)
    assert torch.isfinite(velocity).all() and velocity.std() > 0.1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda root: (root / "config.json").write_text("{"), "not valid JSON"),
        (lambda root: edit_config(root, {"num_layer": 3}), r"unknown keys \['num_layer'\]"),
        (lambda root: (root / "config.json").write_text("[]"), "expected the config of"),
        (lambda root: edit_config(root, {"num_layers": "two"}), "num_layers is 'two'"),
        (lambda root: edit_config(root, {"hidden_size": -3}), "hidden_size is -3"),
        (lambda root: edit_config(root, {"patch_size": 3}), "patch_size is 3"),
        (lambda root: edit_config(root, {"num_layers": 3}), "lacks .* tensors of its own config"),
        (lambda root: edit_config(root, {"hidden_size": 64}), "its config.json asks for"),
        (lambda root: edit_config(root, {"_class_name": "FluxTransformer2DModel"}), "FluxTransformer2DModel"),
        (lambda root: [path.unlink() for path in root.glob("*index.json")], "in another layout is converted"),
        (lambda root: next(root.glob("*index.json")).write_text("{"), "index.json is not valid JSON"),
        (lambda root: next(root.glob("*index.json")).write_text("{}"), "not the index of sharded weights"),
        (lambda root: lead_out(next(root.glob("*index.json"))), "leads to ../x.safetensors"),
        (lambda root: truncate(sorted(root.glob("*.safetensors"))[0]), "cannot be read"),
    ],
)
def test_bad_folders_are_named(folder, tmp_path, damage, message):
    root = shutil.copytree(folder / "transformer_ref", tmp_path / "transformer_ref")
    damage(root)
    with pytest.raises(UserError, match=message):
        FolderSource(root)


def edit_config(root, values: dict) -> None:
    path = root / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def lead_out(index) -> None:
    names = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "../x.safetensors")}))


def truncate(path) -> None:
    path.write_bytes(path.read_bytes()[:-50])


def test_nothing_there(tmp_path):
    with pytest.raises(UserError, match="expected 'embedded', a diffusers H3 folder or a config .json"):
        open_base(str(tmp_path / "none"))
    with pytest.raises(UserError, match="no config.json"):
        open_base(str(tmp_path))


LARGE = dict(CONFIG, hidden_size=640, num_attention_heads=10, attention_head_dim=64, ffn_dim=1728, num_layers=10,
             time_embed_dim=320, time_embed_hidden_dim=640)  # fmt: skip


def host_memory(world, folder: str, settings) -> dict:
    """Anonymous memory (file mappings left out) before loading, its peak meanwhile, and after."""
    # Tensors of this small base would come from the heap, which keeps holes of freed ones; those of a real base are
    # above malloc's limit for mappings of their own. Lower the limit, so that what is measured is what is held.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536)
    BaseEngine(world, SeededSource(read_defaults() | CONFIG), settings)  # what the libraries allocate at first use
    source = open_base(folder)
    before, peak, done = anonymous_memory(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            peak[0] = max(peak[0], anonymous_memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    base = BaseEngine(world, source, settings)
    done.set()
    watcher.join()
    return {
        "peak": peak[0] - before,
        "shard": sum(p.ds_tensor.numel() * 4 for p in base.model.parameters()),
        "block": sum(p.ds_numel * 4 for p in base.model.transformer_blocks[0].parameters()),
        "whole": sum(p.ds_numel * 4 for p in base.model.parameters()),
    }


M_MMAP_THRESHOLD = -3  # of malloc.h


def anonymous_memory() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


def test_a_rank_never_holds_more_than_its_shard_and_two_blocks(tmp_path):
    torch.manual_seed(2)
    MiniMaxH3Transformer3DModel(**LARGE).save_pretrained(tmp_path / "h3", max_shard_size="60MB")
    config = tmp_path / "base.json"
    config.write_text('{"shard_group": 0}')
    for result in run_ranks(2, host_memory, str(tmp_path / "h3"), read_base_settings(config)):
        assert result["block"] > 25e6 and result["whole"] > 9 * result["block"], "too small a base to see anything"
        assert result["shard"] < 0.51 * result["whole"]
        print({key: f"{value / 1e6:.0f} MB" for key, value in result.items()})
        assert result["peak"] <= result["shard"] + 2 * result["block"], {k: v / 1e6 for k, v in result.items()}
