"""`rtcwm export` and `rtcwm adapter`: what they print, and their exit codes."""

from pathlib import Path

import pytest
import torch
from command import rtcwm
from full_disk import full_disk
from safetensors.torch import load_file, save_file
from small import CONFIG

from rtcwm.adapters.inspect import compare, wants
from rtcwm.model.adapter_files import load_adapter, save_adapter
from rtcwm.model.adapter_layouts import RELEASED_SIZES
from rtcwm.model.loading import embedded_adapter
from rtcwm.model.lora import SITES, Adapter, AdapterShape

SHAPE = AdapterShape.of(CONFIG, 4, 6.0)


def made(path: Path, seed: int = 0, edit=None, **metadata: str) -> Path:
    adapter, draw = Adapter(SHAPE, seed), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for pair in adapter.pairs():
            pair.up.normal_(generator=draw)
        if edit:
            edit(adapter)
    save_adapter(path, adapter, metadata)
    return path


def test_export_and_show(tmp_path, monkeypatch, capsys):
    source = made(tmp_path / "a.safetensors", objective="df", base="f" * 8, base_description="a base", span="6",
                  mask_rule="E", shift="3.0", steps="any", picture1="native")  # fmt: skip
    assert rtcwm(monkeypatch, "export", source, "--to", "peft", "--out", tmp_path / "peft") == 0
    assert "peft layout, 2 blocks, rank 4, alpha 6; PeftModel.from_pretrained" in capsys.readouterr().out
    assert rtcwm(monkeypatch, "adapter", "show", tmp_path / "peft") == 0
    told = capsys.readouterr().out
    for line in (
        "peft layout, 12 layers, 5,888 numbers, BF16",
        "rank 4, alpha 6 (adapter_config.json), scale 1.5",
        "blocks: 2, hidden 48, inner 64, feed-forward 64",
        "base: a base, ffffffff",
        "window: 6 chunks (30 latents), causal, mask rule E",
        "made for: df, steps any, shift 3.0, picture1 native",
        "metadata objective: df",
        "non-finite: 0 values in 0 tensors",
    ):
        assert line in told, line
    loaded = load_adapter(source, CONFIG)
    norms = {
        (block, site): float((1.5 * pairs[site].up @ pairs[site].down).detach().norm())
        for block, pairs in enumerate(loaded.blocks)
        for site in SITES
    }
    for site in SITES:
        row = next(line for line in told.splitlines() if line.startswith(site)).split()
        both = norms[0, site], norms[1, site]
        assert [float(cell) for cell in row[1:4]] == pytest.approx([sum(both) / 2, min(both), max(both)], rel=1e-3)
    (block, site), most = max(norms.items(), key=lambda item: item[1])
    assert f"most: block {block} {site} {most:.4g}" in told


@pytest.mark.parametrize("layout, name", [("comfyui", "b.safetensors"), ("peft", "peft")])
def test_a_full_disk_is_one_line_and_leaves_what_was_there(tmp_path, monkeypatch, capsys, layout, name):
    out = tmp_path / "out" / name
    rtcwm(monkeypatch, "export", made(tmp_path / "a.safetensors"), "--to", layout, "--out", out)
    other = made(tmp_path / "b.safetensors", seed=1)
    before = {path: path.read_bytes() for path in sorted(out.parent.rglob("*")) if path.is_file()}
    with full_disk(1000):
        assert rtcwm(monkeypatch, "export", other, "--to", layout, "--out", out) == 2
    assert f"--out {out} cannot be written" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in sorted(out.parent.rglob("*")) if path.is_file()} == before


def test_numbers_of_a_file_add_up():
    """5,888 of the test above, by the formula."""
    assert SHAPE.parameters + 2 * 2 * 4 * CONFIG["hidden_size"] == 5_888  # two more downs a block than fused


def test_show_names_what_is_wrong(tmp_path, monkeypatch, capsys):
    source = made(tmp_path / "a.safetensors")
    tensors = load_file(source)
    tensors["lora_unet_blocks_1_mlp_fc2.lora_up.weight"][3, :2] = float("nan")
    save_file(tensors, source)
    assert rtcwm(monkeypatch, "adapter", "show", source) == 0
    told = capsys.readouterr().out
    assert "non-finite: 2 values in 1 tensors\n  lora_unet_blocks_1_mlp_fc2.lora_up.weight: 2" in told
    assert "base: not said; the sizes are not those of the released H3" in told and "window: not said" in told


def test_what_others_files_want():
    released = AdapterShape(*RELEASED_SIZES, 128, 128.0)
    assert list(wants({}, released))[0] == "base: not said; the sizes are those of the released H3"
    lines = {"released": "37 latents, every", "critic": "37 latents, every", "dmd": "6 chunks (30 latents), causal"}
    for objective, window in lines.items():
        assert list(wants({"objective": objective, "span": "6"}, released))[1].startswith(f"window: {window}")
    assert "six chunks (not a number), causal" in list(wants({"objective": "df", "span": "six"}, released))[1]
    causal = wants({"objective": "critic", "teacher_kind": "causal"}, released)
    assert "causal" in list(causal)[1]


