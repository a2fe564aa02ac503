"""AdaLN of the blocks as a table: rows of modulation by model time, in place of 39% of the base's weights.

A block's AdaLN is a function of model time and modality alone, and takes 13.0 of the release's 33.1 billion parameters.
Its rows for a grid of model times are computed once for a base, block by block, so that one block's projection is all
that a device ever holds, and kept in safetensors files. The grid of 1,000 takes 9.7 GB in bf16. A run maps the files
into memory and copies the rows of its few model times to the device, all blocks in one copy (10 MB a time); the weights
are neither loaded, nor partitioned, nor gathered. Noise levels are then drawn on the grid (`objectives.on_grid`).

Rows are what the projection gives in the base's dtype. Computed with other rows beside them they may differ in the last
bit, as the rows of any matrix product may: kernels for a thousand rows add up in another order than those for nine.

A file is named by the hash of its base and its own times, and says in its metadata which base, dtype and rows it holds.
Model times that no file of the base holds yet are computed into a new one, so runs with other schedules share the grid.
"""

import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn

from rtcwm.errors import UserError
from rtcwm.model.layout import CLEAN_TIME, MODALITIES, REFERENCE_TIME
from rtcwm.model.loading import BaseSource, meta_model
from rtcwm.model.objectives import model_time
from rtcwm.model.tensor_files import DTYPES, LENGTH_BYTES, TensorFile

PARTS = 6
"""Shift, scale and gate of attention, and of the feed-forward."""

TOLERANCE = 1e-6
"""Model times that differ by less are one: float32 rounds 1 - sigma to 6e-8, and grids are far coarser."""

VERSION = "1"


def grid_times(steps: int, extra: Sequence[float] = ()) -> Tensor:
    """Model times ``1 - k / steps`` for k = 0..steps, those of references and clean rows, and others; sorted, each
    once, float32 as the network is fed them."""
    grid = model_time(torch.arange(steps + 1) / steps)
    times = torch.cat([grid, torch.tensor([REFERENCE_TIME, CLEAN_TIME, *extra])]).unique()
    return times[torch.cat([torch.tensor([True]), times.diff() > TOLERANCE])]


class AdalnTable:
    """Modulation rows of a base, from one or more files.

    Args:
        paths: of files as `write_table` makes them.
        device: where rows are wanted.

    Attributes:
        moved_bytes: copied to the device so far.

    Raises:
        UserError: a file that is damaged, or holds another base or dtype.
    """

    def __init__(self, paths: Sequence[Path], source: BaseSource, dtype: torch.dtype, device: torch.device):
        self.device, self.moved_bytes = device, 0
        self.blocks, self.width = source.config["num_layers"], PARTS * source.config["hidden_size"]
        files = [_open(path, source, dtype) for path in paths]
        times = torch.cat([file.tensor("times") for file in files])
        self.times, order = times.sort()
        self._dtype = dtype
        # Of every entry, in the order of its time: the rows of every block.
        rows = [[file.tensor(_name(block)) for block in range(self.blocks)] for file in files]
        places = [
            (blocks, at) for file, blocks in zip(files, rows, strict=True) for at in range(file.shapes["times"][0])
        ]
        self._places = [places[index] for index in order.tolist()]

    def rows(self, times: Tensor) -> tuple[Tensor, Tensor]:
        """Rows for the blocks of one forward pass.

        Args:
            times: model times ``[m]``, on the CPU (elsewhere the host waits for the device); they may repeat.

        Returns:
            ``[blocks, u * 3, 6 * hidden]`` on the device, of the u distinct times, and for each of the m times which of
            them it is, ``[m]`` on the CPU.

        Raises:
            UserError: a model time that is not in the table.
        """
        entries = self._entries(times.cpu())
        distinct, which = entries.unique(return_inverse=True)
        shape = (self.blocks, len(distinct), MODALITIES * self.width)
        staged = torch.empty(shape, dtype=self._dtype, pin_memory=self.device.type == "cuda")
        for at, entry in enumerate(distinct.tolist()):
            blocks, row = self._places[entry]
            for target, rows in zip(staged, blocks, strict=True):
                target[at].copy_(rows[row])
        self.moved_bytes += staged.nbytes
        return staged.to(self.device, non_blocking=True).view(self.blocks, -1, self.width), which

    def stand_in(self, block: int) -> "TableRows":
        """What takes the place of a block's ``adaln_proj`` (`loading.build_base`)."""
        return TableRows(self, block)

    def _entries(self, times: Tensor) -> Tensor:
        """Index of every time in the table."""
        after = torch.searchsorted(self.times, times).clamp(max=len(self.times) - 1)
        before = (after - 1).clamp(min=0)
        nearer = (self.times[before] - times).abs() < (self.times[after] - times).abs()
        entries = torch.where(nearer, before, after)
        missing = (self.times[entries] - times).abs() > TOLERANCE
        if missing.any():
            time = times[missing][0].item()
            raise UserError(
                f"the noise level {1 - time:.6g} (model time {time:.6g}) is none of the {len(self.times)} that the "
                "AdaLN table holds: levels have to be on the grid of --adaln-times or of the run's schedule; or set "
                "--adaln live"
            )
        return entries


