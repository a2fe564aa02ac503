"""`rtcwm clips`: its two commands and their flags. The work is in modules that are imported when a command runs."""

import sys
from pathlib import Path

from rtcwm.curate.options import EPISODE, Limits
from rtcwm.errors import UserError


def main_check(
    folder: Path,
    flag: bool = False,
    dark: float = Limits.dark,
    static: float = Limits.static,
    cut: float = Limits.cut,
    empty_proxy: float = Limits.empty_proxy,
    rms_low: float = Limits.rms_low,
    rms_high: float = Limits.rms_high,
    mean_high: float = Limits.mean_high,
) -> int:
    """Check clips, one line a fault; exit code 0; 1 with faults or without a span to train on; 2 for wrong usage.

    Args:
        folder: folder that holds one folder a clip; may stand first, without --folder.
        flag: write the chunks that are dark, static, cut, without proxies or not numbers into every clip.json, with the
            reason; training leaves them out. What others flagged stays, what this command flagged is measured anew.
        dark: flag a chunk whose latents differ less than this from place to place.
        static: flag a chunk whose latents differ less than this in time, over what they differ from place to place.
        cut: flag a chunk with neighbouring latents whose cosine is below this.
        empty_proxy: flag a chunk whose proxy's latents differ less than this from place to place.
        rms_low: a clip whose latents' root mean square is below this is a fault.
        rms_high: a clip whose video latents' root mean square is above this is a fault; of proxies, above twice this.
        mean_high: a clip with a channel of the video whose mean is further from 0 than this is a fault.
    """
    from rtcwm.curate.check import check, summary

    found = check(folder, Limits(dark, static, cut, empty_proxy, rms_low, rms_high, mean_high), flag)
    for fault in found.faults:
        print(fault)
    print(summary(found))
    return int(bool(found.faults) or not found.usable)


def main_import(source: Path, out: Path, codec: str = "imported:unknown", episode: str = EPISODE) -> int:
    """Make clips of another trainer's latent cache; exit code 0, 1 when samples were refused, 2 for wrong usage.

    Args:
        source: folder of .pt files, of parquet files (needs the extra 'import') or a .precomputed folder; or one file;
            may stand first, without --source.
        out: folder to write, one folder a clip; the same command finishes what a stopped one left.
        codec: NAME:HASH of the VAE that made the cache, as clip.json of clips of yours has them; clips of another codec
            are never mixed, so leave the default if you do not know.
        episode: pattern over a clip's whole name whose first group is its episode.
    """
    name, colon, digest = codec.partition(":")
    if not (name and colon and digest):
        raise UserError(f"--codec {codec}: expected NAME:HASH, as clip.json of other clips of that VAE has them")
    from rtcwm.curate.imports import import_cache, report

    identity = {"name": name, "hash": digest}
    found = import_cache(source, out, identity, episode)
    for fault in found.refused:
        print(fault, file=sys.stderr)
    print("\n".join(report(found, identity)))
    return int(bool(found.refused))
