"""Samples, windows and their order, against brute force."""

import json
import struct
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from worlds import STARTS, change, copy_world, edit, small_world, tensors

from rtcwm.data.clips import Clip, open_clips
from rtcwm.errors import UserError
from rtcwm.model.layout import Geometry
from rtcwm.train.dataset import (
    EpochSampler,
    draw_start,
    list_samples,
    load_window,
    openings,
    silence,
    spans,
    start_frames,
    stream_chunks,
)


def clip(name="a", chunks=9, episode="e", flagged=None, starts=(0,)) -> Clip:
    return Clip(name, Path(name), chunks, episode, flagged or {}, Geometry(2, 2, 1, 1), {}, starts, 8)


def world_of(*sizes: int) -> list[Clip]:
    """Clips of several episodes; `sizes` clips each."""
    return [clip(f"{e}{k}", 7, f"episode {e}") for e, size in enumerate(sizes) for k in range(size)]


def test_spans_avoid_flags_and_need_a_start_frame():
    # 12 chunks: spans begin at 0..6. Chunk 2 flagged hits 0..2, chunk 11 hits 6; a start frame at 4 leaves 4 and 5.
    flagged = {2: "dark", 11: "shaky"}
    some = clip(chunks=12, flagged=flagged, starts=(4, 7))
    brute = [j for j in range(12) if j + 6 <= 12 and not any(k in flagged for k in range(j, j + 6)) and j >= 4]
    assert list(spans(some)) == brute == [4, 5]
    assert spans(some, 3) == (4, 5, 6, 7, 8) and spans(clip(chunks=5)) == ()
    found = list_samples([some, clip("b", 5)], 0, 0)
    assert found.train == ((0, 4), (0, 5)) and found.held_out == ()
    assert found.dropped == {
        "flagged: dark": 3,
        "no start frame at or before the span can open it": 1,
        "flagged: shaky": 1,
        "the clip is shorter than 6 chunks": 1,
    }
    assert start_frames(some) == (4, 7) and stream_chunks(some) == 12


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("val_clips", [0, 1, 2, 3, 5])
def test_whole_episodes_are_held_out(seed, val_clips):
    clips = world_of(2, 1, 3, 2)
    found = list_samples(clips, val_clips, seed)
    held = {c.episode for c in found.held_out}
    assert {c.id for c in found.held_out} == {c.id for c in clips if c.episode in held}
    trained = {clips[index].episode for index, _ in found.train}
    assert held.isdisjoint(trained) and held | trained == {c.episode for c in clips}
    assert len(found.train) == 2 * (len(clips) - len(found.held_out))  # 7 chunks hold two spans
    sizes = Counter(c.episode for c in found.held_out)
    assert sum(sizes.values()) >= val_clips
    assert not held or sum(sizes.values()) - max(sizes.values()) < val_clips  # the last episode was needed
    assert found == list_samples(clips, val_clips, seed)


def test_the_seed_chooses_the_episodes():
    clips = world_of(1, 1, 1, 1, 1)
    chosen = Counter(list_samples(clips, 1, seed).held_out[0].episode for seed in range(50))
    assert len(chosen) == 5


def test_nothing_left_to_train_on():
    with pytest.raises(UserError, match="--val-clips 2 would hold out every clip: the 3 clips belong to 1 episode"):
        list_samples(world_of(3), 2, 0)
    with pytest.raises(UserError, match="--val-clips 4: expected 0 to 3"):
        list_samples(world_of(3), 4, 0)
    with pytest.raises(UserError, match="no span of 6 chunks is left"):
        list_samples([clip(chunks=5)], 0, 0)
    assert len(list_samples(world_of(3), 0, 0).train) == 6


def test_windows_hold_the_stored_latents():
    some = open_clips(small_world())[2]
    stream, opening = tensors(some.path / "stream.safetensors"), tensors(some.start_file(2))
    for first, chunks in ((2, 6), (0, 8), (7, 1), (3, 2)):
        window = load_window(some, first, 2, chunks)
        cut = slice(5 * first, 5 * (first + chunks))
        assert torch.equal(window.video, stream["video"][:, cut].float()[None])
        assert torch.equal(window.proxy, stream["proxy"][:, cut].float()[None])
        assert torch.equal(window.picture1, opening["picture1_native"].float()[None])
        assert torch.equal(window.text, opening["text"].float()[None])
        assert torch.equal(window.text_tags, opening["text_tags"])
        assert window.audio.shape == (1, 2 * round(chunks * 17 / 24 * 40), 32) and not window.audio.any()
        assert window.video.dtype == torch.float32 and window.chunks == chunks and window.geometry == some.geometry
    teacher = load_window(some, 0, 5, latents=37)
    assert torch.equal(teacher.video, stream["video"][:, :37].float()[None])
    assert teacher.audio.shape == (1, 414, 32)


