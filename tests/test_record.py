"""Logs, run folders and checkpoints on disk."""

import json
import subprocess
import sys

import pytest
from safetensors import SafetensorError
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rtcwm.engine.checkpoint import find_fault, replace_file, replace_folder
from rtcwm.errors import UserError
from rtcwm.progress import duration
from rtcwm.train.config import TrainConfig
from rtcwm.train.folder import RunFolder
from rtcwm.train.record import Clock, Record, keep_steps


def fill(record: Record, steps: range) -> None:
    for step in steps:
        row = {"loss": step / 10, "grad_norm": None} | (
            {"val": {"loss": 1.5, "by_level": [1.0, 2.0]}} if step == 2 else {}
        )
        record.row(step, row, f"step {step}", advance=1)
    record.close()


def events(folder) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    return accumulator


def test_a_resumed_log_holds_every_step_once(tmp_path, capsys):
    fill(Record(tmp_path, "log.jsonl", 0, 6), range(1, 6))
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # killed while writing
    fill(Record(tmp_path, "log.jsonl", 3, 6), range(4, 7))
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    accumulator = events(tmp_path)
    assert [event.step for event in accumulator.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
    assert [event.value for event in accumulator.Scalars("train/loss")] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    assert [event.value for event in accumulator.Scalars("val/by_level/1")] == [2.0]
    assert accumulator.Scalars("val/loss")[0].wall_time == pytest.approx(rows[1]["time"], abs=0.01)
    assert "train/grad_norm" not in accumulator.Tags()["scalars"]  # None is no number


def test_other_ranks_record_nothing(tmp_path):
    record = Record(None, "log.jsonl", 0, 3)
    record.row(1, {"loss": 1.0}, "step 1")
    record.say("x")
    record.close()
    assert not list(tmp_path.iterdir())


def test_keep_steps_of_no_file(tmp_path):
    assert keep_steps(tmp_path / "log.jsonl", 5) == []


def test_durations_and_time_left(monkeypatch):
    assert [duration(seconds) for seconds in (5.9, 65, 3723)] == ["0:05", "1:05", "1:02:03"]
    clock = Clock()
    clock.seconds = [100.0, 2.0, 4.0]
    assert clock.left(10) == 30.0  # the first step of a start is left out


def test_a_folder_belongs_to_one_run(tmp_path):
    config, identity = TrainConfig(out=str(tmp_path / "run"), lr=1e-4), {"base": "b"}
    folder = RunFolder(config.out)
    assert folder.claim(config, identity) is False
    (folder.path / "train_log.jsonl").write_text("")  # the run begins
    assert folder.claim(config, identity) is True
    other_cadence = TrainConfig(out=config.out, lr=1e-4, save_every=3, base_config="x.json")
    assert folder.claim(other_cadence, identity) is True
    with pytest.raises(UserError, match="lr: 0.0001 there, 0.0002 now"):
        folder.claim(TrainConfig(out=config.out, lr=2e-4), identity)
    with pytest.raises(UserError, match="base: b there, c now"):
        folder.claim(config, {"base": "c"})


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "weights.safetensors").write_text("mine")
    with pytest.raises(UserError, match="holds .*weights.safetensors"):
        RunFolder(str(tmp_path)).claim(TrainConfig(out=str(tmp_path)), {})
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(UserError, match="is a file"):
        RunFolder(str(file)).claim(TrainConfig(out=str(file)), {})


def test_a_folder_with_logs_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="holds .*tensorboard.* but no args.json"):
        RunFolder(str(tmp_path)).claim(TrainConfig(out=str(tmp_path)), {})
    assert (tmp_path / "tensorboard" / "notes.txt").read_text() == "mine"


def test_a_refused_start_does_not_keep_the_folder(tmp_path):
    """Settings of a run that never began may be corrected."""
    out = str(tmp_path / "run")
    assert RunFolder(out).claim(TrainConfig(out=out, lr=1e-4), {}) is False
    assert RunFolder(out).claim(TrainConfig(out=out, lr=2e-4), {}) is False
    (tmp_path / "run" / "train_log.jsonl").write_text("")
    with pytest.raises(UserError, match="lr: 0.0002 there, 0.0001 now"):
        RunFolder(out).claim(TrainConfig(out=out, lr=1e-4), {})


HOLD = """
import sys, time
from rtcwm.train.config import TrainConfig
from rtcwm.train.folder import RunFolder
RunFolder(sys.argv[1]).claim(TrainConfig(out=sys.argv[1]), {})
print("held", flush=True)
time.sleep(60)
"""


def test_two_processes_cannot_share_a_folder(tmp_path):
    out = str(tmp_path / "run")
    holder = subprocess.Popen([sys.executable, "-c", HOLD, out], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"process {holder.pid} is working in --out"):
            RunFolder(out).claim(TrainConfig(out=out), {})
    finally:
        holder.kill()
        holder.wait()
    RunFolder(out).claim(TrainConfig(out=out), {})  # a killed process lets go


def test_a_full_disk_has_a_message_and_leaves_nothing(tmp_path):
    def full(path):
        path.write_text("half")
        raise SafetensorError("I/O error: No space left on device")

    with pytest.raises(UserError, match="No space left on device. Make room"):
        replace_file(tmp_path / "adapter.safetensors", full)
    assert not list(tmp_path.iterdir())


def test_a_reader_that_leaves_does_not_stop_the_run(tmp_path):
    code = (
        "from pathlib import Path; from rtcwm.train.record import Record; import sys\n"
        "record = Record(Path(sys.argv[1]), 'log.jsonl', 0, 9000)\n"
        "for step in range(9000): record.row(step, {'loss': 1.0}, 'x' * 80)\n"
        "record.close()\n"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    writer.stdout.read(10)
    writer.stdout.close()
    writer.wait(60)
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 9000


def test_a_folder_is_complete_or_absent(tmp_path):
    def good(folder):
        (folder / "a").write_text("1")

    def bad(folder):
        (folder / "a").write_text("2")
        raise OSError("no space left on device")

    target = tmp_path / "state" / "step00001"
    replace_folder(target, good)
    with pytest.raises(UserError, match="Make room"):
        replace_folder(target, bad)
    assert (target / "a").read_text() == "1"
    assert [path.name for path in target.parent.iterdir()] == ["step00001"]


def test_a_file_is_complete_or_absent(tmp_path):
    target = tmp_path / "x.json"
    replace_file(target, lambda path: path.write_text("1"))

    def fails(path):
        path.write_text("2")
        raise OSError("disk")

    with pytest.raises(UserError, match="cannot write"):
        replace_file(target, fails)
    assert target.read_text() == "1" and len(list(tmp_path.iterdir())) == 1


def test_faults_of_a_checkpoint_are_found(tmp_path):
    assert "FileNotFoundError" in find_fault(tmp_path)
    (tmp_path / "adapter.safetensors").write_bytes(b"12345")
    entry = {"bytes": 5, "hash": "0" * 32}
    (tmp_path / "state.json").write_text(json.dumps({"files": {"adapter.safetensors": entry}}))
    assert "other contents" in find_fault(tmp_path)
    (tmp_path / "adapter.safetensors").write_bytes(b"123")
    assert "3 bytes of 5" in find_fault(tmp_path)
