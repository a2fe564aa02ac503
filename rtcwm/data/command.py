"""`rtcwm world`: its flags. The work is in `make.py`, imported when the command runs."""

from pathlib import Path

from rtcwm.errors import UserError


def main_world(
    out: Path,
    clips: int = 64,
    chunks: int = 16,
    seed: int = 0,
    height: int = 128,
    width: int = 192,
    episodes: int | None = None,
    start_every: int = 2,
) -> None:
    """Write clips of the embedded world.

    Args:
        out: folder to write; the same command finishes what a stopped one left.
        clips: number of clips.
        chunks: chunks a clip (17 frames, 0.708 s each).
        seed: names the world.
        height: of the video in pixels, a multiple of 32.
        width: of the video in pixels, a multiple of 32.
        episodes: scenes that the clips share; a quarter of the clips when absent.
        start_every: chunks from one start frame to the next.
    """
    if start_every < 1:
        raise UserError(f"--start_every {start_every}: expected 1 or more chunks")
    from rtcwm.data.make import write_world

    made = write_world(out, clips, chunks, seed, height, width, range(0, chunks, start_every), episodes)
    size = sum(file.stat().st_size for clip in made for file in clip.path.iterdir())
    print(f"{out}: {len(made)} clips, {size / 2**20:.1f} MiB, codec {made[0].codec['name']} {made[0].codec['hash']}")
