"""The recipe of the embedded base: its windows, its two stages, what it writes, and what a kill leaves."""

import json
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small import CONFIG

from rtcwm.data.clips import open_clips
from rtcwm.data.codec import load_codec
from rtcwm.data.write import Start, write_clip
from rtcwm.errors import UserError
from rtcwm.model import loading
from rtcwm.model.adapter_files import load_adapter, read_metadata, save_adapter
from rtcwm.model.attention import install, resolve
from rtcwm.model.lora import Adapter, AdapterShape
from rtcwm.train import preflight, stage, world_base_recipe
from rtcwm.train.bank import Bank, Conditions, Draw
from rtcwm.train.bidirectional import draw_noise, in_bf16, noised, predict_velocities, window_losses
from rtcwm.train.dataset import load_window
from rtcwm.train.stage import Stage, StageSettings
from rtcwm.train.teacher import Teacher
from rtcwm.train.world_base import WorldBaseConfig, main_world_base
from rtcwm.train.world_base_recipe import Recipe, write_base

CPU = torch.device("cpu")
KERNEL = resolve("sdpa", CPU)
TINY = CONFIG | {"text_dim": 64, "rope_theta": 10000.0}
MEGABYTE = 10**6


@pytest.fixture(scope="module")
def clips(tmp_path_factory) -> list:
    """Three clips of noise, two episodes, 9 or 10 chunks: 2, 2 and 3 windows; start frames 0, 1 and 2."""
    root = tmp_path_factory.mktemp("noise") / "clips"
    for index, chunks in enumerate((9, 9, 10)):
        draw = torch.Generator().manual_seed(index)
        video, proxy = (torch.randn(24, 5 * chunks, *size, generator=draw) for size in ((4, 6), (2, 3)))
        starts = {
            m: Start(torch.randn(24, 1, 4, 6, generator=draw), torch.randn(40, 64, generator=draw), torch.ones(40), "")
            for m in range(3)
        }
        write_clip(root, f"clip_{index}", video, proxy, starts, f"episode {index // 2}", load_codec().identity)
    return open_clips(root)


