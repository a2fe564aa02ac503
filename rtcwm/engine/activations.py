"""What is kept of a block between forward and backward, and which adapter its recompute reads.

Every block is checkpointed on its own, without reentry: under ZeRO-3 a block that is not recomputed keeps its gathered
weights alive until the backward pass reaches it, so that the whole base ends up gathered. torch saves nothing of the
block then; this module keeps the block's input, on the device or in host memory, and hands it to the recompute.

The adapter is bound inside the recomputed function. A slot read from outside would be at another adapter by then.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rtcwm.engine.settings import ActivationSettings
from rtcwm.errors import UserError
from rtcwm.model.lora import Adapter, Slot


class BlockInput:
    """One block's input: the live tensor while the forward runs, what was kept of it when the backward asks again."""

    def __init__(self, hidden: torch.Tensor):
        self._live: torch.Tensor | None = hidden
        self._kept: torch.Tensor | None = None
        self._device = hidden.device
        self._requires_grad = hidden.requires_grad

    def settle(self, offload: bool, pin: bool) -> int:
        """Ends the forward: drops the live tensor. Returns the bytes that went to host memory."""
        source, self._live = self._live.detach(), None
        if not offload:
            self._kept = source
            return 0
        pin = pin and source.device.type != "cpu"
        self._kept = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=pin)
        self._kept.copy_(source, non_blocking=pin)
        return source.numel() * source.element_size()

    def __call__(self) -> torch.Tensor:
        if self._live is not None:
            return self._live
        return self._kept.to(self._device, non_blocking=True).detach().requires_grad_(self._requires_grad)


class Activations:
    """Runs blocks under the policy of an ``activation_checkpointing`` section.

    Attributes:
        offloaded_bytes: bytes of block inputs moved to host memory so far.
    """

    def __init__(self, settings: ActivationSettings, slot: Slot):
        self.settings = settings
        self.slot = slot
        self.offloaded_bytes = 0
        self._reported = False

    def report_once(self) -> str | None:
        """After the first step of a start: a line with the bytes that ``cpu_checkpointing`` really moved; later None.

        Raises:
            UserError: it is on and moved nothing.
        """
        if self._reported or not self.settings.cpu_checkpointing:
            return None
        if not self.offloaded_bytes:
            raise UserError("cpu_checkpointing is on and moved nothing to host memory: no block input was kept")
        self._reported = True
        return f"activation offload: {self.offloaded_bytes:,} bytes of block inputs went to host memory in this step"

    def runner(self, adapter: Adapter | None) -> Callable[..., torch.Tensor]:
        """A function ``run(block, hidden, *rest) -> hidden`` that runs a block with this adapter.

        hidden is ``[B, rows, width]``. ``rest`` is shared by all blocks, needs no gradient and stays on the device.
        """

        def run(block: nn.Module, hidden: torch.Tensor, *rest: object) -> torch.Tensor:
            if not torch.is_grad_enabled():
                with self.slot.bind(adapter):
                    return block(hidden, *rest)
            if not hidden.requires_grad:
                # ZeRO-3 releases a block's weights in the backward pass by a hook on an input with a gradient.
                hidden = hidden.detach().requires_grad_()
            if self.settings.policy == "none":
                with self.slot.bind(adapter):
                    return block(hidden, *rest)
            kept = BlockInput(hidden)

            def forward() -> torch.Tensor:
                with self.slot.bind(adapter):
                    return block(kept(), *rest)

            output = checkpoint(forward, use_reentrant=False, preserve_rng_state=False)
            self.offloaded_bytes += kept.settle(self.settings.cpu_checkpointing, self.settings.pin_memory)
            return output

        return run
