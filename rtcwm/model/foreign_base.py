"""A base that is not a diffusers folder: what it is, and how it becomes one.

The original names are those of the release's own folders (``Ref2VA/transformer``: shards, qkv rows head by head) and of
single files that ComfyUI loads (qkv rows stacked). diffusers converts both, and only it knows all of a model's layers,
so rtcwm converts nothing: it says what to call. Pickled weights are never opened.
"""

from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open

from rtcwm.model.tensor_files import weight_map

PICKLES = (".bin", ".pt", ".pth", ".ckpt")
SIGN = "blocks.0.attn.qkv_proj.weight"
"""A tensor that the original layout has in every form."""
PREFIXES = ("model.diffusion_model.", "diffusion_model.")
CONVERT_SHARDS = (
    "convert the release's shards with diffusers' scripts/convert_minimax_h3_to_diffusers.py (their qkv rows stand "
    "head by head), or take the release's own diffusers folder, transformer_ref"
)
CONVERT_FILE = (
    "convert it with diffusers: MiniMaxH3Transformer3DModel.from_single_file(FILE, config=FOLDER, "
    'qkv_layout="stacked", '
    "torch_dtype=torch.bfloat16).save_pretrained(OUT), FOLDER holding the config.json of transformer_ref, and name OUT "
    '("interleaved" for a file that was joined from the release\'s own shards)'
)


def explain(path: Path) -> str | None:
    """What to do about a file or folder that holds weights in another form; None where nothing is recognised."""
    if path.is_file():
        return _explain_file(path)
    for folder in (path, path / "Ref2VA" / "transformer", path / "transformer"):
        if told := _explain_folder(folder):
            return told
    return None


def explain_names(path: Path, names: Iterable[str]) -> str | None:
    """The same by the names of tensors: of a diffusers file whose content is the original's."""
    known = {name.removeprefix(prefix) for name in names for prefix in (*PREFIXES, "")}
    if "adaln_t_table" in known:
        return (
            f"{path} is a pruned model: its time embedder is a table, which diffusers' class has no place for; take "
            "the unpruned weights"
        )
    if SIGN in known:
        return f"{path} holds the original layout's tensors ({SIGN}): {CONVERT_FILE}"
    return None


def _explain_folder(folder: Path) -> str | None:
    if not folder.is_dir():
        return None
    index = folder / "model.safetensors.index.json"
    shards = sorted(folder.glob("model*.safetensors"))
    names: Iterable[str] = ()
    if index.is_file():
        names = weight_map(index)
    elif shards:
        names = _names(shards[0])
    if SIGN in set(names):
        return f"{folder} holds MiniMax-H3 in the original layout ({SIGN}): {CONVERT_SHARDS}"
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLES or ".bin.index" in file.name)
    if pickles:
        return (
            f"{folder} holds pickled weights ({pickles[0]}), which can run code as they are loaded: they are never "
            "read. Take the safetensors files of the same release"
        )
    files = sorted(folder.glob("*.safetensors"))
    return next(filter(None, (explain_names(file, _names(file)) for file in files)), None)


def _explain_file(path: Path) -> str | None:
    if path.suffix in PICKLES:
        return (
            f"{path} is a pickle, which can run code as it is loaded: it is never read. Take the safetensors file of "
            "the same release"
        )
    if path.suffix == ".gguf":
        return f"{path} is a GGUF file: rtcwm needs the unquantised weights in a diffusers folder"
    names = _names(path)
    if told := explain_names(path, names):
        return told
    if "transformer_blocks.0.attn.to_q.weight" in set(names):
        return (
            f"{path} holds diffusers' tensors: name its folder, with config.json beside it and the file called "
            "diffusion_pytorch_model.safetensors"
        )
    return None


def _names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError):
        return []
