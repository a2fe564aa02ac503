"""Held-out clips across runs: a run's files name them, and a run or an evaluation that measures on others says so."""

import json
import shutil
from pathlib import Path

import pytest
from ranks import run_ranks
from small import random_adapter

from rtcwm.data.clips import open_clips
from rtcwm.engine.streams import Streams
from rtcwm.evaluate import evaluate
from rtcwm.evaluate.command import Settings
from rtcwm.model.adapter_files import read_metadata, save_adapter
from rtcwm.model.loading import open_base
from rtcwm.model.lora import AdapterShape
from rtcwm.train import distill_plan, train_plan
from rtcwm.train.config import DistillConfig, TrainConfig
from rtcwm.train.train import Trainer
from rtcwm.train.validation import Grid

ADAPTER = "lora_step00001.safetensors"


def kept(run: Path) -> set[str]:
    return {entry["episode"] for entry in json.loads((run / "val_samples.json").read_text())}


def warned(lines: list[str]) -> str:
    return "\n".join(line for line in lines if line.startswith("warning"))


def chain(world, common: dict, folder: str) -> dict:
    """A diffusion-forcing run of seed 3, and what runs say that start from its file."""
    options = common | {"out": f"{folder}/df", "seed": 3, "steps": 1, "warmup": 0}
    config = TrainConfig(**options)
    Trainer(world, config, train_plan.prepare(world, config)).run()
    student = f"{folder}/df/{ADAPTER}"
    plans = {}
    for seed in range(8):
        for name in ("train", "distill"):
            change = {"out": f"{folder}/{name}{seed}", "seed": seed}
            if name == "train":
                plan = train_plan.prepare(world, TrainConfig(**options | change | {"init_lora": student}))
                plans[name, seed] = plan.lines(1), plan.metadata()
            else:
                rest = {"student_lora": student, "teacher_lora": "none", "max_chunks": 8}
                plan = distill_plan.prepare(world, DistillConfig(**common | change | rest))
                plans[name, seed] = plan.lines(), plan.metadata("dmd")
    return plans


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("chain")


@pytest.fixture(scope="module")
def common(clips_root, base_config) -> dict:
    return {"clips": str(clips_root), "base": str(base_config), "val_clips": 1}


@pytest.fixture(scope="module")
def plans(common, folder) -> dict:
    return run_ranks(1, chain, common, str(folder))[0]


def test_a_run_says_which_held_out_episodes_its_start_was_trained_on(plans, folder, base_config):
    df = kept(folder / "df")
    said = read_metadata(folder / "df" / ADAPTER)
    assert json.loads(said["held_out"]) == sorted(df) and len(df) == 1
    assert (said["seed"], said["val_clips"]) == ("3", "1")
    assert str(base_config.parent) not in said["base_description"] and base_config.name in said["base_description"]
    others = 0
    for (name, seed), (lines, metadata) in plans.items():
        own = kept(folder / f"{name}{seed}")
        flag = "--init-lora" if name == "train" else "--student-lora"
        if own == df:
            assert not warned(lines) and set(json.loads(metadata["held_out"])) == df
            continue
        others += 1
        assert f"1 of 1 held-out episodes ({min(own)}) are not among those that the run of {flag}" in warned(lines)
        assert "Set --seed 3 --val-clips 1, as in that run" in warned(lines)
        assert json.loads(metadata["held_out"]) == []  # one run or the other was trained on every episode
    assert 0 < others < len(plans)


def test_an_evaluation_says_which_clips_a_model_was_trained_on(plans, folder, clips_root, base_config, tmp_path):
    def lines(**where) -> str:
        model = [f"df={folder / 'df' / ADAPTER}:few,steps=2", "base=base:few,steps=2"]
        settings = Settings(out=tmp_path / "out", model=model, base=str(base_config), device="cpu", **where)
        return warned(evaluate.prepare(settings).lines())

    seen = [clip.id for clip in open_clips(clips_root) if clip.episode not in kept(folder / "df")]
    assert f"4 of 6 clips ({', '.join(seen)}) are not among those that the run of df held out" in lines(
        clips=clips_root
    )
    assert lines(run=folder / "df", clips=None) == ""


def with_other_files(world, common: dict, folder: str) -> list[list[str]]:
    """What is said of files whose entries of these names are no list of episodes, or of other clips' episodes."""
    shape, lines = AdapterShape.of(open_base(common["base"]).config, 4), []
    for index, told in enumerate(("not JSON", "7", '{"a": 1}', "[1]", "[]", '["elsewhere"]')):
        path = Path(folder) / f"{index}.safetensors"
        save_adapter(path, random_adapter(shape), {"held_out": told, "seed": "many", "val_clips": "-1"})
        config = TrainConfig(**common, out=f"{folder}/{index}", init_lora=str(path), steps=1)
        lines.append(train_plan.prepare(world, config).lines(1))
    return lines


def test_other_entries_are_not_refused(common, tmp_path):
    (found,) = run_ranks(1, with_other_files, common, str(tmp_path))
    assert [bool(warned(lines)) for lines in found] == [False] * 4 + [True] * 2
    assert not any("Set --seed" in warned(lines) for lines in found)


def flagged(world, common: dict, folder: str) -> list[tuple[str, int]]:
    """What a run says of its held-out clips, and the cells of its grid, as one after the other of them is flagged."""
    told = []
    for count in range(3):
        config = TrainConfig(**common | {"clips": f"{folder}/clips", "out": f"{folder}/{count}", "steps": 1})
        plan = train_plan.prepare(world, config)
        distill = {"student_lora": f"{folder}/student", "teacher_lora": "none", "max_chunks": 8}
        lines = distill_plan.prepare(
            world, DistillConfig(**common | {"clips": config.clips, "out": f"{folder}/d{count}"} | distill)
        ).lines()
        cells = len(Grid(plan.held_out, Streams(0), 3.0, "native").cells)
        told += [("\n".join(text), cells) for text in (plan.lines(1), lines)]
        if count < 2:
            about = plan.held_out[count].path / "clip.json"
            flags = {"flagged": [{"first_chunk": 3, "last_chunk": 3, "reason": "dark"}]}
            about.write_text(json.dumps(json.loads(about.read_text()) | flags))
    return told


def test_held_out_clips_that_give_no_loss_are_named(common, clips_root, tmp_path):
    shutil.copytree(clips_root, tmp_path / "clips")
    save_adapter(tmp_path / "student", random_adapter(AdapterShape.of(open_base(common["base"]).config, 4)), {})
    (told,) = run_ranks(1, flagged, common, str(tmp_path))
    for text, cells in told:
        assert "held out: 2 clips (1 episodes)" in text
        assert (", none with a usable span: there will be no held-out loss" in text) == (cells == 0)
    assert [cells > 0 for _, cells in told] == [True] * 4 + [False] * 2
