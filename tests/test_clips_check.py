"""`rtcwm clips check`: every fault of a folder in one go, and flags that training obeys."""

import json
import os
import re
import shutil

import numpy as np
import pytest
import torch
from command import rtcwm
from test_clips import DAMAGES, small_clip
from worlds import change, copy_world, edit, tensors

from rtcwm.curate.check import check, measure_clip
from rtcwm.curate.options import Limits
from rtcwm.curate.quality import measure
from rtcwm.data.clips import open_clips
from rtcwm.data.codec import load_codec
from rtcwm.data.world import Film
from rtcwm.train.dataset import list_samples


@pytest.fixture
def root(tmp_path):
    """Six clips of eight chunks, with their manifest."""
    return copy_world(tmp_path / "clips", manifest=True)


def test_clean_clips_have_no_faults(root, monkeypatch, capsys):
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    assert rtcwm(monkeypatch, "clips", "check", root) == 0
    assert capsys.readouterr().out == (
        "6 clips, 48 chunks; faults: 0; flagged chunks: none; spans of 6 chunks: 18 usable, 0 not\n"
    )
    assert rtcwm(monkeypatch, "clips", "check", root, "--flag") == 0
    assert before == {path: path.stat().st_mtime_ns for path in root.rglob("*")}, "nothing to flag, nothing to write"


def test_clips_without_a_span_to_train_on_are_a_fault(root, monkeypatch, capsys):
    assert rtcwm(monkeypatch, "clips", "check", root, "--flag", "--static", "99") == 1
    assert "faults: 0;" in (said := capsys.readouterr().out) and "0 usable, 18 not: nothing to train on" in said


@pytest.mark.parametrize("damage, message", DAMAGES, ids=[message for _, message in DAMAGES])
def test_faults_that_headers_tell(tmp_path, damage, message):
    """What a run refuses, the check reports, and goes on."""
    for name in ("one", "other", "third"):
        small_clip(tmp_path, name)
    damage(tmp_path / "one")
    found = check(tmp_path, Limits(rms_high=1e9, mean_high=1e9, static=0, cut=0), flag=False)
    (fault,) = [line for line in found.faults if "/one/" in line]
    assert re.search(message, fault) and found.clips == 3


def scale(path, name, factor, shift=0.0):
    change(path, **{name: (tensors(path)[name].float() * factor + shift).half()})


def poison(path, name, chunk):
    found = tensors(path)[name]
    found[3, 5 * chunk + 1, 0, :2] = float("nan")
    change(path, **{name: found})


def flatten(path, name, chunk):
    found = tensors(path)[name]
    found[:, 5 * chunk : 5 * chunk + 5] = found[:, :1, :1, :1]
    change(path, **{name: found})


VALUES = [
    ("stream", lambda path: poison(path, "video", 2),
     r"`video` holds 2 values that are not finite in chunk 2, expected none"),
    ("stream", lambda path: poison(path, "proxy", 7), "`proxy` holds 2 values that are not finite in chunk 7"),
    ("stream", lambda path: flatten(path, "video", 4), "`video` is constant in chunk 4, expected a picture"),
    ("stream", lambda path: scale(path, "video", 9.0),
     r"`video` has a root mean square of \d\.\d+, expected 0.3 to 3: norm"),
    ("stream", lambda path: scale(path, "proxy", 0.02),
     r"`proxy` has a root mean square of 0\.0\d+, expected 0.3 to 6"),
    ("stream", lambda path: scale(path, "video", 0.1, 4.0),
     r"`video` has mean \d\.\d+ in channel \d+, expected -3 to 3"),
    ("start_2", lambda path: scale(path, "picture1_native", float("inf")), "`picture1_native` holds .* not finite"),
    ("start_2", lambda path: scale(path, "text", 0.0, 1.0), "`text` is constant, expected a picture or text"),
    ("clip", lambda path: edit(path, codec={"name": "x", "hash": "y"}),
     "codec x y, expected rtcwm-pca .* as 5 of 6 clips"),
]  # fmt: skip


@pytest.mark.parametrize("file, damage, message", VALUES, ids=[message for *_, message in VALUES])
def test_faults_that_values_tell(root, monkeypatch, capsys, file, damage, message):
    (root / "manifest.json").unlink()
    path = root / "clip_000001_1" / (f"{file}.json" if file == "clip" else f"{file}.safetensors")
    damage(path)
    assert rtcwm(monkeypatch, "clips", "check", root) == 1
    lines = capsys.readouterr().out.splitlines()
    faults = [line for line in lines if str(path) in line]
    assert any(re.search(message, line) for line in faults), lines
    assert len(lines) == 1 + len(faults), "one line a fault, and the summary"


