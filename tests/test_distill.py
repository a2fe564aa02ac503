"""Distillation: the alternation against plain torch, resume after kills, ranks that differ, and bad input."""

import json
import random
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from launch import alone, deepspeed, kill, numbers, rows, run, start
from ranks import go_bad, refusals, run_ranks
from safetensors.torch import load_file, save_file
from small import drawn, random_adapter

from rtcwm.data.clips import open_clips
from rtcwm.engine.streams import Streams
from rtcwm.errors import UserError
from rtcwm.model.adapter_files import load_adapter, read_metadata, save_adapter
from rtcwm.model.attention import Masked, install, resolve
from rtcwm.model.blocks import predict_velocity
from rtcwm.model.loading import build_base, open_base
from rtcwm.model.lora import Adapter, AdapterShape, inject
from rtcwm.model.masks import boolean_mask
from rtcwm.model.packing import Window
from rtcwm.model.sampler import Conditions, rollout
from rtcwm.model.schedule import SamplerConfig
from rtcwm.train.config import DistillConfig
from rtcwm.train.dataset import EpochSampler, load_window
from rtcwm.train.distill import Distiller, Draws
from rtcwm.train.distill_plan import prepare, rollout_starts
from rtcwm.train.span import SpanNoise

MODULE = "rtcwm.train.distill"
ITERATIONS = 3


def make_adapter(path: Path, config: dict, seed: int, rank: int = 4, **metadata: str) -> str:
    adapter = random_adapter(AdapterShape.of(config, rank), seed)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.copy_(parameter.bfloat16())  # as the file holds it
    save_adapter(path, adapter, metadata)
    return str(path)


@pytest.fixture(scope="module")
def options(clips_root, base_config, tmp_path_factory) -> dict:
    """Settings of a small run with three different adapters."""
    folder, config = tmp_path_factory.mktemp("adapters"), open_base(str(base_config)).config
    return {
        "clips": str(clips_root), "base": str(base_config), "val_clips": 1, "iters": ITERATIONS, "min_chunks": 8,
        "max_chunks": 8, "critic_per_gen": 2, "grad_chunks": 3, "gen_lr": 2e-3, "critic_lr": 4e-3, "warmup": 2,
        "seed": 7,
        "student_lora": make_adapter(folder / "student.safetensors", config, 1),
        "teacher_lora": make_adapter(folder / "teacher.safetensors", config, 2, rank=6),
        "critic_lora": make_adapter(folder / "critic.safetensors", config, 3, rank=5),
    }  # fmt: skip


def alternation(world, options: dict, base: dict | None = None, folder: str = "") -> dict:
    """Some iterations through the engines."""
    if base is not None:
        path = Path(folder) / f"base{world.rank}.json"
        path.write_text(json.dumps(base))
        options = options | {"base_config": str(path)}
    config = DistillConfig(**options)
    trainer = Distiller(world, config, prepare(world, config))
    before = trainer.base.digest()
    frozen = [parameter.detach().clone() for parameter in trainer.teacher_adapter.parameters()]
    outcomes, gathered = [], []
    while trainer.step < config.iters:
        outcomes.append(trainer.train_step().row)
        trainer.step += 1
        gathered.append(trainer.base.gathered())
    teacher_moved = any(
        not torch.equal(old, new) for old, new in zip(frozen, trainer.teacher_adapter.parameters(), strict=True)
    )
    trainer.record.close()
    return {
        "rows": outcomes,
        "student": {name: value.detach().clone() for name, value in trainer.student.adapter.named_parameters()},
        "critic": {name: value.detach().clone() for name, value in trainer.critic.adapter.named_parameters()},
        "average": trainer.average.state_dict() if trainer.average else {},
        "gathered": gathered,
        "untouched": trainer.base.digest() == before and not teacher_moved and trainer.base.slot.active is None,
    }


