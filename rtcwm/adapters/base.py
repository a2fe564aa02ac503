"""What an adapter's file cannot tell of itself, from the base that `--base` names."""

from rtcwm.model.adapter_reader import AdapterFile
from rtcwm.model.loading import open_base


def head_width(base: str | None, *files: AdapterFile) -> int | None:
    """Width of an attention head, for files whose qkv rows stand head by head.

    Args:
        base: as `open_base` takes it; None where none is named.
        files: adapters that have to fit the base.

    Returns:
        None where no base is named: `AdapterFile.pair` then knows the release's alone.

    Raises:
        UserError: no such base, or a file that does not fit it.
    """
    if base is None:
        return None
    config = open_base(base).config
    for file in files:
        file.sizes(config)
    return config["attention_head_dim"]
