"""What is kept of a block between its forward and its recompute: its input, the outputs of its attention and of its
linear layers.

The first two may go to host memory while their block computes, and come back, as the base's weights do, while the block
after theirs is recomputed. Which block that is differs from graph to graph, since several forward passes may be alive
(the chunks of a rollout): each kept input knows the one that its own forward pass kept before it.
"""

import weakref

import torch
from torch import nn

from rtcwm.engine.copies import HostMemory, SideStream, Stored
from rtcwm.model.recompute import KeptOutputs


class InputCopies:
    """Where what is kept of blocks goes between forward and backward.

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


class Kept:
    """A tensor between forward and backward: on the device, or in host memory and back.

    Args:
        copies: None to keep it on the device.
    """

    def __init__(self, tensor: torch.Tensor, copies: InputCopies | None):
        self._copies = copies
        self._tensor: torch.Tensor | None = tensor.detach()
        self._stored: Stored | None = None
        self._event: torch.cuda.Event | None = None
        if copies is not None:
            self._tensor = self._tensor.contiguous()
            self._stored, self._event = copies.send(self._tensor)

    def settle(self) -> None:
        """Lets go of device memory that was copied, after the computation has been made to wait for the copy."""
        self._await()
        if self._copies is not None:
            self._tensor = None

    def prefetch(self) -> None:
        """Starts to bring it back to the device, where it is not there."""
        if self._tensor is None:
            self._tensor, self._event = self._copies.fetch(self._stored)
            self._stored = None

    def get(self) -> torch.Tensor:
        """It, on the device, for what is queued from now on."""
        self.prefetch()
        self._await()
        return self._tensor

    def _await(self) -> None:
        if self._event is not None:
            self._copies.side.await_on(None, self._event)
            self._event = None

    def __del__(self) -> None:
        # A graph that no backward pass went through: its pages go back, memory that a copy still uses stays until then.
        if self._stored is not None:
            self._stored.drop()
        self._await()


class BlockOutputs(KeptOutputs):
    """What a block's recompute does not compute again. Outputs of attention are each a `Kept`; their logsumexp, a
    sixtieth of them in the release, and outputs of linear layers stay on the device.

    Args:
        copies: None to keep attention outputs on the device.
        products: keep outputs of linear layers.
    """

    def __init__(self, copies: InputCopies | None, products: bool):
        super().__init__(products)
        self._copies = copies

    def keep(self, out: torch.Tensor, lse: torch.Tensor | None = None) -> tuple[Kept, torch.Tensor | None]:
        return Kept(out, None if lse is None else self._copies), lse

    def give(self, kept: tuple[Kept, torch.Tensor | None]) -> tuple[torch.Tensor, ...]:
        out, lse = kept[0].get(), kept[1]
        return (out,) if lse is None else (out, lse)

    def settle(self) -> None:
        for out, _ in self.outputs:
            out.settle()

    def prefetch(self) -> None:
        for out, _ in self.outputs:
            out.prefetch()


class BlockInput:
    """One block's input: the live tensor while the forward runs, what was kept of it when the backward asks again.

    Args:
        previous: what the same forward pass kept of the block before.
        copies: None to keep it on the device.
        outputs: of the block's attention and linear layers, if they are kept.
    """

    def __init__(
        self,
        block: nn.Module,
        hidden: torch.Tensor,
        previous: "BlockInput | None",
        copies: InputCopies | None,
        outputs: BlockOutputs | None,
    ):
        self.block = block
        # Weak, or the last input of a pass would keep all the others on the device until the backward pass is over.
        self._previous = None if previous is None else weakref.ref(previous)
        self._requires_grad = hidden.requires_grad
        self._live: torch.Tensor | None = hidden
        self._kept = Kept(hidden, copies)
        self._outputs = outputs

    @property
    def is_settled(self) -> bool:
        return self._live is None

    @property
    def previous(self) -> "BlockInput | None":
        return None if self._previous is None else self._previous()

    def settle(self) -> None:
        """Ends the forward: drops the live tensor, and what has been copied to host memory."""
        self._kept.settle()
        self._live = None
        if self._outputs is not None:
            self._outputs.settle()

    def prefetch(self) -> None:
        """Starts to bring back to the device what is not there."""
        self._kept.prefetch()
        if self._outputs is not None:
            self._outputs.prefetch()

    def __call__(self) -> torch.Tensor:
        if self._live is not None:
            return self._live
        self.prefetch()
        return self._kept.get().detach().requires_grad_(self._requires_grad)
