"""Tensors that a node reads in the bodies of If, Loop and Scan, which see all tensors of the graph around them."""

from collections.abc import Iterator

from onnx import NodeProto


def read_tensors(node: NodeProto) -> Iterator[str]:
    """The names of the tensors that a node, or any node in its subgraphs, reads."""
    yield from node.input
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            yield from (value.name for value in graph.output)
            for inner in graph.node:
                yield from read_tensors(inner)
