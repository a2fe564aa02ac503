"""A disk that is full, as far as this process can make one."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """No file can grow beyond `limit` bytes here."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
