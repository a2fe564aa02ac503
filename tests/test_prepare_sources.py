"""Finding clips: odd names, odd files and odd manifests are refused one by one and end no search."""

import json
import os

import pytest
from media import planes, write_clip_folder, write_conditions
from test_clips import small_clip

from rtcwm.data.write import LONGEST_ID
from rtcwm.errors import UserError
from rtcwm.prepare.captions import text_of
from rtcwm.prepare.folder import hash_sources
from rtcwm.prepare.sources import find, unread_keys


@pytest.fixture
def sources(tmp_path):
    """A folder with a target and a condition root of one picture; finding clips opens no video."""
    (tmp_path / "a.mp4").write_bytes(b"")
    write_conditions(tmp_path / "conds", *planes(1))
    return tmp_path


def found(sources, *lines: dict | str) -> tuple[dict[str, str | None], dict[int, str]]:
    """Prompts by id, and reasons by line."""
    manifest = sources / "m.jsonl"
    given = {"target": "a.mp4", "proxy": "conds"}
    texts = [line if isinstance(line, str) else json.dumps(given | line, ensure_ascii=False) for line in lines]
    manifest.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(texts).encode())
    clips, refused = find([manifest])
    told = {int(refusal.origin.rpartition(" ")[2]): refusal.reason for refusal in refused}
    return {clip.id: clip.prompt for clip in clips}, told


def test_line_ends_within_a_text_do_not_end_a_line(sources):
    prompt = "[0.00s] a\u2028b\x85c"
    assert found(sources, {"id": "a", "prompt": prompt}, "", " ", {"id": "b"}) == ({"a": prompt, "b": ""}, {})


def test_ids_are_texts_or_numbers_that_can_name_a_folder(sources):
    ids = ["x" * LONGEST_ID, 0, "x" * (LONGEST_ID + 1), "manifest.json", "prepare_check.png", True, {"a": 1}]
    clips, told = found(sources, *({"id": one} for one in ids), {"id": "", "name": "named"})
    assert sorted(clips) == sorted(["x" * LONGEST_ID, "0", "named"])
    assert sorted(told) == [3, 4, 5, 6, 7]
    assert all("cannot name a clip's folder: use at most 200" in told[line] for line in (3, 4, 5))
    assert all("neither `id` nor `name`" in told[line] for line in (6, 7))


def test_what_no_file_can_hold_is_refused_by_its_line(sources):
    half = json.dumps({"id": "half", "target": "a.mp4", "proxy": "conds", "prompt": "\ud800"})
    clips, told = found(sources, {"id": "nul", "target": "a\0.mp4"}, half, {"id": "good"})
    assert list(clips) == ["good"]
    assert "`target` is 'a\\x00.mp4', which no file can be called" in told[1]
    assert "`prompt` holds half a character" in told[2]
    (sources / "prompt.json").write_text('{"prompt": "\\ud800"}')
    with pytest.raises(UserError, match="prompt.json holds half a character"):
        text_of(sources / "prompt.json")


def test_clips_that_were_prepared_are_no_sources(tmp_path):
    """--out may lie among the sources: the second command walks over the first one's clips."""
    write_clip_folder(tmp_path, "clip_000000_0", 1)
    small_clip(tmp_path / "out", "clip_000000_0")
    clips, refused = find([tmp_path])
    assert [clip.target for clip in clips] == [tmp_path / "clip_000000_0" / "target" / "rgb.mp4"] and not refused
    with pytest.raises(UserError, match="holds no clips"):
        find([tmp_path / "out"])


def test_keys_that_mean_nothing_are_told_once(sources):
    lines = [{"id": "a", "promt": "x", "seed": 1}, {"id": "b", "seed": 2}, {"id": "c", "proxy": None, "proxi": "conds"}]
    _, told = found(sources, *lines)
    assert "has no proxy; expected exactly one of proxy, " in told[3]
    assert told[3].endswith("(it holds id, proxi, proxy, target)")
    clips, _ = find([sources / "m.jsonl"])
    assert unread_keys(clips).startswith(
        "keys of manifests that are passed over, with their clips: promt (1), seed (2);"
    )
    found(sources, {"id": "a", "name": "x", "anchor": None, "prompt": "", "episode": "e"})
    assert unread_keys(find([sources / "m.jsonl"])[0]) is None


def test_a_manifest_that_is_no_text(sources):
    (sources / "m.jsonl").write_bytes(b"\xe9")
    with pytest.raises(UserError, match="m.jsonl cannot be read as UTF-8"):
        find([sources / "m.jsonl"])


def test_pipes_are_refused_and_not_waited_for(sources):
    os.mkfifo(sources / "pipe.mp4")
    write_conditions(sources / "leaky", *planes(1))
    os.mkfifo(sources / "leaky" / "000001.depth.f32")
    clips, told = found(sources, {"id": "a", "target": "pipe.mp4"}, {"id": "b", "proxy": "leaky"}, {"id": "c"})
    assert list(clips) == ["c"] and "pipe.mp4 is no file" in told[1] and "000001.depth.f32 is no file" in told[2]


def test_conditions_beside_other_files_are_hashed_alone(sources):
    """As in a clip folder that holds them itself, next to target/ and annotations/."""
    found(sources, {"id": "a"})
    clips, _ = find([sources / "m.jsonl"])
    before = hash_sources(clips[0])
    (sources / "conds" / "target").mkdir()
    (sources / "conds" / "prompt.txt").write_text("x")
    assert hash_sources(clips[0]) == before
    write_conditions(sources / "conds", *planes(1, seed=1))
    assert hash_sources(clips[0])["proxy"] != before["proxy"]
