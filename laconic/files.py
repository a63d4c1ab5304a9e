"""Files that are read within bounds: JSON of limited size and depth; and folders that replace others as a whole."""

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MAX_BYTES = 8 * 2**20
"""The most bytes of a JSON file. The densest JSON, `[[],[],...]`, takes 24 times its size once it is parsed."""

MAX_DEPTH = 64
"""The most levels of nested lists and mappings."""

OLD = "old-"
"""The word in the name of the folder that holds what is being replaced."""

ATTEMPTS = 100
"""How often a folder is put in place anew after another process was faster."""


TAKEN = (errno.ENOTEMPTY, errno.EEXIST)
"""The errors of renaming a folder to one that is there and holds something; file systems differ."""


def read_bounded(path: Path, most: int = MAX_BYTES) -> bytes:
    """Read a file of at most so many bytes. Raises OSError, or ValueError for a larger one."""
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    return content


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises OSError, or ValueError for anything but JSON of limited size and depth."""
    return parse_json(read_bounded(path))


def parse_json(text: bytes) -> Any:
    """Parse JSON. Raises ValueError for anything else, and for what is nested too deep."""
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep") from None
    check_depth(content)
    return content


def check_depth(content: Any) -> None:
    """Raise ValueError for lists and mappings that are nested too deeply to be handled by recursion."""
    level = [content]
    for _ in range(MAX_DEPTH):
        inner = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, (dict, list)))
        level = [value for values in inner for value in values if isinstance(value, (dict, list))]
        if not level:
            return
    raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")


def follow_links(path: Path) -> Path:
    """Return the absolute path that links lead to, so that it names the same file after a link has changed.

    A link through /proc/PID/root leads to files of another container, which have no other path here: KServe mounts the
    images of `oci://` so. Such a path stays as it is.
    """
    resolved = path.resolve()
    return resolved if resolved.exists() and resolved.samefile(path) else path.absolute()


def replace_file(path: Path, content: bytes | Iterable[bytes | memoryview]) -> None:
    """Write a file as a whole: under a temporary name in the same folder first, then renamed. content: its bytes, or
    parts of them in turn."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with temporary.open("wb") as file:
            file.writelines([content] if isinstance(content, bytes) else content)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def replace_folder(folder: Path, destination: Path) -> None:
    """Move a folder to its destination on the same disk, in place of the folder that is there.

    Of several processes that do so at the same instant, the last one's folder stays. Where a process is killed between
    the two renames, `restore_folder` puts the earlier folder back.
    """
    for path in (folder, *folder.iterdir()):  # a temporary folder is private to its owner; a server may be another user
        path.chmod(0o755 if path.is_dir() else 0o644)
    restore_folder(destination)
    for _ in range(ATTEMPTS):
        aside = Path(tempfile.mkdtemp(prefix=f".{destination.name}.{OLD}", dir=destination.parent))
        try:
            rename_if_present(destination, aside / destination.name)
            folder.rename(destination)
            break
        except OSError as error:
            if error.errno not in TAKEN:
                rename_if_present(aside / destination.name, destination)
                raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    else:
        raise FileExistsError(errno.EEXIST, "other processes keep writing to it", str(destination))
    for stale in list_aside(destination):
        shutil.rmtree(stale, ignore_errors=True)


def folder_size(folder: Path) -> int:
    """Sum the bytes of the files in a folder, without those of its folders."""
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())


def rename_if_present(folder: Path, to: Path) -> None:
    """Rename a folder, unless it is not there."""
    try:
        folder.rename(to)
    except FileNotFoundError:
        return


def restore_folder(destination: Path) -> None:
    """Put back the folder that a killed process was replacing, where the destination is missing."""
    if destination.exists():
        return
    for replaced in find_replaced(destination):
        try:
            replaced.rename(destination)
        except OSError:  # another process was faster
            return
        shutil.rmtree(replaced.parent, ignore_errors=True)
        return


def find_replaced(destination: Path) -> list[Path]:
    """Find the folders that were moved aside to be replaced, and were left there."""
    return [aside / destination.name for aside in list_aside(destination) if os.path.lexists(aside / destination.name)]


def list_aside(destination: Path) -> list[Path]:
    """List the folders that hold what was moved aside to be replaced. Looks at names alone: other entries beside the
    destination may be unreadable, as the mount of a server that is gone."""
    try:
        neighbours = sorted(destination.parent.iterdir())
    except OSError:
        return []
    return [path for path in neighbours if path.name.startswith(f".{destination.name}.{OLD}")]
