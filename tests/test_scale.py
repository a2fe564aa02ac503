"""`rtcwm bench scale` through its command line, on two ranks of the CPU; its launches; and the watch over ranks."""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from threading import Event

import pytest
import torch
from command import rtcwm
from launch import environment, free_port
from ranks import CONTEXT, run_ranks
from small import CONFIG

from rtcwm.bench.command import ScaleBench
from rtcwm.bench.launcher import Child
from rtcwm.bench.scale import chosen
from rtcwm.bench.scale_parts import Place, parts_of
from rtcwm.bench.scale_table import describe, train_scaling
from rtcwm.engine import watch
from rtcwm.engine.adapter import AdapterEngine
from rtcwm.engine.base import BaseEngine
from rtcwm.engine.settings import read_adapter_settings, read_base_settings, shipped_config
from rtcwm.errors import UserError
from rtcwm.model.loading import SeededSource, read_config
from rtcwm.model.lora import Adapter, AdapterShape

STEPS = 4


@pytest.fixture
def base(tmp_path) -> Path:
    path = tmp_path / "base.json"
    path.write_text(json.dumps(CONFIG))
    return path


def test_two_ranks_from_one_command(base, tmp_path, monkeypatch, capsys):
    """Speed of a split base; and the numbers of two ranks, one killed and both resumed, against those of one."""
    for name in ("OMP_NUM_THREADS", "PATH"):
        monkeypatch.setenv(name, environment()[name])
    out = tmp_path / "scale"
    flags = {
        "out": out, "base": base, "ranks": 2, "height": 64, "width": 96, "text-rows": 5, "steps": 1,
        "same-steps": STEPS, "same-height": 32, "minutes": 3, "launcher": "torchrun",
    }  # fmt: skip
    words = ["bench", "scale", *(word for name, value in flags.items() for word in (f"--{name}", value))]
    code = rtcwm(monkeypatch, *words, "--only", "[same,train-2-by2]")
    said = capsys.readouterr().out
    found = {path.stem: json.loads(path.read_text()) for path in out.glob("*.json")}
    assert code == 0 and set(found) == {"same-1x2", "same-2", "train-2-by2"}, said

    ours = found["train-2-by2"]["ours"]
    assert ours["weights"]["equal"] and ours["weights"]["shard_group"] == 2 and len(ours["ranks"]) == 2
    # Both blocks stay in the two buffers, so what is gathered are the small layers: all of them in the forward pass,
    # and those after the blocks in the backward pass too, which has to pass through them.
    config = read_config(base)
    sizes = small_layers(config)
    behind = sum(size for name, size in sizes.items() if name in ("norm_out", "proj_out"))
    assert ours["gathers"]["block_bytes"] == 0
    assert (
        sum(sizes.values()) <= ours["gathers"]["other_bytes"] <= sum(sizes.values()) + behind + sizes["audio_proj_out"]
    )
    assert 0 < ours["gathers"]["waited_share"] < 1

    one, two = found["same-1x2"]["numbers"], found["same-2"]["numbers"]
    assert [row["step"] for row in one] == [row["step"] for row in two] == list(range(1, STEPS + 1))
    for a, b in zip(one, two, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5) and a["grad_norm"] == pytest.approx(
            b["grad_norm"], rel=1e-5
        )
    assert len({row["loss"] for row in one}) == STEPS
    death = found["same-2"]["death"]
    assert death["rank"] == 1 and death["code"] != 0 and death["within"] and death["ranks_gone"] < 30
    assert "rank 1 (process" in death["named"] and "is gone" in death["named"]
    assert "[ok]; said: rtcwm: error: rank 1" in said and "2 blocks" in said and said.count("ok)") == 2

    began = time.monotonic()
    assert rtcwm(monkeypatch, *words, "--only", "[same,train-2-by2]") == 0
    assert "3 parts, 3 done before" in capsys.readouterr().out and time.monotonic() - began < 10
    assert (out / "scale.txt").read_text().startswith("A step of diffusion forcing: base.json, 96x64")
    # Too little time for any: the table is printed all the same, and names what is left.
    assert rtcwm(monkeypatch, *words, "--seed", "1", "--minutes", "0.1") == 1
    assert "left for the next time: train-1, train-2-by2, same-1x2, same-2, distill-1" in capsys.readouterr().out


def small_layers(config: dict) -> dict[str, int]:
    """Bytes (fp32) of the layers around the blocks."""
    from rtcwm.model.loading import meta_model

    return {
        name: sum(parameter.numel() * 4 for parameter in module.parameters())
        for name, module in meta_model(config).named_children()
        if name != "transformer_blocks"
    }


