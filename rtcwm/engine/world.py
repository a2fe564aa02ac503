"""The ranks of a run: who they are, what they agree on, and how an error of one ends them all.

A program starts its `World` first. It works under the DeepSpeed launcher, under torchrun and alone, on the CPU (gloo)
and on GPUs (NCCL). Files of a run are read and written by rank 0 alone and their contents sent to the others, so
``--out`` need not be on a shared file system.
"""

import faulthandler
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import deepspeed
import psutil
import torch
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.launcher.runner import fetch_hostfile

from rtcwm.engine.watch import Watch
from rtcwm.errors import SharedError, UserError

Result = TypeVar("Result")

TIMEOUT_SECONDS = 600
"""How long a rank waits for the others, at the start and in a collective; ``RTCWM_TIMEOUT_SECONDS`` overrides it."""

REPEAT_SECONDS = 20
"""A signal that follows another sooner than this is taken for the same one."""

NCCL_HEADROOM_BYTES = 2 * 2**30
"""Device memory that torch's allocator leaves to communicators, where there are several GPUs."""


@dataclass
class World:
    """One rank's view of the run.

    Attributes:
        rank, size: of the whole run; local_rank, local_size: on this node.
        device: what this rank computes on.
        stop_requested: a SIGTERM or SIGINT reached this rank; programs save and leave after the step. stop_since: when.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    stop_requested: bool = field(default=False, init=False)
    stop_since: float = field(default=0.0, init=False)

    @classmethod
    def start(cls) -> "World":
        """Joins the run that the launcher started, or makes a run of one rank.

        Raises:
            UserError: the hostfile of the launcher is missing or asks for another number of ranks; or other ranks
                did not come.
        """
        for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "127.0.0.1")):
            os.environ.setdefault(name, value)
        if "MASTER_PORT" not in os.environ:
            os.environ["MASTER_PORT"] = str(free_port())
        rank, size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        # The DeepSpeed launcher names ranks of a node LOCAL_SIZE, torchrun LOCAL_WORLD_SIZE.
        local_size = int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or size)
        check_hostfile(size)
        accelerator = get_accelerator()
        if accelerator.device_name() == "cpu":
            device = torch.device("cpu")
            # Nothing here uses that operation, and building it takes a minute and a C++ compiler.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        else:
            device = torch.device(accelerator.device_name(local_rank))
            accelerator.set_device(local_rank)
        try:
            deepspeed.init_distributed(
                accelerator.communication_backend_name(), verbose=False, timeout=timedelta(seconds=timeout_seconds())
            )
        except torch.distributed.DistError as error:  # the store's and the network's; told by every rank that is there
            raise UserError(
                f"the {size} ranks did not meet at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} "
                f"within {timeout_seconds()} s (RTCWM_TIMEOUT_SECONDS): a node was not started, or cannot reach that "
                f"address ({str(error).splitlines()[0]})"
            ) from error
        world = cls(rank, size, local_rank, local_size, device)
        if device.type == "cuda" and size > 1:
            # NCCL allocates outside of torch: leave it room, and make the communicator while there is some.
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(1 - NCCL_HEADROOM_BYTES / total, device)
            world.barrier()
            world.any(False)
        return world

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def print(self, text: str = "") -> None:
        """Prints on rank 0."""
        if self.is_main:
            print(text, flush=True)

    def barrier(self) -> None:
        comm.barrier()

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank; a collective."""
        value = torch.tensor([int(flag)], device=self.device)
        comm.all_reduce(value, op=comm.ReduceOp.MAX)
        return bool(value.item())

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Mean over ranks of a small fp32 tensor; a collective."""
        total = values.detach().float().clone()
        comm.all_reduce(total)
        return total / self.size

    def gather(self, value: object) -> list:
        """One Python object of every rank, in the order of ranks; a collective."""
        values: list = [None] * self.size
        torch.distributed.all_gather_object(values, value)
        return values

    def on_main(self, function: Callable[[], Result]) -> Result:
        """Runs a function on rank 0 and gives its result to all ranks; its exception is raised on all of them."""
        outcome: list = [None, None]
        if self.is_main:
            try:
                outcome[0] = function()
            except UserError as error:
                outcome[1] = SharedError(str(error))
            except Exception as error:  # noqa: BLE001 - sent on, and raised on every rank
                outcome[1] = error
        torch.distributed.broadcast_object_list(outcome, src=0, device=self.device)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]

    def on_all(self, function: Callable[[], Result]) -> Result:
        """Runs a function on every rank; when it fails anywhere, all ranks raise the error of the first that failed.

        For checks that read what each node holds itself (clips, base weights), so that no rank waits for a dead one.
        """
        result, error = None, None
        try:
            result = function()
        except UserError as failure:
            error = failure
        errors = self.gather(error)
        for rank, failure in enumerate(errors):
            if failure is not None:
                raise SharedError(str(failure) if rank == 0 else f"rank {rank}: {failure}")
        return result

    def same(self, what: str, value: object) -> None:
        """Checks that a value is equal on all ranks; a collective.

        Raises:
            SharedError: naming the first rank that differs from rank 0.
        """
        values = self.gather(value)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise SharedError(f"rank {rank} differs from rank 0 in {what}: {_difference(other, values[0])}")

    def hear_signals(self) -> None:
        """From now on SIGTERM and SIGINT set `stop_requested` in place of ending the process; what runs has to look."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: object) -> None:
        """Asks the program to save and leave. A launcher passes on what its process group got as well, so repeats
        within `REPEAT_SECONDS` are the same request; a later one ends this rank at once."""
        now = time.monotonic()
        if self.stop_requested and now - self.stop_since > REPEAT_SECONDS:
            sys.exit(128 + number)
        if not self.stop_requested:
            self.stop_requested, self.stop_since = True, now


