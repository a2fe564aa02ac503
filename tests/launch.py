"""Starts the programs as users do: in processes of their own, through the real launchers."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from ranks import free_port

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


def start(launcher: list[str], module: str, arguments: dict, log: Path) -> subprocess.Popen:
    """Starts a module; flags from a dict; output goes to a file. The process leads a group of its own."""
    run_module = ["--module", module] if "deepspeed" in launcher[0] else ["-m", module]
    flags = [word for name, value in arguments.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    with log.open("w") as output:
        return subprocess.Popen(
            [*launcher, *run_module, *flags], stdout=output, stderr=subprocess.STDOUT, env=environment(),
            start_new_session=True, cwd=log.parent,
        )  # fmt: skip


def run(launcher: list[str], module: str, arguments: dict, log: Path, code: int = 0) -> str:
    """Runs a module to its end and checks the exit code; returns its output."""
    process = start(launcher, module, arguments, log)
    try:
        found = process.wait(SECONDS)
    finally:
        kill(process)
    output = log.read_text()
    assert found == code, f"exit code {found}, expected {code}:\n{output[-6000:]}"
    return output


def kill(process: subprocess.Popen) -> None:
    """kill -9 of a launcher and every rank it started."""
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
