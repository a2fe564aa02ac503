"""A lock file keeps a second process out of a folder that one works in."""

import fcntl
import os
from pathlib import Path
from typing import TextIO


class Locked(Exception):
    """Another has the lock: the number of its process, as text, or "" where it is not told."""

    @property
    def holder(self) -> str:
        return str(self)


def lock(path: Path) -> TextIO:
    """Locks a file, made where it is not there, while the returned one is open: the system lets go of it when the
    process ends, however it ends. The process' number is written to it.

    Raises:
        Locked: another one has it, which may be this process itself. OSError: the file cannot be made.
    """
    file = path.open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        holder = file.read().strip()
        file.close()
        raise Locked(holder) from error
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file
