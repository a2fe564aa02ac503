"""The frozen base under ZeRO-3, without an optimizer, on which every adapter runs.

DeepSpeed's hooks gather a block's weights before its use, in forward, recompute and backward, and release them after.
The ranks that share one copy form a shard group: 1 rank (no gathers at all), a part of a node, or a node. Each rank's
part is on its card or in host memory. Blocks are called as submodules, so DeepSpeed's trace of whole forwards stays
asleep; with many different passes it would only invalidate itself. The next block is brought by a `Carrier` instead.
"""

import hashlib
import logging

import deepspeed
import torch
from deepspeed import comm
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn

from rtcwm.engine import carrier
from rtcwm.engine.activations import Activations
from rtcwm.engine.copies import HostMemory, as_bytes
from rtcwm.engine.device import compute_dtype
from rtcwm.engine.kept import InputCopies
from rtcwm.engine.memory import limit_memory
from rtcwm.engine.settings import BaseSettings
from rtcwm.engine.world import World
from rtcwm.errors import UserError
from rtcwm.model.loading import BaseSource, build_base
from rtcwm.model.lora import inject
from rtcwm.model.modulation import AdalnTable

logging.getLogger("diffusers").setLevel(logging.ERROR)


class BaseEngine:
    """The partitioned base: its model, the slot of its adapters and the policy of its activations.

    Attributes:
        model: `MiniMaxH3Transformer3DModel`; call its submodules, never its forward.
        slot: what the adapter hooks read.
        activations: runs blocks, see `Activations`.
        carrier: brings blocks ahead of their use; None where they are whole on the card, or prefetch is off.
        shard_group: ranks that share one copy; whole: each has one of its own, on its card.

    Args:
        table: where the blocks' AdaLN comes from; None: from weights, as the rest.
    """

    def __init__(self, world: World, source: BaseSource, settings: BaseSettings, table: AdalnTable | None = None):
        self.world = world
        self.source = source
        self.shard_group = shard_group_size(world, settings)
        limit_memory(world, settings.memory_limit_gib)
        group, reads = self._make_groups()
        config = settings.deepspeed
        on_card = world.device.type != "cpu"
        self._host = HostMemory(pinned=on_card)

        def partition(unit: nn.Module) -> None:
            deepspeed.zero.Init(module=unit, data_parallel_group=group, config_dict_or_path=config)
            if settings.pin_base:
                self._lock(unit)

        dtype, adaln = compute_dtype(world.device), table and table.stand_in
        self.model = build_base(source, world.device, dtype, reads=reads, place=partition, adaln=adaln)
        self.engine = deepspeed.initialize(model=self.model, config=config)[0]
        self.whole = self.shard_group == 1 and not settings.offload
        if self.whole:
            self._keep_whole()
        self.slot = inject(self.model)
        self.carrier = self._make_carrier(settings)
        copies = None
        if settings.activations.cpu_checkpointing:
            locked = on_card and settings.activations.pin_memory
            # Pages of what comes and goes fill what weights leave of the chunks.
            memory = self._host if locked == self._host.pinned else HostMemory(pinned=locked)
            copies = InputCopies(world.device, memory)
        blocks = self.model.transformer_blocks
        self.activations = Activations(settings.activations, self.slot, copies, self.carrier, blocks)

    def _make_groups(self) -> tuple[object, bool]:
        """The process group of this rank's shard group, and whether this rank is its first."""
        mine = None
        for first in range(0, self.world.size, self.shard_group):
            # Every rank makes every group, in the same order: making one is a collective.
            group = comm.new_group(list(range(first, first + self.shard_group)))
            if first <= self.world.rank < first + self.shard_group:
                mine = group
        comm.all_reduce(torch.zeros(1, device=self.world.device), group=mine)  # makes its communicator now
        return mine, self.world.rank % self.shard_group == 0

    def _make_carrier(self, settings: BaseSettings) -> carrier.Carrier | None:
        if not settings.prefetch or self.whole:
            return None
        if not carrier.usable():
            first, after = (".".join(map(str, version)) for version in carrier.TESTED)
            self.world.print(
                f"no prefetch of the base: DeepSpeed {deepspeed.__version__} is not between {first} and {after}; its "
                "own gathers are used, which computation waits for"
            )
            return None
        return carrier.Carrier(list(self.model.transformer_blocks), self.world.device, settings.device_blocks)

    def _keep_whole(self) -> None:
        """One copy a card: nothing is gathered or released, so every weight is put in its place for good and
        DeepSpeed's hooks are taken off. They move no byte here and cost 2 ms of Python a block, more than a small block
        computes."""
        for parameter in self.model.parameters():
            parameter.data = parameter.ds_tensor.data.view(parameter.ds_shape)
            parameter.ds_status = ZeroParamStatus.AVAILABLE
        self.engine.optimizer.destroy()

    def _lock(self, unit: nn.Module) -> None:
        """Moves a unit's partitioned weights into page-locked memory (ordinary memory where there is no card)."""
        for parameter in unit.parameters():
            shard = parameter.ds_tensor
            locked = self._host.carve(shard.numel() * shard.element_size())
            locked.copy_(as_bytes(shard))
            shard.data = locked.view(shard.dtype)

    def close(self) -> None:
        """Lets page-locked memory and the carrier's buffers go; the base is of no use after."""
        self.activations.close()
        self._host.close()

    def finish_backward(self) -> None:
        """To be called after every backward pass: releases weights whose own hook did not fire."""
        self.engine.optimizer.release_backward_leftovers()

    def gathered(self) -> int:
        """Numbers of a base in parts that are whole on this rank at this moment; 0 between passes."""
        if self.whole:
            return 0
        return sum(p.ds_numel for p in self.model.parameters() if p.ds_status != ZeroParamStatus.NOT_AVAILABLE)

    def digest(self) -> str:
        """Hash over sums of the bits of every weight's rows; a collective, equal on all ranks however they share the
        base, and another one where a bit has changed or rows have moved. The sums are the device's work, seconds for
        the whole release; proves that a base is frozen, and that copies of it are the same."""
        digest = hashlib.blake2b(digest_size=16)
        for name, parameter in self.model.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter], enabled=not self.whole):
                bits = parameter.detach().view(torch.int16 if parameter.element_size() == 2 else torch.int32)
                rows = bits.view(len(bits), -1).sum(dim=1, dtype=torch.int64)
                digest.update(name.encode())
                digest.update(rows.cpu().numpy().tobytes())
        return digest.hexdigest()


def shard_group_size(world: World, settings: BaseSettings) -> int:
    """The size of a shard group; 0 in the settings stands for all ranks of a node.

    Raises:
        UserError: it does not divide the ranks of a node, so that some group would cross nodes or be smaller; or blocks
            are not recomputed although ranks share the base.
    """
    size = settings.shard_group or world.local_size
    if world.size % size or world.local_size % size:
        raise UserError(
            f"shard_group {size} does not divide the {world.local_size} ranks of a node ({world.size} in all); "
            f"set it in --base-config to a divisor of {world.local_size}, or to 0 for all ranks of a node"
        )
    if settings.activations.policy == "none" and size > 1:
        raise UserError(
            "activation_checkpointing.policy 'none' needs shard_group 1: blocks that are not recomputed keep their "
            f"gathered weights until the backward pass, and here {size} ranks share the base"
        )
    return size
