"""External data of ONNX files: the names of the files beside a model that hold its tensors."""

import mmap
from collections.abc import Iterator, Mapping
from typing import BinaryIO

from laconic.runtimes.onnx_file import ENTRY_KEY, ENTRY_VALUE, parse_fields

ENTRY = "StringStringEntryProto"
MESSAGES: Mapping[str, Mapping[int, str]] = {
    "ModelProto": {7: "GraphProto", 20: "TrainingInfoProto", 25: "FunctionProto"},
    "TrainingInfoProto": {1: "GraphProto", 2: "GraphProto"},
    "FunctionProto": {7: "NodeProto", 11: "AttributeProto"},
    "GraphProto": {1: "NodeProto", 5: "TensorProto", 15: "SparseTensorProto"},
    "NodeProto": {5: "AttributeProto"},
    "AttributeProto": {
        5: "TensorProto",
        6: "GraphProto",
        10: "TensorProto",
        11: "GraphProto",
        22: "SparseTensorProto",
        23: "SparseTensorProto",
    },
    "SparseTensorProto": {1: "TensorProto", 2: "TensorProto"},
    "TensorProto": {13: ENTRY},
    ENTRY: {},
}
"""Where external data can be named in a file, by onnx.proto: the fields of each message that lead there."""


MAX_FIELDS = 1_500_000
"""The most fields that are looked at, which takes a second; a model of 10,000 nodes has some 300,000."""


def find_external_files(file: BinaryIO) -> list[str]:
    """Return the locations of all external data of an ONNX file, also of tensors in subgraphs, functions and
    attributes. Raises ValueError for a file that is not ONNX."""
    try:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)  # weights are skipped, and not read
        entries = [{number: bytes(value) for number, _, value in parse_fields(one)} for one in find_entries(content)]
        return sorted({entry[ENTRY_VALUE].decode() for entry in entries if entry.get(ENTRY_KEY) == b"location"})
    except (IndexError, KeyError, ValueError) as error:  # ValueError of an empty file
        raise ValueError("it is not an ONNX file") from error


def find_entries(content: mmap.mmap) -> Iterator[memoryview]:
    """Yield the entries that describe external data in a model; in no recursion, since subgraphs nest at will."""
    pending = [("ModelProto", memoryview(content))]
    kinds, count = set(), 0
    while pending:
        kind, message = pending.pop()
        kinds.add(kind)
        if kind == ENTRY:
            yield message
            continue
        for number, _, inner in parse_fields(message):
            if number in MESSAGES[kind]:
                pending.append((MESSAGES[kind][number], inner))
            count += 1
            if count > MAX_FIELDS:
                raise ValueError(f"it has more than {MAX_FIELDS:,} fields")
    if "GraphProto" not in kinds:
        raise ValueError("it holds no graph")
