"""File formats of samples, read row by row. A new format is a function `(path, task, also)` and a line in the registry.

also: columns to read beside those that the task names. Text must be UTF-8. Errors name a row by the line that it starts
on, from 1; in formats without lines by its number.
"""

import csv as csv_module
import json
import zipfile
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np

from laconic.arrays import Array
from laconic.data.rows import Row
from laconic.errors import DataError, InputError
from laconic.registry import did_you_mean
from laconic.tasks.row_parsing import LABEL, SampleKind
from laconic.tasks.task import Task
from laconic.tensor import TensorSpec
from laconic.units import format_bytes

MAX_EXPANSION, MIN_EXPANDED = 50, 2**28
"""How many times its size an .npz or Parquet file may expand to, once that is more bytes than MIN_EXPANDED. Images of
digits as float32 expand 7 times, with a wide empty margin 20 times."""

SUFFIXES: dict[SampleKind, tuple[str, ...]] = {
    "images": (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"),
    "audio": (".wav", ".flac", ".ogg", ".oga", ".mp3"),
}
"""Of the files in folders of samples, by what they hold."""


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


def jsonl(path: Path, task: Task, also: Collection[str] = ()) -> Iterator[Row]:
    """Read one JSON object per line; empty lines are left out."""
    for number, line in lines(path):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise DataError(f"{path.name}, row {number}: not JSON ({error}). Fix or remove the row") from None
        if not isinstance(values, dict):
            raise DataError(
                f"{path.name}, row {number}: expected an object as {{{task.field!r}: ...}}, "
                f"got {type(values).__name__}. Fix or remove the row"
            )
        yield Row(number, values)


DELIMITERS = (",", ";", "\t", "|")
"""Between the columns of a .csv, the first that the first line holds: Excel writes semicolons in much of Europe."""
LONGEST_FIELD = 2**24
"""Characters of one field. The module's own limit, 131,072, is less than a long document."""


def find_delimiter(path: Path, task: Task) -> str:
    """Find what stands between the columns of a file: the comma, unless the first line has none and names the task's
    columns, or as many as the next line has, by another delimiter."""
    rows = [line for _, (_, line) in zip(range(2), lines(path), strict=False)]
    for delimiter in DELIMITERS:
        header, *others = (split_fields(row, delimiter) for row in rows or [""])
        known = {task.field, *task.columns} & {name.strip() for name in header}
        if len(header) > 1 and (delimiter == "," or known or [len(row) for row in others] == [len(header)]):
            return delimiter
    return ","


def split_fields(line: str, delimiter: str) -> list[str]:
    """Split one line of a .csv; none for a line that is no row by itself, as one with an open quotation mark."""
    try:
        return next(csv_module.reader([line], delimiter=delimiter), [])
    except csv_module.Error:
        return []


def csv(path: Path, task: Task, also: Collection[str] = ()) -> Iterator[Row]:
    """Read values between commas, semicolons, tabs or bars; the first line names the columns. The only column of a file
    may have any name."""
    csv_module.field_size_limit(LONGEST_FIELD)
    delimiter = find_delimiter(path, task)
    reader = csv_module.reader((line for _, line in lines(path)), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    number = 1
    try:
        for fields in reader:
            if header is None:
                header = [task.field] if len(fields) == 1 else [name.strip() for name in fields]
            elif fields:
                if len(fields) != len(header):
                    raise DataError(
                        f"{path.name}, row {number}: {len(fields)} fields, the first line names {len(header)}. "
                        f"Put quotes around fields that hold {delimiter!r}"
                    )
                yield Row(number, dict(zip(header, fields, strict=True)))
            number = reader.line_num + 1
    except csv_module.Error as error:
        raise DataError(f"{path.name}, row {number}: not CSV ({error}). Fix or remove the row") from None


def npz(path: Path, task: Task, also: Collection[str] = ()) -> Iterator[Row]:
    """Read arrays named as the model's inputs, and `label`; axis 0 is the samples."""
    refuse_unless(task, "arrays", path)
    arrays = load_arrays(path)
    labels = arrays.pop(LABEL, None)
    specs = {spec.name: spec for spec in task.inputs}
    for name in arrays:
        if name not in specs:
            raise DataError(f"{path.name} holds {name!r}, which is no input of the model. {did_you_mean(name, specs)}")
    for name in specs:
        if name not in arrays:
            raise DataError(f"{path.name} lacks input {name!r}: it must hold an array for each of {list(specs)}")
    sizes: dict[str, int] = {}
    for name, array in arrays.items():
        check_samples(path, specs[name], array, sizes)
    count = len(next(iter(arrays.values())))
    for name, array in {**arrays, **({} if labels is None else {LABEL: labels})}.items():
        if array.ndim == 0 or len(array) != count:
            raise DataError(f"{path.name}: {name!r} has shape {list(array.shape)}, expected {count} along axis 0")
    for index in range(count):
        row = {task.field: task.from_arrays({name: array[index] for name, array in arrays.items()})}
        if labels is not None:
            row[LABEL] = labels[index].tolist()
        yield Row(index + 1, row)


def load_arrays(path: Path) -> dict[str, Array]:
    """Load every array of a .npz file. Raises DataError; Python objects are refused, since unpickling them executes
    code."""
    try:
        # Opened here, because numpy leaves the files open that it cannot read.
        with path.open("rb") as raw:
            file = np.load(raw, allow_pickle=False)
            if isinstance(file, np.ndarray):
                raise DataError(f"{path.name} is a single array: write it with numpy.savez, under the input's name")
            check_expansion(path, sum(entry.file_size for entry in file.zip.infolist()))
            return {name: file[name] for name in file.files}
    except (
        ValueError,
        OSError,
        EOFError,
        KeyError,
        RuntimeError,
        MemoryError,
        zlib.error,
        zipfile.BadZipFile,
    ) as error:
        raise DataError(
            f"{path.name} does not read as .npz: {error}. Write it anew with numpy.savez, arrays of numbers by the "
            f"names of the inputs"
        ) from None


def check_expansion(path: Path, expanded: int) -> None:
    """Raise DataError for a file that expands to many times its size: a few megabytes can hold terabytes."""
    if expanded > MIN_EXPANDED and expanded > MAX_EXPANSION * (size := path.stat().st_size):
        raise DataError(
            f"{path.name} expands from {format_bytes(size)} to {format_bytes(expanded)} or more; expected at most "
            f"{MAX_EXPANSION} times its size. If the samples are meant to be so, write them without compression"
        )


def check_samples(path: Path, spec: TensorSpec, array: Array, sizes: dict[str, int]) -> None:
    """Raise DataError unless each `array[i]` is a sample of this input. sizes: free axes seen so far; extended here."""
    if array.ndim == 0 or len(array) == 0:
        raise DataError(f"{path.name}: input {spec.name!r} holds no samples along its first axis")
    try:
        spec.check(array[:1], sizes)
    except InputError as error:
        hint = f". Save it with .astype({spec.dtype!r})" if array.dtype != np.dtype(spec.dtype) else ""
        raise DataError(f"{path.name}: {error}{hint}") from None


def folder(path: Path, task: Task, also: Collection[str] = ()) -> Iterator[Row]:
    """Read a folder of images or of recordings: one subfolder per class, or all in one folder without labels."""
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
    """Return whether a file's name says that it holds a sample of this kind."""
    return path.suffix.lower() in SUFFIXES[kind] and not path.name.startswith(".") and path.is_file()


def refuse_unless(task: Task, kind: SampleKind, path: Path) -> None:
    """Raise DataError for a file that holds samples of one kind only, where the task does not read that kind."""
    if kind not in task.accepts:
        reads = " or ".join(sorted(task.accepts)) or "neither texts, images nor arrays"
        raise DataError(
            f"{path.name} holds {kind}, task {task.name!r} reads {reads}. Give a .jsonl file, with {task.field!r} in "
            f"each row"
        )
