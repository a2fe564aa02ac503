"""`rtcwm prepare` from files to clips: what is written, resuming, killing, several processes, refusals, full disks."""

import json
import os
import pickle
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from media import planes, scene, small_h3, write_clip_folder, write_conditions, write_duv, write_video
from PIL import Image
from safetensors import safe_open
from worlds import edit, tensors

from rtcwm.data import duv
from rtcwm.data.clips import open_clips
from rtcwm.errors import UserError
from rtcwm.prepare.command import main_prepare
from rtcwm.prepare.folder import open_folder
from rtcwm.prepare.report import NAME as REPORT
from rtcwm.prepare.report import Progress, Report
from rtcwm.prepare.run import open_models, run
from rtcwm.prepare.settings import Settings
from rtcwm.prepare.text import TextEncoder
from rtcwm.prepare.vae import VideoCodec
from rtcwm.prepare.video import probe, read
from rtcwm.train.dataset import load_window

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def models():
    return open_models(small_h3(), None, None, 50)


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """Three clip folders of two episodes and one with condition files; 40 frames, two chunks and six over."""
    root = tmp_path_factory.mktemp("sources")
    for index, name in enumerate(("clip_000000_0", "clip_000000_1", "batch/clip_000001_0")):
        write_clip_folder(root, name, 40, "[0.00s-1.60s] It moves.\n[1.00s-1.60s] Late.", seed=index)
    write_video(root / "seg_000007" / "video.mp4", scene(50, seed=3), 25)
    write_conditions(root / "seg_000007" / "duv", *planes(48, seed=3))
    return root


def prepare(out, sources, models, **settings):
    return run(out, [Path(sources)], None, models, Settings(**{"starts": "every:1"} | settings), device="cpu")


@pytest.fixture(scope="module")
def prepared(tree, models, tmp_path_factory) -> Path:
    """The clips of the tree, made in one go; not to be written to."""
    out = tmp_path_factory.mktemp("prepared") / "clips"
    report, _ = prepare(out, tree, models)
    assert not report.refused and len(report.prepared) == 4 and report.stopped is None
    return out


def content(out: Path) -> dict[str, bytes]:
    """All files of a folder of clips but the report and the lock, by name."""
    files = (file for file in sorted(out.rglob("*")) if file.is_file() and file.name not in (REPORT, ".prepare.lock"))
    return {str(file.relative_to(out)): file.read_bytes() for file in files}


def test_clips_hold_what_their_files_encode_to(tree, prepared, models):
    clips = open_clips(prepared)
    assert [(clip.id, clip.episode, clip.chunks, clip.starts) for clip in clips] == [
        ("clip_000000_0", "000000", 2, (0, 1)), ("clip_000000_1", "000000", 2, (0, 1)),
        ("clip_000001_0", "000001", 2, (0, 1)), ("seg_000007", "seg_000007", 2, (0, 1)),
    ]  # fmt: skip
    codec = VideoCodec(models.vae, torch.device("cpu"))
    text = TextEncoder(models.text_encoder, models.tokenizer, models.processor, 50, torch.device("cpu"))
    folder, clip = tree / "clip_000000_1", clips[1]
    chunks = list(read(probe(folder / "target" / "rgb.mp4"), 2))
    pictures = duv.encode(*planes(40, seed=1))  # the video is lossless
    stream = tensors(clip.path / "stream.safetensors")
    assert torch.equal(stream["video"], torch.cat([codec.encode_target(chunk) for chunk in chunks], 1).half())
    assert torch.equal(
        stream["proxy"], torch.cat([codec.encode_proxy(pictures[at : at + 17]) for at in (0, 17)], 1).half()
    )
    anchor = np.array(Image.open(folder / "target" / "anchor.png"))
    captions = {
        0: "[0.00s-1.60s] It moves.\r\n[1.00s-1.60s] Late.",
        1: "[0.00s-0.89s] It moves.\r\n[0.29s-0.89s] Late.",  # 17 / 24 = 0.708 s later
    }
    for start, picture in ((0, anchor), (1, chunks[1][0])):
        found = tensors(clip.start_file(start))
        assert torch.equal(found["picture1_native"], codec.encode_picture(picture).half())
        rows, tags = text.encode(captions[start], Image.fromarray(picture))
        assert torch.equal(found["text"], rows) and torch.equal(found["text_tags"], tags)
        with safe_open(clip.start_file(start), framework="pt") as file:
            assert file.metadata()["caption"] == captions[start]
    window = load_window(clip, 0, 1, chunks=2)
    assert window.video.shape == (1, 24, 10, 2, 4) and window.proxy.shape == (1, 24, 10, 2, 2)


