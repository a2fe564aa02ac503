"""Adapters on disk: one safetensors file that says what it is for.

Keys follow the musubi layout of the released Code World Model adapter:
``lora_unet_blocks_{i}_{attn_qkv_proj|attn_out_proj|mlp_fc1|mlp_fc2}.{lora_down.weight|lora_up.weight|alpha}``, with
qkv stacked [q; k; v] and fc1 stacked [gate; value]. diffusers stacks fc1 [value; gate], so the halves of that up
projection are swapped on the way in and out. bf16 or fp32 on disk. The metadata carries what a user of the file has to
know: base, step, objective, shift, levels, span, rank, alpha.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rtcwm.errors import UserError
from rtcwm.model.lora import SITES, Adapter, AdapterShape

STORED = ("F32", "BF16", "F16")
FILE_NAMES = dict(zip(SITES, ("attn_qkv_proj", "attn_out_proj", "mlp_fc1", "mlp_fc2"), strict=True))


def _prefix(block: int, site: str) -> str:
    return f"lora_unet_blocks_{block}_{FILE_NAMES[site]}"


def _swap_halves(site: str, up: torch.Tensor) -> torch.Tensor:
    """[value; gate] to [gate; value] and back, for the fused feed-forward input alone."""
    return torch.cat(up.chunk(2)[::-1]) if site == "ffn_in" else up


def to_file_tensors(adapter: Adapter, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """The adapter under its file keys, on the CPU, 3 tensors a layer."""
    tensors = {}
    for index, block in enumerate(adapter.blocks):
        for site in SITES:
            pair, prefix = block[site], _prefix(index, site)
            up = _swap_halves(site, pair.up.detach())
            tensors[f"{prefix}.lora_down.weight"] = pair.down.detach().to("cpu", dtype).contiguous()
            tensors[f"{prefix}.lora_up.weight"] = up.to("cpu", dtype).contiguous()
            tensors[f"{prefix}.alpha"] = torch.tensor(adapter.shape.alpha, dtype=torch.float32)
    return tensors


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
    """Writes an adapter, bf16, with string metadata; rank and alpha are added. The caller names a temporary path."""
    tensors = to_file_tensors(adapter)
    check_trained(tensors)
    metadata = {**metadata, "rank": str(adapter.shape.rank), "alpha": repr(adapter.shape.alpha), "format": "pt"}
    save_file(tensors, path, metadata=metadata)
    path.chmod(0o644)  # safetensors makes files that their owner alone can read


def read_metadata(path: Path) -> dict[str, str]:
    """The string metadata of an adapter file; raises `UserError` when the file cannot be read."""
    with _open(path) as file:
        return dict(file.metadata() or {})


def file_shape(path: Path, config: Mapping) -> AdapterShape:
    """Reads only the header and alpha: the shape of an adapter file, checked against a base.

    Raises:
        UserError: missing, truncated or foreign file; tensors that are missing, left over, or of a size that does not
            fit the base; ranks or alphas that differ between layers.
    """
    with _open(path) as file:
        names = set(file.keys())
        first = f"{_prefix(0, SITES[0])}.lora_down.weight"
        if first not in names:
            raise UserError(
                f"{path} has no tensor {first}: not an adapter with fused qkv in the musubi layout. "
                f"It holds {len(names)} tensors, such as {sorted(names)[:2]}"
            )
        size = file.get_slice(first).get_shape()
        if len(size) != 2 or not size[0]:
            raise UserError(f"{path}: {first} is {list(size)}, expected [rank, width]")
        rank, alphas = size[0], {name: file.get_tensor(name) for name in names if name.endswith(".alpha")}
        for name, value in alphas.items():
            if value.numel() != 1 or not torch.isfinite(value.float()).all() or not value.any():
                raise UserError(f"{path}: {name} is {value.tolist()}, expected one finite number other than 0")
        expected_alpha = f"{_prefix(0, SITES[0])}.alpha"
        alpha = alphas[expected_alpha].item() if expected_alpha in alphas else None
        shape = AdapterShape.of(config, rank, alpha)
        wanted = {}
        for index in range(shape.layers):
            for site in SITES:
                inputs, outputs = shape.features(site)
                wanted[f"{_prefix(index, site)}.lora_down.weight"] = [rank, inputs]
                wanted[f"{_prefix(index, site)}.lora_up.weight"] = [outputs, rank]
        for name, size in wanted.items():
            if name not in names:
                raise UserError(
                    f"{path} lacks {name}: made for a base with other layers than this one's {shape.layers}"
                )
            found = list(file.get_slice(name).get_shape())
            if found != size:
                raise UserError(f"{path}: {name} is {found}, but this base and rank {rank} need {size}")
            if file.get_slice(name).get_dtype() not in STORED:
                raise UserError(f"{path}: {name} is {file.get_slice(name).get_dtype()}, expected one of {STORED}")
        if extra := sorted(names - set(wanted) - set(alphas)):
            raise UserError(f"{path} holds {len(extra)} tensors that this base has no layer for, such as {extra[0]}")
        if any(value.item() != shape.alpha for value in alphas.values()):
            raise UserError(f"{path}: alpha differs between layers; one alpha for all is expected")
    return shape


def check_values(path: Path) -> None:
    """Reads an adapter file through; raises `UserError` naming the first tensor with a non-finite value."""
    with _open(path) as file:
        for name in sorted(file.keys()):
            if not torch.isfinite(file.get_tensor(name).float()).all():
                raise UserError(f"{path}: {name} holds non-finite values; use an earlier file")


def load_adapter(path: Path, config: Mapping, rank: int | None = None) -> Adapter:
    """Reads an adapter for a base of this config into fp32.

    Args:
        path: a safetensors file; config: of the base; rank: what the run expects, or None for the file's own.

    Raises:
        UserError: as `file_shape`, a rank that is not the expected one, or non-finite values (the tensor is named).
    """
    shape = file_shape(path, config)
    check_values(path)
    if rank is not None and shape.rank != rank:
        raise UserError(f"{path} has rank {shape.rank}, the run has rank {rank}; set --rank {shape.rank}")
    adapter = Adapter(shape)
    with _open(path) as file, torch.no_grad():
        for index, block in enumerate(adapter.blocks):
            for site in SITES:
                prefix, pair = _prefix(index, site), block[site]
                down = file.get_tensor(f"{prefix}.lora_down.weight")
                up = file.get_tensor(f"{prefix}.lora_up.weight")
                pair.down.copy_(down)
                pair.up.copy_(_swap_halves(site, up))
    return adapter


def _open(path: Path):
    if not Path(path).is_file():
        raise UserError(f"no adapter file at {path}")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path} cannot be read as safetensors ({error}); it may be truncated: copy it again"
        ) from error
