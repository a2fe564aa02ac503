"""Ctrl-C: one line, exit code 130, and nothing half written, wherever in a command it comes. And a closed pipe."""

import os
import shutil
import signal
import subprocess
import sys

import pytest
from command import rtcwm
from media import small_h3, write_clip_folder
from test_adapter_commands import made
from test_clips import small_clip
from test_clips_import import sample, write_pt

from rtcwm.data import clips
from rtcwm.data.clips import open_clips


@pytest.fixture(autouse=True)
def heard():
    """A suite that was started in the background ignores SIGINT, and so would its commands."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_after(monkeypatch: pytest.MonkeyPatch, place: str, calls: int) -> None:
    """A real SIGINT at the end of that call of a function."""
    module, _, name = place.rpartition(".")
    function, count = getattr(__import__(module, fromlist=[name]), name), [0]

    def once_more(*given, **named):
        found = function(*given, **named)
        count[0] += 1
        if count[0] == calls:
            signal.raise_signal(signal.SIGINT)
        return found

    monkeypatch.setattr(place, once_more)


def told(capsys: pytest.CaptureFixture) -> str:
    """The one line on stderr."""
    (line,) = capsys.readouterr().err.splitlines()
    return line


LINE = "rtcwm: interrupted; the same command starts it again, with what is already whole"


def test_an_import(tmp_path, monkeypatch, capsys):
    source = write_pt(tmp_path / "cache", {name: sample(seed) for seed, name in enumerate("abc")})
    words = ("clips", "import", source, "--out", tmp_path / "clips")
    with monkeypatch.context() as patch:
        interrupt_after(patch, "rtcwm.data.write.save_file", 3)  # the second clip's stream is written, its start not
        assert rtcwm(patch, *words) == 130
    assert told(capsys) == LINE
    assert sorted(path.name for path in (tmp_path / "clips").iterdir()) == ["a", "manifest.json"]
    kept = (tmp_path / "clips" / "a").stat().st_ino
    assert rtcwm(monkeypatch, *words) == 0 and "2 clips made, 1 already there" in capsys.readouterr().out
    assert (tmp_path / "clips" / "a").stat().st_ino == kept and len(open_clips(tmp_path / "clips")) == 3


def test_a_check_that_flags(tmp_path, monkeypatch, capsys):
    root = tmp_path / "clips"
    for name in ("one", "two"):
        small_clip(root, name)
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    with monkeypatch.context() as patch:
        interrupt_after(patch, "rtcwm.curate.check.measure", 3)
        assert rtcwm(patch, "clips", "check", root) == 130
    assert told(capsys) == LINE
    with monkeypatch.context() as patch:  # a clip's flags are measured, and about to be written
        interrupt_after(patch, "rtcwm.curate.check.flagged_spans", 1)
        assert rtcwm(patch, "clips", "check", root, "--flag", "--static", "9") == 130
    assert told(capsys) == LINE
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("layout, name", [("comfyui", "b.safetensors"), ("peft", "peft")])
def test_an_export(tmp_path, monkeypatch, capsys, layout, name):
    out = tmp_path / "out" / name
    assert rtcwm(monkeypatch, "export", made(tmp_path / "a.safetensors"), "--to", layout, "--out", out) == 0
    before = {path: path.read_bytes() for path in out.parent.rglob("*") if path.is_file()}
    other = made(tmp_path / "b.safetensors", seed=1)
    with monkeypatch.context() as patch:
        interrupt_after(patch, "rtcwm.model.tensor_files.save_file", 1)
        assert rtcwm(patch, "export", other, "--to", layout, "--out", out) == 130
    assert told(capsys) == LINE
    assert {path: path.read_bytes() for path in out.parent.rglob("*") if path.is_file()} == before


def test_a_preparation(tmp_path, monkeypatch, capsys):
    for index in range(3):
        write_clip_folder(tmp_path / "sources", f"clip_00000{index}_0", 17, seed=index)
    words = ("prepare", "--out", tmp_path / "clips", "--source", tmp_path / "sources", "--model", small_h3(),
             "--device", "cpu")  # fmt: skip
    with monkeypatch.context() as patch:
        interrupt_after(patch, "rtcwm.data.write.save_file", 3)
        assert rtcwm(patch, *words) == 130
    assert capsys.readouterr().err.splitlines()[-1] == (
        "rtcwm: interrupted; the same command goes on from here (1 clips are whole and stay)"
    )
    assert [path.name for path in (tmp_path / "clips").glob("*/")] == ["clip_000000_0"]
    assert not list((tmp_path / "clips").glob(".*.writing-*")) and clips.read_clip(tmp_path / "clips" / "clip_000000_0")
    shutil.rmtree(tmp_path / "sources" / "clip_000002_0")
    assert rtcwm(monkeypatch, *words) == 0
    assert "1 clips prepared, 1 already there, 0 refused" in capsys.readouterr().out


def test_a_reader_that_has_enough(tmp_path):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "rtcwm.cli", "adapter", "show", made(tmp_path / "a.safetensors")]
    done = subprocess.run(
        command, stdout=write, stderr=subprocess.PIPE, env=os.environ | {"PYTHONUNBUFFERED": ""}, timeout=60
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")
