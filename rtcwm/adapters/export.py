"""Adapters for other programs: the same numbers under other names, bit for bit.

Nothing is computed on the way: qkv is split or joined, the feed-forward's halves swap, and every value keeps its bits
and its type. So a file that went to any layout and back has the bytes that it had. `fuse` alone makes another adapter
of one: of the same products ``up @ down`` at a higher rank, for files whose q, k and v were trained apart.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from rtcwm.adapters.base import head_width
from rtcwm.errors import UserError
from rtcwm.model.adapter_config import DIFFUSERS_METADATA, PEFT_CONFIG, PEFT_WEIGHTS, diffusers_metadata, peft_config
from rtcwm.model.adapter_files import shape_metadata
from rtcwm.model.adapter_layouts import layout_tensors
from rtcwm.model.adapter_reader import AdapterFile, open_adapter
from rtcwm.model.lora import SITES, AdapterShape
from rtcwm.model.tensor_files import write_tensors

HOW = {
    "musubi": "rtcwm and musubi-tuner read it",
    "comfyui": "put it into ComfyUI's models/loras",
    "diffusers": 'pipeline.load_lora_weights("{out}") puts it into transformer_ref',
    "peft": 'PeftModel.from_pretrained(transformer_ref, "{out}") reads it',
}
Pairs = Iterator[tuple[int, str, torch.Tensor, torch.Tensor]]


def export(source: Path, layout: str, out: Path, base: str | None = None) -> AdapterShape:
    """Writes an adapter in another layout; returns its shape.

    Args:
        source: an adapter in any layout that is read; layout: musubi, comfyui, diffusers or peft.
        out: the file to write, a folder for peft; what is there is replaced.
        base: what the adapter is for, as `head_width` takes it.

    Raises:
        UserError: a file that cannot be read, does not fit the base or holds non-finite values, q, k and v that
            cannot be fused at their rank, a width of heads that is not known, or an `out` that does not fit the layout.
    """
    file = open_adapter(source)
    shape, head = file.shape(), head_width(base, file)
    file.check_values()
    pairs = ((block, site, *file.pair(block, site, head)) for block in range(shape.layers) for site in SITES)
    write_layout(pairs, shape, file.metadata, layout, out)
    return shape


def fuse(source: Path, layout: str, out: Path, base: str | None = None) -> AdapterShape:
    """Writes the same adapter at one rank, with one down projection for q, k and v; returns its shape.

    With A and B the down and up projections, ``[Bq Aq; Bk Ak; Bv Av] = blockdiag(Bq, Bk, Bv) [Aq; Ak; Av]``, and equal
    A stand once. Layers of a lower rank than the highest are filled up as a new adapter begins: drawn down rows, zero
    up columns, which add nothing and can be trained. alpha grows with the rank, so that alpha / rank stays.

    Raises:
        UserError: as `export`, or layers whose alpha / rank differ.
    """
    file = open_adapter(source)
    sizes, head = file.sizes(), head_width(base, file)
    if bad := next(file.non_finite(), None):
        raise UserError(f"{source}: {bad[0]} holds non-finite values; use an earlier file")
    scales = {file.alpha(entry) / file.rank(entry): entry.module for _, _, entry in file.entries()}
    if len(scales) > 1:
        raise UserError(
            f"{source}: alpha / rank differs between layers "
            f"({'; '.join(f'{at}: {s:g}' for s, at in scales.items())}); one for all is expected"
        )
    layers = [(block, site) for block in range(sizes.layers) for site in SITES]
    rank = max(
        file.stacked_rank(block) if site == "attn_qkv" else file.rank(file.names.entries[block, site][0])
        for block, site in layers
    )
    shape = AdapterShape(sizes.layers, sizes.hidden, sizes.inner, sizes.ffn, rank, sizes.alpha * rank / sizes.rank)
    pairs = ((block, site, *_filled(*_exact(file, block, site, head), rank, seed=block)) for block, site in layers)
    write_layout(pairs, shape, file.metadata, layout, out)
    return shape


def _exact(file: AdapterFile, block: int, site: str, head: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Down and up of a site, with the distinct downs of q, k and v stacked."""
    held = file.names.entries[block, site]
    if len(held) == 1:
        return file.pair(block, site, head)
    downs: list[torch.Tensor] = []
    ups = []
    for entry in held:
        down, up = file.weights.tensor(entry.down), file.weights.tensor(entry.up)
        slot = next((index for index, other in enumerate(downs) if torch.equal(down, other)), len(downs))
        if slot == len(downs):
            downs.append(down)
        ups.append((slot, up))
    starts = [sum(down.shape[0] for down in downs[:slot]) for slot in range(len(downs))]
    stacked = torch.cat(downs)
    joined = torch.zeros(sum(up.shape[0] for _, up in ups), stacked.shape[0], dtype=ups[0][1].dtype)
    row = 0
    for slot, up in ups:
        joined[row : row + up.shape[0], starts[slot] : starts[slot] + up.shape[1]] = up
        row += up.shape[0]
    return stacked, joined


def _filled(down: torch.Tensor, up: torch.Tensor, rank: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The pair at a higher rank, adding nothing."""
    more, inputs = rank - down.shape[0], down.shape[1]
    if not more:
        return down, up
    bound = inputs**-0.5
    drawn = torch.empty(more, inputs).uniform_(-bound, bound, generator=torch.Generator().manual_seed(seed))
    zero = torch.zeros(up.shape[0], more, dtype=up.dtype)
    return torch.cat([down, drawn.to(down.dtype)]), torch.cat([up, zero], dim=1)


def write_layout(pairs: Pairs, shape: AdapterShape, metadata: Mapping[str, str], layout: str, out: Path) -> None:
    """Writes pairs (as `layout_tensors` takes them) aside and renames them to ``out``."""
    single = layout != "peft"
    if single and (out.suffix != ".safetensors" or out.is_dir()):
        raise UserError(f"--out {out}: the {layout} layout is one file, expected a name that ends in .safetensors")
    if not single and (out.suffix == ".safetensors" or out.is_file()):
        raise UserError(f"--out {out}: PEFT's layout is a folder, name one")
    kept = {key: value for key, value in metadata.items() if key != DIFFUSERS_METADATA} | shape_metadata(shape)
    if layout == "diffusers":
        kept |= diffusers_metadata(shape.rank, shape.alpha)
    tensors = layout_tensors(layout, pairs, shape.alpha)
    targets = [out] if single else [out / PEFT_WEIGHTS, out / PEFT_CONFIG]
    asides = [target.with_name(f".{target.name}.{os.getpid()}") for target in targets]
    try:
        targets[0].parent.mkdir(parents=True, exist_ok=True)
        try:
            write_tensors(asides[0], tensors, kept)
            for aside in asides[1:]:
                aside.write_text(json.dumps(peft_config(shape.rank, shape.alpha), indent=2, sort_keys=True) + "\n")
            for aside, target in zip(asides, targets, strict=True):
                aside.replace(target)
        finally:
            for aside in asides:
                aside.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"--out {out} cannot be written: {error}") from error


def report(out: Path, layout: str, shape: AdapterShape) -> None:
    """One line on what was written, and what reads it."""
    print(
        f"{out}: {layout} layout, {shape.layers} blocks, rank {shape.rank}, alpha {shape.alpha:g}; "
        f"{HOW[layout].format(out=out)}"
    )
