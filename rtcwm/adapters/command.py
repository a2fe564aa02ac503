"""`rtcwm export` and `rtcwm adapter`: their flags. The work is in modules that are imported when a command runs."""

from pathlib import Path
from typing import Literal

from rtcwm.errors import UserError

Layout = Literal["musubi", "comfyui", "diffusers", "peft"]


def main_export(file: Path, to: Layout, out: Path, base: str | None = None) -> None:
    """Write an adapter in another program's layout, bit for bit.

    Args:
        file: adapter in the layout of musubi, ComfyUI, diffusers or PEFT (a folder); may stand first, without --file.
        to: layout to write. musubi is rtcwm's own.
        out: file to write (.safetensors); a folder for peft.
        base: what the adapter is for: embedded, a diffusers folder, or a config.json. Only files whose qkv rows stand
            head by head need it (the original names with PEFT's .default.), unless they have the released H3's sizes.
    """
    from rtcwm.adapters.export import export, report

    report(out, to, export(file, to, out, base))


def main_fuse(file: Path, out: Path, to: Layout = "musubi", base: str | None = None) -> None:
    """Write the same adapter at one rank that holds it exactly: q, k and v that were trained apart are stacked.

    Args:
        file: adapter whose q, k and v have down projections of their own, or whose layers have different ranks; may
            stand first, without --file.
        out: file to write (.safetensors); a folder for peft.
        to: layout to write.
        base: what the adapter is for: embedded, a diffusers folder, or a config.json. Only files whose qkv rows stand
            head by head need it (the original names with PEFT's .default.), unless they have the released H3's sizes.
    """
    from rtcwm.adapters.export import fuse, report

    report(out, to, fuse(file, to, out, base))


def main_show(file: Path) -> None:
    """Say what an adapter is: layout, rank, alpha, norms by layer, non-finite values, the base and window it wants.

    Args:
        file: adapter in the layout of musubi, ComfyUI, diffusers or PEFT (a folder); may stand first, without --file.
    """
    from rtcwm.adapters.inspect import describe

    for line in describe(file):
        print(line)


def main_diff(first: Path, second: Path, limit: int = 20, base: str | None = None) -> int:
    """Compare two adapters, whatever their layouts; exit code 1 when they differ.

    Args:
        first: an adapter; both may stand first, without --first and --second.
        second: the other one.
        limit: sites to print, those that differ most.
        base: what both are for: embedded, a diffusers folder, or a config.json. Only files whose qkv rows stand
            head by head need it (the original names with PEFT's .default.), unless they have the released H3's sizes.
    """
    if limit < 0:
        raise UserError(f"--limit {limit}: expected 0 or more sites")
    from rtcwm.adapters.inspect import print_differences

    return int(print_differences(first, second, limit, base))
