"""Copies between the card and host memory that run beside the computation.

`HostMemory` is page-locked once and kept: locking pages takes longer than filling them, and torch's allocator rounds
every page-locked tensor up to a power of two, so tensors are cut from chunks of 1 GiB. What comes and goes (inputs of
blocks, moments) is stored in pages of one size, which tensors of all shapes take in turn; what stays (weights) is
carved off for good.

`SideStream` orders the copies. Device memory that a copy reads is let go only after the compute stream has been made to
wait for the copy: the allocator then hands it on in the order of that stream. Its own way (`record_stream`) waits for
the copy by the host's clock, and the host queues a whole forward pass within the time of a few blocks, so that every
input would still be held. On the CPU all of it is a plain copy, done when the call returns.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

PAGE_BYTES = 32 * 2**20
CHUNK_BYTES = 2**30
ALIGNMENT = 512


def aligned(count: int) -> int:
    """A number of bytes rounded up to the alignment of everything that is packed here."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def paged(count: int) -> int:
    """Bytes of the pages that a tensor of so many bytes takes."""
    return -(-count // PAGE_BYTES) * PAGE_BYTES


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, [bytes] uint8, without a copy."""
    return tensor.view(-1).view(torch.uint8)


class HostMemory:
    """Host memory; nothing of it is handed back before `close`.

    Attributes:
        pinned: page-locked, as copies beside the computation need it.
        bytes: held now, free pages included.
    """

    def __init__(self, pinned: bool):
        self.pinned = pinned
        self.bytes = 0
        self._tails: list[Tensor] = []
        self._free: list[Tensor] = []

    def carve(self, count: int) -> Tensor:
        """``count`` bytes for good, [count] uint8."""
        if not self.pinned:
            self.bytes += count
            return torch.empty(count, dtype=torch.uint8)
        size = aligned(count)
        for index, tail in enumerate(self._tails):
            if len(tail) >= size:
                self._tails[index] = tail[size:]
                return tail[:count]
        chunk = max(CHUNK_BYTES, 1 << (size - 1).bit_length())
        self.bytes += chunk
        self._tails.append(torch.empty(chunk, dtype=torch.uint8, pin_memory=True))
        return self.carve(count)

    def take(self, count: int) -> list[Tensor]:
        """Pages for ``count`` bytes; the last one is used in part."""
        pages = paged(count) // PAGE_BYTES
        return [self._free.pop() if self._free else self.carve(PAGE_BYTES) for _ in range(pages)]

    def give(self, pages: list[Tensor]) -> None:
        """Takes pages back; whoever gets them next has to write after what was queued on them."""
        self._free += pages

    def close(self) -> None:
        """Lets everything go; what others still hold of it stays valid."""
        self._tails, self._free, self.bytes = [], [], 0


class SideStream:
    """A CUDA stream for copies, and the time that the compute stream spent waiting for them; on the CPU no stream, and
    the time that was spent waiting for collectives.

    Attributes:
        measuring: whether waits are timed; costs two events a wait.
    """

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.measuring = True
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._host_seconds = 0.0

    @contextmanager
    def copying(self, after: torch.cuda.Event | None = None) -> Iterator[None]:
        """Queues what is inside on this stream: after an event, or after all that the compute stream has queued."""
        if self.stream is None:
            yield
            return
        if after is None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        else:
            self.stream.wait_event(after)
        with torch.cuda.stream(self.stream):
            yield

    def mark(self) -> torch.cuda.Event | None:
        """The end of what is queued here so far; None on the CPU, where it has been done."""
        return None if self.stream is None else self.stream.record_event()

    def await_on(self, compute: torch.cuda.Stream | None, event: torch.cuda.Event | None) -> None:
        """Makes a compute stream (None: the current one) wait for an event of this stream."""
        if event is None:
            return
        compute = compute or torch.cuda.current_stream(self.stream.device)
        if not self.measuring:
            compute.wait_event(event)
            return
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record(compute)
        compute.wait_event(event)
        after.record(compute)
        self._waits.append((before, after))

    def finish(self, works: list) -> None:
        """Waits for collectives that were started without a stream, and forgets them."""
        began = time.perf_counter()
        while works:
            works.pop().wait()
        if self.measuring:
            self._host_seconds += time.perf_counter() - began

    def waited_seconds(self) -> float:
        """Seconds that computation has waited since the last call, while ``measuring``; waits for the device."""
        waits, self._waits = self._waits, []
        seconds, self._host_seconds = self._host_seconds, 0.0
        for _, after in waits:
            after.synchronize()
        return seconds + sum(before.elapsed_time(after) for before, after in waits) / 1000


class Stored:
    """A tensor's contents in host pages.

    Args:
        tensor: read by the copies queued here; keep it until the compute stream has waited for them.
    """

    def __init__(self, memory: HostMemory, tensor: Tensor):
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.bytes = tensor.numel() * tensor.element_size()
        self._memory, self._pages = memory, memory.take(self.bytes)
        for page, part in zip(self._pages, as_bytes(tensor.contiguous()).split(PAGE_BYTES), strict=True):
            page[: len(part)].copy_(part, non_blocking=memory.pinned)

    def load(self, target: Tensor) -> None:
        """Queues the copies into a contiguous tensor of its shape, and gives the pages back: the next user of them
        writes on the same stream, after these copies."""
        for page, part in zip(self._pages, as_bytes(target).split(PAGE_BYTES), strict=True):
            part.copy_(page[: len(part)], non_blocking=self._memory.pinned)
        self.drop()

    def drop(self) -> None:
        """Gives the pages back unread."""
        self._memory.give(self._pages)
        self._pages = []