def plain(options: dict, ranks: int, one_level: bool = False) -> dict:
    """The same algorithm for all ranks' samples in one process: plain torch, no engines, no recompute, all of a
    window's rows under one boolean mask or none, and the formulas written out.

    With ``one_level`` all samples of an update take the level and the window that the first one draws, as a batch does.
    """
    config = DistillConfig(**options)
    source = open_base(config.base)
    model = build_base(source, torch.device("cpu"), torch.float32)
    kernel, slot = resolve("sdpa", "cpu"), inject(model)
    install(model, kernel)
    student, teacher, critic = (
        load_adapter(Path(path), source.config)
        for path in (config.student_lora, config.teacher_lora, config.critic_lora)
    )
    settings = {"betas": (0.0, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    optimizers = {
        "student": torch.optim.AdamW(student.parameters(), lr=config.gen_lr, **settings),
        "critic": torch.optim.AdamW(critic.parameters(), lr=config.critic_lr, **settings),
    }
    clips, streams = open_clips(Path(config.clips)), Streams(config.seed)
    held = {entry["clip"] for entry in json.loads((Path(config.out) / "val_samples.json").read_text())}
    starts = [(clip, m) for clip in clips if clip.id not in held for m in rollout_starts(clip, config.max_chunks)]
    samplers = [EpochSampler(len(starts), ranks, config.seed) for _ in range(ranks)]
    sampler = SamplerConfig(steps=4, shift=5.0, history=config.rollout_history, kv_reuse=config.kv_reuse)
    latents_of_window = 37 if config.teacher_kind == "released" else 30

    def bound(adapter):
        def run(block, hidden, *rest):
            with slot.bind(adapter):
                return block(hidden, *rest)

        return run

    def cut(latents: torch.Tensor, truth: Window, first: int) -> Window:
        part = slice(5 * first, 5 * first + latents_of_window)
        picture = latents[:, :, 5 * first : 5 * first + 1] if config.teacher_kind == "released" else truth.picture1
        audio = torch.zeros(1, 2 * (207 if config.teacher_kind == "released" else 170), 32)
        return replace(truth, video=latents[:, :, part], proxy=truth.proxy[:, :, part], picture1=picture, audio=audio)

    def predicted(window: Window, noise: SpanNoise, sigma: float, adapter: Adapter) -> torch.Tensor:
        reference = min(sigma, 0.001) if config.teacher_kind == "released" else 0.001
        noisy = replace(
            window,
            video=(1 - sigma) * window.video + sigma * noise.video,
            proxy=(1 - reference) * window.proxy + reference * noise.proxy,
            picture1=(1 - reference) * window.picture1 + reference * noise.picture1,
        )
        if config.teacher_kind == "released":
            layout = noisy.layout(stream=False)
            time_of_text, attend, times = "video", None, torch.tensor(1 - sigma)
        else:
            layout = noisy.layout(stream=True)
            time_of_text, attend, times = "pinned", Masked(boolean_mask(layout, "E")), torch.full((6,), 1 - sigma)
        return predict_velocity(model, noisy, layout, times, attend, text_time=time_of_text, run=bound(adapter))

    def level(generator: torch.Generator) -> float:
        uniform, amount = 0.02 + 0.96 * torch.rand((), generator=generator), config.score_shift
        return (amount * uniform / (1 + (amount - 1) * uniform)).item()

    def update(name: str, adapter: Adapter, losses: list, lr: float) -> tuple[float, float]:
        loss = torch.stack(losses).mean()
        for group in optimizers[name].param_groups:
            group["lr"] = lr
        optimizers[name].zero_grad()
        gradients = torch.autograd.grad(loss, list(adapter.parameters()))
        for parameter, gradient in zip(adapter.parameters(), gradients, strict=True):
            parameter.grad = gradient
        norm = torch.nn.utils.clip_grad_norm_(adapter.parameters(), 1.0).item()
        optimizers[name].step()
        return loss.item(), norm

    table, mean = [], {name: value.detach().clone() for name, value in student.named_parameters()}
    for iteration in range(config.iters):
        generator = streams.shared("rollout", iteration)
        chunks = int(torch.randint(config.min_chunks, config.max_chunks + 1, (), generator=generator))
        stops = torch.randint(4, (chunks,), generator=generator).tolist() if config.stops == "random" else [3] * chunks
        warm = min(1.0, (iteration + 1) / config.warmup)
        losses, rollouts = [], []
        for rank in range(ranks):
            visit = samplers[rank].next(rank)
            clip, first = starts[visit.sample]
            truth = load_window(clip, first, first, chunks=chunks)
            conditions = Conditions(
                truth.picture1, truth.text, truth.text_tags, torch.zeros(1, 340, 32), truth.geometry
            )
            made = rollout(
                model, kernel, conditions, truth.proxy, sampler, drawn(streams.own("rollout noise", visit.position)),
                stops, range(chunks - config.grad_chunks, chunks), bound(student), bound(student),
            )  # fmt: skip
            latents = torch.cat(made, dim=2)
            begin = chunks - (8 if config.teacher_kind == "released" else 6)
            window = cut(latents.detach(), truth, begin)
            scores = []
            for draw in range(config.score_draws):
                own = streams.own(f"student score {draw}", visit.position)
                if rank == 0 or not one_level:
                    sigma = level(own)
                noise = SpanNoise.draw(window, own)
                with torch.no_grad():
                    noisy = (1 - sigma) * window.video + sigma * noise.video
                    real = noisy + sigma * predicted(window, noise, sigma, teacher)
                    scores.append((real, noisy + sigma * predicted(window, noise, sigma, critic)))
            x = latents[:, :, 5 * begin : 5 * begin + latents_of_window]
            alive = torch.arange(x.shape[2]) + 5 * begin >= 5 * (chunks - config.grad_chunks)
            pull = sum((fake - real) / (x - real).abs().mean() for real, fake in scores) / len(scores)
            target = (x - pull).detach()
            losses.append(0.5 * ((x - target)[:, :, alive] ** 2).mean())
            rollouts.append((visit.position, latents.detach(), truth))
        dmd, norm = update("student", student, losses, config.gen_lr * warm)
        decay = min(config.ema, (iteration + 1) / (iteration + 10))
        mean = {name: decay * mean[name] + (1 - decay) * value.detach() for name, value in student.named_parameters()}
        critic_losses, critic_norms = [], []
        for turn in range(config.critic_per_gen):
            losses = []
            for position, latents, truth in rollouts:
                own = streams.own(f"critic {turn}", position)
                if position == rollouts[0][0] or not one_level:
                    sigma = level(own)
                    count = chunks - (8 if config.teacher_kind == "released" else 6) + 1
                    begin = int(torch.randint(count, (), generator=own))
                window = cut(latents, truth, begin)
                noise = SpanNoise.draw(window, own)
                error = predicted(window, noise, sigma, critic) - (window.video - noise.video)
                losses.append(error.square().mean())
            loss, size = update("critic", critic, losses, config.critic_lr * warm)
            critic_losses.append(loss)
            critic_norms.append(size)
        table.append({
            "chunks": chunks, "stops": stops, "dmd": dmd, "student_norm": norm,
            "critic": sum(critic_losses) / len(critic_losses), "critic_norm": sum(critic_norms) / len(critic_norms),
        })  # fmt: skip
    return {
        "rows": table,
        "student": dict(student.named_parameters()),
        "critic": dict(critic.named_parameters()),
        "average": mean,
    }


def assert_equal(result: dict, expected: dict, options: dict) -> None:
    for found, wanted in zip(result["rows"], expected["rows"], strict=True):
        assert (found["chunks"], found["stops"]) == (wanted["chunks"], wanted["stops"])
        for key in ("dmd", "critic", "student_norm", "critic_norm"):
            assert found[key] == pytest.approx(wanted[key], rel=2e-4), key
    for role, lr in (("student", options["gen_lr"]), ("critic", options["critic_lr"])):
        for name, value in expected[role].items():
            # With beta1 = 0 AdamW takes a step of the learning rate's size along each gradient's sign, so a gradient
            # that is rounding alone moves a weight by up to that; such weights are few.
            far = (result[role][name] - value).abs() > 0.01 * lr
            assert far.float().mean() < 0.01, (role, name, far.float().mean().item())
    for name, value in result["average"].items():
        far = (value - expected["average"][name]).abs() > 0.01 * options["gen_lr"]
        assert far.float().mean() < 0.01, name
    assert result["untouched"] and set(result["gathered"]) == {0}


def test_two_ranks_equal_plain_torch(options, tmp_path):
    choice = options | {"out": str(tmp_path / "run")}
    results = run_ranks(2, alternation, choice)
    expected = plain(choice, ranks=2)
    for result in results:
        assert_equal(result, expected, options)


def test_a_batch_of_two_equals_two_ranks(options, tmp_path):
    """Where all requests of a batch share level and window, as a batch must: one critic update, both ranks alike."""
    choice = options | {"out": str(tmp_path / "run"), "batch": 2, "iters": 2}
    (result,) = run_ranks(1, alternation, choice)
    expected = plain(choice, ranks=2, one_level=True)
    assert_equal(result, expected, options)


def test_two_groups_of_two_equal_plain_torch(options, tmp_path):
    choice = options | {"out": str(tmp_path / "run"), "iters": 2}
    results = run_ranks(4, alternation, choice, {"shard_group": 2}, str(tmp_path))
    expected = plain(choice, ranks=4)
    for result in results:
        assert_equal(result, expected, options)


def test_a_causal_teacher_and_all_other_choices_equal_plain_torch(options, tmp_path):
    choice = options | {
        "out": str(tmp_path / "run"), "teacher_kind": "causal", "min_chunks": 6, "max_chunks": 8, "kv_reuse": False,
        "rollout_history": "clean", "grad_chunks": 6, "iters": 2, "stops": "last", "score_draws": 2, "score_shift": 3.0,
        "ema": 0.3,
    }  # fmt: skip
    config = open_base(options["base"]).config
    for role, seed in (("teacher", 2), ("critic", 3)):
        choice[f"{role}_lora"] = make_adapter(tmp_path / f"{role}.safetensors", config, seed, objective="df")
    (result,) = run_ranks(1, alternation, choice)
    assert_equal(result, plain(choice, ranks=1), options)
    assert result["average"]


def flags(options: dict, **changes: object) -> dict:
    return options | {"iters": 4, "save_every": 1, "critic_per_gen": 1, "ema": 0.5} | changes


def test_killed_at_a_random_moment_and_resumed_it_ends_bit_for_bit(options, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    said = run(deepspeed("--num_gpus", "2"), MODULE, flags(options, out=whole), tmp_path / "log0")
    assert "memory of a card, by formula" in said and "student's backward pass" in said
    delay = random.SystemRandom().uniform(0, 1.5)
    process = start(2, MODULE, flags(options, out=broken), tmp_path / "log1")
    while "saved" not in (tmp_path / "log1").read_text():
        assert process.poll() is None, (tmp_path / "log1").read_text()
        time.sleep(0.05)
    time.sleep(delay)
    kill(process)
    run(2, MODULE, flags(options, out=broken), tmp_path / "log2")
    roles = ("critic", "student", "student_ema")
    for role in roles:
        states = [load_file(out / "state" / "step00004" / f"{role}.safetensors") for out in (whole, broken)]
        assert states[0].keys() == states[1].keys()
        for name, value in states[0].items():
            assert torch.equal(value, states[1][name]), f"{role} {name}, killed after {delay:.3f} s"
    assert without_clock(whole) == without_clock(broken)
    assert [row["step"] for row in rows(broken)] == [0, 1, 2, 3, 4]
    made = sorted(path.name for path in broken.glob("*.safetensors"))
    assert made == sorted(f"{role}_iter{step:05d}.safetensors" for role in roles for step in (1, 2, 3, 4))
    metadata = read_metadata(broken / "student_iter00004.safetensors")
    assert (metadata["steps"], metadata["shift"], metadata["history_level"]) == ("4", "5.0", "0.625")
    output = (tmp_path / "log0").read_text()
    for word in ("s a chunk", "R 8 stops", "dmd", "critic", "|grad|", "norms", "rollout", "ETA", "held-out"):
        assert word in output, word


def without_clock(out: Path) -> list[dict]:
    return [{key: value for key, value in row.items() if key != "timing"} for row in numbers(out)]


def disagree(world, options: dict) -> tuple[str, float]:
    """Ranks whose shared stream differs, as after a copied but edited config on one node."""
    config = DistillConfig(**options)
    trainer = Distiller(world, config, prepare(world, config))
    trainer.streams = Streams(config.seed + world.rank)
    began = time.monotonic()
    try:
        for _ in range(3):  # the same numbers may be drawn once
            trainer.train_step()
            trainer.step += 1
    except UserError as error:
        return str(error), time.monotonic() - began
    return "nothing was noticed", 0.0


def test_ranks_that_differ_end_in_a_named_error(options, tmp_path):
    for message, seconds in run_ranks(3, disagree, options | {"out": str(tmp_path / "run")}):
        assert "rank 1 differs from rank 0 in iteration, rollout length or stopping steps" in message
        assert seconds < 20


def test_a_teacher_that_changed_is_not_resumed_with(options, tmp_path):
    teacher, out = shutil.copy(options["teacher_lora"], tmp_path / "teacher.safetensors"), tmp_path / "run"
    arguments = options | {"out": out, "teacher_lora": teacher, "iters": 1, "critic_per_gen": 1}
    run(1, MODULE, arguments, tmp_path / "log")
    shutil.copy(options["critic_lora"], teacher)
    output = run(1, MODULE, arguments, tmp_path / "log2", code=2)
    assert "holds a run with other settings" in output and "files:" in output


def disagree_from_the_start(world, options: dict) -> str:
    try:
        prepare(world, DistillConfig(**options | {"critic_per_gen": 2 + world.rank, "seed": 3}))
    except UserError as error:
        return str(error)
    return "accepted"


def test_ranks_with_other_settings_are_named_before_anything_heavy(options, tmp_path):
    messages = run_ranks(2, disagree_from_the_start, options | {"out": str(tmp_path / "run")})
    assert messages == ["rank 1 differs from rank 0 in settings: critic_per_gen 3 against 2"] * 2
    assert not (tmp_path / "run").exists()


def test_the_shared_draws_cover_their_range_and_repeat(options):
    config = DistillConfig(**options | {"out": "x", "min_chunks": 8, "max_chunks": 14})
    draws = [Draws.of(config, Streams(1), iteration) for iteration in range(200)]
    assert {draw.chunks for draw in draws} == set(range(8, 15))
    assert {stop for draw in draws for stop in draw.stops} == {0, 1, 2, 3}
    assert all(len(draw.stops) == draw.chunks for draw in draws)
    assert draws[5] == Draws.of(config, Streams(1), 5) and draws[5] != draws[6]


CAUSAL = {"teacher_kind": "causal", "min_chunks": 6}


def test_bad_input_is_refused_before_anything_heavy(options, tmp_path):
    source = open_base(options["base"])
    config = source.config

    def adapter(name: str, **metadata: str) -> str:
        return make_adapter(tmp_path / name, config, 1, **metadata)

    distilled = {"objective": "dmd", "steps": "4", "shift": "5.0", "history": "last-step"}
    (tmp_path / "pair").mkdir()
    paired = adapter("pair/student_iter00004.safetensors", **distilled)
    adapter("pair/critic_iter00004.safetensors", objective="critic", teacher_kind="released")
    accumulate = tmp_path / "accumulate.json"
    accumulate.write_text('{"gradient_accumulation_steps": 2}')
    huge = tmp_path / "huge.json"
    huge.write_text('{"ffn_dim": 1000000000}')
    flagged = shutil.copytree(options["clips"], tmp_path / "flagged")
    for about in flagged.glob("*/clip.json"):
        content = json.loads(about.read_text())
        content["flagged"] = [{"first_chunk": 3, "last_chunk": 3, "reason": "dark"}]
        about.write_text(json.dumps(content))
    cases = [
        ({"grad_chunks": 9}, "--grad-chunks 9 is over the 8 chunks of a released teacher's window"),
        ({"grad_chunks": 7, "teacher_kind": "causal"}, "--grad-chunks 7 is over the 6 chunks"),
        ({"min_chunks": 7}, "takes 8 chunks"),
        ({"max_chunks": 9}, "0 of 4 training clips remain"),
        ({"clips": str(flagged)}, "no clip holds a rollout of --max-chunks 8"),
        ({"student_lora": adapter("s1", base="0" * 32)}, "was trained on base 0000"),
        ({"student_lora": adapter("s2", span="7")}, "was made with span 7, this run has 6"),
        ({"student_lora": adapter("s3", mask_rule="own")}, "was made with mask_rule own, this run has E"),
        ({"student_lora": adapter("s4", **distilled | {"shift": "3.0"})}, "was made with shift 3.0, this run has 5.0"),
        ({"student_lora": adapter("s5", **distilled | {"steps": "2"})}, "was made with steps 2, this run has 4"),
        ({"student_lora": adapter("s6", objective="critic")}, "is a critic"),
        ({"student_lora": adapter("student_iter9.safetensors", **distilled), "critic_lora": None}, "is not beside it"),
        ({"student_lora": paired, "critic_lora": None}, "accepted"),
        ({"student_lora": str(tmp_path / "none")}, "no adapter file"),
        ({"teacher_lora": adapter("t1", objective="df")}, "Set --teacher-kind causal"),
        ({"critic_lora": adapter("c1", objective="df")}, "cannot score a released teacher's"),
        (
            {"critic_lora": adapter("c2", objective="critic", teacher_kind="causal")},
            "teacher_kind causal, this run has",
        ),
        ({"critic_lora": adapter("c3", objective="dmd")}, "is a student"),
        (
            {"critic_lora": adapter("c4", objective="critic", teacher_picture1="start")},
            "teacher_picture1 start, this run",
        ),
        ({"student_lora": adapter("s7", objective="released")}, "is a bidirectional adapter"),
        ({"student_lora": adapter("s8", text_time="video")}, "is a bidirectional adapter"),
        ({"student_lora": adapter("final", **distilled), "critic_lora": None}, "its name does not tell the critic's"),
        ({"teacher_lora": adapter("t2", objective="critic")}, "is a critic, the score of a student's samples"),
        ({"teacher_lora": None}, "--teacher-lora is required on this --base"),
        (CAUSAL | {"teacher_lora": adapter("t3", objective="released")}, "was not trained causally (released)"),
        (CAUSAL | {"teacher_lora": adapter("t4", objective="df", mask_rule="own")}, "mask_rule own, this run has E"),
        (
            CAUSAL | {"teacher_lora": adapter("t5", objective="df"), "critic_lora": adapter("c5")},
            "cannot score a causal",
        ),
        (
            CAUSAL | {"teacher_lora": adapter("t6", objective="df"), "critic_lora": adapter("c6", objective="df")},
            "accepted",
        ),
        ({"student_config": str(accumulate)}, "gradient_accumulation_steps is 2"),
        ({"base": str(huge)}, "of host memory"),
        ({"mask_rule": "ahead1"}, "cannot reuse keys and values"),
        ({"val_clips": 6}, "hold out"),
    ]
    choices = [options | {"out": str(tmp_path / f"run{index}")} | change for index, (change, _) in enumerate(cases)]
    for messages in run_ranks(2, refusals, prepare, DistillConfig, choices):
        for message, (change, expected) in zip(messages, cases, strict=True):
            assert expected in message, f"{change}: {message}"
    with pytest.raises(UserError, match="--min-chunks 9 is over --max-chunks 8"):
        DistillConfig(**options | {"out": "x", "min_chunks": 9})
    with pytest.raises(UserError, match="--student-lora is required"):
        DistillConfig(out="x")


def test_the_default_schedule_is_the_recipe():
    config = DistillConfig(out="x", student_lora="y")
    found = (config.steps, config.iters, config.min_chunks, config.max_chunks, config.gen_lr, config.critic_lr)
    assert found == (4, 200, 8, 14, 2e-6, 4e-6)
    assert (config.critic_per_gen, config.grad_chunks, config.teacher_kind, config.teacher_picture1) == (
        7,
        4,
        "released",
        "window",
    )
    assert (config.warmup, config.save_every) == (10, 20)


def two_good_iterations(world, options: dict) -> tuple:
    config = DistillConfig(**options)
    trainer = Distiller(world, config, prepare(world, config))
    return go_bad(trainer, trainer.student.adapter, good=2)


def test_bad_numbers_end_the_run_with_the_last_healthy_pair(options, tmp_path):
    choice = options | {
        "out": str(tmp_path / "run"),
        "iters": 20,
        "max_skips": 2,
        "save_every": 100,
        "critic_per_gen": 1,
    }
    message, student = run_ranks(1, two_good_iterations, choice)[0]
    assert "2 iterations in a row had a non-finite loss or gradient (iterations 3 to 4)" in message
    state = load_file(tmp_path / "run" / "state" / "step00002" / "student.safetensors")
    assert all(torch.equal(state[name], value) for name, value in student.items())
    assert (tmp_path / "run" / "critic_iter00002.safetensors").is_file()
    assert rows(tmp_path / "run")[-1]["skipped"] == 2


def one_bad_critic_update_each(world, options: dict) -> tuple:
    """The first of an iteration's two critic updates is never finite."""
    config = DistillConfig(**options)
    trainer = Distiller(world, config, prepare(world, config))
    backward, calls = trainer.critic.backward, iter(range(100))
    trainer.critic.backward = lambda loss: backward(loss * float("nan") if next(calls) % 2 == 0 else loss)
    with pytest.raises(UserError, match="2 iterations in a row"):
        trainer.run()
    return trainer.student.updates, trainer.critic.updates, trainer.student.state_dict()


def test_what_skipped_iterations_did_update_is_saved(options, tmp_path):
    choice = options | {"out": str(tmp_path / "run"), "iters": 3, "max_skips": 2, "critic_per_gen": 2}
    student, critic, state = run_ranks(1, one_bad_critic_update_each, choice)[0]
    assert (student, critic) == (2, 2)
    saved = load_file(tmp_path / "run" / "state" / "step00002" / "student.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in state.items())
    assert (tmp_path / "run" / "student_iter00002.safetensors").is_file()


def test_started_alone_with_a_truncated_student(options, tmp_path):
    student = tmp_path / "student.safetensors"
    tensors = load_file(options["student_lora"])
    save_file(tensors, student)
    student.write_bytes(student.read_bytes()[:-9])
    output = run(
        alone(), MODULE, options | {"out": tmp_path / "run", "student_lora": student}, tmp_path / "log", code=2
    )
    assert "may be truncated" in output and "Traceback" not in output and not (tmp_path / "run").exists()
