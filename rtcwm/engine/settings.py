"""The two DeepSpeed JSON files, read strictly.

DeepSpeed accepts any top-level key and applies some sections nowhere, so a misspelt key or a section that does not
work with this design trains something else than was asked for, silently. Each file is therefore held against the keys
that have an effect here; all others are refused by name.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rtcwm.engine.zero_section import adapter_section, base_section
from rtcwm.errors import UserError
from rtcwm.strict_json import is_number, is_whole, read_object, section, take_flag

POLICIES = ("recompute", "save_attention", "none")

COMMON_KEYS = {"train_micro_batch_size_per_gpu", "zero_optimization", "memory_breakdown"}
BASE_KEYS = COMMON_KEYS | {
    "activation_checkpointing", "shard_group", "prefetch", "device_blocks", "memory_limit_gib",
}  # fmt: skip
ADAPTER_KEYS = COMMON_KEYS | {
    "gradient_accumulation_steps", "gradient_clipping", "optimizer", "park_moments", "steps_per_print",
    "wall_clock_breakdown",
}  # fmt: skip
MOVING_KEYS, DEVICE_BLOCKS = ("prefetch", "device_blocks"), 2
"""What has an effect on a base whose blocks are moved alone; how many of them the card holds by default."""
REFUSED = {
    "bf16": "the base's dtype follows the device (bf16 with its fp32 layers on GPUs, fp32 on the CPU)",
    "fp16": "the base is bf16 on GPUs, fp32 on the CPU",
    "torch_autocast": "it would cast the base's fp32 layers",
    "scheduler": "the schedule comes from --lr, --lr-min and --warmup",
    "tensorboard": "a run writes its own events into --out",
    "train_batch_size": "it follows from the number of ranks and gradient_accumulation_steps",
}
ACTIVATION_KEYS = {"cpu_checkpointing", "policy", "pin_memory", "keep_products", "ffn_rows", "offload_attention"}
ACTIVATION_REFUSED = (
    "partition_activations", "contiguous_memory_optimization", "number_checkpoints",
    "synchronize_checkpoint_boundary", "profile",
)  # fmt: skip
ADAMW, BETAS = {"eps": 1e-8, "weight_decay": 0.01, "torch_adam": True}, [0.9, 0.999]
OPTIMIZER_PARAMS = {"betas", *ADAMW}


@dataclass(frozen=True)
class ActivationSettings:
    """The ``activation_checkpointing`` section, which rtcwm applies itself (DeepSpeed parses it and applies nothing).

    Attributes:
        policy: "recompute" every block in the backward pass; "save_attention": the same, but attention outputs are kept
            and not computed again (H3 at 33,968 rows: 24 GB); "none": keep all activations (unpartitioned base only).
        cpu_checkpointing: keep block inputs in host memory between forward and backward.
        pin_memory: page-locked host memory for them, on GPUs; else their copies hold up the computation.
        offload_attention: with "save_attention" and ``cpu_checkpointing``, attention outputs go the same way.
        keep_products: with "save_attention", of so many of the last blocks, or all, the outputs of linear layers are
            kept too (H3 at 33,968 rows: 3.8 GB a block), so that their recompute is elementwise work: memory left over
            is given for speed. The last ones, because the backward pass frees theirs first.
        ffn_rows: so many rows at a time go through a feed-forward, whose two widest tensors then exist for these alone
            (H3 at 33,968 rows: 2.9 GB else, and as much for their gradients); 0 for all.
    """

    policy: str = "recompute"
    cpu_checkpointing: bool = False
    pin_memory: bool = True
    keep_products: int = 0
    ffn_rows: int = 0
    offload_attention: bool = False

    @property
    def lasting(self) -> "ActivationSettings":
        """Of graphs that live long, as a rollout's do: under "save_attention" they keep no outputs."""
        if self.policy != "save_attention":
            return self
        return replace(self, policy="recompute", offload_attention=False, keep_products=0)

    def kept_products(self, blocks: int) -> int:
        """Of how many blocks outputs of linear layers are kept, on a base of so many."""
        return min(self.keep_products, blocks)


