"""Programs in processes of their own, with a hard limit: started by the real launchers, watched, ended without mercy.

Ranks live in process groups of their own (torchrun's do), and outlive a launcher that is killed. So every process of a
`Child` carries a mark in its environment, by which all of them are found. When the time is up, ranks print where they
are (SIGUSR1, see `rtcwm.engine.world.program`) before everything with the mark gets SIGKILL.
"""

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from rtcwm.engine.world import free_port

MARK = "RTCWM_BENCH_PART"
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
"""What a launcher would tell a run of one rank, which then is found as a launcher's ranks are."""

STACK_SECONDS = 2.0
"""How long ranks have for printing where they are."""


def command(launcher: str | None, ranks: int, module: str, words: Sequence[str]) -> list[str]:
    """The words that start a module on so many ranks of this machine: through "deepspeed" or "torchrun", or alone
    (with `ALONE` in the environment)."""
    port = ["--master_port", str(free_port())]
    if launcher is None:
        start = [sys.executable, "-m", module]
    elif launcher == "deepspeed":
        start = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(ranks), *port, "--module", module]
    else:
        start = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks), *port, "-m", module]
    return [*start, *words]


@dataclass
class Child:
    """One launch.

    Attributes:
        log: file of its output; seconds: that it has run, or took; timed_out: it was ended for want of time.
    """

    words: Sequence[str]
    log: Path
    environment: Mapping[str, str]
    seconds: float = field(default=0.0, init=False)
    timed_out: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._mark = secrets.token_hex(8)
        kept = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
        given = kept | {MARK: self._mark, "PYTHONUNBUFFERED": "1"} | dict(self.environment)
        with self.log.open("w") as output:
            self._process = subprocess.Popen(
                self.words, stdout=output, stderr=subprocess.STDOUT, env=given, start_new_session=True
            )
        self._began = time.monotonic()

    @property
    def code(self) -> int | None:
        """The launcher's exit code, None while it runs."""
        return self._process.poll()

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        """Everything that this launch started and that has not ended."""
        return [process for process in psutil.process_iter() if _environment(process).get(MARK) == self._mark]

    def ranks(self) -> dict[int, psutil.Process]:
        """Its ranks that have not ended. A launcher's own processes know no rank; what a rank starts knows its rank."""
        found = {}
        for process in self.processes():
            if (rank := _environment(process).get("RANK")) is not None and not _is_helper(process):
                found[int(rank)] = process
        return found

    def is_over(self, deadline: float) -> bool:
        """Whether the launcher has ended, with all of its ranks; ends them where the deadline (by the monotonic clock)
        has passed."""
        now = time.monotonic()
        self.seconds = now - self._began
        if now >= deadline and self.code is None:
            self.timed_out = True
            self.end(stacks=True)
        if self.code is None:
            return False
        if not self.processes():
            return True
        if now >= deadline:
            self.end(stacks=True)
        return False

    def end(self, stacks: bool = False) -> None:
        """SIGKILL to everything with the mark; stacks: after the ranks have printed where they are."""
        if stacks:
            for rank in self.ranks().values():
                _signal(rank, signal.SIGUSR1)
            time.sleep(STACK_SECONDS)
        for process in self.processes():
            _signal(process, signal.SIGKILL)
        self._process.wait()


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ() if process.status() != psutil.STATUS_ZOMBIE else {}
    except psutil.Error:
        return {}


def _is_helper(process: psutil.Process) -> bool:
    """Whether a rank started it."""
    try:
        parent = process.parent()
    except psutil.Error:
        return False
    return parent is not None and "RANK" in _environment(parent)


def _signal(process: psutil.Process, number: int) -> None:
    try:
        process.send_signal(number)
    except psutil.Error:
        pass  # it has ended meanwhile