def test_several_faults_are_all_told(root, monkeypatch, capsys):
    clips = sorted(path for path in root.iterdir() if path.is_dir())
    os.truncate(clips[0] / "stream.safetensors", 500)
    poison(clips[1] / "stream.safetensors", "video", 0)
    poison(clips[1] / "stream.safetensors", "video", 5)
    shutil.rmtree(clips[2] / "start_0.safetensors", ignore_errors=True)
    edit(clips[3] / "clip.json", fps=30)
    assert rtcwm(monkeypatch, "clips", "check", root) == 1
    *faults, summary = capsys.readouterr().out.splitlines()
    assert sum(str(clips[0]) in line for line in faults) == 1
    assert sum(str(clips[1]) in line for line in faults) == 2
    assert sum("fps is 30, expected 24" in line for line in faults) == 1
    assert any("manifest.json" in line for line in faults), "the manifest tells what changed"
    assert f"6 clips, 32 chunks; faults: {len(faults)}" in summary


def test_wrong_usage_is_code_2(tmp_path, monkeypatch, capsys):
    assert rtcwm(monkeypatch, "clips", "check", tmp_path / "none") == 2
    assert rtcwm(monkeypatch, "clips", "check", tmp_path) == 2
    assert "holds no clip folders" in capsys.readouterr().err
    small_clip(tmp_path)
    assert rtcwm(monkeypatch, "clips", "check", tmp_path, "--dark", "-1") == 2
    assert "--dark -1.0: expected a number of 0 or more" in capsys.readouterr().err
    assert rtcwm(monkeypatch, "clips", "check", tmp_path, "--nothing", "1") == 2


@pytest.fixture(scope="module")
def spoiled_once(tmp_path_factory):
    root = copy_world(tmp_path_factory.mktemp("spoiled") / "clips")
    spoil(root)
    return root


@pytest.fixture
def spoiled(spoiled_once, tmp_path):
    return shutil.copytree(spoiled_once, tmp_path / "clips")


def spoil(root) -> None:
    """One clip: chunk 1 at 5 % brightness, chunk 3 a still with noise, from chunk 5 on another scene; another clip:
    chunks 2 and 3 with an empty proxy, chunk 6 not numbers."""
    codec, film, other = load_codec(), Film(3, 0, 0, 64, 96), Film(3, 17, 0, 64, 96)
    path = root / "clip_000000_0" / "stream.safetensors"
    video = tensors(path)["video"]
    dark = (film.chunk(1)[0].rgb * 0.05).astype(np.uint8)
    still = film.chunk(3)[0].rgb[:1].repeat(17, 0).astype(float)
    noise = np.random.default_rng(0).normal(0, 2, still.shape)
    still = np.clip(still + noise, 0, 255).astype(np.uint8)
    for chunk, frames in ((1, dark), (3, still), *((chunk, other.chunk(chunk)[0].rgb) for chunk in (5, 6, 7))):
        video[:, 5 * chunk : 5 * chunk + 5] = codec.encode(frames).half()
    change(path, video=video)
    path = root / "clip_000001_0" / "stream.safetensors"
    proxy = tensors(path)["proxy"]
    empty = np.zeros_like(film.chunk(0)[1])
    for chunk in (2, 3):
        proxy[:, 5 * chunk : 5 * chunk + 5] = codec.encode(empty).half()
    change(path, proxy=proxy)
    poison(path, "video", 6)


def flags(root, clip: str) -> list:
    return json.loads((root / clip / "clip.json").read_text())["flagged"]