@pytest.fixture(scope="module")
def tiny_config(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.json"
    path.write_text(json.dumps(TINY))
    return path


@pytest.fixture(scope="module")
def settings(clips_root, tiny_config) -> dict:
    """Of a run of seconds on the small rendered world."""
    return {
        "clips": str(clips_root), "model": str(tiny_config), "val_clips": 1, "steps": 6, "adapter_steps": 5, "batch": 2,
        "rank": 4, "log_every": 2, "val_every": 3, "save_every": 2, "val_windows": 2, "sample_steps": 2,
        "device": "cpu",
    }  # fmt: skip


@pytest.fixture(scope="module")
def whole(settings, tmp_path_factory) -> Path:
    """A run that nothing interrupts."""
    out = tmp_path_factory.mktemp("whole") / "run"
    main_world_base(out, **settings)
    return out


def small_base(seed: int = 0) -> torch.nn.Module:
    model = loading.build_base(loading.SeededSource(TINY, seed), CPU, torch.float32)
    install(model, KERNEL, frozen=False)
    return model


def test_a_batch_cuts_the_windows_that_files_hold(clips):
    bank = Bank.load(clips, CPU)
    assert list(bank.names) == [
        ("clip_0", 0), ("clip_0", 1), ("clip_1", 0), ("clip_1", 1), ("clip_2", 0), ("clip_2", 1), ("clip_2", 2),
    ]  # fmt: skip
    by_id = {clip.id: clip for clip in clips}
    batch = bank.batch(bank.truth(torch.arange(7)))
    stale = bank.truth(torch.arange(7))
    stale = bank.batch(replace(stale, stale_picture=~stale.stale_picture))
    for row, (clip, first) in enumerate(bank.names):
        expected = load_window(by_id[clip], first, first, latents=37)
        for found, picture in ((batch, expected.video[:, :, :1]), (stale, expected.picture1)):
            assert torch.equal(found.video[row], expected.video[0]) and torch.equal(found.proxy[row], expected.proxy[0])
            assert torch.equal(found.text[row], expected.text[0]) and torch.equal(found.text_tags, expected.text_tags)
            assert torch.equal(found.audio[row], expected.audio[0])
            assert torch.equal(found.picture1[row], picture[0])


def test_proxies_are_replaced_as_often_as_stated_by_another_clips(clips):
    bank, count = Bank.load(clips, CPU), 40_000
    draw = bank.draw(count, Conditions(0.5, 0.0, 0.0), torch.Generator().manual_seed(0))
    clip_of = torch.tensor([int(name[-1]) for name, _ in bank.names])
    replaced = draw.proxy != draw.window
    assert abs(replaced.float().mean() - 0.5) < 0.01 and abs(draw.zeroed.float().mean() - 0.25) < 0.01
    assert not (draw.zeroed & ~replaced).any()
    assert (clip_of[draw.proxy[replaced]] != clip_of[draw.window[replaced]]).all()
    shares = torch.bincount(draw.proxy[replaced & (draw.window == 0)], minlength=7).float()
    assert torch.allclose(shares / shares.sum(), torch.tensor([0, 0, 0.2, 0.2, 0.2, 0.2, 0.2]), atol=0.03)
    few = Draw(*(getattr(draw, field.name)[:50] for field in fields(draw)))
    found, own = bank.batch(few), bank.batch(bank.truth(few.window))
    others = bank.batch(bank.truth(few.proxy)).proxy * ~few.zeroed.view(-1, 1, 1, 1, 1)
    assert torch.equal(found.proxy, others) and torch.equal(found.video, own.video)
    true = bank.draw(count, Conditions(0.0, 0.0, 0.0), torch.Generator().manual_seed(0))
    assert torch.equal(true.proxy, true.window) and not true.zeroed.any()
    windows = torch.bincount(true.window, minlength=7) / count
    assert torch.allclose(windows, torch.full((7,), 1 / 7), atol=0.01)


def test_text_and_picture_come_from_start_frames_at_or_before_the_window(clips):
    bank = Bank.load(clips, CPU)
    draw = bank.draw(40_000, Conditions(0.0, 0.3, 0.2), torch.Generator().manual_seed(1))
    first = torch.tensor([first for _, first in bank.names])[draw.window]
    start = draw.start - bank.table[draw.window, 1]
    assert (0 <= start).all() and (start <= first).all()
    assert abs(draw.stale_picture.float().mean() - 0.2) < 0.01
    last = first == 2  # of three start frames, half of the draws are uniform
    shares = torch.bincount(start[last], minlength=3) / last.sum()
    assert torch.allclose(shares, torch.tensor([1 / 6, 1 / 6, 1 / 2 + 1 / 6]), atol=0.02)


def test_every_window_of_a_batch_has_its_own_level_as_the_released_teacher_sees_it(clips):
    model, bank = small_base(), Bank.load(clips, CPU)
    windows = torch.tensor([0, 3, 5])
    batch = bank.batch(bank.truth(windows))
    noise, sigma = draw_noise(batch, torch.Generator().manual_seed(2)), torch.tensor([0.0004, 0.5, 1.0])
    found = predict_velocities(model, noised(batch, noise, sigma), batch.layout(stream=False), 1 - sigma, KERNEL)
    teacher = Teacher(model, KERNEL, "E", "released", "window", None)
    for row in range(3):
        one = bank.batch(bank.truth(windows[row : row + 1]))
        alone = type(noise)(*(part[row : row + 1] for part in (noise.video, noise.proxy, noise.picture1)))
        with torch.no_grad():
            expected = teacher.velocity(one, alone, sigma[row].item(), lambda block, *args: block(*args))
        torch.testing.assert_close(found[row : row + 1], expected, rtol=0, atol=1e-5)
    losses = window_losses(model, batch, noise, sigma, KERNEL)
    torch.testing.assert_close(losses, (found - (batch.video - noise.video)).square().mean((1, 2, 3, 4)))


def test_a_rounded_kernel_computes_in_bf16_and_answers_in_the_dtype_of_the_weights():
    qkv = torch.randn(3, 2, 5, 2, 8, generator=torch.Generator().manual_seed(0))
    found = in_bf16(KERNEL).fn(*qkv)
    assert found.dtype == torch.float32 and torch.equal(found, KERNEL.fn(*qkv.bfloat16()).float())


def test_the_loss_falls_on_two_windows(clips, tmp_path):
    model, bank = small_base(), Bank.load(clips, CPU)
    model.requires_grad_(True)
    batch = bank.batch(bank.truth(torch.tensor([0, 4])))
    noise, sigma = draw_noise(batch, torch.Generator().manual_seed(3)), torch.tensor([0.5, 0.9])

    def loss(_step: int) -> torch.Tensor:
        return window_losses(model, batch, noise, sigma, KERNEL).mean()

    plan = StageSettings(
        steps=60, lr=5e-3, lr_min=0.0, warmup=5, weight_decay=0.0, clip=1.0, average=0.9, log_every=60, val_every=0,
        save_every=60,
    )  # fmt: skip
    trained = Stage("overfit", tmp_path / "overfit", plan, model, loss, lambda: {"loss": loss(0).item()})
    trained.train()
    before, after = trained.history[0]["loss"], trained.history[-1]["loss"]
    assert trained.step == 60 and after < 0.6 * before, (before, after)


def test_the_folder_gives_the_velocities_of_the_trained_model(whole, clips):
    source = loading.open_base(str(whole / "embedded_base"))
    loaded = loading.build_base(source, CPU, torch.float32)
    state = torch.load(whole / "base" / "state.pt", weights_only=True)
    trained = small_base()
    untrained = set(dict(trained.named_parameters())) - set(state["average"])
    assert untrained == {"audio_proj_out.weight", "audio_proj_out.bias"}
    with torch.no_grad():
        for name, weight in trained.named_parameters():
            value = state["average"].get(name, weight)
            island = name.split(".")[0] in loading.FP32_ISLAND
            weight.copy_(value if island else value.bfloat16())
    window = Bank.load(clips, CPU)
    window = window.batch(window.truth(torch.tensor([1, 6])))
    times = torch.tensor([0.3, 0.8])
    install(loaded, KERNEL)
    found, expected = (
        predict_velocities(model, window, window.layout(stream=False), times, KERNEL) for model in (loaded, trained)
    )
    assert torch.equal(found, expected)
    dtypes = {name: tensor.dtype for name, tensor in load_file(whole / "embedded_base" / loading.WEIGHTS_FILE).items()}
    assert dtypes["proj_in.weight"] == torch.float32
    assert dtypes["transformer_blocks.0.attn.to_k.weight"] == torch.bfloat16


def test_the_adapter_loads_and_says_what_it_was_trained_on(whole):
    source = loading.open_base(str(whole / "embedded_base"))
    path = whole / "released.safetensors"
    shape = preflight.check_adapter(str(path), source, codec=load_codec().identity["hash"], objective="released")
    assert shape.rank == 4
    adapter = load_adapter(path, source.config)
    state = torch.load(whole / "adapter" / "state.pt", weights_only=True)
    for name, weight in adapter.named_parameters():
        assert torch.equal(weight, state["average"][name].bfloat16().float())


def test_the_recipe_is_recorded(whole, settings):
    recipe = json.loads((whole / "recipe.json").read_text())
    assert recipe["settings"]["seed"] == 0 and recipe["settings"]["steps"] == settings["steps"]
    assert recipe["parameters"] == loading.parameter_count(TINY)
    assert [row["step"] for row in recipe["held_out"]["base"]] == [0, 3, 6]
    assert [row["step"] for row in recipe["held_out"]["adapter"]] == [0, 3, 5]
    assert recipe["held_out"]["base"][-1]["true"] < recipe["held_out"]["base"][0]["true"]
    assert set(recipe["sampled"]) == {"base", "adapter"} and recipe["seconds"]["base"] > 0
    size = sum(path.stat().st_size for path in [*(whole / "embedded_base").iterdir(), whole / "released.safetensors"])
    assert recipe["bytes"] == size


class Killed(BaseException):
    """Stands for a signal that ends the process."""


def test_a_run_killed_anywhere_ends_as_if_it_had_not_been(whole, settings, tmp_path, monkeypatch):
    out, advance, done = tmp_path / "run", Stage._advance, []

    def until(name: str, step: int):
        def stop(self):
            if (self.name, self.step) == (name, step):
                raise Killed
            done.append((self.name, self.step))
            return advance(self)

        return stop

    def killed_with(patch) -> None:
        with monkeypatch.context() as context:
            patch(context)
            with pytest.raises(Killed):
                main_world_base(out, **settings)

    def die(*_args):
        raise Killed

    killed_with(lambda context: context.setattr(Stage, "_advance", until("base", 3)))  # inside stage 1
    killed_with(lambda context: context.setattr(stage.torch, "save", die))  # while a state is written
    killed_with(lambda context: context.setattr(world_base_recipe, "write_base", die))  # between the stages
    killed_with(lambda context: context.setattr(Stage, "_advance", until("adapter", 3)))  # inside stage 2
    monkeypatch.setattr(Stage, "_advance", until("", 0))
    main_world_base(out, **settings)
    assert [step for name, step in done if name == "base"] == [0, 1, 2]  # then, unwatched, from 2 on
    assert [step for name, step in done if name == "adapter"] == [0, 1, 2, 2, 3, 4]
    for name in (f"embedded_base/{loading.WEIGHTS_FILE}", "released.safetensors"):
        found, expected = load_file(out / name), load_file(whole / name)
        assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected), name
        assert read_metadata(out / name) == read_metadata(whole / name)
    found, expected = (json.loads((root / "recipe.json").read_text()) for root in (out, whole))
    assert all(found[key] == expected[key] for key in expected if key != "seconds")
    for name in ("base", "adapter"):
        found, expected = (
            [(row["step"], "held_out" in row) for row in map(json.loads, (root / name / "train_log.jsonl").open())]
            for root in (out, whole)
        )
        assert found == expected


