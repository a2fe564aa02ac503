"""Clip folders: what is written is read back, and everything wrong is refused by name before data is read."""

import json
import os
import re
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from worlds import SIZES, STARTS, change, copy_world, edit, small_world, tensors

from rtcwm.data import make, manifest
from rtcwm.data.clips import open_clips
from rtcwm.data.codec import embed_text, load_codec
from rtcwm.data.command import main_world
from rtcwm.data.make import describe, write_world
from rtcwm.data.world import Film, Scene
from rtcwm.data.write import Start, write_clip
from rtcwm.errors import UserError
from rtcwm.model.layout import Geometry

CODEC = {"name": "test", "hash": "aa"}


def start(value: float = 0.0, text_width: int = 7) -> Start:
    tags = torch.tensor([1, 0, 1])
    return Start(
        torch.full((24, 1, 2, 4), value), torch.full((3, text_width), value), tags, "[0.00s] one\r\n[0.71s] two"
    )


def small_clip(root, name="one", chunks=3, **changed):
    latents = torch.arange(24 * 5 * chunks * 8, dtype=torch.float32).reshape(24, 5 * chunks, 2, 4) % 97
    given = dict(
        video=latents, proxy=latents[..., :1, :3], starts={0: start(), 2: start(2.0)}, episode="e", codec=CODEC
    )
    return write_clip(root, name, **given | changed)


def test_a_written_clip_is_read_back(tmp_path):
    flags = [
        {"first_chunk": 1, "last_chunk": 2, "reason": "dark"},
        {"first_chunk": 2, "last_chunk": 2, "reason": "late"},
    ]
    path = small_clip(tmp_path, flagged=flags)
    (clip,) = open_clips(tmp_path)
    assert (clip.id, clip.path, clip.chunks, clip.episode, clip.starts) == ("one", path, 3, "e", (0, 2))
    assert clip.geometry == Geometry(2, 4, 1, 3) and clip.text_width == 7
    assert clip.codec == CODEC and clip.flagged == {1: "dark", 2: "dark"}
    found = tensors(path / "stream.safetensors")
    assert found["video"].dtype == torch.float16 and found["video"][3, 4, 1, 2] == (3 * 120 + 4 * 8 + 4 + 2) % 97
    with safe_open(clip.start_file(2), framework="pt") as file:
        assert file.metadata() == {"caption": "[0.00s] one\r\n[0.71s] two"}
        assert set(file.keys()) == {"picture1_native", "text", "text_tags"}
        assert (file.get_tensor("picture1_native") == 2).all()
    description = json.loads((path / "clip.json").read_text())
    assert (description["frames"], description["fps"], description["chunks"]) == (51, 24, 3)
    assert os.listdir(tmp_path) == ["one"]
    assert {file.stat().st_mode & 0o666 for file in path.iterdir()} == {path.stat().st_mode & 0o666}


def test_bf16_stays_bf16_and_a_clip_is_replaced_whole(tmp_path):
    small_clip(tmp_path)
    path = small_clip(
        tmp_path, video=torch.zeros(24, 5, 2, 4).bfloat16(), proxy=torch.zeros(24, 5, 1, 3), starts={0: start()}
    )
    assert sorted(os.listdir(path)) == ["clip.json", "start_0.safetensors", "stream.safetensors"]
    found = tensors(path / "stream.safetensors")
    assert found["video"].dtype == torch.bfloat16 and found["proxy"].dtype == torch.float16


@pytest.mark.parametrize(
    "changed, message",
    [
        (dict(video=torch.zeros(24, 7, 2, 4), proxy=torch.zeros(24, 7, 1, 3)), "7 latents are not whole chunks of 5"),
        (dict(starts={}), "no start_<m>.safetensors"),
        (dict(starts={3: start()}), r"starts at chunk 3, but the clip has chunks 0\.\.2"),
        (dict(proxy=torch.zeros(24, 10, 1, 3)), "video has 15 latents and the proxy 10"),
        (dict(proxy=torch.zeros(16, 15, 1, 3)), r"`proxy` has shape \[16, 15, 1, 3\], expected \[24, L, h, w\]"),
        (dict(starts={0: start(), 1: start(text_width=9)}), r"different widths \{0: 7, 1: 9\}"),
        (dict(flagged=[{"first_chunk": 1, "last_chunk": 3, "reason": "x"}]), "0 <= a <= b < 3"),
        (dict(video=torch.zeros(24, 15, 3, 4)), "height and width must be even"),
    ],
)
def test_what_cannot_be_read_is_never_written(tmp_path, changed, message):
    with pytest.raises(UserError, match=message):
        small_clip(tmp_path, **changed)
    assert os.listdir(tmp_path) == []


