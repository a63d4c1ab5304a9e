"""A folder to work in beside what is to be written, on the same disk, so that the result is renamed and not copied."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from glob import escape
from pathlib import Path

from laconic.errors import UsageError
from laconic.lock import locked

MARK, LOCK = "unfinished-", "lock"
"""What is in the name of each, so that somebody who finds one knows what it is; and the file in it that is locked while
its run lasts."""


@contextmanager
def scratch(destination: Path) -> Iterator[Path]:
    """A folder beside the destination that is gone afterwards, whatever happens; if the process is killed, the next run
    to the same destination removes it. Raises UsageError where it cannot be made."""
    prefix = f".{destination.name}.{MARK}"
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        for left in destination.parent.glob(f"{escape(prefix)}*/"):
            with suppress(OSError), locked(left / LOCK, wait=False):
                shutil.rmtree(left, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=destination.parent))
    except OSError as error:
        raise UsageError(f"cannot write to {destination.parent}: {error.strerror}. Choose another --output") from None
    try:
        with ExitStack() as stack:
            with suppress(OSError):  # a disk that knows no locks gives none to who would remove the folder either
                stack.enter_context(locked(folder / LOCK, wait=False))
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
