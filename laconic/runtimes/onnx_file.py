"""A reader of the nodes, inputs and weights of an ONNX file that does not need the onnx package, which the server must
not import.

An ONNX file is a protocol buffer. This parses what the kernel audit and the engine builder need, by the field numbers
of onnx.proto, and skips the rest.
"""

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

GRAPH, PROPERTY = 7, 14
NODE, INITIALIZER, GRAPH_INPUT = 1, 5, 11
INPUT, NAME, KIND = 1, 3, 4
DIMS, DTYPE, TENSOR_NAME, RAW_DATA, EXTERNAL_DATA = 1, 2, 8, 9, 13
VALUE_NAME, VALUE_TYPE, TENSOR_TYPE, ELEMENT, SHAPE, AXIS, AXIS_SIZE, AXIS_NAME = 1, 2, 1, 1, 2, 1, 1, 2
ENTRY_KEY, ENTRY_VALUE = 1, 2
FIXED = {1: 8, 5: 4, 3: 0, 4: 0}
"""Bytes of the wire types of fixed size. What a group (3 to 4) holds is taken for fields of the message around it."""
Fields = Sequence[tuple[int, int, bytes]]
Parsed = TypeVar("Parsed")
Message = TypeVar("Message", bytes, memoryview)
VARINT_BITS = 70
"""The most bits of a varint with seven in each byte: ten bytes hold a number of 64."""
DTYPES = {1: "float32", 2: "int8", 3: "int8", 10: "float16", 16: "bfloat16"}
"""Element types of weights, by their number in onnx.proto; signed and unsigned INT8 are one arithmetic."""


@dataclass(frozen=True)
class Node:
    """A node of an ONNX graph. kind: its operator. weights: the types of the initializers that it reads, in order."""

    name: str
    kind: str
    weights: tuple[str, ...]


@dataclass(frozen=True)
class GraphInput:
    """An input of an ONNX graph. shape: an integer for a fixed axis, a name for a dynamic one. element: the number of
    its type in onnx.proto; 0 where it is not told."""

    name: str
    shape: tuple[int | str, ...]
    element: int = 0


