"""safetensors files that are written reproducibly, and read once.

`write_tensors` gives the same bytes for the same tensors and metadata: the library writes the metadata in an order that
differs from process to process, so the header is put in order afterwards (same length, nothing else moves).

`TensorFile` maps a file into memory, and every tensor is a view of the map. Checking the values, hashing the file and
copying the weights therefore read the disk once, the ranks of a node share the pages, and nothing is held that the
system cannot drop. What was checked is what is copied, also when another file takes the name meanwhile.
"""

import hashlib
import json
import mmap
import warnings
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rtcwm.errors import UserError
from rtcwm.strict_json import read_object

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
LENGTH_BYTES = 8
"""A file begins with the length of its JSON header, little-endian."""


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Writes a safetensors file, readable by everyone: the same bytes for the same tensors and metadata. The caller
    names a temporary path.

    Raises:
        OSError: it cannot be written.
    """
    try:
        save_file(dict(tensors), path, metadata=dict(metadata))
    except SafetensorError as error:  # its own name for a full disk
        raise OSError(str(error)) from error
    with open(path, "r+b") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        ordered = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(ordered) > length:
            raise AssertionError(f"{path}: an ordered header of {len(ordered)} bytes in the place of {length}")
        file.seek(LENGTH_BYTES)
        file.write(ordered.ljust(length))
    path.chmod(0o644)  # safetensors makes files that their owner alone can read


class TensorFile:
    """A safetensors file, mapped when its first tensor is asked for.

    Attributes:
        metadata: its string metadata; shapes, dtypes: of every tensor, by name, from the header.

    Raises:
        UserError: no such file, a pickle (never loaded: it may run code), or not a whole safetensors file.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        if not self.path.is_file():
            raise UserError(f"no adapter file at {path}")
        refuse_pickle(self.path)
        try:
            with safe_open(self.path, framework="pt") as file:  # checks every offset and size of the header
                self.metadata = dict(file.metadata() or {})
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{path} cannot be read as safetensors ({error}); it may be truncated: copy it again"
            ) from error
        with open(self.path, "rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        self.shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}
        self.dtypes = {name: entry["dtype"] for name, entry in header.items()}
        self._places = {name: LENGTH_BYTES + length + entry["data_offsets"][0] for name, entry in header.items()}

    @cached_property
    def _map(self) -> mmap.mmap:
        with open(self.path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    @cached_property
    def hash(self) -> str:
        """Hash of the whole file, 32 hex digits (an adapter of the release is 1.2 GB: a second)."""
        return hashlib.blake2b(self._map, digest_size=16).hexdigest()

    def tensor(self, name: str) -> torch.Tensor:
        """A view of the map, on the CPU, not to be written to."""
        shape, dtype = self.shapes[name], self.dtypes[name]
        if dtype not in DTYPES:
            raise UserError(f"{self.path}: {name} is {dtype}, expected one of {', '.join(DTYPES)}")
        count = torch.Size(shape).numel()
        if not count:
            return torch.empty(shape, dtype=DTYPES[dtype])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            flat = torch.frombuffer(self._map, dtype=DTYPES[dtype], count=count, offset=self._places[name])
        return flat.view(shape)


def weight_map(index: Path) -> dict[str, str]:
    """File of each tensor, as the index of a sharded model (`*.safetensors.index.json`) tells it.

    Raises:
        UserError: it is no such index, or leads out of its folder.
    """
    files = read_object(index, "the index of sharded weights").get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise UserError(f"{index} is not the index of sharded weights (no `weight_map` of file names): copy it again")
    if outside := next((file for file in files.values() if Path(file).name != file), None):
        raise UserError(f"{index} leads to {outside}, expected files beside it: copy them into the folder")
    return files


def refuse_pickle(path: Path) -> None:
    """`UserError` when a file is a pickle, whatever its name says."""
    with open(path, "rb") as file:
        start = file.read(LENGTH_BYTES + 1)
    if not start.endswith(b"{") and (start.startswith(b"PK\x03\x04") or start[:1] == b"\x80"):
        raise UserError(
            f"{path} is a pickle, which can run code as it is loaded: it is never read. Ask for the .safetensors "
            "file, or convert it in an environment of which nothing is at stake"
        )
