"""The description of an adapter that PEFT and diffusers keep beside its weights: where alpha stands in their layouts.

PEFT writes ``adapter_config.json``, diffusers the same fields as JSON in the file's metadata, each with the component's
name before it. A layer's alpha is the first of ``alpha_pattern`` whose key fits its name, else ``lora_alpha``.
"""

import json
import math
import re
from collections.abc import Mapping

from rtcwm.errors import UserError
from rtcwm.model.adapter_layouts import DIFFUSERS, LAYOUTS, PEFT_PREFIX, SHARES, Names
from rtcwm.model.tensor_files import TensorFile

PEFT_WEIGHTS, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""Files of a PEFT folder."""
DIFFUSERS_METADATA = "lora_adapter_metadata"
"""Metadata entry in which diffusers keeps the description."""
OTHER_MATHS = ("use_dora", "use_rslora", "lora_bias", "fan_in_fan_out", "use_qalora", "use_bdlora", "modules_to_save")
"""Entries under which the weights are more, or mean something else, than ``alpha / rank * up @ down``."""


def read_config(weights: TensorFile, names: Names) -> dict | None:
    """What PEFT or diffusers say of an adapter; None where nothing is said.

    Raises:
        UserError: PEFT's weights without the config (alpha would be a guess), broken JSON, or another kind of adapter
            than a plain LoRA.
    """
    prefix = names.kinds[0][1]
    if prefix == PEFT_PREFIX:
        source = str(weights.path.with_name(PEFT_CONFIG))
        try:
            text = weights.path.with_name(PEFT_CONFIG).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"{weights.path} is in PEFT's layout, whose alpha stands in {PEFT_CONFIG}, and that cannot be read "
                f"({error}): copy it beside the weights"
            ) from error
    elif DIFFUSERS_METADATA in weights.metadata:
        source, text = f"{weights.path}, metadata {DIFFUSERS_METADATA}", weights.metadata[DIFFUSERS_METADATA]
    else:
        return None
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{source} is not valid JSON ({error}): write the adapter again") from error
    if not isinstance(config, dict):
        raise UserError(f"{source} holds {config!r}, expected the config of a LoRA")
    if prefix:
        config |= {key.removeprefix(prefix): value for key, value in config.items() if key.startswith(prefix)}
    wrong = [key for key in OTHER_MATHS if config.get(key)]
    wrong += [key for key, usual in (("peft_type", "LORA"), ("bias", "none")) if config.get(key, usual) != usual]
    if wrong:
        raise UserError(
            f"{source}: {wrong[0]} is {config[wrong[0]]!r}; rtcwm reads plain LoRA alone, alpha / rank * up @ down"
        )
    if not isinstance(config.get("alpha_pattern") or {}, dict):
        raise UserError(f"{source}: alpha_pattern is {config['alpha_pattern']!r}, expected an object")
    if number(config.get("lora_alpha")) is None:
        raise UserError(f"{source}: lora_alpha is {config.get('lora_alpha')!r}, expected a finite number other than 0")
    return config


def config_alpha(config: Mapping, module: str) -> float:
    """alpha of a layer by its dotted name, from a config that `read_config` gave."""
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        try:
            fits = re.match(rf"(.*\.)?({pattern})$", module)
        except re.error as error:
            raise UserError(f"alpha_pattern {pattern!r} is no pattern ({error}): write the adapter again") from error
        if fits:
            if number(value) is None:
                raise UserError(f"alpha_pattern {pattern} is {value!r}, expected a finite number other than 0")
            return number(value)
    return number(config["lora_alpha"])


def number(value: object) -> float | None:
    """A finite number other than 0, given as one or as text; None for anything else."""
    try:
        found = float(value)
    except (TypeError, ValueError):
        return None
    return found if math.isfinite(found) and found else None


def peft_config(rank: int, alpha: float) -> dict:
    """PEFT's ``adapter_config.json`` of an adapter over the blocks of `MiniMaxH3Transformer3DModel`, unfused.

    The target is one pattern over the full names: a list of endings would also catch the text refiner's layers.
    """
    modules = [*SHARES, *(name for site, name in DIFFUSERS.items() if site != "attn_qkv")]
    names = "|".join(re.escape(name) for name in modules)
    return {
        "peft_type": "LORA", "task_type": None, "base_model_name_or_path": None, "inference_mode": True, "r": rank,
        "lora_alpha": alpha, "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False, "use_rslora": False,
        "use_dora": False, "rank_pattern": {}, "alpha_pattern": {},
        "target_modules": rf"transformer_blocks\.\d+\.(?:{names})",
    }  # fmt: skip


def diffusers_metadata(rank: int, alpha: float) -> dict[str, str]:
    """The metadata entry from which diffusers builds its LoRA config."""
    given = peft_config(rank, alpha)
    kept = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "target_modules", "use_dora")
    prefix = LAYOUTS["diffusers"].prefix
    return {DIFFUSERS_METADATA: json.dumps({prefix + key: given[key] for key in kept}, sort_keys=True)}