@dataclass(frozen=True)
class BaseSettings:
    """A base engine's file.

    Attributes:
        deepspeed: what DeepSpeed gets.
        shard_group: ranks that share one copy of the base; 0 means all ranks of a node, 1 one copy a rank.
        offload: each rank's part of the base is in host memory (``offload_param.device`` "cpu"); pin_base: page-locked.
        prefetch: bring every block while the one before computes, see `carrier`; matters where ranks share the base or
            it is in host memory.
        device_blocks: blocks that the card then holds at once, from 2, or all; more of them are moved less often.
        memory_limit_gib: most that torch's allocator may take on a card, or None.
    """

    deepspeed: dict
    shard_group: int
    activations: ActivationSettings
    offload: bool = False
    pin_base: bool = False
    prefetch: bool = True
    device_blocks: int = DEVICE_BLOCKS
    memory_limit_gib: float | None = None


@dataclass(frozen=True)
class AdapterSettings:
    """An adapter engine's file: what DeepSpeed gets, but for the learning rate.

    Attributes:
        park_moments: keep the optimizer's moments in host memory but for the optimizer's step.
    """

    deepspeed: dict
    accumulation: int
    clipping: float
    park_moments: bool = False


def read_base_settings(path: Path) -> BaseSettings:
    """Reads and checks a base engine's JSON; raises `UserError` naming the file and the key."""
    config = _read(path, BASE_KEYS)
    offload, pin = base_section(path, config)
    group = config.pop("shard_group", 0)
    if not is_whole(group) or group < 0:
        raise UserError(f"{path}: shard_group is {group!r}, expected a number of ranks (0: all ranks of a node)")
    prefetch = take_flag(path, config, "prefetch", True)
    blocks = config.pop("device_blocks", DEVICE_BLOCKS)
    if not is_whole(blocks) or blocks < 2:
        raise UserError(f"{path}: device_blocks is {blocks!r}, expected 2 (one computes, one comes) or more")
    if blocks != DEVICE_BLOCKS and not prefetch:
        raise UserError(f"{path}: device_blocks are those that prefetch brings, and it is false; remove it")
    if group == 1 and not offload and (blocks != DEVICE_BLOCKS or not prefetch):
        raise UserError(
            f"{path}: {' and '.join(MOVING_KEYS)} have no effect with shard_group 1 and no offload_param, where every "
            "block stays on its card; remove them"
        )
    limit = config.pop("memory_limit_gib", None)
    if limit is not None and (not is_number(limit) or limit <= 0):
        raise UserError(f"{path}: memory_limit_gib is {limit!r}, expected GiB of device memory, or null for no limit")
    activations = _activations(path, config)
    if offload and activations.policy == "none":
        raise UserError(
            f"{path}: offload_param excludes activation_checkpointing.policy 'none': blocks that are not recomputed "
            "keep their weights on the device until the backward pass"
        )
    return BaseSettings(config, group, activations, offload, pin, prefetch, blocks, limit)


def read_adapter_settings(path: Path) -> AdapterSettings:
    """Reads and checks an adapter engine's JSON; raises `UserError` naming the file and the key."""
    config = _read(path, ADAPTER_KEYS)
    adapter_section(path, config)
    optimizer = section(path, config, "optimizer") or {"type": "AdamW"}
    config["optimizer"] = optimizer
    if set(optimizer) - {"type", "params"} or optimizer.get("type") != "AdamW":
        raise UserError(f"{path}: optimizer is {optimizer}, expected {{'type': 'AdamW', 'params': {{...}}}}")
    params = section(path, optimizer, "params")
    if unknown := sorted(set(params) - OPTIMIZER_PARAMS):
        reason = " (the learning rate comes from the command line)" if "lr" in unknown else ""
        raise UserError(f"{path}: unknown optimizer params {unknown}{reason}; known: {sorted(OPTIMIZER_PARAMS)}")
    betas = params.get("betas", BETAS)
    if not isinstance(betas, list) or len(betas) != 2 or not all(is_number(beta) and 0 <= beta < 1 for beta in betas):
        raise UserError(f"{path}: optimizer betas are {betas}, expected two numbers in [0, 1)")
    for key in ("eps", "weight_decay"):
        if not is_number(params.get(key, 0)) or params.get(key, 0) < 0:
            raise UserError(f"{path}: optimizer {key} is {params[key]!r}, expected 0 or a positive number")
    # torch refuses an integer beta, and FusedAdam would be compiled without torch_adam. Defaults stand there as if they
    # had been written, since a resumed run holds what is written against what it began with.
    optimizer["params"] = ADAMW | params | {"betas": [float(beta) for beta in betas]}
    accumulation = config.setdefault("gradient_accumulation_steps", 1)
    if not is_whole(accumulation) or accumulation < 1:
        raise UserError(f"{path}: gradient_accumulation_steps is {accumulation!r}, expected a whole number from 1")
    clipping = config.setdefault("gradient_clipping", 1.0)
    if not is_number(clipping) or clipping < 0:
        raise UserError(f"{path}: gradient_clipping is {clipping!r}, expected a norm, or 0 for none")
    return AdapterSettings(config, accumulation, float(clipping), take_flag(path, config, "park_moments", False))