def test_what_was_done_is_said_and_recorded(prepared):
    report = json.loads((prepared / REPORT).read_text())
    assert report["prepared"] == ["clip_000000_0", "clip_000000_1", "clip_000001_0", "seg_000007"]
    resampled, cut, caption = report["notes"]["seg_000007"]
    assert resampled == (
        "target: 25.000 frames a second resampled to 24 by nearest time: 48 frames of 50, 2 left out, 0 repeated"
    )
    assert cut == "cut to 2 whole chunks (34 frames): 14 frames of the target and 14 of the proxy left over"
    assert caption == "no caption: the text is empty"
    description = json.loads((prepared / "seg_000007" / "clip.json").read_text())
    assert description["prepared"]["notes"] == [resampled, cut, caption]
    assert description["text_encoder"]["name"] == "qwen3-vl[50]" and description["codec"]["name"] == "minimax-h3-vae"
    assert description["prepared"]["settings"]["starts"] == "every:1"


def test_remarks_that_differ_in_numbers_alone_are_one_line(tmp_path, capsys):
    report, scaled = Report(), "target scaled from 150x90"
    report.note("b", ["cut to 3 whole chunks (51 frames): 4 frames left over", scaled])
    report.note("a", ["cut to 2 whole chunks (34 frames): 0 frames left over", scaled])
    report.note(
        "c", ["the anchor is unlike frame 0 (PSNR 12.5 dB)", "cut to 2 whole chunks (34 frames): 0 frames left over"]
    )
    report.print(tmp_path)
    assert capsys.readouterr().out.splitlines()[:-1] == [
        "prepare: 3 clip(s), as a: cut to 2 whole chunks (34 frames): 0 frames left over (other numbers in "
        "prepare_report.json)",
        "prepare: 2 clip(s), as a: target scaled from 150x90",
        "prepare: 1 clip(s), as c: the anchor is unlike frame 0 (PSNR 12.5 dB)",
    ]


def test_what_is_done_is_kept_and_what_changed_is_made_again(tree, prepared, models, tmp_path):
    out, sources = tmp_path / "clips", tmp_path / "sources"
    shutil.copytree(prepared, out)
    shutil.copytree(tree, sources)
    flag = {"first_chunk": 1, "last_chunk": 1, "reason": "blurred"}
    edit(out / "clip_000000_0" / "clip.json", flagged=[flag])
    (sources / "clip_000000_0" / "prompt.txt").write_text("[0.00s] Another text.")
    kept = (out / "clip_000000_1").stat().st_ino
    (out / "clip_000001_0" / "start_1.safetensors").write_bytes(b"torn")
    (out / ".clip_000001_0.writing-7").mkdir()
    report, _ = prepare(out, sources, models)
    assert (report.kept, report.prepared) == (["clip_000000_1", "seg_000007"], ["clip_000000_0", "clip_000001_0"])
    assert (out / "clip_000000_1").stat().st_ino == kept
    assert open_clips(out)[0].flagged == {1: "blurred"}  # the same frames: quality control's word stands
    again = content(out)
    assert {name for name, value in content(prepared).items() if again[name] != value} == {
        "manifest.json", "clip_000000_0/clip.json", "clip_000000_0/start_0.safetensors",
        "clip_000000_0/start_1.safetensors",
    }  # fmt: skip
    assert set(again) == set(content(prepared))
    report, _ = prepare(out, sources, models, starts="0", picture1_2048=False)
    assert len(report.prepared) == 4 and {clip.starts for clip in open_clips(out)} == {(0,)}


