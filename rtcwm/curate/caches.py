"""What the latent caches of other trainers hold, read into one form.

Three kinds are known. ``.pt`` files, one a clip: ``vae_latent [24, L, h, w]``, ``proxy_latent [24, L, ph, pw]``,
``anchor_latent [24, 1, H, W]``, ``text_embedding [n, width]``, ``text_token_tags [n]``, ``info``. Parquet rows with
the same tensors as ``<name>_bytes``, ``_shape`` and ``_dtype``, or with the references as packed rows.
``.precomputed`` folders: an ``index.json`` and, by sample, ``latents``, ``conditions`` and ``reference_latents``
(packed rows and their geometry).

All of it is foreign input: a ``.pt`` is loaded with ``weights_only`` alone, ids never leave their folder, and every
tensor is held against its shape before it is used.
"""

import json
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from rtcwm.curate.cached import REFERENCE_KINDS, TENSORS, Cached, grid, named, references
from rtcwm.errors import UserError
from rtcwm.model.layout import PATCH_FEATURES, PIXELS_PER_LATENT, rows_per_latent
from rtcwm.strict_json import is_whole

INDEX = "index.json"
LEAST = 2 * PIXELS_PER_LATENT  # pixels of a side: one patch


Read = Callable[[], Cached]


def open_cache(source: Path) -> tuple[str, Iterator[tuple[str, Read]]]:
    """The kind of a cache, and of every sample its name and a function that reads it (and raises `UserError`).

    Args:
        source: a folder of .pt files, of .parquet files or a .precomputed folder (or the one that holds it); or one
            file.

    Raises:
        UserError: nothing there, nothing known, or several kinds in one folder.
    """
    if source.is_file():
        kinds = {".pt": "pt", ".parquet": "parquet"}
        if source.suffix not in kinds:
            raise UserError(f"{source} is no cache that is known: expected .pt, .parquet or a .precomputed folder")
        files = {kinds[source.suffix]: [source]}
    elif source.is_dir():
        precomputed = [folder for folder in (source, source / ".precomputed") if (folder / INDEX).is_file()]
        found = {
            "pt": sorted(source.glob("*.pt")),
            "parquet": sorted(source.rglob("*.parquet")),
            "precomputed": precomputed[:1],
        }
        files = {kind: held for kind, held in found.items() if held}
    else:
        raise UserError(f"there is no cache at {source}")
    if len(files) != 1:
        held = ", ".join(f"{len(held)} of {kind}" for kind, held in files.items()) or "none of them"
        raise UserError(f"{source}: expected .pt files, .parquet files or a .precomputed index.json, found {held}")
    ((kind, held),) = files.items()
    readers = {"pt": _pt_samples, "parquet": _parquet_samples, "precomputed": _precomputed_samples}
    return kind, readers[kind](held)


def _pt_samples(files: Sequence[Path]) -> Iterator[tuple[str, Read]]:
    for file in files:
        yield file.stem, lambda file=file: read_pt(file)


def read_pt(file: Path) -> Cached:
    """A sample of one `.pt` file; see `open_cache`."""
    try:
        held = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except pickle.UnpicklingError as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(
            f"{file} holds more than tensors and plain values and would run code as it is loaded: it is refused "
            f"({first})"
        ) from error
    except Exception as error:  # what is no pickle at all fails wherever its bytes lead to
        raise UserError(f"{file} is truncated or not a .pt file ({error}): copy it again") from error
    if not isinstance(held, dict):
        raise UserError(f"{file} holds a {type(held).__name__}, expected a dictionary with {', '.join(TENSORS)}")
    info = held.get("info")
    return named(file.stem, str(file), held, info if isinstance(info, dict) else {})


def _parquet_samples(files: Sequence[Path]) -> Iterator[tuple[str, Read]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise UserError(f"parquet caches need pyarrow ({error}): pip install 'rtcwm[import]'") from error

    def read(file: Path, name: str, row: int, group: int, within: int) -> Cached:
        try:
            (held,) = parquet.ParquetFile(file).read_row_group(group).slice(within, 1).to_pylist()
        except (OSError, ArrowException) as error:
            raise UserError(f"{file} row {row} cannot be read ({error}): copy it again") from error
        return read_row(name, f"{file} row {row}", held)

    for file in files:
        row = 0
        try:
            opened = parquet.ParquetFile(file)
            has_ids = "id" in opened.schema_arrow.names
            groups = []
            for group in range(opened.metadata.num_row_groups):
                rows = opened.metadata.row_group(group).num_rows
                ids = (
                    opened.read_row_group(group, columns=["id"]).column("id").to_pylist() if has_ids else [None] * rows
                )
                groups.append(ids)
        except (OSError, ArrowException) as error:
            yield file.stem, _failing(f"{file} is truncated or not a parquet file ({error}): copy it again")
            continue
        for group, ids in enumerate(groups):
            for within, given in enumerate(ids):
                name = str(given or f"{file.stem}_{row:06d}")
                yield name, lambda f=file, n=name, r=row, g=group, w=within: read(f, n, r, g, w)
                row += 1


def _failing(message: str) -> Read:
    def fail() -> Cached:
        raise UserError(message)

    return fail


def read_row(name: str, source: str, row: Mapping[str, object]) -> Cached:
    """A sample of one parquet row; see `open_cache`."""
    names = [key.removesuffix("_bytes") for key in row if key.endswith("_bytes") and row[key]]
    held = {key: _row_tensor(source, key, row) for key in names}
    if "reference_video_latent_rows" in held and "proxy_latent" not in held:
        kinds = [str(kind) for kind in row.get("reference_media_types") or []]
        sizes = [
            row.get(f"reference_{part}") or [] for part in ("num_latent_frames", "latent_heights", "latent_widths")
        ]
        try:
            geometry = [(kind, *map(int, size)) for kind, *size in zip(kinds, *sizes, strict=True)]
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{source}: the lists that describe its references do not fit each other ({error})"
            ) from error
        picture, proxy = references(source, held["reference_video_latent_rows"], geometry)
        held |= {"proxy_latent": proxy} | ({"anchor_latent": picture} if picture is not None else {})
    if "text_token_tags" in held and held["text_token_tags"].is_floating_point():
        held["text_token_tags"] = held["text_token_tags"].round().long()
    info = {key: row[key] for key in ("num_frames", "generator", "case", "cwm_system") if row.get(key) is not None}
    info["prompt"] = row.get("caption") or row.get("prompt") or ""
    return named(name, source, held, info)