class TableRows(nn.Module):
    """What stands in the place of a block's ``adaln_proj``: it takes the rows of all blocks and gives those of its own,
    in the order of `MiniMaxH3AdaLayerNormModulation`, six tensors ``[u * 3, hidden]``."""

    def __init__(self, table: AdalnTable, block: int):
        super().__init__()
        self.table, self.block = table, block

    def forward(self, rows: Tensor) -> tuple[Tensor, ...]:
        return rows[self.block].chunk(PARTS, dim=-1)


def ensure_table(
    folder: Path, source: BaseSource, times: Tensor, dtype: torch.dtype, device: torch.device
) -> tuple[list[Path], int]:
    """Makes sure that the files of this base in a folder hold these model times, computing what they lack.

    Returns:
        All files of the base there, and the number of times that were computed now.

    Raises:
        UserError: a file of the base that is damaged; a folder that cannot be written.
    """
    paths = sorted(folder.glob(f"{_prefix(source, dtype)}-*.safetensors"))
    held = [_open(path, source, dtype).tensor("times") for path in paths]
    known = torch.cat([*held, torch.empty(0)])
    lacking = times[((times[:, None] - known).abs() > TOLERANCE).all(dim=1)]
    if len(lacking):
        digest = hashlib.blake2b(lacking.numpy().tobytes(), digest_size=4).hexdigest()
        paths.append(folder / f"{_prefix(source, dtype)}-{len(lacking)}-{digest}.safetensors")
        write_table(paths[-1], source, lacking, dtype, device)
    return paths, len(lacking)


def table_bytes(config: dict, times: int, dtype: torch.dtype) -> int:
    """Size of a table of so many model times."""
    return times * config["num_layers"] * MODALITIES * PARTS * config["hidden_size"] * dtype.itemsize


def write_table(path: Path, source: BaseSource, times: Tensor, dtype: torch.dtype, device: torch.device) -> None:
    """Computes the rows of these model times ``[T]`` on a device and writes them: complete, or not at all.

    The file is safetensors: ``times`` float32, and for every block ``[T, 3 * 6 * hidden]``.

    Raises:
        UserError: the disk refused.
    """
    config = source.config
    shapes = {"times": ("F32", [len(times)])}
    kind = next(name for name, known in DTYPES.items() if known == dtype)
    for block in range(config["num_layers"]):
        shapes[_name(block)] = (kind, [len(times), MODALITIES * PARTS * config["hidden_size"]])
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")  # nodes that share the folder may write it at once
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(aside, "wb") as file:
            file.write(_header(shapes, source, dtype, "0" * 32))
            ends = hashlib.blake2b(digest_size=16)
            for rows in (times, *_computed(source, times, dtype, device)):
                file.write(_bytes(rows))
                ends.update(_bytes(_ends(rows)))
            file.seek(0)
            file.write(_header(shapes, source, dtype, ends.hexdigest()))
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError as error:
        raise UserError(
            f"cannot write the AdaLN table {path} ({table_bytes(config, len(times), dtype):,} bytes): {error}. Make "
            "room, name another folder with --adaln-dir, or set --adaln live"
        ) from error
    finally:
        with suppress(OSError):
            aside.unlink()


