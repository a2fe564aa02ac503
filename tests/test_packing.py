"""Packing against diffusers' own layout steps, number for number."""

import random

import pytest
import torch
from reference import (
    MiniMaxH3ImageReference,
    MiniMaxH3VideoReference,
    audio_latent_num_frames,
    build_packed_sequence,
    build_ref2va_packed_sequence,
    build_row_timesteps,
    patchify_video_latents,
    video_latent_num_frames,
)
from small import random_window

from rtcwm.errors import UserError
from rtcwm.model import layout as sizes
from rtcwm.model.layout import RELEASED, Geometry
from rtcwm.model.packing import (
    PROXY,
    STATIC,
    TARGET,
    Layout,
    patchify,
    row_times,
    stock_layout,
    stream_layout,
    unpatchify,
)


def random_case(seed: int) -> dict:
    draw = random.Random(seed)
    return dict(
        geometry=Geometry(2 * draw.randint(1, 20), 2 * draw.randint(1, 20), draw.randint(1, 15), draw.randint(1, 15)),
        picture_size=(2 * draw.randint(1, 30), 2 * draw.randint(1, 30)),
        latents=draw.randint(1, 40),
        text_tags=tuple(draw.choice((0, 1)) for _ in range(draw.randint(1, 90))),
        audio_latents=draw.randint(1, 220),
    )


def diffusers_layout(geometry, picture_size, latents, text_tags, audio_latents):
    """Positions, tags, video, audio and text indices, and counts, for Picture 1 and a silent proxy."""
    even = [size + size % 2 for size in (geometry.proxy_height, geometry.proxy_width)]
    conditions = [torch.empty(1, 24, 1, *picture_size), torch.empty(1, 24, latents, *even)]
    references = [MiniMaxH3ImageReference(image=None), MiniMaxH3VideoReference(frames=None, fps=24.0)]
    return build_ref2va_packed_sequence(
        torch.tensor(text_tags), references, conditions, [], latents, geometry.height, geometry.width, audio_latents,
        (1, 2, 2), 2, 2, 0,
    )  # fmt: skip


CASES = [random_case(seed) for seed in range(25)]
RELEASED_CASE = dict(geometry=RELEASED, picture_size=(48, 84), latents=37, text_tags=(1, 0, 1), audio_latents=207)


@pytest.mark.parametrize("case", [*CASES, RELEASED_CASE])
def test_stock_layout_is_diffusers_layout(case):
    layout = stock_layout(**case)
    positions, tags, video, audio, text, conditions, audio_conditions = diffusers_layout(**case)
    assert layout.position_ids.dtype == torch.float64 and torch.equal(layout.position_ids, positions)
    assert torch.equal(layout.tags, tags)
    assert torch.equal(layout.video_rows, video)
    assert torch.equal(torch.cat([layout.picture_rows, layout.proxy_rows]), video[:conditions])
    assert torch.equal(layout.target_rows, video[conditions:])
    assert torch.equal(layout.audio_rows, audio) and audio_conditions == 0
    assert torch.equal(layout.text_rows, text)
    assert layout.rows == len(positions)


def test_target_positions_without_references_are_those_of_text_to_video():
    """The plain builder puts audio and target right after the text: the same grid, earlier by the references' time."""
    case = CASES[3]
    layout, geometry, text = stock_layout(**case), case["geometry"], len(case["text_tags"])
    positions, *_ = build_packed_sequence(
        torch.tensor(case["text_tags"]), case["latents"], geometry.height, geometry.width, case["audio_latents"],
        (1, 2, 2), 2, 2, 0,
    )  # fmt: skip
    ours = layout.position_ids[torch.cat([layout.audio_rows, layout.target_rows])]
    torch.testing.assert_close(ours[:, 0] - ours[0, 0], positions[text:, 0] - text, rtol=0, atol=1e-9)
    assert torch.equal(ours[:, 1:], positions[text:, 1:])


@pytest.mark.parametrize("case", CASES[:12])
@pytest.mark.parametrize("chunks", [1, 2, 6, 8])
def test_stream_layout_is_the_stated_permutation(case, chunks):
    case = {key: value for key, value in case.items() if key != "latents"}
    stock, stream = stock_layout(latents=5 * chunks, **case), stream_layout(chunks=chunks, **case)
    proxy, target = 5 * case["geometry"].proxy_rows, 5 * case["geometry"].target_rows
    order = [*stock.text_rows, *stock.picture_rows, *stock.audio_rows]
    static = len(order)
    for k in range(chunks):
        order += [*stock.proxy_rows[k * proxy : (k + 1) * proxy], *stock.target_rows[k * target : (k + 1) * target]]
    order = torch.stack(order)
    assert sorted(order.tolist()) == list(range(stock.rows))
    for name in ("position_ids", "tags", "part", "chunk", "time_slot"):
        assert torch.equal(getattr(stream, name), getattr(stock, name)[order]), name
    for name in ("text_rows", "picture_rows", "proxy_rows", "audio_rows", "target_rows", "video_rows"):
        assert torch.equal(order[getattr(stream, name)], getattr(stock, name)), name
    assert (stream.static, stream.proxy_chunk, stream.target_chunk, stream.chunks) == (static, proxy, target, chunks)
    assert stream.part.tolist() == [STATIC] * static + chunks * ([PROXY] * proxy + [TARGET] * target)
    assert stream.chunk.tolist() == [-1] * static + [k for k in range(chunks) for _ in range(proxy + target)]


def test_layouts_are_cached():
    case = CASES[0]
    tensor_tags = {**case, "text_tags": torch.tensor(case["text_tags"])}
    assert stock_layout(**case) is stock_layout(**tensor_tags)
    assert stock_layout(**case).to("cpu") is stock_layout(**case)
    meta = stock_layout(**case).to("meta")
    assert meta.device.type == "meta" and meta is stock_layout(**case).to("meta")


