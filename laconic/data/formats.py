"""File formats of samples, read row by row. A new format is a function `(path, task, also)` and a line in the registry.

also: columns to read beside those that the task names. Text must be UTF-8. Errors name a row by the line that it starts
on, from 1; in formats without lines by its number.
"""

import csv as csv_module
import itertools
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from laconic.data.array_formats import npy_folder, refuse_unless
from laconic.data.stored_rows import Row
from laconic.errors import DataError
from laconic.tasks.row_parsing import LABEL, SampleKind
from laconic.tasks.task import Task

SUFFIXES: dict[SampleKind, tuple[str, ...]] = {
    "images": (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"),
    "audio": (".wav", ".flac", ".ogg", ".oga", ".mp3"),
}
"""Of the files in folders of samples, by what they hold: one that does not read is an error, and is not left out."""
MAGIC: dict[SampleKind, re.Pattern[bytes]] = {
    "images": re.compile(rb"\x89PNG\r\n|\xff\xd8\xff|RIFF....WEBP|BM....\0\0\0\0|GIF8|II\*\0|MM\0\*", re.DOTALL),
    "audio": re.compile(rb"RIFF....WAVE|fLaC|OggS|ID3|\xff[\xfb\xf3\xf2]", re.DOTALL),
}
"""How the contents of samples begin, whatever their names, such as photo.jfif or a hash."""


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Read the lines of a text file with their numbers, without a byte order mark. Raises DataError unless it is
    UTF-8."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path.name}, row {number}: byte {line[error.start]:#04x} is not UTF-8. Save the file as UTF-8"
                ) from None


def txt(path: Path, task: Task, also: Collection[str] = ()) -> Iterator[Row]:
    """Read one text per line; empty lines are left out."""
    refuse_unless(task, "texts", path)
    for number, line in lines(path):
        if line.strip():
            yield Row(number, {task.field: line.rstrip("\r\n")})


DELIMITERS = (",", ";", "\t", "|")
"""Between the columns of a .csv, the first that the first line holds: Excel writes semicolons in much of Europe."""
DECLARATION = re.compile(r'"?sep=(.)"?')
"""The first line by which Excel is told the delimiter."""
LONGEST_FIELD = 2**24
"""Characters of one field. The module's own limit, 131,072, is less than a long document."""


def find_delimiter(path: Path, task: Task) -> str:
    """Find what stands between the columns of a file: what its first line declares, or else the comma, unless that line
    has none and names the task's columns, or as many as the next line has, by another delimiter. Blank lines do not
    count.

    Raises DataError where that would make texts with their labels in them of lines with another number of columns.
    """
    rows = list(itertools.islice((line for _, line in lines(path) if line.strip()), 2))
    if rows and (declared := DECLARATION.fullmatch(rows[0].strip("\r\n"))):
        return declared[1]
    uneven = ""
    for delimiter in DELIMITERS:
        header, *others = (split_fields(row, delimiter) for row in rows or [""])
        known = {task.field, *task.columns} & {name.strip() for name in header}
        if len(header) > 1 and (delimiter == "," or known or [len(row) for row in others] == [len(header)]):
            return delimiter
        if len(header) > 1 and others and len(others[0]) > 1:
            uneven = delimiter
    if uneven:
        raise DataError(
            f"{path.name}: {uneven!r} parts the first line and the next one into different numbers of columns. Put "
            f"quotes around fields that hold {uneven!r}"
        )
    return ","


def split_fields(line: str, delimiter: str) -> list[str]:
    """Split one line of a .csv; none for a line that is no row by itself, as one with an open quotation mark."""
    try:
        return next(csv_module.reader([line], delimiter=delimiter), [])
    except csv_module.Error:
        return []


def csv(path: Path, task: Task, also: Collection[str] = ()) -> Iterator[Row]:
    """Read values between commas, semicolons, tabs or bars; the first line names the columns. The only column of a file
    may have any name. Blank rows are left out."""
    csv_module.field_size_limit(LONGEST_FIELD)
    delimiter = find_delimiter(path, task)
    texts = (line for _, line in lines(path))
    first = next(texts, "")
    first = "\n" if DECLARATION.fullmatch(first.strip("\r\n")) else first
    reader = csv_module.reader(itertools.chain([first], texts), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    number = 1
    try:
        for fields in reader:
            if fields != [""] and not any(field.strip() for field in fields):
                pass
            elif header is None:
                header = [task.field] if len(fields) == 1 else [name.strip() for name in fields]
            else:
                if len(fields) != len(header):
                    raise DataError(
                        f"{path.name}, row {number}: {len(fields)} fields, the first line names {len(header)}. "
                        f"Put quotes around fields that hold {delimiter!r}"
                    )
                yield Row(number, dict(zip(header, fields, strict=True)))
            number = reader.line_num + 1
    except csv_module.Error as error:
        raise DataError(f"{path.name}, row {number}: not CSV ({error}). Fix or remove the row") from None


def folder(path: Path, task: Task, also: Collection[str] = ()) -> Iterator[Row]:
    """Read a folder of images or of recordings: one subfolder per class, or all in one folder without labels."""
    if "arrays" in task.accepts and "images" not in task.accepts:
        yield from npy_folder(path, task)
        return
    kind: SampleKind = "audio" if "audio" in task.accepts else "images"
    if kind not in task.accepts:
        raise DataError(
            f"{path.name} is a folder in which no file holds rows, and task {task.name!r} reads no folders of "
            f"{kind}. Give a .jsonl file, with {task.field!r} in each row"
        )
    entries = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
    classes = [entry for entry in entries if entry.is_dir()]
    loose = [entry for entry in entries if is_sample(entry, kind)]
    if classes and loose:
        raise DataError(
            f"{path.name} holds both class folders ({classes[0].name}) and {kind} ({loose[0].name}). "
            f"Put every file into the folder of its class, or none"
        )
    files: list[tuple[Path, str | None]] = [(file, None) for file in loose]
    for entry in classes:
        files += [(file, entry.name) for file in sorted(entry.iterdir()) if is_sample(file, kind)]
    for number, (file, label) in enumerate(files, 1):
        yield Row(number, {task.field: file, **({} if label is None else {LABEL: label})})


def is_sample(path: Path, kind: SampleKind) -> bool:
    """Return whether a file holds a sample of this kind, by its name or by its content."""
    if path.name.startswith(".") or not path.is_file():
        return False
    if path.suffix.lower() in SUFFIXES[kind]:
        return True
    with path.open("rb") as file:
        return MAGIC[kind].match(file.read(16)) is not None
