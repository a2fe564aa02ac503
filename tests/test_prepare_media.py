"""Video files, DUV pictures and the VAE of preparation: time stamps, lossless codes, and latents against the published
class."""

from collections import Counter
from fractions import Fraction

import av
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLMiniMaxH3
from diffusers.modular_pipelines.minimax_h3.encoders import encode_vae_condition
from diffusers.modular_pipelines.minimax_h3.modular_pipeline import MiniMaxH3ModularPipeline
from media import planes, scene, small_h3, write_conditions, write_duv, write_video
from PIL import Image

from rtcwm.data import duv
from rtcwm.errors import UserError
from rtcwm.prepare.proxies import check_pictures, check_report, open_conditions, open_proxy, read_proxy
from rtcwm.prepare.vae import CONDITION_SEED, PIXEL_MEAN, PIXEL_STD, VideoCodec
from rtcwm.prepare.video import probe, read, shown_size, to_24


def decoded(path) -> np.ndarray:
    """All frames of a file by PyAV's plain decode."""
    with av.open(str(path)) as file:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)])


def frames_of_film(path) -> np.ndarray:
    film = probe(path)
    return np.concatenate(list(read(film, len(film.picks) // 17)))


def test_a_24_fps_file_is_read_frame_by_frame(tmp_path):
    for name in ("a.mp4", "a.mkv"):  # mkv counts in milliseconds: 42, 83, 125
        path = write_video(tmp_path / name, scene(40))
        film = probe(path)
        assert (film.height, film.width, film.frames, film.notes) == (32, 64, 40, ())
        assert np.array_equal(frames_of_film(path), decoded(path)[:34])


@pytest.mark.parametrize("rate", [25, 30, 60, 12, Fraction(24000, 1001)])
def test_other_rates_come_out_at_24_by_nearest_time(tmp_path, rate):
    path = write_video(tmp_path / "a.mp4", scene(75), rate)
    film, seconds = probe(path), 75 / Fraction(rate)
    assert len(film.picks) == int(seconds * 24)
    for k, pick in enumerate(film.picks):
        away = [abs(Fraction(i) / Fraction(rate) - Fraction(k, 24)) for i in range(75)]
        assert away[pick] == min(away) and pick == away.index(min(away))
    assert f"{float(rate):.3f} frames a second resampled to 24" in film.notes[0]
    assert f"{len(film.picks)} frames of 75" in film.notes[0]
    shown = Counter(film.picks)
    assert f"{75 - len(shown)} left out, {len(film.picks) - len(shown)} repeated" in film.notes[0]
    assert np.array_equal(frames_of_film(path), decoded(path)[list(film.picks)][: len(film.picks) // 17 * 17])


def test_a_variable_rate_comes_out_at_24(tmp_path):
    gaps = np.random.default_rng(1).integers(20, 70, 60)
    stamps = [0, *np.cumsum(gaps).tolist()]
    path = write_video(tmp_path / "a.mkv", scene(61), 24, stamps=stamps, clock=Fraction(1, 1000))
    film = probe(path)
    assert "a variable frame rate (20.0 to 69.0 ms a frame) resampled to 24" in film.notes[0]
    for k, pick in enumerate(film.picks):
        assert abs(stamps[pick] - k * 1000 / 24) == min(abs(stamp - k * 1000 / 24) for stamp in stamps)
    assert abs(len(film.picks) - (stamps[-1] + float(np.median(gaps))) * 24 / 1000) <= 1
    assert np.array_equal(frames_of_film(path), decoded(path)[list(film.picks)][: len(film.picks) // 17 * 17])


def test_of_two_frames_equally_near_the_earlier_is_taken():
    picks, _ = to_24([0, 1, 2, 3], Fraction(1, 12))  # odd k / 24 s lie half way
    assert picks == (0, 0, 1, 1, 2, 2, 3, 3)


@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_a_turned_video_is_read_as_players_show_it(tmp_path, degrees):
    """Against the matrix of the file's own track header, which puts the pixel (x, y) at (a x + c y, b x + d y)."""
    path = write_video(tmp_path / "a.mp4", scene(17))
    turned = tmp_path / "b.mp4"
    with av.open(str(path)) as given, av.open(str(turned), "w") as made:
        stream = made.add_stream_from_template(given.streams.video[0])
        stream.set_display_rotation(degrees)
        for packet in given.demux(video=0):
            if packet.dts is not None:
                packet.stream = stream
                made.mux(packet)
    content = turned.read_bytes()
    matrix = np.frombuffer(content, ">i4", 9, content.index(b"tkhd") + 4 + 40)  # header of version 0
    (a, b), (c, d) = matrix.reshape(3, 3)[:2, :2] // 65536
    assert abs(a * d - b * c) == 1 and (a, d) != (1, 1)
    frames = decoded(turned)
    y, x = np.mgrid[: frames.shape[1], : frames.shape[2]]
    columns, rows = a * x + c * y, b * x + d * y
    columns, rows = columns - columns.min(), rows - rows.min()
    shown = np.zeros((17, rows.max() + 1, columns.max() + 1, 3), np.uint8)
    shown[:, rows, columns] = frames
    film = probe(turned)
    assert (film.height, film.width) == shown_size(turned) == shown.shape[1:3]
    assert np.array_equal(next(read(film, 1)), shown)


def test_a_size_is_scaled(tmp_path):
    path = write_video(tmp_path / "a.mp4", scene(17))
    assert next(read(probe(path), 1, (64, 96))).shape == (17, 64, 96, 3)


DAMAGED = [
    (dict(), "a.mp4", 0.6, "cannot be opened"),  # the index of an mp4 stands at its end
    (dict(movflags="faststart"), "a.mp4", 0.6, "truncated or damaged: its header promises 40 frames"),
    (dict(movflags="faststart"), "a.mp4", 0.99, "truncated or damaged"),
    (dict(), "a.mkv", 0.6, "truncated|breaks off"),
]


@pytest.mark.parametrize("options, name, share, message", DAMAGED)
def test_a_truncated_file_is_refused(tmp_path, options, name, share, message):
    path = write_video(tmp_path / name, scene(40), g="8", **options)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(UserError, match=message):
        probe(path)


def test_what_is_no_video_is_refused(tmp_path):
    (tmp_path / "a.mp4").write_bytes(b"not a video at all")
    with pytest.raises(UserError, match="cannot be opened as a video"):
        probe(tmp_path / "a.mp4")


def code(metres: float) -> int:
    """The red of a depth, by the formula, in exact steps: 16 bits, then 8."""
    if metres <= np.float32(1e-3):
        return 0
    share = (np.log(256) - np.log(min(max(metres, 0.3), 256.0))) / (np.log(256) - np.log(0.3))
    return round(round(share * 65535) / 257)


@pytest.mark.parametrize("codec", ["libx264rgb", "ffv1"])
def test_codes_over_the_whole_range_survive_the_file(tmp_path, codec):
    """Every red from 0 to 255, every class, from condition files through a lossless video and back."""
    depth = np.concatenate(
        [[0.0, 1e-3, 0.0011, 0.29, 0.3, 256.0, 300.0, 8000.0], np.geomspace(0.25, 300, 17 * 1024 - 8)]
    )
    depth = depth.astype(np.float32).reshape(17, 32, 32)
    ids = np.resize(np.arange(12, dtype=np.uint8), depth.shape)
    root = write_conditions(tmp_path / "duv", depth, ids)
    pictures = next(read_proxy(open_proxy(root), 1, (32, 32)))
    assert pictures[..., 0].ravel().tolist() == [code(float(value)) for value in depth.ravel()]
    assert set(pictures[..., 0].ravel().tolist()) == set(range(256))
    pixel = {"libx264rgb": dict(crf="0"), "ffv1": dict(pix_fmt="bgr0")}[codec]
    sky = pictures.copy()
    sky[..., 0][ids == 1] = 0  # a sky at 0.3 m would be another convention
    path = write_duv(tmp_path / "duv.mkv", sky, codec=codec, **pixel)
    assert np.array_equal(next(read_proxy(open_proxy(path), 1, (32, 32))), sky)
    assert np.array_equal(duv.decode_ids(sky), ids)


def test_larger_conditions_are_reduced_by_median_and_majority(tmp_path):
    depth, ids = planes(17, 64, 96)
    root = open_conditions(write_conditions(tmp_path / "duv", depth, ids))
    assert (root.frames, root.height, root.width) == (17, 64, 96)
    made = next(read_proxy(root, 1, (32, 48)))
    for frame, row, column in [(0, 0, 0), (5, 31, 47), (16, 9, 30)]:
        area = (frame, slice(2 * row, 2 * row + 2), slice(2 * column, 2 * column + 2))
        codes = sorted(code(float(value)) for value in depth[area].ravel())
        assert made[frame, row, column, 0] == codes[2]
        counts = Counter(ids[area].ravel().tolist())
        winner = min(counts, key=lambda label: (-counts[label], label))
        assert made[frame, row, column, 1:].tolist() == [(32, 96, 160, 224)[winner % 4], (43, 128, 213)[winner // 4]]


@pytest.fixture(scope="module")
def codec() -> VideoCodec:
    return VideoCodec(small_h3() / "vae", torch.device("cpu"))


@pytest.fixture(scope="module")
def reference() -> AutoencoderKLMiniMaxH3:
    return AutoencoderKLMiniMaxH3.from_pretrained(small_h3() / "vae")


def scale(reference) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and std of latents, [24, 1, 1, 1]."""
    return tuple(
        torch.tensor(values).view(24, 1, 1, 1)
        for values in (reference.config.latents_mean, reference.config.latents_std)
    )


def test_a_stream_is_what_the_class_makes_of_each_clip_and_of_124_frames(codec, reference, tmp_path):
    chunks = list(read(probe(write_video(tmp_path / "a.mp4", scene(136))), 8))
    stream = torch.cat([codec.encode_target(chunk) for chunk in chunks], 1)
    assert stream.shape == (24, 40, 2, 4)
    mean, std = scale(reference)
    pixels = torch.from_numpy(np.concatenate(chunks)).permute(3, 0, 1, 2)[None].float() / 255
    pixels = (pixels - torch.tensor(PIXEL_MEAN).view(3, 1, 1, 1)) / torch.tensor(PIXEL_STD).view(3, 1, 1, 1)
    with torch.no_grad():
        window = reference.encode(pixels[:, :, :124]).latent_dist.mode()[0]
        lone = reference.encode(pixels[:, :, 51:68]).latent_dist.mode()[0]
        clip = reference._encode_clip(pixels[:, :, 51:68])[0].chunk(2)[0]
    assert (window.shape[1], lone.shape[1], clip.shape[1]) == (37, 2, 5)  # encode() drops three latents
    torch.testing.assert_close(stream[:, :37], (window - mean) / std, rtol=0, atol=1e-6)
    torch.testing.assert_close(stream[:, 15:17], (lone - mean) / std, rtol=0, atol=1e-6)
    torch.testing.assert_close(stream[:, 15:20], (clip - mean) / std, rtol=0, atol=1e-6)


def test_pictures_follow_the_recipe_of_diffusers(codec, reference):
    picture = scene(1)[0]
    pixels = torch.from_numpy(picture).permute(2, 0, 1)[None, :, None]
    assert MiniMaxH3ModularPipeline.pixel_mean.fget(None) == PIXEL_MEAN
    assert MiniMaxH3ModularPipeline.pixel_std.fget(None) == PIXEL_STD
    assert MiniMaxH3ModularPipeline.keyframe_encode_seed.fget(None) == CONDITION_SEED
    with torch.no_grad():
        expected = encode_vae_condition(reference, pixels, PIXEL_MEAN, PIXEL_STD, 42)[0]
    made = codec.encode_picture(picture)
    assert made.shape == (24, 1, 2, 4) and torch.equal(made, expected)


def test_proxies_are_sampled_under_seed_42_and_rounded_to_fp16(codec, reference):
    pictures = duv.encode(*planes(17))
    mean, std = scale(reference)
    with torch.no_grad():
        moments = reference._encode_clip(codec._pixels(pictures))[0]
    centre, log_variance = moments.chunk(2)
    noise = torch.randn(1, 24, 5, 2, 2, generator=torch.Generator().manual_seed(42))[0]
    sample = centre + (0.5 * log_variance.clamp(-30, 20)).exp() * noise
    made = codec.encode_proxy(pictures)
    torch.testing.assert_close(made, (sample.half().float() - mean) / std, rtol=0, atol=2e-3)
    raw = made * std + mean
    torch.testing.assert_close(raw, raw.half().float(), rtol=1e-6, atol=1e-6)
    assert torch.equal(made, codec.encode_proxy(pictures))  # each chunk starts the generator anew


def test_a_chunk_is_decoded_from_its_latents_and_two_of_the_next(reference, tmp_path):
    codec = VideoCodec(small_h3() / "vae", torch.device("cpu"), decoder=True)
    latents = torch.cat([codec.encode_target(scene(17, seed=seed)) for seed in (0, 1)], 1)
    mean, std = scale(reference)
    with torch.no_grad():
        whole = codec.vae.decode((latents * std + mean)[None, :, :7])[0][0].float()
    assert whole.shape[1] == 22  # 17 frames, and 5 that the next chunk's latents overlap
    pixels = (
        whole[:, :17] * torch.tensor(PIXEL_STD).view(3, 1, 1, 1) + torch.tensor(PIXEL_MEAN).view(3, 1, 1, 1)
    ).clamp(0, 1)
    made = codec.decode(latents[:, :7])
    assert made.shape == (17, 32, 64, 3) and made.dtype == np.uint8
    assert np.abs(made / 255 - pixels.permute(1, 2, 3, 0).numpy()).max() <= 0.5 / 255 + 1e-4


def bgr(pictures):
    return pictures[..., ::-1]


def far_away(pictures):
    """The convention of near 0.1 m and far 8000 m: dark near, sky 255, building and ground share a colour."""
    made = np.zeros_like(pictures)
    made[..., 0] = 80
    made[:, :8] = (255, 255, 255)
    made[:, 8:16] = (40, 64, 0)
    return made


def bright_sky(pictures):
    made = pictures.copy()
    made[..., 1:][:, :8] = duv.PALETTE[1]
    made[:, :8, :, 0] = 255
    return made


@pytest.mark.parametrize(
    "change, message",
    [
        (bgr, "has red and blue swapped .BGR."),
        (far_away, "another DUV convention .near 0.1 m / far 8000 m, dark near, 255 = sky"),
        (bright_sky, "another DUV convention .dark near, 255 = sky"),
        (lambda pictures: np.clip(pictures.astype(int) + 3, 0, 255).astype(np.uint8), "a lossy or YUV encoder"),
        (lambda pictures: np.full_like(pictures, 77), "is not DUV: .* off the semantic grid"),
    ],
)
def test_other_pictures_are_refused_by_name(change, message):
    pictures = duv.encode(*planes(17))
    check_pictures(pictures, "duv.mp4")
    with pytest.raises(UserError, match=message):
        check_pictures(change(pictures), "duv.mp4")


def test_a_report_of_another_convention_is_refused():
    check_report({"near": 0.3, "far": 256.0, "frames": 124, "duv_depth_inverted": True}, "clip_report.json")
    for report, message in [
        ({"taxonomy": "standard11"}, "standard11"),
        ({"near": 0.1}, "near 0.1"),
        ({"duv_far": 8000}, "8000"),
    ]:
        with pytest.raises(UserError, match=message):
            check_report(report, "clip_report.json")


def damaged_conditions(tmp_path, damage):
    root = write_conditions(tmp_path / "duv", *planes(17))
    damage(root)
    return list(read_proxy(open_conditions(root), 1, (32, 32)))


def set_depth(root, value):
    depth = np.fromfile(root / "000003.depth.f32", "<f4")
    depth[100] = value
    depth.tofile(root / "000003.depth.f32")


def set_id(root, value):
    ids = np.array(Image.open(root / "000004.semantic_id.png"))
    ids[3, 5] = value
    Image.fromarray(ids).save(root / "000004.semantic_id.png")


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda root: set_depth(root, np.nan), r"000003.depth.f32: depth must be finite metres >= 0 .*1 non-finite"),
        (lambda root: set_depth(root, np.inf), "000003.depth.f32: .*1 non-finite"),
        (lambda root: set_depth(root, -0.5), "000003.depth.f32: .*1 negative"),
        (lambda root: set_id(root, 12), "000004.semantic_id.png: semantic ids run from 0 to 12"),
        (lambda root: (root / "000007.depth.f32").unlink(), "000007.depth.f32 is missing, but the files run to 000016"),
        (lambda root: (root / "000000.semantic_id.png").unlink(), "000000.semantic_id.png is missing"),
        (lambda root: (root / "000002.depth.f32").write_bytes(b"1234"), "has 4 bytes .* expected 32x32"),
        (lambda root: (root / "000001.semantic_id.png").write_bytes(b"1234"), "cannot be read as a PNG"),
    ],
)
def test_faulty_conditions_are_refused_by_file(tmp_path, damage, message):
    with pytest.raises(UserError, match=message):
        damaged_conditions(tmp_path, damage)


def test_zero_and_a_millimetre_are_no_surface_and_no_fault(tmp_path):
    def damage(root):
        set_depth(root, 0.0)
        set_depth(root, 1e-3)

    assert damaged_conditions(tmp_path, damage)[0][3].reshape(-1, 3)[100, 0] == 0