def cut(path, size):
    os.truncate(path, size)


DAMAGES = [
    (lambda clip: (clip / "clip.json").write_text("{"), r"clip.json is not valid JSON"),
    (lambda clip: (clip / "clip.json").unlink(), r"one/clip.json is missing"),
    (lambda clip: (clip / "clip.json").write_text('{"fps": 24}'), r"clip.json lacks frames, chunks, episode"),
    (lambda clip: edit(clip / "clip.json", fps=30), "fps is 30, expected 24"),
    (lambda clip: edit(clip / "clip.json", codec="vae"), "codec is 'vae', expected"),
    (lambda clip: edit(clip / "clip.json", chunks=4), r"chunks is 4, but stream.safetensors holds 3"),
    (lambda clip: edit(clip / "clip.json", frames=50), "frames is 50"),
    (lambda clip: edit(clip / "clip.json", flagged={"1": "x"}), "flagged span"),
    (lambda clip: (clip / "stream.safetensors").unlink(), "stream.safetensors is missing"),
    (lambda clip: cut(clip / "stream.safetensors", 500), "stream.safetensors is truncated"),
    (lambda clip: cut(clip / "start_2.safetensors", 300), "start_2.safetensors is truncated"),
    (lambda clip: change(clip / "stream.safetensors", proxy=None), "no tensor `proxy`"),
    (lambda clip: change(clip / "stream.safetensors", video=torch.zeros(24, 15, 2, 4)), "`video` is stored as F32"),
    (
        lambda clip: change(clip / "start_0.safetensors", picture1_native=torch.zeros(24, 1, 4, 4).half()),
        r"\[1, 2, 4\]",
    ),
    (
        lambda clip: change(clip / "start_0.safetensors", text_tags=torch.zeros(2).long()),
        r"expected `text \[n, width\]`",
    ),
    (
        lambda clip: change(clip / "start_0.safetensors", text_tags=torch.tensor([0, 1, 2])),
        r"holds \[0, 1, 2\], expected 0",
    ),
    (
        lambda clip: change(clip / "start_0.safetensors", picture1_2048=torch.zeros(24, 2, 4, 4).half()),
        "2 latents, expected 1",
    ),
]


@pytest.mark.parametrize("damage, message", DAMAGES, ids=[message for _, message in DAMAGES])
def test_damaged_clips_are_refused(tmp_path, damage, message):
    clip = small_clip(tmp_path)
    damage(clip)
    with pytest.raises(UserError, match=message):
        open_clips(tmp_path)


def test_files_of_others_are_not_replaced(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "rgb.mp4").write_bytes(b"x")
    (tmp_path / "two").write_bytes(b"x")
    for name, message in (("one", "holds rgb.mp4, which is no part of a clip"), ("two", "in the place of a clip's")):
        with pytest.raises(UserError, match=message):
            small_clip(tmp_path, name)
    assert (tmp_path / "one" / "rgb.mp4").read_bytes() == b"x" == (tmp_path / "two").read_bytes()
    assert len(list(tmp_path.iterdir())) == 2


def test_nothing_to_open(tmp_path):
    with pytest.raises(UserError, match="is not a folder"):
        open_clips(tmp_path / "none")
    (tmp_path / "logs").mkdir()
    (tmp_path / ".clip.writing-1").mkdir()
    (tmp_path / ".clip.writing-1" / "clip.json").write_text("{")
    with pytest.raises(UserError, match="holds no clip folders"):
        open_clips(tmp_path)


def test_mixed_clips_are_refused_by_the_odd_one(tmp_path):
    for name in ("a", "b", "c"):
        small_clip(tmp_path, name)
    small_clip(tmp_path, "b", codec={"name": "test", "hash": "bb"})
    with pytest.raises(UserError, match="clip b has codec test bb, but 2 of 3 clips have test aa"):
        open_clips(tmp_path)
    small_clip(tmp_path, "b", proxy=torch.zeros(24, 15, 2, 3))
    with pytest.raises(UserError, match="clip b has geometry .*proxy_height=2.*proxy_height=1"):
        open_clips(tmp_path)
    small_clip(tmp_path, "b", starts={0: start(text_width=8)})
    with pytest.raises(UserError, match="clip b has text width 8, but 2 of 3 clips have 7"):
        open_clips(tmp_path)


