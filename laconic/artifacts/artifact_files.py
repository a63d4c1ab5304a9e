"""The files in an artifact's folder: plain files, all of them listed, of the size and the digest that were written.

No link is followed, and nothing but a plain file is opened: a pipe would block, and a link could name any file that the
server may read. The folder itself may be a link.
"""

import hashlib
import os
import stat
from collections.abc import Collection
from io import BufferedReader
from pathlib import Path
from typing import Any

from laconic.errors import CorruptArtifact
from laconic.files import MAX_BYTES
from laconic.hashing import FileDigest, parse_sealed
from laconic.runtimes.onnx_file import find_external_files
from laconic.tasks.assets import TOKENIZER
from laconic.units import format_bytes

FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
"""How a file is opened that was plain a moment before: a link in its place is not followed, a pipe not waited for."""
KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe (FIFO)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
SUFFIXES = frozenset({".json", ".onnx", ".data", ".safetensors", ".html"})
"""Of the names of all files that are read."""
TOKENIZER_BYTES = 64 * 2**20
"""The most bytes of a tokenizer.json; Gemma's has 35 MB."""
REPORT_BYTES = 64 * 2**20
"""The most bytes of a report."""
MAX_VALUES = 100_000
"""The most values of a manifest, or of measurements: of a million, each of a wrong kind, pydantic takes ten seconds to
list the faults. The measurements of a model have eleven for each product."""
AGAIN = "Copy the artifact again, or compress the model again"


def open_plain(path: Path) -> BufferedReader:
    """Open a plain file to read. Raises CorruptArtifact for one that is missing, unreadable or of another kind."""
    try:
        kind = stat.S_IFMT(path.lstat().st_mode)
        if kind == stat.S_IFREG:
            return os.fdopen(os.open(path, FLAGS), "rb")
    except FileNotFoundError:
        raise CorruptArtifact(f"{path} is missing. {AGAIN}") from None
    except OSError as error:
        raise CorruptArtifact(f"{path} cannot be read: {error.strerror}. {AGAIN}") from None
    raise CorruptArtifact(
        f"{path} is {KINDS.get(kind, 'of an unknown kind')}; expected a plain file, as all files of an artifact are. "
        f"Copy the artifact again, with the content of what is linked (cp -RL)"
    )


def read_plain(path: Path, most: int = MAX_BYTES) -> bytes:
    """Read a plain file of at most so many bytes. Raises CorruptArtifact."""
    with open_plain(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise CorruptArtifact(f"{path} has more than {format_bytes(most)}, the most that is read of it. {AGAIN}")
    return content


def read_sealed(path: Path) -> dict[str, Any]:
    """Read the content of a sealed file. Raises CorruptArtifact."""
    text = read_plain(path)
    if text.count(b",") > MAX_VALUES:
        raise CorruptArtifact(f"{path} holds more than {MAX_VALUES:,} values. {AGAIN}")
    return parse_sealed(text, path)


def read_report(path: Path, sha256: str) -> bytes:
    """Read a report. Raises CorruptArtifact unless it has this digest."""
    content = read_plain(path, REPORT_BYTES)
    if hashlib.sha256(content).hexdigest() != sha256:
        raise CorruptArtifact(f"{path} differs from the report that was written. {AGAIN}")
    return content


def check_digest(path: Path, expected: FileDigest) -> None:
    """Raise CorruptArtifact unless a file has the expected size and digest. One of another size is not read."""
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size != expected.size:
            raise CorruptArtifact(f"{path} has {size:,} bytes; expected {expected.size:,}, as were written. {AGAIN}")
        if (most := find_bound(path.name)) is not None and size > most:
            raise CorruptArtifact(f"{path} has {size:,} bytes; expected {most:,} at most. {AGAIN}")
        if (digest := hashlib.file_digest(file, "sha256").hexdigest()) != expected.sha256:
            raise CorruptArtifact(
                f"{path} differs from the file that was written: its sha256 is {digest[:12]}..., expected "
                f"{expected.sha256[:12]}.... {AGAIN}"
            )


def find_bound(name: str) -> int | None:
    """Return the most bytes of a file that is parsed as a whole; None for one that engines map."""
    if name == TOKENIZER:
        return TOKENIZER_BYTES
    return MAX_BYTES if name.endswith(".json") else None


def check_unlisted(folder: Path, listed: Collection[str]) -> None:
    """Raise CorruptArtifact for a file that is not listed, and whose name is like those that are read. Others, as a
    README.md, are ignored and never opened, and so are hidden files, which are temporary."""
    for path in sorted(folder.iterdir()):
        if path.name not in listed and not path.name.startswith(".") and path.suffix.lower() in SUFFIXES:
            raise CorruptArtifact(
                f"{folder} holds {path.name!r}, which is no file of the artifact: neither its manifest nor its "
                f"measurements list it. Move it elsewhere"
            )


def check_external_data(path: Path, listed: Collection[str], *, is_graph: bool) -> None:
    """Raise CorruptArtifact unless all external data of a graph are in files that are listed. is_graph: whether it must
    be an ONNX file."""
    with open_plain(path) as file:
        try:
            locations = find_external_files(file)
        except ValueError as error:
            if not is_graph:
                return
            raise CorruptArtifact(f"{path} cannot be read: {error}. {AGAIN}") from None
    for location in locations:
        if location not in listed:
            raise CorruptArtifact(f"{path} has weights in {location!r}, which is no file of the artifact. {AGAIN}")
