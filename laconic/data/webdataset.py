"""Samples in tar archives as WebDataset writes them.

The files of a sample follow one another and share a name up to the first dot, as `000/17.jpg`, `000/17.cls` and
`000/17.json`. An archive is indexed once, and its samples are read by seeking.
"""

import json
import tarfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from laconic.data.formats import SUFFIXES
from laconic.data.row_index import describe_version, keep
from laconic.data.stored_rows import KIND, FileVersion, Row, StoredRows
from laconic.errors import DataError
from laconic.hashing import environment_digest, hash_of
from laconic.tasks.row_parsing import LABEL, SampleKind
from laconic.tasks.task import Task

KEY = "__key__"
"""The column of a sample's name."""
COLUMNS = {"cls": LABEL, "txt": "text"}
"""By the extension of a file, the column that it is unless another one is asked for."""
OBJECT = "json"
"""The extension of a file whose keys are columns."""
LEAST = 2**20
"""Bytes of an archive from which on its index is kept in the cache."""
END = b"\0" * tarfile.BLOCKSIZE
"""The block behind the last file of an archive."""


class Member(NamedTuple):
    """A file in an archive: its extension, where its content begins, and its bytes."""

    extension: str
    offset: int
    size: int


class TarRows(StoredRows):
    """The samples of a tar archive. Only files whose columns the task or `also` names are read: nothing is unpickled.

    Raises DataError for an archive that does not read, is cut short, or is compressed as a whole.
    """

    def __init__(self, path: Path, task: Task, also: Collection[str] = ()) -> None:
        try:
            self.file = FileVersion.read(path)
            self._samples = keep_index(self.file)
        except (tarfile.TarError, OSError, UnicodeDecodeError, ValueError) as error:
            raise DataError(
                f"{path.name} does not read as a tar archive: {error}. Give one that is whole, and not compressed"
            ) from None
        if not self._samples:
            raise DataError(f"{path.name} holds no samples. Leave it out")
        kinds: list[SampleKind] = [kind for kind in ("images", "audio") if kind in task.accepts]
        files = {suffix.removeprefix("."): task.field for kind in kinds for suffix in SUFFIXES[kind]}
        # A column that is asked for by its extension keeps that name.
        self._names = {name: column for name, column in (COLUMNS | files).items() if name not in also}
        self._known = {task.field, *task.columns, KIND, *also}

    def __len__(self) -> int:
        return len(self._samples)

    def __iter__(self) -> Iterator[Row]:
        for number in range(1, len(self._samples) + 1):
            yield Row(number, self.read(number))

    def read(self, number: int) -> Mapping[str, Any]:
        """Read the values of a sample; files that are not read have the value None."""
        self.file.check()
        key, members = self._samples[number - 1]
        values: dict[str, Any] = {KEY: key}
        with self.file.path.open("rb") as archive:
            for member in members:
                column = self._names.get(member.extension, member.extension)
                is_object = member.extension == OBJECT
                if not is_object and column not in self._known:
                    values.setdefault(column, None)
                    continue
                archive.seek(member.offset)
                try:
                    value = decode(member.extension, archive.read(member.size))
                except ValueError as error:
                    raise DataError(
                        f"{self.file.path.name}, row {number}: {key}.{member.extension} {error}. Fix or remove it"
                    ) from None
                values = value | values if is_object else values | {column: value}
        return values


def keep_index(file: FileVersion) -> list[tuple[str, tuple[Member, ...]]]:
    """Index an archive as `index_archive` does, or find its index in the cache where it is large and was indexed."""
    if file.size < LEAST:
        return index_archive(file.path)

    def decode(content: Any) -> list[tuple[str, tuple[Member, ...]]]:
        return [(key, tuple(Member(*member) for member in members)) for key, members in content]

    key = f"archive-{hash_of(describe_version(file), environment_digest())}"
    return keep(key, lambda: index_archive(file.path), list, decode)


def index_archive(path: Path) -> list[tuple[str, tuple[Member, ...]]]:
    """Index the samples of an archive: their names and their files. Reads headers alone.

    Raises TarError or ValueError for what is no whole archive, and for a sample with two files of one extension.
    """
    samples: list[tuple[str, list[Member]]] = []
    with tarfile.open(path, "r:") as archive:
        while (entry := archive.next()) is not None:
            archive.members.clear()  # type: ignore[attr-defined]  # else it keeps every header
            folder, slash, name = entry.name.rpartition("/")
            stem, _, extension = name.partition(".")
            if not entry.isreg() or entry.issparse() or not stem or not extension:
                continue
            key = folder + slash + stem
            if not samples or samples[-1][0] != key:
                samples.append((key, []))
            if any(member.extension == extension.lower() for member in samples[-1][1]):
                raise ValueError(f"sample {key!r} has two files of the extension {extension.lower()!r}")
            samples[-1][1].append(Member(extension.lower(), entry.offset_data, entry.size))
        end = archive.offset
    check_end(path, end)
    return [(key, tuple(members)) for key, members in samples]


def check_end(path: Path, end: int) -> None:
    """Raise ValueError unless an archive ends at a byte: tarfile stops without a word at a damaged header, and at the
    end of the first of several archives that were joined."""
    with path.open("rb") as file:
        file.seek(end)
        if file.read(len(END)) != END:
            raise ValueError(f"it is cut short or damaged at byte {end}")
        while block := file.read(tarfile.RECORDSIZE):
            if block.strip(b"\0"):
                raise ValueError(f"something follows its end at byte {end}, as where archives are joined")


def decode(extension: str, content: bytes) -> Any:
    """Decode a file by its extension: text, the number of a class, an object, or the bytes of an image or a recording.
    Raises ValueError."""
    suffix = "." + extension.rpartition(".")[2]
    if any(suffix in suffixes for suffixes in SUFFIXES.values()):
        return content
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError("is not text in UTF-8") from None
    if extension == OBJECT:
        return parse_object(text)
    if extension == "cls":
        name = text.strip()
        return int(name) if name.isdecimal() else name
    return text


def parse_object(text: str) -> dict[str, Any]:
    """Parse a JSON object. Raises ValueError for anything else."""
    try:
        values = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"is not JSON ({error})") from None
    if not isinstance(values, dict):
        raise ValueError(f"holds {type(values).__name__}, expected a JSON object")
    return values