def test_the_world_is_what_film_codec_and_caption_give():
    clips = open_clips(small_world())
    assert [clip.id for clip in clips] == [
        f"clip_{episode:06d}_{window}" for episode in range(3) for window in range(2)
    ]
    assert {(clip.id[:-2], clip.episode) for clip in clips} == {(f"clip_{e:06d}", f"world-3-{e}") for e in range(3)}
    clip = clips[3]
    assert (clip.chunks, clip.starts, clip.geometry) == (8, STARTS, Geometry(4, 6, 1, 2))
    film, codec = Film(3, 1, 1, 64, 96), load_codec()
    frames, proxy = film.chunk(5)
    found = tensors(clip.path / "stream.safetensors")
    torch.testing.assert_close(found["video"][:, 25:30].float(), codec.encode(frames.rgb), atol=2e-3, rtol=1e-3)
    torch.testing.assert_close(found["proxy"][:, 25:30].float(), codec.encode(proxy), atol=4e-3, rtol=1e-3)
    opening = tensors(clip.start_file(5))
    picture = codec.encode_picture(frames.rgb[0])
    torch.testing.assert_close(opening["picture1_native"].float(), picture, atol=2e-3, rtol=1e-3)
    with safe_open(clip.start_file(5), framework="pt") as file:
        caption = file.metadata()["caption"]
    text, tags = embed_text(caption, picture)
    torch.testing.assert_close(opening["text"].float(), text, atol=2e-3, rtol=1e-3)
    assert torch.equal(opening["text_tags"], tags)
    lines = caption.split("\r\n")
    assert all(re.fullmatch(r"\[\d+\.\d\ds\] .+\.", line) for line in lines) and len(lines) >= 2
    for word, label in (("terrain", 3), ("road", 4), ("vehicle", 10), ("building", 6)):
        share = (frames.ids[0] == label).mean()
        if share > 0.01 or share == 0:
            assert (word in lines[1]) == (share > 0.01)


def test_captions_tell_what_comes_into_view_and_when():
    scene = Scene(0)
    text = describe(scene, [{1, 3}, {1, 3}, {3, 10}, {10}, {1, 8, 10}, {3}, {11}])
    lines = text.split("\r\n")
    assert lines[1] == "[0.00s] In view: sky, terrain."
    assert lines[2:] == ["[1.42s] Comes into view: vehicle.", "[2.83s] Comes into view: human."]  # 2 and 4 x 17 / 24 s


def hashes(root):
    return json.loads((root / "manifest.json").read_text())["clips"]


def test_processes_do_not_change_the_files_and_a_stopped_run_is_finished(tmp_path, capsys):
    root = copy_world(tmp_path / "clips", manifest=True)
    expected = hashes(root)
    kept = (root / "clip_000000_0").stat().st_ino
    for name in ("clip_000001_0", "clip_000002_1"):
        shutil.rmtree(root / name)
    (root / ".clip_000001_0.writing-7").mkdir()
    with pytest.raises(UserError, match="clip_000001_0 is listed .* but missing"):
        open_clips(root)
    clips = write_world(root, **SIZES, starts=STARTS, processes=2)
    assert "4 already there" in capsys.readouterr().err
    assert len(clips) == 6 and hashes(root) == expected
    assert (root / "clip_000000_0").stat().st_ino == kept
    assert not list(root.glob(".*"))


def test_an_unfinished_world_is_not_opened(tmp_path):
    root = copy_world(tmp_path / "clips", manifest=True)
    content = json.loads((root / "manifest.json").read_text())
    manifest.write(root, content | {"clips": {}})  # as it stands while clips are being written
    with pytest.raises(UserError, match="clip_000000_0 is not listed"):
        open_clips(root)


