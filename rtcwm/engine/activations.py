"""What is kept of a block between forward and backward, and which adapter its recompute reads.

Every block is checkpointed on its own, without reentry: under ZeRO-3 a block that is not recomputed keeps its gathered
weights alive until the backward pass reaches it, so that the whole base ends up gathered. torch saves nothing of the
block then; this module keeps the block's input, on the device or in host memory, and hands it to the recompute.

Inputs go to host memory while their block computes, and come back, as the base's weights do, while the block after
theirs is recomputed. Which block that is differs from graph to graph, since several forward passes may be alive (the
chunks of a rollout): each kept input knows the one that its own forward pass kept before it.

Under "save_attention" it keeps the outputs of the block's attention as well, and the recompute runs no attention.
torch's selective checkpointing could do that too, but it numbers every operation of a block, and a block whose weights
or inputs were brought ahead in one of the two passes does not do the same ones twice.

The adapter is bound inside the recomputed function. A slot read from outside would be at another adapter by then.
"""

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rtcwm.engine.carrier import Carrier
from rtcwm.engine.copies import HostMemory, SideStream, Stored
from rtcwm.engine.settings import ActivationSettings
from rtcwm.errors import UserError
from rtcwm.model.lora import Adapter, Slot
from rtcwm.model.prefix import KeptOutputs


class InputCopies:
    """Where inputs of blocks go between forward and backward.

    Attributes:
        moved_bytes: moved to host memory so far, and as many back.
    """

    def __init__(self, device: torch.device, memory: HostMemory):
        self.memory, self.side = memory, SideStream(device)
        self.moved_bytes = 0

    def send(self, tensor: torch.Tensor) -> tuple[Stored, torch.cuda.Event | None]:
        """Starts to copy a contiguous tensor to host memory; the event is the copy's end, until which the tensor has to
        be kept."""
        with self.side.copying():
            stored = Stored(self.memory, tensor)
        self.moved_bytes += stored.bytes
        return stored, self.side.mark()

    def fetch(self, stored: Stored) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Starts to copy it back into a new tensor; the event is the copy's end."""
        target = torch.empty(stored.shape, dtype=stored.dtype, device=stored.device)
        with self.side.copying():
            stored.load(target)
        return target, self.side.mark()


class BlockInput:
    """One block's input: the live tensor while the forward runs, what was kept of it when the backward asks again.

    Args:
        previous: what the same forward pass kept of the block before.
        copies: None to keep it on the device.
    """

    def __init__(
        self, block: nn.Module, hidden: torch.Tensor, previous: "BlockInput | None", copies: InputCopies | None
    ):
        self.block = block
        # Weak, or the last input of a pass would keep all the others on the device until the backward pass is over.
        self._previous = None if previous is None else weakref.ref(previous)
        self._copies = copies
        self._requires_grad = hidden.requires_grad
        self._live: torch.Tensor | None = hidden
        self._kept: torch.Tensor | None = hidden.detach()
        self._stored: Stored | None = None
        self._event: torch.cuda.Event | None = None
        if copies is not None:
            self._kept = self._kept.contiguous()
            self._stored, self._event = copies.send(self._kept)

    @property
    def is_settled(self) -> bool:
        return self._live is None

    @property
    def previous(self) -> "BlockInput | None":
        return None if self._previous is None else self._previous()

    def settle(self) -> None:
        """Ends the forward: drops the live tensor, after the computation has been made to wait for its copy."""
        self._await()
        self._live = None
        if self._copies is not None:
            self._kept = None

    def prefetch(self) -> None:
        """Starts to bring it back to the device, where it is not there."""
        if self._kept is None:
            self._kept, self._event = self._copies.fetch(self._stored)
            self._stored = None

    def __call__(self) -> torch.Tensor:
        if self._live is not None:
            return self._live
        self.prefetch()
        self._await()
        return self._kept.detach().requires_grad_(self._requires_grad)

    def _await(self) -> None:
        if self._event is not None:
            self._copies.side.await_on(None, self._event)
            self._event = None

    def __del__(self) -> None:
        # A graph that no backward pass went through: its pages go back, memory that a copy still uses stays until then.
        if self._stored is not None:
            self._stored.drop()
        self._await()


