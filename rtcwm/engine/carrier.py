"""Brings the base's blocks to the card one block ahead of their use, from other ranks, from host memory, or both.

DeepSpeed goes on to decide when a block's weights are needed and when they are released; what is replaced is how they
come. Its own way gathers a block when the block is entered, so computation waits, and allocates each time. Here a few
buffers of one block (two, unless told otherwise) stay on the card. Whoever runs blocks calls `ahead`, which fills a
buffer with the block that comes next while this one computes; when DeepSpeed asks for that block, its parameters become
views of the buffer. A buffer is overwritten only after the compute stream has passed the release of what it held.

The base is frozen, so a buffer stays good after its release: the backward pass starts with the blocks that the forward
pass ended with, and does not move them again. The buffer released longest ago is overwritten first, which for passes
that turn around is the block that is needed last. With more buffers, more blocks are spared.

What this relies on of DeepSpeed: the coordinator calls ``param.all_gather_coalesced(params)`` and waits on what it
returns, releases by ``param.partition()``, and reads ``param.ds_status``. `usable` says for which versions that was
read and tested.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import deepspeed
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor, nn

from rtcwm.engine.copies import SideStream, aligned, as_bytes

TESTED = (0, 19, 6), (0, 20, 0)
"""First version of DeepSpeed that this module was written for, and first one that it was not."""


def usable(version: str = deepspeed.__version__) -> bool:
    """Whether this version of DeepSpeed is known to fetch blocks in the way that this module replaces."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return found is not None and TESTED[0] <= tuple(int(part) for part in found.groups()) < TESTED[1]


@dataclass(frozen=True)
class _Place:
    """Where a parameter lies in a buffer, in bytes: ``start``, and its own size; every rank's part is ``part``."""

    param: nn.Parameter
    start: int
    size: int
    part: int
    rank: int
    ranks: int

    @property
    def end(self) -> int:
        return self.start + self.part * self.ranks

    def own(self, buffer: Tensor) -> Tensor:
        start = self.start + self.part * self.rank
        return buffer[start : start + self.part]

    def weight(self, buffer: Tensor) -> Tensor:
        return buffer[self.start : self.start + self.size].view(self.param.dtype).view(self.param.ds_shape)


@dataclass(eq=False)
class _Buffer:
    """Device memory of one block: what it holds, whether that has arrived, who uses it and when it was last wanted."""

    memory: Tensor
    block: nn.Module | None = None
    ready: torch.cuda.Event | None = None
    works: list = field(default_factory=list)
    released: torch.cuda.Event | None = None
    users: set = field(default_factory=set)
    wanted: int = 0


