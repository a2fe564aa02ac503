"""`rtcwm clips import`: caches of other trainers, read by value, or refused by name."""

import json
import os
import pickle
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
from command import rtcwm
from full_disk import full_disk
from launch import rows, run
from pyarrow import parquet
from reference import patchify_video_latents
from safetensors import safe_open
from safetensors.torch import save_file
from small import CONFIG
from test_clips import small_clip
from worlds import tensors

from rtcwm.curate.imports import import_cache, sixteen
from rtcwm.data.clips import open_clips
from rtcwm.errors import StorageFault, UserError
from rtcwm.model.adapter_files import load_adapter
from rtcwm.train.dataset import list_samples, load_window, spans
from rtcwm.train.distill_plan import rollout_starts

CODEC = {"name": "imported", "hash": "unknown"}
TAGS = torch.tensor([1, 0, 0, 1, 1])


def sample(seed: int = 0, latents: int = 37, anchor=(4, 6), dtype=torch.float32, **info) -> dict:
    """A cache's sample of a small geometry; the numbers are such that fp16 holds them."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=draw).half().to(dtype)

    return {
        "vae_latent": normal(24, latents, 4, 6),
        "proxy_latent": normal(24, latents, 2, 3),
        "anchor_latent": normal(24, 1, *anchor),
        "text_embedding": torch.randn(5, 16, generator=draw).bfloat16().float(),
        "text_token_tags": TAGS.clone(),
        "info": {"num_frames": 124, "pixel_size": (64, 96), "prompt": f"walk {seed}", "cwm_system": "w0"} | info,
    }


def write_pt(root: Path, names: dict[str, dict]) -> Path:
    root.mkdir(exist_ok=True)
    for name, held in names.items():
        torch.save(held, root / f"{name}.pt")
    return root


def test_pt_files_become_clips_that_train(tmp_path, monkeypatch, capsys):
    held = {
        f"clip_00000{episode}_{window}": sample(2 * episode + window) for episode in range(3) for window in range(2)
    }
    source = write_pt(tmp_path / "cache", held)
    assert rtcwm(monkeypatch, "clips", "import", source, "--out", tmp_path / "clips") == 0
    told = capsys.readouterr().out
    for part in (
        "6 clips made, 0 already there, 0 refused", "6 clips of 7 chunks: 2 spans of 6 chunks each, one start frame "
        "(0)",
        "the last 2 latents of 6 clips", "ask for 8 to 14 chunks from a start frame, the longest clip has 7",
        "Picture 1 is the cache's anchor: 6 clips", "captions kept: 6 clips", "3 episodes", "codec: imported unknown",
    ):  # fmt: skip
        assert part in told, part
    clips = open_clips(tmp_path / "clips")
    assert [clip.id for clip in clips] == sorted(held) and {clip.chunks for clip in clips} == {7}
    assert {clip.episode for clip in clips} == {"clip_000000", "clip_000001", "clip_000002"}
    for clip in clips:
        found = tensors(clip.path / "stream.safetensors")
        assert torch.equal(found["video"].float(), held[clip.id]["vae_latent"][:, :35])
        assert torch.equal(found["proxy"].float(), held[clip.id]["proxy_latent"][:, :35])
        opening = tensors(clip.start_file(0))
        assert torch.equal(opening["picture1_native"].float(), held[clip.id]["anchor_latent"])
        assert torch.equal(opening["text"].float(), held[clip.id]["text_embedding"])
        assert opening["text"].dtype == torch.bfloat16, "bf16 loses nothing of it"
        assert torch.equal(opening["text_tags"], TAGS)
        with safe_open(clip.start_file(0), framework="pt") as file:
            assert file.metadata() == {"caption": held[clip.id]["info"]["prompt"]}
        assert spans(clip) == (0, 1) and rollout_starts(clip, 7) == [0] and rollout_starts(clip, 8) == []
        window = load_window(clip, 1, 0)
        assert torch.equal(window.video[0], held[clip.id]["vae_latent"][:, 5:35])
        described = json.loads((clip.path / "clip.json").read_text())["prepared"]["imported"]
        assert described["cwm_system"] == "w0" and described["cache"].endswith(f"{clip.id}.pt")
    assert len(list_samples(clips, 2, 0).train) == 2 * 2 * 2
    assert rtcwm(monkeypatch, "clips", "check", tmp_path / "clips") == 0


def test_an_import_that_was_stopped_is_finished(tmp_path, monkeypatch, capsys):
    source = write_pt(tmp_path / "cache", {"a": sample(1), "b": sample(2)})
    import_cache(source, tmp_path / "clips", CODEC)
    kept = (tmp_path / "clips" / "a" / "stream.safetensors").stat().st_ino
    write_pt(source, {"c": sample(3)})
    found = import_cache(source, tmp_path / "clips", CODEC)
    assert (found.made, found.kept) == (1, 2)
    assert (tmp_path / "clips" / "a" / "stream.safetensors").stat().st_ino == kept
    assert len(open_clips(tmp_path / "clips")) == 3
    os.truncate(tmp_path / "clips" / "b" / "stream.safetensors", 500)
    (tmp_path / "clips" / "c" / "notes.txt").touch()
    (tmp_path / "clips" / "c" / "clip.json").unlink()
    found = import_cache(source, tmp_path / "clips", CODEC)
    assert (found.made, found.kept) == (1, 1) and "c holds notes.txt, which is no part of a clip" in found.refused[0]
    with pytest.raises(UserError, match="holds clips of pt and codec .*unknown.*these are of pt and .*other"):
        import_cache(source, tmp_path / "clips", CODEC | {"hash": "other"})
    small_clip(tmp_path / "mine")
    with pytest.raises(UserError, match="holds clips that were not imported"):
        import_cache(source, tmp_path / "mine", CODEC)


@pytest.mark.parametrize(
    ("anchor", "native", "large", "note"),
    [
        ((4, 6), "anchor", False, "Picture 1 is the cache's anchor"),
        ((128, 192), "first", True, "2048 is the cache's anchor"),
        ((6, 8), "first", False, "the anchor of 6 x 8 latents has no place"),
        (None, "first", False, "the cache has no anchor"),
    ],
)
def test_where_picture_1_is_from(tmp_path, anchor, native, large, note):
    held = sample(anchor=anchor or (4, 6))
    if anchor is None:
        held.pop("anchor_latent")
    found = import_cache(write_pt(tmp_path / "cache", {"a": held}), tmp_path / "clips", CODEC)
    assert any(note in line for line in found.notes)
    (clip,) = open_clips(tmp_path / "clips")
    opening = tensors(clip.start_file(0))
    expected = held["anchor_latent"] if native == "anchor" else held["vae_latent"][:, :1]
    assert torch.equal(opening["picture1_native"].float(), expected)
    assert ("picture1_2048" in opening) == large
    if large:
        assert torch.equal(opening["picture1_2048"].float(), held["anchor_latent"])
    load_window(clip, 0, 0, picture1="2048" if large else "native")


def test_the_codec_that_the_user_names(tmp_path, monkeypatch, capsys):
    source = write_pt(tmp_path / "cache", {"a": sample()})
    words = ("clips", "import", source, "--out", tmp_path / "clips", "--codec")
    assert rtcwm(monkeypatch, *words, "minimax-h3-vae:0123abcd") == 0
    (clip,) = open_clips(tmp_path / "clips")
    assert clip.codec == {"name": "minimax-h3-vae", "hash": "0123abcd"}
    assert rtcwm(monkeypatch, *words, "minimax-h3-vae") == 2
    assert "--codec minimax-h3-vae: expected NAME:HASH" in capsys.readouterr().err


def test_sixteen_bits_lose_as_little_as_they_can():
    exact = torch.tensor([1.0, 3e38, -2.5]).bfloat16().float()
    assert sixteen(exact).dtype == torch.bfloat16 and torch.equal(sixteen(exact).float(), exact)
    fine = torch.tensor([1.001, 0.1])
    assert sixteen(fine).dtype == torch.float16
    wide = torch.tensor([1.001, 1e5])
    assert sixteen(wide).dtype == torch.bfloat16 and torch.isfinite(sixteen(wide)).all()


def as_row(held: dict, **more) -> dict:
    """A parquet row of a sample; tags as fp32, as published rows have them."""
    row = dict(more)
    for name, tensor in held.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        if name == "text_token_tags":
            tensor = tensor.float()
        data = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
        row |= {
            f"{name}_bytes": data.numpy().tobytes(), f"{name}_shape": list(tensor.shape),
            f"{name}_dtype": str(tensor.dtype).removeprefix("torch."),
        }  # fmt: skip
    return row


def write_rows(path: Path, rows: list[dict], group: int = 2) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=group)
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parquet_rows(tmp_path, dtype):
    held = [sample(seed, dtype=dtype) for seed in range(3)]
    rows = [as_row(one, id=f"video:{n}", caption=f"text {n}", num_frames=124) for n, one in enumerate(held)]
    write_rows(tmp_path / "cache" / "part" / "x.parquet", rows)
    found = import_cache(tmp_path / "cache", tmp_path / "clips", CODEC)
    assert found.made == 3 and found.episodes == {"video_0", "video_1", "video_2"}
    for clip, one in zip(open_clips(tmp_path / "clips"), held, strict=True):
        assert torch.equal(tensors(clip.path / "stream.safetensors")["video"].to(dtype), one["vae_latent"][:, :35])
        with safe_open(clip.start_file(0), framework="pt") as file:
            assert file.metadata()["caption"] == f"text {clip.id[-1]}"


def packed(latents: torch.Tensor) -> torch.Tensor:
    """Rows as diffusers packs them, of latents padded to whole patches."""
    even = torch.nn.functional.pad(latents, (0, latents.shape[-1] % 2, 0, latents.shape[-2] % 2))
    return patchify_video_latents(even[None], (1, 2, 2)).reshape(-1, 96)


def test_parquet_rows_with_packed_references(tmp_path):
    held = sample(5)
    references = torch.cat([packed(held["anchor_latent"]), packed(held["proxy_latent"])])
    given = {"vae_latent": held["vae_latent"], "reference_video_latent_rows": references}
    given |= {name: held[name] for name in ("text_embedding", "text_token_tags")}
    row = as_row(
        given, id="a", reference_media_types=["image", "video"], reference_num_latent_frames=[1, 37],
        reference_latent_heights=[4, 2], reference_latent_widths=[6, 3],
    )  # fmt: skip
    import_cache(write_rows(tmp_path / "x.parquet", [row]), tmp_path / "clips", CODEC)
    (clip,) = open_clips(tmp_path / "clips")
    assert torch.equal(tensors(clip.path / "stream.safetensors")["proxy"].float(), held["proxy_latent"][:, :35])
    assert torch.equal(tensors(clip.start_file(0))["picture1_native"].float(), held["anchor_latent"])


def write_precomputed(root: Path, samples: dict[str, dict], **edits) -> Path:
    """A `.precomputed` folder as its trainer writes it."""
    folder = root / ".precomputed"
    entries = []
    for name, held in samples.items():
        size = held["vae_latent"].shape
        entry = {"id": name, "width": 16 * size[3], "height": 16 * size[2], "num_frames": 124, "caption": f"of {name}",
                 "video_rows": 37 * 6, "text_rows": 5}  # fmt: skip
        entries.append(entry | edits)
        proxy = held["proxy_latent"]
        geometry = torch.tensor([[0, 1, 4, 6, 0], [1, proxy.shape[1], *proxy.shape[2:], 0]])
        references = torch.cat([packed(held["anchor_latent"]), packed(proxy)])
        for kind, content in (
            ("latents", {"latents": packed(held["vae_latent"])}),
            ("conditions", {"prompt_embeds": held["text_embedding"].bfloat16(), "text_token_tags": TAGS}),
            ("reference_latents", {"geometry": geometry, "latents": references}),
        ):
            (folder / kind).mkdir(parents=True, exist_ok=True)
            save_file(content, folder / kind / f"{Path(name).name}.safetensors")
    (folder / "index.json").write_text(json.dumps({"version": 1, "samples": entries}))
    return root


def test_precomputed_folders(tmp_path):
    held = {"a": sample(1), "b": sample(2)}
    root = write_precomputed(tmp_path / "data", held)
    for source in (root, root / ".precomputed"):
        found = import_cache(source, tmp_path / f"clips{source.name}", CODEC)
        assert found.made == 2
        for clip in open_clips(tmp_path / f"clips{source.name}"):
            stream = tensors(clip.path / "stream.safetensors")
            assert torch.equal(stream["video"].float(), held[clip.id]["vae_latent"][:, :35])
            assert torch.equal(stream["proxy"].float(), held[clip.id]["proxy_latent"][:, :35])
            with safe_open(clip.start_file(0), framework="pt") as file:
                assert file.metadata() == {"caption": f"of {clip.id}"}


def test_a_precomputed_folder_trains(tmp_path, monkeypatch, capsys):
    """From the command line to a step: an odd proxy, several episodes, and nothing that a check would find."""
    names = {f"clip_00000{episode}_0": sample(episode) for episode in range(3)}
    root, clips = write_precomputed(tmp_path / "data", names), tmp_path / "clips"
    assert rtcwm(monkeypatch, "clips", "import", root, "--out", clips) == 0
    said = capsys.readouterr().out
    for part in ("3 clips made, 0 already there, 0 refused", "Picture 1 is the cache's anchor: 3 clips", "3 episodes"):
        assert part in said
    assert rtcwm(monkeypatch, "clips", "check", clips) == 0
    for clip in open_clips(clips):
        assert torch.equal(tensors(clip.start_file(0))["picture1_native"].float(), names[clip.id]["anchor_latent"])
        assert torch.equal(tensors(clip.start_file(0))["text"].float(), names[clip.id]["text_embedding"])
    (tmp_path / "base.json").write_text(json.dumps(CONFIG | {"text_dim": 16}))
    settings = {"clips": clips, "base": tmp_path / "base.json", "out": tmp_path / "run", "steps": 1, "val_clips": 1}
    run(1, "rtcwm.train.train", settings, tmp_path / "log")
    (first, last) = rows(tmp_path / "run")
    assert last["loss"] > 0 and first["val"]["loss"] > 0
    trained = load_adapter(tmp_path / "run" / "lora_step00001.safetensors", CONFIG)
    assert any(pair.up.any() for pair in trained.pairs())


class Trap:
    """What a hostile file may do as it is unpickled."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("wrap", [lambda trap: {**sample(), "info": trap}, lambda trap: trap])