def row_values(layout: Layout, times: torch.Tensor, text_time: str = "pinned") -> torch.Tensor:
    values, index = row_times(layout, times, text_time)
    assert values.dtype == torch.float32 and index.dtype == torch.long
    return values[index]


@pytest.mark.parametrize("target_time", [0.0, 0.37, 0.9991, 1.0])
@pytest.mark.parametrize("case", CASES[:4])
def test_stock_row_times_are_diffusers(case, target_time):
    layout = stock_layout(**case)
    distinct, index = build_row_timesteps(
        layout.video_rows, layout.audio_rows, len(layout.picture_rows) + len(layout.proxy_rows), 0,
        len(layout.text_rows), target_time, 1.0, max(target_time, 0.999), 1.0,
    )  # fmt: skip
    assert torch.equal(row_values(layout, torch.tensor(target_time), "video"), distinct[index])


def test_pinned_row_times():
    layout = stream_layout(Geometry(4, 4, 2, 3), (2, 2), 3, (1, 1, 0), 4)
    times = torch.tensor([0.1, 0.2, 0.3])
    values = row_values(layout, times)
    fixed = torch.cat([layout.text_rows, layout.picture_rows, layout.proxy_rows])
    assert values[fixed].eq(torch.tensor(0.999)).all() and values[layout.audio_rows].eq(1.0).all()
    assert torch.equal(values[layout.target_rows], times.repeat_interleave(layout.target_chunk))
    assert row_values(layout, torch.tensor(0.4))[layout.target_rows].eq(0.4).all()
    with pytest.raises(ValueError, match="'video' with one time"):
        row_times(layout, times, "video")
    with pytest.raises(ValueError, match="expected one each for 3 chunks"):
        row_times(layout, times[:2])


def test_times_of_a_window_that_ends_inside_a_chunk():
    layout = stock_layout(RELEASED, (48, 84), 37, (1,), 207)
    assert layout.chunks == 8
    values = row_values(layout, torch.arange(8) / 10)[layout.target_rows]
    assert values[-1] == torch.tensor(0.7) and values.eq(torch.tensor(0.7)).sum() == 2 * RELEASED.target_rows


@pytest.mark.parametrize("size", [(4, 6), (2, 2), (6, 4)])
def test_patchify_is_diffusers(size):
    latents = torch.randn(2, 24, 3, *size)
    rows = patchify(latents)
    assert torch.equal(rows.reshape(-1, 96), patchify_video_latents(latents, (1, 2, 2)))
    assert torch.equal(unpatchify(rows, 3, *size), latents)


@pytest.mark.parametrize("size", [(3, 6), (4, 5), (3, 5), (1, 1)])
def test_odd_sizes_are_padded_with_zeros_and_cut_again(size):
    latents = torch.randn(2, 24, 3, *size)
    even = torch.zeros(2, 24, 3, size[0] + size[0] % 2, size[1] + size[1] % 2)
    even[..., : size[0], : size[1]] = latents
    assert torch.equal(patchify(latents).reshape(-1, 96), patchify_video_latents(even, (1, 2, 2)))
    assert torch.equal(unpatchify(patchify(latents), 3, *size), latents)


def test_sizes_are_those_of_the_release():
    assert Geometry.from_pixels(768, 1344, 192, 336) == RELEASED
    assert (RELEASED.target_rows, RELEASED.target_chunk) == (1008, 5040)
    assert (RELEASED.padded_proxy, RELEASED.proxy_rows, RELEASED.proxy_chunk) == ((12, 22), 66, 330)
    assert (sizes.frames_of(30), sizes.frames_of(37), sizes.frames_of(5)) == (102, 124, 17)
    assert (sizes.audio_latents(102), sizes.audio_latents(124)) == (170, 207)
    assert (sizes.chunks_of(30), sizes.chunks_of(37)) == (6, 8)
    span = stream_layout(RELEASED, (48, 84), 6, (1,), 170)
    assert len(span.target_rows) == 30240 and len(span.proxy_rows) == 1980 and len(span.audio_rows) == 340
    for frames in range(5, 200, 17):
        assert sizes.audio_latents(frames) == audio_latent_num_frames(frames)
        assert sizes.frames_of(video_latent_num_frames(frames, 17, 5)) == frames


def test_impossible_geometries_name_the_size():
    with pytest.raises(UserError, match="target latents of 47 x 84 .* must be even"):
        Geometry(47, 84, 12, 21)
    with pytest.raises(UserError, match="proxy width of 330 pixels is not a multiple of 16"):
        Geometry.from_pixels(768, 1344, 192, 330)
    with pytest.raises(UserError, match="must be positive"):
        Geometry(48, 84, 0, 21)


def test_window_knows_its_layout():
    window = random_window(latents=10, batch=2)
    stream = window.layout(stream=True)
    assert stream is stream_layout(window.geometry, (4, 6), 2, window.text_tags, 3)
    assert window.layout(stream=False) is stock_layout(window.geometry, (4, 6), 10, window.text_tags, 3)
    assert (window.chunks, window.latents, stream.chunks) == (2, 10, 2)
    half = window.to("cpu", torch.float16)
    assert half.video.dtype == half.text.dtype == torch.float16 and half.text_tags.dtype == torch.long
    with pytest.raises(ValueError, match="whole chunks of 5 latents, the window 7 latents"):
        random_window(latents=7).layout(stream=True)
    with pytest.raises(ValueError, match="do not belong together"):
        type(window)(window.video, window.proxy[:, :, 1:], window.picture1, window.text, window.text_tags, window.audio)
