"""Runs a test's function on several real ranks: processes of one machine, joined by gloo.

A fork server imports the heavy packages once and runs nothing itself, so a world of two costs a second instead of ten.
Each rank calls ``function(world, *arguments)``; the results come back in the order of ranks.
"""

import io
import multiprocessing
import os
import queue
import socket
import traceback
from collections.abc import Callable

import torch

from rtcwm.errors import UserError

CONTEXT = multiprocessing.get_context("forkserver")
# The programs bring torch, DeepSpeed and diffusers. The last one is what DeepSpeed imports as it makes an optimizer: it
# decorates a function with torch.compile, which takes longer than all else that a small engine does.
PRELOAD = ["rtcwm.train.train", "rtcwm.train.distill", "deepspeed.runtime.zero.muon.muon_optimizer"]
CONTEXT.set_forkserver_preload(PRELOAD)
SECONDS = 180


class RankError(AssertionError):
    """A rank raised; the message is its traceback."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(size: int, function: Callable, *arguments: object, local_size: int | None = None) -> list:
    """Calls a module-level function on ``size`` ranks; raises `RankError` with the first failing rank's traceback."""
    results, port = CONTEXT.Queue(), free_port()
    processes = [
        CONTEXT.Process(target=_rank, args=(rank, size, local_size or size, port, results, function, arguments))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    outcomes = {}
    try:
        for _ in processes:
            rank, value, failure = results.get(timeout=SECONDS)
            if failure:
                raise RankError(f"rank {rank}:\n{failure}")
            outcomes[rank] = torch.load(io.BytesIO(value), weights_only=False)
    except queue.Empty:
        raise RankError(f"ranks {sorted(set(range(size)) - set(outcomes))} gave no result in {SECONDS} s") from None
    finally:
        for process in processes:
            process.join(timeout=5)
            process.kill()
    return [outcomes[rank] for rank in range(size)]


def refusals(world, prepare: Callable, config: type, cases: list[dict]) -> list[str]:
    """What a program's `prepare` says to the settings of each case, on this rank: "accepted", or its error."""
    messages = []
    for case in cases:
        try:
            prepare(world, config(**case))
            messages.append("accepted")
        except UserError as error:
            messages.append(str(error))
    return messages


def go_bad(trainer, adapter: torch.nn.Module, good: int) -> tuple[str, dict[str, torch.Tensor]]:
    """Some good steps of a run, then a base that gives nonsense (a card that fails), until it stops.

    Returns:
        What it says, and the adapter's weights as they were after the good steps.
    """
    for _ in range(good):
        trainer._advance()
    weights = {name: value.detach().clone() for name, value in adapter.named_parameters()}
    trainer.base.model.rope.inv_freq.fill_(float("nan"))
    try:
        trainer.run()
    except UserError as error:
        return str(error), weights
    return "it did not stop", weights


def be_rank(rank: int, size: int, local_size: int, port: int) -> None:
    """Gives this process the surroundings that a launcher gives a rank."""
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank % local_size),
        "LOCAL_WORLD_SIZE": str(local_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "RTCWM_TIMEOUT_SECONDS": "60",
    }  # fmt: skip
    torch.set_num_threads(1)


def _rank(rank: int, size: int, local_size: int, port: int, results, function: Callable, arguments: tuple) -> None:
    be_rank(rank, size, local_size, port)
    try:
        from rtcwm.engine.world import World

        # As bytes: a tensor in the queue would be shared memory that dies with this process.
        value = io.BytesIO()
        torch.save(function(World.start(), *arguments), value)
        results.put((rank, value.getvalue(), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
    else:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