def test_a_pickle_that_would_run_code_is_refused_and_runs_none(tmp_path, wrap):
    source = write_pt(tmp_path / "cache", {"good": sample()})
    torch.save(wrap(Trap(str(tmp_path / "sprung"))), source / "bad.pt")
    (source / "raw.pt").write_bytes(pickle.dumps(Trap(str(tmp_path / "sprung"))))
    found = import_cache(source, tmp_path / "clips", CODEC)
    assert found.made == 1 and len(found.refused) == 2 and not (tmp_path / "sprung").exists()
    assert "bad.pt holds more than tensors and plain values and would run code" in found.refused[0]
    assert "raw.pt" in found.refused[1]
    pickle.loads((source / "raw.pt").read_bytes())
    assert (tmp_path / "sprung").exists(), "the trap was none"


def without(name):
    return lambda held: held.pop(name)


BAD = [
    (without("proxy_latent"), r"bad.pt lacks proxy_latent; it holds \['anchor_latent'"),
    (without("text_embedding"), "lacks text_embedding"),
    (lambda held: held.update(vae_latent=torch.zeros(16, 37, 4, 6)),
     r"vae_latent is \[16, 37, 4, 6\], expected \[24, L"),
    (lambda held: held.update(vae_latent=torch.zeros(24, 37, 4, 6, dtype=torch.int8)), "vae_latent is torch.int8"),
    (lambda held: held["vae_latent"].fill_(float("nan")), "vae_latent is empty or holds values that are not finite"),
    (lambda held: held.update(proxy_latent=torch.zeros(24, 36, 2, 3)),
     "37 latents and proxy_latent 36, expected the same"),
    (lambda held: held.update(vae_latent=torch.zeros(24, 22, 4, 6)), "22 latents cover 73 frames, its info says 124"),
    (lambda held: (held.update(vae_latent=torch.zeros(24, 22, 4, 6), proxy_latent=torch.zeros(24, 22, 2, 3)),
                   held["info"].pop("num_frames")), "22 latents are 4 whole chunks, a span takes 6"),
    (lambda held: held.update(vae_latent=torch.ones(24, 37, 3, 6)), "height and width must be even"),
    (lambda held: held["text_token_tags"].fill_(2), r"text_token_tags holds \[2\], expected 0 and 1"),
    (lambda held: held.update(text_token_tags=torch.ones(4).long()), r"\[5, 16\] and text_token_tags \[4\]"),
    (lambda held: held.update(anchor_latent=torch.zeros(24, 2, 4, 6)), "anchor_latent has 2 latents, expected 1"),
    (lambda held: held["info"].update(proxy_references=["depth", "semantic"]), r"proxies are \['depth', 'semantic'\]"),
]  # fmt: skip


