"""`rtcwm stream`: frames against rollouts and whole decodes, films that grow or are cut, condition roots, faults."""

import gc
import json
import os
import re
import resource
import shutil
import signal
import sys
import threading
import time
import weakref
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from command import rtcwm
from media import planes, scene, small_h3, write_clip_folder, write_conditions
from PIL import Image
from safetensors import safe_open
from small import CONFIG, random_adapter

from rtcwm.data import duv
from rtcwm.data.clips import read_clip
from rtcwm.data.codec import load_codec
from rtcwm.data.make import write_world
from rtcwm.data.world import Film, stacked
from rtcwm.engine import carrier
from rtcwm.engine.settings import shipped_config
from rtcwm.errors import UserError
from rtcwm.model.adapter_files import load_adapter, save_adapter
from rtcwm.model.attention import install
from rtcwm.model.kernels import resolve
from rtcwm.model.loading import build_base, embedded_adapter, open_base
from rtcwm.model.lora import AdapterShape, inject
from rtcwm.model.sampler import rollout
from rtcwm.model.schedule import SamplerConfig
from rtcwm.prepare.run import open_models
from rtcwm.prepare.run import run as prepare_clips
from rtcwm.prepare.settings import Settings as Preparation
from rtcwm.prepare.vae import PIXEL_MEAN, PIXEL_STD, VideoCodec
from rtcwm.stream import open_stream, run
from rtcwm.stream.command import Settings
from rtcwm.stream.film import GrowingFilm, boxes
from rtcwm.stream.proxies import END, ClipProxies, RootProxies
from rtcwm.stream.vae import VaePixels
from rtcwm.train.dataset import load_window
from rtcwm.train.inference import clip_noise, conditions

CPU = torch.device("cpu")
SEED, CHUNKS, HEIGHT, WIDTH = 3, 8, 64, 96
FEW = dict(kind="few", steps=2, shift=4.0, history="last-step")


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """A clip of the embedded world, 96 x 64, with start frames 0 and 2."""
    root = tmp_path_factory.mktemp("world") / "clips"
    write_world(root, 1, CHUNKS, SEED, HEIGHT, WIDTH, starts=(0, 2), episodes=1, processes=1)
    return read_clip(root / "clip_000000_0")