def _row_tensor(source: str, key: str, row: Mapping[str, object]) -> Tensor:
    """One tensor of a row's `_bytes`, `_shape` and `_dtype` (fp32 where the row does not say)."""
    data, shape = row[f"{key}_bytes"], row.get(f"{key}_shape")
    told = str(row.get(f"{key}_dtype") or "float32").removeprefix("torch.")
    dtypes = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2", "int64": "<i8", "int32": "<i4", "uint8": "u1"}
    if told not in dtypes:
        raise UserError(f"{source}: {key} is stored as {told}, expected one of {', '.join(dtypes)}")
    if not isinstance(shape, list) or not all(isinstance(size, int) and size >= 0 for size in shape):
        raise UserError(f"{source}: {key}_shape is {shape!r}, expected a list of sizes")
    count, width = int(np.prod(shape, dtype=np.int64)), np.dtype(dtypes[told]).itemsize
    if len(data) != count * width:
        raise UserError(f"{source}: {key} has {len(data)} bytes, its shape {shape} in {told} needs {count * width}")
    found = torch.from_numpy(np.frombuffer(data, dtype=dtypes[told]).reshape(shape).copy())
    return found.view(torch.bfloat16) if told == "bfloat16" else found


def _precomputed_samples(folders: Sequence[Path]) -> Iterator[tuple[str, Read]]:
    index = folders[0] / INDEX
    try:
        samples = json.loads(index.read_text())["samples"]
        names = [str(sample["id"]) for sample in samples]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f'{index} is not an index of samples ({error!r}): expected {{"samples": [{{"id": ...}}]}}'
        ) from error
    for name, sample in zip(names, samples, strict=True):
        yield name, lambda name=name, sample=sample: read_precomputed(folders[0], name, sample)


def read_precomputed(root: Path, name: str, sample: Mapping[str, object]) -> Cached:
    """A sample of a `.precomputed` folder; see `open_cache`."""
    source = f"{root / INDEX} {name}"
    if Path(name).name != name or name in ("", ".", ".."):
        raise UserError(f"{source}: the id is {name!r}, expected a file name")
    sizes = [sample.get(key) for key in ("width", "height", "num_frames")]
    if not all(is_whole(size) and size >= least for size, least in zip(sizes, (LEAST, LEAST, 1), strict=True)):
        raise UserError(
            f"{source}: width, height and num_frames are {sizes}, expected whole numbers, of pixels from {LEAST} on"
        )
    width, height = (size // PIXELS_PER_LATENT for size in sizes[:2])
    rows = _rows(root / "latents" / f"{name}.safetensors", "latents")
    latents = len(rows) // rows_per_latent(height, width)
    video = grid(source, rows, latents, height, width)
    texts = _tensors(root / "conditions" / f"{name}.safetensors")
    if not {"prompt_embeds", "text_token_tags"} <= set(texts):
        raise UserError(
            f"{root}/conditions/{name}.safetensors holds {sorted(texts)}, expected prompt_embeds, text_token_tags"
        )
    file = root / "reference_latents" / f"{name}.safetensors"
    if not file.is_file():
        raise UserError(f"{source} has no reference video ({file.name} in reference_latents): a stream follows a proxy")
    stored = _tensors(file)
    geometry = stored.get("geometry")
    if geometry is None or geometry.ndim != 2 or geometry.shape[1] != 5 or "latents" not in stored:
        raise UserError(f"{file} holds {sorted(stored)}, expected latents and geometry [references, 5]")
    if geometry.is_floating_point() or geometry.is_complex() or (geometry[:, 1:4] < 1).any():
        raise UserError(f"{file}: geometry is {geometry.tolist()}, expected whole numbers, of sizes from 1 on")
    kinds = [
        (REFERENCE_KINDS[kind] if 0 <= kind < len(REFERENCE_KINDS) else str(kind), *size)
        for kind, *size, _ in geometry.tolist()
    ]
    picture, proxy = references(str(file), stored["latents"], kinds)
    held = dict(zip(TENSORS, (video, proxy, picture, texts["prompt_embeds"], texts["text_token_tags"]), strict=True))
    return named(name, source, held, {"num_frames": sizes[2], "prompt": sample.get("caption") or ""})


def _rows(file: Path, name: str) -> Tensor:
    tensors = _tensors(file)
    if name not in tensors or tensors[name].ndim != 2:
        raise UserError(f"{file} holds {sorted(tensors)}, expected {name} [rows, {PATCH_FEATURES}]")
    return tensors[name]


def _tensors(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except FileNotFoundError as error:
        raise UserError(
            f"{file} is missing, though the index lists its sample: run the cache's own preparation"
        ) from error
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} is truncated or not a safetensors file ({error}): copy it again") from error
