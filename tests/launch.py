"""Starts the programs in processes of their own: as users do, through the real launchers, or where a test is not of how
a program starts, as processes of the fork server, which have imported everything and cost a second instead of ten."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from multiprocessing import connection
from pathlib import Path

from ranks import CONTEXT, be_rank, free_port

BIN = Path(sys.executable).parent
SECONDS = 240


def environment() -> dict[str, str]:
    """This process' environment without a launcher's traces, one thread a rank."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    return kept | {"OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{os.environ['PATH']}", "RTCWM_TIMEOUT_SECONDS": "60"}


def deepspeed(*options: str) -> list[str]:
    return [str(BIN / "deepspeed"), "--master_port", str(free_port()), *options]


def alone() -> list[str]:
    return [sys.executable]


class Forked:
    """The ranks of a program that the fork server started; used as a launcher's process is."""

    def __init__(self, size: int, module: str, flags: list[str], log: Path):
        port = free_port()
        self.ranks = [
            CONTEXT.Process(target=_program, args=(rank, size, port, module, flags, log)) for rank in range(size)
        ]
        for rank in self.ranks:
            rank.start()

    def poll(self) -> int | None:
        """The exit code once all ranks have ended. As a launcher does, a rank that fails ends the others, and its code
        is the run's."""
        failed = [rank.exitcode for rank in self.ranks if rank.exitcode]
        if failed:
            self.kill()
        elif any(rank.exitcode is None for rank in self.ranks):
            return None
        return max(failed, default=0)

    def wait(self, seconds: float) -> int:
        end = time.monotonic() + seconds
        while (code := self.poll()) is None:
            running = [rank.sentinel for rank in self.ranks if rank.exitcode is None]
            if running and not connection.wait(running, end - time.monotonic()):
                raise TimeoutError(f"{len(running)} ranks still run after {seconds} s")
        return code

    def kill(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.join()


def _program(rank: int, size: int, port: int, module: str, flags: list[str], log: Path) -> None:
    be_rank(rank, size, size, port)
    os.chdir(log.parent)
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    sys.argv = [module, *flags]
    importlib.import_module(module).main()


def start(launcher: list[str] | int, module: str, arguments: dict, log: Path) -> subprocess.Popen | Forked:
    """Starts a module; flags from a dict; output goes to a file. The process leads a group of its own.

    `launcher` is :func:`alone`, :func:`deepspeed`, or a number of ranks for the fork server to start.
    """
    flags = [word for name, value in arguments.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    if isinstance(launcher, int):
        log.write_text("")
        return Forked(launcher, module, flags, log)
    run_module = ["--module", module] if "deepspeed" in launcher[0] else ["-m", module]
    with log.open("w") as output:
        return subprocess.Popen(
            [*launcher, *run_module, *flags], stdout=output, stderr=subprocess.STDOUT, env=environment(),
            start_new_session=True, cwd=log.parent,
        )  # fmt: skip


def run(launcher: list[str] | int, module: str, arguments: dict, log: Path, code: int = 0) -> str:
    """Runs a module to its end and checks the exit code; returns its output."""
    process = start(launcher, module, arguments, log)
    try:
        found = process.wait(SECONDS)
    finally:
        kill(process)
    output = log.read_text()
    assert found == code, f"exit code {found}, expected {code}:\n{output[-6000:]}"
    return output


def kill(process: subprocess.Popen | Forked) -> None:
    """kill -9 of a launcher and every rank it started."""
    if isinstance(process, Forked):
        process.kill()
        return
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def rows(out: Path, name: str = "train_log.jsonl") -> list[dict]:
    return [json.loads(line) for line in (out / name).read_text().splitlines()]


def numbers(out: Path, name: str = "train_log.jsonl") -> list[dict]:
    """The rows of a log without what a clock or the memory decides."""
    measured = ("time", "seconds", "memory_gib", "eta_seconds", "rollout_seconds")
    return [{key: value for key, value in row.items() if key not in measured} for row in rows(out, name)]