def test_flags_go_all_the_way_to_training(spoiled, monkeypatch, capsys):
    root = spoiled
    by = {"by": "rtcwm clips check"}
    hand = {"first_chunk": 0, "last_chunk": 0, "reason": "logo"}
    edit(root / "clip_000002_0" / "clip.json", flagged=[hand])
    assert rtcwm(monkeypatch, "clips", "check", root) == 1, "not a number, and not flagged"
    assert all(not flags(root, clip.id) for clip in open_clips(root) if clip.id != "clip_000002_0"), "nothing written"
    capsys.readouterr()
    assert rtcwm(monkeypatch, "clips", "check", root, "--flag") == 0
    assert flags(root, "clip_000000_0") == [
        {"first_chunk": 1, "last_chunk": 1, "reason": "dark"} | by,
        {"first_chunk": 3, "last_chunk": 3, "reason": "static"} | by,
        {"first_chunk": 5, "last_chunk": 5, "reason": "scene cut"} | by,
    ]
    assert flags(root, "clip_000001_0") == [
        {"first_chunk": 6, "last_chunk": 6, "reason": "non-finite values"} | by,
        {"first_chunk": 2, "last_chunk": 3, "reason": "missing proxies"} | by,
    ]
    assert flags(root, "clip_000002_0") == [hand]
    told = capsys.readouterr().out
    for part in ("missing proxies 2", "dark 1", "static 1", "scene cut 1", "non-finite values 1", "logo 1"):
        assert part in told
    assert "spans of 6 chunks: 10 usable, 8 not" in told
    samples = list_samples(open_clips(root), 0, 0)
    assert len(samples.train) == 10
    assert samples.dropped == {
        "flagged: dark": 2, "flagged: static": 1, "flagged: missing proxies": 3, "flagged: logo": 1,
        "no start frame at or before the span can open it": 1,  # start 0 shows the logo, the next is 2
    }  # fmt: skip


def test_flagging_again_changes_nothing_and_other_limits_measure_anew(spoiled, monkeypatch):
    root = spoiled
    hand = {"first_chunk": 4, "last_chunk": 4, "reason": "logo"}
    edit(root / "clip_000000_0" / "clip.json", flagged=[hand])
    (root / "clip_000000_0" / "clip.json").chmod(0o640)
    assert rtcwm(monkeypatch, "clips", "check", root, "--flag") == 0
    file = root / "clip_000000_0" / "clip.json"
    content, time = file.read_bytes(), file.stat().st_mtime_ns
    assert file.stat().st_mode & 0o777 == 0o640 and len(flags(root, "clip_000000_0")) == 4
    assert rtcwm(monkeypatch, "clips", "check", root, "--flag") == 0
    assert (file.read_bytes(), file.stat().st_mtime_ns) == (content, time)
    loose = ("--dark", 0, "--static", 0, "--cut", 0)
    assert rtcwm(monkeypatch, "clips", "check", root, "--flag", *loose) == 0
    assert flags(root, "clip_000000_0") == [hand], "its own flags go, others' stay"
    assert not [path for path in root.rglob(".*")], "something was left aside"


def test_flags_do_not_touch_the_manifest(root):
    check(root, Limits(static=9.0), flag=True)
    assert all(len(clip.flagged) == clip.chunks for clip in open_clips(root))


def test_measures_by_their_formulas():
    draw = torch.Generator().manual_seed(0)
    x, before = torch.randn(24, 5, 4, 6, generator=draw) + 2, torch.randn(24, 1, 4, 6, generator=draw) - 1
    found = measure(x, before)
    centred = [latent - latent.mean((1, 2), keepdim=True) for latent in x.unbind(1)]
    assert found.detail == pytest.approx(float(torch.stack(centred).square().mean().sqrt()), rel=1e-5)
    change = torch.stack([x[:, i + 1] - x[:, i] for i in (1, 2, 3)]).square().mean().sqrt()
    assert found.motion == pytest.approx(float(change) / found.detail, rel=1e-5)
    row = [before[:, 0] - before[:, 0].mean((1, 2), keepdim=True), *centred[1:]]
    cosines = [float((a * b).sum() / a.norm() / b.norm()) for a, b in zip(row[:-1], row[1:], strict=True)]
    assert len(cosines) == 4 and found.alike == pytest.approx(min(cosines), rel=1e-4)
    brighter = measure(x + 5, before + 5)
    assert (brighter.detail, brighter.alike) == pytest.approx((found.detail, found.alike), rel=1e-3), (
        "no matter of level"
    )
    assert measure(torch.ones(24, 5, 2, 2), None).constant and not found.constant


def test_limits_stand_clear_of_the_world(root):
    """The embedded world's chunks and the defaults are a factor apart, so neither is at the edge."""
    limits = Limits()
    for clip in open_clips(root):
        video, proxy = measure_clip(clip)
        assert min(chunk.detail for chunk in video) > 3 * limits.dark
        assert min(chunk.motion for chunk in video) > 3 * limits.static
        assert min(chunk.alike for chunk in video) > 1.3 * limits.cut
        assert min(chunk.detail for chunk in proxy) > 3 * limits.empty_proxy