HANG = """
import faulthandler, os, signal, subprocess, sys, time
def stuck():
    time.sleep(600)
if "RANK" in os.environ:
    faulthandler.register(signal.SIGUSR1)
    print("ready", flush=True)
    stuck()
subprocess.Popen([sys.executable, __file__], env=os.environ | {"RANK": "3"}, start_new_session=True)
time.sleep(600)
"""


def test_a_launch_that_hangs_says_where_and_leaves_nothing(tmp_path):
    """A launcher and its rank in a group of its own, as torchrun starts it."""
    script = tmp_path / "hang.py"
    script.write_text(HANG)
    child = Child([sys.executable, str(script)], tmp_path / "log", {})
    until = time.monotonic() + 20
    while "ready" not in child.text():
        assert time.monotonic() < until
        time.sleep(0.05)
    assert not child.is_over(time.monotonic() + 60) and list(child.ranks()) == [3]
    rank = child.ranks()[3].pid
    while not child.is_over(deadline=0.0):
        pass
    assert child.timed_out and child.code == -signal.SIGKILL and not child.processes()
    assert not watch.is_running(rank)
    assert "in stuck" in child.text() and str(script) in child.text()


def test_parts_and_their_order():
    names = [part.name for part in parts_of(8)]
    assert names[:6] == ["train-1", "train-8-by8", "same-1x8", "same-8", "distill-1", "distill-8-by8"]
    assert len(names) == len(set(names)) == 13 and {"train-8-by1", "train-8-by4-live", "distill-8-by8"} < set(names)
    assert [part.name for part in chosen(parts_of(2), ["same", "train-1"])] == ["train-1", "same-1x2", "same-2"]
    with pytest.raises(UserError, match="--only train-2: expected some of train, distill, same, train-1"):
        chosen(parts_of(2), ["train-2"])
    assert [round(train_scaling(ranks), 3) for ranks in (2, 4, 8)] == [0.95, 0.935, 0.92]


@pytest.mark.parametrize(
    ("config", "only", "message"),
    [
        ({"activation_checkpointing": {"policy": "none"}}, "[same,train]", "part train-2-by2: .*'none' needs shard"),
        ({"device_block": 3}, "[train-1]", "unknown key 'device_block'"),
        (None, "[train-1]", "no DeepSpeed config at"),
    ],
)  # fmt: skip
def test_a_base_config_that_does_not_fit_is_said_before_the_first_part(
    base, tmp_path, monkeypatch, capsys, config, only, message
):
    file, out = tmp_path / "engine.json", tmp_path / "scale"
    if config is not None:
        file.write_text(json.dumps(config))
    flags = {"out": out, "base": base, "ranks": 2, "height": 64, "width": 96, "only": only, "base-config": file}
    words = (word for name, value in flags.items() for word in (f"--{name}", value))
    assert rtcwm(monkeypatch, "bench", "scale", *words) == 2
    said = capsys.readouterr()
    assert re.search(message, said.err) and str(file) in said.err and said.out == "" and not out.exists()


@pytest.mark.parametrize("offload", [False, True])
def test_parts_get_files_that_their_engines_take(base, tmp_path, offload):
    """A file for ranks that share the base: where each has one of its own nothing is moved, but from host memory."""
    file, zero = tmp_path / "engine.json", {"offload_param": {"device": "cpu"}} if offload else {}
    file.write_text(json.dumps({"shard_group": 2, "device_blocks": 4, "zero_optimization": zero}))
    settings = ScaleBench(out=tmp_path, base=str(base), ranks=2, base_config=str(file))
    for part in parts_of(2):
        found = read_base_settings(Place(settings, part, 0.0, Event()).base_config())
        moves = part.group == 2 or offload
        assert (found.shard_group, found.device_blocks, found.offload) == (part.group, 4 if moves else 2, offload)


def timed(family: str, ranks: int, group: int, seconds: float, waited: float, digest: str = "a") -> dict:
    peak = {"allocated_gib": 40.0, "reserved_gib": 50.0, "outside_gib": 1.5}
    ours = {
        "seconds": {"median": seconds},
        "weights": {"digest": digest, "equal": True, "shard_group": group, "build_seconds": 5.0},
        "gathers": {"block_bytes": 2**31, "other_bytes": 2**30, "waited_share": waited},
        "ranks": [{"peak": peak}, {"peak": peak | {"allocated_gib": 41.25}}],
        "parts": {"rollout": {"seconds": {"median": seconds / 2}}},
        "parked_gib": 3.0,
    }
    part = {"family": family, "ranks": ranks, "group": group, "live": False, "of": 0}
    case = {"base": "b", "layers": 1, "whole_layers": 2, "width": 96, "height": 64, "rows": 561, "rank": 12}
    return {"part": part, "machine": {"card": "c", "memory_gib": 141.0}, "case": case, "ours": ours, "took": 60.0}