def forked(action, limit=None) -> int:
    """Process id of a child that runs `action`; `limit` bounds the bytes of a file it may write."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 3
    try:
        if limit:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        action()
        code = 0
    finally:
        os._exit(code)


def test_a_killed_preparation_ends_in_the_same_files(tree, prepared, models, tmp_path):
    """Kills at random moments, and at those that matter: while a folder is written, just after one is done."""
    out, random = tmp_path / "clips", np.random.default_rng(5)
    moments = [lambda: any(out.glob(".*.writing-*")), lambda: any(out.glob("clip_*"))]
    midway = 0
    for turn in range(5):
        child = forked(lambda: prepare(out, tree, models))
        begun, wait = time.monotonic(), float(random.uniform(0.05, 0.8))
        reached = moments[turn] if turn < len(moments) else lambda: time.monotonic() - begun > wait
        before = len(list(out.glob("*/clip.json")))
        while not (reached() or (turn < len(moments) and len(list(out.glob("*/clip.json"))) > before)):
            if os.waitpid(child, os.WNOHANG)[0]:
                break
            time.sleep(0.0005)
        else:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        midway += 0 < len(list(out.glob("*/clip.json"))) < 4
    report, _ = prepare(out, tree, models)
    assert midway and len(report.kept) + len(report.prepared) == 4
    assert content(out) == content(prepared)


@pytest.mark.parametrize("limit", [1500, 4500])  # of a file: no stream fits, nor a start frame's file; no stream
def test_a_full_disk_stops_with_nothing_half_done(tree, prepared, models, tmp_path, limit):
    out, told = tmp_path / "clips", tmp_path / "told"

    def fill():
        report, _ = prepare(out, tree, models)
        told.write_text(report.stopped or "")

    assert os.waitpid(forked(fill, limit), 0)[1] == 0
    assert "cannot write" in told.read_text() and "make room, then start the same command again" in told.read_text()
    assert not list(out.glob("*/")) and not list(out.glob(".*.writing-*"))
    prepare(out, tree, models)
    assert content(out) == content(prepared)


def ended(process: psutil.Process) -> bool:
    """Whether a process ended, also one that nobody has waited for, as an orphan in a container may be."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def deaf_to_interrupts(process: int) -> bool:
    """Whether it has Ctrl-C, the second signal, blocked or ignored."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    return any(int(status[mask], 16) & 2 for mask in ("SigBlk", "SigIgn"))


def test_two_processes_make_the_same_files_and_leave_with_a_killed_parent(tree, prepared, tmp_path, capsys):
    out, sources = tmp_path / "clips", tmp_path / "sources"
    shutil.copytree(tree, sources)
    write_clip_folder(sources, "clip_000009_0", 16)  # less than a chunk: refused
    flags = ["--out", str(out), "--source+", str(sources), "--model", str(small_h3()), "--starts", "every:1"]
    command = [sys.executable, "-m", "rtcwm.cli", "prepare", *flags, "--device", "cpu", "--workers", "2"]
    first = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE)
    while first.poll() is None and not list(out.glob("*/clip.json")):
        time.sleep(0.002)
    workers = psutil.Process(first.pid).children(recursive=True)
    assert all(deaf_to_interrupts(worker.pid) for worker in workers)
    first.kill()
    first.communicate()
    assert len(workers) >= 2
    assert not [worker for worker in psutil.wait_procs(workers, timeout=20)[1] if not ended(worker)]
    made = {str(path.parent.name): path.stat().st_ino for path in out.glob("*/clip.json")}
    with pytest.raises(SystemExit, match="1"):
        main_prepare(out=out, source=[str(sources)], model=small_h3(), starts="every:1", device="cpu", check=2)
    assert {name: (out / name / "clip.json").stat().st_ino for name in made} == made  # by the workers, and kept
    picture = (out / "prepare_check.png").read_bytes()
    assert content(out) == content(prepared) | {"prepare_check.png": picture}
    told = capsys.readouterr()
    assert "prepare: refused clip_000009_0" in told.err and "less than one chunk of 17" in told.err
    assert f"{4 - len(made)} clips prepared, {len(made)} already there, 1 refused" in told.out
    checked = [line.split() for line in told.out.splitlines() if line.startswith("check: ")]
    assert len(checked) == 2
    codec = VideoCodec(small_h3() / "vae", torch.device("cpu"), decoder=True)
    for _, place, _, decibels, *_ in checked:
        clip, chunk = place.split(":")
        (folder,) = (path for path in sources.rglob(clip) if path.is_dir())
        film = folder / "target" / "rgb.mp4"
        (given,) = read(probe(film if film.exists() else folder / "video.mp4"), 1)
        stream = tensors(out / clip / "stream.safetensors")["video"][:, :7]
        error = ((codec.decode(stream).astype(float) - given) ** 2).mean()
        assert chunk == "0" and float(decibels) == pytest.approx(10 * np.log10(255**2 / error), abs=0.01)
    with Image.open(out / "prepare_check.png") as drawn:
        assert drawn.size == (3 * (64 + 4), 8 * (20 + 32 + 4))


def link_target(folder: Path, outside: Path) -> None:
    (folder / "target" / "rgb.mp4").rename(outside)
    (folder / "target" / "rgb.mp4").symlink_to(outside)


def rewrite_duv(folder: Path, change) -> None:
    write_duv(folder / "proxy" / "duv.mp4", change(duv.encode(*planes(40))))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size * 2 // 3)


def as_conditions(folder: Path) -> None:
    (folder / "proxy" / "duv.mp4").unlink()
    write_conditions(folder / "duv", *planes(40))
    (folder / "duv" / "000020.depth.f32").unlink()


def rewrite_target(folder: Path, height: int, width: int) -> None:
    write_video(folder / "target" / "rgb.mp4", scene(40, height, width))


FAULTS = [
    (lambda folder, other: truncate(folder / "target" / "rgb.mp4"), "cannot be opened as a video"),
    (lambda folder, other: rewrite_target(folder, 34, 66), "is 66x34; .* multiples of 32"),
    (lambda folder, other: rewrite_target(folder, 96, 160), "is 160x96, but .* clips are 64x32"),
    (lambda folder, other: rewrite_duv(folder, lambda made: made[..., ::-1]), "red and blue swapped"),
    (lambda folder, other: rewrite_duv(folder, lambda made: made * 0 + 255), "near 0.1 m / far 8000 m, dark near"),
    (lambda folder, other: rewrite_duv(folder, lambda made: made[:20]), "target has 40 frames .* and the proxy 20"),
    (lambda folder, other: as_conditions(folder), "000020.depth.f32 is missing"),
    (lambda folder, other: link_target(folder, other / "rgb.mp4"), "the target .* leads out of .*copy it into"),
    (lambda folder, other: (folder / "target" / "rgb.mp4").unlink(), "has no target video"),
    (lambda folder, other: (folder / "proxy" / "duv.mp4").unlink(), "has no proxy"),
    (lambda folder, other: (folder / "target" / "anchor.png").write_bytes(b"x"), "anchor.png cannot be read"),
    (lambda folder, other: (folder / "clip_report.json").write_text('{"taxonomy": "standard11"}'), "standard11"),
    (lambda folder, other: (folder / "clip_report.json").write_text("[" * 9999), "not valid JSON .*mend or remove it"),
    (lambda folder, other: (folder / "clip_report.json").write_text("[1]"), r"holds \[1\], expected an object"),
    (lambda folder, other: (folder / "prompt.txt").write_bytes(b"\xff"), "cannot be read as a caption"),
    (lambda folder, other: shutil.copytree(folder, folder.parent / "again" / folder.name), "2 clips have this id"),
]


def test_every_fault_is_one_line_and_the_good_clips_are_made(tmp_path, models, capsys):
    sources, other = tmp_path / "sources", tmp_path / "other"
    other.mkdir()
    sample = write_clip_folder(tmp_path, "sample", 40)
    for index in range(len(FAULTS) + 2):
        shutil.copytree(sample, sources / f"clip_{index:06d}_0")
    for index, (damage, _) in enumerate(FAULTS):
        damage(sources / f"clip_{index:06d}_0", other)
    (sources / "linked").symlink_to(other, target_is_directory=True)
    report, _ = prepare(tmp_path / "clips", sources, models, starts="first")
    report.print(tmp_path / "clips")
    said = capsys.readouterr()
    lines = said.err.splitlines()
    count = len(FAULTS) + 4  # two good ones, the link, and the copy of one
    assert f"prepare: {count} clips found, 0 already there" in said.out
    for index, (_, message) in enumerate(FAULTS):
        told = [refusal for refusal in report.refused if refusal.clip == f"clip_{index:06d}_0"]
        assert told, message
        assert all(re.search(message, refusal.reason) for refusal in told), (message, told)
        assert sum(line.startswith(f"prepare: refused clip_{index:06d}_0 ") for line in lines) == len(told)
    assert [refusal.reason[:25] for refusal in report.refused if refusal.clip == "linked"] == [
        "is a symbolic link out of"
    ]
    good = [f"clip_{index:06d}_0" for index in (len(FAULTS), len(FAULTS) + 1)]
    assert report.prepared == good and [clip.id for clip in open_clips(tmp_path / "clips")] == good
    assert not report.traces and report.stopped is None


def test_a_manifest_line_by_line(tree, models, tmp_path, capsys):
    lines = [
        {"name": "one", "target": "clip_000000_0/target/rgb.mp4", "proxy_duv_video": "clip_000000_0/proxy/duv.mp4",
         "prompt": "[0.00s] A.\nB", "fps": 24},
        {"id": "two", "name": "x", "target": "seg_000007/video.mp4", "proxy_duv": "seg_000007/duv", "episode": "e"},
        {"name": "three", "target": "seg_000007/video.mp4"},
        {"name": "four", "target": "seg_000007/video.mp4", "proxy": "seg_000007/duv", "proxy_duv": "seg_000007/duv"},
        {"name": "../five", "target": "seg_000007/video.mp4", "proxy": "seg_000007/duv"},
        {"name": "six", "target": "/etc/hostname", "proxy": "seg_000007/duv"},
        {"target": "seg_000007/video.mp4", "proxy": "seg_000007/duv"},
        {"name": "eight", "target": "gone.mp4", "proxy": "seg_000007/duv"},
        {"name": "nine", "target": 7, "proxy": "seg_000007/duv"},
    ]  # fmt: skip
    manifest = tmp_path / "clips.jsonl"
    manifest.write_text("\n".join([json.dumps(line) for line in lines] + ["", "{"]))
    report, _ = run(tmp_path / "clips", [manifest], tree, models, Settings(starts="0,1,9"), device="cpu")
    assert report.prepared == ["one", "two"] and capsys.readouterr().out.count("with their clips: fps (1); known") == 1
    one, two = open_clips(tmp_path / "clips")
    assert (one.episode, two.episode, one.starts) == ("one", "e", (0, 1))
    with safe_open(one.start_file(1), framework="pt") as file:
        assert file.metadata()["caption"] == "[0.00s] A.\r\nB"
    told = {refusal.origin.rpartition(" ")[2]: refusal.reason for refusal in report.refused}
    for number, message in {
        "3": "has no proxy; expected exactly one of", "4": "has proxy and proxy_duv; expected exactly one",
        "5": "cannot name a folder", "6": "leads out of", "7": "neither `id` nor `name`", "8": "does not exist",
        "9": "`target` is 7, expected text", "11": "is not valid JSON",
    }.items():  # fmt: skip
        assert message in told[number], (number, told)


class Trap:
    """Unpickling it leaves a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("part, name", [("vae", "diffusion_pytorch_model"), ("text_encoder", "model")])
