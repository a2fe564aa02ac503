"""The recipe over seeds: jobs in order, commands that the programs accept, numbers and goals, what failed."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rtcwm.errors import UserError
from rtcwm.recipe.command import Settings
from rtcwm.recipe.plan import ABLATIONS, Job, Plan
from rtcwm.recipe.results import collect, draw, report
from rtcwm.recipe.run import check, claim, run_jobs
from rtcwm.train.config import DistillConfig, TrainConfig, parse


def settings(out: Path, **changes: object) -> Settings:
    given = {
        "seeds": (1, 2), "ablations": ("last-stop", "all@2"), "jobs": 3, "clips": 12, "test_clips": 2, "chunks": 20,
        "steps": 30, "iters": 7, "batch": 2,
    }  # fmt: skip
    return Settings(out=out, **given | changes)


def test_every_job_stands_after_those_that_it_needs(tmp_path):
    jobs = Plan(settings(tmp_path), on_card=False).jobs()
    seen: set[str] = set()
    for job in jobs:
        assert set(job.needs) <= seen | {"test_clips"}, job.name
        seen.add(job.name)
    assert len(seen) == len(jobs) and len({job.done for job in jobs}) == len(jobs)
    assert "seed1/last-stop" in seen and "seed1/no-reuse" not in seen
    assert {f"seed2/{name}" for name in ABLATIONS} <= seen
    needs = {job.name: set(job.needs) for job in jobs}
    assert needs["seed2/long/critic-1"] == {"test_clips", "seed2/critic-1"} and "seed1/long/critic-1" not in needs
    assert needs["seed1/long/df20"] == {"test_clips", "seed1/df"}
    assert needs["seed1/long/distilled"] == needs["seed1/short"] == {"test_clips", "seed1/default"}


@pytest.mark.parametrize("on_card", [False, True])
def test_the_programs_accept_their_commands(tmp_path, on_card):
    """Every flag goes through the program's own parser, and what a variant changes arrives."""
    plan = Plan(settings(tmp_path), on_card)
    configs = {}
    for job in plan.jobs():
        module, words = job.words[2], list(job.words[3:])
        if module == "rtcwm.train.train":
            configs[job.name] = parse(module, TrainConfig, words)
        elif module == "rtcwm.train.distill":
            configs[job.name] = parse(module, DistillConfig, words)
    assert configs["seed1/df"].steps == 30 and configs["seed1/df"].attn == ("flex" if on_card else "sdpa")
    default, df = configs["seed2/default"], str(plan.df_adapter(2))
    assert (default.student_lora, default.seed, default.iters) == (df, 2, 7)
    changes = {
        "no-reuse": {"kv_reuse": False}, "clean-history": {"rollout_history": "clean"}, "last-stop": {"stops": "last"},
        "random-stop": {"stops": "random"},
        "causal-teacher": {"teacher_kind": "causal", "teacher_lora": df, "teacher_picture1": "window"},
        "grad-chunks-1": {"grad_chunks": 1}, "grad-chunks-2": {"grad_chunks": 2}, "critic-1": {"critic_per_gen": 1},
        "critic-5": {"critic_per_gen": 5}, "score-shift-12": {"score_shift": 12.0},
        "window-picture1": {"teacher_picture1": "window"},
    }  # fmt: skip
    for name, change in changes.items():
        assert configs[f"seed2/{name}"] == replace(default, out=str(tmp_path / "seed2" / name), **change), name


def evaluation(psnr: list[float], frechet: tuple[float, float, float], sharpness: float = 1.0) -> dict:
    slope = torch.linalg.lstsq(
        torch.stack([torch.ones(len(psnr)), torch.arange(len(psnr)).float()], dim=1), torch.tensor(psnr)[:, None]
    ).solution[1].item()  # fmt: skip
    return {
        "kind": "few",
        "measures": {
            "psnr": {"all": sum(psnr) / len(psnr), "drift": slope, "chunks": psnr},
            "frechet": dict(zip(("all", "first_half", "last_half"), frechet)),
            "sharpness": {"all": sharpness},
            "motion": {"all": 1.1},
        },
    }


def write_results(plan: Plan, seed: int, short: dict, long: dict) -> None:
    files = {plan.long(seed, name): {name: row} for name, row in long.items()}
    for path, models in (files | {plan.short(seed): short}).items():
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"models": {"codec": {"kind": "codec"}} | models}))


