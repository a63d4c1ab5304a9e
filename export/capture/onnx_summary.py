"""What an ONNX file takes and gives, and what to type to compress it; nothing is run."""

from collections import Counter
from pathlib import Path
from typing import Any

import onnx_ir as ir

from export.capture.onnx_interface import find_states, infer_layouts, read_axes, read_dtype
from export.capture.source_file import find_quantized_operators, has_half_precision, read_onnx
from laconic.errors import SourceError

COMMON = 6
"""Operators that are listed, the most frequent ones."""


def summarize_onnx(path: Path) -> dict[str, Any]:
    """Summarize an ONNX file, JSON-ready: its opset, operators, inputs and outputs, what stands in the way, and the
    command that compresses it. Raises SourceError for a file that does not read."""
    proto = read_onnx(path)
    model = ir.from_proto(proto)
    values = [value for value in model.graph.inputs if value.name not in model.graph.initializers]
    inputs = [describe_input(model, str(value.name), path) for value in values]
    obstacles = [each["obstacle"] for each in inputs if each["obstacle"]]
    if quantized := find_quantized_operators(proto):
        obstacles.append(f"it is quantized already ({', '.join(quantized)}): laconic export serves it as it is")
    operators = Counter(node.op_type for node in model.graph.all_nodes())
    names = ", ".join(f"{value.name}=..." for value in values)
    return {
        "file": str(path),
        "bytes": path.stat().st_size,
        "opset": model.opset_imports.get(""),
        "producer": " ".join(part for part in (model.producer_name, model.producer_version) if part),
        "half_precision": has_half_precision(model),
        "operators": dict(operators.most_common(COMMON)),
        "inputs": inputs,
        "outputs": [
            {"name": str(value.name), "shape": [str(axis) for axis in value.shape or ()]}
            for value in model.graph.outputs
        ],
        "states": find_states(model),
        "obstacles": obstacles,
        "samples": f"numpy.savez('samples.npz', {names}), the samples along axis 0",
        "command": f"laconic compress {path} --data samples.npz -o {path.with_suffix('.laconic').name}",
    }


def describe_input(model: ir.Model, name: str, path: Path) -> dict[str, Any]:
    """Describe one input: its dtype, its axes, which of them is the batch and which are free; or what is in doubt."""
    value = next(value for value in model.graph.inputs if value.name == name)
    described: dict[str, Any] = {"name": name, "dtype": "", "shape": [], "batch": "", "free": [], "obstacle": ""}
    try:
        axes = read_axes(value, path)
        described["shape"] = [axis if axis is not None else "?" for axis in axes]
        described["dtype"] = read_dtype(value, path)
        layout = infer_layouts(model, path, only=name)[0]
    except SourceError as error:
        return described | {"obstacle": str(error)}
    batch = axes[layout.place]
    return described | {
        "batch": f"axis {layout.place}" + (", fixed to one row" if batch == 1 else ""),
        "free": [place for place, axis in enumerate(axes) if place != layout.place and not isinstance(axis, int)],
    }