@dataclass(frozen=True)
class Weight:
    """An initializer of an ONNX graph.

    dtype: its element type, empty for one that is not in `DTYPES`. data: its bytes, empty where they are stored in
    another form. file: the file beside the model that holds them instead, from byte `offset` on; empty for none.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes
    file: str = ""
    offset: int = 0


def read_nodes(path: Path) -> list[Node]:
    """Read the nodes of the main graph. Raises ValueError for a file that is not ONNX."""

    def parse(parts: Fields) -> list[Node]:
        dtypes = dict(parse_tensor(content) for number, _, content in parts if number == INITIALIZER)
        return [parse_node(content, dtypes) for number, _, content in parts if number == NODE]

    return parse_graph(path, parse)


def read_inputs(path: Path) -> list[GraphInput]:
    """Read the inputs of the main graph. Raises ValueError for a file that is not ONNX.

    A dynamic axis without a name is called after its input: `x.0`.
    """

    def parse(parts: Fields) -> list[GraphInput]:
        weights = {parse_tensor(content)[0].decode() for number, _, content in parts if number == INITIALIZER}
        inputs = [parse_input(content) for number, _, content in parts if number == GRAPH_INPUT]
        return [each for each in inputs if each.name not in weights]

    return parse_graph(path, parse)


def read_weights(path: Path) -> list[Weight]:
    """Read the initializers of the main graph. Raises ValueError for a file that is not ONNX."""
    return parse_graph(
        path, lambda parts: [parse_weight(content) for number, _, content in parts if number == INITIALIZER]
    )


def read_properties(path: Path) -> dict[str, str]:
    """Read the metadata of a model, by key. Raises ValueError for a file that is not ONNX."""
    try:
        entries = [content for number, _, content in parse_fields(path.read_bytes()) if number == PROPERTY]
        fields = [{field: inner.decode() for field, _, inner in parse_fields(entry)} for entry in entries]
    except (IndexError, KeyError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not an ONNX file") from error
    return {entry.get(ENTRY_KEY, ""): entry.get(ENTRY_VALUE, "") for entry in fields}


def parse_graph(path: Path, parse: Callable[[Fields], Parsed]) -> Parsed:
    """Parse the fields of the main graph with a function. Raises ValueError for a file that is not ONNX."""
    try:
        graph = next(content for number, _, content in parse_fields(path.read_bytes()) if number == GRAPH)
        return parse(list(parse_fields(graph)))
    except (IndexError, KeyError, StopIteration, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not an ONNX file") from error


def parse_input(message: bytes) -> GraphInput:
    """Parse an input of a graph."""
    found = {number: content for number, _, content in parse_fields(message)}
    name = found[VALUE_NAME].decode()
    content, element = found.get(VALUE_TYPE, b""), 0
    for field in (TENSOR_TYPE, SHAPE):
        fields = list(parse_fields(content))
        element = next((value for number, value, _ in fields if number == ELEMENT), 0)
        content = {number: inner for number, _, inner in fields}.get(field, b"")
    axes = [inner for number, _, inner in parse_fields(content) if number == AXIS]
    return GraphInput(name, tuple(parse_axis(axis, f"{name}.{place}") for place, axis in enumerate(axes)), element)


def parse_axis(message: bytes, unnamed: str) -> int | str:
    """Parse an axis of a shape: its size or its name; `unnamed` for one with neither."""
    for number, value, content in parse_fields(message):
        if number == AXIS_SIZE:
            return value
        if number == AXIS_NAME and content:
            return content.decode()
    return unnamed


def parse_weight(message: bytes) -> Weight:
    """Parse an initializer."""
    fields = list(parse_fields(message))
    name, dtype = parse_tensor(message)
    shape: list[int] = []
    external: dict[str, str] = {}
    data = b""
    for number, value, content in fields:
        if number == DIMS:
            shape += parse_packed(content) if content else [value]
        elif number == RAW_DATA:
            data = content
        elif number == EXTERNAL_DATA:
            entry = {field: inner.decode() for field, _, inner in parse_fields(content)}
            external[entry.get(ENTRY_KEY, "")] = entry.get(ENTRY_VALUE, "")
    offset = external.get("offset", "")
    start = int(offset) if offset.isdecimal() else 0
    return Weight(name.decode(), dtype, tuple(shape), data, external.get("location", ""), start)


def parse_tensor(message: bytes) -> tuple[bytes, str]:
    """Parse the name and the element type of an initializer; that of an attribute has no name."""
    fields = {
        number: (value, content) for number, value, content in parse_fields(message) if number in (DTYPE, TENSOR_NAME)
    }
    return fields.get(TENSOR_NAME, (0, b""))[1], DTYPES.get(fields[DTYPE][0], "")


def parse_node(message: bytes, dtypes: Mapping[bytes, str]) -> Node:
    """Parse a node. dtypes: element types of the initializers, by name."""
    items = list(parse_fields(message))
    named = {number: content.decode() for number, _, content in items if number in (NAME, KIND)}
    read = (content for number, _, content in items if number == INPUT)
    return Node(named.get(NAME, ""), named[KIND], tuple(dtypes[name] for name in read if name in dtypes))


def parse_fields(message: Message) -> Iterator[tuple[int, int, Message]]:
    """Parse the fields of a message: number, value if it is a varint, content otherwise."""
    place = 0
    while place < len(message):
        tag, place = parse_varint(message, place)
        if tag < 8:
            raise IndexError(f"there is no field 0, as before {place}")
        value, content = 0, message[:0]
        if tag & 7 == 0:
            value, place = parse_varint(message, place)
        else:
            size, place = parse_varint(message, place) if tag & 7 == 2 else (FIXED[tag & 7], place)
            content = message[place : place + size]
            place += size
        if place > len(message):
            raise IndexError(f"a field ends at {place}, after the message")
        yield tag >> 3, value, content


def parse_packed(content: bytes) -> list[int]:
    """Parse the varints of a packed field."""
    values, place = [], 0
    while place < len(content):
        value, place = parse_varint(content, place)
        values.append(value)
    return values


def parse_varint(message: bytes | memoryview, place: int) -> tuple[int, int]:
    """Parse a varint, seven bits a byte. Returns its value and the position after it. Raises IndexError for one that
    is cut off, or longer than a number of 64 bits."""
    value = 0
    for shift in range(0, VARINT_BITS, 7):
        byte = message[place]
        value |= (byte & 127) << shift
        place += 1
        if byte < 128:
            return value, place
    raise IndexError(f"a varint at {place} does not end")


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
