"""The training program, through real launchers: it trains, dies, resumes, and refuses bad input."""

import json
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from launch import SECONDS, alone, deepspeed, environment, kill, numbers, rows, run, start
from ranks import free_port, go_bad, refusals, run_ranks
from safetensors.torch import load_file, save_file

from rtcwm.model.adapter_files import load_adapter, read_metadata, save_adapter
from rtcwm.model.loading import open_base
from rtcwm.model.lora import Adapter, AdapterShape
from rtcwm.train.config import TrainConfig
from rtcwm.train.train import Trainer
from rtcwm.train.train_plan import prepare

MODULE = "rtcwm.train.train"
STEPS = 8


@pytest.fixture(scope="module")
def settings(clips_root, base_config) -> dict:
    return {
        "clips": clips_root, "base": base_config, "steps": STEPS, "lr": 2e-3, "warmup": 2, "save_every": 2,
        "val_every": 4, "val_clips": 1,
    }  # fmt: skip


@pytest.fixture(scope="module")
def whole(settings, tmp_path_factory) -> Path:
    """A run of two ranks that nothing interrupts."""
    out = tmp_path_factory.mktemp("whole") / "run"
    run(deepspeed("--num_gpus", "2"), MODULE, settings | {"out": out}, out.parent / "log")
    return out


def final_state(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "state" / f"step{STEPS:05d}" / "adapter.safetensors")


def test_a_run_leaves_what_it_promises(whole, settings):
    output = (whole.parent / "log").read_text()
    for word in ("world: 2 ranks", "shard group: 2", "rows a span", "trainable parameters", "samples:", "held out: 2",
                 "steps: 8 of 2 spans", "attention: sdpa", "memory after sharding", "s/step", "ETA"):  # fmt: skip
        assert word in output, word
    assert [row["step"] for row in rows(whole)] == list(range(STEPS + 1))
    assert [row["step"] for row in rows(whole) if "val" in row] == [0, 4, 8]
    losses = [row["loss"] for row in rows(whole)[1:]]
    assert all(loss > 0 for loss in losses) and rows(whole)[-1]["val"]["loss"] < rows(whole)[0]["val"]["loss"]
    assert sorted(path.name for path in (whole / "state").iterdir()) == ["step00006", "step00008"]
    adapters = sorted(path.name for path in whole.glob("lora_*.safetensors"))
    assert adapters == [f"lora_step{step:05d}.safetensors" for step in (2, 4, 6, 8)]
    assert len(json.loads((whole / "val_samples.json").read_text())) == 2
    metadata = read_metadata(whole / adapters[-1])
    base = open_base(str(settings["base"]))
    assert metadata["base"] == base.fingerprint and metadata["step"] == "8" and metadata["objective"] == "df"
    assert metadata["shift"] == "3.0" and metadata["span"] == "6" and metadata["rank"] == "12"
    adapter, state = load_adapter(whole / adapters[-1], base.config), final_state(whole)
    for name, value in adapter.named_parameters():
        assert torch.equal(value, state[name].bfloat16().float()), name
        assert state[f"{name}.exp_avg"].any() and state[f"{name}.exp_avg_sq"].any()


def test_killed_at_a_random_moment_and_resumed_it_ends_bit_for_bit(whole, settings, tmp_path):
    arguments, log = settings | {"out": tmp_path / "run"}, tmp_path / "log"
    delay = random.SystemRandom().uniform(0, 1.5)
    process = start(2, MODULE, arguments, log)
    while "saved" not in log.read_text():
        assert process.poll() is None, log.read_text()
        time.sleep(0.05)
    time.sleep(delay)
    kill(process)
    output = run(2, MODULE, arguments, tmp_path / "log2")
    assert "resumed from" in output, f"killed {delay:.3f} s after the first checkpoint"
    expected, found = final_state(whole), final_state(tmp_path / "run")
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected), f"killed after {delay:.3f} s"
    assert numbers(whole) == numbers(tmp_path / "run")
    again = run(1, MODULE, arguments, tmp_path / "log3")
    assert "finished already" in again and numbers(whole) == numbers(tmp_path / "run")