def test_windows_outside_are_refused():
    some = open_clips(small_world())[0]
    for first, chunks in ((3, 6), (-1, 6), (0, 9), (0, 0)):
        with pytest.raises(UserError, match=f"clip {some.id}: a window .* does not fit its 8 chunks"):
            load_window(some, first, 0, chunks)
    with pytest.raises(UserError, match=r"no start frame 1, only \(0, 2, 5\)"):
        load_window(some, 1, 1)
    with pytest.raises(UserError, match="start_0.safetensors has no `picture1_2048`"):
        load_window(some, 0, 0, picture1="2048")
    with pytest.raises(UserError, match="picture1 is 'big'"):
        load_window(some, 0, 0, picture1="big")


def test_the_large_picture_is_loaded_on_demand(tmp_path):
    root = copy_world(tmp_path / "clips")
    some = open_clips(root)[0]
    change(some.start_file(0), picture1_2048=torch.full((24, 1, 8, 12), 3.0).half())
    some = open_clips(root)[0]
    assert load_window(some, 0, 0, picture1="2048").picture1.shape == (1, 24, 1, 8, 12)
    assert load_window(some, 0, 0).picture1.shape == (1, 24, 1, 4, 6)


def test_only_the_window_is_checked_and_read(tmp_path):
    """Everything but the window is NaN: a window beside it is fine, one that touches it is refused by clip and file."""
    root = copy_world(tmp_path / "clips")
    some = open_clips(root)[1]
    stream = some.path / "stream.safetensors"
    found = tensors(stream)
    video, proxy = torch.full_like(found["video"], torch.nan), torch.full_like(found["proxy"], torch.nan)
    video[:, 5:35], proxy[:, 5:35] = found["video"][:, 5:35], found["proxy"][:, 5:35]
    change(stream, video=video, proxy=proxy)
    assert torch.equal(load_window(some, 1, 0).video[0], found["video"][:, 5:35].float())
    message = rf"clip {some.id}: {5 * 24 * 24} of {30 * 24 * 24} values of `video` read from .*stream.safetensors"
    with pytest.raises(UserError, match=message):
        load_window(some, 2, 0)
    change(stream, video=found["video"])
    with pytest.raises(UserError, match="values of `proxy`"):
        load_window(some, 2, 0)
    change(stream, proxy=found["proxy"])
    change(some.start_file(2), text=torch.full((3, 64), torch.inf).half(), text_tags=torch.ones(3).long())
    with pytest.raises(UserError, match="192 of 192 values of `text` read from .*start_2.safetensors"):
        load_window(some, 2, 2)


