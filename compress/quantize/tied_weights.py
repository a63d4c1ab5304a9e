"""Heads that have the weight of an embedding (Press and Wolf, Using the Output Embedding to Improve Language Models,
2017)."""

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from laconic.quantization.graph import Graph, Layer


def find_tied_heads(graph: Graph, weights: Mapping[str, TensorProto] | None = None) -> dict[str, Layer]:
    """Find the linear layers whose weight is that of an embedding, transposed: by node, the embedding. weights: of the
    graph, by name; read from its file by default."""
    tables = [layer for layer in graph.layers if layer.kind == "Gather"]
    pairs = [
        (layer, table)
        for layer in graph.layers
        for table in tables
        if layer.kind == "MatMul" and layer.shape == table.shape[::-1]
    ]
    if pairs and weights is None:
        weights = {tensor.name: tensor for tensor in onnx.load(graph.path).graph.initializer}
    return {
        layer.node: table
        for layer, table in pairs
        if weights
        and np.array_equal(numpy_helper.to_array(weights[layer.weight]), numpy_helper.to_array(weights[table.weight]).T)
    }
