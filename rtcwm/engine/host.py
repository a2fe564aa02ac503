"""Memory of the host that this process may still take, and refusals of what it cannot hold.

A container or a job of a scheduler is limited by its control group, of which the machine's own count of free memory
knows nothing: what goes beyond is killed.
"""

from collections.abc import Iterator
from pathlib import Path

import psutil

from rtcwm.errors import UserError

GIB = 2**30
FILES = {  # by version of control groups: limit, use, and in memory.stat the cached files, which give way
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
    2: ("memory.max", "memory.current", ("inactive_file", "active_file")),
}


def free_bytes(process: Path = Path("/proc/self/cgroup"), mounts: Path = Path("/sys/fs/cgroup")) -> int:
    """What the machine has free, or less where a control group of this process, or one around it, leaves less."""
    return min([psutil.virtual_memory().available, *_left(process, mounts)])


def check_host_room(needed: int, what: str, advice: str) -> int:
    """Bytes that are free. Raises UserError where they cannot hold so many of something."""
    free = free_bytes()
    if needed and needed >= free:
        raise UserError(
            f"{what} takes {needed / GIB:.1f} GiB of host memory, and {free / GIB:.1f} GiB are free for this process: "
            f"{advice}"
        )
    return free


def _left(process: Path, mounts: Path) -> Iterator[int]:
    """What every limited control group around this process leaves it, in bytes."""
    for version, folder, top in _groups(process, mounts):
        limit, used, cache = FILES[version]
        while True:
            try:
                text, use = (folder / limit).read_text().strip(), int((folder / used).read_text())
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                if text != "max":
                    yield max(0, int(text) - use + sum(int(stat.get(name, 0)) for name in cache))
            except (OSError, ValueError):
                pass  # the root has no limit, and a container does not see the groups around it
            if folder == top:
                break
            folder = folder.parent


def _groups(process: Path, mounts: Path) -> Iterator[tuple[int, Path, Path]]:
    """Version, folder and topmost folder of the memory control groups that this process is in."""
    try:
        lines = process.read_text().splitlines()
    except OSError:
        return  # no Linux
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            version, top = 2, mounts
        elif "memory" in controllers.split(","):
            version, top = 1, mounts / "memory"
        else:
            continue
        folder = top / path.lstrip("/")
        yield version, folder if folder.is_dir() else top, top
