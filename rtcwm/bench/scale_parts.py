"""The parts of `rtcwm bench scale`: which there are, and what each launches.

- train, distill: `rtcwm bench train|distill --sides ours` on one rank and on several, with the base replicated or split
  over a group of ranks; one span (or rollout) a rank, so times should stay what they are on one.
- same: `rtcwm.train.train` on one rank, which accumulates what several do in a step, and on several, of which one is
  killed and which then resume: both logs have to say the same numbers. A sample's noise, level and start frame are
  drawn by its position in the run (`streams`, `order`), so both see the same samples with the same noise.
"""

import json
import os
import re
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rtcwm.bench.command import ScaleBench
from rtcwm.bench.inputs import Case, files
from rtcwm.bench.launcher import ALONE, Child, command
from rtcwm.engine.base import shard_group_size
from rtcwm.engine.settings import MOVING_KEYS, default_base_config, read_base_settings, shipped_config
from rtcwm.engine.watch import is_running
from rtcwm.engine.world import World
from rtcwm.errors import UserError
from rtcwm.model.layout import SPAN_CHUNKS

FAMILIES = ("train", "distill", "same")
PATIENCE_SECONDS = 300
"""How long ranks wait for each other, but where one is killed: longer than any part, whose limit explains a hang."""
LATE_SECONDS = 20
"""How long ranks that should have ended are watched further."""
TOLD = re.compile(r"is gone|exit ?code|exits with return code|watchdog|NCCL error|Signal \d", re.IGNORECASE)
"""Lines that say how a run ended whose rank was killed."""


@dataclass(frozen=True)
class Part:
    """One part: a program on so many ranks, whose shard groups are of ``group``; live: AdaLN from weights. ``of``: the
    number of ranks that a single one stands for, in "same"."""

    family: str
    ranks: int
    group: int = 1
    live: bool = False
    of: int = 0

    @property
    def name(self) -> str:
        if self.family == "same":
            return f"same-1x{self.of}" if self.of else f"same-{self.ranks}"
        group = f"-by{self.group}" if self.ranks > 1 else ""
        return f"{self.family}-{self.ranks}{group}{'-live' if self.live else ''}"


def parts_of(ranks: int) -> list[Part]:
    """All parts for a number of ranks, by what they tell: a part that others are held against goes before them."""
    train = [Part("train", 1), Part("train", ranks, ranks)]
    same = [Part("same", 1, of=ranks), Part("same", ranks, ranks)]
    distill = [Part("distill", 1), Part("distill", ranks, ranks)]
    copies = [Part("train", ranks), Part("train", ranks, ranks, live=True), Part("distill", ranks)]
    groups = [group for group in range(2, ranks) if ranks % group == 0]
    between = [Part("train", ranks, group, live) for group in groups for live in (False, True)]
    return train + same + distill + copies + between