def shipped_config(name: str) -> Path:
    """The file ``ds_configs/<name>.json`` of the repository, or of the installed package."""
    package = Path(__file__).parents[1]
    installed = package / "ds_configs" / f"{name}.json"
    return installed if installed.is_file() else package.parent / "ds_configs" / f"{name}.json"


def default_base_config(device: torch.device) -> Path:
    """The base engine's file for a device, where the user names none."""
    return shipped_config("base_cpu" if device.type == "cpu" else "base_gpu")


def _read(path: Path, known: set[str]) -> dict:
    if not path.is_file():
        raise UserError(f"no DeepSpeed config at {path}")
    config = read_object(path, "an object")
    for key in config:
        if key in REFUSED:
            raise UserError(f"{path}: '{key}' is not used here: {REFUSED[key]}; remove it")
        if key not in known:
            raise UserError(f"{path}: unknown key '{key}'; known: {sorted(known)}")
    if config.setdefault("train_micro_batch_size_per_gpu", 1) != 1:
        raise UserError(f"{path}: train_micro_batch_size_per_gpu has to be 1; use --batch, or accumulate")
    if not is_whole(config.get("steps_per_print", 1)):
        raise UserError(f"{path}: steps_per_print is {config['steps_per_print']!r}, expected a whole number")
    for key in ("wall_clock_breakdown", "memory_breakdown"):
        if not isinstance(config.get(key, True), bool):
            raise UserError(f"{path}: {key} is {config[key]!r}, expected true or false")
    return config


def _activations(path: Path, config: dict) -> ActivationSettings:
    given = section(path, config, "activation_checkpointing")
    del config["activation_checkpointing"]
    for key in ACTIVATION_REFUSED:
        if given.pop(key, False):
            raise UserError(
                f"{path}: activation_checkpointing.{key} is not applied by rtcwm; remove it. "
                f"What is applied: {sorted(ACTIVATION_KEYS)}"
            )
    if unknown := sorted(set(given) - ACTIVATION_KEYS):
        raise UserError(f"{path}: unknown keys {unknown} in activation_checkpointing; known: {sorted(ACTIVATION_KEYS)}")
    for key in ("cpu_checkpointing", "pin_memory", "offload_attention"):
        if not isinstance(given.get(key, True), bool):
            raise UserError(f"{path}: activation_checkpointing.{key} is {given[key]!r}, expected true or false")
    if "pin_memory" in given and not given.get("cpu_checkpointing"):
        raise UserError(
            f"{path}: activation_checkpointing.pin_memory locks the memory that cpu_checkpointing moves to, which is "
            "not on: set it true, or remove pin_memory"
        )
    for key, what in (("keep_products", "blocks"), ("ffn_rows", "rows (0: all at once)")):
        number = given.get(key, 0)
        if not is_whole(number) or number < 0:
            raise UserError(f"{path}: activation_checkpointing.{key} is {number!r}, expected a number of {what}")
    settings = ActivationSettings(**given)
    if settings.policy not in POLICIES:
        raise UserError(f"{path}: activation_checkpointing.policy is {settings.policy!r}, expected one of {POLICIES}")
    if settings.policy == "none" and settings.cpu_checkpointing:
        raise UserError(f"{path}: cpu_checkpointing keeps inputs of recomputed blocks; policy 'none' recomputes none")
    if settings.offload_attention and not (settings.policy == "save_attention" and settings.cpu_checkpointing):
        raise UserError(
            f"{path}: offload_attention moves what policy 'save_attention' keeps, beside block inputs: set the policy, "
            "and cpu_checkpointing true, or remove it"
        )
    if settings.keep_products and settings.policy != "save_attention":
        raise UserError(
            f"{path}: keep_products keeps outputs of linear layers beside those of attention: set policy "
            "'save_attention', or remove it"
        )
    return settings