@pytest.mark.parametrize(
    "suffix, message", [("bin", "pickles that run code"), ("safetensors", "not a safetensors file")]
)
def test_a_pickle_is_refused_and_never_read(tmp_path, part, name, suffix, message):
    model = tmp_path / "h3"
    shutil.copytree(small_h3(), model)
    (model / part / f"{name}.safetensors").unlink()
    (model / part / f"{name}.{suffix}").write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    with pytest.raises(UserError, match=message):
        open_models(model, None, None, 50)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    "changed, message",
    [
        (dict(model="nowhere"), "is not a folder: --model nowhere has to be a diffusers-format"),
        (dict(source=["nowhere"]), "neither a folder nor a .jsonl manifest"),
        (dict(starts="every:0"), "--starts every:0: expected first, every:N"),
        (dict(size="1344"), "--size 1344: expected WIDTHxHEIGHT"),
        (dict(size="130x64"), "--size is 130x64; .* multiples of 32"),
        (dict(proxy_size="100x32"), "--proxy-size is 100x32; .* multiples of 16"),
        (dict(workers=0), "--workers 0: expected 1 or more"),
        (dict(text_layer=-1), "--text-layer -1: expected 0"),
        (dict(text_layer=60), None),
    ],
)
def test_bad_flags_are_told_before_work(tmp_path, changed, message):
    given = dict(out=tmp_path / "clips", source=[str(tmp_path)], model=small_h3(), device="cpu") | changed
    given["model"] = Path(given["model"])
    if message is None:
        write_clip_folder(tmp_path / "sources", "clip_000000_0", 17)
        given["source"], message = [str(tmp_path / "sources")], "52 layers; expected a qwen3_vl with more than 60"
    with pytest.raises(UserError, match=message):
        main_prepare(**given)
    assert not list((tmp_path / "clips").glob("*/"))