def test_held_out_clips_are_not_trained_on(settings, clips_root, tmp_path):
    recipe = Recipe(config(settings, tmp_path / "run"))
    episodes = {clip.id: clip.episode for clip in open_clips(clips_root)}
    trained, held = ({episodes[clip] for clip, _ in bank.names} for bank in (recipe.bank, recipe.grid.bank))
    assert held and trained and not held & trained and held | trained == set(episodes.values())
    latents = {tuple(row.flatten()[:8].tolist()) for row in recipe.grid.bank.video}
    assert not latents & {tuple(row.flatten()[:8].tolist()) for row in recipe.bank.video}


def test_the_default_base_and_adapter_fit_the_package(tmp_path):
    architecture = loading.read_config(loading.EMBEDDED / "world_base.json")
    assert 4_000_000 <= loading.parameter_count(architecture) <= 8_000_000
    model = loading.build_base(loading.SeededSource(architecture), CPU, torch.float32)
    write_base(tmp_path / "embedded_base", model, architecture, {})
    adapter = Adapter(AdapterShape.of(architecture, 32))
    for pair in adapter.pairs():
        pair.up.data.fill_(1.0)
    save_adapter(tmp_path / "released.safetensors", adapter, {})
    files = [*(tmp_path / "embedded_base").iterdir(), tmp_path / "released.safetensors"]
    assert sum(path.stat().st_size for path in files) <= 16 * MEGABYTE


