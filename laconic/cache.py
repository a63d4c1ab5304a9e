"""The result cache, keyed by everything a result depends on, so that interrupted runs resume; and scratch folders."""

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
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from laconic.arrays import Arrays
from laconic.errors import UsageError
from laconic.files import TAKEN, restore_folder

VARIABLE = "LACONIC_CACHE"
ORDER = "order"
"""In a file of arrays, what their names are kept under."""


class Cache:
    """A folder of results. Entries are written under a temporary name and renamed, so readers never see a partial
    one."""

    def __init__(self, folder: Path | None = None) -> None:
        """folder: default $LACONIC_CACHE, or else the user's cache folder."""
        self.folder = folder or Path(os.environ.get(VARIABLE) or platformdirs.user_cache_path("laconic"))

    def json(self, key: str, compute: Callable[[], Any], *, again: bool = False) -> Any:
        """Return the JSON-ready value under `key`, computed and stored if it is absent, or if it is wanted again."""
        path = self.folder / f"{key}.json"
        if not again:
            with suppress(OSError, ValueError):
                return json.loads(path.read_bytes())
        value = compute()
        text = json.dumps(value, sort_keys=True)
        self._write(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
        return json.loads(text)

    def arrays(self, key: str, compute: Callable[[], Arrays]) -> Arrays:
        """Return the arrays under `key`, computed and stored if they are absent, in the order that they were given."""
        path = self.folder / f"{key}.safetensors"
        try:
            with safe_open(path, "np") as file:
                names = (file.metadata() or {}).get(ORDER)
                return {name: file.get_tensor(name) for name in (json.loads(names) if names else file.keys())}
        except (OSError, SafetensorError):
            value = compute()
        # The file sorts its tensors, and the first output of a model is not always the first by name.
        self._write(path, lambda temporary: save_file(value, temporary, metadata={ORDER: json.dumps(list(value))}))
        return value

    def directory(self, key: str, fill: Callable[[Path], None]) -> Path:
        """Return the folder under `key`, filled if it is absent."""
        path = self.folder / key
        if not path.is_dir():
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary = Path(tempfile.mkdtemp(prefix=f"{key}.", dir=self.folder))
            try:
                fill(temporary)
                temporary.rename(path)
            except OSError as error:
                if error.errno not in TAKEN:  # another process has filled it at the same time
                    raise
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        return path

    @contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Hold an inter-process lock on `key` while the body runs: a second process waits and finds the first one's
        result.

        Removes folders that a killed process left half filled: with the lock held, no other process is filling them.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self.folder / f"{key}.lock"):
            for partial in self.folder.glob(f"{key}.*/"):
                shutil.rmtree(partial, ignore_errors=True)
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
"""The word in the name of each scratch folder, so that anyone who finds one knows what it is; and the file in it that
is locked while its run lasts."""


@contextmanager
def open_scratch_folder(destination: Path) -> Iterator[Path]:
    """Make a folder beside the destination, on the same disk, that is removed when the body ends. If the process is
    killed, the next run to the same destination removes it, and puts back a folder that was about to be replaced.
    Raises UsageError if the folder cannot be created."""
    prefix = f".{destination.name}.{SCRATCH}"
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        restore_folder(destination)
        for stale in destination.parent.glob(f"{escape(prefix)}*/"):
            with suppress(OSError, NotImplementedError), FileLock(stale / LOCK, timeout=0):
                shutil.rmtree(stale, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=destination.parent))
    except OSError as error:
        raise UsageError(f"cannot write to {destination.parent}: {error.strerror}. Choose another --output") from None
    try:
        with ExitStack() as stack:
            # On a filesystem without locks no other run can take the lock that removing the folder requires.
            with suppress(OSError, NotImplementedError):
                stack.enter_context(FileLock(folder / LOCK, timeout=0))
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