PARTS = [
    ("vae/config.json", "[", "vae/config.json is not valid JSON"),
    ("vae/config.json", "[]", r"vae/config.json holds \[\], expected the config of a model"),
    ("vae/config.json", '{"_class_name": "AutoencoderKL"}', "vae cannot be loaded"),
    ("text_encoder/model.safetensors.index.json", "{", "index.json is not valid JSON"),
    ("text_encoder/config.json", '{"model_type": "none"}', "text_encoder cannot be loaded"),
    ("tokenizer/tokenizer.json", None, r"tokenizer has image_pad token \d+, the text encoder reads"),
    ("processor/preprocessor_config.json", "{}", "processor has patch_size 14, the text encoder reads 16"),
]


@pytest.mark.parametrize("name, content, message", PARTS, ids=[f"{name} {text}" for name, text, _ in PARTS])
def test_parts_that_are_damaged_or_another_models_are_named(tree, tmp_path, name, content, message):
    model = shutil.copytree(small_h3(), tmp_path / "h3")
    if content is None:
        (model / name).unlink()
    else:
        (model / name).write_text(content)
    with pytest.raises(UserError, match=message):
        main_prepare(out=tmp_path / "clips", source=[str(tree / "batch")], model=model, device="cpu")
    assert not list((tmp_path / "clips").glob("*/"))