def test_tables_goals_and_the_plot(tmp_path):
    plan = Plan(settings(tmp_path, ablations=("critic-1@2",)), on_card=False)
    falling = [22 - 0.05 * chunk for chunk in range(20)]
    for seed, distilled in ((1, [20.9] * 20), (2, [20.0] * 20)):
        short = {
            "naive": evaluation([16.0] * 14, (60, 50, 70)), "released": evaluation([23.0] * 7, (3, 3, 3)),
            "df20": evaluation([21.0] * 14, (3, 3, 3)), "df4": evaluation([22.0] * 14, (12, 12, 12)),
            "distilled": evaluation(distilled[:14], (2, 2, 2.5)),
        }  # fmt: skip
        long = {
            "df20": evaluation([21.0] * 20 if seed == 1 else falling, (3, 3, 3)),
            "df4": evaluation([22.0] * 20, (12, 12, 12)),
            "distilled": evaluation(distilled, (2, 2, 2.5 if seed == 1 else 2.7), 1.05 if seed == 1 else 1.2),
        }  # fmt: skip
        if seed == 2:
            long["critic-1"] = evaluation([19.5] * 20, (9, 9, 9))
        write_results(plan, seed, short, long)
    found = collect(plan)
    held = {text: by_seed for text, by_seed in found["goals"].items()}
    assert [by_seed["1"] for by_seed in held.values()] == [True] * 6
    # drift -0.05; sharpness 1.2; 20.0 dB under 21.5 - 0.5; 2.7 over 1.3 x 2
    assert [by_seed["2"] for by_seed in held.values()] == [True, False, True, False, False, False]
    text = report(plan, found)
    assert "20.45 [20.00..20.90]" in text  # mean, least and most over the seeds, of the first 6, 14 and of all chunks
    assert "| critic-1 | 19.50 | 19.50 |" in text and "20 chunks, 2 unseen clips" in text
    assert "2 NO" in text
    draw(found, tmp_path / "recipe.png")
    assert (tmp_path / "recipe.png").stat().st_size > 2000


def job(tmp_path: Path, name: str, code: str, *needs: str) -> Job:
    return Job(name, (sys.executable, "-c", code), tmp_path / name, needs)


def test_jobs_wait_run_once_and_say_what_failed(tmp_path, capsys):
    make = "import pathlib, sys; pathlib.Path(r'{}').write_text('x')"
    assert_there = "import pathlib; assert pathlib.Path(r'{}').exists()\n"
    jobs = [
        job(tmp_path, "first", make.format(tmp_path / "first")),
        job(tmp_path, "second", assert_there.format(tmp_path / "first") + make.format(tmp_path / "second"), "first"),
        job(tmp_path, "broken", "raise SystemExit('no such disk')", "first"),
        job(tmp_path, "empty", "pass"),
        job(tmp_path, "after", make.format(tmp_path / "after"), "broken"),
    ]
    assert sorted(run_jobs(jobs, 2, 0, tmp_path / "logs")) == ["after", "broken", "empty"]
    output = capsys.readouterr().out
    assert "no such disk" in output and "broken ended with code 1" in output and "empty ended with code 0" in output
    assert not (tmp_path / "after").exists()
    (tmp_path / "second").write_text("kept")
    assert run_jobs(jobs[:2], 2, 0, tmp_path / "logs") == []
    assert (tmp_path / "second").read_text() == "kept"


def test_bad_settings_are_named(tmp_path):
    for change, words in (
        ({"chunks": 13}, "at least 14"), ({"iters": 0}, "--iters 0"), ({"seeds": (1, 1)}, "each seed once"),
        ({"clips": 4}, "at least 8"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=words):
            check(settings(tmp_path, **change))
    for ablation in ("no-such", "critic-1@9"):
        with pytest.raises(UserError, match="expected one of all"):
            Plan(settings(tmp_path, ablations=(ablation,)), on_card=False).jobs()
    claim(settings(tmp_path))
    claim(settings(tmp_path, seeds=(3,), jobs=1))
    with pytest.raises(UserError, match="choose another folder"):
        claim(settings(tmp_path, iters=9))