class Carrier:
    """Fetches the blocks of a base that DeepSpeed has partitioned.

    Attributes:
        fetches: blocks brought so far; moved_bytes: their bytes, gathered or copied from host memory.
        most_in_use: most blocks that were whole for DeepSpeed at the same time.
        side: its stream; times how long computation waited.

    Args:
        blocks: in the order of a forward pass; their parameters are those of `deepspeed.zero.Init`.
        buffers: blocks that the device holds at once, from 2; no more than there are.
    """

    def __init__(self, blocks: Sequence[nn.Module], device: torch.device, buffers: int = 2):
        self.side = SideStream(device)
        self.fetches = self.moved_bytes = self.most_in_use = 0
        self._following = dict(zip(blocks, blocks[1:]))
        self._places = {block: tuple(_places(block)) for block in blocks}
        self._owner = {param: block for block in blocks for param in block.parameters()}
        size = max(places[-1].end for places in self._places.values())
        self._device, self._size = device, size
        self._buffers = [self._new_buffer() for _ in range(min(buffers, len(blocks)))]
        self._clock = 0
        self._compute = None if self.side.stream is None else torch.cuda.current_stream(device)
        if self._compute is not None:
            self._compute.synchronize()  # the shards have been written by now, and so has what the buffers held before
        for param in self._owner:
            param.all_gather_coalesced = partial(self._gather, param.all_gather_coalesced)
            param.partition = partial(self._release, param, param.partition)

    def ahead(self, *blocks: nn.Module | None) -> None:
        """To be called when a block runs or is about to: starts to fetch, where that was not done, the blocks that are
        needed next, in this order (None: no block)."""
        if self.side.stream is not None:
            self._compute = torch.cuda.current_stream(self._device)
        for block in blocks:
            if block is not None:
                self._start(block)

    def following(self, block: nn.Module) -> nn.Module | None:
        """The block after this one in a forward pass."""
        return self._following.get(block)

    def holds(self) -> int:
        """Blocks that are whole for DeepSpeed at this moment; 0 between passes."""
        return sum(bool(buffer.users) for buffer in self._buffers)

    def close(self) -> None:
        """Lets the buffers go; a later fetch makes new ones."""
        self._buffers = []

    def _new_buffer(self) -> _Buffer:
        return _Buffer(torch.empty(self._size, dtype=torch.uint8, device=self._device))

    def _start(self, block: nn.Module) -> _Buffer:
        """The buffer that holds a block or is being filled with it."""
        self._clock += 1
        buffer = next((buffer for buffer in self._buffers if buffer.block is block), None)
        if buffer is None:
            buffer = self._choose()
            self._fill(buffer, block)
        buffer.wanted = self._clock
        return buffer

    def _choose(self) -> _Buffer:
        """The buffer that may be overwritten; a further one where all are in use, which no pass of ours does."""
        free = [buffer for buffer in self._buffers if not buffer.users]
        if free:
            return min(free, key=lambda buffer: buffer.wanted)
        self._buffers.append(self._new_buffer())
        if self.side.stream is not None:
            self._buffers[-1].released = self._compute.record_event()
        return self._buffers[-1]

    def _fill(self, buffer: _Buffer, block: nn.Module) -> None:
        self.side.finish(buffer.works)  # of a block that was fetched and not used
        places = self._places[block]
        buffer.block = block
        with self.side.copying(after=buffer.released) if buffer.released else self.side.copying():
            for place in places:
                place.own(buffer.memory).copy_(as_bytes(place.param.ds_tensor), non_blocking=True)
            for place in places:
                if place.ranks > 1:
                    whole = buffer.memory[place.start : place.end]
                    work = torch.distributed.all_gather_into_tensor(
                        whole, place.own(buffer.memory), group=place.param.ds_process_group,
                        async_op=self.side.stream is None,
                    )  # fmt: skip
                    buffer.works += [] if work is None else [work]
        buffer.ready = self.side.mark()
        self.fetches += 1
        self.moved_bytes += sum(place.end - place.start for place in places)

    def _gather(self, original, params: Sequence[nn.Parameter], **options: object) -> "_Fetch":
        """What DeepSpeed calls for parameters that it wants whole."""
        params = list(params)
        owners = {self._owner.get(param) for param in params}
        if len(owners) != 1 or None in owners:
            return original(params, **options)
        buffer = self._start(owners.pop())
        for param in params:
            if param.ds_status != ZeroParamStatus.NOT_AVAILABLE:
                raise RuntimeError(f"asked to gather a parameter that is not partitioned: {param.ds_summary()}")
            param.ds_status = ZeroParamStatus.INFLIGHT
        buffer.users |= set(params)
        self.most_in_use = max(self.most_in_use, self.holds())
        return _Fetch(self, buffer, params)

    def arrive(self, buffer: _Buffer, params: Sequence[nn.Parameter]) -> None:
        """Makes the compute stream wait for a buffer, and the parameters views of it."""
        self.side.finish(buffer.works)
        # DeepSpeed calls from a stream of its own. That one is not made to wait, or DeepSpeed, which bounds what it
        # has in flight there, would hold up the host until the copy is done.
        self.side.await_on(self._compute, buffer.ready)
        for place in self._places[buffer.block]:
            if place.param in params:
                place.param.data = place.weight(buffer.memory)
                place.param.ds_status = ZeroParamStatus.AVAILABLE

    def _release(
        self,
        param: nn.Parameter,
        original,
        param_list: Sequence[nn.Parameter] | None = None,
        has_been_updated: bool = False,
        **options: object,
    ) -> None:
        """What DeepSpeed calls for parameters that it no longer needs whole."""
        for released in param_list or [param]:
            buffer = next((buffer for buffer in self._buffers if released in buffer.users), None)
            if buffer is None:
                if has_been_updated:
                    self._forget(self._owner.get(released))
                original([released], has_been_updated=has_been_updated, **options)
                continue
            released.data = torch.empty(0, dtype=released.dtype, device=released.device)
            released.ds_status = ZeroParamStatus.NOT_AVAILABLE
            buffer.users.discard(released)
            if not buffer.users and self.side.stream is not None:
                buffer.released = torch.cuda.current_stream(self._device).record_event()

    def _forget(self, block: nn.Module | None) -> None:
        """Weights of a block were written: what a buffer holds of it is no longer good."""
        for buffer in self._buffers:
            if block is not None and buffer.block is block:
                self.side.finish(buffer.works)
                buffer.block = None


class _Fetch:
    """What DeepSpeed waits on: a handle of one fetch."""

    def __init__(self, carrier: Carrier, buffer: _Buffer, params: Sequence[nn.Parameter]):
        self._carrier, self._buffer, self._params = carrier, buffer, set(params)
        self._done = False

    def wait(self, handle_dependency: bool = True) -> None:
        if not self._done:
            self._carrier.arrive(self._buffer, self._params)
            self._done = True


def _places(block: nn.Module) -> Iterator[_Place]:
    start = 0
    for param in block.parameters():
        width = param.element_size()
        ranks, rank = param.ds_zero_partition_world_size, param.ds_zero_partition_rank
        place = _Place(param, start, param.ds_numel * width, param.ds_tensor.numel() * width, rank, ranks)
        yield place
        start = aligned(place.end)
