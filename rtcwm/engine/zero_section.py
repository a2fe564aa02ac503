"""The ``zero_optimization`` section of an engine's file: the keys that have an effect here, and no others.

A frozen base without an optimizer uses few of DeepSpeed's keys, and a trained adapter whose weights are whole uses
others. A key that is none of them is refused by name, unless it says what holds anyhow.
"""

from collections.abc import Mapping
from pathlib import Path

from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadParamConfig
from pydantic import BaseModel, ValidationError

from rtcwm.errors import UserError
from rtcwm.strict_json import section

BLOCK_CLASS = "diffusers.models.transformers.transformer_minimax_h3.MiniMaxH3TransformerBlock"
THRESHOLD = "stage3_param_persistence_threshold"
BASE_KEYS = {"stage", "offload_param", "leaf_module", "memory_efficient_linear", THRESHOLD}
ADAPTER_KEYS = {
    "stage", "reduce_bucket_size", "allgather_bucket_size", "overlap_comm", "reduce_scatter", "contiguous_gradients",
    "use_multi_rank_bucket_allreduce",
}  # fmt: skip
OFFLOAD_KEYS = {"device", "pin_memory"}
BASE_REASONS = {
    "offload_optimizer": "a base has no optimizer",
    "cpu_offload": "a base has no optimizer",
    "cpu_offload_param": "set offload_param",
    "zero_hpz_partition_size": "it needs an optimizer; set shard_group",
    "zero_quantized_weights": "the base would no longer be the released one",
    "zero_quantized_nontrainable_weights": "the base would no longer be the released one",
    "zero_quantized_gradients": "a base has no gradients",
}
ADAPTER_REASONS = {
    "offload_optimizer": "set park_moments, which keeps moments in host memory but for the optimizer's step",
    "cpu_offload": "set park_moments, which keeps moments in host memory but for the optimizer's step",
    "offload_param": "it is a key of the base's file; an adapter's weights are whole on the device",
    "compute_grad_norm": "every step logs the norm of its gradient",
}


def base_section(path: Path, config: dict) -> tuple[bool, bool]:
    """Checks and completes a base's section; whether the base is in host memory, and whether that is page-locked."""
    zero = section(path, config, "zero_optimization")
    _known_alone(path, "zero_optimization", zero, DeepSpeedZeroConfig, BASE_KEYS, BASE_REASONS)
    if zero.setdefault("stage", 3) != 3:
        raise UserError(
            f"{path}: zero_optimization.stage is {zero['stage']!r}; the frozen base is partitioned by stage 3"
        )
    # One block is one fetch, nothing stays gathered between uses, and linear layers stay torch's own.
    zero |= {THRESHOLD: 0, "memory_efficient_linear": False} | zero
    if zero.setdefault("leaf_module", {"classes": [BLOCK_CLASS]}) != {"classes": [BLOCK_CLASS]}:
        raise UserError(f"{path}: zero_optimization.leaf_module is fixed to the base's blocks; remove it")
    if zero["memory_efficient_linear"] or zero[THRESHOLD] != 0:
        raise UserError(
            f"{path}: memory_efficient_linear has to be false and {THRESHOLD} 0: the adapter's hooks read the layers' "
            "inputs, and every block is released after its use"
        )
    _validate(path, zero)
    return _host_base(path, zero)


def adapter_section(path: Path, config: dict) -> None:
    """Checks and completes an adapter's section."""
    zero = section(path, config, "zero_optimization")
    _known_alone(path, "zero_optimization", zero, DeepSpeedZeroConfig, ADAPTER_KEYS, ADAPTER_REASONS)
    if zero.setdefault("stage", 1) not in (1, 2):
        raise UserError(
            f"{path}: zero_optimization.stage is {zero['stage']!r}; adapter engines use stage 1 or 2, since the hooks "
            "of the base read whole adapter weights"
        )
    # As a number, whatever it was written as: the formulas of memory count with it.
    zero["reduce_bucket_size"] = _validate(path, zero).reduce_bucket_size


def _known_alone(
    path: Path, name: str, given: dict, model: type[BaseModel], known: set[str], reasons: Mapping[str, str]
) -> None:
    """Takes keys out of a section that say what DeepSpeed does anyhow, and refuses others that are not known. What is
    no key of DeepSpeed's either is left to its own validation."""
    for plain, field in model.model_fields.items():
        key = field.alias or plain
        if plain != key and plain in given:
            given[key] = given.pop(plain)
        if given.get(key) == "auto":
            raise UserError(f"{path}: {name}.{key} is 'auto', which nothing fills in here: set a value, or remove it")
        if key not in given or key in known:
            continue
        off = (None, False)
        if given[key] != field.default and not (field.default in off and given[key] in off):
            reason = reasons.get(key, f"it has no effect on this engine; what has: {', '.join(sorted(known))}")
            raise UserError(f"{path}: {name}.{key} is not used here: {reason}; remove it")
        del given[key]


def _validate(path: Path, zero: dict) -> DeepSpeedZeroConfig:
    """DeepSpeed's own validation of the section, with the file's name in front."""
    try:
        return DeepSpeedZeroConfig(**zero)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{path}: zero_optimization.{key}: {first['msg']}") from error


def _host_base(path: Path, zero: dict) -> tuple[bool, bool]:
    """Whether the base is in host memory, and whether that is page-locked. DeepSpeed is told not to lock it, because it
    would round every tensor up to a power of two; `BaseEngine` does."""
    given = zero.get("offload_param")
    if given is None:
        return False, False
    name = "zero_optimization.offload_param"
    _known_alone(path, name, given, DeepSpeedZeroOffloadParamConfig, OFFLOAD_KEYS, {})
    device, pin = given.get("device", "none"), given.get("pin_memory", False)
    if device not in ("none", "cpu"):
        raise UserError(f"{path}: offload_param.device is {device!r}; 'cpu' or 'none' are known to work")
    if not isinstance(pin, bool):
        raise UserError(f"{path}: {name}.pin_memory is {pin!r}, expected true or false")
    if pin and device == "none":
        raise UserError(f"{path}: {name}.pin_memory locks the memory of a base whose device is 'cpu', and it is 'none'")
    given["pin_memory"] = False
    return device == "cpu", pin
