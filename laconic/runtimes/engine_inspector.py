"""Parse the layers of a TensorRT engine from the JSON of its engine inspector, built with detailed verbosity.

The form is NVIDIA's documentation of TensorRT 10 and 11: `Format/Datatype` of a tensor became `Format` and `DataType`.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from laconic.runtimes.runtime import Kernel

MOVES = frozenset({"Constant", "NoOp", "Reformat", "Shape", "Shuffle", "ShapeHostToDevice"})
"""Kinds of layers that only move numbers."""
SEPARATORS = re.compile(r"[\x1e\x1f]")
ONNX_NODE = re.compile(r"\[ONNX Layer: (.*?)\](?=\s*(?:\[ONNX Layer: |$))", re.DOTALL)
TACTIC = re.compile(r"_(?:i8|u8|e4m3|e5m2|bf16|f16|f32|tf32)+_(i8|e4m3|bf16|f16|tf32|f32)(?:i32|f32|f16)_")
"""Types in the name of a kernel: of input and output, then of the products and of their sums."""
TYPES = {
    "i8": "int8",
    "e4m3": "float8",
    "bf16": "bfloat16",
    "f16": "float16",
    "tf32": "float32",
    "f32": "float32",
    "int8": "int8",
    "fp8": "float8",
    "bfloat16": "bfloat16",
    "half": "float16",
    "fp16": "float16",
    "float": "float32",
    "fp32": "float32",
}
"""Arithmetic by the name of a type, in the name of a kernel or in the description of a tensor, in lower case."""


def parse_kernels(text: str) -> list[Kernel]:
    """Parse the kernels of an engine: one for each ONNX node that a layer computes.

    The arithmetic is that in the name of the kernel, or else the type of the layer's first input. Text that is not in
    the form of the inspector, or has only the names of layers, gives an empty list.
    """
    try:
        content = json.loads(text)
    except ValueError:
        return []
    layers = content.get("Layers", []) if isinstance(content, dict) else []
    return [
        kernel
        for layer in (layers if isinstance(layers, list) else [])
        if isinstance(layer, dict) and layer.get("LayerType") not in MOVES
        for kernel in parse_layer(layer)
    ]


def parse_layer(layer: Mapping[str, Any]) -> Iterator[Kernel]:
    """Parse the kernels of one layer; none if its arithmetic is not known."""
    tactic = str(layer.get("TacticName") or "")
    match = TACTIC.search(f"{tactic}_")
    precision = TYPES[match[1]] if match else read_type(layer.get("Inputs"))
    if precision:
        kind = tactic or str(layer.get("LayerType") or "")
        yield from (Kernel(node, kind, precision) for node in read_nodes_of(layer))


def read_nodes_of(layer: Mapping[str, Any]) -> list[str]:
    """Read the ONNX nodes of a layer: of its metadata, or else the parts of its name."""
    parts = SEPARATORS.split(str(layer.get("Metadata") or ""))
    nodes = [name for part in parts for name in ONNX_NODE.findall(part.strip())]
    names = nodes or [part.strip() for part in str(layer.get("Name") or "").split(" + ")]
    return list(dict.fromkeys(name for name in names if name))


def read_type(inputs: Any) -> str:
    """Read the arithmetic that the first input of a layer stands for; empty if it is not told."""
    first = inputs[0] if isinstance(inputs, list) and inputs and isinstance(inputs[0], dict) else {}
    for key in ("DataType", "Format/Datatype", "Format"):
        for word in re.findall(r"[a-z]+\d*", str(first.get(key, "")).lower()):
            if word in TYPES:
                return TYPES[word]
    return ""