@dataclass(frozen=True)
class Place:
    """Where a part runs, and until when: the settings, its deadline by the monotonic clock, and an event that ends
    it."""

    settings: ScaleBench
    part: Part
    deadline: float
    stop: threading.Event

    def file(self, suffix: str) -> Path:
        """A file of this part in ``--out``."""
        return self.settings.out.resolve() / f"{self.part.name}{suffix}"

    def environment(self, timeout: float) -> dict[str, str]:
        """Of a launch whose ranks wait for each other for so long."""
        ranks = self.settings.ranks or torch.cuda.device_count() or 1  # so that one rank has no more than several
        cores = max(1, (os.cpu_count() or 1) // ranks)
        given = {
            "OMP_NUM_THREADS": str(cores),
            "NCCL_NVLS_ENABLE": "0",
            # A hang that NCCL's watchdog ends leaves a record of the collectives.
            "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
            "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(self.file(".nccl_")),
        }
        given = {name: os.environ.get(name, value) for name, value in given.items()}
        if self.part.ranks == 1:
            given |= ALONE
        return given | {"RTCWM_TIMEOUT_SECONDS": str(int(timeout))}

    def start(self, launcher: str | None, module: str, words: Sequence[str], log: str, timeout: float) -> Child:
        return Child(command(launcher, self.part.ranks, module, words), self.file(log), self.environment(timeout))

    def wait(self, child: Child, deadline: float | None = None) -> None:
        """Until a launch and all of its ranks have ended, or are ended at the deadline (default: the part's)."""
        deadline = self.deadline if deadline is None else min(deadline, self.deadline)
        while not child.is_over(0.0 if self.stop.is_set() else deadline):
            time.sleep(0.1)

    def base_config(self) -> Path:
        """The base engine's file with this part's shard group, less what has no effect with that."""
        given = base_file(self.settings)
        config = json.loads(given.read_text()) | {"shard_group": self.part.group}
        if self.part.group == 1 and not read_base_settings(given).offload:
            config = {key: value for key, value in config.items() if key not in MOVING_KEYS}
        path = self.file(".base-config")
        path.write_text(json.dumps(config))
        return path

    def case(self) -> Case:
        """What this part's family runs on: its blocks at most those of the base."""
        return case_of(self.settings, self.part.family)

    def shared_flags(self) -> dict[str, object]:
        """Flags that `rtcwm bench` and the programs share."""
        settings, folder = self.settings, self.settings.adaln_dir or self.settings.out / "adaln"
        return {
            "rank": self.case().rank, "attn": settings.attn, "seed": settings.seed, "compile": settings.compile,
            "adaln": "live" if self.part.live else settings.adaln, "adaln-times": settings.adaln_times,
            "adaln-dir": Path(folder).resolve(), "base-config": self.base_config(),
        }  # fmt: skip


def case_of(settings: ScaleBench, family: str) -> Case:
    """What a family of parts runs on; of blocks that it has a number of its own for, at most those of the base.

    Raises:
        UserError: a base that is not there, or sizes that cannot be packed.
    """
    whole, same = Case.of(replace(settings, layers=None)).whole_layers, family == "same"
    own = {"train": None, "distill": settings.distill_layers, "same": settings.same_layers}[family]
    height, width = (settings.same_height, settings.same_width) if same else (None, None)
    sizes = {"height": height or settings.height, "width": width or settings.width}
    return Case.of(replace(settings, layers=min(own, whole) if own else settings.layers, **sizes))


def base_file(settings: ScaleBench) -> Path:
    """The base engine's file that every part's is made from."""
    return Path(settings.base_config) if settings.base_config else default_base_config(_device())


def check_base(settings: ScaleBench, parts: Sequence[Part]) -> None:
    """Holds the base engine's file against the shard group of every part.

    Raises:
        UserError: the file is not there or not valid, or some part could not share a base in its way.
    """
    file = base_file(settings)
    found = read_base_settings(file)
    for part in parts:
        ranks = World(0, part.ranks, 0, part.ranks, _device())
        try:
            shard_group_size(ranks, replace(found, shard_group=part.group))
        except UserError as error:
            raise UserError(
                f"{file}, with the shard group of part {part.name}: {error}. Name another --base-config, or leave the "
                "part out with --only"
            ) from error


def run_part(part: Part, place: Place) -> dict:
    """Runs a part; what it found, or under "failed" why it did not."""
    if part.family == "same":
        return _same(part, place)
    settings, out = place.settings, place.file(".found.json")
    out.unlink(missing_ok=True)
    flags = place.shared_flags() | {
        "sides": "ours", "out": out, "base": settings.base, "layers": place.case().config["num_layers"],
        "height": settings.height, "width": settings.width, "text-rows": settings.text_rows, "warmup": 1,
    }  # fmt: skip
    if part.family == "train":
        flags |= {"steps": settings.steps}
    else:
        flags |= {
            "steps": settings.iters, "chunks": settings.chunks, "stops": "last", "steady": "false",
            "critic-per-gen": settings.critic_per_gen,
        }  # fmt: skip
    launcher = "torchrun" if part.ranks > 1 else None
    child = place.start(launcher, "rtcwm.cli", ["bench", part.family, *_words(flags)], ".log", PATIENCE_SECONDS)
    place.wait(child)
    if child.timed_out or child.code or not out.exists():
        return {"failed": _why(child)}
    found = json.loads(out.read_text())
    out.unlink()
    return {"machine": found["machine"], "case": found["case"], "ours": found["sides"]["ours"]}


def _same(part: Part, place: Place) -> dict:
    """Numbers of every step; on several ranks, after one was killed and all resumed, with how that went."""
    settings, case = place.settings, place.case()
    steps, ranks = settings.same_steps, part.of or part.ranks
    with files(case, SPAN_CHUNKS, settings.seed, ranks) as made:
        adapter = json.loads(shipped_config("adapter").read_text()) | {"gradient_accumulation_steps": part.of or 1}
        (made.root / "adapter.json").write_text(json.dumps(adapter))
        flags = place.shared_flags() | {
            "out": made.run, "clips": made.clips, "base": made.base, "steps": steps, "warmup": 2, "lr": 1e-4,
            "val-clips": 0, "val-every": 0, "save-every": steps if part.of else steps // 4,
            "adapter-config": made.root / "adapter.json",
        }  # fmt: skip
        launcher = None if part.of else settings.launcher
        again = {}
        if not part.of:
            again = {"death": _death(place, launcher, _words(flags))}
            if "failed" in again["death"]:
                return again["death"]
        timeout = PATIENCE_SECONDS if part.of else settings.timeout
        child = place.start(launcher, "rtcwm.train.train", _words(flags), ".log", timeout)
        place.wait(child)
        if child.timed_out or child.code:
            return again | {"failed": _why(child)}
        rows = [json.loads(line) for line in (made.run / "train_log.jsonl").read_text().splitlines()]
    if again and "resumed from" not in child.text():
        return again | {"failed": "the second start did not resume"}
    numbers = [{key: row[key] for key in ("step", "loss", "grad_norm")} for row in rows if row["step"]]
    return again | {"case": case.as_dict(), "device": _device().type, "numbers": numbers}


def _death(place: Place, launcher: str, words: Sequence[str]) -> dict:
    """Kills a rank once a checkpoint is there: seconds until the others have ended, the exit code, what was said."""
    settings = place.settings
    child = place.start(launcher, "rtcwm.train.train", words, ".killed.log", settings.timeout)
    while "saved " not in child.text():
        if child.is_over(0.0 if place.stop.is_set() else place.deadline):
            return {"failed": f"no checkpoint before the kill: {_why(child)}"}
        time.sleep(0.05)
    number = place.part.ranks - 1 if settings.kill_rank is None else settings.kill_rank
    ranks = child.ranks()
    if number not in ranks:
        child.end()
        return {"failed": f"rank {number} is not there to be killed: {_why(child)}"}
    ranks[number].send_signal(signal.SIGKILL)
    began, gone = time.monotonic(), None
    limit = began + settings.timeout + LATE_SECONDS
    while not child.is_over(0.0 if place.stop.is_set() else min(limit, place.deadline)):
        if gone is None and not any(is_running(rank.pid) for rank in ranks.values()):
            gone = time.monotonic() - began
        time.sleep(0.05)
    told = [line.strip() for line in child.text().splitlines() if TOLD.search(line)]
    named = next((line for line in told if f"rank {number} (" in line and "is gone" in line), None)
    ended = time.monotonic() - began
    return {
        "rank": number, "launcher": launcher, "ranks_gone": gone or ended, "launcher_gone": ended,
        "timed_out": child.timed_out, "code": child.code, "named": named, "told": told[:8],
        "within": not child.timed_out and (gone or ended) <= settings.timeout,
    }  # fmt: skip


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _words(flags: dict[str, object]) -> list[str]:
    return [word for name, value in flags.items() if value is not None for word in (f"--{name}", str(value))]


def _why(child: Child) -> str:
    """Why a launch failed, in a line: what its log says last of an error."""
    if child.timed_out:
        return f"ended after {child.seconds:.0f} s, where its ranks were is in {child.log}"
    pattern = re.compile(r"(error: |Error: |Error\b.*:|out of memory)")
    lines = [line.strip() for line in child.text().splitlines() if pattern.search(line)]
    own = [line for line in lines if "rtcwm" in line and "error:" in line]
    chosen = (own or lines or ["no error was printed"])[0]
    return f"exit code {child.code}: {chosen[:300]} ({child.log})"
