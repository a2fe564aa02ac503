"""What is kept of a block between forward and backward, and which adapter its recompute reads.

Every block is checkpointed on its own, without reentry: under ZeRO-3 a block that is not recomputed keeps its gathered
weights alive until the backward pass reaches it, so that the whole base ends up gathered. torch saves nothing of the
block then; what is kept of it (`rtcwm.engine.kept`) is handed to the recompute.

Under "save_attention" that is the outputs of the block's attention as well, and the recompute runs no attention; of
some blocks it is the outputs of linear layers too, and only elementwise work is left to repeat.
torch's selective checkpointing could do that too, but it numbers every operation of a block, and a block whose weights
or inputs were brought ahead in one of the two passes does not do the same ones twice.

The adapter is bound inside the recomputed function. A slot read from outside would be at another adapter by then.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rtcwm.engine.carrier import Carrier
from rtcwm.engine.copies import SideStream
from rtcwm.engine.kept import BlockInput, BlockOutputs, InputCopies
from rtcwm.engine.settings import ActivationSettings
from rtcwm.errors import UserError
from rtcwm.model.lora import Adapter, Slot


class Activations:
    """Runs blocks under the policy of an ``activation_checkpointing`` section.

    Attributes:
        copies: moves block inputs to host memory and back, where the section asks for that.
        carrier: brings weights of blocks, where ranks share the base or it is in host memory.
        kept_bytes: of outputs of "attention" and linear layers ("products") kept for a recompute so far.
    """

    def __init__(
        self,
        settings: ActivationSettings,
        slot: Slot,
        copies: InputCopies | None = None,
        carrier: Carrier | None = None,
        blocks: Sequence[nn.Module] = (),
    ):
        self.settings = settings
        self.slot = slot
        self.copies, self.carrier = copies, carrier
        self.kept_bytes: Counter[str] = Counter()
        self._products = frozenset(list(blocks)[len(blocks) - settings.kept_products(len(blocks)) :])
        self._reported = False
        # The output of the last block that was run with a graph, and what was kept of that block.
        self._last: tuple[weakref.ref, weakref.ref] | None = None

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of block inputs, and of attention outputs where they go too, moved to host memory so far."""
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
            if not self.kept_bytes["attention"]:
                raise UserError(
                    "activation_checkpointing.policy 'save_attention' is on and no attention output was kept"
                )
            parts.append(f"attention outputs: {self.kept_bytes['attention']:,} bytes kept from recompute in this step")
        if self.settings.keep_products:
            parts.append(f"outputs of linear layers: {self.kept_bytes['products']:,} bytes")
        if self.copies is not None:
            if not self.offloaded_bytes:
                raise UserError("cpu_checkpointing is on and moved nothing to host memory: no block input was kept")
            what = "block inputs and attention outputs" if self.settings.offload_attention else "block inputs"
            moved = f"{self.offloaded_bytes:,} bytes of {what} went to host memory in this step"
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
            save_attention: False to compute everything again although the policy is "save_attention": for graphs that
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
            if self.settings.policy == "none":
                with self.slot.bind(*adapters):
                    return block(hidden, *rest)
            away = self.copies if self.settings.offload_attention else None
            outputs = BlockOutputs(away, block in self._products) if saves else None
            kept = BlockInput(block, hidden, previous, self.copies, outputs)

            def forward() -> torch.Tensor:
                hidden = kept()
                if kept.is_settled:
                    self._look_ahead(kept)
                with self.slot.bind(*adapters), outputs.bind() if outputs else nullcontext():
                    return block(hidden, *rest)

            output = checkpoint(forward, use_reentrant=False, preserve_rng_state=False)
            kept.settle()
            self.kept_bytes.update(outputs.bytes if outputs else {})
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
