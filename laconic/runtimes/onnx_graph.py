"""A whole ONNX graph with its attributes and weights, read without the onnx package: what an interpreter needs."""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from laconic.arrays import Array, Arrays
from laconic.runtimes.onnx_file import (
    GRAPH_INPUT,
    INITIALIZER,
    INPUT,
    KIND,
    NAME,
    NODE,
    VALUE_NAME,
    Fields,
    parse_fields,
    parse_graph,
    parse_packed,
    parse_weight,
)

GRAPH_OUTPUT, OUTPUT, ATTRIBUTE, DOMAIN = 12, 2, 5, 7
ATTRIBUTE_FLOAT, ATTRIBUTE_INT, ATTRIBUTE_STRING, ATTRIBUTE_TENSOR, ATTRIBUTE_FLOATS, ATTRIBUTE_INTS = 2, 3, 4, 5, 7, 8
SUBGRAPHS = (6, 11)
TENSOR_DTYPE, FLOAT_DATA, INT32_DATA, INT64_DATA = 2, 4, 5, 7
ELEMENTS: dict[int, type[np.generic]] = {
    1: np.float32,
    2: np.uint8,
    3: np.int8,
    5: np.int16,
    6: np.int32,
    7: np.int64,
    9: np.bool_,
    10: np.float16,
    11: np.float64,
}
"""Types of elements by their number in onnx.proto; of those that numpy lacks BF16 alone is read, as FP32."""
BFLOAT16 = 16

Attribute = int | float | str | tuple[int, ...] | tuple[float, ...] | Array


@dataclass(frozen=True)
class GraphNode:
    """A node. kind: its operator, with the domain before it where it is not ONNX's own: `com.microsoft.MatMulNBits`.
    An input that is left out is an empty name."""

    name: str
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Attribute]


@dataclass(frozen=True)
class OnnxGraph:
    """The main graph of a file: its nodes in the order in which they run, and the arrays of its initializers.

    bfloat16: the initializers in BF16, whose arrays are in FP32.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[GraphNode, ...]
    weights: Arrays
    bfloat16: frozenset[str] = frozenset()


def read_graph(path: Path) -> OnnxGraph:
    """Read the main graph of a file, with data that lies beside it.

    Raises ValueError for a file that is not ONNX, for data that is missing or lies outside the file's folder, and for
    nodes with graphs of their own.
    """

    def parse(fields: Fields) -> OnnxGraph:
        parts = {number: [content for n, _, content in fields if n == number] for number in (1, 5, 11, 12)}
        weights = dict(parse_array(content, path.parent) for content in parts[INITIALIZER])
        named = [parse_name(content) for content in parts[GRAPH_INPUT]]
        return OnnxGraph(
            tuple(name for name in named if name not in weights),
            tuple(parse_name(content) for content in parts[GRAPH_OUTPUT]),
            tuple(parse_graph_node(content, path.parent) for content in parts[NODE]),
            weights,
            frozenset(each.name for each in map(parse_weight, parts[INITIALIZER]) if each.dtype == "bfloat16"),
        )

    return parse_graph(path, parse)


def parse_name(message: bytes) -> str:
    """Parse the name of an input or output."""
    return next(content for number, _, content in parse_fields(message) if number == VALUE_NAME).decode()


def parse_graph_node(message: bytes, folder: Path) -> GraphNode:
    """Parse a node. folder: where data of tensors lies."""
    fields = list(parse_fields(message))
    text = {number: content.decode() for number, _, content in fields if number in (NAME, KIND, DOMAIN)}
    attributes = dict(parse_attribute(content, folder) for number, _, content in fields if number == ATTRIBUTE)
    domain = text.get(DOMAIN, "")
    return GraphNode(
        text.get(NAME, ""),
        f"{domain}.{text[KIND]}" if domain else text[KIND],
        tuple(content.decode() for number, _, content in fields if number == INPUT),
        tuple(content.decode() for number, _, content in fields if number == OUTPUT),
        attributes,
    )


def parse_attribute(message: bytes, folder: Path) -> tuple[str, Attribute]:
    """Parse an attribute: its name and value. Raises ValueError for a graph."""
    name = ""
    value: Any = None
    floats: list[float] = []
    integers: list[int] = []
    for number, varint, content in parse_fields(message):
        if number == 1:
            name = content.decode()
        elif number == ATTRIBUTE_FLOAT:
            value = struct.unpack("<f", content)[0]
        elif number == ATTRIBUTE_INT:
            value = make_signed(varint)
        elif number == ATTRIBUTE_STRING:
            value = content.decode()
        elif number == ATTRIBUTE_TENSOR:
            value = parse_array(content, folder)[1]
        elif number == ATTRIBUTE_FLOATS:
            floats += np.frombuffer(content, "<f4").tolist()
        elif number == ATTRIBUTE_INTS:
            integers += map(make_signed, parse_packed(content) if content else [varint])
        elif number in SUBGRAPHS:
            raise ValueError(f"its attribute {name!r} is a graph, as of a loop or a branch")
    return name, value if value is not None else tuple(floats or integers)


def parse_array(message: bytes, folder: Path) -> tuple[str, Array]:
    """Parse a tensor: its name and values. Raises ValueError for a type that numpy lacks, or data that is missing."""
    weight = parse_weight(message)
    fields = list(parse_fields(message))
    element = next((value for number, value, _ in fields if number == TENSOR_DTYPE), 0)
    if element not in ELEMENTS and element != BFLOAT16:
        raise ValueError(f"{weight.name} has elements of ONNX's type {element}, which is not read here")
    dtype, count = np.dtype(ELEMENTS.get(element, np.uint16)), math.prod(weight.shape)
    if weight.file:
        path = (folder / weight.file).resolve()
        if not path.is_relative_to(folder.resolve()) or not path.is_file():
            raise ValueError(
                f"the data of {weight.name}, {weight.file}, is missing, or lies outside the model's folder"
            )
        found = np.fromfile(path, dtype, count, offset=weight.offset)
    elif weight.data:
        found = np.frombuffer(weight.data, dtype)
    else:
        found = read_typed(fields).astype(dtype)
    if found.size != count:
        raise ValueError(f"{weight.name} has {found.size} elements, expected {count}")
    if element == BFLOAT16:  # the upper half of FP32
        found = (found.astype(np.uint32) << 16).view(np.float32)
    return weight.name, found.reshape(weight.shape)


def read_typed(fields: Fields) -> Array:
    """The elements of a tensor whose data is not in plain bytes."""
    integers: list[int] = []
    for number, varint, content in fields:
        if number == FLOAT_DATA:
            return np.frombuffer(content, "<f4")
        if number in (INT32_DATA, INT64_DATA):
            integers += map(make_signed, parse_packed(content) if content else [varint])
    return np.array(integers, np.int64)


def make_signed(varint: int) -> int:
    """A varint as a signed integer of 64 bits."""
    return varint - (1 << 64) if varint >> 63 else varint