@contextmanager
def program(name: str):
    """The frame of a command: starts the world, prints a user's error once and leaves with code 2. A crash of native
    code prints where Python was, and so does SIGUSR1 at any time, for a process that seems to hang."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    try:
        world = World.start()
    except UserError as error:
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:
            print(f"{name}: error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    watch = Watch(world.rank, world.size, timeout_seconds() / 2) if world.size > 1 else None
    try:
        yield world
    except UserError as error:
        if watch:
            watch.stop()
        # What one rank alone found (a clip that it reads) has to be said by that rank.
        if world.is_main or not isinstance(error, SharedError):
            where = "" if isinstance(error, SharedError) or world.size == 1 else f"rank {world.rank}: "
            print(f"{name}: error: {where}{error}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(2)  # an orderly exit would wait for, or trip over, the threads of a group whose ranks are leaving
    except Exception:
        if watch:
            watch.explain()
        raise
    if watch:
        watch.stop()
        world.barrier()  # none ends while another still watches
    torch.distributed.destroy_process_group()


def timeout_seconds() -> int:
    """How long ranks wait for each other."""
    return int(os.environ.get("RTCWM_TIMEOUT_SECONDS", TIMEOUT_SECONDS))


def _difference(found: object, expected: object) -> str:
    """Two values against each other; of two dicts only the entries that differ."""
    if isinstance(found, dict) and isinstance(expected, dict):
        keys = [key for key in {**expected, **found} if found.get(key) != expected.get(key)]
        return ", ".join(f"{key} {found.get(key)!r} against {expected.get(key)!r}" for key in keys)
    return f"{found!r} against {expected!r}"


def check_hostfile(size: int) -> None:
    """Compares the launcher's hostfile, where a launcher of this machine was given one, with the run that started.

    The launcher takes a missing hostfile for "this machine alone" with a warning; a cluster's hours then go to one
    node. So the command line of the processes above this one is read for ``--hostfile``.

    Raises:
        UserError: the hostfile is missing, or its slots are not the number of ranks (unless the launcher was told to
            take a part of them).
    """
    for parent in psutil.Process().parents():
        try:
            words = parent.cmdline()
        except psutil.Error:
            continue
        if not any(word.endswith(("/deepspeed", "deepspeed.launcher.runner")) for word in words[:4]):
            continue
        hostfile = _option(words, ("-H", "--hostfile"))
        if hostfile is None:
            return
        path = os.path.join(parent.cwd(), hostfile)
        if not os.path.isfile(path):
            raise UserError(
                f"the launcher was given --hostfile {hostfile}, and there is no such file: it started this machine "
                f"alone, with {size} ranks. Correct the path, or leave --hostfile out to train on one machine"
            )
        slots = fetch_hostfile(path)
        partial = ("-i", "--include", "-e", "--exclude", "--num_nodes", "--num_gpus", "--num_accelerators")
        if all(_option(words, (name,)) is None for name in partial) and sum(slots.values()) != size:
            raise UserError(
                f"{hostfile} asks for {sum(slots.values())} ranks ({len(slots)} nodes), and {size} were started; "
                "check that the launcher on every node reads this hostfile"
            )
        return


def _option(words: list[str], names: tuple[str, ...]) -> str | None:
    """The value of an option in a command line, written apart or with '='; options of the user's script count too,
    so the search ends at --module or at a script."""
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in names:
            return value if equals else (words[index + 1] if index + 1 < len(words) else None)
        if index > 1 and (word == "--module" or word.endswith(".py")):
            return None
    return None


def free_port() -> int:
    """A port that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
