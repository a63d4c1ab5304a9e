"""A lock that the system lets go of when the process that holds it ends, however it does."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock on a file, which is made. Raises OSError where the disk knows no locks, and, if it is not to wait,
    where another process holds it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
