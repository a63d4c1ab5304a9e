"""Weights that may be stored in fewer bits, while arithmetic stays in float: those of recurrent layers and transposed
convolutions, and those that the bodies of If, Loop and Scan read."""

import sys
from collections.abc import Iterator

import onnx_ir as ir
from onnxscript.optimizer import fold_constants

from laconic.quantization.graph import StoredWeight

RECURRENT = frozenset({"LSTM", "GRU", "RNN"})
CONTROL_FLOW = frozenset({"If", "Loop", "Scan"})
LEAST = 1024
"""Weights with fewer numbers are left as they are: the nodes that restore them would take what they save."""


def fold_recurrent_weights(model: ir.Model) -> None:
    """Fold what computes the weights of recurrent layers from constants, in place, whatever their size: PyTorch's
    exporter may reorder the gates in the graph."""
    folded: set[ir.Node] = set()
    pending = [value for node in model.graph.all_nodes() if node.op_type in RECURRENT for value in node.inputs[1:3]]
    while pending:
        value = pending.pop()
        producer = None if value is None else value.producer()
        if producer is not None and producer not in folded:
            folded.add(producer)
            pending += producer.inputs
    if folded:
        fold_constants(model, should_fold=folded.__contains__, output_size_limit=sys.maxsize)


def find_stored_weights(graph: ir.Graph) -> dict[str, tuple[StoredWeight, ...]]:
    """Find the weights that may be stored in fewer bits by the node of the graph that reads them first, itself or in a
    body; without those that other nodes of the graph read, too."""
    weights: dict[str, tuple[StoredWeight, ...]] = {}
    taken = {value for node in graph if not is_stored_kind(node) for value in node.inputs} | set(graph.outputs)
    for node in filter(is_stored_kind, graph):
        readers = list(iterate_bodies(node)) if node.op_type in CONTROL_FLOW else [node]
        read = [(value, describe_weight(each, place)) for each in readers for place, value in enumerate(each.inputs)]
        stored = {
            value: weight
            for value, weight in read
            if weight is not None and value not in taken and graph.initializers.get(weight.name) is value
        }
        taken.update(value for value, _ in read)
        if stored:
            weights[str(node.name)] = tuple(stored.values())
    return weights


def is_stored_kind(node: ir.Node) -> bool:
    """Return whether the arithmetic of a node with weights stays in float."""
    return node.domain == "" and node.op_type in RECURRENT | CONTROL_FLOW | {"ConvTranspose"}


def iterate_bodies(node: ir.Node) -> Iterator[ir.Node]:
    """Yield the nodes in the bodies of a node, and in the bodies of those."""
    for attribute in node.attributes.values():
        if isinstance(attribute, ir.Attr) and attribute.type == ir.AttributeType.GRAPH:
            yield from attribute.as_graph().all_nodes()


def describe_weight(node: ir.Node, place: int) -> StoredWeight | None:
    """Describe the weight that a node reads as input `place`; None where that is no weight, or one that is too
    small."""
    value = node.inputs[place]
    tensor = None if value is None or not value.is_initializer() else value.const_value
    if value is None or tensor is None or tensor.dtype != ir.DataType.FLOAT or tensor.size < LEAST or node.domain != "":
        return None
    shape = tuple(tensor.shape.numpy())
    axes = find_shared_axes(node, place, len(shape))
    return StoredWeight(str(value.name), shape, axes) if axes else None


def find_shared_axes(node: ir.Node, place: int, rank: int) -> tuple[int, ...]:
    """Find the axes along which the numbers of a weight share a scale; none where input `place` is no weight."""
    match node.op_type, place:
        case (("LSTM" | "GRU" | "RNN"), (1 | 2)):
            return (2,)
        case "MatMul", 1:
            return (rank - 2,) if rank > 1 else ()
        case "Gemm", 1:
            return (1,) if node.attributes.get_int("transB", 0) else (0,)
        case ("Conv", 1) | ("Gather", 0):
            return tuple(range(1, rank))
        case "ConvTranspose", 1:
            return (0, *range(2, rank))
    return ()
