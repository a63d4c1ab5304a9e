"""Files of arrays: .npz, also with samples of several shapes, and folders of .npy files."""

import itertools
import json
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from laconic.arrays import Array
from laconic.data.stored_rows import Row
from laconic.errors import DataError, InputError, did_you_mean
from laconic.tasks.row_parsing import LABEL, SampleKind
from laconic.tasks.task import Task
from laconic.tensor import TensorSpec
from laconic.units import format_bytes

MAX_EXPANSION, MIN_EXPANDED = 50, 2**28
"""How many times its size an .npz or Parquet file may expand to, once that is more bytes than MIN_EXPANDED. Images of
digits as float32 expand 7 times, with a wide empty margin 20 times."""
SHAPES, OFFSETS = "_shapes", "_offsets"
"""What is appended to the name of an input for the array that divides its values into samples of several shapes."""
PEEKED = 64
"""Samples whose shapes tell the axes of a model's inputs."""

Rows = Sequence[Array]


def npz(path: Path, task: Task, also: Collection[str] = ()) -> Iterator[Row]:
    """Read arrays named as the model's inputs, and `label`; axis 0 is the samples.

    Samples of several shapes: all values one after the other, with NAME_shapes [samples, axes]; or, where the first
    axis alone differs, joined along it, with NAME_offsets [samples + 1]: where each begins, and the last one ends.
    """
    refuse_unless(task, "arrays", path)
    arrays = dict(divide(path, load_arrays(path)))
    labels = arrays.pop(LABEL, None)
    specs = {spec.name: spec for spec in task.inputs}
    inputs = {name: rows for name, rows in arrays.items() if name not in task.constants}
    for name in inputs:
        if name not in specs:
            raise DataError(f"{path.name} holds {name!r}, which is no input of the model. {did_you_mean(name, specs)}")
    for name in specs:
        if name not in inputs:
            raise DataError(f"{path.name} lacks input {name!r}: it must hold an array for each of {list(specs)}")
    count = len(next(iter(inputs.values())))
    check_samples(path, specs, inputs)
    for name, rows in arrays.items():
        if len(rows) != count:
            raise DataError(f"{path.name}: {name!r} holds {len(rows)} samples along axis 0, expected {count}")
    if labels is not None and len(labels) != count:
        raise DataError(f"{path.name}: {LABEL!r} holds {len(labels)} samples along axis 0, expected {count}")
    for index in range(count):
        row = {task.field: task.from_arrays({name: rows[index] for name, rows in arrays.items()})}
        if labels is not None:
            row[LABEL] = np.asarray(labels[index]).tolist()
        yield Row(index + 1, row)


def divide(path: Path, arrays: Mapping[str, Array]) -> Iterator[tuple[str, Rows]]:
    """Yield the samples of each array by name. Raises DataError for one without samples, or that does not divide so."""
    for name, array in arrays.items():
        stem = name.removesuffix(SHAPES).removesuffix(OFFSETS)
        if stem != name and stem in arrays:
            continue
        if (shapes := arrays.get(name + SHAPES)) is not None:
            yield name, divide_by_shapes(path, name, array, shapes)
        elif (offsets := arrays.get(name + OFFSETS)) is not None:
            yield name, divide_by_offsets(path, name, array, offsets)
        elif array.ndim == 0 or len(array) == 0:
            raise DataError(f"{path.name}: {name!r} holds no samples along its first axis")
        else:
            yield name, list(array)


def divide_by_shapes(path: Path, name: str, values: Array, shapes: Array) -> Rows:
    """Divide values that stand one after the other into samples. shapes: [samples, axes]."""
    is_valid = values.ndim == 1 and shapes.ndim == 2 and len(shapes) > 0 and shapes.dtype.kind in "iu"
    if not is_valid or (shapes < 0).any() or shapes.prod(axis=1, dtype=np.float64).sum() != len(values):
        raise DataError(
            f"{path.name}: {name + SHAPES!r} must give the shape of each sample, [samples, axes], of the "
            f"{values.size} values of {name!r} in one axis"
        )
    ends = shapes.prod(axis=1).cumsum()
    return [part.reshape(shape) for part, shape in zip(np.split(values, ends[:-1]), shapes.tolist(), strict=True)]


def divide_by_offsets(path: Path, name: str, values: Array, offsets: Array) -> Rows:
    """Divide samples that are joined along their first axis. offsets: [samples + 1]."""
    is_valid = values.ndim > 0 and offsets.ndim == 1 and len(offsets) > 1 and offsets.dtype.kind in "iu"
    if not is_valid or offsets[0] != 0 or offsets[-1] != len(values) or (np.diff(offsets.astype(np.int64)) < 0).any():
        raise DataError(
            f"{path.name}: {name + OFFSETS!r} must begin with 0, rise, and end with the size of the first axis of "
            f"{name!r}, {list(values.shape)}: where each sample begins, and the last one ends"
        )
    return np.split(values, offsets[1:-1])