def test_a_window_of_a_long_stream_costs_its_own_memory(tmp_path):
    """A sparse file of 460 MB: what the process maps of it while a window is read stays near the window's size."""
    root = copy_world(tmp_path / "clips")
    folder = root / "clip_000000_0"
    chunks = 80_000
    header, place = {}, 0
    for name, shape in (("video", [24, 5 * chunks, 4, 6]), ("proxy", [24, 5 * chunks, 1, 2])):
        size = 2 * shape[0] * shape[1] * shape[2] * shape[3]
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [place, place + size]}
        place += size
    text = json.dumps(header).encode()
    with open(folder / "stream.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + place)
    edit(folder / "clip.json", chunks=chunks, frames=17 * chunks)
    some = open_clips(root)[0]
    load_window(some, 0, 0)

    def memory(name: str) -> int:
        return int(next(line for line in Path("/proc/self/status").read_text().splitlines() if name in line).split()[1])

    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = memory("VmRSS")
    window = load_window(some, 40_000, 0)
    assert window.video.shape == (1, 24, 30, 4, 6) and not window.video.any()
    assert place > 460e6 and memory("VmHWM") - before < 24_000  # kB; 48 slices, each mapped with its neighbourhood


def test_silence_is_channel_major(tmp_path):
    assert torch.equal(silence(None, 3), torch.zeros(1, 6, 32))
    assert torch.equal(silence(tmp_path, 3), torch.zeros(1, 6, 32))
    other = tmp_path / "other"
    other.mkdir()
    audio = torch.randn(2, 5, 32)
    save_file({"audio": audio}, other / "silence.safetensors")
    assert torch.equal(silence(other, 3), torch.cat((audio[0, :3], audio[1, :3]))[None])
    with pytest.raises(UserError, match=r"shape \[2, 5, 32\], expected .* n >= 6"):
        silence(other, 6)
    third = tmp_path / "third"
    third.mkdir()
    save_file({"sound": audio}, third / "silence.safetensors")
    with pytest.raises(UserError, match="expected `audio"):
        silence(third, 3)
    save_file({"audio": audio * torch.inf}, third / "silence.safetensors")
    with pytest.raises(UserError, match="not finite"):
        silence(third, 4)


def test_windows_use_the_silence_beside_the_clips(tmp_path):
    root = copy_world(tmp_path / "clips")
    audio = torch.randn(2, 170, 32)
    save_file({"audio": audio}, root / "silence.safetensors")
    assert torch.equal(load_window(open_clips(root)[0], 0, 0).audio, audio.reshape(1, 340, 32))


def test_start_frames_are_drawn_evenly_from_the_earlier_ones():
    some = replace(clip(chunks=20), starts=(1, 4, 6, 9))
    generator = torch.Generator().manual_seed(0)
    drawn = Counter(draw_start(some, 6, generator) for _ in range(3000))
    assert set(drawn) == {1, 4, 6} and all(abs(count - 1000) < 4 * 26 for count in drawn.values())  # 4 sigma
    assert {draw_start(some, 3, generator) for _ in range(20)} == {1}
    with pytest.raises(UserError, match="no start frame at or before chunk 0"):
        draw_start(some, 0, generator)
    assert STARTS[0] == 0


def test_a_span_is_not_opened_by_a_flagged_picture_or_one_of_another_scene():
    some = clip(chunks=20, flagged={1: "scene cut", 4: "dark", 6: "static"}, starts=(0, 2, 4, 5))
    assert [openings(some, first) for first in (0, 2, 5, 7)] == [[0], [2], [2, 5], [2, 5]]
    assert spans(some) == tuple(range(7, 15)) and spans(replace(some, starts=(0, 4))) == ()
    drawn = {draw_start(some, 7, torch.Generator().manual_seed(seed)) for seed in range(20)}
    assert drawn == {2, 5}
    with pytest.raises(UserError, match=r"no start frame at or before chunk 7 that is not flagged .* has \(0, 4\)"):
        draw_start(replace(some, starts=(0, 4)), 7, torch.Generator())


def run(sampler_of, ranks: int, steps: int, state=None) -> tuple[list[list], dict]:
    """Visits by step and rank, every rank with a sampler of its own; and the state, equal on all."""
    samplers = [sampler_of(ranks) for _ in range(ranks)]
    for sampler in samplers:
        if state:
            sampler.load_state_dict(state)
    visits = [[sampler.next(rank) for rank, sampler in enumerate(samplers)] for _ in range(steps)]
    assert len({json.dumps(sampler.state_dict()) for sampler in samplers}) == 1
    return visits, samplers[0].state_dict()


@pytest.mark.parametrize("ranks", range(1, 6))
@pytest.mark.parametrize("samples", range(5, 13))
def test_every_sample_once_an_epoch_by_one_rank(samples, ranks):
    steps = -(-samples // ranks)
    visits, state = run(lambda r: EpochSampler(samples, r, 3), ranks, 3 * steps)
    orders = []
    for epoch in range(3):
        flat = [visit for step in visits[epoch * steps : (epoch + 1) * steps] for visit in step]
        assert {visit.epoch for visit in flat} == {epoch}
        assert sorted(visit.sample for visit in flat[:samples]) == list(range(samples))
        assert [visit.sample for visit in flat[samples:]] == [visit.sample for visit in flat[: len(flat) - samples]]
        assert [visit.position for visit in flat] == [2 * samples * epoch + place for place in range(len(flat))]
        orders.append([visit.sample for visit in flat[:samples]])
    assert orders[0] != orders[1] and orders[1] != orders[2]
    one, _ = run(lambda r: EpochSampler(samples, r, 3), 1, samples)
    assert [step[0].sample for step in one] == orders[0]  # the order does not depend on the number of ranks
    everything = [visit.position for step in visits for visit in step]
    assert len(set(everything)) == len(everything)
    assert state["cursor"] == 3 * samples


@pytest.mark.parametrize("before", range(1, 6))
@pytest.mark.parametrize("after", range(1, 6))
def test_a_run_resumes_on_another_number_of_ranks(before, after):
    samples = 11
    reference, _ = run(lambda r: EpochSampler(samples, r, 8), 1, 2 * samples)
    known = {step[0].position: step[0].sample for step in reference}
    for stop in range(0, -(-samples // before) + 2):
        first, state = run(lambda r: EpochSampler(samples, r, 8), before, stop)
        rest = -(-(samples - state["cursor"] % samples) // after)
        if state["cursor"] >= samples:
            continue
        second, end = run(lambda r: EpochSampler(samples, r, 8), after, rest, state)
        own = [visit for step in first + second for visit in step if visit.position < samples]  # not the wrapped tail
        assert sorted(visit.sample for visit in own) == list(range(samples))
        assert all(known[visit.position] == visit.sample for visit in own)
        assert end["cursor"] == samples
        assert len([visit for step in first + second for visit in step]) - samples < after


def test_seeds_give_other_orders_and_states_fit_their_run():
    def order(seed):
        sampler = EpochSampler(30, 1, seed)
        return [sampler.next(0).sample for _ in range(30)]

    assert order(1) == order(1) != order(2)
    sampler = EpochSampler(30, 2, 1)
    assert sampler.epoch == 0
    with pytest.raises(UserError, match="saved run had samples = 31, this one has 30"):
        sampler.load_state_dict({"cursor": 4, "samples": 31, "seed": 1})
    with pytest.raises(UserError, match="saved run had seed = 2"):
        sampler.load_state_dict({"cursor": 4, "samples": 30, "seed": 2})
    sampler.load_state_dict({"cursor": 30, "samples": 30, "seed": 1})
    assert sampler.epoch == 1


def test_fewer_samples_than_ranks():
    with pytest.raises(UserError, match="3 training samples cannot be shared by 4 ranks"):
        EpochSampler(3, 4, 0)