def rolled_out(source, adapter: Path | None, window, root, proxy, name, seed=0) -> torch.Tensor:
    """Latents `[24, 5 n, h, w]` of a stream, by the sampler's own rollout on a base built here."""
    kernel = resolve("sdpa", CPU)
    base = build_base(source, CPU, torch.float32)
    install(base, kernel)
    run = inject(base).runner(load_adapter(adapter, source.config) if adapter else None)
    config = SamplerConfig(steps=2, shift=4.0)
    stops = [1] * (proxy.shape[2] // 5)
    with torch.no_grad():
        made = rollout(base, kernel, conditions(window, root), proxy, config, clip_noise(seed, [name]), stops, run=run)
    return torch.cat(made, dim=2)[0]


@pytest.fixture(scope="module")
def expected(clip) -> np.ndarray:
    """Frames of the stream of the whole clip."""
    window = load_window(clip, 0, 0, chunks=CHUNKS)
    made = rolled_out(open_base("embedded"), embedded_adapter(), window, clip.path.parent, window.proxy, clip.id)
    return load_codec().decode(made)


def flags(**settings: object) -> list[str]:
    return [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def read_film(path: Path) -> tuple[np.ndarray, list[float]]:
    """Frames uint8 `[n, H, W, 3]` of a film, and the second at which each stands."""
    with av.open(str(path)) as file:
        frames = list(file.decode(video=0))
        assert file.streams.video[0].average_rate == 24
    return np.stack([frame.to_ndarray(format="rgb24") for frame in frames]), [frame.time for frame in frames]


def psnr(one: np.ndarray, other: np.ndarray) -> float:
    return -10 * np.log10(((one.astype(float) - other) ** 2).mean() / 255**2)


@pytest.fixture
def written(monkeypatch) -> list[np.ndarray]:
    """The pieces of frames that films were given, in order; the films are written all the same."""
    pieces, write = [], GrowingFilm.write
    monkeypatch.setattr(GrowingFilm, "write", lambda film, frames: (pieces.append(frames), write(film, frames))[1])
    return pieces


def kinds(path: Path) -> list[bytes]:
    return [kind for kind, _ in boxes(path.read_bytes())]


# Frames


def test_frames_are_those_of_a_rollout(clip, expected):
    with open_stream(adapter="released", clip=str(clip.path), device="cpu", **FEW) as stream:
        assert (stream.height, stream.width, stream.proxy_size, stream.late) == (64, 96, (16, 32), 0)
        pieces = list(stream.over(ClipProxies(clip, 0, None)))
        with pytest.raises(RuntimeError, match="finished"):
            stream.next(pieces)
    assert [piece.shape for piece in pieces] == [(17, 64, 96, 3)] * CHUNKS and pieces[0].dtype == np.uint8
    assert np.abs(np.concatenate(pieces).astype(int) - expected).max() <= 1  # half a step may round either way


def test_another_start_frame_and_seed(clip, expected):
    with open_stream(adapter="released", clip=clip.path, start=2, seed=5, device="cpu", **FEW) as stream:
        found = np.concatenate(list(stream.over(ClipProxies(clip, 2, 2))))
    window = load_window(clip, 2, 2, chunks=2)
    source = open_base("embedded")
    made = rolled_out(source, embedded_adapter(), window, clip.path.parent, window.proxy, clip.id, seed=5)
    assert np.abs(found.astype(int) - load_codec().decode(made)).max() <= 1
    assert psnr(found, expected[34:68]) < 35


def rendered(chunks: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """First picture, depth and ids of the clip's world, at four times the proxy's size."""
    film = Film(SEED, 0, 0, HEIGHT, WIDTH)
    looks = [film.scene.look(pose, 64, 128, film.aspect) for pose in film.poses(0, 17 * chunks)]
    return film.render(0, 1)[0].rgb[0], *stacked([(hits.depth, ids) for hits, ids in looks])


@pytest.fixture(scope="module")
def world_root(tmp_path_factory, clip) -> Path:
    """Three chunks of the clip's proxies as a condition root, with its first frame beside and its caption."""
    folder = tmp_path_factory.mktemp("root")
    picture, depth, ids = rendered(3)
    write_conditions(folder / "conditions", depth, ids)
    Image.fromarray(picture).save(folder / "first.png")
    with safe_open(clip.start_file(0), framework="pt") as file:
        (folder / "caption.txt").write_text(file.metadata()["caption"])
    return folder


def test_a_program_feeds_latents_pictures_or_depth_and_ids(clip, world_root):
    """The same stream from a prepared clip and from what it was rendered from, whatever a chunk comes as."""
    picture, depth, ids = rendered(3)
    caption = (world_root / "caption.txt").read_text()
    latents = load_window(clip, 0, 0, chunks=3).proxy[0].split(5, dim=1)
    pictures = duv.encode(depth[17:34], ids[17:34], 16, 32)
    given = [(depth[:17], ids[:17]), pictures, latents[2]]
    with open_stream(adapter="released", picture=picture, prompt=caption, device="cpu", **FEW) as stream:
        assert torch.equal(stream.encode_proxy(given[0]), latents[0])
        assert torch.equal(stream.encode_proxy(pictures), latents[1])
        for bad, message in (
            (latents[0][:, :4], r"\[24, 5, 1, 2\], found \[24, 4, 1, 2\]"),
            ((depth[:16], ids[:16]), "17 frames, found 16"),
            ((depth[:17, :50], ids[:17, :50]), "whole blocks"),
            (pictures[:, :, :16], r"\[17, 16, 32, 3\], found uint8 \[17, 16, 16, 3\]"),
            (np.zeros_like(pictures), "another DUV convention"),
        ):
            with pytest.raises(UserError, match=message):
                stream.next(bad)
        found = np.concatenate([stream.next(proxy) for proxy in given])
        assert stream.chunk == 3 and len(stream.finish()) == 0
    window = load_window(clip, 0, 0, chunks=3)
    made = rolled_out(open_base("embedded"), embedded_adapter(), window, None, window.proxy, "stream")
    assert np.abs(found.astype(int) - load_codec().decode(made)).max() <= 1


def test_a_closed_stream_lets_go_of_its_weights(clip):
    """At once, without a run of the collector by chance: another stream may need their place."""
    gc.collect()
    gc.disable()
    try:
        with open_stream(adapter="released", clip=clip.path, device="cpu", **FEW) as stream:
            stream.next(next(iter(ClipProxies(clip, 0, 1))))
            held = [weakref.ref(weight) for weight in stream._stream.model.parameters()]
        assert held and not any(weight() is not None for weight in held)
    finally:
        gc.enable()


@pytest.mark.parametrize("more", [dict(adaln="table"), dict(base_config=shipped_config("base_cpu"))])
def test_other_ways_to_hold_the_base(clip, expected, more, tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0" if "RANK" in name else "1")  # put back afterwards
        monkeypatch.delenv(name)
    given = dict(adapter="released", clip=clip.path, device="cpu", adaln_dir=str(tmp_path)) | FEW | more
    with open_stream(**given) as stream:
        found = np.concatenate([stream.next(proxy) for proxy in ClipProxies(clip, 0, 2)])
    assert np.abs(found.astype(int) - expected[:34]).max() <= 1
    assert len(list(tmp_path.glob("*.safetensors"))) == ("adaln" in more)


def test_a_base_in_host_memory_times_no_waits(clip, expected, tmp_path, monkeypatch):
    """They are timed by pairs of events, which would pile up for as long as a stream runs."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0" if "RANK" in name else "1")  # put back afterwards
        monkeypatch.delenv(name)
    config, made = tmp_path / "base.json", []
    zero = {"stage": 3, "offload_param": {"device": "cpu"}}
    config.write_text(json.dumps({"shard_group": 1, "prefetch": True, "zero_optimization": zero}))

    class Seen(carrier.Carrier):
        def __init__(self, *given, **more):
            super().__init__(*given, **more)
            made.append(self)

    monkeypatch.setattr(carrier, "Carrier", Seen)
    with open_stream(adapter="released", clip=clip.path, device="cpu", base_config=config, **FEW) as stream:
        found = np.concatenate([stream.next(proxy) for proxy in ClipProxies(clip, 0, 2)])
    assert np.abs(found.astype(int) - expected[:34]).max() <= 1
    (seen,) = made
    assert seen.fetches > 0 and not seen.side.measuring


# Films


def test_the_command(clip, expected, tmp_path, monkeypatch, capsys, written):
    out, log = tmp_path / "film.mp4", tmp_path / "film.json"
    where = flags(adapter="released", clip=clip.path, device="cpu", out=out, report=log)
    assert rtcwm(monkeypatch, "stream", *where, *flags(**FEW)) == 0
    frames, times = read_film(out)
    assert np.abs(np.concatenate(written).astype(int) - expected).max() <= 1
    assert frames.shape == (17 * CHUNKS, HEIGHT, WIDTH, 3)
    assert times == pytest.approx([k / 24 for k in range(17 * CHUNKS)])
    assert psnr(frames, expected) > 32
    assert kinds(out)[:2] == [b"ftyp", b"moov"] and b"moof" not in kinds(out)  # an ordinary file, its index in front
    with av.open(str(out)) as file:
        stream = file.streams.video[0]
        assert stream.frames == 17 * CHUNKS and file.duration == pytest.approx(17 * CHUNKS / 24 * 1e6, abs=1e3)
        assert len(file.streams) == 1
    said = capsys.readouterr().out
    assert all(f"\nchunk {chunk}: " in said for chunk in range(CHUNKS)) and "x real time; steady" in said
    told = json.loads(log.read_text())
    assert [lap["chunk"] for lap in told["chunks"]] == list(range(CHUNKS)) and told["frames"] == 17 * CHUNKS
    for lap in told["chunks"]:
        parts = sum(lap[part] for part in ("proxy", "denoise", "decode", "write"))
        assert lap["seconds"] == pytest.approx(parts) and min(lap.values()) >= 0 and lap["denoise"] > 0
    mean = sum(lap["seconds"] for lap in told["chunks"][6:]) / (CHUNKS - 6)
    assert told["steady"] == pytest.approx({"from_chunk": 6, "seconds_a_chunk": mean, "speed": 17 / 24 / mean})
    assert told["sampling"]["steps"] == 2 and told["sampling"]["solver"] == "renoise"
    # Once more: not over it unless told to, and then the same film.
    assert rtcwm(monkeypatch, "stream", *where, *flags(**FEW)) == 2 and "--overwrite" in capsys.readouterr().err
    assert rtcwm(monkeypatch, "stream", *where, *flags(**FEW), "--chunks", "2", "--overwrite") == 0
    again, _ = read_film(out)
    assert len(again) == 34 and psnr(again, expected[:34]) > 32


def test_a_film_plays_after_every_chunk(tmp_path):
    path, pieces = tmp_path / "f.mp4", np.split(scene(51, 64, 96), 3)
    film = GrowingFilm(path, 64, 96)
    for count, piece in enumerate(pieces, start=1):
        film.write(piece)
        frames, times = read_film(path)
        assert len(frames) == 17 * count and times == pytest.approx([k / 24 for k in range(17 * count)])
        assert psnr(frames, np.concatenate(pieces[:count])) > 25
    assert kinds(path) == [b"ftyp", b"moov", *[b"moof", b"mdat"] * 3]
    with av.open(str(path)) as file:
        assert next(file.decode(video=0)).colorspace == 1  # BT.709
    watched = path.open("rb")
    assert film.finish() is None and b"moof" not in kinds(path)
    assert np.array_equal(read_film(path)[0], frames)  # copied, not coded again
    assert b"moof" in watched.read()  # who reads the growing film still does
    watched.close()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["f.mp4"]
    # An old film stays whole until there is a chunk to replace it, a new one that holds nothing goes.
    replacing = GrowingFilm(path, 64, 96, overwrite=True)
    assert np.array_equal(read_film(path)[0], frames)
    replacing.write(pieces[2])
    assert psnr(read_film(path)[0], pieces[2]) > 25
    replacing.close()
    GrowingFilm(tmp_path / "none.mp4", 64, 96).close()
    assert not (tmp_path / "none.mp4").exists()


def test_a_full_disk_leaves_the_chunks_before(tmp_path, monkeypatch):
    path, pieces = tmp_path / "f.mp4", np.split(scene(34, 64, 96), 2)
    film = GrowingFilm(path, 64, 96)
    film.write(pieces[0])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 200, limits[1]))
    try:
        with pytest.raises(UserError, match="its first 17 frames stay"):
            film.write(pieces[1])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(read_film(path)[0]) == 17
    film.write(pieces[1])
    assert len(read_film(path)[0]) == 34
    film.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_what_a_signal_leaves(clip, expected, number, tmp_path):
    """Killed, the chunks that were done play; asked to end, the film is an ordinary one."""
    out, log = tmp_path / "film.mp4", tmp_path / "log"
    settings = Settings(adapter="released", clip=clip.path, device="cpu", out=out, **FEW)
    child = os.fork()
    if not child:
        sys.stdout = log.open("w", buffering=1)
        os._exit(run.stream(settings))
    try:
        began = time.monotonic()
        while not log.exists() or "chunk 1: " not in log.read_text():
            assert time.monotonic() - began < 60
            time.sleep(0.01)
    finally:
        os.kill(child, number)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    frames, _ = read_film(out)
    assert 34 <= len(frames) < len(expected) and len(frames) % 17 == 0
    assert psnr(frames, expected[: len(frames)]) > 32
    killed = number == signal.SIGKILL
    assert status == (-signal.SIGKILL if killed else 130) and (b"moof" in kinds(out)) == killed
    assert ("as asked" in log.read_text()) != killed


# The VAE of MiniMax-H3, and a condition root from end to end


def test_chunks_decode_to_what_the_whole_stream_does():
    codec = VideoCodec(small_h3() / "vae", CPU, decoder=True)
    latents = torch.randn(24, 20, 2, 4, generator=torch.Generator().manual_seed(0))
    chunks = latents.split(5, dim=1)

    def whole(stream):
        wanted = (codec.mean + codec.std * stream)[None]
        with torch.no_grad():
            pixels = codec.vae.decode(wanted)[0][0].float()
        mean, std = (torch.tensor(values).view(3, 1, 1, 1) for values in (PIXEL_MEAN, PIXEL_STD))
        return ((pixels * std + mean).clamp(0, 1) * 255).round().byte().permute(1, 2, 3, 0).numpy()

    pixels = VaePixels(codec, (2, 4))
    made = [*(pixels.push(chunk) for chunk in chunks), pixels.finish()]
    assert [len(piece) for piece in made] == [0, 17, 17, 17, 17] and len(pixels.finish()) == 0
    every = whole(latents)
    assert np.array_equal(np.concatenate(made), every)
    # The end of a shorter stream is decoded without what would have followed: its last chunk alone differs.
    shorter = whole(latents[:, :15])
    assert np.array_equal(shorter[:34], every[:34]) and not np.array_equal(shorter[34:], every[34:51])
    # The first frames of a chunk are a fade from what the chunk before foresaw: a chunk alone has others.
    alone = codec.decode(latents[:, 5:12])
    assert np.array_equal(alone[5:], every[22:34]) and not np.array_equal(alone[:5], every[17:22])


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """A small MiniMax-H3 with a base that takes its text, an adapter, and the same material as a clip folder with a
    condition root and as the clip that was prepared of it."""
    folder = tmp_path_factory.mktemp("real")
    source = write_clip_folder(folder / "sources", "clip_000000_0", 55, "[0.00s] A square moves.\n[1.00s] Still.")
    shutil.rmtree(source / "proxy")
    write_conditions(source / "conditions", *planes(55, seed=4))
    models = open_models(small_h3(), None, None, 50)
    report, _ = prepare_clips(folder / "clips", [folder / "sources"], None, models, Preparation(), device="cpu")
    assert report.prepared == ["clip_000000_0"]
    (folder / "base.json").write_text(json.dumps(CONFIG | {"text_dim": 32}))
    base = open_base(str(folder / "base.json"))
    adapter = random_adapter(AdapterShape.of(base.config, rank=2), seed=1, size=0.2)
    said = {"base": base.fingerprint, "span": "6", "objective": "dmd", "steps": "2", "shift": "4.0"}
    save_adapter(folder / "dmd.safetensors", adapter, said | {"codec": models.codec_identity["hash"]})
    save_adapter(folder / "foreign.safetensors", adapter, said | {"base": "0" * 32})
    save_adapter(folder / "critic.safetensors", adapter, said | {"objective": "critic"})
    return folder


def from_root(real: Path) -> dict:
    given = real / "sources" / "clip_000000_0"
    return dict(
        conditions=given / "conditions", picture=given / "target" / "anchor.png", prompt=given / "prompt.txt",
        model=small_h3(), base=real / "base.json", adapter=real / "dmd.safetensors", device="cpu",
    )  # fmt: skip


def test_a_condition_root_streams_as_its_prepared_clip(real, tmp_path, monkeypatch, capsys, written):
    out = tmp_path / "film.mp4"
    assert rtcwm(monkeypatch, "stream", *flags(**from_root(real), out=out)) == 0
    said = capsys.readouterr().out
    assert "few, 2 steps, shift 4, history last-step" in said and "4 frames of" in said and "by 0.708 s" in said

    clip = read_clip(real / "clips" / "clip_000000_0")
    window = load_window(clip, 0, 0, chunks=3)
    source, adapter = open_base(str(real / "base.json")), real / "dmd.safetensors"
    codec = VideoCodec(small_h3() / "vae", CPU, decoder=True)

    def decoded(name):
        made = rolled_out(source, adapter, window, None, window.proxy, name)
        with torch.no_grad():
            pixels = codec.vae.decode((codec.mean + codec.std * made)[None])[0]
        return codec.frames(pixels)

    frames, _ = read_film(out)
    assert frames.shape == (51, 32, 64, 3) and psnr(frames, np.concatenate(written)) > 20  # noise, at half the chroma
    given = {name: value for name, value in from_root(real).items() if name != "conditions"}
    depth, ids = planes(55, seed=4)
    with open_stream(**given | {"prompt": str(given["prompt"])}) as stream:
        chunks = ((depth[at : at + 17], ids[at : at + 17]) for at in (0, 17, 34))
        pieces = [stream.next(chunk) for chunk in chunks]
        assert [len(piece) for piece in pieces] == [0, 17, 17]
        found = np.concatenate([*pieces, stream.finish()])
    assert np.abs(found.astype(int) - decoded("stream")).max() <= 1
    assert np.array_equal(found, np.concatenate(written))  # the iterator's frames are the command's

    with open_stream(
        adapter=str(adapter), clip=clip.path, model=small_h3(), base=str(real / "base.json"), device="cpu"
    ) as stream:
        pieces = list(stream.over(ClipProxies(clip, 0, None)))
    assert np.abs(np.concatenate(pieces).astype(int) - decoded(clip.id)).max() <= 1


# Growing condition roots


def feed(root: Path, whole: Path, numbers, pause: float, before=lambda number: None) -> threading.Thread:
    """Copies frames into a root, one after the other, the PNG in two halves."""

    def copy() -> None:
        for number in numbers:
            time.sleep(pause)
            before(number)
            picture = (whole / f"{number:06d}.semantic_id.png").read_bytes()
            target = root / f"{number:06d}.semantic_id.png"
            target.write_bytes(picture[:30])
            shutil.copy(whole / f"{number:06d}.depth.f32", root)
            time.sleep(pause)
            target.write_bytes(picture)
        (root / END).touch()

    thread = threading.Thread(target=copy)
    thread.start()
    return thread


def test_a_growing_root_is_followed(world_root, tmp_path, monkeypatch, capsys, written):
    whole, root = world_root / "conditions", tmp_path / "growing"
    root.mkdir()
    given = dict(adapter="released", picture=world_root / "first.png", prompt=world_root / "caption.txt", device="cpu")
    given |= dict(conditions=root, out=tmp_path / "grown.mp4", follow_seconds=20, report=tmp_path / "r.json")
    thread = feed(root, whole, range(38), 0.01)
    assert rtcwm(monkeypatch, "stream", *flags(**given, **FEW), "--follow") == 0
    thread.join()
    said = capsys.readouterr().out
    assert "END is there after frame 37; 4 frames are left over" in said and "as long as proxies come" in said
    assert json.loads((tmp_path / "r.json").read_text())["frames"] == 34
    given |= dict(conditions=whole, out=tmp_path / "whole.mp4")
    assert rtcwm(monkeypatch, "stream", *flags(**given, **FEW), "--chunks", "2") == 0
    grown, whole = (np.concatenate(half) for half in (written[:3], written[3:]))  # with the last frames, none
    assert np.array_equal(grown, whole) and psnr(read_film(tmp_path / "grown.mp4")[0], grown) > 32


def test_a_root_that_stops_growing(world_root, tmp_path):
    whole, root = world_root / "conditions", tmp_path / "growing"
    root.mkdir()
    taken = RootProxies(root, (16, 32), None, follow=0.2)
    assert list(taken) == [] and "no new frame came for 0.2 s" in taken.note and taken.waited >= 0.2
    thread = feed(root, whole, [*range(17), *range(18, 20)], 0)
    thread.join()
    (root / END).unlink()
    taken = RootProxies(root, (16, 32), 2, follow=0.1)
    assert len(list(taken)) == 1
    assert "frame 000017 is missing or not whole, though the next one is there" in taken.note
    assert "--chunks asked for 2" in taken.note
    taken = RootProxies(root, (16, 32), None, follow=60, stopped=lambda: True)
    assert len(list(taken)) == 1 and "stopped after frame 16" in taken.note
    shutil.copy(whole / "000017.semantic_id.png", root)  # its depth is shorter than the others'
    (root / "000017.depth.f32").write_bytes(b"\0" * 100)
    taken = RootProxies(root, (16, 32), None, follow=0.1)
    assert len(list(taken)) == 1 and "frame 000017" in taken.note
    with pytest.raises(UserError, match="no whole multiple of the proxy's 48x48"):
        list(RootProxies(root, (48, 48), None, follow=0.1))


# Faults


FAULTS = {
    "no adapter": (dict(adapter="nowhere.safetensors"), "there is no such file"),
    "wrong base": (
        dict(
            adapter="{real}/foreign.safetensors", clip="{real}/clips/clip_000000_0", base="{real}/base.json",
            model="{h3}",
        ),
        "trained on base 0000",
    ),
    "shape of another base": (dict(adapter="{real}/dmd.safetensors"), "dmd.safetensors"),
    "critic": (dict(adapter="{real}/critic.safetensors"), "critic"),
    "released elsewhere": (dict(base="{real}/base.json"), "'released' names the embedded"),
    "too few chunks": (dict(chunks=9), "proxies for 8 chunks from start frame 0 on"),
    "too few after the start": (dict(chunks=7, start=2), "6 chunks from start frame 2 on"),
    "no chunks": (dict(chunks=0), "--chunks 0: expected at least 1"),
    "no start frame": (dict(start=1), "has start frames 0, 2"),
    "no clip": (dict(clip="nowhere"), "not a folder"),
    "no start at all": (dict(clip=None), "--clip"),
    "both starts": (dict(picture="{root}/first.png", prompt="a"), "name one of them"),
    "picture without prompt": (dict(clip=None, picture="{root}/first.png"), "--prompt"),
    "picture without proxies": (dict(clip=None, picture="{root}/first.png", prompt="a"), "go together"),
    "prompt of a clip": (dict(prompt="a"), "--prompt goes with --picture"),
    "codec without a model": (
        dict(clip="{real}/clips/clip_000000_0", base="{real}/base.json", adapter="none"),
        "--model",
    ),
    "another text": (dict(base="{real}/base.json", adapter="none"), "width 64, the base .* takes 32"),
    "existing film": (dict(out="{root}/there.mp4"), "--overwrite"),
    "no folder for the film": (dict(out="{root}/nowhere/film.mp4"), "cannot be written"),
    "a file for a folder": (dict(out="{root}/first.png/film.mp4"), "cannot be written"),
    "another kind of film": (dict(out="{root}/film.mkv"), "expected the name of an .mp4"),
    "no folder for the report": (dict(report="{root}/nowhere/r.json"), "make it first"),
    "history": (dict(history="soft"), "--history is 'soft'"),
    "steps": (dict(steps=0), "0 steps"),
    "one step": (dict(steps=1), "set history to clean"),
    "following a clip": (dict(follow="true"), "--follow waits for files of --conditions"),
    "seed": (dict(seed=-1), "--seed -1"),
    "a base that the host cannot hold": (
        dict(base="{root}/huge.json", adapter="none"), r"in fp32 takes [\d.]+ GiB of host memory, .*--base embedded"
    ),
    "nor in a base engine": (
        dict(base="{root}/huge.json", adapter="none", base_config=shipped_config("base_cpu")), "GiB of host memory",
    ),
}  # fmt: skip
ROOT_FAULTS = {
    "proxies of another size": (dict(proxy_size="48x48"), "no whole multiple of the proxy's 48x48"),
    "too few proxies": (dict(chunks=4), "has 51 frames, which are 3 whole chunks of 17, and --chunks asks for 4"),
    "no root": (dict(conditions="nowhere"), "not a folder"),
    "an empty root": (dict(conditions="{root}"), "holds no %06d.depth.f32"),
    "no picture": (dict(picture="nowhere.png"), "cannot be read as a picture"),
    "a picture's size": (dict(size="100x64"), "multiples of 32"),
    "no prompt file": (dict(prompt="nowhere.txt"), "there is no such file"),
    "a model without text": (dict(model="{real}", base="embedded"), "vae is not a folder: --model"),
}


@pytest.mark.parametrize("name", [*FAULTS, *ROOT_FAULTS])
def test_faults_are_one_line_and_code_2(clip, real, world_root, name, tmp_path, monkeypatch, capsys):
    change, message = (FAULTS | ROOT_FAULTS)[name]
    given = dict(adapter="released", clip=clip.path, device="cpu", out=tmp_path / "film.mp4") | FEW
    if name in ROOT_FAULTS:
        given |= dict(clip=None, conditions=world_root / "conditions", picture=world_root / "first.png", prompt="a b")
    (world_root / "there.mp4").touch()
    (world_root / "huge.json").write_text('{"ffn_dim": 1000000000}')  # all else is the release's
    given |= change
    words = {
        key: str(value).format(real=real, root=world_root, h3=small_h3())
        for key, value in given.items()
        if value is not None
    }
    code = rtcwm(monkeypatch, "stream", *flags(**words))
    said = capsys.readouterr()
    assert code == 2
    lines = said.err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("rtcwm: error: ")
    assert re.search(message, lines[0]), lines[0]
    assert not (tmp_path / "film.mp4").exists() and "chunk 0" not in said.out
