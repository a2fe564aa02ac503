"""Notices that a rank has died, names it, and ends the others.

A rank that is killed (by the kernel for want of memory, by a scheduler, with its node) leaves the others in a
collective that never ends. gloo raises at once, and says a port; NCCL waits for its watchdog, and says an operation;
launchers end the ranks of their own node alone, half a minute later. None says which rank it was. So every rank beats
once a second in the store that the launcher's address names, by a thread of its own, and looks at the others' beats:
a rank of the same machine is gone when its process is, any other when its beat has stood still for too long. Then every
rank that is left leaves; the lowest of them says why.
"""

import os
import socket
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta

import psutil
import torch

BEAT_SECONDS = 1.0
GRACE_SECONDS = 3.0
"""How long an end is watched before the others follow: an error that all ranks share ends them one after the other, and
a launcher that sees the first one end gives its exit code."""
EXIT_CODE = 1


@dataclass(frozen=True)
class _Beat:
    """What a rank writes of itself: its machine, its process there, what people call the machine, and a counter."""

    machine: str
    process: int
    host: str
    count: int

    def __str__(self) -> str:
        return f"{self.machine} {self.process} {self.host} {self.count}"

    @classmethod
    def read(cls, text: bytes) -> "_Beat":
        machine, process, host, count = text.decode().split()
        return cls(machine, int(process), host, int(count))


class Watch:
    """The watch of one rank over the others, from its making to `stop`.

    Args:
        silence: seconds without a beat after which a rank of another machine counts as dead.
    """

    def __init__(self, rank: int, size: int, silence: float):
        self.rank, self.size, self.silence = rank, size, silence
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # A connection of its own: waiting calls of others would hold up the beats.
        patience = timedelta(seconds=max(silence, 10.0))
        self._store = torch.distributed.TCPStore(
            address, port, is_master=False, wait_for_workers=False, timeout=patience
        )
        self._me = _Beat(machine_identity(), os.getpid(), socket.gethostname() or "localhost", 0)
        self._seen: dict[int, tuple[_Beat, float]] = {}
        self._store.set(_key(rank), str(self._me))
        self._look()  # waits until all ranks have written
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rtcwm-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """To be called before this rank ends or waits for the others to end: no longer looks, and leaves nobody."""
        self._stopped.set()

    def explain(self) -> None:
        """To be called after an error that may come of another rank's end: names the rank, if one has ended."""
        deadline = time.monotonic() + GRACE_SECONDS
        while not (gone := self._gone()) and time.monotonic() < deadline:
            time.sleep(0.1)
        if gone:
            self.stop()
            self._say(gone)

    def _run(self) -> None:
        reachable = True
        while not self._stopped.wait(BEAT_SECONDS):
            if reachable:
                reachable = self._beat()
            gone = self._gone()
            if gone and not self._stopped.wait(GRACE_SECONDS):
                self._say(gone)
                os._exit(EXIT_CODE)

    def _beat(self) -> bool:
        """Writes this rank's beat and reads the others'; False once the store is not there any more."""
        self._me = _Beat(self._me.machine, self._me.process, self._me.host, self._me.count + 1)
        try:
            self._store.set(_key(self.rank), str(self._me))
            self._look()
        except RuntimeError:
            return False  # with rank 0, or with the launcher: that one's end is seen by its process or its silence
        return True

    def _look(self) -> None:
        others = [rank for rank in range(self.size) if rank != self.rank]
        now = time.monotonic()
        for rank, text in zip(others, self._store.multi_get([_key(rank) for rank in others]), strict=True):
            beat, last = _Beat.read(text), self._seen.get(rank)
            if last is None or last[0] != beat:
                self._seen[rank] = (beat, now)

    def _gone(self) -> list[int]:
        now = time.monotonic()
        gone = []
        for rank, (beat, since) in sorted(self._seen.items()):
            if beat.machine == self._me.machine:
                if not is_running(beat.process):
                    gone.append(rank)
            elif now - since > self.silence:
                gone.append(rank)
        return gone

    def _words(self, rank: int) -> str:
        beat, since = self._seen[rank]
        silent = f", silent for {time.monotonic() - since:.0f} s" if beat.machine != self._me.machine else ""
        return f"rank {rank} (process {beat.process} on {beat.host}{silent})"

    def _say(self, gone: list[int]) -> None:
        """One line, by the lowest rank that is left."""
        if self.rank == min(rank for rank in range(self.size) if rank not in gone):
            who = ", ".join(self._words(rank) for rank in gone)
            print(
                f"rtcwm: error: {who} is gone, killed or ended by an error of its own: rank {self.rank} and the others "
                "leave. What it said last stands above; the same command continues from the newest checkpoint",
                file=sys.stderr,
                flush=True,
            )


def machine_identity() -> str:
    """Equal for two processes that see each other by their process numbers."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()}/{os.readlink('/proc/self/ns/pid')}"


def is_running(process: int) -> bool:
    """Whether a process of this machine is there and has not ended."""
    try:
        return psutil.Process(process).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def _key(rank: int) -> str:
    return f"rtcwm/watch/{rank}"
