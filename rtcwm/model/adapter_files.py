"""Adapters on disk: one safetensors file that says what it is for.

rtcwm writes the musubi layout of the released Code World Model adapter, bf16, and reads that and the layouts of
ComfyUI, diffusers and PEFT (:mod:`rtcwm.model.adapter_layouts`), bf16, fp16 or fp32. The metadata carries what a user
of the file has to know: base, step, objective, shift, levels, span, rank, alpha.
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from rtcwm.errors import UserError
from rtcwm.model.adapter_layouts import layout_tensors
from rtcwm.model.adapter_reader import AdapterFile, open_adapter, weights_file
from rtcwm.model.lora import SITES, Adapter, AdapterShape
from rtcwm.model.tensor_files import TensorFile, write_tensors


def to_file_tensors(
    adapter: Adapter, dtype: torch.dtype = torch.bfloat16, layout: str = "musubi"
) -> dict[str, torch.Tensor]:
    """The adapter under its file keys, on the CPU."""
    pairs = (
        (block, site, pairs[site].down.detach().to("cpu", dtype), pairs[site].up.detach().to("cpu", dtype))
        for block, pairs in enumerate(adapter.blocks)
        for site in SITES
    )
    return layout_tensors(layout, pairs, adapter.shape.alpha)


def check_trained(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuses weights that no healthy training gives.

    Raises:
        UserError: an empty, non-finite or all-zero tensor, named. A zero up projection after a step means that the
            adapter never received a gradient there, which the loss alone does not show.
    """
    for name, tensor in tensors.items():
        if tensor.numel() == 0:
            raise UserError(f"adapter tensor {name} is empty: its partition was not gathered; nothing was saved")
        if not torch.isfinite(tensor).all():
            raise UserError(f"adapter tensor {name} holds non-finite values; nothing was saved")
        if not tensor.any():
            raise UserError(f"adapter tensor {name} is zero everywhere: training never moved it; nothing was saved")


def save_adapter(path: Path, adapter: Adapter, metadata: Mapping[str, str]) -> None:
    """Writes an adapter, bf16, musubi layout, with string metadata; rank and alpha are added. The same adapter and
    metadata give the same bytes. The caller names a temporary path."""
    tensors = to_file_tensors(adapter)
    check_trained(tensors)
    write_tensors(path, tensors, {**metadata, **shape_metadata(adapter.shape)})


def shape_metadata(shape: AdapterShape) -> dict[str, str]:
    """What every file says of the adapter's shape."""
    return {"rank": str(shape.rank), "alpha": repr(shape.alpha), "format": "pt"}


def read_metadata(path: Path) -> dict[str, str]:
    """The string metadata of an adapter file; raises `UserError` when the file cannot be read."""
    return TensorFile(weights_file(Path(path))).metadata


def file_shape(path: Path, config: Mapping) -> AdapterShape:
    """The shape of an adapter file, checked against a base by its header and alpha alone (`AdapterFile.shape`)."""
    return AdapterFile(path).shape(config)


def load_adapter(path: Path, config: Mapping) -> Adapter:
    """Reads an adapter for a base of this config into fp32.

    Args:
        path: a safetensors file in any layout that is read, or a PEFT folder; config: of the base.

    Raises:
        UserError: as `AdapterFile.shape` and `AdapterFile.check_values`.
    """
    file = open_adapter(path)
    shape = file.shape(config)
    file.check_values()
    adapter = Adapter(shape)
    with torch.no_grad():
        for index, block in enumerate(adapter.blocks):
            for site in SITES:
                down, up = file.pair(index, site, config["attention_head_dim"])
                block[site].down.copy_(down)
                block[site].up.copy_(up)
    return adapter