def test_the_shipped_base_and_adapter_go_together():
    source = loading.open_base("embedded")
    assert isinstance(source, loading.FolderSource) and source.description == "embedded base"
    assert preflight.check_adapter(str(loading.embedded_adapter()), source).rank == 32
    assert loading.parameter_count(source.config) == 6_901_408
    recipe = json.loads((loading.EMBEDDED / "embedded_base" / "recipe.json").read_text())
    assert len(recipe["recipe"]) == 32 and recipe["settings"]["seed"] == 0
    files = [*(loading.EMBEDDED / "embedded_base").iterdir(), loading.embedded_adapter()]
    assert sum(path.stat().st_size for path in files) <= 16 * MEGABYTE


def test_the_embedded_base_is_what_the_recipe_writes(whole, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "EMBEDDED", tmp_path)
    shutil.copytree(whole / "embedded_base", tmp_path / "embedded_base")
    shutil.copy(whole / "released.safetensors", tmp_path)
    source = loading.open_base("embedded")
    assert isinstance(source, loading.FolderSource) and source.description == "embedded base"
    assert source.fingerprint == loading.open_base(str(whole / "embedded_base")).fingerprint
    preflight.check_adapter(str(loading.embedded_adapter()), source)


def config(settings: dict, out: Path, **other) -> WorldBaseConfig:
    """The settings as the command would make them."""
    made = []
    with pytest.MonkeyPatch.context() as context:
        context.setattr(world_base_recipe, "Recipe", lambda config: made.append(config) or _Nothing())
        main_world_base(out, **settings | other)
    return made[0]