def test_diff_is_like_diff(tmp_path, monkeypatch, capsys):
    first = made(tmp_path / "a.safetensors", step="1")
    for name, out in (("peft", tmp_path / "peft"), ("diffusers", tmp_path / "d.safetensors")):
        assert rtcwm(monkeypatch, "export", first, "--to", name, "--out", out) == 0
        assert rtcwm(monkeypatch, "adapter", "diff", first, out) == 0
        told = capsys.readouterr().out
        assert f"layouts: musubi and {name}" in told and "the adapters are the same" in told

    def scaled(adapter):
        adapter.blocks[1]["ffn_in"].up.mul_(1.25)

    def turned(adapter):
        adapter.blocks[0]["attn_out"].up.mul_(-1)

    second = made(tmp_path / "b.safetensors", edit=lambda adapter: (scaled(adapter), turned(adapter)), step="2")
    assert rtcwm(monkeypatch, "adapter", "diff", first, second) == 1
    told = capsys.readouterr().out
    assert "metadata step: 1 and 2" in told and "2 sites differ" in told
    assert "block 0 attn_out: relative difference 2, cosine -1.000000" in told
    found = next(line for line in told.splitlines() if line.startswith("block 1 ffn_in"))
    assert float(found.split("difference ")[1].split(",")[0]) == pytest.approx(0.25, rel=2e-2)  # 1.25 rounded to bf16
    assert found.endswith("cosine 0.999") or float(found.split()[-1]) > 0.9999
    assert told.index("block 0 attn_out") < told.index("block 1 ffn_in"), "the largest difference first"
    assert rtcwm(monkeypatch, "adapter", "diff", first, second, "--limit", 1) == 1
    assert "... and 1 more sites" in capsys.readouterr().out


def test_diff_against_the_whole_weights(tmp_path):
    """Relative difference and cosine by the full products, of adapters that share nothing."""
    first, second = made(tmp_path / "a.safetensors", 1), made(tmp_path / "b.safetensors", 2)
    lines, found = compare(first, second)
    assert not lines and len(found) == 8
    one, two = load_adapter(first, CONFIG), load_adapter(second, CONFIG)
    for site in found:
        a, b = (1.5 * x.blocks[site.block][site.site].up @ x.blocks[site.block][site.site].down for x in (one, two))
        assert site.relative == pytest.approx(float((b - a).norm() / a.norm()), rel=1e-5)
        assert site.cosine == pytest.approx(float((a * b).sum() / a.norm() / b.norm()), abs=1e-5)


def test_other_shapes_differ(tmp_path, monkeypatch, capsys):
    first = made(tmp_path / "a.safetensors")
    assert rtcwm(monkeypatch, "adapter", "diff", first, embedded_adapter()) == 1
    told = capsys.readouterr().out
    assert "layers: 2 and 8" in told and "hidden: 48 and 256" in told and "rank: 4 and 32" in told


def test_errors_are_one_line_and_code_2(tmp_path, monkeypatch, capsys):
    source = made(tmp_path / "a.safetensors")
    torch.save({}, tmp_path / "a.pt")
    for words, message in (
        (("export", tmp_path / "none", "--to", "peft", "--out", tmp_path / "x"), "no adapter file at"),
        (("export", source, "--to", "comfyui", "--out", tmp_path / "x"), "ends in .safetensors"),
        (("adapter", "show", tmp_path / "a.pt"), "is a pickle"),
        (("adapter", "diff", source, tmp_path / "a.pt"), "is a pickle"),
        (("adapter", "diff", source, source, "--limit", "-1"), "--limit -1"),
    ):
        assert rtcwm(monkeypatch, *words) == 2
        error = capsys.readouterr().err
        assert error.startswith("rtcwm: error: ") and message in error and error.count("\n") == 1
    assert rtcwm(monkeypatch, "export", source, "--to", "flux", "--out", "x") == 2  # the argument parser's own
    assert not list(tmp_path.glob(".*")), "something was left aside"


def test_fuse_from_the_command_line(tmp_path, monkeypatch, capsys):
    """A file whose layers already share their downs and rank is written as it is."""
    source = made(tmp_path / "a.safetensors")
    assert rtcwm(monkeypatch, "export", source, "--to", "diffusers", "--out", tmp_path / "d.safetensors") == 0
    assert rtcwm(monkeypatch, "adapter", "fuse", tmp_path / "d.safetensors", "--out", tmp_path / "f.safetensors") == 0
    assert (tmp_path / "f.safetensors").read_bytes() == source.read_bytes()
    assert "musubi layout, 2 blocks, rank 4, alpha 6" in capsys.readouterr().out
