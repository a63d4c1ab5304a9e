"""A reader of the nodes of an ONNX file that does not need the onnx package, which the server must not import.

An ONNX file is a protocol buffer. This parses what the kernel audit needs, by the field numbers of onnx.proto, and
skips the rest.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

GRAPH = 7
NODE, INITIALIZER = 1, 5
INPUT, NAME, KIND = 1, 3, 4
DTYPE, TENSOR_NAME = 2, 8
FIXED = {1: 8, 5: 4}
"""Bytes of the wire types of fixed size."""
DTYPES = {1: "float32", 2: "int8", 3: "int8", 10: "float16", 16: "bfloat16"}
"""Element types of weights, by their number in onnx.proto; signed and unsigned INT8 are one arithmetic."""


@dataclass(frozen=True)
class Node:
    """A node of an ONNX graph. kind: its operator. weights: the types of the initializers that it reads, in order."""

    name: str
    kind: str
    weights: tuple[str, ...]


def read_nodes(path: Path) -> list[Node]:
    """Read the nodes of the main graph. Raises ValueError for a file that is not ONNX."""
    try:
        graph = next(content for number, _, content in parse_fields(path.read_bytes()) if number == GRAPH)
        parts = list(parse_fields(graph))
        dtypes = dict(parse_tensor(content) for number, _, content in parts if number == INITIALIZER)
        return [parse_node(content, dtypes) for number, _, content in parts if number == NODE]
    except (IndexError, KeyError, StopIteration, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not an ONNX file") from error


def parse_tensor(message: bytes) -> tuple[bytes, str]:
    """Parse the name and the element type of an initializer."""
    found = {
        number: (value, content) for number, value, content in parse_fields(message) if number in (DTYPE, TENSOR_NAME)
    }
    return found[TENSOR_NAME][1], DTYPES.get(found[DTYPE][0], "")


def parse_node(message: bytes, dtypes: Mapping[bytes, str]) -> Node:
    """Parse a node. dtypes: element types of the initializers, by name."""
    items = list(parse_fields(message))
    named = {number: content.decode() for number, _, content in items if number in (NAME, KIND)}
    read = (content for number, _, content in items if number == INPUT)
    return Node(named.get(NAME, ""), named[KIND], tuple(dtypes[name] for name in read if name in dtypes))


def parse_fields(message: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Parse the fields of a message: number, value if it is a varint, content otherwise."""
    place = 0
    while place < len(message):
        tag, place = parse_varint(message, place)
        value, content = 0, b""
        if tag & 7 == 0:
            value, place = parse_varint(message, place)
        else:
            size, place = parse_varint(message, place) if tag & 7 == 2 else (FIXED[tag & 7], place)
            content = message[place : place + size]
            place += size
        yield tag >> 3, value, content


def parse_varint(message: bytes, place: int) -> tuple[int, int]:
    """Parse a varint, seven bits a byte. Returns its value and the position after it."""
    value = shift = 0
    while True:
        byte = message[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value, place