def test_resumed_on_one_rank_it_ends_the_same(whole, settings, tmp_path):
    """One process accumulates what two ranks did in a step. The newest checkpoint is damaged first."""
    out = shutil.copytree(whole, tmp_path / "run")
    damaged = out / "state" / "step00008" / "adapter.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-10])
    accumulate = tmp_path / "adapter.json"
    shipped = json.loads((Path(__file__).parents[1] / "ds_configs" / "adapter.json").read_text())
    accumulate.write_text(json.dumps(shipped | {"gradient_accumulation_steps": 2}))
    output = run(1, MODULE, settings | {"out": out, "adapter_config": accumulate}, tmp_path / "log")
    assert "step00008 is damaged" in output and "resumed from" in output and "world: 1 ranks" in output
    expected, found = final_state(whole), final_state(out)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-6, msg=name)
    assert [row["step"] for row in rows(out)] == list(range(STEPS + 1))
    for two, one in zip(rows(whole)[1:], rows(out)[1:], strict=True):
        for key in ("loss", "grad_norm"):
            assert one.get(key) == pytest.approx(two.get(key), rel=1e-5)


def test_a_node_that_does_not_come_is_told_in_a_line(tmp_path):
    port = free_port()
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_SIZE": "1", "MASTER_PORT": str(port), "RTCWM_TIMEOUT_SECONDS": "2"}
    done = subprocess.run(
        [sys.executable, "-m", MODULE, "--out", str(tmp_path / "out")], env=environment() | ranks,
        capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"error: the 2 ranks did not meet at 127.0.0.1:{port} within 2 s" in done.stderr


def test_two_nodes_started_once_each_without_ssh(whole, settings, tmp_path):
    hostfile = tmp_path / "hosts"
    hostfile.write_text("node-a slots=1\nnode-b slots=1\n")
    port, out = str(free_port()), tmp_path / "run"
    nodes = []
    for node in range(2):
        options = ["--hostfile", str(hostfile), "--no_ssh", "--node_rank", str(node), "--master_addr", "127.0.0.1"]
        launcher = [*deepspeed()[:1], "--master_port", port, *options]
        nodes.append(start(launcher, MODULE, settings | {"out": out, "steps": 4}, tmp_path / f"log{node}"))
    try:
        codes = [node.wait(200) for node in nodes]
    finally:
        for node in nodes:
            kill(node)
    output = (tmp_path / "log0").read_text()
    assert codes == [0, 0], output + (tmp_path / "log1").read_text()
    assert "world: 2 ranks, 1 on this node, cpu; shard group: 1" in output
    # The same samples as on one node; only the schedule is shorter, so the first losses are the same.
    assert rows(out)[1]["loss"] == pytest.approx(rows(whole)[1]["loss"], rel=1e-6)
    assert "step 1/4" not in (tmp_path / "log1").read_text(), "rank 0 alone speaks"


def test_a_missing_hostfile_is_not_one_machine(settings, tmp_path):
    launcher = deepspeed("--hostfile", "nowhere", "--num_gpus", "1")
    output = run(launcher, MODULE, settings | {"out": tmp_path / "run"}, tmp_path / "log", code=2)
    assert "there is no such file" in output and not (tmp_path / "run").exists()


def test_sigterm_saves_and_leaves(settings, tmp_path):
    arguments, log = (
        settings | {"out": tmp_path / "run", "steps": 5000, "save_every": 5000, "val_every": 0},
        tmp_path / "log",
    )
    process = start(alone(), MODULE, arguments, log)
    while "step 3/" not in log.read_text():
        assert process.poll() is None, log.read_text()
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert "stopped by a signal" in log.read_text()
    (state,) = (tmp_path / "run" / "state").iterdir()
    assert int(state.name[4:]) == rows(tmp_path / "run")[-1]["step"]


def test_what_is_offloaded_is_said_once(settings, tmp_path):
    config = tmp_path / "base.json"
    config.write_text('{"activation_checkpointing": {"cpu_checkpointing": true}}')
    arguments = settings | {"out": tmp_path / "run", "base_config": config, "steps": 2, "val_clips": 0}
    output = run(1, MODULE, arguments, tmp_path / "log")
    (rows_a_span,) = re.findall(r"rows a span: ([\d,]+)", output)
    moved = 2 * int(rows_a_span.replace(",", "")) * 48 * 4  # inputs of two blocks, 48 wide, fp32
    assert output.count("activation offload:") == 1 and f"activation offload: {moved:,} bytes" in output


def held_out(world, options: dict) -> dict:
    config = TrainConfig(**options)
    trainer = Trainer(world, config, prepare(world, config))
    value = trainer.evaluate()["val"]
    trainer.record.close()
    return value


def test_held_out_loss_does_not_depend_on_the_ranks(settings, tmp_path):
    options = {key: str(value) if isinstance(value, Path) else value for key, value in settings.items()}
    values = [run_ranks(size, held_out, options | {"out": str(tmp_path / str(size))})[0] for size in (1, 2, 3)]
    assert values[0] == values[1] == values[2]
    assert len(values[0]["by_level"]) == 5 and len(values[0]["by_slot"]) == 6
    assert values[0]["loss"] == pytest.approx(sum(values[0]["by_slot"]) / 6)


def three_good_steps(world, options: dict) -> tuple:
    config = TrainConfig(**options)
    trainer = Trainer(world, config, prepare(world, config))
    return go_bad(trainer, trainer.engine.adapter, good=3)


def test_bad_numbers_are_skipped_counted_and_end_the_run_with_the_last_good_state(settings, tmp_path):
    options = {key: str(value) if isinstance(value, Path) else value for key, value in settings.items()}
    options |= {"out": str(tmp_path / "run"), "save_every": 100, "val_every": 0, "max_skips": 4, "steps": 50}
    message, weights = run_ranks(2, three_good_steps, options)[0]
    assert "4 steps in a row had a non-finite loss or gradient (steps 4 to 7)" in message
    log = rows(tmp_path / "run")
    assert [row["skipped"] for row in log if row["step"] > 2] == [0, 1, 2, 3, 4]
    assert all(row["loss"] is None and row["grad_norm"] is None for row in log if row["step"] > 3)
    state = load_file(tmp_path / "run" / "state" / "step00003" / "adapter.safetensors")
    assert all(torch.equal(state[name], value) for name, value in weights.items())
    assert json.loads((tmp_path / "run" / "state" / "step00003" / "state.json").read_text())["counters"]["skipped"] == 0


def clips_with(clips_root: Path, target: Path, damage) -> str:
    shutil.copytree(clips_root, target)
    (target / "manifest.json").unlink()
    damage(target, sorted(path for path in target.iterdir() if path.is_dir())[1])
    return str(target)


def other_codec(_root: Path, clip: Path) -> None:
    about = json.loads((clip / "clip.json").read_text())
    about["codec"]["hash"] = "f" * 16
    (clip / "clip.json").write_text(json.dumps(about))


def cut_latents(_root: Path, clip: Path) -> None:
    stream = load_file(clip / "stream.safetensors")
    save_file({name: value[:, :-1].contiguous() for name, value in stream.items()}, clip / "stream.safetensors")


def other_text(root: Path, _clip: Path) -> None:
    for path in root.glob("*/start_*.safetensors"):
        start = load_file(path)
        start["text"] = start["text"][:, :8].contiguous()
        save_file(start, path)


def adapter_file(path: Path, config: dict, rank: int, value: float = 0.1, **metadata: str) -> str:
    adapter = Adapter(AdapterShape.of(config, rank))
    with torch.no_grad():
        for pair in adapter.pairs():
            pair.up.fill_(value)
    save_adapter(path, adapter, metadata)
    return str(path)


def test_bad_input_is_refused_before_anything_heavy(clips_root, base_config, tmp_path):
    config = open_base(str(base_config)).config
    good = {"clips": str(clips_root), "base": str(base_config), "steps": 2, "val_clips": 1}
    (tmp_path / "empty").mkdir()
    for name, text in {"base.json": '{"shard_groups": 1}', "adapter.json": '{"clip": 1}',
                       "three.json": '{"shard_group": 3}', "whole.json": '{"shard_group": 1}',
                       "huge.json": '{"ffn_dim": 1000000000}',
                       "none.json": '{"activation_checkpointing": {"policy": "none"}}'}.items():  # fmt: skip
        (tmp_path / name).write_text(text)
    truncated = tmp_path / "truncated.safetensors"
    adapter_file(truncated, config, 4)
    truncated.write_bytes(truncated.read_bytes()[:-64])
    wide = adapter_file(tmp_path / "wide.safetensors", config | {"hidden_size": 64}, 4)
    foreign = adapter_file(tmp_path / "foreign.safetensors", config, 4, base="0" * 32)
    coded = adapter_file(tmp_path / "coded.safetensors", config, 4, codec="0" * 32)
    cases = [
        ({"clips": str(tmp_path / "none")}, "none"),
        ({"clips": str(tmp_path / "empty")}, "empty"),
        ({"max_samples": 1}, "cannot be shared by 2 ranks"),
        ({"val_clips": 6}, "hold out"),
        ({"clips": clips_with(clips_root, tmp_path / "c1", other_codec)}, "ffffffffffffffff"),
        ({"clips": clips_with(clips_root, tmp_path / "c2", cut_latents)}, "latents"),
        ({"clips": clips_with(clips_root, tmp_path / "c3", other_text)}, "text of width 8, the base takes 64"),
        ({"base": "embedded", "init_lora": wide}, "this base"),
        ({"init_lora": wide}, "need"),
        ({"init_lora": str(truncated)}, "truncated"),
        ({"init_lora": str(tmp_path / "none.safetensors")}, "no adapter file"),
        ({"init_lora": foreign}, "was trained on base 0000"),
        ({"init_lora": coded}, "was made with codec 0000"),
        ({"base_config": str(tmp_path / "base.json")}, "unknown key 'shard_groups'"),
        ({"adapter_config": str(tmp_path / "adapter.json")}, "unknown key 'clip'"),
        ({"base_config": str(tmp_path / "three.json")}, "shard_group 3 does not divide"),
        ({"base_config": str(tmp_path / "none.json")}, "needs shard_group 1"),
        ({"attn": "fa3"}, "fa3"),
        ({"picture1": "2048"}, "picture1_2048"),
        ({"base": str(tmp_path / "nothing")}, "expected 'embedded'"),
        ({"base": str(tmp_path / "huge.json")}, "of host memory"),
        (
            {"base": str(tmp_path / "huge.json"), "base_config": str(tmp_path / "whole.json")},
            "in fp32, 2 copies of it for the 2 ranks of a machine, takes",
        ),
        ({"warmup": 0}, "accepted"),
    ]
    options = [good | {"out": str(tmp_path / f"run{index}")} | change for index, (change, _) in enumerate(cases)]
    for messages in run_ranks(2, refusals, prepare, TrainConfig, options):
        for message, (change, expected) in zip(messages, cases, strict=True):
            assert expected in message, f"{change}: {message}"
    made = sorted(path.name for path in tmp_path.glob("run*"))
    assert made == [f"run{len(cases) - 1}"], "a refused run left a folder"


def test_another_run_in_the_same_folder(whole, settings, tmp_path):
    output = run(1, MODULE, settings | {"out": whole, "lr": 1e-3}, tmp_path / "log", code=2)
    assert "lr: 0.002 there, 0.001 now" in output and "Traceback" not in output


def broken_clips(clips_root: Path, target: Path) -> str:
    """Clips whose latents are broken, but for those of the first, which is looked at before training begins."""
    shutil.copytree(clips_root, target)
    (target / "manifest.json").unlink()
    for stream in sorted(target.glob("*/stream.safetensors"))[1:]:
        tensors = load_file(stream)
        tensors["video"][:, 10:] = float("nan")
        save_file(tensors, stream)
    return str(target)


def test_what_one_rank_alone_finds_is_said(clips_root, base_config, tmp_path):
    arguments = {"out": tmp_path / "run", "clips": broken_clips(clips_root, tmp_path / "clips"), "base": base_config,
                 "val_clips": 0, "steps": 2}  # fmt: skip
    output = run(2, MODULE, arguments, tmp_path / "log", code=2)
    assert "error: rank" in output and "are not finite: encode the clip again" in output


def test_clips_that_changed_are_not_resumed_on(whole, settings, clips_root, tmp_path):
    out, clips = shutil.copytree(whole, tmp_path / "run"), shutil.copytree(clips_root, tmp_path / "clips")
    edit = json.loads((out / "args.json").read_text())
    edit["settings"]["clips"] = str(clips)
    (out / "args.json").write_text(json.dumps(edit))
    (clips / "manifest.json").unlink()
    stream = next(clips.glob("*/stream.safetensors"))
    tensors = load_file(stream)
    tensors["video"] = -tensors["video"]
    save_file(tensors, stream)
    output = run(1, MODULE, settings | {"out": out, "clips": clips}, tmp_path / "log", code=2)
    assert "contents:" in output and "holds a run with other settings" in output


def test_a_run_whose_checkpoints_are_all_damaged_is_not_started_over(whole, settings, tmp_path):
    out = shutil.copytree(whole, tmp_path / "run")
    for state in (out / "state").glob("*/state.json"):
        state.write_text("{")
    before = sorted(path.name for path in out.iterdir())
    output = run(1, MODULE, settings | {"out": out}, tmp_path / "log", code=2)
    assert "every checkpoint in" in output and sorted(path.name for path in out.iterdir()) == before


def test_an_adapter_with_nan_is_refused(clips_root, base_config, tmp_path):
    path = Path(adapter_file(tmp_path / "a.safetensors", open_base(str(base_config)).config, 4))
    tensors = load_file(path)
    tensors["lora_unet_blocks_0_mlp_fc2.lora_up.weight"][0, 0] = float("nan")
    save_file(tensors, path)
    arguments = {"out": tmp_path / "run", "clips": clips_root, "base": base_config, "init_lora": path, "steps": 1}
    output = run(1, MODULE, arguments, tmp_path / "log", code=2)
    assert "lora_up.weight holds non-finite values" in output and "Traceback" not in output
    assert not (tmp_path / "run").exists()
