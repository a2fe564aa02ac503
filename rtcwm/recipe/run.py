"""Runs a recipe: its jobs side by side as their needs allow, then what they say together."""

import json
import os
import subprocess
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import cycle
from pathlib import Path

import torch

from rtcwm.engine.checkpoint import replace_file
from rtcwm.errors import UserError
from rtcwm.recipe.command import Settings
from rtcwm.recipe.plan import Job, Plan
from rtcwm.recipe.results import collect, draw, report

LAST_LINES = 12
"""Lines of a failed job's log that are shown."""


def run(settings: Settings) -> None:
    """All jobs that are not done yet, then recipe.json, recipe.md and recipe.png in the recipe's folder.

    Raises:
        UserError: settings that do not go together, or jobs that failed; what others made stays, and the same command
            goes on from there.
    """
    check(settings)
    cards = torch.cuda.device_count()
    plan = Plan(settings, on_card=cards > 0)
    jobs = plan.jobs()
    claim(settings)
    print(
        f"recipe: {len(jobs)} jobs, {sum(job.done.is_file() for job in jobs)} done already, {settings.jobs} at a time"
    )
    failed = run_jobs(jobs, settings.jobs, cards, settings.out / "logs")
    if failed:
        raise UserError(
            f"{len(failed)} of {len(jobs)} jobs failed: {', '.join(failed)}. Mend that, then repeat the command"
        )
    found = collect(plan)
    replace_file(settings.out / "recipe.json", lambda path: path.write_text(json.dumps(found, indent=1) + "\n"))
    text = report(plan, found)
    replace_file(settings.out / "recipe.md", lambda path: path.write_text(text))
    draw(found, settings.out / "recipe.png")
    print(text)
    print(f"{settings.out}: recipe.json, recipe.md, recipe.png")


def check(settings: Settings) -> None:
    """Raises UserError for settings that cannot go together."""
    for name in ("jobs", "clips", "test_clips", "steps", "iters", "batch"):
        if getattr(settings, name) < 1:
            raise UserError(f"--{name} {getattr(settings, name)}: expected at least 1")
    if settings.chunks < 14:
        raise UserError(f"--chunks {settings.chunks}: expected at least 14, the length of the short streams")
    if len(set(settings.seeds)) != len(settings.seeds):
        raise UserError(f"--seeds {list(settings.seeds)}: each seed once")
    if settings.clips < 8:
        raise UserError(f"--clips {settings.clips}: expected at least 8, four of which are held out")


def claim(settings: Settings) -> None:
    """Holds a folder to the settings that all its jobs share; seeds, ablations and jobs may be added later.

    Raises:
        UserError: it was begun with others.
    """
    shared = {name: getattr(settings, name) for name in ("clips", "test_clips", "chunks", "steps", "iters", "batch")}
    path = settings.out / "settings.json"
    if path.is_file():
        begun = json.loads(path.read_text())
        if begun != shared:
            raise UserError(f"--out {settings.out} was begun with {begun}, these are {shared}; choose another folder")
        return
    replace_file(path, lambda aside: aside.write_text(json.dumps(shared) + "\n"))


def run_jobs(jobs: list[Job], at_once: int, cards: int, logs: Path) -> list[str]:
    """Runs jobs as soon as those they need are done, each once; returns the names of those that failed or could not
    begin. Cards are handed out in turn."""
    logs.mkdir(parents=True, exist_ok=True)
    done = {job.name for job in jobs if job.done.is_file()}
    waiting = [job for job in jobs if job.name not in done]
    failed: list[str] = []
    running: dict[Future, Job] = {}
    card = cycle(range(max(1, cards)))
    with ThreadPoolExecutor(at_once) as pool:
        while waiting or running:
            for job in [job for job in waiting if set(job.needs) <= done][: at_once - len(running)]:
                waiting.remove(job)
                running[pool.submit(run_job, job, logs, next(card) if cards > 1 else None)] = job
            if not running:
                return failed + [job.name for job in waiting]
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job = running.pop(future)
                ended, seconds = future.result()
                print(f"{job.name}: {'done' if ended else 'FAILED'}, {seconds:.0f} s", flush=True)
                (done.add if ended else failed.append)(job.name)
    return failed


def run_job(job: Job, logs: Path, card: int | None) -> tuple[bool, float]:
    """Runs one command with its output in a log; whether it made what it should, and its seconds."""
    log = logs / f"{job.name.replace('/', '_')}.log"
    environment = dict(os.environ) | ({} if card is None else {"CUDA_VISIBLE_DEVICES": str(card)})
    began = time.monotonic()
    with log.open("w") as file:
        code = subprocess.run(job.words, stdout=file, stderr=subprocess.STDOUT, env=environment, check=False).returncode
    seconds = time.monotonic() - began
    ended = code == 0 and job.done.is_file()
    if ended:
        log.with_suffix(".json").write_text(json.dumps({"seconds": round(seconds, 1)}) + "\n")
    else:
        print(
            "\n".join(
                [f"{job.name} ended with code {code}; the end of {log}:", *log.read_text().splitlines()[-LAST_LINES:]]
            )
        )
    return ended, seconds