class Activations:
    """Runs blocks under the policy of an ``activation_checkpointing`` section.

    Attributes:
        copies: moves block inputs to host memory and back, where the section asks for that.
        carrier: brings weights of blocks, where ranks share the base or it is in host memory.
        attention_bytes: of attention outputs kept for a recompute so far.
    """

    def __init__(
        self,
        settings: ActivationSettings,
        slot: Slot,
        copies: InputCopies | None = None,
        carrier: Carrier | None = None,
        blocks: Sequence[nn.Module] = (),
    ):
        settings.check_blocks(len(blocks))
        self.settings = settings
        self.slot = slot
        self.copies, self.carrier = copies, carrier
        self.attention_bytes = 0
        self._whole = frozenset(list(blocks)[len(blocks) - settings.keep_blocks :])
        self._reported = False
        # The output of the last block that was run with a graph, and what was kept of that block.
        self._last: tuple[weakref.ref, weakref.ref] | None = None

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of block inputs moved to host memory so far."""
        return self.copies.moved_bytes if self.copies else 0

    def report_once(self) -> str | None:
        """After the first step of a start: a line with the attention outputs kept, with what ``cpu_checkpointing`` and
        the prefetch of weights really moved, and how long the computation waited for it; later None. Ends the timing
        of waits.

        Raises:
            UserError: ``cpu_checkpointing`` is on and moved nothing, or "save_attention" kept nothing.
        """
        saves = self.settings.policy == "save_attention"
        if self._reported or (self.copies is None and self.carrier is None and not saves):
            return None
        self._reported = True
        parts = []
        if saves:
            if not self.attention_bytes:
                raise UserError(
                    "activation_checkpointing.policy 'save_attention' is on and no attention output was kept"
                )
            parts.append(f"attention outputs: {self.attention_bytes:,} bytes kept from recompute in this step")
        if self.copies is not None:
            if not self.offloaded_bytes:
                raise UserError("cpu_checkpointing is on and moved nothing to host memory: no block input was kept")
            moved = f"{self.offloaded_bytes:,} bytes of block inputs went to host memory in this step"
            parts.append(f"activation offload: {moved}{self._waited(self.copies.side)}")
        if self.carrier is not None:
            moved = f"{self.carrier.moved_bytes:,} bytes of blocks in {self.carrier.fetches} fetches"
            parts.append(f"prefetch of the base: {moved}{self._waited(self.carrier.side)}")
        return "; ".join(parts)

    def measure(self, on: bool = True) -> None:
        """Times waits from now on, or no longer; a start times its first step."""
        for user in filter(None, (self.copies, self.carrier)):
            user.side.waited_seconds()
            user.side.measuring = on

    def _waited(self, side: SideStream) -> str:
        """Text of the time that was not hidden; ends the timing."""
        seconds, side.measuring = side.waited_seconds(), False
        return "" if side.stream is None else f", {seconds:.3f} s of it not hidden"

    def close(self) -> None:
        """Lets page-locked host memory and the device's buffers go; nothing runs after."""
        self._last = None
        if self.copies is not None:
            self.copies.memory.close()
        if self.carrier is not None:
            self.carrier.close()

    def runner(self, *adapters: Adapter | None, save_attention: bool = True) -> Callable[..., torch.Tensor]:
        """A function ``run(block, hidden, *rest) -> hidden`` that runs a block with this adapter, or without a graph
        with several, each on an equal part of the batch.

        hidden is ``[B, rows, width]``. ``rest`` is shared by all blocks, needs no gradient and stays on the device.

        Args:
            save_attention: False to compute attention again although the policy is "save_attention": for graphs that
                live long and have little attention.
        """
        saves = save_attention and self.settings.policy == "save_attention"

        def run(block: nn.Module, hidden: torch.Tensor, *rest: object) -> torch.Tensor:
            if self.carrier is not None:
                self.carrier.ahead(block, self.carrier.following(block))
            if not torch.is_grad_enabled():
                with self.slot.bind(*adapters):
                    return block(hidden, *rest)
            previous = self._kept_before(hidden)
            if not hidden.requires_grad:
                # ZeRO-3 releases a block's weights in the backward pass by a hook on an input with a gradient.
                hidden = hidden.detach().requires_grad_()
            if self.settings.policy == "none" or block in self._whole:
                with self.slot.bind(*adapters):
                    return block(hidden, *rest)
            kept = BlockInput(block, hidden, previous, self.copies)
            outputs = KeptOutputs() if saves else None

            def forward() -> torch.Tensor:
                hidden = kept()
                if kept.is_settled:
                    self._look_ahead(kept)
                with self.slot.bind(*adapters), outputs.bind() if outputs else nullcontext():
                    return block(hidden, *rest)

            output = checkpoint(forward, use_reentrant=False, preserve_rng_state=False)
            kept.settle()
            self.attention_bytes += outputs.bytes if outputs else 0
            self._last = (weakref.ref(output), weakref.ref(kept))
            return output

        return run

    def _kept_before(self, hidden: torch.Tensor) -> BlockInput | None:
        """What was kept of the block whose output this is, or None at the beginning of a forward pass."""
        last, self._last = self._last, None
        return last[1]() if last is not None and last[0]() is hidden else None

    def _look_ahead(self, kept: BlockInput) -> None:
        """A block is being recomputed: its input and weights are there. Starts to bring those of the block before."""
        previous = kept.previous
        if previous is not None:
            previous.prefetch()
        if self.carrier is not None:
            self.carrier.ahead(kept.block, previous.block if previous else None)