@pytest.mark.parametrize(("edit", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_samples_are_named_and_the_others_are_made(tmp_path, monkeypatch, capsys, edit, message):
    held = sample(1)
    edit(held)
    source = write_pt(tmp_path / "cache", {"bad": held, "good": sample(2)})
    assert rtcwm(monkeypatch, "clips", "import", source, "--out", tmp_path / "clips") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert pytest.raises(
        UserError, import_cache, write_pt(tmp_path / "bad", {"bad": held}), tmp_path / "no", CODEC
    ).match(message)
    assert "bad" in line and [clip.id for clip in open_clips(tmp_path / "clips")] == ["good"]


def test_one_packed_reference_of_a_stack_of_one(tmp_path):
    held = sample()
    held["proxy_latents"] = held.pop("proxy_latent")[None]
    assert import_cache(write_pt(tmp_path / "cache", {"a": held}), tmp_path / "clips", CODEC).made == 1


ROWS = [
    (
        lambda row: row.update(vae_latent_bytes=b"123"),
        r"vae_latent has 3 bytes, its shape \[24, 37, 4, 6\] in float32 needs",
    ),
    (lambda row: row.update(vae_latent_dtype="float8"), "vae_latent is stored as float8, expected one of"),
    (lambda row: row.update(vae_latent_shape=None), "vae_latent_shape is None, expected a list"),
    (lambda row: row.pop("proxy_latent_bytes"), "lacks proxy_latent"),
]


@pytest.mark.parametrize(("edit", "message"), ROWS)
def test_bad_rows_are_named(tmp_path, edit, message):
    row = as_row(sample(), id="a")
    edit(row)
    with pytest.raises(UserError, match=message) as raised:
        import_cache(write_rows(tmp_path / "x.parquet", [row]), tmp_path / "clips", CODEC)
    assert "x.parquet row 0" in str(raised.value)


def edit_index(root: Path, **changed) -> None:
    index = json.loads((root / "index.json").read_text())
    index["samples"][0] |= changed
    (root / "index.json").write_text(json.dumps(index))


PRECOMPUTED = [
    (lambda root: (root / "index.json").write_text("{}"), "index.json is not an index of samples"),
    (lambda root: (root / "latents" / "a.safetensors").unlink(), "latents/a.safetensors is missing"),
    (lambda root: os.truncate(root / "conditions" / "a.safetensors", 50), "conditions/a.safetensors is truncated"),
    (lambda root: (root / "reference_latents" / "a.safetensors").unlink(), "has no reference video"),
    (lambda root: edit_index(root, width=8), r"are \[8, 64, 124\], expected whole numbers, of pixels from 32 on"),
    (lambda root: edit_index(root, num_frames=True), r"\[96, 64, True\], expected whole numbers"),
    (lambda root: save_file({"geometry": torch.tensor([[1.0, 37, 2, 3, 0]]), "latents": torch.zeros(74, 96)},
                            root / "reference_latents" / "a.safetensors"), "geometry is .*expected whole numbers"),
    (lambda root: save_file({"geometry": torch.tensor([[1, 37, 2, -3, 0]]), "latents": torch.zeros(74, 96)},
                            root / "reference_latents" / "a.safetensors"), "of sizes from 1 on"),
    (lambda root: save_file({"latents": torch.zeros(7, 96)}, root / "latents" / "a.safetensors"),
     r"\[7, 96\], expected \[6"),
    (lambda root: save_file({"latents": torch.zeros(6, 90)}, root / "latents" / "a.safetensors"),
     r"\[6, 90\], expected"),
    (lambda root: save_file({"geometry": torch.tensor([[0, 1, 4, 6, 0]]), "latents": torch.zeros(6, 96)},
                            root / "reference_latents" / "a.safetensors"), "no reference video among the references"),
    (lambda root: save_file({"geometry": torch.tensor([[1, 37, 2, 3, 0]]), "latents": torch.zeros(75, 96)},
                            root / "reference_latents" / "a.safetensors"),
     "75 reference rows, their geometry needs 74"),
]  # fmt: skip


@pytest.mark.parametrize(("edit", "message"), PRECOMPUTED)
def test_bad_precomputed_folders_are_named(tmp_path, edit, message):
    root = write_precomputed(tmp_path / "data", {"a": sample()})
    edit(root / ".precomputed")
    with pytest.raises(UserError, match=message):
        import_cache(root, tmp_path / "clips", CODEC)


def test_a_full_disk_stops_an_import_that_the_same_command_finishes(tmp_path):
    source = write_pt(tmp_path / "cache", {"a": sample(1), "b": sample(2)})
    with full_disk(4500), pytest.raises(StorageFault, match="cannot write .*clips/a: .*start the same command again"):
        import_cache(source, tmp_path / "clips", CODEC)
    assert [path.name for path in (tmp_path / "clips").iterdir()] == ["manifest.json"]
    assert import_cache(source, tmp_path / "clips", CODEC).made == 2


def test_files_of_any_bytes_and_faults_that_nobody_foresaw_end_no_import(tmp_path):
    odd = {"sparse": {**sample(), "vae_latent": sample()["vae_latent"].to_sparse()}, "refs": sample(proxy_references=7)}
    source = write_pt(tmp_path / "cache", {"good": sample()} | odd)
    for number in range(20):
        (source / f"bytes{number}.pt").write_bytes(np.random.default_rng(number).bytes(50 * number))
    (source / "words.pt").write_text("root:x:0:0:root:/root:/bin/bash\nnobody:x\n")
    found = import_cache(source, tmp_path / "clips", CODEC)
    assert found.made == 1 and len(found.refused) == 23
    told = "\n".join(found.refused)
    assert "words.pt is truncated or not a .pt file" in told
    assert "refs cannot be used, for a reason that nobody foresaw (TypeError" in told
    assert [clip.id for clip in open_clips(tmp_path / "clips")] == ["good"]


def test_names_that_no_clip_can_have(tmp_path):
    source = write_pt(tmp_path / "cache", {"manifest.json": sample(1), "x" * 201: sample(2), "-ok": sample(3)})
    found = import_cache(source, tmp_path / "clips", CODEC)
    assert len(found.refused) == 2 and all("cannot name a clip's folder" in reason for reason in found.refused)
    assert [clip.id for clip in open_clips(tmp_path / "clips")] == ["ok"]


def test_an_id_does_not_leave_its_folder(tmp_path):
    root = write_precomputed(tmp_path / "data", {"../a": sample()})
    with pytest.raises(UserError, match="the id is '../a', expected a file name"):
        import_cache(root, tmp_path / "clips", CODEC)


def test_what_is_no_cache(tmp_path, monkeypatch, capsys):
    (tmp_path / "empty").mkdir()
    both = write_pt(tmp_path / "both", {"a": sample()})
    write_rows(both / "x.parquet", [{"id": "a"}])
    (tmp_path / "x.zip").write_bytes(b"PK")
    (tmp_path / "y.parquet").write_bytes(b"PAR1")
    for source, message in (
        ("none", "there is no cache at"), ("empty", "found none of them"), ("both", "found 1 of pt, 1 of parquet"),
        ("x.zip", "is no cache that is known"), ("y.parquet", "truncated or not a parquet file"),
    ):  # fmt: skip
        assert rtcwm(monkeypatch, "clips", "import", tmp_path / source, "--out", tmp_path / "clips") == 2
        assert message in capsys.readouterr().err
    source = write_pt(tmp_path / "pt", {"a b": sample(), "a_b": sample()})
    assert any("both a_b as a folder" in line for line in import_cache(source, tmp_path / "two", CODEC).refused)
    for pattern, message in (("(", "is not a pattern"), ("clip_.*", "has no group")):
        with pytest.raises(UserError, match=message):
            import_cache(source, tmp_path / "three", CODEC, pattern)
    with pytest.raises(UserError, match=r"pip install 'rtcwm\[import\]'"):
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        import_cache(both / "x.parquet", tmp_path / "four", CODEC)