class _Nothing:
    def run(self) -> None: ...


def test_mistakes_are_named(whole, settings, clips, tmp_path):
    with pytest.raises(UserError, match="lr: 0.001 there, 0.002 now"):
        Recipe(config(settings, whole, lr=2e-3))
    with pytest.raises(UserError, match="--foreign_proxy 2"):
        config(settings, tmp_path / "run", foreign_proxy=2.0)
    with pytest.raises(UserError, match="add up to at most 1"):
        config(settings, tmp_path / "run", stale_text=0.7, stale_picture=0.4)
    with pytest.raises(UserError, match="text of width 64, the model takes 24"):
        path = tmp_path / "narrow.json"
        path.write_text(json.dumps(CONFIG))
        Recipe(config(settings, tmp_path / "run", model=str(path)))
    one = Bank.load(clips[:1], CPU)
    with pytest.raises(UserError, match="needs a second clip"):
        one.draw(2, Conditions(0.5, 0, 0), torch.Generator())
    short = [replace(clip, chunks=7) for clip in clips]
    with pytest.raises(UserError, match="at least 8 chunks"):
        Bank.load(short, CPU)


def test_a_loss_that_is_not_finite_stops_the_stage(tmp_path):
    layer = torch.nn.Linear(2, 1)
    plan = StageSettings(
        steps=4, lr=1.0, lr_min=0.0, warmup=0, weight_decay=0.0, clip=1.0, average=0.9, log_every=3, val_every=0,
        save_every=1,
    )  # fmt: skip

    def loss(step: int) -> torch.Tensor:
        return layer.weight.sum() * (float("nan") if step == 2 else 1.0)

    with pytest.raises(UserError, match="the loss is nan at step 3"):
        Stage("broken", tmp_path, plan, layer, loss, lambda: {"loss": 0.0}).train()
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert state["step"] == 2 and torch.isfinite(state["weights"]["weight"]).all()


def test_the_command_line_knows_the_recipe(tmp_path):
    command = [sys.executable, "-m", "rtcwm.cli", "world-base", "--out", str(tmp_path / "run"), "--steps", "0"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "rtcwm: error: --steps 0: expected at least 1" in done.stderr