def test_a_folder_of_another_world_is_refused(tmp_path):
    root = copy_world(tmp_path / "clips", manifest=True)
    with pytest.raises(UserError, match="seed is 3 there, 4 was asked for"):
        write_world(root, **SIZES | {"seed": 4}, starts=STARTS)
    with pytest.raises(UserError, match=r"starts is \[0, 2, 5\] there, \[0\] was asked for"):
        write_world(root, **SIZES, starts=[0])
    (root / "manifest.json").unlink()
    with pytest.raises(UserError, match="not written by this command"):
        write_world(root, **SIZES, starts=STARTS)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"height": 100}, "multiples of 32"),
        ({"clips": 0, "episodes": 1}, "--clips 0"),
        ({"episodes": 7}, "--episodes 7 is more than --clips 6"),
        ({"starts": [8]}, r"must be chunks of the clip, 0\.\.7"),
        ({"seed": -1}, "--seed -1"),
    ],
)
def test_bad_settings_of_a_world(tmp_path, changed, message):
    with pytest.raises(UserError, match=message):
        write_world(tmp_path / "w", **{**SIZES, "starts": STARTS, **changed})
    assert not (tmp_path / "w").exists()


def test_the_command_writes_start_frames_at_its_interval(tmp_path, capsys):
    main_world(tmp_path / "w", clips=1, chunks=4, height=32, width=32, start_every=3)
    (clip,) = open_clips(tmp_path / "w")
    assert clip.starts == (0, 3) and clip.geometry == Geometry(2, 2, 1, 1)
    out, err = capsys.readouterr()
    assert "1 clips" in out and load_codec().identity["hash"] in out and "1/1 clips" in err
    with pytest.raises(UserError, match="--start_every 0"):
        main_world(tmp_path / "w", start_every=0)


def test_the_manifest_tells_changed_clips(tmp_path):
    root = copy_world(tmp_path / "clips", manifest=True)
    clip = root / "clip_000001_0"
    edit(clip / "clip.json", flagged=[{"first_chunk": 0, "last_chunk": 0, "reason": "dark"}])
    assert open_clips(root)[2].flagged == {0: "dark"}  # quality control may flag spans afterwards
    shutil.copyfile(root / "clip_000002_0" / "stream.safetensors", clip / "stream.safetensors")  # same size, other data
    with pytest.raises(UserError, match="clip clip_000001_0 has changed"):
        open_clips(root)
    shutil.rmtree(clip)
    shutil.copytree(small_world() / "clip_000001_0", clip)
    open_clips(root)
    (clip / "start_5.safetensors").rename(clip / "start_6.safetensors")
    with pytest.raises(UserError, match="clip clip_000001_0 has changed"):
        open_clips(root)
    (clip / "start_6.safetensors").unlink()
    with pytest.raises(UserError, match="clip clip_000001_0 has changed"):
        open_clips(root)


def test_the_manifest_names_its_codec(tmp_path):
    root = copy_world(tmp_path / "clips", manifest=True)
    edit(root / "manifest.json", codec=CODEC)
    with pytest.raises(UserError, match="written for codec .*'aa'"):
        open_clips(root)
    edit(root / "manifest.json", clips=[])
    with pytest.raises(UserError, match="lacks `clips` or `codec`"):
        open_clips(root)
    (root / "manifest.json").write_text("nothing")
    with pytest.raises(UserError, match="manifest.json is not valid JSON"):
        open_clips(root)
    (root / "manifest.json").unlink()
    assert len(open_clips(root)) == 6


def test_hashing_reads_a_few_kilobytes_a_file(tmp_path, monkeypatch):
    clip = small_clip(tmp_path)
    save_file(
        {"video": torch.zeros(24, 5000, 2, 4).half(), "proxy": torch.zeros(24, 5000, 1, 3).half()},
        clip / "stream.safetensors",
    )
    count = []

    class Counting:
        def __init__(self, path, mode):
            self.file = open(path, mode)

        def __enter__(self):
            return self

        def __exit__(self, *fault):
            self.file.close()

        def seek(self, place):
            self.file.seek(place)

        def read(self, size):
            found = self.file.read(size)
            count.append(len(found))
            return found

    monkeypatch.setattr(manifest, "open", Counting, raising=False)
    before = manifest.clip_hash(clip)
    assert sum(count) <= 3 * 8192
    monkeypatch.undo()
    assert manifest.clip_hash(clip) == before
    with open(
        clip / "stream.safetensors", "r+b"
    ) as file:  # a damage of 1/64 of the file cannot hide between the samples
        size = file.seek(0, 2)
        file.seek(size // 3)
        file.write(b"\1" * (size // 60))
    assert manifest.clip_hash(clip) != before


def test_progress_in_a_log_is_ten_lines(capsys):
    for done in range(1, 101):
        make.show_progress(done, 100, 2.0 * done)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10 and lines[4] == "world: 50/100 clips, 100 s, 100 s left"
