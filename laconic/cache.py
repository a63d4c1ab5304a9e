"""Results by the key of what they were made from, so that an interrupted run resumes; and scratch folders."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import Any

import platformdirs
from filelock import FileLock
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from laconic.errors import UsageError
from laconic.tensor import Arrays

VARIABLE = "LACONIC_CACHE"


class Cache:
    """A folder of results. An entry is written to a temporary name and renamed, so half of one is never seen."""

    def __init__(self, folder: Path | None = None) -> None:
        """folder: by default $LACONIC_CACHE, else the user's cache folder."""
        self.folder = folder or Path(os.environ.get(VARIABLE) or platformdirs.user_cache_path("laconic"))

    def json(self, key: str, compute: Callable[[], Any]) -> Any:
        """The JSON-ready value under `key`, computed if it is not there."""
        path = self.folder / f"{key}.json"
        try:
            return json.loads(path.read_bytes())
        except (OSError, ValueError):
            value = compute()
        text = json.dumps(value, sort_keys=True)
        self._write(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
        return json.loads(text)

    def arrays(self, key: str, compute: Callable[[], Arrays]) -> Arrays:
        """The arrays under `key`, computed if they are not there."""
        path = self.folder / f"{key}.safetensors"
        try:
            return dict(load_file(path))
        except (OSError, SafetensorError):
            value = compute()
        self._write(path, lambda temporary: save_file(value, temporary))
        return value

    def directory(self, key: str, fill: Callable[[Path], None]) -> Path:
        """The folder under `key`, filled if it is not there."""
        path = self.folder / key
        if not path.is_dir():
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary = Path(tempfile.mkdtemp(prefix=f"{key}.", dir=self.folder))
            try:
                fill(temporary)
                temporary.rename(path)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
        return path

    @contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Run the body while no other process does under this key: who comes second finds what the first one made.

        A folder that a killed process left half filled is removed: nobody can be at work on it.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self.folder / f"{key}.lock"):
            for half in self.folder.glob(f"{key}.*/"):
                shutil.rmtree(half, ignore_errors=True)
            yield

    def _write(self, path: Path, write: Callable[[Path], Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.partial")
        try:
            write(temporary)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


SCRATCH, LOCK = "unfinished-", "lock"
"""What is in the name of each, so that somebody who finds one knows what it is; and the file in it that is locked while
its run lasts."""


@contextmanager
def open_scratch_folder(destination: Path) -> Iterator[Path]:
    """A folder beside the destination that is gone afterwards, whatever happens; if the process is killed, the next run
    to the same destination removes it. Raises UsageError where it cannot be made."""
    prefix = f".{destination.name}.{SCRATCH}"
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        for left in destination.parent.glob(f"{escape(prefix)}*/"):
            with suppress(OSError, NotImplementedError), FileLock(left / LOCK, timeout=0):
                shutil.rmtree(left, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=destination.parent))
    except OSError as error:
        raise UsageError(f"cannot write to {destination.parent}: {error.strerror}. Choose another --output") from None
    try:
        with ExitStack() as stack:
            with suppress(
                OSError, NotImplementedError
            ):  # a disk that knows no locks gives none to who would remove the folder either
                stack.enter_context(FileLock(folder / LOCK, timeout=0))
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
