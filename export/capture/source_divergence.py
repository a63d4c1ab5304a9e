"""The first node at which the float graph differs from the ONNX file that it was imported from."""

import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import onnx
import onnx_ir as ir
from onnx import ModelProto, ValueInfoProto

from export.capture.parity import PARITY, relative_difference
from export.passes.optimize import name_nodes
from laconic.arrays import Arrays
from laconic.errors import CaptureError, RuntimeFailure
from laconic.runtimes.onnxruntime import OnnxRuntime
from laconic.runtimes.runtime import Session


def find_source_divergence(file: Path, graph: Path, samples: Iterable[Arrays]) -> str:
    """Find the first node of a file whose output differs in the graph by more than PARITY of its largest value; empty
    where none does that both have under one name.

    samples: inputs of one row each.
    """
    model = ir.load(file)
    name_nodes(model.graph)
    source, target = ir.to_proto(model), onnx.load(graph)
    theirs = {node.name: node.output[0] for node in target.graph.node if node.output}
    pairs = [(node.name, node.output[0], theirs[node.name]) for node in source.graph.node if node.name in theirs]
    with ExitStack() as stack:
        one = stack.enter_context(open_exposed(source, [tensor for _, tensor, _ in pairs]))
        other = stack.enter_context(open_exposed(target, [tensor for _, _, tensor in pairs]))
        for inputs in samples:
            expected, actual = one.run(inputs), other.run(inputs)
            for name, tensor, counterpart in pairs:
                try:
                    error = relative_difference({name: expected[tensor]}, {name: actual[counterpart]})
                except (CaptureError, TypeError):  # another shape, or no numbers: it is no counterpart
                    continue
                if not error <= PARITY:
                    return str(name)
    return ""


def open_exposed(model: ModelProto, tensors: list[str]) -> Session:
    """Open a model in ONNX Runtime with further tensors as outputs. Raises RuntimeFailure."""
    known = {value.name for value in model.graph.output}
    model.graph.output.extend(ValueInfoProto(name=name) for name in dict.fromkeys(tensors) if name not in known)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "exposed.onnx"
        try:
            onnx.save(model, path, save_as_external_data=True, location="exposed.data")
        except ValueError as error:
            raise RuntimeFailure(f"the graph cannot be written with its inner tensors: {error}") from error
        return OnnxRuntime().open(path, optimize=False)