def test_a_folder_of_other_clips_or_of_another_preparation_is_refused(prepared, tree, models, tmp_path):
    out = tmp_path / "clips"
    shutil.copytree(prepared, out)
    edit(out / "seg_000007" / "clip.json", codec={"name": "other", "hash": "aa"})
    with pytest.raises(UserError, match="holds seg_000007 with codec .*'other'.* choose another folder"):
        prepare(out, tree / "batch", models)
    shutil.copytree(prepared / "seg_000007", out / "seg_000007", dirs_exist_ok=True)
    with pytest.raises(UserError, match="holds clip_000000_0 with system_prompt '', here it is 'Other.'"):
        prepare(out, tree / "batch", models, system_prompt="Other.")
    description = json.loads((out / "seg_000007" / "clip.json").read_text())
    del description["prepared"]
    (out / "seg_000007" / "clip.json").write_text(json.dumps(description))
    with pytest.raises(UserError, match="holds seg_000007, which `rtcwm prepare` did not write"):
        prepare(out, tree, models)


def test_sources_are_never_replaced_by_their_clips(models, tmp_path):
    """--out is the folder of the sources, whose clips have their names."""
    folder = write_clip_folder(tmp_path, "clip_000000_0", 17)
    before = content(tmp_path)
    with pytest.raises(UserError, match="clip_000000_0 holds prompt.txt, which is no part of a clip and would be lost"):
        prepare(tmp_path, tmp_path, models)
    assert content(tmp_path) == before
    prepare(tmp_path / "clips", tmp_path, models)
    shutil.copy(folder / "prompt.txt", tmp_path / "clips" / "clip_000000_0" / "mine.txt")
    with pytest.raises(UserError, match="holds mine.txt"):
        prepare(tmp_path / "clips", tmp_path, models, starts="every:1", text_dtype="float32")
    assert (tmp_path / "clips" / "clip_000000_0" / "mine.txt").exists()


def test_two_preparations_keep_out_of_each_others_way(prepared, tree, models, tmp_path):
    out = tmp_path / "clips"
    shutil.copytree(prepared, out)
    with open_folder(out), pytest.raises(UserError, match="another preparation is at work in"):
        prepare(out, tree, models)
    report, _ = prepare(out, tree, models)
    assert len(report.kept) == 4


def test_sizes_are_scaled_when_asked(tree, models, tmp_path):
    sources = tmp_path / "sources"
    shutil.copytree(tree / "clip_000000_0", sources / "clip_000000_0")
    write_video(sources / "clip_000000_0" / "target" / "rgb.mp4", scene(40, 90, 150))
    report, _ = prepare(tmp_path / "clips", sources, models, size=(32, 64), starts="first", picture1_2048=False)
    assert report.prepared == ["clip_000000_0"] and "target scaled from 150x90" in report.notes["clip_000000_0"]
    (clip,) = open_clips(tmp_path / "clips")
    assert (clip.geometry.height, clip.geometry.width) == (2, 4)


