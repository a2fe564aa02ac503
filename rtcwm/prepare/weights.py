"""Folders of weights: what may be loaded, and what names them in clips.

Only safetensors are loaded. A pickle runs code when it is read, so a folder that offers nothing else is refused, and so
is a pickle under a safetensors name, before any library opens it.
"""

import hashlib
import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from rtcwm.errors import UserError
from rtcwm.model.tensor_files import weight_map
from rtcwm.strict_json import read_object

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
PASSING = ("_name_or_path", "_diffusers_version", "transformers_version")
"""Keys of a config that change without the model changing."""
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


def component(model: Path, name: str, given: Path | None) -> Path:
    """The folder of a part of a diffusers-format pipeline: `<model>/<name>`, or the one given instead.

    Raises:
        UserError: it is not there.
    """
    folder = given or model / name
    if not folder.is_dir():
        raise UserError(
            f"{folder} is not a folder: --model {model} has to be a diffusers-format MiniMax-H3 folder with vae/, "
            "text_encoder/, tokenizer/ and processor/; --vae and --text-encoder may name the first two elsewhere"
        )
    return folder


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a component, checked by their headers.

    Raises:
        UserError: no config, pickles, truncated files, or shards missing from the index.
    """
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} has no config.json: it is not a folder that `save_pretrained` wrote")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLES)
        found = (
            f"holds {', '.join(pickles)}, pickles that run code when they are read" if pickles else "holds no weights"
        )
        raise UserError(f"{folder} {found}: save the model as .safetensors (`save_pretrained` with safe serialization)")
    for index in folder.glob("*.safetensors.index.json"):
        listed = set(weight_map(index).values())
        if lacking := sorted(listed - {file.name for file in files}):
            raise UserError(f"{folder} lacks {', '.join(lacking)}, which {index.name} lists: copy the folder again")
    for file in files:
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as fault:
            raise UserError(
                f"{file} is not a safetensors file ({fault}): it is truncated or a pickle; nothing was loaded"
            ) from fault
    return files


def fingerprint(folder: Path, *more: bytes) -> str:
    """16 hex digits that name the weights of a component: its config, and of every tensor its name, type, shape and
    first and last row. Cheap for 60 GB; it does not tell a change that spares those rows.

    Args:
        folder: the component.
        more: what else belongs to the identity.
    """
    config = read_object(folder / "config.json", "the config of a model")
    digest = hashlib.sha256(json.dumps({k: v for k, v in config.items() if k not in PASSING}, sort_keys=True).encode())
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as weights:
            for name in sorted(weights.keys()):
                part = weights.get_slice(name)
                digest.update(f"{name} {part.get_dtype()} {part.get_shape()}".encode())
                rows = [part[:1], part[-1:]] if part.get_shape() else [weights.get_tensor(name)]
                for row in rows:
                    digest.update(row.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    for part in more:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:16]


def codec_identity(folder: Path) -> dict[str, str]:
    """{name, hash} of a VAE, as clips carry it."""
    return {"name": "minimax-h3-vae", "hash": fingerprint(folder)}


def text_identity(folder: Path, tokenizer: Path, processor: Path, layer: int) -> dict[str, str]:
    """{name, hash} of a text encoder with its tokenizer and picture processor, as clips carry it."""
    files = sorted(file for file in tokenizer.iterdir() if file.suffix in (".json", ".txt", ".jinja"))
    files += [processor / name for name in PROCESSOR_FILES if (processor / name).is_file()]
    return {"name": f"qwen3-vl[{layer}]", "hash": fingerprint(folder, *(file.read_bytes() for file in files))}
