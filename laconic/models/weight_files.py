"""Weight files read in parts: the digest of their tensors, and whether all values are numbers."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from laconic.arrays import Array
from laconic.hashing import hash_of

PART = 2**20
"""Bytes that are read at once: a multiple of the size of each dtype."""
BF16_EXPONENT = 0x7F80
FLOATS: Mapping[str, tuple[str, Callable[[Array], Any]]] = {
    "F64": ("<f8", np.isfinite),
    "F32": ("<f4", np.isfinite),
    "F16": ("<f2", np.isfinite),
    "BF16": ("<u2", lambda bits: (bits & BF16_EXPONENT) != BF16_EXPONENT),
}
"""Of each dtype of safetensors that has values which are no numbers, the numpy dtype of its bytes, and what tells which
are numbers. Those in eight bits have no infinity, and are no weights that are trained."""


class WeightScan(NamedTuple):
    """What reading weight files tells. digest: of the tensors' names, dtypes, shapes and values, however they are
    spread over files. finite: whether all values are numbers."""

    digest: str
    finite: bool


def scan_weights(files: Sequence[Path]) -> WeightScan:
    """Read all tensors of safetensors files that are known to read.

    Through the module, reading would leave its weights resident where they are mapped from the file: 91 MB of MiniLM.
    """
    found: list[list[Any]] = []
    finite = True
    for path in files:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                begin, end = entry["data_offsets"]
                file.seek(8 + size + begin)
                digest, is_finite = scan_values(file, end - begin, str(entry["dtype"]))
                found.append([name, entry["dtype"], entry["shape"], digest])
                finite &= is_finite
    return WeightScan(hash_of(sorted(found)), finite)


def scan_values(file: BinaryIO, size: int, dtype: str) -> WeightScan:
    """Read the next `size` bytes, values of a dtype."""
    digest, finite = hashlib.sha256(), True
    for start in range(0, size, PART):
        part = file.read(min(PART, size - start))
        digest.update(part)
        if dtype in FLOATS:
            kind, are_finite = FLOATS[dtype]
            finite &= bool(are_finite(np.frombuffer(part, kind)).all())
    return WeightScan(digest.hexdigest(), finite)