@pytest.mark.parametrize("content", [b"", b"null", b"{}"])
def test_a_report_that_says_nothing_is_passed_over(models, tmp_path, content):
    folder = write_clip_folder(tmp_path / "sources", "clip_000000_0", 17)
    (folder / "clip_report.json").write_bytes(content)
    report, _ = prepare(tmp_path / "clips", tmp_path / "sources", models)
    assert report.notes["clip_000000_0"] == ["clip_report.json is empty: passed over"]


@pytest.mark.parametrize("factor, share", [(0, "100%"), (1e6, "100%")])
def test_depth_in_other_units_is_made_and_said(models, tmp_path, factor, share):
    folder = write_clip_folder(tmp_path / "sources", "clip_000000_0", 17)
    depth, ids = planes(17)
    write_conditions(folder / "duv", depth * factor, ids)
    report, _ = prepare(tmp_path / "clips", tmp_path / "sources", models)
    assert report.notes["clip_000000_0"] == [
        f"{share} of the proxy's pixels show no surface within 256 m: is its depth in metres?"
    ]


def test_picture_1_at_a_large_short_edge_for_the_model_and_for_the_text(tree, models, tmp_path, monkeypatch):
    monkeypatch.setattr("rtcwm.prepare.work.SHORT_EDGE", 96)  # 2048 takes minutes on a CPU
    out = tmp_path / "clips"
    prepare(out, tree / "batch", models, starts="0", picture1_2048=True, vision_picture="2048")
    folder = tree / "batch" / "clip_000001_0"
    with Image.open(folder / "target" / "anchor.png") as anchor:
        large = anchor.resize((192, 96), Image.Resampling.LANCZOS)
    found = tensors(out / "clip_000001_0" / "start_0.safetensors")
    codec = VideoCodec(models.vae, torch.device("cpu"))
    assert found["picture1_2048"].shape == (24, 1, 6, 12) and found["picture1_native"].shape == (24, 1, 2, 4)
    assert torch.equal(found["picture1_2048"], codec.encode_picture(np.array(large)).half())
    text = TextEncoder(models.text_encoder, models.tokenizer, models.processor, 50, torch.device("cpu"))
    rows, tags = text.encode("[0.00s-1.60s] It moves.\r\n[1.00s-1.60s] Late.", large)
    assert torch.equal(found["text"], rows) and torch.equal(found["text_tags"], tags)
    assert load_window(open_clips(out)[0], 0, 0, chunks=2, picture1="2048").picture1.shape == (1, 24, 1, 6, 12)


def test_models_that_cannot_be_loaded_stop_two_processes_with_their_reason(tree, models, tmp_path, monkeypatch):
    monkeypatch.setattr("rtcwm.prepare.run.START_METHOD", "fork")  # sooner begun: the libraries are loaded here
    report, sources = run(tmp_path / "clips", [tree], None, models, Settings(text_layer=60), workers=2, device="cpu")
    assert "52 layers; expected a qwen3_vl with more than 60" in report.stopped and not sources


def test_an_earlier_version_outlives_a_source_that_broke(tree, prepared, models, tmp_path):
    out, sources = tmp_path / "clips", tmp_path / "sources"
    shutil.copytree(prepared, out)
    shutil.copytree(tree, sources)
    truncate(sources / "clip_000000_0" / "target" / "rgb.mp4")
    report, _ = prepare(out, sources, models)
    assert [refusal.clip for refusal in report.refused] == ["clip_000000_0"]
    assert report.refused[0].reason.endswith("; its earlier version stays")
    assert content(out) == content(prepared)
    report, _ = prepare(out, sources, models, system_prompt="Other.")
    assert re.search("holds clip_000000_0 with system_prompt '', here it is 'Other.'.*remove the clip", report.stopped)


def test_clips_that_workers_finish_after_an_interruption_are_counted(tree, models, tmp_path, monkeypatch):
    def interrupt(progress: Progress, clip: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Progress, "step", interrupt)
    monkeypatch.setattr("rtcwm.prepare.run.START_METHOD", "fork")
    report, sources = run(tmp_path / "clips", [tree], None, models, Settings(), workers=2, device="cpu")
    there = sorted(path.parent.name for path in (tmp_path / "clips").glob("*/clip.json"))
    assert there and sorted(report.prepared) == sorted(sources) == there
    assert report.stopped.endswith(f"({len(there)} clips are whole and stay)")
