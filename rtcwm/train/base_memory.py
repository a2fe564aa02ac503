"""What a base takes of cards and of host memory, by formula; what a machine cannot hold is refused before it is read.

A rank holds its part of a copy that its shard group shares: on its card, or in host memory where there is no card or
``offload_param`` says so. Files of weights are read tensor by tensor and the AdaLN table's are mapped, so neither takes
host memory that has to be free.
"""

import json
from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import nn

from rtcwm.engine.device import compute_dtype
from rtcwm.engine.host import check_host_room
from rtcwm.engine.settings import ActivationSettings, BaseSettings
from rtcwm.model.loading import FP32_ISLAND, BaseSource, meta_model


def card_bytes(config: Mapping, dtype: torch.dtype, table: bool, shard: int, settings: BaseSettings) -> int:
    """A rank's share of a base on its card (the CPU's memory is one): a whole copy, a part with buffers of a few
    blocks, or these buffers alone.

    Args:
        config: of the base; dtype: of its blocks; table: their AdaLN comes from a table; shard: ranks that share a
            copy.
    """
    blocks, others = _sizes(json.dumps(dict(config)), dtype, table)
    if shard == 1 and not settings.offload:
        return blocks + others
    buffers = min(settings.device_blocks, config["num_layers"]) * blocks // config["num_layers"]
    return buffers + (0 if settings.offload else (blocks + others) // shard)


def host_bytes(config: Mapping, dtype: torch.dtype, table: bool, shard: int, settings: BaseSettings, cpu: bool) -> int:
    """A rank's share of a base in host memory, which on a CPU is that of its card too. Arguments as `card_bytes`."""
    part = sum(_sizes(json.dumps(dict(config)), dtype, table)) // shard if settings.offload else 0
    return part + (card_bytes(config, dtype, table, shard, settings) if cpu else 0)


def check_base_room(
    source: BaseSource,
    device: torch.device,
    settings: BaseSettings | None,
    table: bool,
    shard: int = 1,
    ranks: int = 1,
) -> None:
    """Holds what the ranks of this machine keep in host memory of a base against what is free there.

    Args:
        device: of a rank; settings: of its base engine, None for a base that is whole on the device.
        table: the blocks' AdaLN comes from a table.
        shard: ranks that share a copy; ranks: of this machine.

    Raises:
        UserError: there is too little.
    """
    cpu, copies = device.type == "cpu", ranks // shard
    whole = settings or BaseSettings({}, shard_group=1, activations=ActivationSettings())
    change = "take a smaller base, such as --base embedded, or GPUs" if cpu else "take offload_param out of its file"
    check_host_room(
        ranks * host_bytes(source.config, compute_dtype(device), table, shard, whole, cpu),
        f"--base {source.description} in {'fp32' if cpu else 'bf16'}"
        + (f", {copies} copies of it for the {ranks} ranks of a machine," if copies > 1 else ""),
        change + (", or let ranks share a copy: shard_group 0 in --base-config" if copies > 1 else ""),
    )


@lru_cache
def _sizes(config: str, dtype: torch.dtype, table: bool) -> tuple[int, int]:
    """Bytes of all blocks, and of everything else; the config as JSON."""
    model = meta_model(json.loads(config))
    if table:
        for block in model.transformer_blocks:
            block.adaln_proj = nn.Identity()
    parts = {
        name: sum(p.numel() for p in module.parameters()) * (4 if name in FP32_ISLAND else dtype.itemsize)
        for name, module in model.named_children()
    }
    blocks = parts.pop("transformer_blocks")
    return blocks, sum(parts.values())
