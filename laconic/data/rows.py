"""Rows of files parsed into samples; errors name the row."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from laconic.arrays import Array, Arrays
from laconic.data.dataset import RowSketch
from laconic.data.stored_rows import KIND, ParsedRow, Row
from laconic.errors import DataError, InputError
from laconic.hashing import digest_arrays, hash_of
from laconic.tasks.image_text import ImageText
from laconic.tasks.preference_text import PreferenceText
from laconic.tasks.processing import Processing
from laconic.tasks.row_parsing import is_file, strip_target
from laconic.tasks.task import Task


def parse_row(row: Row, task: Task, path: Path, *, sketched: bool = False) -> ParsedRow:
    """Parse, check and perhaps sketch one row of the file at `path`. Raises DataError with the row's number."""
    try:
        sources, label = task.read_row(row.values, path.parent)
        parsed = [task.parse(source) for source in sources]
        for sample in parsed:
            check_finite(sample, task.field)
        if label is not None and len(parsed) == 1:
            label = task.parse_label(label, parsed[0])
        # Image files are decoded again at each access; everything else is kept parsed.
        kept = tuple(source if is_file(source) else sample for source, sample in zip(sources, parsed, strict=True))
        key = hashlib.sha256(b"".join(digest_content(source) for source in kept)).hexdigest()[:32]
        sketch, kind = sketch_row(task, parsed) if sketched else None, parse_kind(row.values.get(KIND))
    except UnicodeEncodeError:
        raise DataError(
            f"{path.name}, row {row.number}: the text is not valid Unicode. Fix or remove the row"
        ) from None
    except (InputError, DataError) as error:
        raise DataError(f"{path.name}, row {row.number}: {str(error).rstrip('.')}. Fix or remove the row") from None
    return ParsedRow(
        row.number,
        kept,
        label,
        key,
        sketch,
        tuple(task.length(sample) for sample in parsed),
        tuple(sample_shape(sample) for sample in parsed),
        kind,
    )


def parse_kind(value: Any) -> str:
    """Parse the kind of a sample, a string or a number; "" where there is none. Raises InputError for anything else."""
    if value is None:
        return ""
    if not isinstance(value, (str, int, float)):
        raise InputError(f"expected a string under {KIND!r}, got {type(value).__name__}")
    return str(value)


def check_finite(sample: Any, field: str) -> None:
    """Raise InputError for an array with NaN or infinity, which would invalidate every calibrated range."""
    for name, array in sample.items() if isinstance(sample, Mapping) else [(field, sample)]:
        if isinstance(array, np.ndarray) and array.dtype.kind == "f" and not np.isfinite(array).all():
            raise InputError(f"{name!r} holds NaN or infinity")


def digest_content(source: Any) -> bytes:
    """Return the SHA-256 of a sample's content: its text, the bytes of its file, or its arrays. 32 bytes."""
    digest = hashlib.sha256()
    source = strip_target(source)
    if isinstance(source, Path):
        with source.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    if isinstance(source, bytes):
        digest.update(source)
    elif isinstance(source, np.ndarray):
        digest.update(f"{source.dtype}{source.shape}".encode() + np.ascontiguousarray(source).tobytes())
    elif isinstance(source, Mapping):
        for name in sorted(source):
            digest.update(name.encode() + digest_content(source[name]))
    elif isinstance(source, str):
        digest.update(source.encode())
        if isinstance(source, PreferenceText):
            digest.update(digest_content(source.rejected))
        if isinstance(source, ImageText):
            for image in source.images:
                digest.update(digest_content(image))
    else:
        digest.update(json.dumps(source, ensure_ascii=False).encode())
    return digest.digest()


def sample_shape(sample: Any) -> Any:
    """Return the shapes of a sample's arrays, which samples of one batch must share; empty for texts."""
    sample = strip_target(sample)
    if isinstance(sample, Mapping):
        return tuple((name, array.shape) for name, array in sorted(sample.items()))
    return sample.shape if isinstance(sample, np.ndarray) else ()


CELLS = 8
"""The most cells along each of the last two axes of an array, whose means stand for it."""
BLOCKS = 64
"""The most blocks of an array of one axis, whose means and magnitudes stand for it."""


def sketch_row(task: Processing, samples: Sequence[Any]) -> RowSketch:
    """Sketch a row of one sample or of two that are compared with each other. samples: parsed."""
    tensors = [task.encode_request(strip_target(sample)) for sample in samples]
    pairs = zip(samples, tensors, strict=True)
    parts = [part for sample, arrays in pairs for part in list_parts(strip_target(sample), arrays)]
    arrays = [part for part in parts if isinstance(part, np.ndarray)]
    return RowSketch(
        read=hash_of([digest_arrays(each) for each in tensors]),
        rest=digest_arrays({str(place): array for place, array in enumerate(arrays) if array.dtype.kind != "f"}),
        texts=tuple(part for part in parts if isinstance(part, str)),
        arrays=tuple(reduce_array(array) for array in arrays if array.dtype.kind == "f"),
    )


def list_parts(sample: Any, arrays: Arrays) -> list[Any]:
    """List the texts and arrays of a sample: of a text with an image those that a model reads, since many have the same
    text."""
    if isinstance(sample, ImageText):
        return list(arrays.values())
    if isinstance(sample, Mapping):
        return [sample[name] for name in sorted(sample)]
    return [str(part) for part in sample] if isinstance(sample, (tuple, list)) else [sample]


def reduce_array(array: Array) -> Array:
    """Return the numbers that stand for an array: the means of cells of its last two axes; of one axis the means and
    the magnitudes of blocks. Returns [numbers] float32."""
    if array.ndim < 2:
        blocks = np.array_split(array.ravel(), min(BLOCKS, max(array.size, 1)))
        means = [block.mean() for block in blocks]
        return np.array(
            [*means, *(np.abs(block).mean() for block in blocks)] if array.size > BLOCKS else means, np.float32
        )
    planes = array.reshape(-1, *array.shape[-2:])[:CELLS]
    for axis in (1, 2):
        size = planes.shape[axis]
        edges = np.linspace(0, size, min(size, CELLS) + 1).astype(int)
        widths = np.diff(edges).reshape([-1 if place == axis else 1 for place in range(3)])
        planes = np.add.reduceat(planes, edges[:-1], axis=axis, dtype=np.float32) / widths
    return planes.ravel().astype(np.float32)