def _computed(source: BaseSource, times: Tensor, dtype: torch.dtype, device: torch.device) -> Iterator[Tensor]:
    """Of every block, its rows on the CPU. One block's projection is on the device at a time."""
    model = meta_model(source.config)

    def filled(name: str, module: nn.Module, dtype: torch.dtype) -> nn.Module:
        module.to(dtype).to_empty(device=device)
        for parameter, tensor in module.named_parameters():
            source.fill(f"{name}.{parameter}", tensor)
        return module

    with torch.no_grad():
        embedder = filled("time_embedder", model.time_embedder, torch.float32)
        temb = embedder(model.time_proj(times.to(device)).to(torch.float32))
        for index, block in enumerate(model.transformer_blocks):
            adaln = filled(f"transformer_blocks.{index}.adaln_proj", block.adaln_proj, dtype)
            yield torch.cat(adaln(temb), dim=-1).view(len(times), -1).cpu()
            block.adaln_proj = None


def _prefix(source: BaseSource, dtype: torch.dtype) -> str:
    return f"adaln-{source.fingerprint}-{str(dtype).removeprefix('torch.')}"


def _name(block: int) -> str:
    return f"transformer_blocks.{block}.modulation"


def _header(shapes: dict[str, tuple[str, list[int]]], source: BaseSource, dtype: torch.dtype, ends: str) -> bytes:
    """The first bytes of a safetensors file of these tensors in this order; as long for any digest `ends`."""
    metadata = {"format": "pt", "kind": "rtcwm adaln table", "version": VERSION, "base": source.fingerprint}
    header: dict = {"__metadata__": metadata | {"dtype": str(dtype), "ends": ends}}
    end = 0
    for name, (kind, shape) in shapes.items():
        start, end = end, end + torch.Size(shape).numel() * DTYPES[kind].itemsize
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _ends(rows: Tensor) -> Tensor:
    """First and last row."""
    return torch.stack([rows[0], rows[-1]])


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.contiguous().view(torch.uint8).numpy()).cast("B")


def _open(path: Path, source: BaseSource, dtype: torch.dtype) -> TensorFile:
    """A file of this base, checked: its header, its metadata, and of every tensor its first and its last row."""
    again = "delete it, and it is computed again"
    try:
        file = TensorFile(path)
    except UserError as error:
        raise UserError(f"the AdaLN table {path} is damaged ({error}): {again}") from error
    wanted = {"kind": "rtcwm adaln table", "version": VERSION, "base": source.fingerprint, "dtype": str(dtype)}
    found = {key: file.metadata.get(key) for key in wanted}
    if found != wanted:
        differs = ", ".join(
            f"{key} {found[key]}, expected {wanted[key]}" for key in wanted if found[key] != wanted[key]
        )
        raise UserError(
            f"{path} is not the AdaLN table of {source.description}: {differs}. Move it elsewhere, or {again}"
        )
    names = ["times", *(_name(block) for block in range(source.config["num_layers"]))]
    ends = hashlib.blake2b(digest_size=16)
    for name in names:
        ends.update(_bytes(_ends(file.tensor(name))))
    if ends.hexdigest() != file.metadata["ends"]:
        raise UserError(f"the AdaLN table {path} is damaged: it does not hold what was written to it; {again}")
    return file