def test_the_table_holds_results_against_targets():
    results = {
        "train-1": timed("train", 1, 1, 9.5, 0.0),
        "train-2-by1": timed("train", 2, 1, 10.0, 0.0),
        "train-2-by2": timed("train", 2, 2, 10.1, 0.031, digest="b"),
        "distill-1": timed("distill", 1, 1, 9.0, 0.0),
        "distill-2-by2": timed("distill", 2, 2, 10.0, 0.01),
        "train-2-by2-live": {"failed": "out of memory"},
        "train-4-by4": timed("train", 4, 4, 8.0, 0.01),
    }
    lines = {line.split()[0]: " ".join(line.split()) for line in describe(results, ["same-2"]).splitlines() if line}
    assert "0.950 >= 0.950 ok" in lines["train-2-by1"] and "equal, as on 1" in lines["train-2-by1"]
    assert "0.941 >= 0.950 MISSED" in lines["train-2-by2"] and "3.10% < 3% MISSED" in lines["train-2-by2"]
    assert (
        "NOT AS ON 1" in lines["train-2-by2"] and " 3.00 " in lines["train-2-by2"] and "41.25" in lines["train-2-by2"]
    )
    assert "1.188 0.935 to 1.05: ONE RANK WAS HELD UP" in lines["train-4-by4"]
    assert lines["distill-2-by2"].split()[1:] == ["5.000", "0.900", "3.00"], "the second table, by part"
    assert lines["train-2-by2-live:"] == "train-2-by2-live: FAILED: out of memory"
    assert lines["left"] == "left for the next time: same-2"
    assert "ONLY 1 of 2 blocks" in describe(results, [])


def groups(world, files: Path) -> tuple:
    """Ranks and names of the groups in which the base is gathered, adapters are averaged, and ranks agree."""
    base = BaseEngine(
        world, SeededSource(read_config(files / "config.json") | CONFIG), read_base_settings(files / "base")
    )
    shape = AdapterShape.of(read_config(files / "config.json") | CONFIG, 4)
    settings = read_adapter_settings(shipped_config("adapter"))
    engines = [AdapterEngine(world, Adapter(shape, seed), settings) for seed in (1, 2)]
    found = [next(base.model.transformer_blocks.parameters()).ds_process_group]
    found += [engine.engine.optimizer.dp_process_group for engine in engines]
    found.append(torch.distributed.group.WORLD)
    return [torch.distributed.get_process_group_ranks(group) for group in found], [group.group_name for group in found]


def test_every_kind_of_collective_has_a_communicator_of_its_own(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "base").write_text('{"shard_group": 2}')
    for ranks, names in run_ranks(2, groups, tmp_path):
        assert ranks == [[0, 1]] * 4, "the same ranks in all"
        base, student, critic, control = names
        assert len({base, student, control}) == 3 and student == critic


def watched(rank: int, port: int, log: Path, error: bool) -> None:
    """A rank that waits for nothing that ends: in a call, as in a collective of NCCL, or after an error, as gloo's."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with log.open("w", buffering=1) as sys.stderr:
        store = torch.distributed.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
        guard = watch.Watch(rank, 3, silence=30.0)
        log.with_suffix(".ready").touch()
        while not (log.parent / "killed").exists():
            time.sleep(0.05)
        if error:
            guard.explain()
            return
        time.sleep(120)
        store.set("", "")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named_and_the_others_leave(tmp_path, victim):
    """Rank 0 keeps the store. Rank 2 stands for one that gets an error of the collective."""
    port, logs = free_port(), [tmp_path / f"{rank}.log" for rank in range(3)]
    processes = [CONTEXT.Process(target=watched, args=(rank, port, logs[rank], rank == 2)) for rank in range(3)]
    for process in processes:
        process.start()
    try:
        until = time.monotonic() + 60
        while not all(log.with_suffix(".ready").exists() for log in logs):
            assert time.monotonic() < until
            time.sleep(0.05)
        processes[victim].kill()
        (tmp_path / "killed").touch()
        for process in processes:
            process.join(30)
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
    left = 1 - victim
    assert codes[victim] == -signal.SIGKILL and codes[left] == watch.EXIT_CODE
    said = logs[left].read_text()
    assert said.startswith(f"rtcwm: error: rank {victim} (process {processes[victim].pid} on ")
    assert logs[2].read_text() == "", "the lowest rank that is left speaks"
