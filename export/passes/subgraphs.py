"""Tensors that a node reads in the bodies of If, Loop and Scan, which see all tensors of the graph around them."""

from collections.abc import Iterator

from onnx import GraphProto, NodeProto

MULTIPLIERS = frozenset({"MatMul", "Gemm", "Conv", "LSTM", "GRU", "RNN"})
"""Operators that multiply by weights."""


def read_tensors(node: NodeProto) -> Iterator[str]:
    """The names of the tensors that a node, or any node in its subgraphs, reads."""
    yield from node.input
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            yield from (value.name for value in graph.output)
            for inner in graph.node:
                yield from read_tensors(inner)


def count_inner_layers(graph: GraphProto) -> dict[str, int]:
    """Count the nodes that multiply by weights in the bodies of If, Loop and Scan, by the operator around them."""
    weights = {tensor.name for tensor in graph.initializer}
    counts: dict[str, int] = {}
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                known = weights | {tensor.name for tensor in inner.initializer}
                own = sum(each.op_type in MULTIPLIERS and not known.isdisjoint(each.input) for each in inner.node)
                nested = sum(count_inner_layers(inner).values())
                if own + nested:
                    counts[node.op_type] = counts.get(node.op_type, 0) + own + nested
    return counts