def npy_folder(path: Path, task: Task) -> Iterator[Row]:
    """Read a folder with a .npy file for each sample, in the order of their names; for several inputs, with a folder
    named as each of them, which hold files of the same names."""
    names = [spec.name for spec in task.inputs]
    files = {name: list_npy(path / name) for name in names} if len(names) > 1 else {names[0]: list_npy(path)}
    stems = {name: [file.name for file in each] for name, each in files.items()}
    first = stems[names[0]]
    for name, each in stems.items():
        if each != first or not each:
            expected = f"a folder for each of {names}, with the same .npy files" if len(names) > 1 else ".npy files"
            raise DataError(f"{path.name}: expected {expected}; there are {len(each)} for {name!r}")
    for number, row in enumerate(zip(*files.values(), strict=True), 1):
        yield Row(
            number,
            {task.field: task.from_arrays({name: load_npy(file) for name, file in zip(names, row, strict=True)})},
        )


def list_npy(folder: Path) -> list[Path]:
    """Return the .npy files in a folder, sorted; none where there is no folder."""
    return sorted(file for file in folder.glob("*.npy") if not file.name.startswith(".")) if folder.is_dir() else []


def load_npy(path: Path) -> Array:
    """Load one array. Raises DataError for what is none."""
    try:
        return np.asarray(np.load(path, allow_pickle=False))
    except (ValueError, OSError, EOFError) as error:
        raise DataError(f"{path.name} does not read as .npy: {error}. Write it anew with numpy.save") from None


def peek_arrays(path: Path) -> dict[str, Rows]:
    """Return the arrays of the first samples of a file, by input, as they are; none for a file without arrays.

    A .jsonl row holds them in `inputs`, by name.
    """
    if path.suffix.lower() == ".npz":
        return {name: rows[:PEEKED] for name, rows in divide(path, load_arrays(path)) if name != LABEL}
    if path.suffix.lower() != ".jsonl":
        return {}
    peeked: dict[str, list[Array]] = {}
    with path.open("rb") as file:
        for line in itertools.islice(file, PEEKED):
            try:
                inputs = json.loads(line)["inputs"]
                arrays = {name: np.asarray(value) for name, value in inputs.items()}
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                continue
            for name, array in arrays.items():
                peeked.setdefault(name, []).append(array)
    return dict(peeked)


def read_npz(path: Path) -> dict[str, Array] | None:
    """Read every array of a .npz file; None for anything else, or where there is no file. Raises DataError."""
    return load_arrays(path) if path.suffix.lower() == ".npz" and path.is_file() else None


def load_arrays(path: Path) -> dict[str, Array]:
    """Every array of a .npz file. Raises DataError; Python objects are refused, since unpickling them executes code."""
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
            f"names of the inputs; samples x of several shapes as x=numpy.concatenate([a.ravel() for a in x]), "
            f"x_shapes=[a.shape for a in x]"
        ) from None


def check_expansion(path: Path, expanded: int) -> None:
    """Raise DataError for a file that expands to many times its size: a few megabytes can hold terabytes."""
    if expanded > MIN_EXPANDED and expanded > MAX_EXPANSION * (size := path.stat().st_size):
        raise DataError(
            f"{path.name} expands from {format_bytes(size)} to {format_bytes(expanded)} or more; expected at most "
            f"{MAX_EXPANSION} times its size. If the samples are meant to be so, write them without compression"
        )


def check_samples(path: Path, specs: Mapping[str, TensorSpec], inputs: Mapping[str, Rows]) -> None:
    """Raise DataError unless the first sample, and each that differs in shape, is one of the model's inputs."""
    for index in range(len(next(iter(inputs.values())))):
        if index and not any(
            rows[index].shape != rows[index - 1].shape for rows in inputs.values() if index < len(rows)
        ):
            continue
        sizes: dict[str, int] = {}
        for name, rows in inputs.items():
            if index >= len(rows):
                continue
            array, spec = np.asarray(rows[index])[None], specs[name]
            try:
                spec.check(array, sizes)
            except InputError as error:
                hint = f". Save it with .astype({spec.dtype!r})" if array.dtype != np.dtype(spec.dtype) else ""
                raise DataError(f"{path.name}: {error}{hint}") from None


def refuse_unless(task: Task, kind: SampleKind, path: Path) -> None:
    """Raise DataError for a file that holds samples of one kind only, where the task does not read that kind."""
    if kind not in task.accepts:
        reads = " or ".join(sorted(task.accepts)) or "neither texts, images nor arrays"
        raise DataError(
            f"{path.name} holds {kind}, task {task.name!r} reads {reads}. Give a .jsonl file, with {task.field!r} in "
            f"each row"
        )
